"""Small tasks and plans that many tests share; every one is built from its own seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino.engines.base import Engine
from sordino.loop import Round, run
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise
from sordino.parts.samplers import Everyone
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task

SIZES = (5, 3, 0, 1, 7, 4)  # ragged, and one client without a record


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, float32."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with weights that depend on `seed` alone."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(0.5 * noise(parameter.numel(), seed=1000 * seed + i).view_as(parameter))
    return module


def mlp(features: int = 4, hidden: int = 8, classes: int = 3) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, classes)))


def clients(sizes: Sequence[int] = SIZES, shape: tuple[int, ...] = (4,), classes: int = 3) -> list[Any]:
    """One (x, y) per client."""
    y = np.random.default_rng(7).integers(classes, size=sum(sizes))
    x = noise(sum(sizes), *shape, seed=8)
    pairs = zip(torch.split(x, list(sizes)), torch.split(torch.from_numpy(y), list(sizes)), strict=True)
    return [(a.clone(), b.clone()) for a, b in pairs]


def task(sizes: Sequence[int] = SIZES, model: nn.Module | None = None, shape: tuple[int, ...] = (4,)) -> Task:
    return Task.of(model or mlp(), clients(sizes, shape))


def plan(**changes: Any) -> Plan:
    """Everyone of six, one full-batch epoch, clip 1, noise multiplier 1, two rounds; with `changes`."""
    base = Plan(
        rounds=2,
        clients=Everyone(len(SIZES)),
        local=LocalSgd(lr=0.1, epochs=1),
        encode=(Clip(1.0),),
        release=CentralNoise(Gaussian(1.0)),
        server=Sgd(),
    )
    return replace(base, **changes)


def rounds(plan: Plan, task: Task, engine: Engine | None = None, seed: int = 0) -> list[Round]:
    """Every round of a run."""
    return list(run(plan, task, engine=engine, streams=Seeded(seed)))


def final(plan: Plan, task: Task, engine: Engine | None = None, seed: int = 0) -> Tensor:
    """The vector that a run returns."""
    return plan.server.result(rounds(plan, task, engine, seed)[-1].state.memory)
