"""An attack on one record: two silos' data sets that differ in one canary, through the solver and the release that run.

The canary's slope is huge; in the other world it is replaced by its opposite, or is gone. What an adversary sees is
projected on the direction in which the canary pulls, and a Clopper-Pearson bound says how far apart the worlds are.
Where a silo tosses coins for its batch, they are tossed in every trial: many silos with the same records draw theirs.
`audit_preparation` attacks what is released of a column before the first round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.accounting.accountant import bound
from sordino.accounting.bounds import AlreadyPrivate, Unit
from sordino.accounting.composition import Adversary, Line, Participation
from sordino.accounting.events import Relation
from sordino.audit.tradeoff import Limit, Rates, at_least_zero, not_finite, separation, thresholds
from sordino.audit.trial_rounds import shrink_clients, shrink_local, shrink_release
from sordino.data.clients import Clients, Records
from sordino.engines.base import Collected
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.engines.prepare import noised_total
from sordino.loop import noised_mean
from sordino.parts.mechanisms import Laplace, Preparation, Values
from sordino.parts.releases import Forward, NoNoise
from sordino.parts.samplers import Everyone
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.rng import Seeded, Streams
from sordino.task import Task

FEATURES, RECORDS = 6, 64  # of the attacked silo
EPISODE = 8  # disjoint batches of a silo that is read once
TOSSED = 50  # so many times fewer trials where each runs a silo of its own
HELD = 20_000_000  # rows that all copies of the silo may list
LOUD = 1e9
Array = NDArray[np.float64]
Break = Callable[[InProcessWorker], None]  # a sabotage of the engine, for tests


@dataclass(frozen=True)
class Proved:
    """What an attack proved of one release, and what the cost allows at the same rate of false alarms."""

    line: Line
    trials: int
    delta: float
    lower: float
    allowed: float
    lower_epsilon: float
    upper_epsilon: float

    @property
    def share(self) -> float:
        """Above 1 the cost is false."""
        return self.lower / self.allowed


def audit_records(plan: Plan, delta: float, trials: int, alpha: float, seed: int = 0) -> list[Proved]:
    """One round, against whoever sees the model and whoever reads the messages, where they are promised something."""
    few = shrink_silos(plan)
    cost = few.cost(Participation(releases=1, max_participations=1))
    kept: dict[tuple[Any, ...], Adversary] = {}
    for line in (cost.line("messages", _weakest(few)), cost.line("models", _weakest(few))):
        if all(event.protects for event, _ in line.entries):
            kept.setdefault(line.entries, line.adversary)  # equal claims: the stronger adversary
    trials = trials // TOSSED if _tosses(few) else trials
    most = {}
    for who in kept.values():  # a trial draws the noise of all messages where they are shuffled
        messages = max(event.messages for event, _ in cost.line(who, _weakest(few)).entries)
        most[who] = max(trials // messages, 1000)
    return [attack_record(few, who, count, delta=delta, alpha=alpha, seed=seed) for who, count in most.items()]


def attack_record(
    plan: Plan, adversary: Adversary, trials: int, *, sabotage: Break | None = None, lost: int = 0,
    broken: Plan | None = None, delta: float = 1e-5, alpha: float = 2.5e-4, seed: int = 0,
) -> Proved:  # fmt: skip
    """Attack one round. The promise is the plan's; what runs is `broken`, if given, or the plan with a sabotage."""
    silo = _weakest(plan)
    line = plan.cost(Participation(releases=1, max_participations=1)).line(adversary, silo)
    other = None if line.relation == "add_remove" else -LOUD
    runs = broken or plan
    assert runs.local.reads is not None
    trials = min(trials, HELD // runs.local.reads.size(silo))
    worlds = enumerate((LOUD, other))
    there, gone = (_seen(runs, adversary, canary, trials, 2 * seed + k, sabotage, lost) for k, canary in worlds)
    return prove(there, gone, line, delta, alpha)


def prove(there: Array, gone: Array, line: Line, delta: float, alpha: float) -> Proved:
    """Thresholds chosen on a quarter of the trials, judged on the others."""
    pilot = len(there) // 4
    if not_finite(there, gone):
        certified = bound(line.entries, line.relation, delta).value
        return Proved(line, len(there), delta, math.inf, 0.0, math.inf, certified)
    if there.mean() < gone.mean():
        there, gone = -there, -gone
    cuts = thresholds(there[:pilot], gone[:pilot])
    tried = Rates.of(there[:pilot], gone[:pilot], cuts, alpha)
    at = [int(np.argmax(worth)) for worth in (tried.mu(), tried.epsilon(delta))]
    guess, sharp = (Rates.of(there[pilot:], gone[pilot:], cuts[i : i + 1], alpha) for i in at)
    upper = bound(line.entries, line.relation, max(delta, 1e-9)).value
    limit = Limit.of(line, upper, max(delta, 1e-9))
    allowed = float(separation(limit.most(guess.false), guess.false)[0])
    lower, lower_epsilon = at_least_zero(guess.mu()[0]), at_least_zero(sharp.epsilon(delta)[0])
    certified = bound(line.entries, line.relation, delta).value
    return Proved(line, len(there), delta, lower, allowed, lower_epsilon, certified)


# ---- the attacked silo -----------------------------------------------------------------------------------------------


def shrink_silos(plan: Plan) -> Plan:
    """The same plan for few silos with few records, drawn at about the same rate; one round of it."""
    clients = shrink_clients(plan.clients)
    small = shrink_local(plan.local, clients.population, EPISODE, RECORDS)
    plain = replace(plan, rounds=1, server=Sgd(lr=1.0), postprocess=()).fitted()
    return replace(plain, clients=clients, local=small, release=shrink_release(plan.release, clients))


def _weakest(plan: Plan) -> int:
    """The silo with the least noise, where silos differ."""
    own = plan.release.noise_multipliers or plan.local.noise_multipliers
    return int(np.argmin(own)) if own else 0


def _tosses(plan: Plan) -> bool:
    """Whether a silo's message is another one in every trial: noise of its own, or batches that are not public."""
    assert plan.local.reads is not None
    law = plan.local.reads.law(_weakest(plan))
    return isinstance(plan.bound, AlreadyPrivate) or law is None or law.secret


def _seen(
    plan: Plan, adversary: Adversary, canary: float | None, copies: int, seed: int, sabotage: Break | None, lost: int
) -> Array:
    """What an adversary sees of round 0 along the canary's direction; the noise of `lost` silos never reaches it."""
    silo = _weakest(plan)
    rows = _messages(plan, silo, canary, copies, sabotage)
    if isinstance(plan.bound, AlreadyPrivate):
        return _projected(rows)
    sent, streams = rows.repeat(copies // len(rows), 1).reshape(-1), Seeded(seed)
    if adversary == "messages":
        alone = np.array([silo])[lost:]
        return _projected(plan.release.in_sum(sent, alone, streams.at(0, "client noise", silo)).view(copies, -1))
    cohort = np.arange(plan.clients.population)
    many = Collected(sent, len(cohort))
    return _projected(noised_mean(plan, many, cohort[lost:], streams, 0, {})[0].view(copies, -1))


def _messages(plan: Plan, silo: int, canary: float | None, copies: int, sabotage: Break | None) -> Tensor:
    """What one silo sends [copies or 1, d]: from as many silos with its records where it tosses coins."""
    reads, spent = plan.local.reads, isinstance(plan.bound, AlreadyPrivate)
    assert reads is not None
    crowd = copies if _tosses(plan) else 1
    size = reads.size(silo)
    changed: dict[str, Any] = {"records": replace(reads, sizes=(size,))}  # type: ignore[type-var]
    if plan.local.noise_multipliers:
        changed |= {"noise_multiplier": plan.local.noise_multipliers[silo], "noise_multipliers": ()}
    local: Any = replace(plan.local, **changed)  # type: ignore[type-var]
    alone = replace(plan, clients=Everyone(crowd), local=local, release=Forward() if spent else NoNoise())
    # a record that round 0 reads, where that is public; else any
    first = 0 if _tosses(plan) else int(reads.draw(0, 0, size, Seeded(0).at(0, "none"))[0])
    one = world(canary, (size,), first)
    same = Clients(one.clients.records, np.tile(one.clients.index, crowd), np.arange(crowd + 1) * size)
    worker = InProcess(path="batched").prepare(alone, replace(one, clients=same), Seeded(0))
    if sabotage is not None:
        sabotage(worker)
    return worker.solve(np.arange(crowd), plan.public(0, FEATURES), torch.zeros(FEATURES)).double()


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


def _projected(rows: Tensor) -> Array:
    return np.asarray(rows[:, 0].double())


DRAWN = 1 << 24  # numbers drawn for each world of a preparation


Release = Callable[[Plan, Preparation, Iterable[Values], Streams], Tensor]


@dataclass(frozen=True)
class Copies(Preparation):
    """So many releases of one column as one long message: noise is independent per coordinate, so the law is theirs."""

    inner: Preparation
    count: int

    @property
    def column(self) -> str:  # type: ignore[override]
        return self.inner.column

    def message(self, shares: Values, unit: Unit) -> Values:
        return np.tile(self.inner.message(shares, unit), self.count)

    def noise(self, relation: Relation) -> Laplace:
        return self.inner.noise(relation)


def audit_preparation(
    plan: Plan,
    part: Preparation,
    delta: float,
    trials: int = 200_000,
    alpha: float = 1e-3,
    seed: int = 0,
    release: Release = noised_total,
) -> Proved:
    """One unit's values are all low, or all high; or, where a unit is taken away, all low or not there.

    The bins that differ are added up by their sign, each cut at where Laplace noise of this size tells no more.
    `release` is what runs; the promise is the plan's.
    """
    relation = plan.forecast.lines[0].relation
    own = (np.zeros(1), np.ones(1) if relation == "replace_one" else np.zeros(0))
    first, second = (part.message(values, plan.unit) for values in own)
    copies = Copies(part, min(trials, DRAWN // len(first)))
    # releases [copies, bins] of one client alone, who has `mine`: others could only add noise
    drawn = [release(plan, copies, [mine], Seeded(2 * seed + k)).numpy() for k, mine in enumerate(own)]
    worlds = [seen.reshape(copies.count, -1) for seen in drawn]
    shift, middle = first - second, (first + second) / 2
    there, gone = (np.clip((seen - middle) * np.sign(shift), -1, 1) @ np.abs(shift) for seen in worlds)
    return prove(there, gone, Line("models", relation, ((part.event(relation), 1),)), delta, alpha)
