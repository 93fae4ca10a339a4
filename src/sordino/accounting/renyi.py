"""Renyi divergences of the pairs that have one in closed form or as a short integral: the second opinion.

    D_a(P || Q) = log E_Q[(dP/dQ)^a] / (a - 1),     n releases: n D_a,
    epsilon(delta) = min over a of  n D_a + log((a - 1)/a) - (log delta + log a)/(a - 1)

No grid of losses, no transform: nothing is shared with `compose` but the pairs. Each order is a bound by itself.
Theorem: Mironov 2017; the conversion is Canonne, Kamath, Steinke 2020, Prop. 12.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.special import gammaln

from sordino.accounting.pld.pairs import Array

ORDERS: Array = np.concatenate([np.arange(11, 110) / 10, np.arange(11, 64), [128.0, 256.0, 512.0, 1024.0]])
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_REACH = 13.0  # standard deviations that an integral covers
_LONGEST = 2000.0  # an integral over more is not taken: that order proves nothing


def by_public_coin(rate: float, divergences: Array) -> Array:
    """Of what happens with probability `rate`, by a coin that is seen: log(1 - q + q exp((a - 1) D_a)) / (a - 1)."""
    powers = (ORDERS - 1) * divergences
    with np.errstate(over="ignore"):
        return np.asarray(np.logaddexp(math.log1p(-rate), math.log(rate) + powers) / (ORDERS - 1))


def epsilon(divergences: Array, delta: float) -> float:
    """The least epsilon over all orders; inf if none proves anything."""
    if delta <= 0:
        return math.inf
    at = divergences + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return max(0.0, float(np.min(np.where(np.isnan(at), np.inf, at))))


def deltas(divergences: Array, epsilons: Array) -> Array:
    """The least delta at each epsilon, over all orders: exp((a-1)(D_a - epsilon)) (1 - 1/a)^(a-1) / a."""
    a = ORDERS[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        logs = (a - 1) * (divergences[:, None] - epsilons) + (a - 1) * np.log1p(-1 / a) - np.log(a)
        return np.asarray(np.exp(np.minimum(np.min(np.where(np.isnan(logs), np.inf, logs), axis=0), 0.0)))


def best_of_negative_binomial(one: Array, mean: float, shape: float, gamma: float) -> Array:
    """The best of K trials, K truncated negative binomial (eta = shape, gamma), E[K] = mean; `one`: of a trial.

        D'_a = D_a + (1 + eta) min over b of ((1 - 1/b) D_b + log(1/gamma) / b) + log(mean) / (a - 1)

    Theorem: Papernot, Steinke 2022, Theorem 2. Divergences grow with their order, so a larger one bounds a smaller.
    """
    extra = (1 + shape) * np.min((1 - 1 / ORDERS) * one - math.log(gamma) / ORDERS)
    return _rising(one + extra + math.log(mean) / (ORDERS - 1))


def best_of_poisson(one: Array, mean: float) -> Array:
    """The best of K trials, K Poisson: D'_a = D_a + mean delta(log(1 + 1/(a-1))) + log(mean) / (a - 1).

    delta(.) is by a trial's divergences. Theorem: Papernot, Steinke 2022, Theorem 6; a mean below 1 takes nothing
    off. Without a trial nothing is shown.
    """
    lost = deltas(one, np.log1p(1 / (ORDERS - 1)))
    return _rising(one + mean * lost + max(0.0, math.log(mean)) / (ORDERS - 1))


def _rising(divergences: Array) -> Array:
    """The least that orders at least as large prove."""
    return np.asarray(np.minimum.accumulate(divergences[::-1])[::-1])


def gaussian(mu: float) -> Array:
    """N(mu, 1) against N(0, 1): a mu^2 / 2."""
    return ORDERS * min(mu * mu, 1e300) / 2


def laplace(size: float) -> Array:
    """Laplace noise of scale 1 moved by `size` (Mironov 2017, Table II)."""
    a = ORDERS
    first, second = np.log(a / (2 * a - 1)) + (a - 1) * size, np.log((a - 1) / (2 * a - 1)) - a * size
    return np.asarray(np.logaddexp(first, second) / (a - 1))


@lru_cache(maxsize=256)
def poisson_gaussian(rate: float, mu: float) -> Array:
    """(1-q) N(0) + q N(mu) against N(0), which is the larger order of the two (Mironov, Talwar, Zhang 2019).

    Whole orders by the binomial sum, others by Gauss-Legendre quadrature.
    """
    return np.asarray([_log_moment(rate, mu, float(a), -_REACH) / (a - 1) for a in ORDERS])


@lru_cache(maxsize=256)
def fixed_size_gaussian(rate: float, mu: float) -> Array:
    """The pair `Mirrored(rate, Gauss(mu))`: E_P[exp((a-1) L)] above 0, at 0, and below 0 by the mirror."""
    at_zero = (1 - rate) * math.erf(min(mu, 1e9) / math.sqrt(8))
    found = []
    for a in ORDERS:
        above, below = (_log_moment(rate, mu, power, mu / 2) for power in (float(a), float(1 - a)))
        found.append(_log_sum(np.asarray([above, below, math.log(at_zero) if at_zero > 0 else -math.inf])) / (a - 1))
    return np.asarray(found)


def _log_moment(rate: float, mu: float, power: float, start: float) -> float:
    """log of the integral over x > start of phi(x) (1 - q + q exp(mu x - mu^2/2))^power; inf if that is too long."""
    if power > 1 and power.is_integer() and (start <= -_REACH or power > 64):
        return _log_binomial(rate, mu, int(power))  # over all x: no less
    end = max(start, power * mu, 0.0) + _REACH
    if not end - start < _LONGEST or mu > _LONGEST:
        return math.inf
    edges = np.linspace(start, end, math.ceil(end - start) + 1)
    half = (edges[1] - edges[0]) / 2
    x = edges[:-1, None] + (half + half * _NODES)
    absent = math.log1p(-rate) if rate < 1 else -math.inf
    mixed = np.logaddexp(absent, mu * x + (math.log(rate) - mu * mu / 2))
    heights = -x * x / 2 + power * mixed + np.log(_WEIGHTS * half)
    return _log_sum(heights) - math.log(2 * math.pi) / 2 + 1e-9


def _log_binomial(rate: float, mu: float, order: int) -> float:
    """log of sum_k C(a, k) (1-q)^(a-k) q^k exp((k^2 - k) mu^2 / 2)."""
    k = np.arange(order + 1)
    ways = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        absent = np.where(k == order, 0.0, (order - k) * np.log1p(-rate))
        terms = ways + absent + k * math.log(rate) + (k * k - k) * min(mu * mu, 1e290) / 2
    return _log_sum(terms) + 1e-9


def _log_sum(terms: Array) -> float:
    top = float(terms.max())
    return top + math.log(float(np.exp(terms - top).sum())) if math.isfinite(top) else top
