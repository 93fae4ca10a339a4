"""Are the coins tossed that are billed? Who was drawn, how often, with whom, and could anybody foresee it?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import special

from sordino.audit.law import Finding, chernoff, finding
from sordino.audit.rehearsal import Rehearsal
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.records import FixedRecords, PoissonRecords, RecordSampler
from sordino.parts.samplers import FixedSize, Poisson, Sampler
from sordino.parts.turns import Turns
from sordino.plan import Plan
from sordino.rng import Seeded

Draw = NDArray[np.int64]
EPISODES, LENGTH = 8, 32  # seeds, and rounds of each
WORK = 2e7  # numbers that all draws of one sampler may touch


@dataclass(frozen=True)
class Coins:
    """What is billed: each of `population` at `rate`; exactly `size` of them, or at most `cap`, where that is said."""

    what: str
    population: int
    rate: float
    size: int | None = None
    cap: int | None = None
    apart: int | None = None  # any two rounds of one of them are so many rounds from each other
    most: Callable[[int], int] | None = None  # of coins that are no secret: the most rounds that one of them is in

    def above(self) -> float:
        """P[more are drawn than the mean], of independent coins under a cap."""
        middle = math.floor(self.inclusion * self.population)
        capped = self.cap is not None and middle >= self.cap
        return 0.0 if capped else float(special.bdtrc(middle, self.population, self.rate))

    @property
    def inclusion(self) -> float:
        """P[one of them is drawn]: the rate, or less under a cap."""
        if self.cap is None or self.cap >= self.population:
            return self.rate
        below = special.bdtr(np.arange(self.cap), self.population, self.rate)  # P[B <= k]; E min(B, cap) = sum P[B > k]
        return float((1.0 - below).sum() / self.population)


def of_sampler(clients: Sampler) -> Coins:
    """What a sampler of clients is billed for."""
    n = clients.population
    if isinstance(clients, Poisson):
        return Coins("cohort", n, clients.rate, cap=clients.cap)
    if isinstance(clients, FixedSize):
        return Coins("cohort", n, clients.cohort / n, size=clients.cohort)
    if isinstance(clients, Turns):
        return Coins("cohort", n // clients.groups, clients.rate)
    size = round(clients.expected)
    return Coins("cohort", n, clients.expected / n, size=size, apart=clients.apart, most=clients.most)


def _within(clients: Sampler, draws: list[list[Draw]]) -> list[list[Draw]]:
    """Draws of groups in turn as draws of one group's members; -1 is one of another group."""
    if not isinstance(clients, Turns):
        return draws
    groups, least = clients.groups, clients.population // clients.groups

    def members(t: int, draw: Draw) -> Draw:
        own = np.where(draw % groups == t % groups, draw // groups, -1)
        return np.asarray(own[own < least])

    return [[members(t, draw) for t, draw in enumerate(episode)] for episode in draws]


def of_records(reads: RecordSampler, silo: int) -> Coins:
    """What a silo's sampler of records is billed for."""
    size = reads.size(silo)
    if isinstance(reads, PoissonRecords):
        return Coins("batch", size, reads.rate(silo))
    if isinstance(reads, FixedRecords):
        return Coins("batch", size, reads.batch / size, size=reads.batch)
    count = round(reads.count) if reads.disjoint else size
    return Coins("batch", size, count / size, size=count, apart=reads.apart(silo), most=partial(reads.most, silo=silo))


def cohort_law(plan: Plan, seed: int = 0) -> list[Finding]:
    """The plan's own sampler, over its own population, on the streams that a run would open."""
    coins = of_sampler(plan.clients)
    length = min(LENGTH, plan.rounds)
    draws = [
        [plan.clients.draw(t, Seeded(own).at(t, "cohort")) for t in range(length)]
        for own in _seeds(seed, coins.population, length)
    ]
    return judged(coins, _within(plan.clients, draws))


def batch_law(plan: Plan, seed: int = 0) -> list[Finding]:
    """The batches that the local solver asks its engine for, of the smallest silo."""
    reads = plan.local.reads
    if reads is None:
        return []
    silo = int(np.argmin([reads.size(each) for each in range(plan.clients.population)]))
    coins, steps = of_records(reads, silo), getattr(plan.local, "steps", 1)
    length = max(1, min(LENGTH, plan.rounds))

    def rows(own: int, t: int) -> list[Draw]:
        picked = plan.local.indices(coins.population, Seeded(own).at(t, "batches", silo), t, silo)
        return [row[row >= 0] for row in picked]

    seeds = _seeds(seed, coins.population, length * steps)
    return judged(coins, [[row for t in range(length) for row in rows(own, t)] for own in seeds])


def rehearsed_law(rehearsal: Rehearsal) -> list[Finding]:
    """The cohorts that the loop asked its engine for; the batches, read off the sums: a record has its coordinate."""
    plan = rehearsal.plan
    asked = _episodes(rehearsal, [seen.cohort for seen in rehearsal.rounds])
    found = judged(of_sampler(plan.clients), _within(plan.clients, asked))
    reads = plan.local.reads
    if not isinstance(plan.local, BatchGradient) or reads is None or len(set(reads.sizes)) > 1:
        return _named(found, "rehearsed")
    if plan.clients.random or plan.clients.expected < plan.clients.population:
        return _named(found, "rehearsed")
    size = reads.size(0)
    first = [np.flatnonzero(seen.total[:size].numpy() > 0.5) for seen in rehearsal.rounds]
    return _named([*found, *judged(of_records(reads, 0), _episodes(rehearsal, first))], "rehearsed")


def _named(found: Iterable[Finding], where: str) -> list[Finding]:
    return [Finding(f"{where} {one.question}", one.statistics, one.chance, one.worst) for one in found]


def _episodes(rehearsal: Rehearsal, draws: Sequence[Draw]) -> list[list[Draw]]:
    found: dict[int, list[Draw]] = {}
    for seen, draw in zip(rehearsal.rounds, draws, strict=True):
        found.setdefault(seen.episode, []).append(draw)
    return list(found.values())


def _seeds(seed: int, population: int, length: int) -> list[int]:
    """More episodes where they are short, fewer where a draw is long; two at least."""
    count = int(np.clip(WORK / (population * length), 2, EPISODES * LENGTH / length))
    return [(seed << 32) + (3 << 30) + episode for episode in range(max(2, count))]


def judged(coins: Coins, draws: list[list[Draw]]) -> list[Finding]:
    """All questions to draws [episode][round]: episodes of the same length, with streams of their own."""
    sound = [_sound(coins, draw) for episode in draws for draw in episode]
    wrong = finding(f"{coins.what}: sizes and members", np.where(sound, 1.0, 0.0), lambda i: f"draw {i}")
    if coins.most is not None:
        counts = [np.bincount(np.concatenate(e), minlength=coins.population).max() for e in draws]
        often = np.array([float(count <= coins.most(len(e))) for count, e in zip(counts, draws, strict=True)])
        turns = finding(f"{coins.what}: turns", often, lambda i: f"{counts[i]} rounds for one of them")
        return [wrong, turns, *_rests(coins, draws)]
    return [wrong, *_rates(coins, [draw for episode in draws for draw in episode]), _foreseen(coins, draws)]


def _rests(coins: Coins, draws: list[list[Draw]]) -> list[Finding]:
    """How near to each other two rounds of one of them are."""
    if coins.apart is None or coins.apart < 2:
        return []
    nearest = np.array([_nearest(episode, coins.population) for episode in draws])
    text = f"rounds between two of one of them, {coins.apart} billed"
    return [finding(f"{coins.what}: rest", (nearest >= coins.apart).astype(float), lambda i: f"{nearest[i]:g} {text}")]


def _nearest(draws: Sequence[Draw], population: int) -> float:
    last, least = np.full(population, -math.inf), math.inf
    for t, draw in enumerate(draws):
        least = min(least, float((t - last[draw]).min(initial=math.inf)))
        last[draw] = t
    return least


def _sound(coins: Coins, draw: Draw) -> bool:
    inside = len(draw) == 0 or (draw.min() >= 0 and draw.max() < coins.population)
    few = coins.cap is None or len(draw) <= coins.cap
    distinct = bool(np.all(np.diff(np.sort(draw)) > 0))
    return bool(inside and few and distinct and coins.size in (None, len(draw)))


def _rates(coins: Coins, draws: list[Draw]) -> list[Finding]:
    """How many in all, how often each, and how often more than the mean."""
    sizes, n, rounds, p = np.array([len(draw) for draw in draws]), coins.population, len(draws), coins.inclusion
    each = np.bincount(np.concatenate(draws), minlength=n)[:n].astype(np.float64)
    seen = sizes.sum() / (n * rounds)
    found = [
        finding(
            f"{coins.what}: rate",
            chernoff(sizes.sum(), n * rounds, p),
            lambda _: f"drawn at {seen:.4g} where {p:.4g} is billed",
        ),
        finding(
            f"{coins.what}: rate of each",
            chernoff(each, np.full(n, rounds), p),
            lambda i: f"number {i} drawn in {each[i]:.0f} of {rounds} rounds at rate {p:.4g}",
        ),
    ]
    if coins.size is not None:
        return found
    above, due = (sizes > math.floor(p * n)).sum(), coins.above()
    spread = chernoff(above, rounds, due)
    text = f"more than the mean in {above} of {rounds} rounds, {due * rounds:.0f} due"
    return [*found, finding(f"{coins.what}: spread of sizes", spread, lambda _: text)]


def _foreseen(coins: Coins, draws: list[list[Draw]]) -> Finding:
    """Two draws share each member at the rate: of successive rounds, and of the same round under another secret."""
    within = [pair for e in draws for pair in zip(e[::2], e[1::2], strict=False)]
    across = [pair for one, two in zip(draws[::2], draws[1::2], strict=False) for pair in zip(one, two, strict=True)]
    kinds = {"of successive rounds": within, "of the same round, other coins": across}
    shared = {name: [_common(a, b, coins.population) for a, b in pairs] for name, pairs in kinds.items()}
    drawn = {name: sum(len(a) for a, _ in pairs) for name, pairs in kinds.items()}
    hits = np.array([float(sum(shared[name])) for name in kinds])
    trials = np.array([float(drawn[name]) for name in kinds])
    names = [f"{hits[i]:.0f} of {trials[i]:.0f} in both, {name}" for i, name in enumerate(kinds)]
    return finding(f"{coins.what}: secrecy", chernoff(hits, trials, coins.inclusion), lambda i: names[i])


def _common(one: Draw, other: Draw, population: int) -> int:
    marked = np.zeros(population, dtype=np.bool_)
    marked[one[(one >= 0) & (one < population)]] = True
    return int(marked[other[(other >= 0) & (other < population)]].sum())
