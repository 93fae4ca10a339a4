"""Sampling tests: are cohorts and batches drawn as the sampler states? Called by the behaviour audit.

Samplers state how they draw (`Sampler.law`, `RecordSampler.law`); of one that does not, nothing is examined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.bounds import AlreadyPrivate
from sordino.accounting.events import Event
from sordino.audit.noise_test import Finding, chernoff, finding, not_examined
from sordino.audit.trial_rounds import TrialRounds, run_trial_rounds
from sordino.errors import UserError
from sordino.parts.record_samplers import SamplingLaw
from sordino.parts.samplers import Everyone
from sordino.plan import Plan
from sordino.rng import Seeded

Draw = NDArray[np.int64]
Array = NDArray[np.float64]
EPISODES, LENGTH = 8, 32  # seeds, and rounds of each
WORK = 2e7  # numbers that all draws of one sampler may touch


@dataclass(frozen=True)
class Draws:
    """What a sampler drew, [episode][round], beside what it states; every episode has streams of its own."""

    what: str
    law: SamplingLaw
    episodes: list[list[Draw]]

    @property
    def all(self) -> list[tuple[int, Draw]]:
        """(round, draw), one after the other."""
        return [(t, draw) for episode in self.episodes for t, draw in enumerate(episode)]


def cohort_tests(plan: Plan, seed: int = 0) -> list[Finding]:
    """The plan's own sampler, over its own population, on the streams that a run would open."""
    law = plan.clients.law()
    if law is None:
        return [_silent("cohort", "sampler", plan.clients.kind)]
    length = min(LENGTH, plan.rounds)
    drawn = [
        [plan.clients.draw(t, Seeded(own).at(t, "cohort")) for t in range(length)]
        for own in _seeds(seed, law.population, length)
    ]
    accounted = [_accounted_rate("cohort", law, plan.release.event(), plan.clients.amplify(plan.release.event()))]
    return [*sampling_tests(Draws("cohort", law, drawn)), *(accounted if plan.clients.amplifies else [])]


def batch_tests(plan: Plan, seed: int = 0) -> list[Finding]:
    """The batches that the local solver asks its engine for, of the smallest silo."""
    reads = plan.local.reads
    if reads is None:
        return []
    silo = int(np.argmin([reads.size(each) for each in range(plan.clients.population)]))
    law, bound = reads.law(silo), plan.local.bound()
    private = isinstance(bound, AlreadyPrivate)
    steps = bound.count if isinstance(bound, AlreadyPrivate) else 1
    if law is None:
        return [_silent("batch", "record sampler", reads.kind)]
    length = max(1, min(LENGTH, plan.rounds))

    def rows(own: int, t: int) -> list[Draw]:
        picked = plan.local.indices(law.population, Seeded(own).at(t, "batches", silo), t, silo)
        return [row[row >= 0] for row in picked]

    seeds = _seeds(seed, law.population, length * steps)
    drawn = [[row for t in range(length) for row in rows(own, t)] for own in seeds]
    event = plan.local.own_event(silo) if private else plan.release.event()
    accounted = _accounted_rate("batch", law, event, reads.amplify(event, silo))
    return [*sampling_tests(Draws("batch", law, drawn)), accounted]


def _silent(what: str, family: str, kind: str) -> Finding:
    return not_examined(f"{what}: sampling", f"{family} {kind!r} does not state how it draws (law)")


def _accounted_rate(what: str, law: SamplingLaw, event: Event, amplified: Event) -> Finding:
    """Whether the rate that the cost is amplified by is no less than the stated one."""
    question, accounted = f"{what}: rate that is accounted for", 1.0 if amplified == event else amplified.inclusion
    if accounted is None:
        return not_examined(question, f"event {amplified.kind!r} does not state its inclusion")
    stated = max(float(law.inclusions(t).max()) for t in range(LENGTH)) if law.secret else 1.0
    held = stated <= accounted * (1 + 1e-9)
    return finding(question, float(held), lambda _: f"drawn at {stated:.4g} where {accounted:.4g} is accounted for")


def trial_round_tests(trials: TrialRounds) -> list[Finding]:
    """The cohorts that the loop asked its engine for; the batches, read off the sums: a record has its coordinate."""
    law = trials.plan.clients.law()
    cohorts = _episodes(trials, [seen.cohort for seen in trials.rounds])
    found = [] if law is None else sampling_tests(Draws("cohort", law, cohorts))
    return [replace(one, question=f"trial rounds, {one.question}") for one in [*found, *_trial_batches(trials)]]


def _trial_batches(trials: TrialRounds) -> list[Finding]:
    """What silo 0 read in each round, where the sum shows it: not under noise that the silo adds itself."""
    plan, reads = trials.plan, trials.plan.local.reads
    law = None if reads is None else reads.law(0)
    if reads is None or law is None or isinstance(plan.bound, AlreadyPrivate):
        return []
    if any(0 not in seen.cohort for seen in trials.rounds):
        try:  # silos that sit out read nothing: the same engine with all of them there
            trials = run_trial_rounds(replace(plan, clients=Everyone(plan.clients.population)), rounds=LENGTH * 2)
        except UserError as error:
            return [not_examined("batch: sampling", f"silo 0 is not in every round ({error})")]
    if sum(reads.size(silo) for silo in range(plan.clients.population)) > trials.size:
        return [not_examined("batch: sampling", f"more records than the {trials.size} coordinates that show them")]
    first = [np.flatnonzero(seen.total[: law.population].numpy() > 0.5) for seen in trials.rounds]
    return sampling_tests(Draws("batch", law, _episodes(trials, first)))


def _episodes(trials: TrialRounds, draws: Sequence[Draw]) -> list[list[Draw]]:
    found: dict[int, list[Draw]] = {}
    for seen, draw in zip(trials.rounds, draws, strict=True):
        found.setdefault(seen.episode, []).append(draw)
    return list(found.values())


def _seeds(seed: int, population: int, length: int) -> list[int]:
    """More episodes where they are short, fewer where a draw is long; two at least."""
    count = int(np.clip(WORK / (population * length), 2, EPISODES * LENGTH / length))
    return [(seed << 32) + (3 << 30) + episode for episode in range(max(2, count))]


# ---- questions -------------------------------------------------------------------------------------------------------


def sampling_tests(draws: Draws) -> list[Finding]:
    """All questions to what was drawn; a draw that cannot be one ends them."""
    law, sound = draws.law, [float(_sound(draws.law, t, draw)) for t, draw in draws.all]
    wrong = finding(f"{draws.what}: sizes and members", sound, lambda i: f"draw {i}")
    if not wrong.passed:
        return [wrong]
    if law.secret:
        return [wrong, *_rates(draws), *_spread(draws), _foreseen(draws), *_rests(draws)]
    return [wrong, _participations(draws), *_rests(draws)]


def _sound(law: SamplingLaw, t: int, draw: Draw) -> bool:
    if len(draw) == 0:
        return law.size in (None, 0)
    inside = draw.min() >= 0 and draw.max() < law.population and bool((law.inclusions(t)[draw] > 0).all())
    few = law.cap is None or len(draw) <= law.cap
    distinct = bool(np.all(np.diff(np.sort(draw)) > 0))
    return bool(inside and few and distinct and law.size in (None, len(draw)))


def _participations(draws: Draws) -> Finding:
    """Of coins that are no secret: in how many rounds one unit is, at most."""
    question, law = f"{draws.what}: turns", draws.law
    if law.max_participations is None:
        return not_examined(question, "public draws without max_participations")
    counts = [np.bincount(np.concatenate(one), minlength=law.population).max() for one in draws.episodes]
    held = [float(n <= law.max_participations(len(one))) for n, one in zip(counts, draws.episodes, strict=True)]
    return finding(question, held, lambda i: f"{counts[i]} rounds for one of them")


def _rests(draws: Draws) -> list[Finding]:
    """How near to each other two rounds of one of them are."""
    apart = draws.law.min_separation
    if apart is None or apart < 2:
        return []
    nearest = np.full(len(draws.episodes), math.inf)
    for i, episode in enumerate(draws.episodes):
        last = np.full(draws.law.population, -math.inf)
        for t, draw in enumerate(episode):
            nearest[i] = min(nearest[i], float((t - last[draw]).min(initial=math.inf)))
            last[draw] = t
    text = f"rounds between two of one of them, {apart} accounted"
    return [finding(f"{draws.what}: rest", (nearest >= apart).astype(float), lambda i: f"{nearest[i]:g} {text}")]


def _rates(draws: Draws) -> list[Finding]:
    """How many in all, and how often each."""
    each, could, due = (np.zeros(draws.law.population) for _ in range(3))  # drawn, could be, expected
    shares = []  # of each round: drawn and expected, of those who could be
    for t, draw in draws.all:
        p = draws.law.inclusions(t)
        each[draw] += 1
        could += p > 0
        due += p
        shares.append((len(draw) / max((p > 0).sum(), 1), p.sum() / max((p > 0).sum(), 1)))
    hits, trials, mean = each.sum(), could.sum(), due.sum() / max(could.sum(), 1)
    if not draws.law.independent:  # then only rounds are
        hits, trials, mean = sum(one for one, _ in shares), len(shares), sum(p for _, p in shares) / len(shares)
    seen, rate, total = hits / max(trials, 1), due / np.maximum(could, 1), chernoff(hits, trials, mean)
    return [
        finding(
            f"{draws.what}: rate", total, lambda _: f"drawn at {seen:.4g} where {mean:.4g} is accounted for", trials > 0
        ),
        finding(
            f"{draws.what}: rate of each",
            chernoff(each, could, rate),
            lambda i: f"number {i} drawn in {each[i]:.0f} of {could[i]:.0f} rounds at rate {rate[i]:.4g}",
            could > 0,
        ),
    ]


def _spread(draws: Draws) -> list[Finding]:
    """How often more are drawn than the mean, and than about a standard deviation below and above it."""
    law, question = draws.law, f"{draws.what}: spread of sizes"
    if law.size is not None:
        return []
    if law.size_sf is None:
        return [not_examined(question, "the sampler does not state how many are drawn (size, or size_sf)")]
    means = np.array([float(law.inclusions(t).sum()) for t, _ in draws.all])
    sizes = np.array([len(draw) for _, draw in draws.all])
    edges = (means + np.outer((0, -1, 1), np.sqrt(means))) * (1 + 1e-12)
    cuts = np.maximum(np.floor(edges), 0).astype(int)  # [3, rounds]
    above = (sizes > cuts).sum(1)
    pairs = [zip(draws.all, cut, strict=True) for cut in cuts]
    due = np.array([np.mean([law.size_sf(t, int(k)) for (t, _), k in each]) for each in pairs])
    names = ("the mean", "the mean less its root", "the mean and its root")
    text = [
        f"more than {n} in {a} of {len(sizes)} rounds, {d * len(sizes):.0f} due"
        for n, a, d in zip(names, above, due, strict=True)
    ]
    return [finding(question, chernoff(above, len(sizes), due), lambda i: text[i])]


def _foreseen(draws: Draws) -> Finding:
    """Two draws share each member at the rate: of near rounds, and of the same round under another secret."""
    first, longest = draws.law.inclusions(0) > 0, max(map(len, draws.episodes))
    # the least number of rounds after which the same units can be drawn again
    step = next((k for k in range(1, longest) if (first & (draws.law.inclusions(k) > 0)).any()), 1)
    starts = [(one, t) for one in draws.episodes for t in range(len(one) - step) if t // step % 2 == 0]
    within = [(one[t], one[t + step], t + step) for one, t in starts]
    across = [
        (a, b, t)
        for one, two in zip(draws.episodes[::2], draws.episodes[1::2], strict=False)
        for t, (a, b) in enumerate(zip(one, two, strict=False))
    ]
    kinds = {"of near rounds": within, "of the same round, other coins": across}
    found = np.array([_shared(draws.law, pairs) for pairs in kinds.values()])  # hits, trials, expected hits
    hits, trials, due = found.T
    names = [f"{hits[i]:.4g} of {trials[i]:.0f} in both, {due[i]:.4g} due, {name}" for i, name in enumerate(kinds)]
    chances = chernoff(hits, trials, due / np.maximum(trials, 1))
    return finding(f"{draws.what}: secrecy", chances, lambda i: names[i], trials > 0)


def _shared(law: SamplingLaw, pairs: Sequence[tuple[Draw, Draw, int]]) -> tuple[float, float, float]:
    """Of pairs (a, b of round t): members of a that are in b, how many were asked for, and how many are due.

    Given a, members of b are independent (or negatively associated), or else only whole pairs are: then each is one.
    """
    hits = trials = due = 0.0
    for a, b, t in pairs:
        if len(a):
            weight = 1.0 if law.independent else 1.0 / len(a)
            hits += weight * len(np.intersect1d(a, b))
            trials += weight * len(a)
            due += weight * float(law.inclusions(t)[a].sum())
    return hits, trials, due
