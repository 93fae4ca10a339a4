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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.pld.loss_grid import TINY, Losses, TooWideError, points
from sordino.accounting.pld.pairs import Array

ULP = float(np.finfo(np.float64).eps)
GAMMA = 10 * ULP  # of the transform's 2-norm, per halving: Higham's constant is 3.5
_WINDOW = 2**20  # of the transform at most
_RIGHT, _WRAPPED = 34.0, 25.0  # logs of the tilted chance above, below the window
_MOVES = np.geomspace(1e-5, 4, 18)  # of theta, in sqrt(2 _RIGHT) deviations: what a window is looked for with
_BLOCKS = 2048  # of a law's summary
_FACTORS = (1.0, 0.5, 0.2, 0.05, 0.01)  # of Chernoff's theta, which may see rare large losses alone
_SLACK = 1e-3  # share of delta that the transform and the window may add before a smaller tilt is tried
Parts = Sequence[tuple[Losses, int]]


@dataclass(frozen=True)
class Added:
    """What a tilted sum adds to delta beside the law on its grid: the transform's rounding, and the window's end."""

    step: float
    count: int  # points of the window
    theta: float
    scale: float
    error: float  # of the transform, in every mass
    beyond: float  # chance above the window, counted as infinite

    def at(self, epsilon: float) -> float:
        """beyond + error sum_(l > epsilon) exp(scale - theta l), rounded up."""
        if epsilon == math.inf:
            return math.inf
        fall = -math.expm1(-self.theta * self.step)
        points_above = min(1 / fall if fall > 0 else math.inf, float(self.count))
        return self.beyond + self.error * points_above * math.exp(min(self.scale - self.theta * epsilon, 700.0))

    def negligible(self, epsilon: float, delta: float, infinite: float) -> bool:
        """Whether that is next to nothing beside delta, or no more than what the grid's end adds."""
        return self.at(epsilon) <= _SLACK * delta + infinite


@dataclass(frozen=True)
class Sum:
    """The losses of many releases together, from `start` on; `masses` are tilted by `theta` and rounded up."""

    step: float
    start: int
    masses: Array
    theta: float
    scale: float  # log of what to multiply by after tilting back
    infinite: float
    total_variation: float
    added: Added

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
        return self._deltas(epsilons, np.searchsorted(self.values, epsilons, side="right") - 1)

    def _deltas(self, epsilons: Array, k: NDArray[np.int64]) -> Array:
        """The same where the last loss that is not above each is known to be the k-th."""
        inside = np.clip(k, 0, len(self.values) - 1)
        some, other = self._above
        with np.errstate(over="ignore", invalid="ignore"):
            scale = np.exp(self.scale - self.theta * self.values[inside])
            found = scale * (some[inside] - np.exp(np.maximum(epsilons - self.values[inside], 0.0)) * other[inside])
            near = self.total_variation * (1 + np.exp(epsilons)) if self.total_variation else 0.0
        found = np.where(k < 0, 1.0, np.where(k >= len(self.values) - 1, 0.0, np.nan_to_num(found, nan=1.0)))
        return np.asarray(np.clip(np.maximum(found, 0.0) + self.infinite + near, 0.0, 1.0))

    def epsilon(self, delta: float) -> float:
        """The least epsilon of the window, or 0, at which `delta` is proved; inf if there is none."""
        if self.deltas(np.zeros(1))[0] <= delta:
            return 0.0
        good = np.flatnonzero((self._deltas(self.values, np.arange(len(self.values))) <= delta) & (self.values > 0))
        if not len(good):
            return math.inf
        high = float(self.values[good[0]])
        low = max(high - self.step, 0.0)
        for _ in range(4):
            between = np.linspace(low, high, 129)
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
        self.total_variation = math.fsum(count * losses.total_variation for losses, count in self.parts)
        seen = math.fsum(count * math.log1p(-min(losses.infinite, 1 - ULP)) for losses, count in self.parts)
        self.infinite = -math.expm1(seen) * (1 + 1e-12)
        self.variation = math.fsum(
            count * (losses.variation + 2 * losses.total_variation) for losses, count in self.parts
        )

    def epsilon(self, delta: float) -> float:
        """An upper bound on epsilon at `delta`: by the tilted sum, or by Chernoff alone where that is less."""
        left = delta - self.infinite
        if left <= 0:
            return math.inf
        if self.variation <= delta:
            return 0.0
        theta, chernoff = self._best_tilt(lambda t, k: (k - math.log(left) + _peak(t)) / t, math.log(1 / left))
        found = [math.inf if self.total_variation else max(chernoff, 0.0)]
        for one in self._tilts(theta):
            found.append(one.epsilon(delta))
            if one.added.negligible(found[-1], delta, self.infinite):
                break
        return min(found)

    def deltas(self, epsilons: Array, without_wide: bool = False) -> Array:
        """An upper bound on delta at each epsilon >= 0, by a ladder of tilts: each is true everywhere.

        A tilt whose window is too wide for this grid is refused, or, `without_wide`, left out.
        """
        first = self.tilted(0.0)
        found, added = first.deltas(epsilons), [first.added]
        places = np.unique(np.linspace(0, len(epsilons) - 1, 8).round().astype(np.int64))
        for k in np.argsort(epsilons)[places]:
            epsilon = float(epsilons[k])
            if any(each.negligible(epsilon, found[k], self.infinite) for each in added):
                continue
            theta, _ = self._best_tilt(partial(_log_chernoff, epsilon), 20.0)
            for one in self._tilts(theta, without_wide):
                found = np.minimum(found, one.deltas(epsilons))
                added.append(one.added)
                if one.added.negligible(epsilon, found[k], self.infinite):
                    break
        return found

    def _tilts(self, theta: float, without_wide: bool = False) -> Iterator[Sum]:
        """The sum tilted by theta, then by less and less, for whoever asks on until one is exact but for its grid.

        Each is a bound, so the least is. Windows that are too wide are left out; who asks to the end hears of them.
        """
        wide: list[TooWideError] = []
        for factor in _FACTORS:
            try:
                one = self.tilted(theta * factor)
            except TooWideError as error:
                wide.append(error)
            else:
                yield one
        if wide and not without_wide:
            raise min(wide, key=lambda error: error.factor)

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
        return Sum(self.step, start, masses, theta, scale, self.infinite + beyond, self.total_variation,
                   Added(self.step, len(masses), theta, scale, error, beyond))  # fmt: skip

    def _window(self, theta: float) -> tuple[int, int, float]:
        """First index and size of the window; and the chance of what lies above it."""
        here = float(self._cumulant(np.asarray([theta]), rough=True)[0])
        laws = [(law.moments(theta), c) for law, c in zip(self.laws, self.counts, strict=True)]
        mean, deviation = sum(c * m for (m, _), c in laws), math.sqrt(sum(c * v for (_, v), c in laws))
        moves = _MOVES * math.sqrt(2 * _RIGHT) / max(deviation, self.step)
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
        blocks = _blocks(self.masses)
        chances = np.add.reduceat(self.masses, blocks)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = np.add.reduceat(self.masses * self.values, blocks) / chances
            self.rough = np.log(chances), np.where(chances > 0, means, self.values[blocks])

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


def _blocks(masses: Array) -> NDArray[np.int64]:
    """Where the blocks of a summary begin: so many places apart, and none but a single point with much of the mass.

    The sum of masses exp(theta l) sees a block as its mass at its mean loss: off by (theta width)^2 / 8 of that mass.
    """
    places = np.arange(0, len(masses), max(1, len(masses) // _BLOCKS))
    shares = np.floor(np.cumsum(masses) * (_BLOCKS / 8 / float(np.sum(masses))))
    heavy = np.flatnonzero(shares[1:] > shares[:-1]) + 1
    return np.unique(np.concatenate([places, heavy, np.minimum(heavy + 1, len(masses) - 1)]))


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
