"""Dominating pairs: what a release can tell two neighbours apart by, as the law of one number, its privacy loss.

    L = log dP/dQ,    tails(l) = log P(L > l), log Q(L > l),    delta(e) = P(L > e) - exp(e) Q(L > e)

A pair dominates a release if its delta(e) is at least that of the release for every two neighbours and every real e;
then any sequence of releases, chosen adaptively or not, is dominated by the product of their pairs (Zhu, Dong, Wang
2022, "Optimal accounting of differential privacy via characteristic function", Thm 10). Both orders of neighbours
count: `Orders` holds a pair for each. Pairs are data: nothing here is random, and nothing here needs a library.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, log_ndtr

Array = NDArray[np.float64]
Tails = tuple[Array, Array]


class Pair(ABC):
    """Two laws P and Q by the tails of their loss.

    `total_variation` is how far, in total variation, the release is from what they dominate; `slack` the relative
    error of tails. `largest_loss` is the largest finite loss, if that has a chance of its own: a grid does well to
    have it.
    """

    total_variation: float = 0.0
    slack: float = 2e-15

    @property
    def largest_loss(self) -> float:
        """The largest finite loss, if it is an atom."""
        return math.inf

    @abstractmethod
    def tails(self, losses: Array) -> Tails:
        """log P(L > l) and log Q(L > l) at every l."""


@dataclass(frozen=True)
class Orders:
    """A pair for a unit that is there in P and not in Q, and one for the other order; the same where symmetric."""

    removed: Pair
    added: Pair

    @classmethod
    def symmetric(cls, pair: Pair) -> Orders:
        """Where both orders are the same, as they are when neighbours count in both."""
        return cls(pair, pair)

    def each(self) -> tuple[Pair, ...]:
        """The pairs that differ."""
        return (self.removed,) if self.removed == self.added else (self.removed, self.added)


@dataclass(frozen=True)
class Gauss(Pair):
    """N(mu, 1) against N(0, 1): L is N(mu^2/2, mu^2) under P and N(-mu^2/2, mu^2) under Q. Its own mirror image."""

    mu: float

    def tails(self, losses: Array) -> Tails:
        """Phi(mu/2 - l/mu) and Phi(-mu/2 - l/mu)."""
        with np.errstate(over="ignore"):
            away = losses / self.mu
        return log_ndtr(self.mu / 2 - away), log_ndtr(-self.mu / 2 - away)


@dataclass(frozen=True)
class Exponential(Pair):
    """Laplace noise of scale 1 moved by `size`: L lies in [-size, size], with an atom at both ends. Its own mirror."""

    size: float

    @property
    def largest_loss(self) -> float:
        return self.size

    def tails(self, losses: Array) -> Tails:
        """P(L > l) = 1 - exp((l - size)/2)/2 inside, Q(L > l) = exp(-(l + size)/2)/2."""
        inside = np.clip(losses, -self.size, self.size)
        some = np.log1p(-np.exp((inside - self.size) / 2) / 2)
        other = -(inside + self.size) / 2 - math.log(2)
        out, all_of = losses >= self.size, losses < -self.size
        return tuple(np.where(out, -np.inf, np.where(all_of, 0.0, each)) for each in (some, other))  # type: ignore[return-value]


@dataclass(frozen=True)
class Response(Pair):
    """Anything (epsilon, delta)-private: all is seen with chance delta, else one randomised response.

    Theorem: Kairouz, Oh, Viswanath 2015, "The composition theorem for differential privacy", Thm 3.
    """

    epsilon: float
    delta: float = 0.0

    @property
    def largest_loss(self) -> float:
        return self.epsilon

    def tails(self, losses: Array) -> Tails:
        """Atoms at -epsilon, epsilon and, for P alone, at infinity."""
        rest, high = math.log1p(-self.delta) if self.delta < 1 else -math.inf, -math.log1p(math.exp(-self.epsilon))
        lost = math.log(self.delta) if self.delta > 0 else -math.inf
        first, second = losses < -self.epsilon, losses < self.epsilon
        above = np.where(first, 0.0, np.where(second, np.logaddexp(lost, rest + high), lost))
        return above, np.where(first, rest, np.where(second, rest + high - self.epsilon, -np.inf))


def inner_loss(losses: Array, rate: float) -> Array:
    """The y with log(1 + q (exp(y) - 1)) = l; -inf where even y = -inf is above. No overflow, no cancellation."""
    with np.errstate(divide="ignore", invalid="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(losses, 1.0)) / rate, -1.0))
        large = losses - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(losses, 1.0)))
    return np.where(losses < 1, small, large)


@dataclass(frozen=True)
class _Sampled(Pair):
    """A pair of which one law, or both, is mixed with weight `rate` into another: no farther off than `inner`."""

    rate: float
    inner: Pair

    @property
    def total_variation(self) -> float:  # type: ignore[override]
        """That of `inner`: each part of a mixture is off by no more."""
        return self.inner.total_variation

    @property
    def slack(self) -> float:  # type: ignore[override]
        """That of `inner`: mixing adds no relative error."""
        return self.inner.slack


@dataclass(frozen=True)
class Present(_Sampled):
    """(1-q) Q + q P against Q: the changed unit is present with an unseen chance q."""

    @property
    def largest_loss(self) -> float:
        """log(1 + q (exp(y) - 1)) of the inner one."""
        inner = self.inner.largest_loss
        return math.log1p(self.rate * math.expm1(inner)) if inner < 700 else math.inf

    def tails(self, losses: Array) -> Tails:
        """L = log(1 - q + q exp(y)) for the inner loss y, so L > l exactly if y > inner_loss(l)."""
        moved, still = self.inner.tails(inner_loss(losses, self.rate))
        return log_mixture(self.rate, moved, still), still


@dataclass(frozen=True)
class Absent(_Sampled):
    """P against (1-q) P + q Q, where `inner` is (P, Q) and the unit is in Q: L is at most -log(1 - q)."""

    @property
    def largest_loss(self) -> float:
        """-log(1 + q (exp(-y) - 1)) of the inner one."""
        inner = self.inner.largest_loss
        return -math.log1p(self.rate * math.expm1(-inner)) if inner < math.inf else math.inf

    def tails(self, losses: Array) -> Tails:
        """L = -log(1 - q + q exp(-y)) for the inner loss y: L > l exactly if y > -inner_loss(-l)."""
        still, moved = self.inner.tails(-inner_loss(-losses, self.rate))
        return still, log_mixture(self.rate, moved, still)


@dataclass(frozen=True)
class Swapped(Pair):
    """(1-q) N(0) + q N(mu) against (1-q) N(0) + q N(-mu): the unit is present by the same coin and has other data."""

    rate: float
    mu: float

    def tails(self, losses: Array) -> Tails:
        """L is odd and increasing in the outcome x: a quadratic equation in exp(mu x) inverts it."""
        x = np.sign(losses) * self._outcome(np.abs(losses))
        still = log_ndtr(-x)
        some, other = log_ndtr(self.mu - x), log_ndtr(-self.mu - x)
        return log_mixture(self.rate, some, still), log_mixture(self.rate, other, still)

    def _outcome(self, losses: Array) -> Array:
        """x >= 0 with (1-q) + q c w = exp(l) ((1-q) + q c / w),  w = exp(mu x),  c = exp(-mu^2/2)."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            absent = math.log1p(-self.rate) if self.rate < 1 else -math.inf
            first = absent + losses + np.log(-np.expm1(-losses))
            second = math.log(2 * self.rate) - self.mu**2 / 2 + losses / 2
            top = np.maximum(first, second)
            root = np.log((np.exp(first - top) + np.hypot(np.exp(first - top), np.exp(second - top))) / 2)
            found = (top + root - math.log(self.rate)) / self.mu + self.mu / 2
        return np.asarray(np.maximum(found, 0.0))


@dataclass(frozen=True)
class Mirrored(_Sampled):
    """Fixed-size sampling: the curve q delta_inner(y) at l = log(1 + q (exp(y) - 1)) >= 0, its mirror image below 0.

        delta(-l) = 1 - exp(-l) + exp(-l) delta(l)        each pair of neighbours counts in both orders

    Where the halves meet the slope jumps by (1 - q) delta_inner(0) >= 0, so the curve is convex in exp(l): that of a
    pair. Guarantee: dominates (1-q) A + q B against (1-q) A + q B' whenever `inner` dominates B against A and B
    against B', and the same with B and B' swapped. Theorem: Balle, Barthe, Gaboardi 2018, Thm 2 and 9 (advanced joint
    convexity).
    """

    def tails(self, losses: Array) -> Tails:
        """Above 0 that of `Present`; below, P(L > -l) = 1 - Q(L >= l) and Q(L > -l) = 1 - P(L >= l)."""
        above, below = Present(self.rate, self.inner).tails(np.abs(losses))
        with np.errstate(divide="ignore"):
            mirror = np.log1p(-np.exp(below)), np.log1p(-np.exp(above))
        return np.where(losses >= 0, above, mirror[0]), np.where(losses >= 0, below, mirror[1])


@dataclass(frozen=True)
class Either(Pair):
    """`first` with chance `share`, else `second`, and it is known which: a mixture of pairs dominates its parts."""

    share: float
    first: Pair
    second: Pair

    def tails(self, losses: Array) -> Tails:
        one, other = self.first.tails(losses), self.second.tails(losses)
        return log_mixture(self.share, one[0], other[0]), log_mixture(self.share, one[1], other[1])


@dataclass(frozen=True)
class PublicCoin(_Sampled):
    """`inner` with chance `rate`, else nothing, which has a loss of 0; the coin is seen and depends on no data."""

    @property
    def total_variation(self) -> float:  # type: ignore[override]
        return self.rate * self.inner.total_variation

    @property
    def largest_loss(self) -> float:
        return self.inner.largest_loss

    def tails(self, losses: Array) -> Tails:
        """q times the inner tails, and 1 - q below 0."""
        nothing = np.where(losses < 0, 0.0, -np.inf)
        some, other = self.inner.tails(losses)
        return log_mixture(self.rate, some, nothing), log_mixture(self.rate, other, nothing)


def log_mixture(share: float, first: Array, second: Array) -> Array:
    """log(share exp(first) + (1 - share) exp(second))."""
    if share >= 1:
        return first
    if share <= 0:
        return second
    return np.asarray(np.logaddexp(math.log(share) + first, math.log1p(-share) + second))


def poisson_sampled(rate: float, inner: Pair) -> Orders:
    """Poisson sampling under add_remove or zero_out of a release that `inner` dominates in both orders.

    Let T be the other units of the cohort, A the release of T and B that of T with our unit, both averaged over T; the
    sampled release is (1-q) A + q B with our unit in the data, and A without. For every t = exp(e), and c = 1 - t
    (1-q),

        H_t((1-q) A + q B, A) = q H_s(B, A),   s = (t - 1 + q) / q        for t >= 1 - q, else 1 - t for any A and B
        H_t(A, (1-q) A + q B) = c H_s(A, B),   s = t q / c                for c > 0, else 0 for any A and B

    by collecting the terms of A in sup_S. H_s is jointly convex, and `inner` dominates (B, A) and (A, B) for every T,
    so it does on average: replacing them by `inner` only raises both lines, and the right-hand sides are then those of
    `Present` and `Absent`. An absent unit and an empty message leave the same sum, so zero_out is the same.
    """
    return Orders(Present(rate, inner), Absent(rate, inner))


_PROBES = np.geomspace(1e-4, 30.0, 64)


@lru_cache(maxsize=256)
def is_own_mirror(pair: Pair) -> bool:
    """Whether (P, Q) and (Q, P) have one privacy curve: delta(e) = 1 - exp(e) + exp(e) delta(-e), at 64 values of e.

    A pair that dominates a release in both orders, (X, Y) and (Y, X), has that symmetry where it is tight. A pair
    without it that is stated for both orders is most likely that of one order alone.
    """

    def delta(at: Array) -> Array:
        some, other = pair.tails(at)
        return np.asarray(np.exp(some) - np.exp(at + other))

    with np.errstate(all="ignore"):
        gap = np.exp(-_PROBES / 2) * delta(_PROBES) - np.exp(_PROBES / 2) * (delta(-_PROBES) + np.expm1(-_PROBES))
    return bool(np.all(np.abs(gap) <= 1e-8))


def capped(rate: float, population: int, cap: int, mu: float, *, replaced: bool, removed: bool) -> Orders:
    """Poisson sampling of which at most `cap` are kept; `mu` of one unit's message (docs/privacy.md has the proof).

    J others came, J ~ Bin(N - 1, q):  J < cap   our coin adds us                         rate q, movement 1
                                       J >= cap  if kept, we take a random other's place  rate q', movement 2
    q' = Pr[we are kept | J >= cap] = (cap / N) Pr[Bin(N, q) > cap] / Pr[J >= cap]
    """
    full = float(bdtrc(cap - 1, population - 1, rate)) if cap <= population - 1 else 0.0
    room = Orders.symmetric(Swapped(rate, mu)) if replaced else poisson_sampled(rate, Gauss(mu))
    if full <= 0:
        return room
    kept = min(rate, cap / population * float(bdtrc(cap, population, rate)) / full)
    place = poisson_sampled(kept, Gauss(2 * mu)) if removed else Orders.symmetric(Mirrored(kept, Gauss(2 * mu)))
    return Orders(Either(full, place.removed, room.removed), Either(full, place.added, room.added))
