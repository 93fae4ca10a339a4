"""The number of trials of private selection: random, secret, and the best trial alone is released.

    truncated negative binomial   P(K = k) ~ (1 - gamma)^k prod_{l < k} (l + eta)/(l + 1),  k >= 1
                                  eta = shape: 1 is geometric, 0 logarithmic; gamma follows from the mean
    Poisson                       K may be 0: then nothing is released

Guarantee: Papernot, Steinke 2022, Theorems 2 and 6 (`renyi.best_of_negative_binomial`, `best_of_poisson`). It holds for
the best of K independent trials, by any score of what a trial released, if each of them is as private as the others,
and if K and every other trial stay secret. A table of trials that is looked at is composition instead.

Last, the binomial distribution of the rounds that independent sampling takes one client in (`binomial_quantile`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sordino.accounting import renyi
from sordino.accounting.pld.pairs import Array
from sordino.errors import ConfigError

Law = Literal["negative_binomial", "poisson"]
MOST = 10_000.0  # trials on average


@dataclass(frozen=True)
class Trials:
    """The law of the number of trials, by its mean; `shape` is eta, of the negative binomial alone."""

    mean: float = 10.0
    law: Law = "negative_binomial"
    shape: float = 1.0

    def __post_init__(self) -> None:
        poisson = self.law == "poisson"
        if not (0 < self.mean <= MOST if poisson else 1 < self.mean <= MOST):
            needed = f"a mean {'above 0' if poisson else 'above 1'}, at most {MOST:,.0f}"
            raise ConfigError(f"{self.mean:g} trials on average", needed, "10 is usual")
        if not 0 <= self.shape <= 100:
            raise ConfigError(f"shape = {self.shape:g} of the trials", "0 (logarithmic) to 100; 1 is geometric")

    @property
    def gamma(self) -> float:
        """Of the negative binomial: the number whose mean this is."""
        return _gamma(self.shape, self.mean)

    def draw(self, coins: np.random.Generator) -> int:
        """One number of trials."""
        if self.law == "poisson":
            return int(coins.poisson(self.mean))
        gamma, k, left = self.gamma, 1, float(coins.random())
        chance = _first(self.shape, gamma)
        while left >= chance > 1e-18:
            left -= chance
            chance *= (1 - gamma) * (k + self.shape) / (k + 1)
            k += 1
        return k

    def chance(self, k: int) -> float:
        """P(K = k)."""
        if self.law == "poisson":
            return math.exp(k * math.log(self.mean) - self.mean - math.lgamma(k + 1))
        gamma = self.gamma
        found = _first(self.shape, gamma) if k else 0.0
        for n in range(1, k):
            found *= (1 - gamma) * (n + self.shape) / (n + 1)
        return found

    def divergences(self, one: Array) -> Array:
        """Those of the best, by those of one trial."""
        if self.law == "poisson":
            return renyi.best_of_poisson(one, self.mean)
        gamma = self.gamma
        return renyi.best_of_negative_binomial(one, _mean(self.shape, gamma) * (1 + 1e-9), self.shape, gamma)


@lru_cache(maxsize=64)
def _gamma(shape: float, mean: float) -> float:
    """By bisection on log gamma; the mean falls as gamma grows, and the smaller gamma costs more."""
    low, high = -60.0, -1e-12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(shape, math.exp(middle)) > mean else (low, middle)
    return math.exp(low)


def _first(shape: float, gamma: float) -> float:
    """P(K = 1)."""
    log = math.log(gamma)
    return (1 - gamma) / -log if shape == 0 else shape * (1 - gamma) / math.expm1(-shape * log)


def _mean(shape: float, gamma: float) -> float:
    """E[K]: (1/gamma - 1) / log(1/gamma), or eta (1 - gamma) / (gamma (1 - gamma^eta))."""
    log = math.log(gamma)
    return math.expm1(-log) / -log if shape == 0 else shape * math.expm1(-log) / -math.expm1(shape * log)


_TAIL = 1e-6  # a forecast of the most rounds any client is in fails with at most this probability


def binomial_most(population: int, rounds: int, rate: float) -> int:
    """Smallest k with population * P[Bin(rounds, rate) > k] <= 1e-6: for a forecast, never for a cost."""
    return binomial_quantile(rounds, rate, _TAIL / population)


def binomial_quantile(rounds: int, rate: float, tail: float) -> int:
    """Smallest k with P[Bin(rounds, rate) > k] <= tail."""
    from scipy.special import bdtrc

    low, high = -1, rounds  # P[> k] falls in k: above the tail at low, below it at high
    while high - low > 1:
        k = (low + high) // 2
        low, high = (low, k) if bdtrc(k, rounds, rate) <= tail else (k, high)
    return high


def binomial_within(allowed: NDArray[np.int64], rounds: int, rate: float) -> NDArray[np.float64]:
    """P[Bin(rounds, rate) <= allowed]."""
    from scipy.special import bdtr

    return np.asarray(bdtr(np.minimum(allowed, rounds), rounds, rate))
