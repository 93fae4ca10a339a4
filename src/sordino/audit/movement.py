"""How far one client, or one record, moves the sum: two worlds through each of the engine's paths, with the same coins.

The definition of sensitivity, measured: everything but one unit is equal, that unit's slope points the other way or it
is gone, and the difference of the two sums is compared with what the noise was sized for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from sordino.audit.law import Finding
from sordino.audit.rehearsal import FAR, smaller
from sordino.data.task import Clients, Records, Task
from sordino.engines.base import ClientJob, Worker
from sordino.engines.inprocess import InProcess
from sordino.engines.paths import Path
from sordino.parts.bounds import Spent
from sordino.parts.record_solvers import NoisyLocalSgd
from sordino.parts.samplers import Cohort
from sordino.parts.schedules import at, travelled
from sordino.plan import Plan
from sordino.rng import Seeded

WIDTH, TENSORS = 6, 4
LOUD = 1e6  # how far out the records lie
ROUNDING = 1e-3  # what float32 sums may add
PATHS: tuple[tuple[str, Path | None], ...] = (
    ("linear", None),
    ("dense", None),
    ("tensors", "batched"),
    ("tensors", "sequential"),
)


class Tensors(nn.Module):
    """x . w, w in several tensors: a slope over all of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(WIDTH) for _ in range(TENSORS)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat(list(self.parts))


def model_of(name: str) -> nn.Module:
    """Models that take the engine's different paths; weights are fixed numbers."""
    if name == "tensors":
        return Tensors()
    size = WIDTH * TENSORS
    model = nn.Linear(size, 1) if name == "linear" else nn.Sequential(nn.Linear(size, 5), nn.ReLU(), nn.Linear(5, 1))
    for k, tensor in enumerate(model.parameters()):
        nn.init.constant_(tensor, 0.1 * (k + 1))
    return model


def movements(plan: Plan, seed: int = 0) -> list[Finding]:
    """The movement of one unit on each path, beside the most that is billed."""
    small = smaller(plan)
    return [_judged(small, name, path, seed) for name, path in PATHS]


def _judged(plan: Plan, name: str, path: Path | None, seed: int) -> Finding:
    found = [moved / most for moved, most in _moved(plan, name, path, seed)]
    worst = max(found, default=0.0)
    title = f"movement of one {plan.unit}, {name} model" + (f", {path}" if path else "")
    text = f"{worst:.4g} times what is billed"
    return Finding(title, len(found), 1.0 if worst <= 1 + ROUNDING else 0.0, text)


def _moved(plan: Plan, name: str, path: Path | None, seed: int) -> Iterator[tuple[float, float]]:
    """(movement, the most that is billed), for some rounds."""
    model = model_of(name)
    for t in range(min(plan.rounds, 2)):
        streams = Seeded((seed << 32) + t)
        cohort = plan.clients.draw(t, streams.at(t, "cohort"))
        row = _drawn_row(plan, cohort, t, streams) if len(cohort) else None
        if row is None:
            continue
        for signs, others in (((1.0, -1.0), 1.0), ((1e-3, -1.0), 1.0), ((1.0, -1.0), 1e-12)):
            worlds = [_data(plan, model, row, sign, others) for sign in signs]
            sums = [_sum(plan, world, path, streams, t, cohort) for world in worlds]
            yield _distance(plan, sums[0], sums[1]), 2 * _unit(plan, t)
        if plan.unit == "client":
            task = _data(plan, model, row, 1.0, 1.0)
            sums = [_sum(plan, task, path, streams, t, some) for some in (cohort, cohort[1:])]
            yield _distance(plan, sums[0], sums[1]), 1.0


def _unit(plan: Plan, t: int) -> float:
    """What a movement of 1 is in the message: the pace of all steps, where the silo itself takes them."""
    local = plan.local
    if isinstance(local, NoisyLocalSgd):
        return travelled(local.lr, t, local.steps) * at(local.radius, t) / local.records.count
    return 1.0


def _distance(plan: Plan, one: Tensor, other: Tensor) -> float:
    norm = 2 if isinstance(plan.bound, Spent) else plan.bound.norm
    found = float(torch.linalg.vector_norm(one.double() - other.double(), ord=norm))
    return found if found == found else float("inf")


def _drawn_row(plan: Plan, cohort: Cohort, t: int, streams: Seeded) -> int | None:
    """A row of the table that the round reads: the first client's only record, or one that the first silo draws."""
    first, reads = int(cohort[0]), plan.local.reads
    if reads is None:
        return first
    before = sum(reads.size(silo) for silo in range(first))
    drawn = plan.local.indices(reads.size(first), streams.at(t, "batches", first), t, first).ravel()
    drawn = drawn[drawn >= 0]
    return before + int(drawn[0]) if len(drawn) else None


def _data(plan: Plan, model: nn.Module, row: int, sign: float, others: float) -> Task:
    """Loud records (or quiet `others`), to this side and that; of record `row`, `sign` says the side and the size."""
    reads, population = plan.local.reads, plan.clients.population
    sizes = [1 if reads is None else reads.size(silo) for silo in range(population)]
    count, size = sum(sizes), WIDTH * TENSORS
    x = LOUD * others * (1.0 + 0.5 * torch.arange(count * size, dtype=torch.float32).view(count, size).sin())
    y = FAR * (1.0 - 2.0 * (torch.arange(count) % 2))
    x[row], y[row] = LOUD * abs(sign), -FAR if sign > 0 else FAR
    held = Clients(Records(x, y), np.arange(count, dtype=np.int64), np.cumsum([0, *sizes]).astype(np.int64))
    return Task(model, held, loss="absolute", public=Records(torch.ones(1, size), torch.ones(1)))


def _sum(plan: Plan, task: Task, path: Path | None, streams: Seeded, t: int, cohort: Cohort) -> Tensor:
    worker: Worker = InProcess(path=path).prepare(plan, task, streams)
    start = task.layout.flatten(task.model)
    public = plan.public(t, len(start), None, lambda: worker.public_update(start, t))
    return worker.collect(ClientJob(public, start, cohort)).total
