"""Promises of arithmetic: a record counts for one however wide it is and however many others there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.tiny import plan
from torch import Tensor, nn

from sordino.accounting.bounds import Norm
from sordino.engines.dense_clients import DenseClients, LinearClients
from sordino.engines.inprocess import InProcess
from sordino.engines.objectives import ManyClients, OneClient
from sordino.parts.gradients import Ball, Batch
from sordino.parts.local_solvers import LocalSgd
from sordino.rng import Seeded
from sordino.task import Task

WIDE, MANY = 6_000_000, 200_000
Objective = type[LinearClients] | type[DenseClients] | type[ManyClients] | type[OneClient]


def still(*layers: nn.Module) -> nn.Module:
    """The layers with weights of zero, but for the last one's: scores are zero, and slopes are the targets'."""
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def clipped(objective: Objective, model: nn.Module, x: Tensor, y: Tensor, norm: Norm) -> Tensor:
    """The message of a silo with these records, in float64."""
    task = Task.of(model, [(x, y)], loss="mse")
    made = objective(task)
    w = made.place(task.layout.flatten(task.model), 1)
    return made.clipped(w, Batch(x[None], y[None]), Ball(1.0, norm))[0].double()


@pytest.mark.parametrize("norm", [1, 2])
def test_a_wide_record_counts_for_one(norm: Norm) -> None:
    x, y = torch.full((1, WIDE), 0.1), torch.tensor([[1.0]])
    message = clipped(LinearClients, still(nn.Linear(WIDE, 1, bias=False)), x, y, norm)
    assert float(torch.linalg.vector_norm(message, norm)) == pytest.approx(1.0, abs=3e-5)
    assert float(torch.linalg.vector_norm(message, norm)) <= 1.0 + 1e-6


@pytest.mark.parametrize("count", [100, 1000, MANY])
@pytest.mark.parametrize("objective", [LinearClients, DenseClients, ManyClients, OneClient])
def test_one_record_among_many_counts_for_one(objective: Objective, count: int) -> None:
    rng, width = np.random.default_rng(0), 47
    count = count if objective is not ManyClients else min(count, 20_000)
    x = torch.full((count, width), width**-0.5)
    y = torch.from_numpy(rng.uniform(0.15, 0.5, (count, 1)).astype(np.float32))
    y[:: count // 8] = 0.51  # slopes above 1: pulled to the ball's edge
    last = nn.Linear(width, 1, bias=False)
    model = still(last) if objective is not DenseClients else _through(width, last)
    keep = torch.arange(count) != count // 8 * 7
    moved = clipped(objective, model, x, y, 2) - clipped(objective, model, x[keep], y[keep], 2)
    assert float(moved.norm()) <= 1.0 + 1e-5


def _through(width: int, last: nn.Linear) -> nn.Module:
    """The same scores behind a layer that changes nothing."""
    model = still(nn.Linear(width, width, bias=False), nn.ReLU(), last)
    with torch.no_grad():
        next(iter(model.parameters())).copy_(torch.eye(width))
    return model


def header(sizes: tuple[int, ...], odd: float = 0.5) -> dict[str, str | int]:
    """What is written down of a run on clients with so many records; full batches, a model without a rule."""
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 3))
    held = [(torch.full((size, 4), odd), torch.zeros(size, dtype=torch.int64)) for size in sizes]
    made = plan(local=LocalSgd(lr=0.1, epochs=1))
    return InProcess().prepare(made, Task.of(model, held), Seeded(0)).header


def test_the_path_that_is_written_down_does_not_depend_on_what_clients_hold() -> None:
    wanted = header((1, 1))
    assert wanted["path"] == "batched"
    assert header((1, 9000)) == wanted
    assert header((1, 1), odd=1e30) == wanted
