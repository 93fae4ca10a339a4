"""Paper 003 (DP-FedSAM): one run of any of its methods, all at the same epsilon, from the same start on the same data.

A seed draws the split of the images, the initial model, the cohorts and the noise: the same for every method.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any, Literal

import torch
from torch import nn

from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.data.records import Dataset, Dirichlet, Iid
from sordino.loop import Round, run
from sordino.models import Mlp, build_seeded
from sordino.outcome import final_model
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.samplers import Poisson
from sordino.parts.schedules import Decay
from sordino.parts.sparsify import PublicDataMask, PublicMask, RandomMask, ReleasedMask, SparsifyMean, SparsifyUpdate
from sordino.plan import Plan
from sordino.recipes import blur, dp_fed_avg, dp_fed_sam, dp_fed_sam_top_k, fed_smp
from sordino.rng import Seeded
from sordino.task import Task, evaluate
from sordino_papers import kept
from sordino_papers.landscape import landscape
from sordino_papers.span import InSpan

Row = dict[str, Any]
Judge = Literal["test", "validation"]
IMAGES = 10_000  # the clients', the first of the 60,000
PUBLIC = slice(10_000, 10_500)  # declared public, for Fed-SMP-top_k
VALIDATION = slice(50_000, 60_000)  # to tune on
REACH = 0.5  # of the landscape, in lengths of the model's own filters
MOMENTUM = {"momentum": 0.5, "weight_decay": 5e-4}  # of all methods


@dataclass(frozen=True)
class Setting:
    """A method with its numbers. `own` is what only it has: rho of SAM, the pull of BLUR, the share kept by Fed-SMP."""

    method: str
    lr: float = 0.1
    clip_norm: float = 0.2
    own: float = 0.05
    skew: float | None = 0.6  # of Dirichlet; None: iid
    keep: float = 0.4
    epochs: int = 10
    rounds: int = 100
    noise_multiplier: float = 0.95
    population: int = 500
    batch: int = 32
    steps: int | None = None  # local steps in the place of epochs


METHODS: dict[str, Callable[[Setting, int], tuple[Callable[..., Plan], dict[str, Any]]]] = {
    "DP-FedAvg": lambda s, seed: (dp_fed_avg, MOMENTUM),
    "DP-FedSAM": lambda s, seed: (dp_fed_sam, {"rho": s.own}),
    "DP-FedSAM, ASAM": lambda s, seed: (dp_fed_sam, {"rho": s.own, "adaptive": True}),
    "top_k of the update": lambda s, seed: (dp_fed_sam_top_k, {"rho": s.own, "sparsify": SparsifyUpdate(s.keep)}),
    "top_k of the mean": lambda s, seed: (dp_fed_sam, {"rho": s.own, "denoiser": SparsifyMean(s.keep)}),
    "top_k by public mask": lambda s, seed: (
        dp_fed_sam_top_k,
        {"rho": s.own, "sparsify": PublicMask(s.keep, ReleasedMask(seed))},
    ),
    "Fed-SMP-rand_k": lambda s, seed: (fed_smp, {"keep": s.own, "mask": RandomMask(seed)}),
    "Fed-SMP-top_k": lambda s, seed: (fed_smp, {"keep": s.own, "mask": PublicDataMask()}),
    "BLUR": lambda s, seed: (blur, {"strength": s.own}),
    "BLUR+LUS": lambda s, seed: (blur, {"strength": s.own, "sparsify": SparsifyUpdate(s.keep)}),
}
SOUND_TOP_K = ("top_k of the update", "top_k of the mean", "top_k by public mask")


def plan(setting: Setting, seed: int) -> Plan:
    """E epochs (or `steps`), lr x 0.998 per round, momentum 0.5, weight decay 5e-4; Poisson cohorts of a tenth."""
    recipe, own = METHODS[setting.method](setting, seed)
    made = recipe(
        rounds=setting.rounds,
        clients=Poisson(setting.population, 0.1),
        lr=Decay(setting.lr, 0.998),
        epochs=setting.epochs,
        batch=setting.batch,
        clip_norm=setting.clip_norm,
        noise_multiplier=setting.noise_multiplier,
        **own,
    )
    if setting.steps is None:
        return made
    assert isinstance(made.local, LocalSgd)
    return replace(made, local=replace(made.local, epochs=None, steps=setting.steps))


@cache
def mnist(judge: Judge) -> Dataset:
    """MNIST whose test part is what judges: the test images, or, to tune, the last 10,000 training images."""
    if judge == "validation":
        return load("mnist", train=VALIDATION.start, validation=True, standard=True)
    return load("mnist", standard=True)


def task(setting: Setting, seed: int, judge: Judge = "test") -> Task:
    """10,000 images over the clients, 784-128-10: 101,770 parameters, five thousand for every record of a client."""
    data = mnist(judge)
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    cut = Iid(setting.population) if setting.skew is None else Dirichlet(setting.population, setting.skew)
    split = cut.split(data.y[:IMAGES], None, Seeded(seed).at(0, "partition"))
    return Task(
        build_seeded(Mlp((128,)), data.x.shape[1:], 10, seed),
        Clients(Records(x[:IMAGES], y[:IMAGES]), split.index, split.offsets),
        Records(torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)),
        public=Records(x[PUBLIC], y[PUBLIC]),
    )


def measured(setting: Setting, seed: int, judge: Judge = "test") -> Row:
    """One run: accuracy (percent) on what judges and on the clients' own images, update norms, flatness.

    All but the first are of private data: known in simulation only.
    """
    began, ours, held = time.perf_counter(), plan(setting, seed), task(setting, seed, judge)
    rounds = run(ours, held, engine=InSpan(chunk=16), streams=Seeded(seed), eval_every=setting.rounds)
    figures: list[dict[str, float]] = []
    last: Round | None = None
    for last in rounds:
        figures.append(last.diagnostics)
    assert last is not None
    model = final_model(ours, held, last.state)
    train = 100 * evaluate(model, held.clients.records, held.losses)["accuracy"]
    test = 100 * last.metrics["accuracy"]
    return {
        judge: round(test, 2),
        "train": round(train, 2),
        "gap": round(train - test, 2),
        **norms(figures),
        **({"rise": flatness(model, held)} if judge == "test" else {}),
        "seconds": round(time.perf_counter() - began, 1),
        "code": kept.code(),
    }


def flatness(model: nn.Module, held: Task) -> float:
    """Mean rise of the test loss over a square around the model: smaller is flatter."""
    return float(f"{landscape(model, held, reach=REACH, points=7).sharpness:.4g}")


def norms(figures: list[dict[str, float]]) -> Row:
    """Update norms before the clip and the share that it shortens: means over the rounds."""
    names = {"norm": "update_norm_mean", "median norm": "update_norm_p50", "clipped": "clipped_fraction"}
    known = [one for one in figures if "update_norm_mean" in one]
    return {name: float(f"{mean(one[key] for one in known):.4g}") for name, key in names.items()}
