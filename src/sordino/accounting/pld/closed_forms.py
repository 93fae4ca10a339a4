"""Bounds that need no grid: one Gaussian, and repeated (epsilon, delta) pairs."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import gammaln, log_ndtr

MOST_PAIRS = 100_000  # repeated pairs are listed one by one up to here


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
