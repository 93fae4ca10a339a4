"""An attack on several rounds at once, for noise that rounds share: the best linear test of the whole sequence.

One unit moves the sums y of its rounds by x; the rounds' noise has covariance L L^T, so L^-1 y is L^-1 x in white
noise, and  <L^-1 x, L^-1 y> / ||L^-1 x||  is the likelihood ratio. It separates the worlds by  movement * ||C x|| / z,
which the sensitivity of the cost bounds over all patterns of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import solve_triangular

from sordino.accounting import accountant
from sordino.accounting.composition import Cost, Line, Participation
from sordino.audit.tradeoff import Array, Limit, Rates, at_least_zero, not_finite, separation, thresholds
from sordino.engines.base import Collected
from sordino.loop import noised_mean
from sordino.parts.release_base import Release
from sordino.parts.samplers import Cohort, Sampler
from sordino.parts.separation import separation_guard
from sordino.plan import Plan
from sordino.rng import Seeded, Streams

LONGEST, FEW = 64, 20_000  # rounds of a sequence; trials where every one draws coins of its own


@dataclass(frozen=True)
class Found:
    """One line of the cost of so many rounds, and what the attack proved of it."""

    line: Line
    trials: int
    rounds: int
    movement: float
    lower: float
    allowed: float
    lower_epsilon: float
    upper_epsilon: float


def whitening(release: Release, rounds: int) -> Array | None:
    """L^-1, where L L^T is the covariance of the rounds' noise for Z of variance 1; of a Toeplitz strategy, C.

    None where the release does not state how its rounds share their noise.
    """
    made = release.noise_matrix(rounds)
    if made is None:
        return None
    return np.asarray(solve_triangular(np.linalg.cholesky(made @ made.T), np.eye(rounds), lower=True))


@dataclass(frozen=True)
class Sequence:
    """The first rounds of a plan, between the sums and what is released of them: the seam of this audit."""

    plan: Plan

    @property
    def rounds(self) -> int:
        """Some turns of one client, where they fit."""
        return min(self.plan.rounds, LONGEST, max(3 * self._apart, 8))

    @property
    def _apart(self) -> int:
        reads = self.plan.local.reads
        return max(self.plan.clients.min_separation or 1, 1 if reads is None else reads.min_separation(0) or 1)

    @property
    def cost(self) -> Cost:
        """Of these rounds alone."""
        return self.plan.cost(Participation.planned(self.plan.clients, self.rounds))

    def drawn(self, most: int) -> Cost:
        """Of these rounds, to one who sees that a client was in `most` of them."""
        return self.plan.cost(Participation(self.rounds, most))

    def patterns(self, streams: Streams) -> Array:
        """Who comes to which round, or which records of silo 0 are read: [rounds, units], as in a run."""
        clients, reads = self.plan.clients, self.plan.local.reads
        rest = separation_guard(clients, self.plan.release, self.plan.rounds, streams, 0)
        found = np.zeros((self.rounds, clients.population if reads is None else reads.size(0)))
        for t in range(self.rounds):
            drawn = clients.draw(t, streams.at(t, "cohort"))
            came = drawn if rest is None else rest.admit(t, drawn)
            if reads is None:
                found[t, came] = 1.0
            elif 0 in came:
                found[t, reads.draw(t, 0, reads.size(0), streams.at(t, "batches", 0))] = 1.0
        return found

    def released(self, sums: Array, streams: Streams) -> Array:
        """Sums [rounds, n] of n independent runs, noised by the loop's own code, round by round."""
        count = self.plan.clients.expected
        memory, seen, nobody = self.plan.release.init(sums.shape[1]), [], np.zeros(0, dtype=np.int64)
        for t, total in enumerate(sums):
            kept = Collected(torch.from_numpy(total), 0)
            mean, memory = noised_mean(self.plan, kept, nobody, streams, t, memory)
            seen.append(mean.double().numpy() * count)
        return np.stack(seen)


def audit_sequence(
    sequence: Sequence, movement: float, delta: float, trials: int, alpha: float, seed: int
) -> Iterator[Found]:
    """Both worlds, for one who sees models and one who sees cohorts too; each bound fails with probability alpha."""
    plan, seeds = sequence.plan, iter(range(seed << 32, (seed + 1) << 32))
    white = whitening(plan.release, sequence.rounds)
    if white is None:
        return
    there = sequence.patterns(Seeded(next(seeds)))
    worst = there[:, int(np.argmax(np.linalg.norm(white @ there, axis=0)))]
    cohort = sequence.drawn(int(worst.sum())).line("cohort")
    for line in (sequence.cost.line("models"), cohort):
        amplified = line.entries != cohort.entries
        count = min(trials, FEW) if amplified else trials
        x = _coins(plan.clients, sequence.rounds, count, Seeded(next(seeds))) if amplified else worst[:, None]
        mark = white @ (x.max(axis=1))
        scores = [
            (mark / np.linalg.norm(mark)) @ white @ sequence.released(sums, Seeded(next(seeds)))
            for sums in (movement * x + np.zeros((1, count)), np.zeros((sequence.rounds, count)))
        ]
        yield _compare(line, scores[0], scores[1], delta, alpha, sequence.rounds, movement)


def _coins(clients: Sampler, rounds: int, count: int, streams: Streams) -> Array:
    """Whether client 0 came, [rounds, n], by the sampler's own coins; of groups one member is enough."""
    few = clients.for_one_client()
    found, law = np.zeros((rounds, count)), few.law()
    for t in (t for t in range(rounds) if law is None or law.inclusions(t)[0] > 0):
        rng = streams.at(t, "cohort")
        found[t] = [_came(few.draw(t, rng)) for _ in range(count)]
    return found


def _came(cohort: Cohort) -> float:
    return float(len(cohort) > 0 and cohort[0] == 0)


def _compare(line: Line, there: Array, gone: Array, delta: float, alpha: float, rounds: int, movement: float) -> Found:
    """Cuts are chosen on one half of the trials and judged on the other."""
    upper_epsilon = accountant.epsilon(line.entries, line.relation, delta).value
    if not_finite(there, gone):
        return Found(line, len(there), rounds, movement, math.inf, 0.0, math.inf, upper_epsilon)
    limit, half = Limit.of(line, upper_epsilon, delta), len(there) // 2
    cuts = thresholds(there[:half], gone[:half])
    pilot = Rates.of(there[:half], gone[:half], cuts, alpha)
    best = [cuts[[int(np.argmax(worth))]] for worth in (pilot.share(limit), pilot.epsilon(delta))]
    rates, tail = (Rates.of(there[half:], gone[half:], cut, alpha) for cut in best)
    allowed = float(separation(limit.most(rates.false), rates.false)[0])
    lower, epsilon = at_least_zero(rates.mu()[0]), at_least_zero(tail.epsilon(delta)[0])
    return Found(line, len(there), rounds, movement, lower, allowed, epsilon, upper_epsilon)
