"""Composition of privacy losses, rounded up at every step: losses on a grid, tilted, convolved by FFT, tilted back.

    L = L_1 + ... + L_n,    delta(e) = E_P[(1 - exp(e - L))_+]

Grid. The loss of one release is moved up to multiples of a step (`losses`).

Tilt. The tails that decide a small delta are far below the rounding of an FFT. So each law is multiplied by
exp(theta l) / M(theta) first, with the theta that puts its mean near the epsilon we look for, and divided after:
what was a tail is the middle, and rounding is relative to delta itself.

Guarantee: `Sum.delta` and `Sum.epsilon` are upper bounds. Counted in full: the loss beyond the grid (as infinite), the
loss beyond the window of the FFT (by Chernoff, as infinite), and the rounding of the transform: at most GAMMA log2(N)
in the 2-norm, relative (Higham 2002, "Accuracy and stability of numerical algorithms", Thm 24.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from sordino.pld.losses import TINY, Losses, TooWideError, points
from sordino.pld.pairs import Array

ULP = float(np.finfo(np.float64).eps)
GAMMA = 10 * ULP  # of the transform's 2-norm, per halving: Higham's constant is 3.5
_WINDOW = 2**20  # of the transform at most
_RIGHT, _WRAPPED = 34.0, 25.0  # logs of the tilted chance above, below the window


Parts = Sequence[tuple[Losses, int]]


@dataclass(frozen=True)
class Sum:
    """The losses of many releases together, from `start` on; `masses` are tilted by `theta` and rounded up."""

    step: float
    start: int
    masses: Array
    theta: float
    scale: float  # log of what to multiply by after tilting back
    infinite: float
    apart: float

    @cached_property
    def values(self) -> Array:
        """The losses."""
        return points(self.start, len(self.masses), self.step)

    @cached_property
    def _above(self) -> tuple[Array, Array]:
        """Of all losses above each, in units of exp(scale - theta l): chance under P, and exp(l) that under Q."""
        slow, fast = math.exp(-self.theta * self.step), math.exp(-(self.theta + 1) * self.step)
        return _discounted(self.masses, slow) * (1 + 1e-12), _discounted(self.masses, fast) * (1 - 1e-12)

    def deltas(self, epsilons: Array) -> Array:
        """An upper bound on delta at each epsilon; 1 below the window."""
        k = np.searchsorted(self.values, epsilons, side="right") - 1  # the last loss that is not above
        inside = np.clip(k, 0, len(self.values) - 1)
        some, other = self._above
        with np.errstate(over="ignore", invalid="ignore"):
            scale = np.exp(self.scale - self.theta * self.values[inside])
            found = scale * (some[inside] - np.exp(np.maximum(epsilons - self.values[inside], 0.0)) * other[inside])
            apart = self.apart * (1 + np.exp(epsilons)) if self.apart else 0.0
        found = np.where(k < 0, 1.0, np.where(k >= len(self.values) - 1, 0.0, np.nan_to_num(found, nan=1.0)))
        return np.asarray(np.clip(np.maximum(found, 0.0) + self.infinite + apart, 0.0, 1.0))

    def epsilon(self, delta: float) -> float:
        """The least epsilon of the window, or 0, at which `delta` is proved; inf if there is none."""
        if self.deltas(np.zeros(1))[0] <= delta:
            return 0.0
        good = np.flatnonzero((self.deltas(self.values) <= delta) & (self.values > 0))
        if not len(good):
            return math.inf
        high = float(self.values[good[0]])
        low = max(high - self.step, 0.0)
        for _ in range(6):
            between = np.linspace(low, high, 33)
            k = int(np.argmax(self.deltas(between[1:]) <= delta)) + 1
            low, high = float(between[k - 1]), float(between[k])
        return high


def _discounted(masses: Array, fall: float) -> Array:
    """s_k = sum over j > k of masses_j fall^(j - k), by doubling."""
    found = np.append(masses[1:], 0.0) * fall
    reach, factor = 1, fall
    while reach < len(found) and factor > 0:
        found[:-reach] += factor * found[reach:]
        reach, factor = 2 * reach, factor * factor
    return found


class Composition:
    """Many releases on one grid: their common law, seen through the tilt that fits the question."""

    def __init__(self, parts: Parts) -> None:
        self.parts = [(losses, count) for losses, count in parts if count]
        self.step = self.parts[0][0].step
        self.counts = np.asarray([count for _, count in self.parts], dtype=np.float64)
        self.laws = [_Law(losses) for losses, _ in self.parts]
        self.top = sum(count * law.values[-1] for law, count in zip(self.laws, self.counts, strict=True))
        self.bottom = sum(count * law.values[0] for law, count in zip(self.laws, self.counts, strict=True))
        self.apart = math.fsum(count * losses.apart for losses, count in self.parts)
        seen = math.fsum(count * math.log1p(-min(losses.infinite, 1 - ULP)) for losses, count in self.parts)
        self.infinite = -math.expm1(seen) * (1 + 1e-12)
        self.variation = math.fsum(count * (losses.variation + 2 * losses.apart) for losses, count in self.parts)

    def epsilon(self, delta: float) -> float:
        """An upper bound on epsilon at `delta`: by the tilted sum, or by Chernoff alone where that is less."""
        left = delta - self.infinite
        if left <= 0:
            return math.inf
        if self.variation <= delta:
            return 0.0
        theta, chernoff = self._best_tilt(lambda t, k: (k - math.log(left) + _peak(t)) / t, math.log(1 / left))
        found = self.tilted(theta).epsilon(delta)
        return min(found, math.inf if self.apart else max(chernoff, 0.0))

    def deltas(self, epsilons: Array) -> Array:
        """An upper bound on delta at each epsilon >= 0, by a ladder of tilts: each is true everywhere."""
        found = self.tilted(0.0).deltas(epsilons)
        for epsilon in np.unique(np.quantile(epsilons, np.linspace(0, 1, 8))):
            theta, _ = self._best_tilt(partial(_log_chernoff, float(epsilon)), 20.0)
            found = np.minimum(found, self.tilted(theta).deltas(epsilons))
        return found

    def _best_tilt(self, cost: Callable[[float, float], float], reach: float) -> tuple[float, float]:
        """The theta with the least cost(theta, log M), on a grid that is narrowed twice; and that cost, exactly."""
        deviation = math.sqrt(sum(c * law.variance for law, c in zip(self.laws, self.counts, strict=True)))
        middle = math.sqrt(2 * max(reach, 0.1)) / max(deviation, self.step)
        thetas = np.geomspace(middle * 1e-4, middle * 30, 24)
        for _ in range(3):
            costs = [cost(float(t), k) for t, k in zip(thetas, self._cumulant(thetas, rough=True), strict=True)]
            k = int(np.argmin(costs))
            best = float(thetas[k])
            thetas = np.geomspace(thetas[max(k - 1, 0)], thetas[min(k + 1, len(thetas) - 1)], 12)
        exact = float(self._cumulant(np.asarray([best]))[0]) + self._rounding(best)
        return best, cost(best, exact)

    def _cumulant(self, thetas: Array, rough: bool = False) -> Array:
        """log M(theta) of the finite losses together."""
        return np.asarray(sum(c * law.cumulant(thetas, rough) for law, c in zip(self.laws, self.counts, strict=True)))

    def _rounding(self, theta: float) -> float:
        """A bound on the relative error that tilting leaves in a product of all."""
        sizes = [law.depth + theta * law.reach + 8 for law in self.laws]
        return float(4 * ULP * (self.counts @ np.asarray(sizes)))

    def tilted(self, theta: float) -> Sum:
        """The sum of all, tilted by theta."""
        start, size, beyond = self._window(theta)
        tilted = [law.tilted(theta) for law in self.laws]
        masses, error = _convolved([_wrapped(m, law.low, size) for m, law in zip(tilted, self.laws, strict=True)],
                                   self.counts)  # fmt: skip
        masses = np.roll(masses, -(start % size))
        scale = float(self._cumulant(np.asarray([theta]))[0]) + self._rounding(theta)
        whole = math.ceil(self.top / self.step) - start + 1
        masses = (np.maximum(masses, 0.0) + error)[: max(whole, 1)]
        return Sum(self.step, start, masses, theta, scale, self.infinite + beyond, self.apart)

    def _window(self, theta: float) -> tuple[int, int, float]:
        """First index and size of the window; and the chance of what lies above it."""
        here = float(self._cumulant(np.asarray([theta]), rough=True)[0])
        mean, deviation = self._moments(theta)
        moves = np.geomspace(0.02, 4, 16) * math.sqrt(2 * _RIGHT) / max(deviation, self.step)
        up, down = self._cumulant(theta + moves, rough=True), self._cumulant(theta - moves, rough=True)
        top, bottom = float(np.min((up - here + _RIGHT) / moves)), float(np.max((here - down - _WRAPPED) / moves))
        start = math.floor(min(max(bottom, self.bottom), mean) / self.step) - 1
        needed = max(math.ceil(min(top, self.top) / self.step) + 2 - start, 2)
        if needed > _WINDOW:
            raise TooWideError(needed / _WINDOW)
        size = 2 ** math.ceil(math.log2(needed))
        edge = (start + size - 1) * self.step
        if edge >= self.top:
            return start, size, 0.0
        far = theta + float(moves[np.argmin(up - moves * edge)])
        beyond = float(self._cumulant(np.asarray([far]))[0]) + self._rounding(far) - far * edge
        return start, size, math.exp(min(beyond, 0.0))

    def _moments(self, theta: float) -> tuple[float, float]:
        laws = [(law.moments(theta), c) for law, c in zip(self.laws, self.counts, strict=True)]
        return sum(c * m for (m, _), c in laws), math.sqrt(sum(c * v for (_, v), c in laws))


def _log_chernoff(epsilon: float, theta: float, cumulant: float) -> float:
    return cumulant - theta * epsilon


def _peak(theta: float) -> float:
    """log of the largest (1 - exp(-x)) exp(-theta x): what Chernoff may be multiplied by."""
    return theta * math.log(theta) - (1 + theta) * math.log1p(theta)


class _Law:
    """The finite losses of one release, ready to be tilted."""

    def __init__(self, losses: Losses) -> None:
        kept = np.flatnonzero(losses.masses > TINY)
        first, last = int(kept[0]), int(kept[-1])
        self.low, self.masses = losses.low + first, losses.masses[first : last + 1]
        self.values = losses.values[first : last + 1]
        with np.errstate(divide="ignore"):
            self.logs = np.log(self.masses)
        self.depth = float(-np.min(self.logs[np.isfinite(self.logs)]))
        self.reach = float(np.max(np.abs(self.values)))
        self.variance = self.moments(0.0)[1]
        every = max(1, len(self.values) // 2048)
        blocks = np.arange(0, len(self.values), every)
        with np.errstate(divide="ignore"):
            self.rough = (
                np.log(np.add.reduceat(self.masses, blocks)),
                self.values[blocks] + (every - 1) / 2 * losses.step,
            )

    def cumulant(self, thetas: Array, rough: bool) -> Array:
        """log of the sum of masses exp(theta l)."""
        logs, values = self.rough if rough else (self.logs, self.values)
        return np.asarray([_log_sum(logs + theta * values) for theta in thetas])

    def tilted(self, theta: float) -> Array:
        """masses exp(theta l) / M(theta)."""
        found = self.logs + theta * self.values
        return np.asarray(np.exp(found - _log_sum(found)))

    def moments(self, theta: float) -> tuple[float, float]:
        """Mean and variance of the tilted law."""
        weights = self.tilted(theta)
        mean = float(weights @ self.values)
        return mean, float(weights @ (self.values - mean) ** 2)


def _log_sum(logs: Array) -> float:
    top = float(np.max(logs))
    return top + math.log(float(np.sum(np.exp(logs - top))))


def _wrapped(masses: Array, low: int, size: int) -> Array:
    """The law on a circle of `size` points."""
    first, found = low % size, np.zeros(-(-(low % size + len(masses)) // size) * size)
    found[first : first + len(masses)] = masses
    return np.asarray(found.reshape(-1, size).sum(axis=0))


def _convolved(laws: list[Array], counts: Array) -> tuple[Array, float]:
    """Each law count times with itself, all together, on the circle; and a bound on the error of every entry.

        y = F^-1 prod_i f_i^n_i,    |y' - y| <= sum_i n_i |e_i| |f|^(n-1) / N + (power: 16 n ulp |f|^n / N) + |F^-1 err|

    with |e_i|_2 <= g sqrt(N) |p_i|_2, g = GAMMA log2(N), by the mean value theorem and Cauchy-Schwarz.
    """
    size = len(laws[0])
    if len(laws) == 1 and counts[0] == 1:
        return laws[0].copy(), 0.0
    g, frequencies = GAMMA * math.log2(size), [np.fft.rfft(law) for law in laws]
    offs = [g * math.sqrt(size) * float(np.linalg.norm(law)) for law in laws]
    most = [np.log(np.abs(f) + off) for f, off in zip(frequencies, offs, strict=True)]
    ceiling = np.sum([n * each for n, each in zip(counts, most, strict=True)], axis=0)
    live = ceiling > -700  # the others are 0 for every purpose
    norms = [math.sqrt(2 * float(np.sum(np.exp(2 * (ceiling - each)[live])))) for each in most]
    error = math.fsum(n * off * norm for n, off, norm in zip(counts, offs, norms, strict=True)) / size
    whole = math.sqrt(2 * float(np.sum(np.exp(2 * ceiling[live]))))
    error += whole * (16 * ULP * float(np.sum(counts)) + g) / math.sqrt(size) + TINY
    product = np.zeros(len(ceiling), dtype=np.complex128)
    product[live] = np.prod([_power(f[live], n) for f, n in zip(frequencies, counts, strict=True)], axis=0)
    return np.fft.irfft(product, size), error * (1 + 1e-6)


def _power(numbers: NDArray[np.complex128], count: float) -> NDArray[np.complex128]:
    """numbers ** count, by size and angle; 0 stays 0."""
    with np.errstate(divide="ignore"):
        size, angle = np.exp(count * np.log(np.abs(numbers))), count * np.angle(numbers)
    found: NDArray[np.complex128] = size * np.exp(1j * angle)
    return found
