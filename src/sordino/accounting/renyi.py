"""Renyi divergences: the accountant's second bound, and private selection (`Trials`). Called by events and accountant.

    D_a(P || Q) = log E_Q[(dP/dQ)^a] / (a - 1),     n releases: n D_a,
    epsilon(delta) = min over a of  n D_a + log((a - 1)/a) - (log delta + log a)/(a - 1)

The bound uses no grid and no transform, so it is independent of `pld`. Each order a alone gives a bound.
Theorem: Mironov 2017; the conversion is Canonne, Kamath, Steinke 2020, Prop. 12.

Private selection releases the best of a random, secret number K of trials, whose distribution is one of

    truncated negative binomial   P(K = k) ~ (1 - gamma)^k prod_{l < k} (l + eta)/(l + 1),  k >= 1
                                  with shape eta (1 is geometric, 0 logarithmic); gamma follows from the mean
    Poisson                       K may be 0, and then nothing is released

Guarantee: Papernot, Steinke 2022, Theorems 2 and 6. It holds for the best of K independent trials, by any score of what
a trial released, if all trials are equally private, and if K and every other trial stay secret. If a table of all
trials is published, the costs of the trials compose instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy.special import gammaln

from sordino.accounting.pairs import Array
from sordino.errors import ConfigError

ORDERS: Array = np.concatenate([np.arange(11, 110) / 10, np.arange(11, 64), [128.0, 256.0, 512.0, 1024.0]])
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_REACH = 13.0  # standard deviations that an integral covers
_LONGEST = 2000.0  # an integral over more is not taken: that order proves nothing


def publicly_sampled(rate: float, divergences: Array) -> Array:
    """Return log(1 - q + q exp((a - 1) D_a)) / (a - 1), the divergences of a release publicly sampled at rate q."""
    powers = (ORDERS - 1) * divergences
    with np.errstate(over="ignore"):
        return np.asarray(np.logaddexp(math.log1p(-rate), math.log(rate) + powers) / (ORDERS - 1))


def epsilon(divergences: Array, delta: float) -> float:
    """Return the epsilon at `delta` that follows from Renyi divergences at `ORDERS`; inf if none follows."""
    if delta <= 0:
        return math.inf
    at = divergences + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return max(0.0, float(np.min(np.where(np.isnan(at), np.inf, at))))


def deltas(divergences: Array, epsilons: Array) -> Array:
    """Return the least delta at each epsilon over all orders a: exp((a-1)(D_a - epsilon)) (1 - 1/a)^(a-1) / a."""
    a = ORDERS[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        logs = (a - 1) * (divergences[:, None] - epsilons) + (a - 1) * np.log1p(-1 / a) - np.log(a)
        return np.asarray(np.exp(np.minimum(np.min(np.where(np.isnan(logs), np.inf, logs), axis=0), 0.0)))


def gaussian(mu: float) -> Array:
    """Return a mu^2 / 2 at each order a, the divergences of N(mu, 1) against N(0, 1)."""
    return ORDERS * min(mu * mu, 1e300) / 2


def laplace(size: float) -> Array:
    """Return the divergences of Laplace noise of scale 1 shifted by `size` (Mironov 2017, Table II)."""
    a = ORDERS
    first, second = np.log(a / (2 * a - 1)) + (a - 1) * size, np.log((a - 1) / (2 * a - 1)) - a * size
    return np.asarray(np.logaddexp(first, second) / (a - 1))


@lru_cache(maxsize=256)
def poisson_gaussian(rate: float, mu: float) -> Array:
    """Return divergences of (1-q) N(0, 1) + q N(mu, 1) from N(0, 1), for Poisson sampling at rate q.

    They are not smaller than those of the other direction (Mironov, Talwar, Zhang 2019). Integer orders are computed by
    the binomial sum, others by Gauss-Legendre quadrature.
    """
    return np.asarray([_log_moment(rate, mu, float(a), -_REACH) / (a - 1) for a in ORDERS])


@lru_cache(maxsize=256)
def fixed_size_gaussian(rate: float, mu: float) -> Array:
    """Return divergences of the pair `Mirrored(rate, Gauss(mu))`, for a Gaussian release sampled without replacement.

    E_P[exp((a-1) L)] is summed over losses L > 0, L = 0 and, by symmetry, L < 0.
    """
    at_zero = (1 - rate) * math.erf(min(mu, 1e9) / math.sqrt(8))
    found = []
    for a in ORDERS:
        above, below = (_log_moment(rate, mu, power, mu / 2) for power in (float(a), float(1 - a)))
        found.append(_log_sum(np.asarray([above, below, math.log(at_zero) if at_zero > 0 else -math.inf])) / (a - 1))
    return np.asarray(found)


def _log_moment(rate: float, mu: float, power: float, start: float) -> float:
    """Return log of the integral over x > start of phi(x) (1 - q + q exp(mu x - mu^2/2))^power; inf if too long."""
    if power > 1 and power.is_integer() and (start <= -_REACH or power > 64):
        # over all x, which is no less: log of sum_k C(a, k) (1-q)^(a-k) q^k exp((k^2 - k) mu^2 / 2)
        order = int(power)
        k = np.arange(order + 1)
        ways = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            others = np.where(k == order, 0.0, (order - k) * np.log1p(-rate))
            terms = ways + others + k * math.log(rate) + (k * k - k) * min(mu * mu, 1e290) / 2
        return _log_sum(terms) + 1e-9
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


def _log_sum(terms: Array) -> float:
    top = float(terms.max())
    return top + math.log(float(np.exp(terms - top).sum())) if math.isfinite(top) else top


# ---- private selection -----------------------------------------------------------------------------------------------

MOST = 10_000.0  # trials on average


@dataclass(frozen=True)
class Trials:
    """Distribution of the random number of trials; `shape` is eta of the negative binomial distribution."""

    mean: float = 10.0
    law: Literal["negative_binomial", "poisson"] = "negative_binomial"
    shape: float = 1.0

    def __post_init__(self) -> None:
        poisson = self.law == "poisson"
        if not (0 < self.mean <= MOST if poisson else 1 < self.mean <= MOST):
            needed = f"a mean {'above 0' if poisson else 'above 1'}, at most {MOST:,.0f}"
            raise ConfigError(f"a mean of {self.mean:g} trials", needed, "set mean = 10, a usual value")
        if not 0 <= self.shape <= 100:
            needed = "a shape from 0 (logarithmic distribution) to 100"
            raise ConfigError(f"shape = {self.shape:g} of the trials", needed, "set shape = 1, the geometric one")

    @property
    def gamma(self) -> float:
        """Parameter gamma of the negative binomial distribution with this mean."""
        return _gamma(self.shape, self.mean)

    def draw(self, rng: np.random.Generator) -> int:
        """Draw a random number of trials."""
        if self.law == "poisson":
            return int(rng.poisson(self.mean))
        gamma, k, left = self.gamma, 1, float(rng.random())
        log, eta = math.log(gamma), self.shape
        chance = (1 - gamma) / -log if eta == 0 else eta * (1 - gamma) / math.expm1(-eta * log)  # P(K = 1)
        while left >= chance > 1e-18:
            left -= chance
            chance *= (1 - gamma) * (k + self.shape) / (k + 1)
            k += 1
        return k

    def divergences(self, one: Array) -> Array:
        """Return the divergences of the best trial from the divergences D_a of one trial (`one`); m is the mean.

            negative binomial   D_a + (1 + eta) min over b of ((1 - 1/b) D_b + log(1/gamma) / b) + log(m) / (a - 1)
            Poisson             D_a + m delta(log(1 + 1/(a-1))) + log(m) / (a - 1),   delta(e) that of one trial

        Theorem: Papernot, Steinke 2022, Theorems 2 and 6; a Poisson mean below 1 is taken as 1 in log(m). Divergences
        grow with their order, so those of a larger order bound those of a smaller order.
        """
        if self.law == "poisson":
            lost = self.mean * deltas(one, np.log1p(1 / (ORDERS - 1)))
            best = one + lost + max(0.0, math.log(self.mean)) / (ORDERS - 1)
        else:
            gamma = self.gamma
            extra = (1 + self.shape) * np.min((1 - 1 / ORDERS) * one - math.log(gamma) / ORDERS)
            best = one + extra + math.log(_mean(self.shape, gamma) * (1 + 1e-9)) / (ORDERS - 1)
        return np.asarray(np.minimum.accumulate(best[::-1])[::-1])


@lru_cache(maxsize=64)
def _gamma(shape: float, mean: float) -> float:
    """Return gamma of the negative binomial with this mean, by bisection, rounded down, which raises the cost."""
    low, high = -60.0, -1e-12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(shape, math.exp(middle)) > mean else (low, middle)
    return math.exp(low)


def _mean(shape: float, gamma: float) -> float:
    """Return E[K] = eta (1 - gamma) / (gamma (1 - gamma^eta)), or (1/gamma - 1) / log(1/gamma) for eta = 0."""
    log = math.log(gamma)
    return math.expm1(-log) / -log if shape == 0 else shape * math.expm1(-log) / -math.expm1(shape * log)
