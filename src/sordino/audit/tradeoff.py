"""Hypothesis tests between two neighbouring data sets: the power a certificate allows, and the power samples prove.

A test decides whether one client is present. Its `power` is the probability of the decision "present" if the client is
present; `false`, its false-alarm rate, is the probability of this decision if the client is absent. Privacy bounds the
power at every false-alarm rate. Called by all attacks of the audit.
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
    """Largest power of a test that one adversary's privacy cost allows, as a function F of the false-alarm rate a:

        F(a) = min over eps of exp(eps) a + delta(eps),   for Gaussian releases F(a) = Phi(Phi^-1(a) + mu)

    If the cost is correct, no test of the release has more power (Wasserman, Zhou 2010; Dong, Roth, Su 2022).
    """

    mu: float | None
    epsilons: Array
    deltas: Array

    @classmethod
    def of(cls, line: Line, epsilon: float, delta: float) -> Limit:
        """Compute the limit for one adversary's line of the cost, on a grid from -epsilon to epsilon.

        A shuffled release has no such curve; its limit is the one point (epsilon, delta).
        """
        mu = accountant.gaussian_mu(line.entries, line.relation)
        if mu is not None or any(event.spends_delta for event, _ in line.entries):
            return cls(mu, np.array([epsilon]), np.array([delta]))
        epsilons = np.linspace(-epsilon, epsilon, _CURVE)
        return cls(None, epsilons, np.array(accountant.deltas_at(line.entries, line.relation, epsilons.tolist())))

    def most(self, false: Array) -> Array:
        """Return F(a), the largest allowed power, for each false-alarm rate a in `false`."""
        if self.mu is not None:
            return np.asarray(special.ndtr(special.ndtri(false) + self.mu))
        return true_positives(false, self.epsilons, self.deltas)


def separation(power: Array, false: Array) -> Array:
    """Return Phi^-1(power) - Phi^-1(false), the mu of Gaussian DP that a test with these error rates proves.

    `false` is the test's false-alarm rate (Dong, Roth, Su 2022, Definition 3). The result is 0 if `false` is 0 or 1 or
    `power` is 0, and otherwise infinite for power 1.
    """
    inside = (false > 0) & (false < 1) & (power > 0)
    a, b = np.where(inside, power, 0.5), np.where(inside, false, 0.5)
    return np.asarray(special.ndtri(a) - special.ndtri(b))


def at_least_zero(lower: float) -> float:
    """Return max(0, lower), or infinity for NaN, so that a NaN fails the audit."""
    return math.inf if math.isnan(lower) else max(0.0, float(lower))


def not_finite(*scores: Array) -> bool:
    """Return whether any score is NaN or infinite; a release with such scores may reveal anything."""
    return not all(np.isfinite(each).all() for each in scores)


def at_most(hits: Array, trials: int, alpha: float) -> Array:
    """Return the Clopper-Pearson upper bound on a rate from `hits` in `trials`, at confidence level 1 - alpha."""
    return np.where(hits >= trials, 1.0, special.betaincinv(hits + 1, np.maximum(trials - hits, 0.5), 1 - alpha))


def at_least(hits: Array, trials: int, alpha: float) -> Array:
    """Return the Clopper-Pearson lower bound on a rate from `hits` in `trials`, at confidence level 1 - alpha."""
    return 1.0 - at_most(trials - hits, trials, alpha)


@dataclass(frozen=True)
class Rates:
    """Confidence bounds for tests: the power is at least `power`, the false-alarm rate at most `false`."""

    power: Array
    false: Array

    @classmethod
    def of(cls, there: Array, gone: Array, thresholds: Array, alpha: float) -> Rates:
        """Bound the rates of the tests score > threshold, from scores with (`there`) and without (`gone`) the client.

        Each bound fails with probability at most alpha.
        """

        def above(scores: Array) -> Array:
            return (len(scores) - np.searchsorted(np.sort(scores), thresholds, side="right")).astype(np.float64)

        return cls(at_least(above(there), len(there), alpha), at_most(above(gone), len(gone), alpha))

    def mu(self) -> Array:
        """Return the lower bound on mu that each test proves if the release is mu-GDP."""
        return separation(self.power, self.false)

    def epsilon(self, delta: float) -> Array:
        """Return the lower bound log((power - delta) / false) on epsilon at delta."""
        return np.log(np.maximum(self.power - delta, 1e-300) / self.false)

    def share(self, limit: Limit) -> Array:
        """Return the ratio of the proved mu to the certified mu; a ratio above 1 refutes the certificate."""
        allowed = separation(limit.most(self.false), self.false)
        return np.where((allowed > 0) & np.isfinite(allowed), self.mu() / np.maximum(allowed, 1e-12), -math.inf)


def thresholds(there: Array, gone: Array) -> Array:
    """Return candidate thresholds: quantiles of all scores, dense in both tails."""
    tail = np.geomspace(1e-5, 0.02, 20)
    levels = np.concatenate([tail, np.linspace(0.02, 0.98, 97), 1 - tail])
    return np.unique(np.quantile(np.concatenate([there, gone]), levels, method="lower"))


def statistics(there: Array, gone: Array) -> dict[str, Statistic]:
    """Return candidate test statistics by name, fitted to samples of two features of a release.

    The features are the shift along the direction in which the data sets differ, and the spread across that direction.

    shift            optimal for noise of a known scale, also if some trials have no noise
    shift / spread   for a noise scale that varies between trials and can be estimated from the spread
    spread, -spread  for a noise scale that depends on the client
    learned          log((n + 1) / (m + 1)), where n samples with and m without the client are in the trial's cell of a
                     grid of quantiles of both features
    """
    centre, shape, pool = float(np.median(gone[:, 0])), (48, 12), np.concatenate([there, gone])
    edges = [np.quantile(pool[:, i], np.linspace(0, 1, k + 1)[1:-1]) for i, k in enumerate(shape)]

    def cell(x: Array) -> NDArray[np.int64]:
        first, second = (np.searchsorted(edges[i], x[:, i], side="right") for i in (0, 1))
        return np.asarray(first * shape[1] + second)

    counts = [np.bincount(cell(x), minlength=shape[0] * shape[1]) for x in (there, gone)]
    ratio = np.log1p(counts[0]) - np.log1p(counts[1])
    return {
        "shift": lambda x: x[:, 0],
        "shift / spread": lambda x: (x[:, 0] - centre) / x[:, 1],
        "spread": lambda x: x[:, 1],
        "-spread": lambda x: -x[:, 1],
        "learned": lambda x: np.asarray(ratio[cell(x)]),
    }


@dataclass(frozen=True)
class Guess:
    """Hypothesis test score > threshold (score < threshold if `swapped`), chosen on separate samples."""

    name: str
    statistic: Statistic
    threshold: float
    swapped: bool = False
    worth: float = -math.inf  # on the samples that chose it

    def rates(self, there: Array, gone: Array, alpha: float) -> Rates:
        """Bound power and false-alarm rate of the test on samples that were not used to choose it."""
        one, other = _scores(self.statistic, there, gone, self.swapped)
        return Rates.of(one, other, np.array([self.threshold]), alpha)


def _scores(statistic: Statistic, there: Array, gone: Array, swapped: bool) -> tuple[Array, Array]:
    return (-statistic(gone), -statistic(there)) if swapped else (statistic(there), statistic(gone))


def choose(there: Array, gone: Array, worth: Callable[[Rates], Array], alpha: float) -> Guess:
    """Return the test that maximises `worth`; half of the samples fit the statistics, the other half compares them.

    A smaller alpha makes it less likely that a useless test wins by chance.
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
    """Return the test chosen at confidence level alpha^2, or at alpha if no test has positive worth at alpha^2."""
    guess = choose(there, gone, worth, alpha**2)
    return guess if guess.worth > 0 else choose(there, gone, worth, alpha)
