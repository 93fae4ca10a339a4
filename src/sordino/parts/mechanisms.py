"""Noise mechanisms (Gaussian, Laplace), and the noised histograms of columns that are released before the first round.

Noise is drawn in this file only (a test checks all other files); releases and engines call `Mechanism.sample`. Every
message lies in the unit ball, so the scale of the noise IS the noise multiplier. A mechanism states the distribution of
its noise for `sordino audit`; without it the mechanism works and is charged, but the audit says "not examined".
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.bounds import Norm, Unit
from sordino.accounting.events import Event, GaussianNoise, LaplaceNoise, Relation, sensitivity
from sordino.codec import Part
from sordino.codec.boundary import array, number, of_type, returns
from sordino.errors import brief_repr
from sordino.parts.schedules import positive, require
from sordino.rng import is_secure

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]
_GRID = 4096  # points at which a tail of many terms is computed; between them its logarithm is interpolated


class Mechanism(Part):
    """Base class of additive noise mechanisms with a known scale."""

    noise_multiplier: float

    @property
    @abstractmethod
    def norm(self) -> Norm:
        """Order (1 or 2) of the norm in which a message must be bounded."""

    @property
    @abstractmethod
    @returns(lambda found, *_: number(found, 0.0, above=True))
    def std(self) -> float:
        """Standard deviation of the noise in one coordinate."""

    @abstractmethod
    @returns(of_type(Event))
    def event(self) -> Event:
        """Return the privacy event of one release with this noise."""

    def with_noise_multiplier(self, noise_multiplier: float) -> Mechanism:
        """Return the same mechanism with another noise multiplier."""
        other: Mechanism = replace(self, noise_multiplier=noise_multiplier)  # type: ignore[type-var]
        return other

    def distribution(self) -> Distribution | None:
        """Return the distribution of one coordinate of the noise, whose coordinates are independent; None: not stated.

        `sordino audit` compares draws of `sample` with it. Example: `return scipy.stats.norm(scale=self.std)`.
        """
        return None

    def sum_distribution(self, noise_multipliers: tuple[float, ...]) -> Distribution | None:
        """Return the distribution of a sum of independent draws with these noise multipliers; None if unknown."""
        return self.with_noise_multiplier(noise_multipliers[0]).distribution() if len(noise_multipliers) == 1 else None

    @abstractmethod
    @returns(lambda found, part, size, rng: array(found, (size,), "f"))
    def sample(self, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw the noise of a message of `size` coordinates."""


class _Scaled(Mechanism):
    def __post_init__(self) -> None:
        found = f"{self.kind} noise multiplier {brief_repr(self.noise_multiplier)}"
        needed, fix = "a positive number in the range of float32", "use release NoNoise() to train without privacy"
        require(positive(self.noise_multiplier), "noise", found, needed, fix)


@dataclass(frozen=True)
class Gaussian(_Scaled, kind="gaussian"):
    """Gaussian mechanism x + N(0, noise multiplier^2 I) for ||x||_2 <= 1.

    Guarantee: mu-GDP with mu = sensitivity / noise multiplier (Dong, Roth, Su 2022), sensitivity 1, or 2 (replace one).
    Numpy's ziggurat sampler misses some points of the public grid beyond 10.08 standard deviations, which adds an
    estimated 1e-23 e^epsilon at most to delta per coordinate and release (docs/privacy.md#from-sampler-to-grid).
    """

    noise_multiplier: float
    norm: ClassVar[Norm] = 2

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

    def sample_rounded(self, row: Floats, step: float, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the noised row in units of `step`, a power of two, rounded to integers: rint((row + noise) / step).

        For release its distribution has no floating-point error (`rounded_gaussian`).
        """
        if is_secure(rng):
            return rounded_gaussian(row / step, self.noise_multiplier / step, rng)
        return np.rint((row + self.sample(len(row), rng)) / step).astype(np.int64)


@dataclass(frozen=True)
class Laplace(_Scaled, kind="laplace"):
    """Laplace mechanism x + Laplace(noise_multiplier) per coordinate for ||x||_1 <= 1.

    Guarantee: pure epsilon = sensitivity / noise multiplier (Dwork et al. 2006), sensitivity 1, or 2 (replace one).
    For release the draw is `secure_exponential` with a sign: numpy's own Laplace inverts a uniform of 53 bits, so that
    some values (1.7e-10 per coordinate) cannot occur under a neighbour.
    """

    noise_multiplier: float
    norm: ClassVar[Norm] = 1

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
    """Return draws of Exp(1) without a maximum or gaps: E = K ln 2 - log(1 - U / 2), P(K = k) = 2^-(k+1), U uniform.

    The density of Exp(1) halves once per ln 2, so K = floor(E / ln 2) and the rest in [0, ln 2) are independent. K is
    the number of zero bits before the first one bit in a stream of bits; the rest has 2^53 values at most 2^-53 apart,
    and rounding moves a value by less than 2^-51 max(1, E). So an interval of length g has, wherever it lies, the
    probability of Exp(1) times 1 +- 2^-50 max(1, E) / g, which is never 0.
    """
    halvings, still_zero = np.zeros(size, dtype=np.int64), np.arange(size)
    while len(still_zero):  # count zero bits before the first one bit, by words of 64 bits
        words = rng.integers(2**64, size=len(still_zero), dtype=np.uint64)
        lowest = (words & (~words + np.uint64(1))).astype(np.float64)  # the lowest one bit: a power of two, or 0
        zeros = np.where(lowest > 0, np.frexp(lowest)[1] - 1, 64)
        halvings[still_zero] += zeros
        still_zero = still_zero[zeros == 64]
    return np.asarray(halvings * math.log(2) - np.log1p(-0.5 * rng.random(size)), dtype=np.float64)


NDTRI = 1e-12  # bound on the absolute and relative error of scipy's ndtri, which states 1e-15; tests compare it


def rounded_gaussian(centre: Floats, scale: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return rint(centre + scale Z), Z standard normal: integers whose distribution has no floating-point error.

    Z = +-Phi^-1(U), U uniform in (0, 1/2), of which 63 bits are drawn. This fixes centre + scale Z up to `unsure`, by
    dPhi^-1(u) <= sqrt(pi / 2) du / u. Where an edge between two integers is within `unsure` (about one draw in 10^11),
    U is compared with Phi at that edge by `_Uniform`, to as many bits as this takes.
    """
    from scipy.special import ndtri

    words = rng.integers(2**64, size=len(centre), dtype=np.uint64)
    first, scales = words & np.uint64(2**63 - 1), np.where(words >> np.uint64(63), -scale, scale)
    middle = first.astype(np.float64) + 0.5
    tail = ndtri(middle * 2.0**-64)
    value = centre + scales * tail
    near = np.rint(value)
    unsure = scale * (NDTRI * (1.0 - tail) + 0.7 / middle) + 2.0**-50 * (np.abs(value) + np.abs(centre))
    for i in np.flatnonzero((0.5 - np.abs(value - near) <= unsure) | (middle < 8)):
        near[i] = _Uniform(int(first[i]), rng).cell(float(centre[i]), float(scales[i]), int(near[i]))
    rounded: NDArray[np.int64] = near.astype(np.int64)
    return rounded


@dataclass
class _Uniform:
    """Uniform number U in (0, 1/2), drawn bit by bit: after `bits` bits, first 2^-bits <= U <= (first + 1) 2^-bits.

    Comparisons are exact: Phi(x) is computed by mpmath with twice as many bits as are compared.
    """

    first: int
    rng: np.random.Generator
    bits: int = 64

    def is_below(self, edge: float, centre: float, scale: float) -> bool:
        """Return whether U < Phi((edge - centre) / scale)."""
        import mpmath

        while True:
            with mpmath.workprec(2 * self.bits + 64):
                p = mpmath.ncdf((mpmath.mpf(edge) - centre) / scale) * mpmath.mpf(2) ** self.bits
                if abs(p - self.first - 0.5) > 0.5 + mpmath.mpf(2) ** -32:
                    return bool(p > self.first)
            self.first = (self.first << 64) + int(self.rng.integers(2**64, dtype=np.uint64))
            self.bits += 64

    def cell(self, centre: float, scale: float, near: int) -> int:
        """Return rint(centre + scale Phi^-1(U)), searched from `near`; a negative scale stands for -Phi^-1(U)."""
        up = scale > 0  # then the value is below an edge if and only if U is below Phi at that edge
        while self.is_below(near - 0.5, centre, scale) == up:
            near -= 1
        while self.is_below(near + 0.5, centre, scale) != up:
            near += 1
        return near


class Distribution(Protocol):
    """Interface of the distribution of one noise coordinate; frozen distributions of scipy.stats satisfy it."""

    def cdf(self, x: Floats, /) -> Floats:
        """Return P[noise <= x]."""

    def sf(self, x: Floats, /) -> Floats:
        """Return P[noise > x] = 1 - cdf(x), precise in the tail."""


@dataclass(frozen=True)
class Normal:
    """The normal distribution N(0, std^2)."""

    std: float

    def cdf(self, x: Floats, /) -> Floats:
        from scipy.special import ndtr

        return np.asarray(ndtr(np.asarray(x) / self.std))

    def sf(self, x: Floats, /) -> Floats:
        return self.cdf(-np.asarray(x))


@dataclass(frozen=True)
class LaplaceSum:
    """The distribution of a sum of independent Laplace(scale) variables, one for each scale."""

    scales: tuple[float, ...]

    def cdf(self, x: Floats, /) -> Floats:
        far = laplace_sum_tail(np.abs(x), self.scales)
        return np.where(np.asarray(x) < 0, far, 1.0 - far)

    def sf(self, x: Floats, /) -> Floats:
        return self.cdf(-np.asarray(x))


def laplace_sum_tail(x: Floats, scales: tuple[float, ...]) -> Floats:
    """Return P[sum of Laplace(scale_i) > x] = sum_k p_k Q(k, x / b) for x >= 0.

    b is the smallest scale and Q the regularised upper incomplete gamma function. The sum of Laplace variables is
    X - Y with X and Y sums of independent exponentials. Where X > Y, the excess is a sum of exponentials, which
    uniformised to the rate 1 / b has k terms with probability p_k. For n equal scales k is at most n.
    """
    from scipy.special import gammaincc

    rates = 1.0 / np.asarray(scales)
    count = len(rates)
    reached = np.zeros((count + 1, count + 1))  # P[the chains reach clocks i and j]
    reached[0, 0] = 1.0
    for i in range(count):
        for j in range(count):
            first = rates[i] / (rates[i] + rates[j])
            reached[i + 1, j] += reached[i, j] * first
            reached[i, j + 1] += reached[i, j] * (1.0 - first)
    state, ends = reached[:count, count].copy(), rates / rates.max()  # the first chain is at clock i; a tick ends it
    ticks: list[float] = []  # p_1, p_2, ...
    while state.sum() > 1e-17 and len(ticks) < 100_000:
        done = state * ends
        ticks.append(float(done[-1]))
        state = state - done
        state[1:] += done[:-1]

    def mixture(fast: Floats) -> Floats:
        found = np.zeros_like(fast)
        for k, p in enumerate(ticks, start=1):
            found += p * gammaincc(k, fast) if p else 0.0
        return found

    fast = np.asarray(x, dtype=np.float64) / min(scales)
    if len(ticks) <= 64 or fast.size <= _GRID:
        return mixture(fast)
    grid = np.linspace(0.0, float(fast.max()), _GRID)
    return np.exp(np.interp(fast, grid, np.log(np.maximum(mixture(grid), 1e-300))))


# ---- releases of columns before the first round ----------------------------------------------------------------------

Values = NDArray[np.float64]
MOST_BINS = 4096
INSIDE = 1 - 2.0**-40  # of the unit ball: rounding of a norm does not leave it
STEEP = 1e4  # about the width of the last bin of a log grid over that of the first


class Preparation(Part):
    """Base class of private releases of one column before the first round, which give its range and mean."""

    column: str

    @abstractmethod
    def message(self, shares: Values, unit: Unit) -> Values:
        """Return the message of one client or silo, which one unit of privacy changes by at most 1 in the noise's norm.

        `shares` are the column's values, as positions in its public range."""

    @abstractmethod
    def noise(self, relation: Relation) -> Mechanism:
        """Return the mechanism that noises the sum of messages, for neighbours that differ by `relation`."""

    def event(self, relation: Relation) -> Event:
        """Return the privacy event of the release, for neighbours that differ by `relation`."""
        return self.noise(relation).event()


@dataclass(frozen=True)
class Histogram(Preparation, kind="histogram"):
    """Noised histogram of a column: h_b = sum over units of their share in bin b, + Laplace(sensitivity / epsilon).

    A value v in [low, high] is represented as (v - low) / (high - low), its position in that public range; values
    outside are clamped, and a missing value (a position below 0) is in no bin. One record is in one bin, so it changes
    ||h||_1 by 1, or by 2 if it is replaced. A client's histogram is divided by its number of values, so a client has
    the same sensitivity. Guarantee: pure epsilon (Dwork, McSherry, Nissim, Smith 2006, Theorem 1).
    """

    column: str
    epsilon: float
    low: float
    high: float
    bins: int = 64
    grid: Literal["even", "log"] = "even"

    def __post_init__(self) -> None:
        found = f"epsilon {brief_repr(self.epsilon)} for {self.column!r}"
        require(positive(self.epsilon), "preparation", found, "a positive number", "set epsilon, such as 0.1")
        found = f"the range from {brief_repr(self.low)} to {brief_repr(self.high)} for {self.column!r}"
        fits = -1e300 < self.low < self.high < 1e300
        needed = "two public numbers, low < high, that all values may lie between"
        require(fits, "preparation", found, needed, "set low and high without looking at the data")
        found = f"{brief_repr(self.bins)} bins for {self.column!r}"
        require(2 <= self.bins <= MOST_BINS, "preparation", found, f"from 2 to {MOST_BINS} bins", "set bins = 64")

    @property
    def edges(self) -> Values:
        """Public edges of the bins [bins + 1], as shares of the range; bins of a log grid are narrow near `low`."""
        even = np.linspace(0.0, 1.0, self.bins + 1)
        return even if self.grid == "even" else np.expm1(even * math.log1p(STEEP)) / STEEP

    def noise(self, relation: Relation) -> Laplace:
        return Laplace(sensitivity(relation) / self.epsilon)

    def message(self, shares: Values, unit: Unit) -> Values:
        """Return the histogram [bins] before noise: counts of a silo's records, or a client's shares (sum 1)."""
        present = np.clip(shares[shares >= 0], 0.0, 1.0)
        place = np.searchsorted(self.edges[1:-1], present, side="right")
        counts = np.bincount(place, minlength=self.bins).astype(np.float64)
        return counts / max(len(present), 1) if unit == "client" else counts

    def cumulated(self, total: Values) -> Values:
        """Return the cumulative distribution [bins + 1], by isotonic regression of the noised cumulative counts."""
        from scipy.optimize import isotonic_regression

        grown = np.maximum(isotonic_regression(np.cumsum(total)).x, 0.0)
        return np.concatenate([[0.0], grown / grown[-1]]) if grown[-1] > 0 else self.edges

    def quantile(self, total: Values, level: float) -> float:
        """Return the `level` quantile of a noised histogram as a share of the range, interpolated within its bin."""
        below, edges = self.cumulated(total), self.edges
        place = min(max(int(np.searchsorted(below, level, side="left")), 1), self.bins)
        rise = below[place] - below[place - 1]
        inside = (level - below[place - 1]) / rise if rise > 0 else 1.0
        return float(edges[place - 1] + np.clip(inside, 0.0, 1.0) * (edges[place] - edges[place - 1]))

    def mean(self, total: Values) -> float:
        """Return the mean of a noised histogram, by the midpoints of its bins, as a share of the range."""
        middles = (self.edges[1:] + self.edges[:-1]) / 2
        return float(np.diff(self.cumulated(total)) @ middles)

    def span(self, total: Values, levels: tuple[float, float]) -> tuple[float, float]:
        """Return two quantiles of a noised histogram as shares of the range, or their bin's edges if they coincide."""
        low, high = (self.quantile(total, level) for level in levels)
        place = min(int(np.searchsorted(self.edges, low, side="right")), self.bins)
        return (low, high) if high > low + 1e-9 else (float(self.edges[place - 1]), float(self.edges[place]))

    def value(self, share: float) -> float:
        """Return the value of the column at this share of its range."""
        return self.low + share * (self.high - self.low)


@dataclass(frozen=True)
class Moment(Preparation, kind="moment"):
    """Noised sum of clipped vectors v_i, one per record:  sum_i v_i / max(C, ||v_i||) + N(0, z^2 I).

    C is `clip_norm` and z is `noise_multiplier`. `make_private(prepare=...)` computes the mean and the scale of records
    from two such sums. One record changes the sum by at most 1 in L2 norm, or by 2 if it is replaced. Guarantee: that
    of `Gaussian`.
    """

    column: str
    noise_multiplier: float
    clip_norm: float
    size: int  # numbers in a vector

    def __post_init__(self) -> None:
        found = f"noise multiplier {brief_repr(self.noise_multiplier)}, clip norm {brief_repr(self.clip_norm)}"
        fits, needed = positive(self.noise_multiplier, self.clip_norm), "positive finite numbers"
        require(fits, "preparation", f"{found} for {self.column!r}", needed, "change noise_multiplier or clip_norm")

    def noise(self, relation: Relation) -> Gaussian:
        return Gaussian(self.noise_multiplier)

    def message(self, shares: Values, unit: Unit) -> Values:
        """Return the sum [size] of clipped vectors [n, size] before noise; a client's vectors are clipped as a sum."""
        import torch

        vectors = torch.from_numpy(np.atleast_2d(np.asarray(shares, dtype=np.float64)))
        own = vectors.sum(0, keepdim=True) if unit == "client" else vectors
        return np.asarray(self.clipped(own).sum(0).numpy())

    def clipped(self, vectors: Tensor) -> Tensor:
        """Return vectors [n, size] divided by max(clip_norm, norm), of norm at most 1; infinite ones become 0."""
        norms = vectors.norm(dim=1, keepdim=True)
        safe: Tensor = vectors / norms.clamp_min(self.clip_norm) * INSIDE
        return safe.where(norms.isfinite(), safe.new_zeros(()))
