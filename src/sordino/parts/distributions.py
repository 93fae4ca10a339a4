"""Distributions of noise and laws of sampling, as parts state them for `sordino audit`.

A part that states nothing works and is charged all the same; `sordino audit` then says "not examined", never "passed".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_GRID = 4096  # points at which a tail of many terms is computed; between them its logarithm is interpolated


class Distribution(Protocol):
    """One coordinate of the noise. A frozen distribution of scipy.stats is one, continuous or discrete."""

    def cdf(self, x: Floats, /) -> Floats:
        """P[noise <= x]."""

    def sf(self, x: Floats, /) -> Floats:
        """P[noise > x]: 1 - cdf, without losing the digits of a far tail."""


@dataclass(frozen=True)
class Normal:
    """N(0, std^2)."""

    std: float

    def cdf(self, x: Floats, /) -> Floats:
        from scipy.special import ndtr

        return np.asarray(ndtr(np.asarray(x) / self.std))

    def sf(self, x: Floats, /) -> Floats:
        return self.cdf(-np.asarray(x))


@dataclass(frozen=True)
class LaplaceSum:
    """The sum of independent Laplace(scale), one for each scale."""

    scales: tuple[float, ...]

    def cdf(self, x: Floats, /) -> Floats:
        far = laplace_sum_tail(np.abs(x), self.scales)
        return np.where(np.asarray(x) < 0, far, 1.0 - far)

    def sf(self, x: Floats, /) -> Floats:
        return self.cdf(-np.asarray(x))


def laplace_sum_tail(x: Floats, scales: tuple[float, ...]) -> Floats:
    """P[sum of Laplace(scale_i) > x], x >= 0:  sum_k p_k Q(k, x / b),  b the smallest scale, Q the upper gamma ratio.

    The sum is a difference of two chains of exponential clocks. Once the second chain has run out, the first has some
    clocks left; at the rate 1 / b these need k ticks with probability p_k. For n equal scales k is at most n.
    """
    ticks = _ticks(1.0 / np.asarray(scales))
    fast = np.asarray(x, dtype=np.float64) / min(scales)
    if len(ticks) <= 64 or fast.size <= _GRID:
        return _mixture(fast, ticks)
    grid = np.linspace(0.0, float(fast.max()), _GRID)
    return np.exp(np.interp(fast, grid, np.log(np.maximum(_mixture(grid, ticks), 1e-300))))


def _mixture(fast: Floats, ticks: Floats) -> Floats:
    from scipy.special import gammaincc

    found = np.zeros_like(fast)
    for k, p in enumerate(ticks, start=1):
        if p:
            found += p * gammaincc(k, fast)
    return found


def _ticks(rates: Floats) -> Floats:
    """p_k: the chance that the clocks left need k ticks; a tick ends clock i with probability rate_i / fastest."""
    state, ends = _left(rates), rates / rates.max()
    found: list[float] = []
    while state.sum() > 1e-17 and len(found) < 100_000:
        done = state * ends
        found.append(float(done[-1]))
        state = state - done
        state[1:] += done[:-1]
    return np.asarray(found)


def _left(rates: Floats) -> Floats:
    """The chance that, of two equal chains of clocks, the second runs out first, while the first runs clock i."""
    count = len(rates)
    reached = np.zeros((count + 1, count + 1))  # [clock of the first chain, clock of the second]
    reached[0, 0] = 1.0
    for i in range(count):
        for j in range(count):
            first = rates[i] / (rates[i] + rates[j])
            reached[i + 1, j] += reached[i, j] * first
            reached[i, j + 1] += reached[i, j] * (1.0 - first)
    return reached[:count, count].copy()


@dataclass(frozen=True)
class SamplingLaw:
    """How units (clients, or the records of a silo) are drawn.

    inclusion           P[a unit is drawn in round t]: a number for all, or a function t -> [population]
    size                exactly so many are drawn in every round; None: their number varies
    cap                 never more than so many
    size_sf             (t, k) -> P[more than k are drawn in round t], where the number varies; None: not stated
    independent         within a round units are drawn independently, or negatively associated (without replacement);
                        False: any dependence within a round, as of whole groups
    secret              every round's draw is independent of the others and foreseen by nobody; False: it is public, and
                        the cost rests on the next two alone
    max_participations  rounds -> the most of them that one unit is in
    min_separation      any two rounds of one unit are at least so many rounds apart
    """

    population: int
    inclusion: float | Callable[[int], Floats] = 1.0
    size: int | None = None
    cap: int | None = None
    size_sf: Callable[[int, int], float] | None = None
    independent: bool = True
    secret: bool = True
    max_participations: Callable[[int], int] | None = None
    min_separation: int | None = None

    def inclusions(self, t: int) -> Floats:
        """P[drawn in round t] of every unit."""
        found = self.inclusion(t) if callable(self.inclusion) else self.inclusion
        return np.broadcast_to(np.asarray(found, dtype=np.float64), (self.population,))


def independent_coins(population: int, rate: float, cap: int | None = None) -> SamplingLaw:
    """Poisson sampling: each unit by its own coin; of more than `cap` a uniform subset of that many stays."""
    from scipy.special import bdtrc

    if cap is not None and cap >= population:
        cap = None

    def size_sf(t: int, k: int) -> float:
        most = population if cap is None else cap
        return 0.0 if k >= most else float(bdtrc(k, population, rate))

    mean = population * rate if cap is None else math.fsum(size_sf(0, k) for k in range(cap))  # E min(B, cap)
    return SamplingLaw(population, mean / population, cap=cap, size_sf=size_sf)
