"""In how many of a run's rounds independent coins take one client."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
