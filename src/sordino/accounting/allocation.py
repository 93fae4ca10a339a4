"""Random allocation: the dominating pair of a pass of t rounds, of which each unit is in exactly one, a secret one.

    P = (1/t) sum_j N(e_j, s^2 I),   Q = N(0, s^2 I),   mu = 1/s,   e_j the j-th unit vector, s the noise multiplier
    S = dP/dQ = (1/t) sum_j W_j,     W_j = exp(mu z_j - mu^2/2),   z_j independent N(0, 1) under Q

    remove   delta(e) = E_Q[(S - exp(e))_+]          add   delta(e) = E_Q[(1 - exp(e) S)_+]

Both are convex in S, so any mean-preserving spread of S only raises them. W, and every partial sum, is split onto {0}
and a geometric grid w_i = exp(i h): a value between two grid points goes to both, with its probability and its mean
preserved. One distribution therefore dominates both orders. For partial sums w_i + w_(i-k) = w_i (1 + exp(-k h)), so a
distance k has one split. Sums of a and of a + 1 terms give those of 2a, 2a + 1 and 2a + 2 terms, so t terms need
log2(t) steps.

Guarantee: `allocated` dominates a pass, whatever the directions of the messages and however later ones depend on
earlier releases (proof: docs/privacy.md, "Random allocation"). The bound includes values above the grid (their
P-probability becomes an infinite loss), values below it (split onto 0 and the lowest point), and rounding errors
(masses are raised by t times the relative error of one sum, losses by `_SHIFT`). Called by the event `Allocated`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import scipy  # its submodules load when first used
from scipy.special import log_ndtr, ndtr

from sordino.accounting.pairs import Array, Orders, Pair, Tails

POINTS = 5000  # of a distribution's grid at least; it is refined when fewer are left
MOST_BINS, MOST_MU = 1_000_000, 20.0  # beyond, sampling is not accounted for: a round's own pair bounds the pass
_REACH = 11.0  # standard deviations of one term that its grid covers: 2e-28 is left on either side
_TAIL = 1e-26  # probability that a sum may leave beyond its grid, on either side
_SHIFT = 1e-11  # added to every loss: bounds the relative error of all means (docs/privacy.md)
_LOST = 1e-100  # products of masses that are too small for a float, by their P-probability (values up to exp(420))
_ULP = float(np.finfo(np.float64).eps)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


@dataclass(frozen=True, eq=False)
class Sum:
    """Distribution, under Q, of a sum of terms W: `masses` at exp((low + k) step), and the mass `zero` at 0.

    `infinite` is the P-probability of values above the grid.
    """

    step: float
    low: int
    masses: Array
    zero: float
    infinite: float

    @property
    def top(self) -> int:
        return self.low + len(self.masses) - 1

    @property
    def logs(self) -> Array:
        return np.asarray((self.low + np.arange(len(self.masses), dtype=np.float64)) * self.step)

    @property
    def mean(self) -> float:
        """Mean of the sum, which equals the number of its terms."""
        return float(self.masses @ np.exp(self.logs)) + self.infinite


def upper_share(excess: Array, step: float) -> Array:
    """Return the share u of a value's mass that goes to the grid point above it, so that the mean is preserved.

    The value w (1 + excess) lies between the grid points w and w exp(step):   1 + excess = (1 - u) + u exp(step)
    """
    return np.asarray(np.clip(excess / math.expm1(step), 0.0, 1.0))


def one_term(mu: float, points: int) -> Sum:
    """Return the distribution of one term W = exp(mu z - mu^2/2) on a grid of `points` points.

    The integral over each cell is computed by Gauss-Legendre quadrature with 8 nodes.
    """
    bottom, top = -_REACH * mu - mu * mu / 2, (_REACH + mu) * mu - mu * mu / 2
    step = (top - bottom) / points
    low, cells = math.floor(bottom / step), points + 1
    edges = (low + np.arange(cells, dtype=np.float64)) * step
    inside = (_NODES + 1) / 2 * step  # of a cell, from its lower edge
    z = (edges[:, None] + inside) / mu + mu / 2
    chances = np.exp(-z * z / 2) * (_WEIGHTS * step / (2 * mu * math.sqrt(2 * math.pi)))
    upper = (chances * upper_share(np.expm1(inside), step)).sum(axis=1)
    masses = np.zeros(cells + 1)
    masses[:-1] += chances.sum(axis=1) - upper
    masses[1:] += upper
    first, last = edges[0] / mu + mu / 2, (edges[-1] + step) / mu + mu / 2
    lowest = math.exp(float(log_ndtr(first - mu)) - edges[0])  # below the grid: to 0 and to the lowest point
    masses[0] += lowest
    zero = max(float(ndtr(first)) - lowest, 0.0) + float(ndtr(-last))
    return Sum(step, low, np.maximum(masses, 0.0), zero, float(ndtr(mu - last)))


def added(one: Sum, other: Sum) -> Sum:
    """Return the sum of two independent sums on one grid, with each value split onto the grid points around it."""
    step = one.step
    base = math.floor(np.logaddexp(one.low * step, other.low * step) / step) - 1  # no sum of two terms is lower
    found = np.zeros(math.ceil(np.logaddexp(one.top * step, other.top * step) / step) + 3 - base)
    orders = ((one, other, 0, 2.0),) if one is other else ((one, other, 0, 1.0), (other, one, 1, 1.0))
    for larger, smaller, least, weight in orders:
        _add_near(found, base, larger, smaller, least, weight)
        _add_far(found, base, larger, smaller, weight)
    # one sum is 0: the other stays where it is or, if that is below the grid, is split onto 0 and the lowest point
    zero = one.zero * other.zero
    for chance, held in ((one.zero, other), (other.zero, one)):
        below = min(max(base - held.low, 0), len(held.masses))
        start = held.low + below - base
        found[start : start + len(held.masses) - below] += chance * held.masses[below:]
        lowest = chance * float(held.masses[:below] @ np.exp(held.logs[:below] - base * step))
        found[0] += lowest
        zero += max(chance * float(held.masses[:below].sum()) - lowest, 0.0)
    return trimmed(Sum(step, base, found, zero, one.infinite + other.infinite + _LOST))


def _nearest_far(step: float) -> int:
    """Return the distance k from which on w_i + w_(i-k) lies between w_i and w_(i+1)."""
    return max(1, math.ceil(-math.log(math.expm1(step)) / step) + 1)


def _add_near(found: Array, base: int, larger: Sum, smaller: Sum, least: int, weight: float) -> None:
    """Add the sums w_i + w_(i-k) for small distances k >= `least`; `weight` counts both orders of different terms."""
    step = larger.step
    first = max(least, larger.low - smaller.top)
    last = min(_nearest_far(step) - 1, larger.top - smaller.low)
    ratios = np.log1p(np.exp(-np.arange(first, last + 1) * step))
    points = np.floor(ratios / step * (1 + 4 * _ULP)).astype(np.int64)
    shares = upper_share(np.expm1(ratios - points * step), step)
    for k, m, u in zip(range(first, last + 1), points.tolist(), shares.tolist(), strict=True):
        start, stop = max(larger.low, smaller.low + k), min(larger.top, smaller.top + k) + 1
        both = (
            larger.masses[start - larger.low : stop - larger.low]
            * smaller.masses[start - k - smaller.low : stop - k - smaller.low]
        )
        times, at = weight if k else 1.0, start + m - base
        found[at : at + len(both)] += ((1 - u) * times) * both
        found[at + 1 : at + 1 + len(both)] += (u * times) * both


def _add_far(found: Array, base: int, larger: Sum, smaller: Sum, weight: float) -> None:
    """Add the sums w_i + w_(i-k) for all distances k at which they lie between w_i and w_(i+1)."""
    step, near = larger.step, _nearest_far(larger.step)
    start = max(larger.low, smaller.low + near)
    if start > larger.top:
        return
    places = np.arange(start, larger.top + 1) - near - smaller.low
    ends = np.minimum(places, len(smaller.masses) - 1)
    whole = np.cumsum(smaller.masses)[ends]
    decayed = scipy.signal.lfilter([1.0], [1.0, -math.exp(-step)], smaller.masses)  # sum_j mass_j exp(-(end - j) step)
    scaled = decayed[ends]
    above = np.minimum(scaled * np.exp(-(near + places - ends) * step) / math.expm1(step), whole)
    own, at = weight * larger.masses[start - larger.low :], start - base
    found[at : at + len(own)] += own * (whole - above)
    found[at + 1 : at + 1 + len(own)] += own * above


def trimmed(one: Sum) -> Sum:
    """Return a sum on a smaller grid; values above it become infinite, values below go to 0 and the lowest point."""
    values = np.exp(one.logs)
    above = np.cumsum((one.masses * values)[::-1])[::-1]
    below = np.cumsum(one.masses)
    top = int(np.flatnonzero(above > _TAIL * (above[0] + one.infinite))[-1]) + 1
    bottom = int(np.flatnonzero(below > _TAIL)[0])
    kept, zero = one.masses[bottom:top].copy(), one.zero + float(one.masses[top:].sum())
    lowest = float(one.masses[:bottom] @ np.exp(one.logs[:bottom] - one.logs[bottom]))
    kept[0] += lowest
    zero += max(float(one.masses[:bottom].sum()) - lowest, 0.0)
    infinite = one.infinite + (float(above[top]) if top < len(above) else 0.0)
    return Sum(one.step, one.low + bottom, kept, zero, infinite)


def _refined(one: Sum) -> Sum:
    masses = np.zeros(2 * len(one.masses) - 1)
    masses[::2] = one.masses
    return replace(one, step=one.step / 2, low=2 * one.low, masses=masses)


@lru_cache(maxsize=64)
def sum_of_terms(bins: int, mu: float, points: int = POINTS) -> Sum:
    """Return a distribution that dominates W_1 + ... + W_t (t = `bins`) in convex order.

    All its probabilities are raised by a bound on the rounding errors.
    """
    few = one_term(mu, points)
    more, widest = added(few, few), 0  # sums of a and of a + 1 terms, a = 1
    digits = bin(bins)[3:]
    for place, digit in enumerate(digits):
        only = "1" not in digits[place + 1 :]  # then the sum of 2a terms, or of 2a + 1, is all that is needed
        if digit == "1":
            few, more = added(few, more), few if only else added(more, more)
        else:
            few, more = (more if place == 0 else added(few, few)), (few if only else added(few, more))
        while len(few.masses) < points:
            few, more = _refined(few), _refined(more) if not only else more
        widest = max(widest, len(few.masses))
    raised = 1 + bins * (8 * widest + 1000 + 8 * (_REACH + mu) ** 2) * _ULP
    return replace(few, masses=few.masses * raised, zero=few.zero * raised, infinite=few.infinite * raised)


@dataclass(frozen=True)
class Allocation(Pair):
    """Dominating pair of one pass of random allocation with Gaussian noise: P, Q or, with `reverse`, Q, P."""

    bins: int
    mu: float
    reverse: bool = False
    slack = 1e-11

    def atoms(self) -> tuple[Array, Array, float]:
        """Return the finite losses in ascending order, their probabilities, and the probability of an infinite loss."""
        return _atoms(self.bins, self.mu, self.reverse)

    def tails(self, losses: Array) -> Tails:
        found, some, other = _tails(self.bins, self.mu, self.reverse)
        k = np.searchsorted(found, losses, side="right")
        with np.errstate(divide="ignore"):
            return np.log(some[k]), np.log(other[k])


@lru_cache(maxsize=64)
def _atoms(bins: int, mu: float, reverse: bool) -> tuple[Array, Array, float]:
    total = sum_of_terms(bins, mu)
    logs = total.logs - math.log(bins)
    if reverse:
        return -logs[::-1] + _SHIFT, total.masses[::-1].copy(), total.zero + _LOST
    return logs + _SHIFT, total.masses * np.exp(logs), total.infinite / bins


@lru_cache(maxsize=64)
def _tails(bins: int, mu: float, reverse: bool) -> tuple[Array, Array, Array]:
    """Return the losses, and under both distributions the probability of a loss at least as large as each."""
    losses, masses, infinite = _atoms(bins, mu, reverse)
    with np.errstate(over="ignore"):
        other = np.nan_to_num(masses * np.exp(-losses), posinf=1.0)
    above = [np.append(np.cumsum(each[::-1])[::-1], 0.0) for each in (masses, other)]
    return losses, np.minimum(above[0] + infinite, 1.0), np.minimum(above[1], 1.0)


def allocated(bins: int, mu: float) -> Orders:
    """Return the dominating pairs of one pass under add_remove or zero_out, in both orders of neighbours.

    The unit is in exactly one of `bins` rounds in one data set, and in none in the other.
    """
    return Orders(Allocation(bins, mu), Allocation(bins, mu, reverse=True))
