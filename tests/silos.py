"""Small silos that many tests share: ragged, seeded, one gradient per record by plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tests.tiny import noise, seeded
from torch import Tensor, nn

from sordino.accounting.bounds import Norm
from sordino.data.clients import Clients, Records
from sordino.parts.losses import Loss, Quantile
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import LocalNoise
from sordino.parts.samplers import Everyone
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.task import Task

SIZES = (6, 4, 9)
LOSSES: list[tuple[str | Loss, int]] = [
    ("cross_entropy", 3),
    ("mse", 1),
    ("mse", 4),
    ("logistic", 1),
    ("logistic", 2),
    ("absolute", 1),
    ("absolute", 2),
    ("hinge", 1),
    ("hinge", 2),
    (Quantile(0.3), 1),
    (Quantile(0.3), 2),
]


def targets(loss: str | Loss, outputs: int, count: int, seed: int = 5) -> Tensor:
    """What a loss takes: labels, zeros and ones, or numbers."""
    numbers = noise(count, outputs, seed=seed)
    if loss == "cross_entropy":
        return torch.arange(count) % outputs
    y = (numbers > 0).float() if loss in ("logistic", "hinge") else numbers
    return y.squeeze(-1)


def silos(
    loss: str | Loss = "cross_entropy", outputs: int = 3, sizes: Sequence[int] = SIZES, bias: bool = True
) -> Task:
    """A linear model over silos of the given sizes."""
    x, y = noise(sum(sizes), 4, seed=4), targets(loss, outputs, sum(sizes))
    pairs = zip(torch.split(x, list(sizes)), torch.split(y, list(sizes)), strict=True)
    return Task(seeded(nn.Linear(4, outputs, bias=bias)), Clients.of([Records(a, b) for a, b in pairs]), loss=loss)


def planned(**changes: Any) -> Plan:
    """Everyone of three silos, two records each, clip norm 1, noise multiplier 2, three rounds; with `changes`."""
    base = Plan(
        rounds=3,
        clients=Everyone(len(SIZES)),
        local=BatchGradient(FixedRecords(2, SIZES), 1.0),
        release=LocalNoise(Gaussian(2.0)),
        server=Sgd(lr=0.5),
    )
    return replace(base, **changes)


def record_gradient(task: Task, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of one record, by an ordinary backward pass."""
    model = copy.deepcopy(task.model)
    task.layout.load(model, row)
    task.losses(model(x[None]), y[None])[0].backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def clipped_sum(task: Task, row: Tensor, x: Tensor, y: Tensor, clip_norm: float, norm: Norm = 2) -> Tensor:
    """Sum over records of g min(1, clip norm / ||g||), record by record."""
    total = torch.zeros_like(row)
    for one, target in zip(x, y, strict=True):
        slope = record_gradient(task, row, one, target)
        total += slope * min(1.0, clip_norm / max(float(slope.norm(p=norm)), 1e-30))
    return total
