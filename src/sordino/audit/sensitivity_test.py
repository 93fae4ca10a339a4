"""Sensitivity tests: how far one client or record changes the sum, on each of the engine's paths.

The definition of sensitivity, measured: two data sets are equal but for one unit, whose gradient points the other way
or which is gone; all randomness is the same; the difference of the two sums is compared with what the noise is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from sordino.accounting.bounds import AlreadyPrivate
from sordino.audit.noise_test import Finding, not_examined
from sordino.audit.trial_rounds import FAR, shrink_plan
from sordino.data.clients import Clients, Records
from sordino.engines.base import ClientJob, Worker
from sordino.engines.inprocess import InProcess, public_update
from sordino.engines.objectives import Path
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task

WIDTH, TENSORS = 6, 4
TRIES = 1000  # rounds in which somebody who is drawn is looked for
LOUD = 1e6  # how far out the records lie
ROUNDING = 1e-3  # what float32 sums may add
PATHS: tuple[tuple[str, Path | None], ...]
PATHS = (("linear", None), ("dense", None), ("tensors", "batched"), ("tensors", "sequential"))


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


def sensitivity_tests(plan: Plan, seed: int = 0) -> list[Finding]:
    """The sensitivity to one unit on each path, beside what the noise is sized for."""
    small = shrink_plan(plan)
    return [_compare(small, name, path, seed) for name, path in PATHS]


def _compare(plan: Plan, name: str, path: Path | None, seed: int) -> Finding:
    title = f"sensitivity to one {plan.unit}, {name} model" + (f", {path}" if path else "")
    if plan.local.message_sensitivity(0) is None:
        return not_examined(title, f"local solver {plan.local.kind!r} does not state its message_sensitivity")
    found = [moved / most for moved, most in _moved(plan, name, path, seed)]
    if not found:
        return not_examined(title, f"nobody was drawn in any of {TRIES} rounds")
    text = f"{max(found):.4g} times what the noise is sized for"
    return Finding(title, len(found), 1.0 if max(found) <= 1 + ROUNDING else 0.0, text)


def _moved(plan: Plan, name: str, path: Path | None, seed: int) -> Iterator[tuple[float, float]]:
    """(distance of the two sums, what the noise is sized for), for some rounds."""
    model = model_of(name)
    for t, streams, cohort, row in islice(_drawn(plan, seed), min(plan.rounds, 2)):
        for signs, others in (((1.0, -1.0), 1.0), ((1e-3, -1.0), 1.0), ((1.0, -1.0), 1e-12)):
            worlds = [_data(plan, model, row, sign, others) for sign in signs]
            sums = [_sum(plan, world, path, streams, t, cohort) for world in worlds]
            yield _distance(plan, sums[0], sums[1]), 2 * (plan.local.message_sensitivity(t) or 0.0)
        if plan.unit == "client":
            task = _data(plan, model, row, 1.0, 1.0)
            sums = [_sum(plan, task, path, streams, t, some) for some in (cohort, cohort[1:])]
            yield _distance(plan, sums[0], sums[1]), 1.0


def _drawn(plan: Plan, seed: int) -> Iterator[tuple[int, Seeded, Cohort, int]]:
    """Rounds in which somebody was drawn, and a row that is read: (t, streams, cohort, row)."""
    for k in range(TRIES):
        t, streams = k % plan.rounds, Seeded((seed << 32) + k)
        cohort = plan.clients.draw(t, streams.at(t, "cohort"))
        row = _drawn_row(plan, cohort, t, streams) if len(cohort) else None
        if row is not None:
            yield t, streams, cohort, row


def _distance(plan: Plan, one: Tensor, other: Tensor) -> float:
    norm = 2 if isinstance(plan.bound, AlreadyPrivate) else plan.bound.norm
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
    public = plan.public(t, len(start), None, lambda: public_update(plan, task, streams, start, t))
    return worker.collect(ClientJob(public, start, cohort)).total
