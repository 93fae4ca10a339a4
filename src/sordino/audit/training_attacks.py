"""Attacks on a whole training: one-run canaries (`sordino audit --canaries`) and membership by a loss threshold.

Canaries: the plan trains once, with canary clients or records among the others, each included with probability 1/2. A
canary has random inputs and a random label, and is processed like all other data. The adversary sees each round's
release, and knows all data and all randomness except which canaries are included; it scores every canary and guesses
which are included. The number v of right guesses among r guesses on m canaries gives lower bounds:

    epsilon   Steinke, Nasr, Jagielski 2023, Theorem 5.2: under (eps, delta)-DP, with W = Binomial(r, expit(eps)),
              P[at least v right guesses] <= P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i
    f-DP      Mahloujifar, Melis, Chaudhuri 2024, Algorithm 3: a recursion over the number of right guesses, for any
              trade-off curve; here that of mu-GDP, or that of the certificate

Guarantee: each bound is above the truth with probability at most `ALPHA` over the random inclusion of canaries.
A model that was trained with canaries must not be released. Called by `summary`.
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
from torch import Tensor, nn

from sordino import codec
from sordino.accounting import accountant
from sordino.accounting.bounds import AlreadyPrivate
from sordino.accounting.composition import Line
from sordino.audit.attacks import gaussian_epsilon_at
from sordino.audit.tradeoff import Limit, not_finite
from sordino.audit.trial_rounds import RecordingEngine
from sordino.data.clients import Clients, Records
from sordino.engines.base import ClientJob, Collected
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.errors import DataError
from sordino.loop import noised_mean, run
from sordino.parts.record_samplers import batch_stream
from sordino.parts.releases import NoNoise
from sordino.parts.samplers import Everyone
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task

ALPHA = 0.05  # each lower bound is above the truth with at most this probability
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of the canaries that are guessed; the best counts, at ALPHA / 5 each
MAX_CANARIES, MAX_ENTRIES = 1000, 40_000_000  # canaries, and numbers in the messages of all of them
LOUD = 10.0  # scale of a canary's inputs, in standard deviations of the data

Bits = NDArray[np.bool_]
Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Inverse = Callable[[float], float]  # inverse trade-off curve: least false-alarm rate at which a power is allowed


# ---- one-run canaries
@dataclass(frozen=True)
class CanaryAudit:
    """Result of the canary attack by an adversary who sees the models: lower bounds, and the certified epsilon.

    lower_epsilon     lower bound that holds for any mechanism (Steinke, Nasr, Jagielski 2023)
    lower_mu          lower bound that holds if the whole run is mu-GDP (Mahloujifar, Melis, Chaudhuri 2024)
    gaussian_epsilon  epsilon at delta of lower_mu-GDP
    passed            the attack refutes neither the certified epsilon nor the certified trade-off curve
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


def audit_canaries(plan: Plan, task: Task, *, delta: float, most: int = MAX_CANARIES, seed: int = 0) -> CanaryAudit:
    """Train once with at most `most` canaries; return lower bounds on epsilon, and the certified epsilon."""
    line = max(plan.cost().of("models"), key=lambda one: accountant.bound(one.entries, one.relation, delta).value)
    if not all(event.protects for event, _ in line.entries):
        raise DataError("a plan without a guarantee", "a finite epsilon, to compare with", "add noise to the plan")
    planted = plant(plan, task, line, min(most, max(2, MAX_ENTRIES // task.layout.size)), seed)
    everyone, local = Everyone(planted.alone.clients.population), plan.local.for_one_record()
    alone = replace(plan, clients=everyone, local=local, release=NoNoise())
    worker = InProcess().prepare(alone, planted.alone, Seeded(0))
    scores, rounds, engine = np.zeros(len(planted.inside)), 0, RecordingEngine(absent=planted.absent)
    for _ in run(plan, planted.task, engine=engine, streams=Seeded(seed), eval_every=plan.rounds + 1):
        job, collected = engine.seen.pop()
        scores += _scores(plan, planted, worker, job, collected, Seeded(seed))
        rounds += 1
    return lower_bounds(scores, planted.inside, line, delta, plan.unit, rounds)


def lower_bounds(scores: Floats, inside: Bits, line: Line, delta: float, unit: str, rounds: int) -> CanaryAudit:
    """Return the largest lower bounds on epsilon and mu over several numbers of guesses.

    Each number is tested at level ALPHA / len(SHARES), so that all bounds hold together at level ALPHA (Bonferroni).
    """
    if not_finite(scores):
        raise DataError("canary scores with NaN or infinity", "finite releases", "find the part that returns NaN")
    tried, alpha = [guesses(scores, inside, share) for share in SHARES], ALPHA / len(SHARES)
    epsilons = [least_epsilon(found, delta, alpha) for found in tried]
    mu, best = max(least_mu(found, alpha) for found in tried), tried[int(np.argmax(epsilons))]
    upper = accountant.bound(line.entries, line.relation, delta).value
    curve = certified_inverse(Limit.of(line, upper, delta))
    return CanaryAudit(
        unit, len(inside), rounds, 1 - ALPHA, delta, best.made, best.right,
        lower_epsilon=max(epsilons),
        lower_mu=mu,
        gaussian_epsilon=gaussian_epsilon_at(mu, delta) if mu > 0 else 0.0,
        upper_epsilon=upper,
        passed=max(epsilons) <= upper and not any(rejects(curve, found, alpha) for found in tried),
    )  # fmt: skip


@codec.hides_values
@dataclass(frozen=True)
class Planted:
    """Task with canaries, and the adversary's knowledge about them.

    Canary i takes the place of client (or record) places[i] if inside[i]. Otherwise it is absent or, under replace-one,
    another record, its stand-in, takes that place. In the task `alone` each canary, and then each stand-in, is a client
    with one record.
    """

    task: Task
    alone: Task
    places: Rows
    inside: Bits
    replaced: bool
    absent: frozenset[int]  # clients that are not in the population at all


def plant(plan: Plan, task: Task, line: Line, most: int, seed: int) -> Planted:
    """Return the task with canaries in the place of some clients, or of some records.

    `line` is the line of the cost that is attacked; if it has silos, canaries are placed in these silos only.
    """
    rng, replaced, per_client = Seeded(seed).at(0, "canaries"), line.relation == "replace_one", plan.unit == "client"
    held = task.clients
    silos = np.repeat(np.arange(held.population), np.diff(held.offsets))
    where = np.arange(held.population) if per_client else np.arange(len(held.index))
    if line.silos:
        where = where[np.isin(where if per_client else silos, line.silos)]
    places = np.sort(rng.choice(where, min(most, len(where)), replace=False))
    inside = rng.random(len(places)) < 0.5
    mine = canary_records(held.records, len(places), replaced, rng)
    table = Records(torch.cat([held.records.x, mine.x]), torch.cat([held.records.y, mine.y]), held.records.lazy)
    rows = len(held.records.x) + np.arange(len(places)) + np.where(inside, 0, len(places) if replaced else 0)
    keep, parts = inside | replaced, [held.rows(client) for client in range(held.population)]
    if per_client:  # client places[i] holds the one record rows[i], or none
        for place, row, there in zip(places, rows, keep, strict=True):
            parts[place] = np.array([row] if there else [], dtype=np.int64)
    else:  # record places[i] of all silos becomes rows[i], or is removed
        index, stays = held.index.copy(), np.ones(len(held.index), dtype=np.bool_)
        index[places], stays[places] = rows, keep
        parts = [index[a:b][stays[a:b]] for a, b in zip(held.offsets[:-1], held.offsets[1:], strict=True)]
    clients = Clients(table, np.concatenate(parts), np.cumsum([0, *map(len, parts)]).astype(np.int64))
    count = len(mine.x)
    alone = Clients(mine, np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))
    gone = places[~inside].tolist() if line.relation == "add_remove" and per_client else []
    both = replace(task, clients=clients), replace(task, clients=alone)
    return Planted(*both, places, inside, replaced, frozenset(gone))


def canary_records(like: Records, count: int, stand_ins: bool, rng: np.random.Generator) -> Records:
    """Draw canary records: large random inputs of the data's type, with labels of random records of `like`.

    With `stand_ins`, as many records follow with opposite inputs, or with other random inputs if they are integers.
    """
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


def _messages(worker: InProcessWorker, job: ClientJob, count: int) -> Tensor:
    found, step = [], 64 if worker.path == "batched" else 1
    for part in (np.arange(i, min(i + step, count)) for i in range(0, count, step)):
        rows = worker.solve(part, job.public, job.start)
        slopes = worker._slopes(part, job) if worker.slopes else None
        found.append(worker.encode(rows.nan_to_num(0.0, 0.0, 0.0), job, slopes))
    return torch.cat(found).float()


def _scores(
    plan: Plan, planted: Planted, worker: InProcessWorker, job: ClientJob, collected: Collected, streams: Seeded
) -> Floats:
    """Return the best linear score of each canary, (z^2 I + v D D^T)^-1 D r.

    D has the messages [m, d] of the m canaries minus those of their stand-ins, z is the noise's standard deviation, v
    the variance of one canary's inclusion, and r the noised sum minus the other clients' messages and the canaries'
    mean contribution.
    """
    if not plan.release.accepts(collected.received):
        return np.zeros(len(planted.inside))
    m, t = len(planted.inside), job.public.t
    sent = _messages(worker, job, planted.alone.clients.population)
    own, other = sent[:m], sent[m:] if planted.replaced else torch.zeros_like(sent[:m])
    reads, spent = plan.local.reads, isinstance(plan.bound, AlreadyPrivate)
    expected = plan.clients.expected
    rate = expected / plan.clients.population  # how often one unit is read
    rate *= 1.0 if reads is None else min(1.0, reads.count / float(np.mean(reads.sizes)))
    scale, count = plan.local.message_sensitivity(t) or 1.0, plan.release.denominator(expected, collected.received)
    noised = noised_mean(plan, collected, job.cohort, streams, t, {})[0].double() * count / scale
    # others' draws reveal nothing of a canary's, unless a fixed number is drawn; a silo's own noise stays unknown
    laws = [plan.clients.law(), *([] if reads is None else [reads.law(0)])]
    independent = all(law is not None and (not law.secret or (law.independent and law.size is None)) for law in laws)
    known = torch.zeros_like(noised)
    if independent and not spent:
        drawn = torch.from_numpy(_drawn_canaries(plan, planted, job, streams))
        canaries = torch.where(torch.from_numpy(planted.inside)[:, None], own, other)[drawn]
        known = (collected.total - canaries.sum(0, dtype=torch.float64)).double()
    rest = noised - known - rate / 2 * (own + other).sum(0).double()
    apart = (own - other).double()
    variance = (rate / 2 - rate**2 / 4) if not planted.replaced else rate / 4
    if spent:
        noises = [plan.local.own_noise(t, int(client)) for client in job.cohort]
        std = math.sqrt(sum(0.0 if noise is None else noise.std**2 for noise in noises)) / scale
    else:
        std = float(plan.release.noise_std(job.cohort, t))
    mixed = variance * (apart @ apart.T) + (std or 1.0) ** 2 * torch.eye(m, dtype=torch.float64)
    return np.asarray(torch.linalg.solve(mixed, apart @ rest))


def _drawn_canaries(plan: Plan, planted: Planted, job: ClientJob, streams: Seeded) -> Bits:
    """Return which canaries or stand-ins were read in this round, by repeating the simulation's random draws."""
    if plan.unit == "client":
        return np.isin(planted.places, job.cohort) & (planted.inside | planted.replaced)
    held, t = planted.task.clients, job.public.t
    own = {int(c): batch_stream(plan.local.reads, streams, t, int(c)) for c in job.cohort}
    rows = [
        held.rows(c)[picked[picked >= 0]]
        for c, rng in own.items()
        for picked in plan.local.indices(held.size(c), rng, t, c)
    ]
    first = len(held.records.x) - len(planted.alone.clients.records.x)
    mine = first + np.arange(len(planted.inside)) + np.where(planted.inside, 0, len(planted.inside))
    return np.isin(mine, np.concatenate(rows)) if rows else np.zeros(len(mine), dtype=np.bool_)


# ---- from right guesses to lower bounds
@dataclass(frozen=True)
class Guesses:
    """Counts of a canary attack: canaries, guesses whether a canary was included, and right guesses among them."""

    canaries: int
    made: int
    right: int


def guesses(scores: Floats, inside: Bits, share: float) -> Guesses:
    """Guess "included" for the largest scores and "not included" for as many smallest, for a `share` of canaries."""
    half = max(1, round(share * len(scores) / 2))
    order = np.argsort(scores, kind="stable")
    right = int((~inside[order[:half]]).sum() + inside[order[-half:]].sum())
    return Guesses(len(scores), 2 * half, right)


def chance(found: Guesses, epsilon: float, delta: float) -> float:
    """Return an upper bound on the probability of at least this many right guesses under (epsilon, delta)-DP."""
    r, v = found.made, found.right
    rate = float(special.expit(epsilon))
    at_least = float(special.bdtrc(v - 1, r, rate)) if v else 1.0
    below = np.arange(v - 1, -1, -1)
    logs = special.gammaln(r + 1) - special.gammaln(below + 1) - special.gammaln(r - below + 1)
    masses = np.exp(logs + special.xlogy(below, rate) + special.xlog1py(r - below, -rate))
    steepest = float(np.max(np.cumsum(masses) / np.arange(1, v + 1))) if v else 0.0
    return min(1.0, at_least + 2 * found.canaries * delta * steepest)


def least_epsilon(found: Guesses, delta: float, alpha: float) -> float:
    """Return a lower bound on epsilon: the largest for which so many right guesses have probability <= alpha."""
    return _largest(lambda epsilon: chance(found, epsilon, delta) <= alpha, 50.0)


def least_mu(found: Guesses, alpha: float) -> float:
    """Return a lower bound on mu: the largest for which mu-GDP gives so many right guesses probability <= alpha."""
    return _largest(lambda mu: rejects(gaussian_inverse(mu), found, alpha), 20.0)


def rejects(inverse: Inverse, found: Guesses, alpha: float) -> bool:
    """Return whether so many right guesses have probability <= alpha under a trade-off curve, and so refute it."""
    m, made, right = found.canaries, found.made, found.right
    if not right or right == made:
        right = min(right, made - 1)  # the recursion needs a wrong guess; fewer right guesses prove less
    r, h = alpha * right / m, alpha * (made - right) / m
    for i in range(right - 1, -1, -1):
        grown = max(h, inverse(min(r, 1.0)))
        r, h = r + i / (made - i) * (grown - h), grown
        if r + h > made / m:
            return True
    return False


def gaussian_inverse(mu: float) -> Inverse:
    """Return the inverse trade-off curve of mu-GDP, power -> Phi(Phi^-1(power) - mu)."""
    return lambda power: float(special.ndtr(special.ndtri(power) - mu))


def certified_inverse(limit: Limit) -> Inverse:
    """Return the inverse of a certified trade-off curve: power -> the least false-alarm rate a with

    power <= min over e of exp(e) a + delta(e).
    """
    if limit.mu is not None:
        return gaussian_inverse(limit.mu)
    return lambda power: float(np.clip(np.max((power - limit.deltas) * np.exp(-limit.epsilons)), 0.0, 1.0))


def _largest(refuted: Callable[[float], bool], most: float) -> float:
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, most
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


# ---- membership inference
@dataclass(frozen=True)
class MembershipAudit:
    """Result of a membership attack by a loss threshold; random guessing has AUC 0.5."""

    members: int
    strangers: int
    auc: float
    true_positives: dict[str, float]  # at false-positive rates 0.001 and 0.01


def audit_membership(model: nn.Module, task: Task, *, most: int = 20_000, seed: int = 0) -> MembershipAudit:
    """Attack `model` by a loss threshold, with the clients' records as members and the test records as non-members."""
    if task.test is None or not len(task.test):
        raise DataError("a task without test records", "records that were not trained on", "pass test= to Task.of")
    rng, task = Seeded(seed).at(0, "membership"), task if model is task.model else replace(task, model=model)
    assert task.test is not None
    losses: list[Any] = []
    for records, index in ((task.clients.records, task.clients.index), (task.test, np.arange(len(task.test)))):
        chosen = index if len(index) <= most else rng.choice(index, most, replace=False)
        losses.append(_losses(task, records, torch.from_numpy(np.sort(chosen))))
    inside, outside = losses
    rates = {str(at): true_positive_rate(inside, outside, at) for at in (0.001, 0.01)}
    return MembershipAudit(len(inside), len(outside), auc(inside, outside), rates)


def auc(inside: Floats, outside: Floats) -> float:
    """Return the area under the attack's ROC curve, P[loss of a member < loss of a non-member]; ties count half."""
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([inside, outside]))
    n, m = len(inside), len(outside)
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))


def true_positive_rate(inside: Floats, outside: Floats, at: float) -> float:
    """Return the true-positive rate of the loss threshold whose false-positive rate is at most `at`."""
    allowed = int(np.floor(at * len(outside)))
    threshold = np.sort(outside)[allowed] if allowed < len(outside) else np.inf
    return float(np.mean(inside < threshold))


def _losses(task: Task, records: Records, where: Tensor) -> Floats:
    model, losses = task.program.training_model().eval(), task.program.losses
    with torch.no_grad():
        pairs = zip(torch.split(records.x[where], 2048), torch.split(records.y[where], 2048), strict=True)
        return torch.cat([losses(model(x), y) for x, y in pairs]).double().numpy()
