"""Attacks of the mechanism audit on one record, on released histograms, and on rounds with correlated noise.

Record attack: two data sets of a silo differ in one canary record with a huge gradient, which in the other data set is
opposite or absent; both are processed by the plan's own solver and release. What the adversary sees is projected on the
canary's direction. If a silo draws its batches in secret, each trial draws new batches.

Attack on several rounds: one unit adds x to the sums y of its rounds, whose noise has covariance L L^T. L^-1 y is then
L^-1 x plus white noise, and <L^-1 x, L^-1 y> / ||L^-1 x|| is the likelihood ratio statistic. The two data sets are
||C x|| / z standard deviations apart (noise matrix C^-1, noise multiplier z); the accounted sensitivity bounds ||C x||
over all sets of rounds in which one unit may take part. Called by `mechanism`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from scipy.linalg import solve_triangular
from torch import Tensor, nn

from sordino.accounting import accountant
from sordino.accounting.bounds import AlreadyPrivate, Unit
from sordino.accounting.composition import Adversary, Cost, Line, Participation
from sordino.accounting.events import GaussianNoise, Relation
from sordino.audit.tradeoff import Array, Limit, Rates, at_least_zero, not_finite, separation, thresholds
from sordino.audit.trial_rounds import shrink_clients, shrink_local, shrink_release
from sordino.data.clients import Clients, Records
from sordino.engines.base import Collected
from sordino.engines.checks import noised_histogram
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.loop import noised_mean
from sordino.parts.mechanisms import Mechanism, Preparation, Values
from sordino.parts.record_samplers import batch_stream
from sordino.parts.releases import Forward, NoNoise, Release
from sordino.parts.samplers import Everyone, draw_seeded, separation_guard
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.rng import Seeded, Streams
from sordino.task import Task

FEATURES, RECORDS = 6, 64  # coordinates of the attacked model, most records of the attacked silo
BATCHES = 8  # disjoint batches of a silo that is read once
SILO_COST = 50  # a trial that runs a whole silo costs as much as this many other trials
MAX_ROWS = 20_000_000  # rows that all copies of the silo may list
LOUD = 1e9
MAX_ROUNDS, MAX_SECRET_TRIALS = 64, 20_000  # of a sequence; trials where each draws its own participation
MAX_DRAWS = 1 << 24  # numbers drawn for each data set in the attack on a column
ONE_ROUND = Participation(releases=1, max_participations=1)


@dataclass(frozen=True)
class MechanismAudit:
    """Result of one adversary's attack: proved lower bounds and certified upper bounds.

    lower_mu          Phi^-1(power) - Phi^-1(false-alarm rate), at their Clopper-Pearson bounds
    upper_mu          the same with the power that the certificate allows at that false-alarm rate
    lower_epsilon     log((power - delta) / false-alarm rate) of the best test; holds for any mechanism
    gaussian_epsilon  epsilon at delta of lower_mu-GDP, if the noise is Gaussian
    movement          largest norm by which one message changes, in clip norms: at most 1, or 2 under replace-one
    passed            both lower bounds are at most the upper bounds: the attack does not refute the certificate
    """

    adversary: Adversary
    relation: Relation
    trials: int  # with the attacked unit, and as many without
    delta: float
    attack: str
    movement: float
    lower_mu: float
    upper_mu: float
    lower_epsilon: float
    upper_epsilon: float
    gaussian_epsilon: float | None
    passed: bool
    examined: bool = True  # False: a part does not state what the attack needs; `attack` names it

    @property
    def share(self) -> float:
        """Ratio lower_mu / upper_mu; a ratio above 1 refutes the certificate."""
        return self.lower_mu / self.upper_mu

    @classmethod
    def of(
        cls, line: Line, trials: int, delta: float, attack: str, movement: float, bounds: tuple[float, float, float]
    ) -> MechanismAudit:
        """Build the result from `bounds` = (lower_mu, upper_mu, lower_epsilon) and the attacked line of the cost."""
        (lower, allowed, epsilon), certified = bounds, certified_epsilon(line, delta)
        gaussian = accountant.gaussian_mu(line.entries, line.relation) is not None and 0 < lower < math.inf
        as_gaussian = gaussian_epsilon_at(lower, delta) if gaussian else None
        passed = lower <= allowed and epsilon <= certified
        tried = line.adversary, line.relation, trials, delta, attack, movement
        return cls(*tried, lower, allowed, epsilon, certified, as_gaussian, passed)


UNBOUNDED = (math.inf, 0.0, math.inf)  # bounds for a release that is not finite: any test refutes the certificate


def proved_bounds(rates: Rates, tail: Rates, limit: Limit, delta: float) -> tuple[float, float, float]:
    """Return lower_mu and upper_mu of the test with the bounds `rates`, and lower_epsilon of the test with `tail`."""
    allowed = float(separation(limit.most(rates.false), rates.false)[0])
    return at_least_zero(rates.mu()[0]), allowed, at_least_zero(tail.epsilon(delta)[0])


def gaussian_epsilon_at(mu: float, delta: float) -> float:
    """Return the epsilon of mu-GDP at this delta."""
    return accountant.bound(((GaussianNoise(1 / mu), 1),), "zero_out", delta).value


@lru_cache(maxsize=64)
def certified_epsilon(line: Line, delta: float) -> float:
    return accountant.epsilon(line.entries, line.relation, delta).value


def certified_limit(line: Line, delta: float) -> Limit:
    """Return the certified limit on a test's power at each false-alarm rate, for one adversary's line of the cost.

    The grid of epsilons ends at the epsilon that is certified at delta, or at 1e-9 if delta is smaller.
    """
    positive = max(delta, 1e-9)
    return Limit.of(line, certified_epsilon(line, positive), positive)


def weakest_client(plan: Plan) -> int:
    """Return the client with the least noise, or client 0 if all have the same noise multiplier."""
    own = plan.release.noise_multipliers or plan.local.noise_multipliers
    return int(np.argmin(own)) if own else 0


def prove(
    there: Array, gone: Array, line: Line, delta: float, alpha: float, attack: str, movement: float | None = None
) -> MechanismAudit:
    """Return the result of an attack by thresholds on scores with (`there`) and without (`gone`) the attacked unit.

    A quarter of the trials chooses the thresholds; the other trials bound their error rates at level alpha.
    """
    most = (1.0 if line.relation == "add_remove" else 2.0) if movement is None else movement
    if not_finite(there, gone):
        return MechanismAudit.of(line, len(there), delta, attack, most, UNBOUNDED)
    limit, pilot = certified_limit(line, delta), len(there) // 4
    if there[:pilot].mean() < gone[:pilot].mean():
        there, gone = -there, -gone
    cuts = thresholds(there[:pilot], gone[:pilot])
    tried = Rates.of(there[:pilot], gone[:pilot], cuts, alpha)
    best = [cuts[[int(np.argmax(worth))]] for worth in (tried.share(limit), tried.epsilon(delta))]
    rates, tail = (Rates.of(there[pilot:], gone[pilot:], cut, alpha) for cut in best)
    return MechanismAudit.of(line, len(there), delta, attack, most, proved_bounds(rates, tail, limit, delta))


# ---- one record
def audit_records(plan: Plan, delta: float, trials: int, alpha: float, seed: int = 0) -> list[MechanismAudit]:
    """Attack one record in one round, as the adversary who sees messages and as the one who sees models.

    An adversary against whom the cost has no bound is left out, and equal claims are attacked once.
    """
    small = shrink_silos(plan)
    cost, silo = small.cost(ONE_ROUND), weakest_client(small)
    claims: dict[Any, Line] = {}  # the stronger adversary first
    for line in (cost.line("messages", silo), cost.line("models", silo)):
        if all(event.protects for event, _ in line.entries):
            claims.setdefault(line.entries, line)
    trials, found = trials // SILO_COST if _draws_in_secret(small) else trials, []
    for line in claims.values():  # a trial of a shuffled round draws the noise of all its messages
        count = max(trials // max(event.messages for event, _ in line.entries), 1000)
        found.append(attack_record(small, line.adversary, count, delta=delta, alpha=alpha, seed=seed))
    return found


def attack_record(
    plan: Plan, adversary: Adversary, trials: int, *, sabotage: Callable[[InProcessWorker], None] | None = None,
    lost: int = 0, broken: Plan | None = None, delta: float = 1e-5, alpha: float = 2.5e-4, seed: int = 0,
) -> MechanismAudit:  # fmt: skip
    """Attack one record in round 0, and compare the result with the plan's cost.

    Tests of the audit sabotage it: `broken` is a plan that runs instead, `sabotage` changes the worker, and the noise
    of the first `lost` silos is omitted.
    """
    silo, runs = weakest_client(plan), broken or plan
    line = plan.cost(ONE_ROUND).line(adversary, silo)
    assert runs.local.reads is not None
    copies, views = min(trials, MAX_ROWS // runs.local.reads.size(silo)), []
    for k, canary in enumerate((LOUD, None if line.relation == "add_remove" else -LOUD)):
        rows, streams = _messages(runs, canary, copies, sabotage), Seeded(2 * seed + k)
        if not isinstance(runs.bound, AlreadyPrivate):
            sent = rows.repeat(copies // len(rows), 1).reshape(-1)
            if adversary == "messages":
                weakest = weakest_client(runs)
                alone, rng = np.array([weakest])[lost:], streams.at(0, "client noise", weakest)
                rows = runs.release.in_sum(sent, alone, rng).view(copies, -1)
            else:
                cohort = np.arange(runs.clients.population)
                many = Collected(sent, len(cohort))
                rows = noised_mean(runs, many, cohort[lost:], streams, 0, {})[0].view(copies, -1)
        views.append(np.asarray(rows[:, 0].double()))
    return prove(views[0], views[1], line, delta, alpha, "one record; shift")


def shrink_silos(plan: Plan) -> Plan:
    """Return a one-round copy of the plan with few silos of few records, sampled at about the same rate."""
    clients = shrink_clients(plan.clients)
    local = shrink_local(plan.local, clients.population, BATCHES, RECORDS)
    plain = replace(plan, rounds=1, server=Sgd(lr=1.0), postprocess=()).fitted()
    return replace(plain, clients=clients, local=local, release=shrink_release(plan.release, clients))


def _draws_in_secret(plan: Plan) -> bool:
    """Return whether a silo's message is random: by noise in its steps, or by batches that are not public."""
    assert plan.local.reads is not None
    law = plan.local.reads.law(weakest_client(plan))
    return isinstance(plan.bound, AlreadyPrivate) or law is None or law.secret


def _messages(
    plan: Plan, canary: float | None, copies: int, sabotage: Callable[[InProcessWorker], None] | None
) -> Tensor:
    """Return the messages [copies, d] of the attacked silo, or [1, d] if all copies are equal."""
    silo, reads, spent = weakest_client(plan), plan.local.reads, isinstance(plan.bound, AlreadyPrivate)
    assert reads is not None
    secret, size = _draws_in_secret(plan), reads.size(silo)
    count = copies if secret else 1
    changed: dict[str, Any] = {"records": replace(reads, sizes=(size,))}  # type: ignore[type-var]
    if plan.local.noise_multipliers:
        changed |= {"noise_multiplier": plan.local.noise_multipliers[silo], "noise_multipliers": ()}
    local: Any = replace(plan.local, **changed)  # type: ignore[type-var]
    alone = replace(plan, clients=Everyone(count), local=local, release=Forward() if spent else NoNoise())
    # the canary is a record that round 0 reads, where that is public
    place = 0 if secret else int(reads.draw(0, 0, size, Seeded(0).at(0, "none"))[0])
    one = canary_task(canary, (size,), place)
    same = Clients(one.clients.records, np.tile(one.clients.index, count), np.arange(count + 1) * size)
    worker = InProcess(path="batched").prepare(alone, replace(one, clients=same), Seeded(0))
    if sabotage is not None:
        sabotage(worker)
    return worker.solve(np.arange(count), plan.public(0, FEATURES), torch.zeros(FEATURES)).double()


def canary_task(canary: float | None, sizes: tuple[int, ...], place: int = 0) -> Task:
    """Build a task with a linear model w = 0, silos of small records, and a canary with gradient in coordinate 0."""
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


# ---- released histograms
@dataclass(frozen=True)
class Copies(Preparation):
    """Many independent releases of one histogram, computed as one long vector with independent noise."""

    inner: Preparation
    count: int

    @property
    def column(self) -> str:  # type: ignore[override]
        return self.inner.column

    def message(self, shares: Values, unit: Unit) -> Values:
        return np.tile(self.inner.message(shares, unit), self.count)

    def noise(self, relation: Relation) -> Mechanism:
        return self.inner.noise(relation)


def audit_preparation(
    plan: Plan, part: Preparation, delta: float, trials: int = 200_000, alpha: float = 1e-3, seed: int = 0,
    release: Callable[[Plan, Preparation, Iterable[Values], Streams], Tensor] = noised_histogram,
) -> MechanismAudit:  # fmt: skip
    """Attack the noised histogram of a column, which is released before round 1.

    In one data set all values of one unit are low; in the other they are high, or the unit is absent. The score of a
    trial is the signed sum of the bins that differ, each clipped beyond the two counts, where the likelihood ratio of
    Laplace noise is constant. `release` is the attacked code; the claimed cost is the plan's.
    """
    relation = plan.forecast.lines[0].relation
    own = (np.zeros(1), np.ones(1) if relation == "replace_one" else np.zeros(0))
    first, second = (part.message(values, plan.unit) for values in own)
    copies = Copies(part, min(trials, MAX_DRAWS // len(first)))
    # one client alone is the worst case: others could only add noise
    drawn = [release(plan, copies, [mine], Seeded(2 * seed + k)).numpy() for k, mine in enumerate(own)]
    views = [seen.reshape(copies.count, -1) for seen in drawn]
    shift, middle = first - second, (first + second) / 2
    there, gone = (np.clip((seen - middle) * np.sign(shift), -1, 1) @ np.abs(shift) for seen in views)
    line = Line("models", relation, ((part.event(relation), 1),))
    return prove(there, gone, line, delta, alpha, "one unit's column; shift")


# ---- rounds with correlated noise
def whitening(release: Release, rounds: int) -> Array | None:
    """Return L^-1, where L L^T is the covariance of the noise of rounds at scale 1; None if the release states none."""
    made = release.noise_matrix(rounds)
    if made is None:
        return None
    return np.asarray(solve_triangular(np.linalg.cholesky(made @ made.T), np.eye(rounds), lower=True))


@dataclass(frozen=True)
class Sequence:
    """First rounds of a plan, from sums without noise to released means; tests override a method to sabotage it."""

    plan: Plan

    @property
    def rounds(self) -> int:
        """Number of attacked rounds: enough for several participations of one client, at most `MAX_ROUNDS`."""
        reads = self.plan.local.reads
        apart = max(self.plan.clients.min_separation or 1, 1 if reads is None else reads.min_separation(0) or 1)
        return min(self.plan.rounds, MAX_ROUNDS, max(3 * apart, 8))

    @property
    def cost(self) -> Cost:
        return self.plan.cost(Participation.planned(self.plan.clients, self.rounds))

    def patterns(self, streams: Streams) -> Array:
        """Draw which units take part in each round, as 0 or 1, [rounds, units].

        A unit is a client, or a record of silo 0 if the local solver reads batches of records.
        """
        clients, reads = self.plan.clients, self.plan.local.reads
        guard = separation_guard(clients, self.plan.rounds, streams, 0) if self.plan.release.correlated else None
        found = np.zeros((self.rounds, clients.population if reads is None else reads.size(0)))
        for t in range(self.rounds):
            drawn = draw_seeded(clients, streams, t)
            came = drawn if guard is None else guard.admit(t, drawn)
            if reads is None:
                found[t, came] = 1.0
            elif 0 in came:
                found[t, reads.draw(t, 0, reads.size(0), batch_stream(reads, streams, t, 0))] = 1.0
        return found

    def released(self, sums: Array, streams: Streams) -> Array:
        """Return the sums [rounds, n] of n independent runs with the plan's noise, added by the training code."""
        memory, seen, nobody = self.plan.release.init(sums.shape[1]), [], np.zeros(0, dtype=np.int64)
        for t, total in enumerate(sums):
            collected = Collected(torch.from_numpy(total), 0)
            mean, memory = noised_mean(self.plan, collected, nobody, streams, t, memory)
            seen.append(mean.double().numpy() * self.plan.clients.expected)
        return np.stack(seen)

    def participations(self, count: int, streams: Streams) -> Array:
        """Draw whether client 0 takes part in each round of `count` runs, [rounds, count], by the plan's sampler."""
        sampler = self.plan.clients.for_one_client()
        found, law = np.zeros((self.rounds, count)), sampler.law()
        for t in (t for t in range(self.rounds) if law is None or law.inclusions(t)[0] > 0):
            rng = streams.at(t - t % sampler.pass_rounds, "cohort")  # a run's draws of one pass are the same
            drawn = (sampler.draw(t, rng) for _ in range(count))
            found[t] = [float(len(cohort) > 0 and cohort[0] == 0) for cohort in drawn]
        return found


def audit_sequence(
    sequence: Sequence, white: Array, movement: float, delta: float, trials: int, alpha: float, seed: int
) -> list[MechanismAudit]:
    """Attack all rounds together, as the adversary who sees models and as the adversary who also sees cohorts.

    `white` is the matrix L^-1 of `whitening`, `movement` the change of a round's sum by one unit. Each bound fails with
    probability at most alpha.
    """
    seeds, found = iter(range(seed << 32, (seed + 1) << 32)), []
    words = f"{sequence.rounds} rounds at once; whitened and projected"
    patterns = sequence.patterns(Seeded(next(seeds)))
    worst = patterns[:, int(np.argmax(np.linalg.norm(white @ patterns, axis=0)))]
    cohort = sequence.plan.cost(Participation(sequence.rounds, int(worst.sum()))).line("cohort")
    for line in (sequence.cost.line("models"), cohort):
        amplified = line.entries != cohort.entries
        count = min(trials, MAX_SECRET_TRIALS) if amplified else trials
        x = sequence.participations(count, Seeded(next(seeds))) if amplified else worst[:, None]
        mark = white @ (x.max(axis=1))
        scores = [
            (mark / np.linalg.norm(mark)) @ white @ sequence.released(sums, Seeded(next(seeds)))
            for sums in (movement * x + np.zeros((1, count)), np.zeros((sequence.rounds, count)))
        ]
        found.append(prove(scores[0], scores[1], line, delta, alpha, words, movement))
    return found
