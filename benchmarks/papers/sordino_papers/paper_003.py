"""Paper 003 (DP-FedSAM): its comparison, scaled to two CPU cores, every method at the same epsilon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from sordino.config import TaskSpec
from sordino.data.partition import Dirichlet, Natural
from sordino.data.task import Records, Task
from sordino.models import DpMnistCnn
from sordino.parts.denoise import SparsifyMean
from sordino.parts.samplers import Poisson
from sordino.parts.schedules import Decay
from sordino.parts.sparsify import PublicDataMask, SparsifyUpdate
from sordino.plan import Plan
from sordino.privacy.certificate import default_delta
from sordino.recipes import blur, dp_fed_avg, dp_fed_sam, dp_fed_sam_top_k, fed_smp
from sordino_papers.cells import Cell, Job, Results, Row, Table
from sordino_papers.claims import beats, common, every
from sordino_papers.verdicts import verdict

RHO = 0.01
METHODS: dict[str, tuple[Callable[..., Plan], dict[str, Any]]] = {
    "DP-FedAvg": (dp_fed_avg, {"momentum": 0.5, "weight_decay": 5e-4}),
    "DP-FedSAM": (dp_fed_sam, {"rho": RHO}),
    "DP-FedSAM, ASAM": (dp_fed_sam, {"rho": 0.1, "adaptive": True}),
    "top_k of the update": (dp_fed_sam_top_k, {"rho": RHO, "sparsify": SparsifyUpdate(0.4)}),
    "top_k of the mean": (dp_fed_sam, {"rho": RHO, "denoiser": SparsifyMean(0.4)}),
    "top_k by public mask": (dp_fed_sam_top_k, {"rho": RHO}),
    "Fed-SMP-rand_k": (fed_smp, {}),
    "Fed-SMP-top_k": (fed_smp, {"mask": PublicDataMask()}),
    "BLUR": (blur, {"strength": 0.1}),
    "BLUR+LUS": (blur, {"strength": 0.1, "sparsify": SparsifyUpdate(0.4)}),
}


def _with_public(task: Task) -> Task:
    """The first 500 test records declared public; they are taken out of the test."""
    assert task.test is not None
    test = Records(task.test.x[500:], task.test.y[500:])
    return replace(task, public=Records(task.test.x[:500], task.test.y[:500]), test=test)


def femnist(seed: int) -> Task:
    """FEMNIST by its real writers: 105 of them, 62 characters."""
    spec = TaskSpec(dataset="femnist", partition=Natural(), model=DpMnistCnn())
    return _with_public(spec.build(105, seed))


def mnist_dirichlet(seed: int) -> Task:
    """20,000 MNIST images over 300 clients with Dirichlet(0.3) label skew."""
    options = {"train": 20_000, "standard": True}
    spec = TaskSpec(dataset="mnist", options=options, partition=Dirichlet(300, 0.3), model=DpMnistCnn())
    return _with_public(spec.build(300, seed))


SETTINGS: dict[str, tuple[Callable[[int], Task], int, dict[str, Any]]] = {
    "femnist": (femnist, 105, {"rounds": 30, "clients": Poisson(105, 0.3), "multiplier": 0.4, "radius": 0.5}),
    "mnist": (mnist_dirichlet, 300, {"rounds": 40, "clients": Poisson(300, 0.1), "multiplier": 0.95, "radius": 0.5}),
}


def job(setting: str, method: str, seed: int) -> Job:
    """One run: E = 8, b = 32, lr 0.1 x 0.998 per round, momentum 0.5, weight decay 5e-4 for all methods."""
    build, population, shared = SETTINGS[setting]
    recipe, own = METHODS[method]
    plan = recipe(**shared, lr=Decay(0.1, 0.998), epochs=8, batch=32, **own)
    return Job(plan, build(seed), default_delta(population))


def _table(setting: str, title: str) -> Table:
    cells = tuple(Cell(f"003-{setting}-{_slug(method)}", method, partial(job, setting, method)) for method in METHODS)
    about = "Scaled: 26,000 to 30,000 parameters, T = 30 or 40, E = 8, rho 0.01."
    return Table(f"003-{setting}", title, cells, about, CHOSEN, every(partial(above, setting), partial(norms, setting)))


CHOSEN = "by hand, on which data is not recorded; the same step, clip and rho for all methods"


def above(setting: str, results: Results) -> Iterator[Row]:
    """DP-FedSAM against DP-FedAvg, and every other method that was run against DP-FedSAM."""
    sam = f"003-{setting}-dp-fedsam"
    text = f"003: {setting}, DP-FedSAM beats DP-FedAvg at equal epsilon"
    yield beats(results, text, sam, f"003-{setting}-dp-fedavg", CHOSEN)
    for method in METHODS:
        name = f"003-{setting}-{_slug(method)}"
        if name in results and method not in ("DP-FedAvg", "DP-FedSAM"):
            yield beats(results, f"003: {setting}, {method} beats DP-FedSAM", name, sam, CHOSEN)


def norms(setting: str, results: Results) -> Iterator[Row]:
    """Median norms of the last round's updates."""
    names = (f"003-{setting}-dp-fedavg", f"003-{setting}-dp-fedsam")
    larger, smaller = common(results, *names, figure="update_norm")
    yield verdict(f"003: {setting}, DP-FedSAM has smaller updates (median)", larger, smaller, CHOSEN, unit="(norm)")


def _slug(method: str) -> str:
    return method.lower().replace(",", "").replace("+", "-").replace(" ", "-").replace("_", "")


TABLES = (_table("femnist", "FEMNIST by writer"), _table("mnist", "MNIST with Dirichlet(0.3) label skew"))
