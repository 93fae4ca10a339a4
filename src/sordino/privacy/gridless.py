"""Bounds that need neither a grid nor the library: one Gaussian, pure epsilons, repeated (epsilon, delta) pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import log_ndtr

from sordino.parts.events import (
    Approximate,
    CappedPoisson,
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Relation,
)

Entries = Sequence[tuple[Event, int]]


def shrunk(multiplier: float, relation: Relation) -> float:
    """The multiplier per unit of movement: replacing moves a message by up to 2."""
    return multiplier / 2 if relation == "replace_one" else multiplier


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


def pure_epsilon(entries: Entries, relation: Relation) -> float:
    """Basic composition of Laplace releases: true at any delta, 0 too; inf if anything else is there."""
    return sum((count * _pure(event, relation) for event, count in entries if count), 0.0)


def _pure(event: Event, relation: Relation) -> float:
    match event:
        case LaplaceNoise(b):
            return 1 / shrunk(b, relation)
        case PoissonSampled(rate, LaplaceNoise(b)) if relation != "replace_one":
            return float(np.logaddexp(math.log(rate) + 1 / b, math.log1p(-rate))) if rate < 1 else 1 / b
    return math.inf


def basic_epsilon(entries: Entries, delta: float) -> float:
    """Basic composition of (epsilon, delta) pairs: sums of both, if the deltas fit; else inf."""
    pairs = [(event, count) for event, count in entries if isinstance(event, Approximate)]
    if len(pairs) < len(entries) or sum(count * event.delta for event, count in pairs) > delta:
        return math.inf
    return sum((count * event.epsilon for event, count in pairs), 0.0)


def repeated_pair(pair: Approximate, count: int, delta: float) -> float:
    """Epsilon of `count` times one (epsilon, delta) pair, exactly and without a grid; rounded up by 1e-9."""
    basic = basic_epsilon([(pair, count)], delta)
    lost, above, below = _pair_tails(pair, count)
    if lost >= delta:
        return basic
    left = (delta - lost) / (1 - lost)
    exact = float(np.max(np.log(above[above > left] - left) - below[above > left], initial=-math.inf))
    return min(basic, max(0.0, exact + 1e-9))


def repeated_pair_delta(pair: Approximate, count: int, at: float) -> float:
    """Its delta at epsilon `at`, negative too."""
    lost, above, below = _pair_tails(pair, count)
    return lost + (1 - lost) * max(0.0, float(np.max(above - np.exp(np.minimum(at + below, 700.0)))) + 1e-12)


@lru_cache(maxsize=32)
def _pair_tails(pair: Approximate, count: int) -> tuple[float, Any, Any]:
    """What is lost, Pr[B >= i] and log Pr[count - B >= i] of k pairs (Kairouz, Oh, Viswanath 2015, Theorem 3.3):

    delta(e) = 1 - (1-d)^k (1 - max_i (Pr[B >= i] - exp(e) Pr[k - B >= i])),   B ~ Bin(k, 1 / (1 + exp(-epsilon)))
    """
    from scipy.stats import binom  # half a second to import

    lost = -math.expm1(count * math.log1p(-pair.delta)) if pair.delta < 1 else 1.0
    tries, high = np.arange(count + 1), 1 / (1 + math.exp(-pair.epsilon))
    above = np.exp(np.logaddexp.accumulate(binom.logpmf(tries, count, high)[::-1]))
    return lost, above, np.logaddexp.accumulate(binom.logpmf(tries, count, 1 - high)[::-1])


def losses(entries: Entries, relation: Relation) -> list[float]:
    """About the largest loss of one release of each entry with noise."""
    return [loss for event, _ in entries if (loss := _loss(event, relation)) is not None]


def _loss(event: Event, relation: Relation) -> float | None:
    match event:
        case CappedPoisson(_, _, _, GaussianNoise(z)):  # who comes in for whom is capped: up to twice the movement
            return _loss(GaussianNoise(z / 2), relation)
        case PoissonSampled(_, inner) | FixedSampled(_, _, inner):
            return _loss(inner, relation)
        case GaussianNoise(z):
            mu = 1 / shrunk(z, relation)
            return mu * (mu / 2 + 6)
        case LaplaceNoise(b):
            return 1 / shrunk(b, relation)
    return None
