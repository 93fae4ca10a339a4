"""The papers' tables at their own size, for those with the data and a GPU: `sordino papers run 003-cifar10 --full`.

Every plan is built and billed without its data (`Full.plan`); the task is built, and its data downloaded, when a cell
runs. None of it was run on two CPU cores. Hours are estimates: operations of all local steps over 5 TFLOP/s, and
4 ms a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sordino.accounting.accountant import largest_delta
from sordino.config import TaskSpec
from sordino.data.clients import Records
from sordino.data.records import Dirichlet, Iid, Natural, Partitioner
from sordino.errors import DataError
from sordino.models import CharLstm, EmnistCnn, ResNet18, SvhnCnn
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.record_samplers import PoissonRecords
from sordino.parts.samplers import FixedSize, Poisson, Sampler
from sordino.parts.schedules import Decay, Piecewise
from sordino.parts.sparsify import PublicDataMask, SparsifyUpdate
from sordino.plan import Plan
from sordino.recipes import blur, dp_fed_avg, dp_fed_ls, dp_fed_sam, dp_fed_sam_top_k, dp_ls_adam, dp_ls_sgd, fed_smp
from sordino.task import Task
from sordino_papers.cells import Cell, Job, Table

SPEED = 5e12  # operations a second of small batches on one GPU: an assumption, as are the next two
STEP, ROUND = 4e-3, 5e-2  # seconds that a local step, and the noise of a round, take whatever their size
SEEDS = 3


@dataclass(frozen=True)
class Full:
    """One cell: its plan, which needs no data, and how its task is made."""

    plan: Callable[[], Plan]
    task: Callable[[int], Task]
    delta: float
    train: bool = False

    def job(self, seed: int) -> Job:
        """The run, with its data."""
        return Job(self.plan(), self.task(seed), self.delta, train=self.train)


def hours(gflop: float, a_round: float, batch: int, rounds: int) -> float:
    """Of one run without SAM: 1e9 operations per record (forward and backward), `a_round` records read in a round."""
    return rounds * (gflop * 1e9 * a_round / SPEED + STEP * a_round / batch + ROUND) / 3600


def _whole(task: Task, records: int) -> Task:
    """Refuse a data folder that holds a part of the set."""
    if len(task.clients.index) != records:
        found = f"{len(task.clients.index):,} training records"
        raise DataError(found, f"all {records:,}", "unset SORDINO_DATA, so that the whole set is downloaded")
    return task


def _tested(task: Task, first: int, public: int = 0) -> Task:
    """Tested on the records from `first` on; the `public` before them are declared public."""
    assert task.test is not None
    x, y = task.test.x, task.test.y
    known = Records(x[first - public : first], y[first - public : first]) if public else None
    return replace(task, test=Records(x[first:], y[first:]), public=known)


def _named(name: str, title: str, one: Full, published: float | None, claimed: float | None = None) -> Cell:
    return Cell(name, title, one.job, published, claimed, seeds=SEEDS)


# ---- 000, Tables 3 and 4 ---------------------------------------------------------------------------------------------

STRENGTHS = (0.0, 0.5, 1.0, 1.5)
Row = tuple[float, tuple[float, ...]]
Published = dict[float, tuple[Row, Row]]
TABLE3: Published = {  # z: epsilon as published and accuracies of STRENGTHS, uniform and Poisson
    2.4: ((2.83, (76.14, 80.67, 80.82, 81.02)), (1.39, (75.93, 80.68, 80.82, 80.79))),
    2.2: ((3.15, (78.56, 82.18, 82.17, 81.38)), (1.55, (78.23, 81.86, 82.10, 81.80))),
    2.0: ((3.53, (80.28, 82.94, 83.19, 82.93)), (1.74, (79.94, 82.87, 82.89, 82.83))),
    1.8: ((4.05, (82.05, 84.17, 84.40, 83.51)), (2.00, (82.01, 83.94, 83.85, 83.74))),
}
TABLE4: Published = {
    1.4: ((17.69, (38.79, 39.97, 40.36, 40.76)), (8.23, (38.58, 39.44, 40.73, 40.60))),
    1.2: ((22.43, (39.05, 41.44, 41.90, 42.04)), (10.41, (39.84, 40.87, 42.20, 42.27))),
    1.0: ((27.25, (41.48, 43.66, 44.29, 43.68)), (14.05, (41.49, 43.70, 44.06, 43.92))),
    0.8: ((39.90, (43.96, 45.49, 45.35, 44.91)), (20.92, (43.78, 45.24, 45.03, 45.06))),
}


def svhn(seed: int) -> Task:
    """SVHN with the extra set, 604,388 images dealt to 2,000 clients; tested on the last 16,032 test images."""
    spec = TaskSpec(dataset="svhn", options={"extra": True}, partition=Iid(2000), model=SvhnCnn())
    return _tested(_whole(spec.build(2000, seed), 604_388), 10_000)


def plays(seed: int) -> Task:
    """975 roles with at least 100 samples, all their windows, the first 80% of a role's text for training."""
    options = {"roles": 975, "per_role": 100_000, "least": 100}
    return TaskSpec(dataset="shakespeare", options=options, partition=Natural(), model=CharLstm()).build(975, seed)


def smoothed(clients: Sampler, z: float, strength: float, **own: Any) -> Plan:
    """Table H.7: lr x 0.99 per round, weight decay 4e-5, updates projected after every step."""
    denoiser = LaplacianSmoothing(strength) if strength else None
    return dp_fed_ls(clients=clients, noise_multiplier=z, denoiser=denoiser, weight_decay=4e-5, **own)


SVHN: dict[str, Any] = {"rounds": 200, "lr": Decay(0.1, 0.99), "clip_norm": 0.3, "epochs": 10, "batch": 64}
LSTM: dict[str, Any] = {"rounds": 100, "lr": Decay(1.47, 0.99), "clip_norm": 5.0, "epochs": 5, "batch": 50}


def _paper_000(
    name: str, title: str, about: str, task: Callable[[int], Task], own: dict[str, Any], figures: Published,
    cohorts: tuple[Sampler, Sampler], one_run: float,
) -> Table:  # fmt: skip
    cells = []
    for z, both in figures.items():
        for how, clients, (claimed, row) in zip(("uniform", "poisson"), cohorts, both, strict=True):
            for strength, published in zip(STRENGTHS, row, strict=True):
                plan = partial(smoothed, clients, z, strength, **own)
                one = Full(plan, task, largest_delta(clients.population))
                label = f"{how}, z = {z:g}, sigma {strength:g}"
                cells.append(_named(f"{name}-{how}-z{z:g}-sigma{strength:g}", label, one, published, claimed))
    return _table(name, title, about, cells, one_run, "the paper (its Table H.7); nothing here")


def _table(name: str, title: str, about: str, cells: list[Cell], one_run: float, chosen: str) -> Table:
    total = one_run * len(cells) * SEEDS
    spent = f"{one_run:.2g} hours a run on one GPU, {total:.0f} for {len(cells)} cells with {SEEDS} seeds"
    return Table(name, title, tuple(cells), about, chosen, full=True, hours=spent)


# ---- 003, Table 1 ----------------------------------------------------------------------------------------------------

RHO, KEEP = 0.5, 0.4
METHODS: dict[str, tuple[Callable[..., Plan], dict[str, Any]]] = {
    "DP-FedAvg": (dp_fed_avg, {}),
    "Fed-SMP-rand_k": (fed_smp, {"keep": KEEP}),
    "Fed-SMP-top_k": (fed_smp, {"keep": KEEP, "mask": PublicDataMask()}),
    "BLUR": (blur, {}),
    "BLUR+LUS": (blur, {"sparsify": SparsifyUpdate(KEEP)}),
    "DP-FedSAM": (dp_fed_sam, {"rho": RHO}),
    "DP-FedSAM-top_k": (dp_fed_sam_top_k, {"rho": RHO, "sparsify": SparsifyUpdate(KEEP)}),
}
SKEWS: dict[str, Callable[[], Partitioner]] = {
    "dirichlet0.3": partial(Dirichlet, 500, 0.3),
    "dirichlet0.6": partial(Dirichlet, 500, 0.6),
    "iid": partial(Iid, 500),
}
TABLE1 = {  # test accuracies of METHODS, for every one of SKEWS
    "emnist": (
        (73.10, 73.72, 75.75, 73.71, 76.25, 76.81, 77.27),
        (82.20, 82.18, 83.41, 83.20, 83.41, 84.32, 84.80),
        (81.90, 84.16, 83.32, 82.92, 82.92, 85.90, 87.70),
    ),
    "cifar10": (
        (47.98, 48.14, 49.93, 47.66, 51.23, 53.92, 54.85),
        (50.05, 51.33, 54.11, 51.05, 54.11, 54.14, 57.00),
        (50.90, 50.61, 53.30, 52.56, 53.48, 55.58, 58.82),
    ),
    "cifar100": (
        (16.10, 17.25, 18.58, 17.03, 18.98, 18.88, 20.85),
        (15.92, 17.50, 18.07, 17.92, 18.27, 19.09, 21.24),
        (17.47, 17.68, 19.09, 18.47, 19.59, 20.64, 22.30),
    ),
}
IMAGES: dict[str, tuple[dict[str, Any], int]] = {  # the task's own settings, and how many training images it has
    "emnist": (
        {"options": {"split": "byclass", "train": 88_800, "test": 14_800}, "model": EmnistCnn()},
        88_800,
    ),
    "cifar10": ({"options": {"sheets": 5}, "model": ResNet18()}, 50_000),
    "cifar100": ({"model": ResNet18()}, 50_000),
}


def images(data: str, skew: str, seed: int) -> Task:
    """Dealt to 500 clients; the first 500 test images are declared public for Fed-SMP-top_k, the rest is the test."""
    own, records = IMAGES[data]
    spec = TaskSpec(dataset=data, partition=SKEWS[skew](), **own)
    return _tested(_whole(spec.build(500, seed), records), 500, public=500)


def sam_plan(data: str, method: str) -> Plan:
    """Section 6: M = 500, q = 0.1, z = 0.95, C = 0.2, E = 30, lr 0.1 x 0.998, momentum 0.5, weight decay 5e-4.

    Cohorts are drawn by coins, for which the paper's kind of epsilon holds (fixed cohorts cost five times as much).
    """
    recipe, own = METHODS[method]
    size = {"rounds": 200, "batch": 32} if data == "emnist" else {"rounds": 300, "batch": 50}
    shared = {
        "clients": Poisson(500, 0.1),
        "noise_multiplier": 0.95,
        "clip_norm": 0.2,
        "epochs": 30,
        "lr": Decay(0.1, 0.998),
    }
    return recipe(**shared, **size, momentum=0.5, weight_decay=5e-4, **own)


def _paper_003(data: str, title: str, one_run: float) -> Table:
    cells = []
    for skew, row in zip(SKEWS, TABLE1[data], strict=True):
        for method, published in zip(METHODS, row, strict=True):
            one = Full(partial(sam_plan, data, method), partial(images, data, skew), 1 / 500, train=True)
            slug = method.lower().replace(" ", "-").replace("+", "-")
            cells.append(_named(f"003-{data}-{skew}-{slug}", f"{skew}, {method}", one, published))
    about = (
        "z = 0.95 and delta = 1/500 as published; top_k in a sound form (a client's own, dense noise), clipped whole. "
        "Train accuracy is kept beside (not private). Methods with SAM take twice the hours."
    )
    return _table(f"003-{data}", f"Table 1, {title}", about, cells, one_run, "the paper; nothing here")


# ---- 004, Figure 6 ---------------------------------------------------------------------------------------------------

CIFAR_RECORDS, CIFAR_BATCH, EPOCHS = 50_000, 256, 60
OPTIMIZERS: dict[str, tuple[Callable[..., Plan], float, float]] = {
    "DP-SGD": (dp_ls_sgd, 0.15, 0.0),
    "DP-LSSGD": (dp_ls_sgd, 0.15, 1.0),
    "DP-Adam": (dp_ls_adam, 0.001, 0.0),
    "DP-LSAdam": (dp_ls_adam, 0.001, 1.0),
}


def cifar(seed: int) -> Task:
    """All of CIFAR-10 with one holder, the tutorial's net: two 5x5 convolutions of 64, dense 384 and 192."""
    spec = TaskSpec(dataset="cifar10", options={"sheets": 5}, partition=Iid(1), model=SvhnCnn(channels=(64, 64)))
    return _whole(spec.build(1, seed), CIFAR_RECORDS)


def record_plan(method: str) -> Plan:
    """Section 4.3: noise multiplier 2, clip 3, batch 256; steps 0.15 and 0.001, a tenth from the 10,000th on."""
    recipe, lr, strength = OPTIMIZERS[method]
    return recipe(
        rounds=EPOCHS * CIFAR_RECORDS // CIFAR_BATCH,
        records=PoissonRecords(CIFAR_BATCH, (CIFAR_RECORDS,)),
        lr=Piecewise(lr, 0.1, (10_000,)),
        clip_norm=3.0,
        noise_multiplier=2.0,
        denoiser=LaplacianSmoothing(strength) if strength else None,
    )


def _paper_004() -> Table:
    cells = [
        _named(f"004-cifar10-full-{method.lower()}", method, Full(partial(record_plan, method), cifar, 1e-5), None)
        for method in OPTIMIZERS
    ]
    about = "Every record clipped. 60 epochs (the figure's length is not said), sigma 1, without local response norms."
    spent = hours(0.38, CIFAR_BATCH, CIFAR_BATCH, EPOCHS * CIFAR_RECORDS // CIFAR_BATCH)
    return _table("004-cifar10-full", "Figure 6, CNN on CIFAR-10", about, cells, spent, "the paper; epochs by hand")


TABLES = (
    _paper_000(
        "000-table3", "Table 3, CNN on SVHN", "From scratch; the paper begins at weights of MNIST (`[task] init`).",
        svhn, SVHN, TABLE3, (FixedSize(2000, 100), Poisson(2000, 0.05)), hours(0.36, 604_388 * 0.05 * 10, 64, 200),
    ),
    _paper_000(
        "000-table4", "Table 4, LSTM on Shakespeare", "80% of a role's text for training, the paper has 70% and 10%.",
        plays, LSTM, TABLE4, (FixedSize(975, 195), Poisson(975, 0.2)), hours(0.39, 3.3e6 * 0.2 * 5, 50, 100),
    ),
    _paper_003("emnist", "EMNIST", hours(0.075, 88_800 * 0.1 * 30, 32, 200)),
    _paper_003("cifar10", "CIFAR-10", hours(3.3, 50_000 * 0.1 * 30, 50, 300)),
    _paper_003("cifar100", "CIFAR-100", hours(3.3, 50_000 * 0.1 * 30, 50, 300)),
    _paper_004(),
)  # fmt: skip

__all__ = ["TABLES"]
