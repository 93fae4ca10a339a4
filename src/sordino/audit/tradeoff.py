"""How well two worlds can be told apart: what a certificate allows, and what samples prove.

A test that says "the client is there" is right with probability `power` in one world and wrong with probability
`false` in the other. Privacy is a ceiling on power at every false-alarm rate; an audit is one point near it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from sordino.accounting import accountant
from sordino.accounting.composition import Line
from sordino.accounting.profiles import true_positives

Array = NDArray[np.float64]
Statistic = Callable[[Array], Array]  # features [n, 2] -> one score per trial, larger where the client is there
_CURVE = 257  # points of the certified curve


@dataclass(frozen=True)
class Limit:
    """The most power that a line of a cost allows at each false-alarm rate a:

        F(a) = min over eps of exp(eps) a + delta(eps),   for Gaussian releases F(a) = Phi(Phi^-1(a) + mu)

    Guarantee: no test of the release has more power, if the line is true (Wasserman, Zhou 2010; Dong, Roth, Su 2022).
    """

    mu: float | None
    epsilons: Array
    deltas: Array

    @classmethod
    def of(cls, line: Line, epsilon: float, delta: float) -> Limit:
        """Of a line that is worth (epsilon, delta): its whole curve within +-epsilon, or that one point if shuffled."""
        mu = accountant.gaussian_mu(line.entries, line.relation)
        if mu is not None or any(event.spends_delta for event, _ in line.entries):
            return cls(mu, np.array([epsilon]), np.array([delta]))
        epsilons = np.linspace(-epsilon, epsilon, _CURVE)
        return cls(None, epsilons, np.array(accountant.deltas_at(line.entries, line.relation, epsilons.tolist())))

    def most(self, false: Array) -> Array:
        """F at each false-alarm rate."""
        if self.mu is not None:
            return np.asarray(special.ndtr(special.ndtri(false) + self.mu))
        return true_positives(false, self.epsilons, self.deltas)


def separation(power: Array, false: Array) -> Array:
    """mu of the Gaussian pair through one point: Phi^-1(power) - Phi^-1(false) (Dong, Roth, Su 2022, Def 3).

    No alarm ever, or always one, separates nothing; power 1 below that separates without limit.
    """
    inside = (false > 0) & (false < 1) & (power > 0)
    a, b = np.where(inside, power, 0.5), np.where(inside, false, 0.5)
    return np.asarray(special.ndtri(a) - special.ndtri(b))


def at_least_zero(lower: float) -> float:
    """A lower bound as a figure: no less than nothing; one that is no number bounds nothing, and is infinite."""
    return math.inf if math.isnan(lower) else max(0.0, float(lower))


def not_finite(*scores: Array) -> bool:
    """Whether something was released that is no number: no threshold orders it, and it may tell anything."""
    return not all(np.isfinite(each).all() for each in scores)


def at_most(hits: Array, trials: int, alpha: float) -> Array:
    """Clopper-Pearson: the rate is above this with probability at most alpha."""
    return np.where(hits >= trials, 1.0, special.betaincinv(hits + 1, np.maximum(trials - hits, 0.5), 1 - alpha))


def at_least(hits: Array, trials: int, alpha: float) -> Array:
    """Clopper-Pearson: the rate is below this with probability at most alpha."""
    return 1.0 - at_most(trials - hits, trials, alpha)


@dataclass(frozen=True)
class Rates:
    """Of the test `score > threshold`: its power is at least `power`, its false alarms at most `false`."""

    power: Array
    false: Array

    @classmethod
    def of(cls, there: Array, gone: Array, thresholds: Array, alpha: float) -> Rates:
        """From scores in both worlds; each of the two bounds fails with probability at most alpha."""
        power = at_least(_above(there, thresholds), len(there), alpha)
        return cls(power, at_most(_above(gone, thresholds), len(gone), alpha))

    def mu(self) -> Array:
        """A lower bound on mu of anything that is mu-GDP."""
        return separation(self.power, self.false)

    def epsilon(self, delta: float) -> Array:
        """A lower bound on epsilon at delta: log((power - delta) / false)."""
        return np.log(np.maximum(self.power - delta, 1e-300) / self.false)

    def share(self, limit: Limit) -> Array:
        """How much of the certified separation is proved: above 1 the certificate is false."""
        allowed = separation(limit.most(self.false), self.false)
        return np.where((allowed > 0) & np.isfinite(allowed), self.mu() / np.maximum(allowed, 1e-12), -math.inf)


def _above(scores: Array, thresholds: Array) -> Array:
    ordered = np.sort(scores)
    return (len(ordered) - np.searchsorted(ordered, thresholds, side="right")).astype(np.float64)


def thresholds(there: Array, gone: Array) -> Array:
    """Where to cut: quantiles of both worlds, dense in both tails."""
    tail = np.geomspace(1e-5, 0.02, 20)
    levels = np.concatenate([tail, np.linspace(0.02, 0.98, 97), 1 - tail])
    return np.unique(np.quantile(np.concatenate([there, gone]), levels, method="lower"))


def statistics(there: Array, gone: Array) -> dict[str, Statistic]:
    """Ways to guess from features (shift along the moved direction, spread of the quiet ones), fitted to samples.

    shift            optimal for noise of a known scale, and for any mixture of it with none
    shift / spread   where the noise scale varies and is seen
    spread, -spread  where the noise scale itself tells
    learned          a likelihood ratio over both, counted in cells
    """
    centre = float(np.median(gone[:, 0]))
    return {
        "shift": lambda x: x[:, 0],
        "shift / spread": lambda x: (x[:, 0] - centre) / x[:, 1],
        "spread": lambda x: x[:, 1],
        "-spread": lambda x: -x[:, 1],
        "learned": _cells(there, gone, (48, 12)),
    }


def _cells(there: Array, gone: Array, shape: tuple[int, int]) -> Statistic:
    """log((n_there + 1) / (n_gone + 1)) of the cell that a trial falls in; cells are quantiles of both features."""
    pool = np.concatenate([there, gone])
    edges = [np.quantile(pool[:, i], np.linspace(0, 1, k + 1)[1:-1]) for i, k in enumerate(shape)]

    def cell(x: Array) -> NDArray[np.int64]:
        first, second = (np.searchsorted(edges[i], x[:, i], side="right") for i in (0, 1))
        return np.asarray(first * shape[1] + second)

    size = shape[0] * shape[1]
    ratio = np.log1p(np.bincount(cell(there), minlength=size)) - np.log1p(np.bincount(cell(gone), minlength=size))
    return lambda x: np.asarray(ratio[cell(x)])


@dataclass(frozen=True)
class Guess:
    """One test, fixed before the samples that judge it: score > threshold, or, `swapped`, score < threshold."""

    name: str
    statistic: Statistic
    threshold: float
    swapped: bool = False
    worth: float = -math.inf  # on the samples that chose it

    def rates(self, there: Array, gone: Array, alpha: float) -> Rates:
        """Judged on samples that had no part in choosing it."""
        one, other = _scores(self.statistic, there, gone, self.swapped)
        return Rates.of(one, other, np.array([self.threshold]), alpha)


def _scores(statistic: Statistic, there: Array, gone: Array, swapped: bool) -> tuple[Array, Array]:
    return (-statistic(gone), -statistic(there)) if swapped else (statistic(there), statistic(gone))


def choose(there: Array, gone: Array, worth: Callable[[Rates], Array], alpha: float) -> Guess:
    """The test worth most: statistics are fitted on the first half of these samples, compared on the second.

    The surer the bounds they are compared at (the smaller alpha), the less is a test chosen for its luck.
    """
    half = len(there) // 2
    found: list[Guess] = []
    for name, statistic in statistics(there[:half], gone[:half]).items():
        for swapped in (False, True):
            one, other = _scores(statistic, there[half:], gone[half:], swapped)
            cuts = thresholds(one, other)
            worths = worth(Rates.of(one, other, cuts, alpha))
            best = int(np.argmax(worths))
            found.append(Guess(name, statistic, float(cuts[best]), swapped, float(worths[best])))
    return max(found, key=lambda guess: guess.worth)


def choose_steadily(there: Array, gone: Array, worth: Callable[[Rates], Array], alpha: float) -> Guess:
    """`choose` at bounds far surer than alpha, so that luck does not win; at alpha itself if nothing is left then."""
    guess = choose(there, gone, worth, alpha**2)
    return guess if guess.worth > 0 else choose(there, gone, worth, alpha)
