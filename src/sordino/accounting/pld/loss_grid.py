"""The loss of one release on a grid, rounded up; and bounds without a grid: one release, repeated (epsilon, delta).

    delta(e) = P(L > e) - exp(e) Q(L > e)

A loss between two multiples of the step goes to both, so that its chance and the mean of exp(-L) stay (connect the
dots: Doroshenko et al. 2022). delta is convex in exp(-L) and grows with L, so this, and anything that moves chance to
larger losses, only raises it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import gammaln, log_ndtr

from sordino.accounting.pld.pairs import Array, Pair

POINTS = 2**17  # of one law on a first grid at most; eight times as many on a finer one
_POSITIVE = np.geomspace(1e-16, 1e12, 1500)
_FAR = np.concatenate([-_POSITIVE[::-1], [0.0], _POSITIVE])  # where a law is looked for
TINY = 1e-300
MOST_PAIRS = 100_000  # repeated pairs are listed one by one up to here
_LEFT = 1e-13  # the lowest losses may all be moved up to where they have this chance


class TooWideError(Exception):
    """There would be more points than allowed; `factor` is how much coarser a grid must be."""

    def __init__(self, factor: float) -> None:
        super().__init__(f"a grid {factor:.3g} times as coarse is needed")
        self.factor = factor


def points(first: int, count: int, step: float) -> Array:
    """first * step, (first + 1) * step, ..."""
    return np.asarray((first + np.arange(count, dtype=np.float64)) * step, dtype=np.float64)


@dataclass(frozen=True)
class Losses:
    """Privacy losses of one release on a grid: chances of (low + k) step, and of an infinite loss."""

    step: float
    low: int
    masses: Array
    infinite: float
    total_variation: float = 0.0

    @property
    def values(self) -> Array:
        """The losses."""
        return points(self.low, len(self.masses), self.step)

    @property
    def variation(self) -> float:
        """delta at epsilon 0: a bound on the total variation."""
        gain = np.maximum(-np.expm1(-np.maximum(self.values, 0.0)), 0.0)
        return (float(self.masses @ gain) + self.infinite) * (1 + 1e-12)

    def spread(self) -> float:
        """The standard deviation of the finite loss."""
        total = float(np.sum(self.masses))
        mean = float(self.masses @ self.values) / total
        return math.sqrt(float(self.masses @ (self.values - mean) ** 2) / total)


def span(pair: Pair, tail: float) -> tuple[float, float]:
    """Losses outside of which P has a chance of at most `tail` above (but for infinity), and next to none below."""
    chances = pair.tails(_FAR)[0]
    above = np.flatnonzero(chances <= np.logaddexp(chances[-1], math.log(tail)))
    below = np.flatnonzero(chances >= -_LEFT)
    return float(_FAR[below[-1] if len(below) else 0]), float(_FAR[min(above[0] + 1, len(_FAR) - 1)])


@lru_cache(maxsize=64)
def losses_on(pair: Pair, step: float, tail: float) -> Losses:
    """A pair on a grid, rounded up; what is beyond the last point, at most `tail`, is infinite."""
    low, high = span(pair, tail)
    if high - low > 8 * POINTS * step:
        raise TooWideError((high - low) / (8 * POINTS * step))
    first, last = math.floor(low / step), math.ceil(high / step)
    values = points(first, last + 1 - first, step)
    above, scaled, slack = _rounded_tails(pair, values)
    chances = above[:-1] - above[1:]
    shrink = -math.expm1(-step)
    upper = (chances - scaled[:-1] + (1 - shrink) * scaled[1:] + slack[:-1]) / shrink  # what goes to the upper end
    upper = np.clip(upper, 0.0, chances)
    masses = np.zeros(len(values))
    masses[:-1] += chances - upper
    masses[1:] += upper
    masses[0] += 1 - above[0]
    return Losses(step, first, masses, float(above[-1]), pair.total_variation)


def _rounded_tails(pair: Pair, values: Array) -> tuple[Array, Array, Array]:
    """P(L > l) rounded up and made to fall, exp(l) Q(L > l), and how far their difference may be off."""
    some, other = pair.tails(values)
    with np.errstate(invalid="ignore"):
        scaled = np.exp(np.minimum(values + other, some))
    size = pair.slack * (4 + np.abs(values) + np.where(some > -np.inf, np.abs(some), 0.0))
    raw = np.exp(some)
    above = np.minimum(np.maximum.accumulate((raw * (1 + size))[::-1])[::-1], 1.0)
    return above, np.nan_to_num(scaled), 4 * size * above + TINY


def single_deltas(pair: Pair, epsilons: Array) -> Array:
    """delta of one release, without a grid: P(L > e) - exp(e) Q(L > e), rounded up."""
    some, other = pair.tails(epsilons)
    with np.errstate(over="ignore", invalid="ignore"):
        above, scaled = np.exp(some), np.exp(np.minimum(epsilons + other, some))
        near = pair.total_variation * (1 + np.exp(epsilons)) if pair.total_variation else 0.0
    off = 2 * pair.slack * (4 + np.abs(epsilons)) * above
    return np.asarray(np.clip(above - np.nan_to_num(scaled) + off + TINY + near, 0.0, 1.0))


def single_epsilon(pair: Pair, delta: float) -> float:
    """The least epsilon of one release at `delta`; inf if none is found."""
    tried = np.concatenate([[0.0], _POSITIVE])
    for _ in range(8):
        good = np.flatnonzero(single_deltas(pair, tried) <= delta)
        if not len(good):
            return math.inf
        k = int(good[0])
        if k == 0:
            return float(tried[0])
        tried = np.linspace(tried[k - 1], tried[k], 101)[1:]
    return float(tried[-1])


def fitting_step(order: Sequence[tuple[Pair, int]], tail: float) -> float:
    """The step of a first grid: an eighth of the spread of one release. It costs epsilon about 1/1000, its square.

    A little less where that puts the largest loss of all, if it is an atom, on the grid.
    """
    total = sum(count for _, count in order)
    step = max(math.sqrt(sum(count / total * _spread(pair, tail) ** 2 for pair, count in order)) / 8, 1e-18)
    step = max([step, *((high - low) / POINTS for low, high in (span(pair, tail) for pair, _ in order))])
    most = {pair.largest_loss for pair, _ in order} - {math.inf, 0.0}
    return min(most) / math.ceil(min(most) / step) if len(most) == 1 and step < min(most) < 1e6 * step else step


@lru_cache(maxsize=64)
def _spread(pair: Pair, tail: float) -> float:
    low, high = span(pair, tail)
    step = (high - low) / 512
    for _ in range(12):
        found = losses_on(pair, step, tail).spread()
        if found >= 2 * step or step * POINTS <= high - low:
            return found
        step = max(found / 4, (high - low) / POINTS)
    return found


# ---- without a grid: one Gaussian, and repeated (epsilon, delta) pairs -----------------------------------------------


def gaussian_delta(mu: float, at: float) -> float:
    """Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu) (Balle & Wang 2018)."""
    if mu == 0:
        return max(0.0, -math.expm1(at))
    first, second = float(log_ndtr(mu / 2 - at / mu)), at + float(log_ndtr(-mu / 2 - at / mu))
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon with gaussian_delta(mu, epsilon) <= delta, by halving an interval; rounded up by 1e-10.

    In logarithms: delta may be as small as a float can be.
    """
    if delta <= 0 or mu == math.inf:
        return 0.0 if mu == 0 else math.inf
    if mu == 0 or delta >= 1 or _log_gaussian_delta(mu, 0.0) <= math.log(delta):
        return 0.0
    low, high, target = 0.0, 1.0, math.log(delta)
    while _log_gaussian_delta(mu, high) > target:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _log_gaussian_delta(mu, middle) <= target else (middle, high)
    return high * (1 + 1e-10) + 1e-14


def _log_gaussian_delta(mu: float, at: float) -> float:
    """log of `gaussian_delta`, mu above 0; -inf where the two tails cannot be told apart."""
    first, second = float(log_ndtr(mu / 2 - at / mu)), at + float(log_ndtr(-mu / 2 - at / mu))
    return first + math.log(-math.expm1(second - first)) if second < first else -math.inf


def repeated_pair(pair: tuple[float, float], count: int, delta: float) -> float:
    """Epsilon of `count` times one (epsilon, delta) pair, exactly and without a grid; rounded up by 1e-9."""
    basic = count * pair[0] if count * pair[1] <= delta else math.inf
    lost, above, below = _pair_tails(pair, count)
    if lost >= delta:
        return basic
    left = (delta - lost) / (1 - lost)
    exact = float(np.max(np.log(above[above > left] - left) - below[above > left], initial=-math.inf))
    return min(basic, max(0.0, exact + 1e-9))


def repeated_pair_delta(pair: tuple[float, float], count: int, at: float) -> float:
    """Its delta at epsilon `at`, negative too."""
    lost, above, below = _pair_tails(pair, count)
    return lost + (1 - lost) * max(0.0, float(np.max(above - np.exp(np.minimum(at + below, 700.0)))) + 1e-12)


@lru_cache(maxsize=32)
def _pair_tails(pair: tuple[float, float], count: int) -> tuple[float, Any, Any]:
    """What is lost, Pr[B >= i] and log Pr[count - B >= i] of k pairs (Kairouz, Oh, Viswanath 2015, Theorem 3.3):

    delta(e) = 1 - (1-d)^k (1 - max_i (Pr[B >= i] - exp(e) Pr[k - B >= i])),   B ~ Bin(k, 1 / (1 + exp(-epsilon)))
    """
    epsilon, delta = pair
    lost = -math.expm1(count * math.log1p(-delta)) if delta < 1 else 1.0
    tries, signed = np.arange(count + 1), (min(epsilon, 700.0), -min(epsilon, 700.0))
    ways = gammaln(count + 1) - (gammaln(tries + 1) + gammaln(count - tries + 1))
    chances = [ways - tries * math.log1p(math.exp(-e)) - (count - tries) * math.log1p(math.exp(e)) for e in signed]
    above, below = (np.logaddexp.accumulate(each[::-1]) for each in chances)
    return lost, np.exp(above), below
