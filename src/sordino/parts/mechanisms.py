"""Noise mechanisms: Gaussian and Laplace. Noise is drawn in this file only (a test reads every other file).

Every message lies in the unit ball, so the scale of the noise IS the noise multiplier. A mechanism states the
distribution of its noise (`Normal`, `LaplaceSum`) for `sordino audit`; one that states nothing works and is charged all
the same, and the audit then says "not examined", never "passed".
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.bounds import Norm, Unit
from sordino.accounting.events import Event, GaussianNoise, LaplaceNoise, Relation, sensitivity
from sordino.codec import Part
from sordino.codec.boundary import array, number, of_type, returns
from sordino.errors import PlanError, brief_repr
from sordino.parts.schedules import positive
from sordino.rng import is_secure

Floats = NDArray[np.float64]
_GRID = 4096  # points at which a tail of many terms is computed; between them its logarithm is interpolated


class Mechanism(Part):
    """Additive noise of a known scale."""

    noise_multiplier: float

    @property
    @abstractmethod
    def norm(self) -> Norm:
        """The norm in which the message must be bounded."""

    @property
    @abstractmethod
    @returns(lambda found, *_: number(found, 0.0, above=True))
    def std(self) -> float:
        """Standard deviation of one coordinate."""

    @abstractmethod
    @returns(of_type(Event))
    def event(self) -> Event:
        """What one release costs."""

    def with_noise_multiplier(self, noise_multiplier: float) -> Mechanism:
        """The same law with another scale."""
        other: Mechanism = replace(self, noise_multiplier=noise_multiplier)  # type: ignore[type-var]
        return other

    def distribution(self) -> Distribution | None:
        """The distribution of one coordinate of a draw; coordinates and draws are independent. None: not stated.

        `sordino audit` compares what `sample` draws with it: one line, e.g. `return scipy.stats.norm(scale=self.std)`.
        """
        return None

    def sum_distribution(self, noise_multipliers: tuple[float, ...]) -> Distribution | None:
        """The distribution of the sum of independent draws with these noise multipliers; None: not stated."""
        return self.with_noise_multiplier(noise_multipliers[0]).distribution() if len(noise_multipliers) == 1 else None

    @abstractmethod
    @returns(lambda found, part, size, rng: array(found, (size,), "f"))
    def sample(self, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """One draw for a message of `size` coordinates."""


def _positive(name: str, noise_multiplier: float) -> None:
    if not positive(noise_multiplier):
        needed, fix = "a positive finite number that float32 holds", "use release NoNoise() to train without privacy"
        raise PlanError("noise", f"{name} noise multiplier {brief_repr(noise_multiplier)}", needed, fix)


@dataclass(frozen=True)
class Gaussian(Mechanism, kind="gaussian"):
    """x + N(0, noise multiplier^2 I) for ||x||_2 <= 1.

    Guarantee: mu-GDP with mu = sensitivity / noise multiplier (Dong, Roth, Su 2022), sensitivity 1, or 2 (replace one).
    As an estimate: numpy's ziggurat leaves cells of the public grid empty beyond 10.08 standard deviations, which adds
    at most 1e-23 e^epsilon to delta per coordinate and release (docs/privacy.md#from-sampler-to-grid).
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        _positive("gaussian", self.noise_multiplier)

    @property
    def norm(self) -> Norm:
        return 2

    @property
    def std(self) -> float:
        return self.noise_multiplier

    def event(self) -> Event:
        return GaussianNoise(self.noise_multiplier)

    def distribution(self) -> Distribution:
        return Normal(self.noise_multiplier)

    def sum_distribution(self, noise_multipliers: tuple[float, ...]) -> Distribution:
        return Normal(math.hypot(*noise_multipliers))

    def sample(self, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return rng.standard_normal(size) * self.noise_multiplier


@dataclass(frozen=True)
class Laplace(Mechanism, kind="laplace"):
    """x + Laplace(noise_multiplier) per coordinate for ||x||_1 <= 1.

    Guarantee: pure epsilon = sensitivity / noise multiplier (Dwork et al. 2006), sensitivity 1, or 2 (replace one).
    For release the draw is `secure_exponential` with a sign: numpy's own Laplace inverts a uniform of 53 bits, so that
    some values (1.7e-10 per coordinate) cannot occur under a neighbour.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        _positive("laplace", self.noise_multiplier)

    @property
    def norm(self) -> Norm:
        return 1

    @property
    def std(self) -> float:
        return math.sqrt(2) * self.noise_multiplier

    def event(self) -> Event:
        return LaplaceNoise(self.noise_multiplier)

    def distribution(self) -> Distribution:
        return LaplaceSum((self.noise_multiplier,))

    def sum_distribution(self, noise_multipliers: tuple[float, ...]) -> Distribution:
        return LaplaceSum(noise_multipliers)

    def sample(self, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
        if not is_secure(rng):
            return rng.laplace(scale=self.noise_multiplier, size=size)
        signs = 2.0 * rng.integers(2, size=size) - 1.0
        return signs * secure_exponential(size, rng) * self.noise_multiplier


def secure_exponential(size: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """E = K ln 2 - log(1 - U / 2),  P(K = k) = 2^-(k+1),  U uniform: Exp(1) without a longest value or a gap.

    The density halves once per ln 2, so K, the whole halvings, and the rest in [0, ln 2) are independent. K is the
    number of zero bits before the first one in a stream of bits; the rest has 2^53 values at most 2^-53 apart, and
    rounding moves a value by less than 2^-51 max(1, E). So wherever an interval of length g lies, its probability is
    that of Exp(1) times 1 +- 2^-50 max(1, E) / g, and never 0.
    """
    return np.asarray(_halvings(size, rng) * math.log(2) - np.log1p(-0.5 * rng.random(size)), dtype=np.float64)


def _halvings(size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Zero bits before the first one bit: P(k) = 2^-(k+1) for every k, word after word of 64 bits."""
    found, still_zero = np.zeros(size, dtype=np.int64), np.arange(size)
    while len(still_zero):
        words = rng.integers(2**64, size=len(still_zero), dtype=np.uint64)
        lowest = (words & (~words + np.uint64(1))).astype(np.float64)  # the lowest one bit: a power of two, or 0
        zeros = np.where(lowest > 0, np.frexp(lowest)[1] - 1, 64)
        found[still_zero] += zeros
        still_zero = still_zero[zeros == 64]
    return found


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


Values = NDArray[np.float64]
MOST_BINS = 4096
STEEP = 1e4  # of a log grid: its last bin is about so many times as wide as its first


class Preparation(Part):
    """One release of one column before the first round."""

    column: str
    epsilon: float

    @abstractmethod
    def message(self, shares: Values, unit: Unit) -> Values:
        """What the values of one client, or of one silo's records, come to: a unit moves it by at most 1 in L1."""

    @abstractmethod
    def noise(self, relation: Relation) -> Laplace:
        """What is added to a message so that the release costs `epsilon` when neighbours differ by `relation`."""

    def event(self, relation: Relation) -> Event:
        """What the release costs; `relation` is that of the cost's first line, by which its noise is sized."""
        return self.noise(relation).event()


@dataclass(frozen=True)
class Histogram(Preparation, kind="histogram"):
    """h_b = sum over units of their share in bin b, + Laplace(sensitivity / epsilon) per bin.

    A value v in [low, high] is held as its share (v - low) / (high - low) of that public range; what lies outside is
    clamped, a missing value (a share below 0) is in no bin. One record is in one bin, so ||h||_1 moves by 1, or by 2
    where it is replaced; of a client the histogram of all its values is divided by their number, so it weighs 1 too.
    Guarantee: pure epsilon (Dwork, McSherry, Nissim, Smith 2006, Theorem 1).
    """

    column: str
    epsilon: float
    low: float
    high: float
    bins: int = 64
    grid: Literal["even", "log"] = "even"

    def __post_init__(self) -> None:
        if not positive(self.epsilon):
            needed = "a positive number"
            raise PlanError("preparation", f"epsilon {brief_repr(self.epsilon)} for {self.column!r}", needed)
        if not -1e300 < self.low < self.high < 1e300:
            found = f"the range from {brief_repr(self.low)} to {brief_repr(self.high)} for {self.column!r}"
            raise PlanError("preparation", found, "two public numbers, low < high, that all values may lie between")
        if not 2 <= self.bins <= MOST_BINS:
            found = f"{brief_repr(self.bins)} bins for {self.column!r}"
            raise PlanError("preparation", found, f"from 2 to {MOST_BINS}")

    @property
    def edges(self) -> Values:
        """Public bounds of the bins as shares of the range, [bins + 1]; on a log grid narrow near `low`."""
        even = np.linspace(0.0, 1.0, self.bins + 1)
        return even if self.grid == "even" else np.expm1(even * math.log1p(STEEP)) / STEEP

    def noise(self, relation: Relation) -> Laplace:
        return Laplace(sensitivity(relation) / self.epsilon)

    def message(self, shares: Values, unit: Unit) -> Values:
        """[bins]: counts of one silo's records, each 1; of a client, parts of one."""
        present = np.clip(shares[shares >= 0], 0.0, 1.0)
        place = np.searchsorted(self.edges[1:-1], present, side="right")
        counts = np.bincount(place, minlength=self.bins).astype(np.float64)
        return counts / max(len(present), 1) if unit == "client" else counts

    # ---- what can be read off the noised sum, at no cost -------------------------------------------------------------

    def cumulated(self, total: Values) -> Values:
        """The nearest that grows to the noised cumulated counts, from 0 to 1: [bins + 1]."""
        from scipy.optimize import isotonic_regression

        grown = np.maximum(isotonic_regression(np.cumsum(total)).x, 0.0)
        return np.concatenate([[0.0], grown / grown[-1]]) if grown[-1] > 0 else self.edges

    def quantile(self, total: Values, level: float) -> float:
        """Where the cumulated counts reach `level`: a share of the range, between two edges of a bin."""
        below, edges = self.cumulated(total), self.edges
        place = min(max(int(np.searchsorted(below, level, side="left")), 1), self.bins)
        rise = below[place] - below[place - 1]
        inside = (level - below[place - 1]) / rise if rise > 0 else 1.0
        return float(edges[place - 1] + np.clip(inside, 0.0, 1.0) * (edges[place] - edges[place - 1]))

    def mean(self, total: Values) -> float:
        """The mean of the middles of the bins under what `cumulated` says: a share of the range."""
        middles = (self.edges[1:] + self.edges[:-1]) / 2
        return float(np.diff(self.cumulated(total)) @ middles)

    def span(self, total: Values, levels: tuple[float, float]) -> tuple[float, float]:
        """Two quantiles, at least a bin apart: a range of shares that can be scaled by."""
        low, high = (self.quantile(total, level) for level in levels)
        place = min(int(np.searchsorted(self.edges, low, side="right")), self.bins)
        return (low, high) if high > low + 1e-9 else (float(self.edges[place - 1]), float(self.edges[place]))

    def value(self, share: float) -> float:
        """A share of the range in the column's own unit."""
        return self.low + share * (self.high - self.low)
