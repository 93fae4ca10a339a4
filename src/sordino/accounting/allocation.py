"""Random allocation: the dominating pair of a pass in which each unit is in exactly one of t rounds, in a secret one.

    P = (1/t) sum_j N(e_j, s^2 I),   Q = N(0, s^2 I),   mu = 1/s
    S = dP/dQ = (1/t) sum_j W_j,     W_j = exp(mu z_j - mu^2/2),   z_j independent N(0, 1) under Q

    remove   delta(e) = E_Q[(S - exp(e))_+]          add   delta(e) = E_Q[(1 - exp(e) S)_+]

Both are convex in S, so any mean-preserving spread of S only raises them. W, and every partial sum, is split onto {0}
and a geometric grid w_i = exp(i h): a value between two neighbours goes to both, with its probability and its mean
preserved. One distribution therefore dominates both orders. For partial sums w_i + w_(i-k) = w_i (1 + exp(-k h)), so a
distance k has one split. Sums of a and of a + 1 terms give those of 2a, 2a + 1 and 2a + 2 terms: t terms need log2(t)
steps.

Guarantee: `allocated` dominates a pass, whatever the directions of the messages and however later ones depend on
earlier releases (proof: docs/privacy.md, "Random allocation"). Counted in full: values above the grid (their
P-probability becomes an infinite loss), values below it (split onto 0 and the lowest point), and rounding: masses are
raised by t times the relative error of one sum, losses by `_SHIFT`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.signal import lfilter
from scipy.special import log_ndtr, ndtr

from sordino.accounting.pairs import Array, Orders, Pair, Tails

POINTS = 5000  # of a distribution's grid at least; it is refined when fewer are left
MOST_BINS, MOST_MU = 1_000_000, 20.0  # beyond, sampling is not accounted for: a round's own pair bounds the pass
_REACH = 11.0  # standard deviations of one term that its grid covers: 2e-28 is left on either side
_TAIL = 1e-26  # probability that a sum may leave beyond its grid, on either side
_SHIFT = 1e-11  # added to every loss: bounds the relative error of all means (docs/privacy.md)
_LOST = 1e-280  # products of masses that are too small for a float
_ULP = float(np.finfo(np.float64).eps)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


@dataclass(frozen=True, eq=False)
class Sum:
    """Distribution, under Q, of a sum of terms W: masses at exp((low + k) step), at 0, and the P-probability of
    infinity.
    """

    step: float
    low: int
    masses: Array
    zero: float
    infinite: float

    @property
    def logs(self) -> Array:
        return np.asarray((self.low + np.arange(len(self.masses), dtype=np.float64)) * self.step)

    @property
    def mean(self) -> float:
        """The mean of the sum: the number of its terms, which every step preserves."""
        return float(self.masses @ np.exp(self.logs)) + self.infinite


def upper_share(excess: Array, step: float) -> Array:
    """Return the share u of a value v that goes to the upper neighbour, so that the mean is preserved.

    v = w (1 + excess) lies between w and w exp(step):   1 + excess = (1 - u) + u exp(step)
    """
    return np.asarray(np.clip(excess / math.expm1(step), 0.0, 1.0))


def one_term(mu: float, points: int) -> Sum:
    """Return W = exp(mu z - mu^2/2), split onto a grid of `points` points; integrals over its cells by 8 nodes each."""
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
    """Return the sum of two independent sums on one grid, each value split onto its two neighbours."""
    low, step = min(one.low, other.low), one.step
    size = max(one.low + len(one.masses), other.low + len(other.masses)) - low
    a, b = (np.zeros(size) for _ in range(2))
    for place, each in ((a, one), (b, other)):
        place[each.low - low : each.low - low + len(each.masses)] = each.masses
    # distances k at which w_i (1 + exp(-k step)) is a whole point above w_i; beyond, the sum stays next to w_i
    near = min(size, max(1, math.ceil(-math.log(math.expm1(step)) / step) + 1))
    ratios = np.log1p(np.exp(-np.arange(near) * step))
    points = np.floor(ratios / step * (1 + 4 * _ULP)).astype(np.int64)
    shares = upper_share(np.expm1(ratios - points * step), step)
    base = int(points[-1]) if near == size else 0  # no sum of two terms is lower
    found = np.zeros(size + int(points[0]) - base + 2)
    for k, m, u in zip(range(near), (points - base).tolist(), shares.tolist(), strict=True):
        both = a[k:] * b[: size - k]
        if k:
            both += b[k:] * a[: size - k]
        found[k + m : size + m] += (1 - u) * both
        found[k + m + 1 : size + m + 1] += u * both
    if near < size:
        for x, y in ((a, b), (b, a)):
            behind = np.concatenate([np.zeros(near), y[: size - near]])
            whole = np.cumsum(behind)
            above = lfilter([1.0], [1.0, -math.exp(-step)], behind) * (math.exp(-near * step) / math.expm1(step))
            above = np.minimum(above, whole)
            found[:size] += x * (whole - above)
            found[1 : size + 1] += x * above
    # one sum is 0: the other stays where it is or, if that is below the grid, is split onto 0 and the lowest point
    alone = one.zero * b + other.zero * a
    found[: max(size - base, 0)] += alone[base:]
    lowest = float(alone[:base] @ np.exp((np.arange(min(base, size)) - base) * step))
    found[0] += lowest
    zero = one.zero * other.zero + max(float(alone[:base].sum()) - lowest, 0.0)
    return trimmed(Sum(step, low + base, found, zero, one.infinite + other.infinite + _LOST))


def trimmed(one: Sum) -> Sum:
    """Return a sum with a smaller grid: what is above becomes infinite, what is below is split onto 0 and the lowest
    point.
    """
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
    """Return the same distribution on a grid with half the step."""
    masses = np.zeros(2 * len(one.masses) - 1)
    masses[::2] = one.masses
    return replace(one, step=one.step / 2, low=2 * one.low, masses=masses)


@lru_cache(maxsize=64)
def sum_of_terms(bins: int, mu: float, points: int = POINTS) -> Sum:
    """Return a distribution that dominates W_1 + ... + W_t in convex order, and all its probabilities raised by the
    rounding error.
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
    """Pair of one pass of random allocation with Gaussian noise: P against Q or, with `reverse`, Q against P."""

    bins: int
    mu: float
    reverse: bool = False
    slack = 1e-11

    def atoms(self) -> tuple[Array, Array, float]:
        """Return the finite losses, ascending, their probabilities, and the probability of an infinite loss."""
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
    """Return the losses, and for each the probability under either distribution of a loss at least as large."""
    losses, masses, infinite = _atoms(bins, mu, reverse)
    with np.errstate(over="ignore"):
        other = np.nan_to_num(masses * np.exp(-losses), posinf=1.0)
    above = [np.append(np.cumsum(each[::-1])[::-1], 0.0) for each in (masses, other)]
    return losses, np.minimum(above[0] + infinite, 1.0), np.minimum(above[1], 1.0)


def allocated(bins: int, mu: float) -> Orders:
    """Return the pairs of one pass: the unit is in exactly one of `bins` rounds, or absent (add_remove, zero_out)."""
    return Orders(Allocation(bins, mu), Allocation(bins, mu, reverse=True))
