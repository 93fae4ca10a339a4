"""Promise: every plan of the papers' own size takes two rounds on the device with the paper's model.

Data are made up, a few records a client, and local epochs are cut to one; population, cohort, model and every other
setting are the paper's. One plan runs with every change, all kinds of plans with HYPOTHESIS_PROFILE=nightly.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from tests.device.loops import DEVICE
from torch import Tensor

from sordino.engines.inprocess import InProcess
from sordino.loop import run
from sordino.models import CharLstm, EmnistCnn, ResNet18, SvhnCnn
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task
from sordino_papers import full

CHARACTERS, LENGTH, RECORDS = 90, 80, 2
NETS: dict[str, tuple[Any, tuple[int, ...], int]] = {  # model, shape of a record, classes
    "000-table3": (SvhnCnn(), (3, 32, 32), 10),
    "000-table4": (CharLstm(), (LENGTH,), CHARACTERS),
    "003-emnist": (EmnistCnn(), (1, 28, 28), 62),
    "003-cifar10": (ResNet18(), (3, 32, 32), 10),
    "003-cifar100": (ResNet18(), (3, 32, 32), 100),
    "004-cifar10-full": (SvhnCnn(channels=(64, 64)), (3, 32, 32), 10),
}
PLANS = {  # kinds of plans: noise and data skew change no operation
    **{
        f"{table} {how} sigma{sigma}": f"{table}-{how}-z{z}-sigma{sigma}"
        for table, z in (("000-table3", "1.8"), ("000-table4", "1"))
        for how in ("uniform", "poisson")
        for sigma in (0, 1)
    },
    **{
        f"003-{data} {method}": f"003-{data}-iid-{method.lower().replace('+', '-')}"
        for data in ("emnist", "cifar10", "cifar100")
        for method in full.METHODS
    },
    **{f"004-cifar10-full {method}": f"004-cifar10-full-{method.lower()}" for method in full.OPTIMIZERS},
}  # fmt: skip
ALWAYS = ("003-emnist DP-FedSAM-top_k",)
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
CELLS = {cell.id: cell.build.__self__ for table in full.TABLES for cell in table.cells}  # type: ignore[attr-defined]


def records(shape: tuple[int, ...], classes: int, size: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(classes, (size, *shape)) if len(shape) == 1 else torch.rand(size, *shape)
    return x, torch.randint(classes, (size,))


def task(table: str, plan: Plan) -> Task:
    """The paper's model, with made-up records in as many hands as the plan has clients."""
    torch.manual_seed(0)
    model, shape, classes = NETS[table]
    sizes = [full.CIFAR_RECORDS] if table.startswith("004") else [RECORDS] * plan.clients.population
    x, y = records(shape, classes, sum(sizes))
    clients = list(zip(torch.split(x, sizes), torch.split(y, sizes), strict=True))
    test, public = records(shape, classes, 16), records(shape, classes, 16)
    return Task.of(model.build(shape, classes), clients, test=test, public=public)


def one_epoch(plan: Plan) -> Plan:
    local: Any = plan.local
    return replace(plan, local=replace(local, epochs=1)) if hasattr(local, "epochs") else plan


@pytest.mark.parametrize("name", PLANS if NIGHTLY else ALWAYS)
def test_a_plan_of_the_papers_takes_two_rounds_on_the_device(name: str) -> None:
    plan = one_epoch(CELLS[PLANS[name]].plan())
    own = task(name.split()[0], plan)
    rounds = list(islice(run(plan, own, engine=InProcess(device=str(DEVICE)), streams=Seeded(1)), 2))
    held = [one for one in rounds[-1].state.memory.values() if one.dim()]
    assert {one.device.type for one in held} == {torch.device(DEVICE).type}
    start, end = own.layout.flatten(own.model), plan.server.result(rounds[-1].state.memory).cpu()
    assert math.isfinite(float(end.norm()))
    assert not torch.equal(start, end)


def test_every_table_and_method_of_the_papers_size_is_among_them() -> None:
    assert {name.split()[0] for name in PLANS} == {table.id for table in full.TABLES}
    assert set(PLANS.values()) <= set(CELLS)
