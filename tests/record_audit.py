"""An attack on one record: two silos' data sets that differ in one canary, through the solver and the release that run.

The canary's gradient is huge; in the other world it is replaced by its opposite (or is gone). What an adversary sees
is projected on the direction in which the canary pulls, and a Clopper-Pearson bound says how far apart the worlds are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.audit.tradeoff import Limit, Rates, thresholds
from sordino.data.task import Clients, Records, Task
from sordino.engines.base import ClientJob, Collected
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.parts.records import FixedRecords, PoissonRecords
from sordino.parts.samplers import Everyone
from sordino.plan import Plan
from sordino.privacy.accounting import bound
from sordino.privacy.bill import Adversary, Line, Participation
from sordino.privacy.bounds import Spent
from sordino.privacy.release import Forward, NoNoise
from sordino.rng import Seeded
from sordino.run import noised_mean

FEATURES, ALPHA, DELTA = 6, 2.5e-4, 1e-5
Array = NDArray[np.float64]
Break = Callable[[InProcessWorker], None]  # a sabotage of the engine


@dataclass(frozen=True)
class Proved:
    """What the attack proved of one release, and what the bill allows at the same rate of false alarms."""

    lower: float
    allowed: float

    @property
    def share(self) -> float:
        """Above 1 the bill is false."""
        return self.lower / self.allowed


def world(canary: float | None, sizes: tuple[int, ...], place: int = 0) -> Task:
    """A linear model at zero over silos of quiet records; one record of silo 0 pulls along x = (1, 0, ...)."""
    x = torch.zeros(sum(sizes), FEATURES)
    x[:, 1:] = 0.01 * torch.arange(sum(sizes) * (FEATURES - 1)).view(sum(sizes), -1).cos()
    y = torch.zeros(sum(sizes))
    if canary is not None:
        x[place], y[place] = 0.0, canary
        x[place, 0] = 1e3
    model = nn.Linear(FEATURES, 1, bias=False)
    nn.init.zeros_(model.weight)
    pairs = zip(torch.split(x, list(sizes)), torch.split(y, list(sizes)), strict=True)
    return Task(model, Clients.of([Records(a, b) for a, b in pairs]), loss="mse")


def sizes_of(plan: Plan) -> tuple[int, ...]:
    assert plan.local.reads is not None
    return tuple(plan.local.reads.size(silo) for silo in range(plan.clients.population))


def ready(plan: Plan, task: Task, sabotage: Break | None) -> InProcessWorker:
    worker = InProcess(path="batched").prepare(plan, task, Seeded(0))
    if sabotage is not None:
        sabotage(worker)
    return worker


def released(plan: Plan, canary: float | None, copies: int, seed: int, sabotage: Break | None, lost: int) -> Array:
    """The noised mean of round 0 as it is released, `copies` times; the noise of `lost` silos never reaches it."""
    task, cohort = world(canary, sizes_of(plan), read_first(plan)), np.arange(plan.clients.population)
    start = torch.zeros(FEATURES)
    collected = ready(plan, task, sabotage).collect(ClientJob(plan.public(0, FEATURES), start, cohort))
    many = Collected(collected.total.repeat(copies), collected.received)
    mean = noised_mean(plan, many, cohort[lost:], Seeded(seed), 0)
    return projected(mean.view(copies, -1))


def messages(plan: Plan, canary: float | None, copies: int, seed: int, sabotage: Break | None, lost: int) -> Array:
    """What leaves silo 0, from as many silos with its records: every one draws its own batch and its own noise."""
    reads, spent = plan.local.reads, isinstance(plan.bound, Spent)
    assert reads is not None
    tossed = spent or isinstance(reads, FixedRecords | PoissonRecords)
    size, crowd = reads.size(0), copies if tossed else 1
    local = replace(plan.local, records=replace(reads, sizes=(size,)))  # type: ignore[type-var]
    alone = replace(plan, clients=Everyone(crowd), local=local, release=Forward() if spent else NoNoise())
    one = world(canary, (size,), read_first(plan))
    same = Clients(one.clients.records, np.tile(one.clients.index, crowd), np.arange(crowd + 1) * size)
    worker = ready(alone, replace(one, clients=same), sabotage)
    rows = worker.solve(np.arange(crowd), plan.public(0, FEATURES), torch.zeros(FEATURES)).double()
    if not spent:
        sent = rows.repeat(copies // crowd, 1).reshape(-1)
        rows = plan.release.in_sum(sent, np.arange(1)[lost:], Seeded(seed).at(0, "client noise", 0)).view(copies, -1)
    return projected(rows)


def read_first(plan: Plan) -> int:
    """A record that round 0 reads, where that is public; else any."""
    reads = plan.local.reads
    assert reads is not None
    return int(reads.draw(0, 0, reads.size(0), Seeded(0).at(0, "none"))[0]) if reads.once else 0


def projected(rows: Tensor) -> Array:
    return np.asarray(rows[:, 0].double())


def prove(there: Array, gone: Array, line: Line) -> Proved:
    """A threshold chosen on a quarter of the trials, judged on the others."""
    pilot = len(there) // 4
    if there.mean() < gone.mean():
        there, gone = -there, -gone
    cuts = thresholds(there[:pilot], gone[:pilot])
    best = int(np.argmax(Rates.of(there[:pilot], gone[:pilot], cuts, ALPHA).mu()))
    rates = Rates.of(there[pilot:], gone[pilot:], cuts[best : best + 1], ALPHA)
    limit = Limit.of(line, bound(line.entries, line.relation, DELTA).value, DELTA)
    share = float(rates.share(limit)[0])
    lower = float(rates.mu()[0])
    return Proved(lower, lower / share if share > 0 else float("inf"))


def audit_record(
    plan: Plan,
    adversary: Adversary,
    trials: int,
    sabotage: Break | None = None,
    lost: int = 0,
    broken: Plan | None = None,
) -> Proved:
    """Attack one round. The promise is the plan's; what runs is `broken`, if given, or the plan with a sabotage."""
    line = plan.bill(Participation(releases=1, most=1)).line(adversary)
    see = messages if adversary == "messages" else released
    other = None if line.relation == "add_remove" else -1e9
    there = see(broken or plan, 1e9, trials, 1, sabotage, lost)
    gone = see(broken or plan, other, trials, 2, sabotage, lost)
    return prove(there, gone, line)
