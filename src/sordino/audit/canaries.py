"""One-run canaries: the plan trains once, with canary clients or records among the others, each in by a fair coin.

A canary is data (random inputs, a random label): it goes through the task's own model, the plan's solver, the engine
and the loop like everybody else's. Whoever knows all data and all coins but the canaries' own, and sees what each round
releases, scores every canary; right guesses become lower bounds. Nothing of it is for release.

    epsilon   Steinke, Nasr, Jagielski 2023, Theorem 5.2: right guesses are dominated by W = Binomial(r, expit(eps)),
              with 2 m delta max_i P[v > W >= v - i] / i added for delta
    f-DP      Mahloujifar, Melis, Chaudhuri 2024, Algorithm 3: a recursion over the number of right guesses, for any
              trade-off curve; here of a Gaussian with mu, or of the certificate itself

Guarantee: each bound is above the truth with probability at most `alpha` over the canaries' coins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from sordino import codec
from sordino.accounting import accountant
from sordino.accounting.bounds import AlreadyPrivate
from sordino.accounting.composition import Line
from sordino.audit.mechanism import gaussian_epsilon_at
from sordino.audit.tradeoff import Limit, not_finite
from sordino.audit.trial_rounds import RecordingEngine
from sordino.data.clients import Clients, Records
from sordino.engines.base import ClientJob, Collected
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.errors import DataError
from sordino.loop import noised_mean, run
from sordino.parts.releases import NoNoise
from sordino.parts.samplers import Everyone
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task

ALPHA = 0.05  # each lower bound is above the truth with at most this probability
MOST, ENTRIES = 1000, 40_000_000  # canaries, and numbers in the rows of all of them
LOUD = 10.0  # inputs of a canary, in standard deviations of the data's

Bits = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CanaryAudit:
    """What one training proved against whoever sees its models, beside what is certified.

    lower_epsilon     assumes nothing (Steinke, Nasr, Jagielski 2023)
    lower_mu          if the whole run is as good as Gaussian (Mahloujifar, Melis, Chaudhuri 2024), and its epsilon
    passed            the certificate's epsilon is not below the bound, and its whole curve is not refuted
    """

    unit: str
    canaries: int
    rounds: int
    confidence: float
    delta: float
    guessed: int
    right: int
    lower_epsilon: float
    lower_mu: float
    gaussian_epsilon: float
    upper_epsilon: float
    passed: bool


def audit_canaries(plan: Plan, task: Task, *, delta: float, most: int = MOST, seed: int = 0) -> CanaryAudit:
    """Train once with canaries; lower bounds beside the upper one, to whoever sees the models."""
    line = max(plan.cost().of("models"), key=lambda one: accountant.bound(one.entries, one.relation, delta).value)
    if not all(event.protects for event, _ in line.entries):
        raise DataError("a plan that promises nothing", "a certified upper bound to compare with")
    planted = plant(plan, task, line, min(most, max(2, ENTRIES // task.layout.size)), seed)
    scores = np.zeros(len(planted.inside))
    worker, rounds = _alone(plan, planted.alone), 0
    engine = RecordingEngine(InProcess(), absent=planted.absent)
    for _ in run(plan, planted.task, engine=engine, streams=Seeded(seed), eval_every=plan.rounds + 1):
        job, collected = engine.seen.pop()
        scores += _scores(plan, planted, worker, job, collected, Seeded(seed))
        rounds += 1
    return lower_bounds(scores, planted.inside, line, delta, plan.unit, rounds)


def lower_bounds(scores: Floats, inside: Bits, line: Line, delta: float, unit: str, rounds: int) -> CanaryAudit:
    """The best of some numbers of guesses, each at its part of alpha."""
    if not_finite(scores):
        raise DataError("scores of canaries that are not finite", "releases that are numbers", "look for NaN in a part")
    tried, alpha = [guesses(scores, inside, share) for share in SHARES], ALPHA / len(SHARES)
    epsilons = [least_epsilon(found, delta, alpha) for found in tried]
    mu, best = max(least_mu(found, alpha) for found in tried), tried[int(np.argmax(epsilons))]
    upper = accountant.bound(line.entries, line.relation, delta).value
    curve = certified(Limit.of(line, upper, delta))
    return CanaryAudit(
        unit, len(inside), rounds, 1 - ALPHA, delta, best.made, best.right,
        lower_epsilon=max(epsilons),
        lower_mu=mu,
        gaussian_epsilon=gaussian_epsilon_at(mu, delta) if mu > 0 else 0.0,
        upper_epsilon=upper,
        passed=max(epsilons) <= upper and not any(rejects(curve, found, alpha) for found in tried),
    )  # fmt: skip


# ---- planted ---------------------------------------------------------------------------------------------------------


@codec.hides_values
@dataclass(frozen=True)
class Planted:
    """A task with canaries, and what the adversary knows of them.

    Canary i is client (or record) `places[i]`: it is there if inside[i]; else it is gone or, where neighbours replace,
    its stand-in is there. `alone` has every canary, and every stand-in after them, as a client of its own.
    """

    task: Task
    alone: Task
    places: NDArray[np.int64]
    inside: Bits
    replaced: bool
    absent: frozenset[int]  # clients that are not in the population at all


def plant(plan: Plan, task: Task, line: Line, most: int, seed: int) -> Planted:
    """Some clients (or records of the silos that the line is about) become canaries."""
    rng, replaced = Seeded(seed).at(0, "canaries"), line.relation == "replace_one"
    held = task.clients
    silos = np.repeat(np.arange(held.population), np.diff(held.offsets))
    where = np.arange(held.population) if plan.unit == "client" else np.arange(len(held.index))
    if line.silos:
        where = where[np.isin(where if plan.unit == "client" else silos, line.silos)]
    places = np.sort(rng.choice(where, min(most, len(where)), replace=False))
    inside = rng.random(len(places)) < 0.5
    mine = canaries(held.records, len(places), replaced, rng)
    first = len(held.records.x)
    table = Records(torch.cat([held.records.x, mine.x]), torch.cat([held.records.y, mine.y]), held.records.lazy)
    rows = first + np.arange(len(places)) + np.where(inside, 0, len(places) if replaced else 0)
    keep = inside | replaced
    clients = (_clients if plan.unit == "client" else _silos)(held, table, places, rows, keep)
    count = len(mine.x)
    alone = Clients(mine, np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))
    gone = places[~inside].tolist() if line.relation == "add_remove" and plan.unit == "client" else []
    with_canaries, single = replace(task, clients=clients), replace(task, clients=alone)
    return Planted(with_canaries, single, places, inside, replaced, frozenset(gone))


def canaries(like: Records, count: int, stand_ins: bool, rng: np.random.Generator) -> Records:
    """Random inputs far out, of the data's kind, with labels of random records; stand-ins have the opposite inputs."""
    shape = (count, *like.x.shape[1:])
    y = like.y[torch.from_numpy(rng.integers(len(like.x), size=count))].clone()
    if like.x.is_floating_point():
        scale = max(LOUD * float(like.x[:4096].float().std()), 1e-3)
        x = torch.from_numpy(rng.standard_normal(shape)).to(like.x.dtype) * scale
        other = -x
    else:
        low, high = int(like.x.min()), int(like.x.max())
        x, other = (torch.from_numpy(rng.integers(low, high + 1, size=shape)).to(like.x.dtype) for _ in range(2))
    return Records(torch.cat([x, other]), torch.cat([y, y])) if stand_ins else Records(x, y)


def _clients(held: Clients, table: Records, places: Any, rows: Any, keep: Bits) -> Clients:
    """Client places[i] holds the one record rows[i], or none."""
    parts = [held.rows(client) for client in range(held.population)]
    for place, row, there in zip(places, rows, keep, strict=True):
        parts[place] = np.array([row] if there else [], dtype=np.int64)
    return _table(table, parts)


def _silos(held: Clients, table: Records, places: Any, rows: Any, keep: Bits) -> Clients:
    """Record places[i] of all silos' is rows[i], or is gone."""
    index, stays = held.index.copy(), np.ones(len(held.index), dtype=np.bool_)
    index[places], stays[places] = rows, keep
    pairs = zip(held.offsets[:-1], held.offsets[1:], strict=True)
    return _table(table, [index[a:b][stays[a:b]] for a, b in pairs])


def _table(table: Records, parts: list[NDArray[np.int64]]) -> Clients:
    offsets = np.cumsum([0, *(len(part) for part in parts)]).astype(np.int64)
    return Clients(table, np.concatenate(parts), offsets)


# ---- trained and scored ----------------------------------------------------------------------------------------------


def _scores(
    plan: Plan, planted: Planted, worker: _Alone, job: ClientJob, collected: Collected, streams: Seeded
) -> Floats:
    """(z^2 + v K)^-1 D r: the best linear guess, D the canaries' pulls [m, d], K = D D^T, r what no prior explains.

    r = noised sum - what others sent - what the canaries send on average; v the variance of one canary's part.
    """
    if not plan.release.accepts(collected.received):
        return np.zeros(len(planted.inside))
    pulls, other = _pulls(worker, planted, job)
    drawn, reads = _drawn(plan, planted, job, streams), plan.local.reads
    rate = plan.clients.expected / plan.clients.population  # how often one unit is read
    rate *= 1.0 if reads is None else min(1.0, reads.count / float(np.mean(reads.sizes)))
    t, count = job.public.t, plan.release.denominator(plan.clients.expected, collected.received)
    noised = noised_mean(plan, collected, job.cohort, streams, t, {})[0].double() * count / _pace(plan, t)
    sent = torch.where(torch.from_numpy(planted.inside)[:, None], pulls, other)
    canaries_sum = sent[torch.from_numpy(drawn)].sum(0, dtype=torch.float64)
    known = collected.total - canaries_sum if _may_know(plan) else torch.zeros_like(noised)
    rest = noised - known.double() - rate / 2 * (pulls + other).sum(0).double()
    apart = (pulls - other).double()
    part = (rate / 2 - rate**2 / 4) if not planted.replaced else rate / 4
    std = _std(plan, job)
    mixed = part * (apart @ apart.T) + std**2 * torch.eye(len(apart), dtype=torch.float64)
    return np.asarray(torch.linalg.solve(mixed, apart @ rest))


def _may_know(plan: Plan) -> bool:
    """Others' coins tell nothing of a canary's, unless a fixed number is drawn; a silo's own noise stays unknown."""
    laws = [plan.clients.law(), *([] if plan.local.reads is None else [plan.local.reads.law(0)])]
    apart = all(law is not None and (not law.secret or (law.independent and law.size is None)) for law in laws)
    return apart and not isinstance(plan.bound, AlreadyPrivate)


def _pulls(worker: _Alone, planted: Planted, job: ClientJob) -> tuple[Tensor, Tensor]:
    """Messages [m, d'] of every canary at this round's model, and of what stands in for it (zero: nothing does)."""
    rows = len(planted.alone.clients.offsets) - 1
    found = [worker.messages(np.arange(a, min(a + 64, rows)), job) for a in range(0, rows, 64)]
    sent = torch.cat(found).float()
    count = len(planted.inside)
    return sent[:count], sent[count:] if planted.replaced else torch.zeros_like(sent[:count])


class _Alone(InProcessWorker):
    """The engine, asked for single messages."""

    def messages(self, clients: NDArray[np.int64], job: ClientJob) -> Tensor:
        if self.path == "batched":
            return self._one(clients, job)
        return torch.cat([self._one(clients[i : i + 1], job) for i in range(len(clients))])

    def _one(self, clients: NDArray[np.int64], job: ClientJob) -> Tensor:
        rows = self.solve(clients, job.public, job.start)
        slopes = self._slopes(clients, job) if self.slopes else None
        return self.encode(rows.nan_to_num(0.0, 0.0, 0.0), job, slopes)


def _alone(plan: Plan, task: Task) -> _Alone:
    """Every canary as a client of its own, without noise."""
    everyone, local = Everyone(task.clients.population), plan.local.for_one_record()
    single = replace(plan, clients=everyone, local=local, release=NoNoise())
    ready = InProcess().prepare(single, task, Seeded(0))
    return _Alone(single, task, Seeded(0), ready.way, ready.chunk)


def _drawn(plan: Plan, planted: Planted, job: ClientJob, streams: Seeded) -> Bits:
    """Which canaries (or their stand-ins) were read in this round: the coins of a simulation can be tossed again."""
    if plan.unit == "client":
        return np.isin(planted.places, job.cohort) & (planted.inside | planted.replaced)
    held, t = planted.task.clients, job.public.t
    rows = [
        held.rows(int(c))[picked[picked >= 0]]
        for c in job.cohort
        for picked in plan.local.indices(held.size(int(c)), streams.at(t, "batches", int(c)), t, int(c))
    ]
    first = len(held.records.x) - len(planted.alone.clients.records.x)
    mine = first + np.arange(len(planted.inside)) + np.where(planted.inside, 0, len(planted.inside))
    return np.isin(mine, np.concatenate(rows)) if rows else np.zeros(len(mine), dtype=np.bool_)


def _pace(plan: Plan, t: int) -> float:
    return plan.local.message_sensitivity(t) or 1.0


def _std(plan: Plan, job: ClientJob) -> float:
    """Of the noise in the sum, about."""
    if isinstance(plan.bound, AlreadyPrivate):
        own = [plan.local.own_noise(job.public.t, int(client)) for client in job.cohort]
        sum_of_squares = sum(0.0 if noise is None else noise.std**2 for noise in own)
        return math.sqrt(sum_of_squares) / _pace(plan, job.public.t) or 1.0
    return float(plan.release.noise_std(job.cohort, job.public.t)) or 1.0


Inverse = Callable[[float], float]  # the least false-alarm rate at which a power is allowed


SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of the canaries that are guessed; the best counts, at alpha / 5 each


@dataclass(frozen=True)
class Guesses:
    """`right` of `made` guesses about `canaries` fair coins."""

    canaries: int
    made: int
    right: int


def guesses(scores: Floats, inside: Bits, share: float) -> Guesses:
    """The largest scores are said to be in, as many of the smallest to be out; the rest is silence."""
    half = max(1, round(share * len(scores) / 2))
    order = np.argsort(scores, kind="stable")
    right = int((~inside[order[:half]]).sum() + inside[order[-half:]].sum())
    return Guesses(len(scores), 2 * half, right)


def chance(found: Guesses, epsilon: float, delta: float) -> float:
    """The most probability that an (epsilon, delta) release leaves to so many right guesses."""
    r, v = found.made, found.right
    rate = float(special.expit(epsilon))
    at_least = float(special.bdtrc(v - 1, r, rate)) if v else 1.0
    below = np.arange(v - 1, -1, -1)
    logs = special.gammaln(r + 1) - special.gammaln(below + 1) - special.gammaln(r - below + 1)
    masses = np.exp(logs + special.xlogy(below, rate) + special.xlog1py(r - below, -rate))
    steepest = float(np.max(np.cumsum(masses) / np.arange(1, v + 1))) if v else 0.0
    return min(1.0, at_least + 2 * found.canaries * delta * steepest)


def least_epsilon(found: Guesses, delta: float, alpha: float) -> float:
    """The largest epsilon under which so many right guesses have a chance of at most alpha."""
    return _largest(lambda epsilon: chance(found, epsilon, delta) <= alpha, 50.0)


def least_mu(found: Guesses, alpha: float) -> float:
    """The largest mu of which a Gaussian release would leave so many right guesses at most alpha."""
    return _largest(lambda mu: rejects(gaussian(mu), found, alpha), 20.0)


def rejects(inverse: Inverse, found: Guesses, alpha: float) -> bool:
    """Whether a trade-off curve leaves so many right guesses a chance of at most alpha."""
    m, made, right = found.canaries, found.made, found.right
    if not right or right == made:
        right = min(right, made - 1)  # the recursion needs one of each kind; fewer right ones prove less
    r, h = alpha * right / m, alpha * (made - right) / m
    for i in range(right - 1, -1, -1):
        grown = max(h, inverse(min(r, 1.0)))
        r, h = r + i / (made - i) * (grown - h), grown
        if r + h > made / m:
            return True
    return False


def gaussian(mu: float) -> Inverse:
    """Of mu-GDP: Phi(Phi^-1(power) - mu)."""
    return lambda power: float(special.ndtr(special.ndtri(power) - mu))


def certified(limit: Limit) -> Inverse:
    """Of a certificate's curve: power <= min over e of exp(e) a + delta(e), solved for a."""
    if limit.mu is not None:
        return gaussian(limit.mu)
    return lambda power: float(np.clip(np.max((power - limit.deltas) * np.exp(-limit.epsilons)), 0.0, 1.0))


def _largest(refuted: Callable[[float], bool], most: float) -> float:
    """By halving: what is refuted at x is refuted below it."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, most
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
