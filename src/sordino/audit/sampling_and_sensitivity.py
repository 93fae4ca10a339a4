"""Sampling and sensitivity tests of the behaviour audit. Called by `summary`.

Sampling tests compare drawn cohorts and batches with the distribution that the sampler states (`Sampler.law`,
`RecordSampler.law`). A sampler that states none is reported as not examined.

Sensitivity tests apply the definition: two data sets differ in one unit, whose gradient is opposite or which is absent,
and all randomness is equal. On each of the engine's code paths the distance of the two sums must be within the
sensitivity to which the noise is calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.accounting.bounds import AlreadyPrivate
from sordino.accounting.events import Event
from sordino.audit.noise_test import Finding, chernoff, finding, not_examined
from sordino.audit.trial_rounds import FAR, TrialRounds, run_trial_rounds, shrink_plan
from sordino.data.clients import Clients, Records
from sordino.engines.base import ClientJob
from sordino.engines.inprocess import InProcess, public_update
from sordino.engines.objectives import Path
from sordino.errors import UserError
from sordino.parts.record_samplers import SamplingLaw, batch_stream
from sordino.parts.samplers import Cohort, Everyone, draw_seeded
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task

Draw = NDArray[np.int64]
EPISODES, LENGTH = 8, 32  # seeds, and rounds of each
WORK = 2e7  # numbers that all draws of one sampler may touch
WIDTH, TENSORS = 6, 4  # entries of a tensor, and tensors, of the models whose sensitivity is measured
TRIES = 1000  # rounds that are searched for one in which a unit is drawn
LOUD = 1e6  # scale of the records
ROUNDING = 1e-3  # relative error that float32 sums may add
PATHS: tuple[tuple[str, Path | None], ...]
PATHS = (("linear", None), ("dense", None), ("tensors", "batched"), ("tensors", "sequential"))


# ---- which draws are tested
@dataclass(frozen=True)
class Draws:
    """Draws of a sampler, [episode][round], and its stated distribution; each episode has its own random streams."""

    what: str
    law: SamplingLaw
    episodes: list[list[Draw]]

    @property
    def all(self) -> list[tuple[int, Draw]]:
        """All draws of all episodes, as pairs (round, draw)."""
        return [(t, draw) for episode in self.episodes for t, draw in enumerate(episode)]


def cohort_tests(plan: Plan, seed: int = 0) -> list[Finding]:
    """Test cohorts that the plan's sampler draws from the whole population, with the random streams of a run."""
    law, length = plan.clients.law(), min(max(LENGTH, 2 * plan.clients.pass_rounds), plan.rounds)
    if law is None:
        return [_not_stated("cohort", "sampler", plan.clients.kind)]
    seeds = _seeds(seed, law.population, length)
    drawn = [[draw_seeded(plan.clients, Seeded(own), t) for t in range(length)] for own in seeds]
    accounted = _accounted_rate("cohort", law, plan.release.event(), plan.clients.amplify(plan.release.event()))
    found = [*sampling_tests(Draws("cohort", law, drawn)), *([accounted] if plan.clients.amplifies else [])]
    secret = not_examined("cohort: secret bins", "that bins are uniform, independent and secret is not tested")
    return [*found, secret] if plan.clients.keeps_bins else found


def batch_tests(plan: Plan, seed: int = 0) -> list[Finding]:
    """Test batches that the plan's local solver draws in the smallest silo."""
    reads, bound = plan.local.reads, plan.local.bound()
    if reads is None:
        return []
    silo = int(np.argmin([reads.size(each) for each in range(plan.clients.population)]))
    law, length = reads.law(silo), max(1, min(max(LENGTH, 2 * reads.pass_rounds), plan.rounds))
    if law is None:
        return [_not_stated("batch", "record sampler", reads.kind)]
    steps, event = 1, plan.release.event()
    if isinstance(bound, AlreadyPrivate):
        steps, event = bound.count, plan.local.own_event(silo)
    drawn: list[list[Draw]] = []
    for own in _seeds(seed, law.population, length * steps):
        streams = [batch_stream(reads, Seeded(own), t, silo) for t in range(length)]
        picked = [plan.local.indices(law.population, rng, t, silo) for t, rng in enumerate(streams)]
        drawn.append([row[row >= 0] for rows in picked for row in rows])
    accounted = _accounted_rate("batch", law, event, reads.amplify(event, silo))
    return [*sampling_tests(Draws("batch", law, drawn)), accounted]


def _not_stated(what: str, family: str, kind: str) -> Finding:
    return not_examined(f"{what}: sampling", f"{family} {kind!r} does not state how it draws (law)")


def _accounted_rate(what: str, law: SamplingLaw, event: Event, amplified: Event) -> Finding:
    """Test that the accounted event's sampling rate is not below the rate that the sampler states."""
    question, accounted = f"{what}: rate that is accounted for", 1.0 if amplified == event else amplified.inclusion
    if accounted is None:
        return not_examined(question, f"event {amplified.kind!r} does not state its inclusion")
    stated = max(float(law.inclusions(t).max()) for t in range(LENGTH)) if law.secret else 1.0
    held = stated <= accounted * (1 + 1e-9)
    return finding(question, float(held), lambda _: f"drawn at {stated:.4g} where {accounted:.4g} is accounted for")


def trial_round_tests(trials: TrialRounds) -> list[Finding]:
    """Test the cohorts of trial rounds and the batches of silo 0, both as the engine used them."""
    law = trials.plan.clients.law()
    cohorts = _by_episode(trials, [seen.cohort for seen in trials.rounds])
    found = [] if law is None else sampling_tests(Draws("cohort", law, cohorts))
    return [replace(one, question=f"trial rounds, {one.question}") for one in [*found, *_trial_batches(trials)]]


def _trial_batches(trials: TrialRounds) -> list[Finding]:
    """Test the batches of silo 0, which the clean sums show since each record has its own coordinate."""
    plan, reads = trials.plan, trials.plan.local.reads
    law = None if reads is None else reads.law(0)
    if reads is None or law is None or isinstance(plan.bound, AlreadyPrivate):
        return []
    if any(0 not in seen.cohort for seen in trials.rounds):
        try:  # a silo outside the cohort reads nothing: the same engine with all silos in every round
            trials = run_trial_rounds(replace(plan, clients=Everyone(plan.clients.population)), rounds=LENGTH * 2)
        except UserError as error:
            return [not_examined("batch: sampling", f"silo 0 is not in every round ({error})")]
    if sum(reads.size(silo) for silo in range(plan.clients.population)) > trials.size:
        return [not_examined("batch: sampling", f"more records than the {trials.size} coordinates that show them")]
    first = [np.flatnonzero(seen.total[: law.population].numpy() > 0.5) for seen in trials.rounds]
    return sampling_tests(Draws("batch", law, _by_episode(trials, first)))


def _by_episode(trials: TrialRounds, draws: Sequence[Draw]) -> list[list[Draw]]:
    found: dict[int, list[Draw]] = {}
    for seen, draw in zip(trials.rounds, draws, strict=True):
        found.setdefault(seen.episode, []).append(draw)
    return list(found.values())


def _seeds(seed: int, population: int, length: int) -> list[int]:
    """Return a seed for each episode: fewer episodes if they are long or draws are large, but at least two."""
    count = int(np.clip(WORK / (population * length), 2, EPISODES * LENGTH / length))
    return [(seed << 32) + (3 << 30) + episode for episode in range(max(2, count))]


# ---- tests of draws
def sampling_tests(draws: Draws) -> list[Finding]:
    """Run all tests on the draws of one sampler; only the first if a draw has an impossible size or member."""
    law, question = draws.law, f"{draws.what}: sizes and members"
    members = finding(question, [float(_is_possible(law, t, draw)) for t, draw in draws.all], lambda i: f"draw {i}")
    if not members.passed:
        return [members]
    if law.secret:
        return [members, *_rates(draws), *_sizes(draws), *_passes(draws), _secrecy(draws), *_separations(draws)]
    return [members, _participations(draws), *_separations(draws)]


def _is_possible(law: SamplingLaw, t: int, draw: Draw) -> bool:
    if len(draw) == 0:
        return law.size in (None, 0)
    inside = draw.min() >= 0 and draw.max() < law.population and bool((law.inclusions(t)[draw] > 0).all())
    few = law.cap is None or len(draw) <= law.cap
    distinct = bool(np.all(np.diff(np.sort(draw)) > 0))
    return bool(inside and few and distinct and law.size in (None, len(draw)))


def _participations(draws: Draws) -> Finding:
    """Test the largest number of participations of one unit, if draws are public."""
    question, law = f"{draws.what}: participations", draws.law
    if law.max_participations is None:
        return not_examined(question, "public draws without max_participations")
    counts = [np.bincount(np.concatenate(one), minlength=law.population).max() for one in draws.episodes]
    held = [float(n <= law.max_participations(len(one))) for n, one in zip(counts, draws.episodes, strict=True)]
    return finding(question, held, lambda i: f"{counts[i]} rounds with the same unit")


def _passes(draws: Draws) -> list[Finding]:
    """Test that each unit is in exactly one round of each whole pass, and in at most one of an unfinished pass."""
    size, counts = draws.law.pass_rounds, list[tuple[bool, Draw]]()
    if size == 1:
        return []
    for episode in draws.episodes:
        for first in range(0, len(episode), size):
            rounds = episode[first : first + size]
            counts.append((len(rounds) == size, np.bincount(np.concatenate(rounds), minlength=draws.law.population)))
    held = [float(count.max() <= 1 and (not whole or count.min() == 1)) for whole, count in counts]
    return [finding(f"{draws.what}: once a pass", held, lambda i: f"a unit in {counts[i][1].max()} rounds of pass {i}")]


def _separations(draws: Draws) -> list[Finding]:
    """Test the least number of rounds between two participations of one unit."""
    least = draws.law.min_separation
    if least is None or least < 2:
        return []
    nearest = np.full(len(draws.episodes), math.inf)
    for i, episode in enumerate(draws.episodes):
        last = np.full(draws.law.population, -math.inf)
        for t, draw in enumerate(episode):
            nearest[i] = min(nearest[i], float((t - last[draw]).min(initial=math.inf)))
            last[draw] = t
    text = f"rounds between two participations of one unit, {least} accounted for"
    return [finding(f"{draws.what}: separation", (nearest >= least).astype(float), lambda i: f"{nearest[i]:g} {text}")]


def _rates(draws: Draws) -> list[Finding]:
    """Test the total number of drawn units, and how often each unit is drawn."""
    law = draws.law
    each, could, due = (np.zeros(law.population) for _ in range(3))  # drawn, possible, expected
    shares = []  # drawn and expected share of the possible units, by round
    for t, draw in draws.all:
        p = law.inclusions(t)
        each[draw] += 1
        could += p > 0
        due += p
        shares.append((len(draw) / max((p > 0).sum(), 1), p.sum() / max((p > 0).sum(), 1)))
    hits, trials, mean = each.sum(), could.sum(), due.sum() / max(could.sum(), 1)
    if not law.independent:  # then only rounds are independent
        hits, trials, mean = sum(one for one, _ in shares), len(shares), sum(p for _, p in shares) / len(shares)
    rate, total = due / np.maximum(could, 1), f"drawn at {hits / max(trials, 1):.4g} where {mean:.4g} is accounted for"

    def text(i: int) -> str:
        return f"number {i} drawn in {each[i]:.0f} of {could[i]:.0f} rounds at rate {rate[i]:.4g}"

    return [
        finding(f"{draws.what}: rate", chernoff(hits, trials, mean), lambda _: total, trials > 0),
        finding(f"{draws.what}: rate of each", chernoff(each, could, rate), text, could > 0),
    ]


def _sizes(draws: Draws) -> list[Finding]:
    """Test how often a draw has more than m, m - sqrt(m) and m + sqrt(m) units, where m is the stated mean size."""
    law, question = draws.law, f"{draws.what}: spread of sizes"
    if law.size is not None:
        return []
    if law.size_sf is None:
        return [not_examined(question, "the sampler does not state how many are drawn (size, or size_sf)")]
    means = np.array([float(law.inclusions(t).sum()) for t, _ in draws.all])
    sizes = np.array([len(draw) for _, draw in draws.all])
    edges = (means + np.outer((0, -1, 1), np.sqrt(means))) * (1 + 1e-12)
    cuts = np.maximum(np.floor(edges), 0).astype(int)  # [3, rounds]
    above, n = (sizes > cuts).sum(1), len(sizes)
    pairs = [zip(draws.all, cut, strict=True) for cut in cuts]
    due = np.array([np.mean([law.size_sf(t, int(k)) for (t, _), k in each]) for each in pairs])
    names = ("the mean", "the mean less its root", "the mean and its root")

    def text(i: int) -> str:
        return f"more than {names[i]} in {above[i]} of {n} rounds, {due[i] * n:.0f} due"

    return [finding(question, chernoff(above, n, due), text)]


def _secrecy(draws: Draws) -> Finding:
    """Test that two draws (of near rounds, or of one round under two seeds) share members at the stated rate."""
    law, longest = draws.law, max(map(len, draws.episodes))
    # the least number of rounds after which the same units can be drawn again
    first = law.inclusions(0) > 0
    step = next((k for k in range(1, longest) if (first & (law.inclusions(k) > 0)).any()), 1) * law.pass_rounds
    starts = [(one, t) for one in draws.episodes for t in range(len(one) - step) if t // step % 2 == 0]
    across = [
        (a, b, t)
        for one, two in zip(draws.episodes[::2], draws.episodes[1::2], strict=False)
        for t, (a, b) in enumerate(zip(one, two, strict=False))
    ]
    near = [(one[t], one[t + step], t + step) for one, t in starts]
    kinds = {"of near rounds": near, "of the same round with another seed": across}
    hits, trials, due = (np.zeros(len(kinds)) for _ in range(3))
    for i, pairs in enumerate(kinds.values()):
        for a, b, t in (pair for pair in pairs if len(pair[0])):
            # given a, members of b are independent or negatively associated; else a whole pair is one trial
            weight = 1.0 if law.independent else 1.0 / len(a)
            hits[i] += weight * len(np.intersect1d(a, b))
            trials[i] += weight * len(a)
            due[i] += weight * float(law.inclusions(t)[a].sum())
    names = [f"{hits[i]:.4g} of {trials[i]:.0f} in both, {due[i]:.4g} due, {name}" for i, name in enumerate(kinds)]
    chances = chernoff(hits, trials, due / np.maximum(trials, 1))
    return finding(f"{draws.what}: secrecy", chances, lambda i: names[i], trials > 0)


# ---- tests of sensitivity
class Tensors(nn.Module):
    """Linear model <x, w> whose weight vector w is split into several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(WIDTH) for _ in range(TENSORS)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat(list(self.parts))


def model_of(name: str) -> nn.Module:
    """Return a model with fixed weights for which the engine uses its code path `name`."""
    if name == "tensors":
        return Tensors()
    size = WIDTH * TENSORS
    model = nn.Linear(size, 1) if name == "linear" else nn.Sequential(nn.Linear(size, 5), nn.ReLU(), nn.Linear(5, 1))
    for k, tensor in enumerate(model.parameters()):
        nn.init.constant_(tensor, 0.1 * (k + 1))
    return model


def sensitivity_tests(plan: Plan, seed: int = 0) -> list[Finding]:
    """Test, on each code path of the engine, that the sensitivity to one unit is at most that of the calibration."""
    small, findings = shrink_plan(plan), []
    for name, path in PATHS:
        title = f"sensitivity to one {small.unit}, {name} model" + (f", {path}" if path else "")
        if small.local.message_sensitivity(0) is None:
            why = f"local solver {small.local.kind!r} does not state its message_sensitivity"
            findings.append(not_examined(title, why))
            continue
        found = list(_relative_changes(small, model_of(name), path, seed))
        if not found:
            findings.append(not_examined(title, f"no unit was drawn in any of {TRIES} rounds"))
            continue
        text = f"{max(found):.4g} times the sensitivity that the noise is calibrated to"
        findings.append(Finding(title, len(found), 1.0 if max(found) <= 1 + ROUNDING else 0.0, text))
    return findings


def _relative_changes(plan: Plan, model: nn.Module, path: Path | None, seed: int) -> Iterator[float]:
    """Yield (distance of two sums) / (sensitivity of the calibration) for some rounds and pairs of data sets."""
    norm = 2 if isinstance(plan.bound, AlreadyPrivate) else plan.bound.norm

    def distance(one: Tensor, other: Tensor) -> float:
        found = float(torch.linalg.vector_norm(one.double() - other.double(), ord=norm))
        return found if found == found else math.inf

    for t, streams, cohort, row in islice(_drawn_rounds(plan, seed), min(plan.rounds, 2)):
        for signs, others in (((1.0, -1.0), 1.0), ((1e-3, -1.0), 1.0), ((1.0, -1.0), 1e-12)):
            tasks = [_data(plan, model, row, sign, others) for sign in signs]
            one, other = (_sum(plan, task, path, streams, t, cohort) for task in tasks)
            yield distance(one, other) / (2 * (plan.local.message_sensitivity(t) or 0.0))
        if plan.unit == "client":
            task = _data(plan, model, row, 1.0, 1.0)
            yield distance(*(_sum(plan, task, path, streams, t, some) for some in (cohort, cohort[1:])))


def _drawn_rounds(plan: Plan, seed: int) -> Iterator[tuple[int, Seeded, Cohort, int]]:
    """Yield (t, streams, cohort, row) for rounds in which record `row`, of the cohort's first client, is read."""
    reads = plan.local.reads
    for k in range(TRIES):
        t, streams = k % plan.rounds, Seeded((seed << 32) + k)
        cohort = draw_seeded(plan.clients, streams, t)
        if len(cohort) and reads is None:
            yield t, streams, cohort, int(cohort[0])
        elif len(cohort) and reads is not None:
            first = int(cohort[0])
            drawn = plan.local.indices(reads.size(first), batch_stream(reads, streams, t, first), t, first).ravel()
            drawn = drawn[drawn >= 0]
            if len(drawn):
                yield t, streams, cohort, sum(reads.size(silo) for silo in range(first)) + int(drawn[0])


def _data(plan: Plan, model: nn.Module, row: int, sign: float, others: float) -> Task:
    """Return a task whose gradients have scale `others`, except that of record `row`, which has scale `sign`."""
    reads, population = plan.local.reads, plan.clients.population
    sizes = [1 if reads is None else reads.size(silo) for silo in range(population)]
    count, size = sum(sizes), WIDTH * TENSORS
    x = LOUD * others * (1.0 + 0.5 * torch.arange(count * size, dtype=torch.float32).view(count, size).sin())
    y = FAR * (1.0 - 2.0 * (torch.arange(count) % 2))
    x[row], y[row] = LOUD * abs(sign), -FAR if sign > 0 else FAR
    held = Clients(Records(x, y), np.arange(count, dtype=np.int64), np.cumsum([0, *sizes]).astype(np.int64))
    return Task(model, held, loss="absolute", public=Records(torch.ones(1, size), torch.ones(1)))


def _sum(plan: Plan, task: Task, path: Path | None, streams: Seeded, t: int, cohort: Cohort) -> Tensor:
    worker = InProcess(path=path).prepare(plan, task, streams)
    start = task.layout.flatten(task.model)
    public = plan.public(t, len(start), None, lambda: public_update(plan, task, streams, start, t))
    return worker.collect(ClientJob(public, start, cohort)).total
