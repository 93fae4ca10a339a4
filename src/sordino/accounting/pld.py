"""Privacy loss distributions: losses on a grid and their composition, rounded up at every step. Called by `accountant`.

    L = L_1 + ... + L_n,    delta(e) = E_P[(1 - exp(e - L))_+] = P(L > e) - exp(e) Q(L > e)

Grid. The mass of a loss between two grid points is split between both, so that its probability and the mean of exp(-L)
are preserved (connect the dots: Doroshenko et al. 2022). delta is convex in exp(-L) and grows with L, so this, and
anything that moves probability to larger losses, only raises delta.

Tilt. The tails that decide a small delta are far below the rounding error of an FFT. So each distribution is multiplied
by exp(theta l) / M(theta) before the convolution, and divided by it afterwards. M(theta) = E_P[exp(theta L)], and theta
is chosen so that the mean is near the wanted epsilon. So the rounding error is small relative to delta itself.

Guarantee: `TiltedSum.deltas` and `TiltedSum.epsilon` are upper bounds. They include the loss beyond the grid (as
infinite), the loss beyond the window of the FFT (by Chernoff, as infinite), and the rounding error of the FFT of N
points, at most GAMMA log2(N) relative to the 2-norm (Higham 2002, "Accuracy and stability of numerical algorithms",
Thm 24.2).

The last functions need no grid: bounds of one release, one Gaussian release, and repeated (epsilon, delta) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, log_ndtr

from sordino.accounting.pairs import Array, Pair

POINTS = 2**17  # of one distribution on a first grid at most; eight times as many on a finer one
_POSITIVE = np.geomspace(1e-16, 1e12, 1500)
_FAR = np.concatenate([-_POSITIVE[::-1], [0.0], _POSITIVE])  # losses among which the support is searched
TINY = 1e-300
MOST_PAIRS = 100_000  # repeated pairs are listed one by one up to here
_LEFT = 1e-13  # the lowest losses may all be moved up to where they have this probability
ULP = float(np.finfo(np.float64).eps)
GAMMA = 10 * ULP  # of the transform's 2-norm, per halving: Higham's constant is 3.5
_WINDOW = 2**20  # points of the transform at most
_RIGHT, _WRAPPED = 34.0, 25.0  # -log of the tilted probability above, below the window
_MOVES = np.geomspace(1e-5, 4, 18)  # changes of theta, in sqrt(2 _RIGHT) deviations, that a window is searched with
_BLOCKS = 2048  # points of a distribution's summary
_FACTORS = (1.0, 0.5, 0.2, 0.05, 0.01)  # of Chernoff's theta, which may see rare large losses alone
_SLACK = 1e-3  # share of delta that the transform and the window may add before a smaller tilt is tried


class TooWideError(Exception):
    """Raised if a grid would need too many points; its step must be `factor` times as large."""

    def __init__(self, factor: float) -> None:
        super().__init__(f"a grid {factor:.3g} times as coarse is needed")
        self.factor = factor


# ---- one release on a grid -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Losses:
    """Privacy losses of one release on a grid: probabilities of the losses (low + k) step, and of an infinite loss."""

    step: float
    low: int
    masses: Array
    infinite: float
    total_variation: float = 0.0

    @property
    def values(self) -> Array:
        return np.asarray((self.low + np.arange(len(self.masses), dtype=np.float64)) * self.step)


def span(pair: Pair, tail: float) -> tuple[float, float]:
    """Return the low and high end of the losses: P-probability <= `tail` above (without infinity), almost 0 below."""
    chances = pair.tails(_FAR)[0]
    above = np.flatnonzero(chances <= np.logaddexp(chances[-1], math.log(tail)))
    below = np.flatnonzero(chances >= -_LEFT)
    return float(_FAR[below[-1] if len(below) else 0]), float(_FAR[min(above[0] + 1, len(_FAR) - 1)])


@lru_cache(maxsize=64)
def losses_on(pair: Pair, step: float, tail: float) -> Losses:
    """Discretise a pair's losses on a grid, rounded up; losses above it, of probability <= `tail`, become infinite."""
    low, high = span(pair, tail)
    if high - low > 8 * POINTS * step:
        raise TooWideError((high - low) / (8 * POINTS * step))
    first, last = math.floor(low / step), math.ceil(high / step)
    atoms = pair.atoms()
    if atoms is not None:
        return _atoms_on(*atoms, step, first, last + 1, pair.total_variation)
    values = (first + np.arange(last + 1 - first, dtype=np.float64)) * step
    some, other = pair.tails(values)
    with np.errstate(invalid="ignore"):
        scaled = np.nan_to_num(np.exp(np.minimum(values + other, some)))  # exp(l) Q(L > l)
    size = pair.slack * (4 + np.abs(values) + np.where(some > -np.inf, np.abs(some), 0.0))
    # P(L > l) rounded up and made to fall, and how far its difference from `scaled` may be off
    above = np.minimum(np.maximum.accumulate((np.exp(some) * (1 + size))[::-1])[::-1], 1.0)
    slack = 4 * size * above + TINY
    chances = above[:-1] - above[1:]
    shrink = -math.expm1(-step)
    upper = (chances - scaled[:-1] + (1 - shrink) * scaled[1:] + slack[:-1]) / shrink  # what goes to the upper end
    upper = np.clip(upper, 0.0, chances)
    masses = np.zeros(len(values))
    masses[:-1] += chances - upper
    masses[1:] += upper
    masses[0] += 1 - above[0]
    return Losses(step, first, masses, float(above[-1]), pair.total_variation)


def _atoms_on(
    losses: Array, chances: Array, infinite: float, step: float, first: int, last: int, total_variation: float
) -> Losses:
    """Split each outcome onto the two grid points around its loss.

    The upper point gets the share u of a loss that is x above the lower point: exp(-x) = (1 - u) + u exp(-step). Losses
    below the grid go to the lowest point, losses above it to infinity.
    """
    places = np.floor(losses / step).astype(np.int64)
    shares = np.clip(-np.expm1(np.minimum(places * step - losses, 0.0)) / -math.expm1(-step), 0.0, 1.0)
    shares = np.where(places < first, 0.0, shares)
    above = places >= last
    k = np.clip(places - first, 0, last - first)
    kept = np.where(above, 0.0, chances)
    masses = np.bincount(k, kept * (1 - shares), last - first + 2) + np.bincount(k + 1, kept * shares, last - first + 2)
    size = 1 + (len(losses) + 8) * ULP
    raised, beyond = np.asarray(masses * size, dtype=np.float64), (infinite + float(chances[above].sum())) * size
    return Losses(step, first, raised, beyond, total_variation)


def fitting_step(order: Sequence[tuple[Pair, int]], tail: float) -> float:
    """Return the first grid step, an eighth of the standard deviation of one release's loss.

    This adds about 0.1% to epsilon. If the largest loss is an atom, the step is reduced so that the grid contains it.
    """
    total = sum(count for _, count in order)
    step = max(math.sqrt(sum(count / total * _deviation(pair, tail) ** 2 for pair, count in order)) / 8, 1e-18)
    step = max([step, *((high - low) / POINTS for low, high in (span(pair, tail) for pair, _ in order))])
    most = {pair.largest_loss for pair, _ in order} - {math.inf, 0.0}
    return min(most) / math.ceil(min(most) / step) if len(most) == 1 and step < min(most) < 1e6 * step else step


@lru_cache(maxsize=64)
def _deviation(pair: Pair, tail: float) -> float:
    """Return the standard deviation of the finite loss, on grids refined until they are fine enough."""
    low, high = span(pair, tail)
    step = (high - low) / 512
    for _ in range(12):
        on_grid = losses_on(pair, step, tail)
        masses, values, total = on_grid.masses, on_grid.values, float(np.sum(on_grid.masses))
        mean = float(masses @ values) / total
        found = math.sqrt(float(masses @ (values - mean) ** 2) / total)
        if found >= 2 * step or step * POINTS <= high - low:
            return found
        step = max(found / 4, (high - low) / POINTS)
    return found


# ---- many releases ---------------------------------------------------------------------------------------------------


class TiltedSum:
    """Distribution of the total loss of many releases; `masses` are exponentially tilted by `theta` and rounded up."""

    def __init__(
        self, composition: Composition, start: int, masses: Array, theta: float, scale: float, error: float,
        beyond: float,
    ) -> None:  # fmt: skip
        self.step, self.theta, self.scale = composition.step, theta, scale  # scale: log of the factor that tilts back
        self.error, self.beyond = error, beyond  # of the transform in every mass; probability above the window
        self.infinite, self.total_variation = composition.infinite + beyond, composition.total_variation
        self.values = (start + np.arange(len(masses), dtype=np.float64)) * self.step
        # over all losses above each, in units of exp(scale - theta l): probability under P, and exp(l) that under Q
        slow, fast = math.exp(-theta * self.step), math.exp(-(theta + 1) * self.step)
        self.above = _discounted(masses, slow) * (1 + 1e-12), _discounted(masses, fast) * (1 - 1e-12)

    def deltas(self, epsilons: Array, k: NDArray[np.int64] | None = None) -> Array:
        """Return an upper bound on delta at each epsilon; 1 below the window.

        `k` is the index of the last loss of the window that is <= each epsilon, if known.
        """
        k = np.searchsorted(self.values, epsilons, side="right") - 1 if k is None else k
        inside = np.clip(k, 0, len(self.values) - 1)
        some, other = self.above
        with np.errstate(over="ignore", invalid="ignore"):
            scale = np.exp(self.scale - self.theta * self.values[inside])
            found = scale * (some[inside] - np.exp(np.maximum(epsilons - self.values[inside], 0.0)) * other[inside])
            near = self.total_variation * (1 + np.exp(epsilons)) if self.total_variation else 0.0
        found = np.where(k < 0, 1.0, np.where(k >= len(self.values) - 1, 0.0, np.nan_to_num(found, nan=1.0)))
        return np.asarray(np.clip(np.maximum(found, 0.0) + self.infinite + near, 0.0, 1.0))

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon of the window, or 0, whose delta is at most `delta`; inf if there is none."""
        if self.deltas(np.zeros(1))[0] <= delta:
            return 0.0
        good = np.flatnonzero((self.deltas(self.values, np.arange(len(self.values))) <= delta) & (self.values > 0))
        if not len(good):
            return math.inf
        high = float(self.values[good[0]])
        low = max(high - self.step, 0.0)
        for _ in range(4):
            between = np.linspace(low, high, 129)
            k = int(np.argmax(self.deltas(between[1:]) <= delta)) + 1
            low, high = float(between[k - 1]), float(between[k])
        return high

    def is_precise(self, epsilon: float, delta: float, infinite: float) -> bool:
        """Return whether the errors of FFT and window are negligible against delta, or against an infinite loss.

        These errors are  beyond + error sum_(l > epsilon) exp(scale - theta l).
        """
        if epsilon == math.inf:
            return False
        fall = -math.expm1(-self.theta * self.step)
        points_above = min(1 / fall if fall > 0 else math.inf, float(len(self.values)))
        tail = self.error * points_above * math.exp(min(self.scale - self.theta * epsilon, 700.0))
        return self.beyond + tail <= _SLACK * delta + infinite


def _discounted(masses: Array, fall: float) -> Array:
    """Return s_k = sum over j > k of masses_j fall^(j - k), by doubling."""
    found = np.append(masses[1:], 0.0) * fall
    reach, factor = 1, fall
    while reach < len(found) and factor > 0:
        found[:-reach] += factor * found[reach:]
        reach, factor = 2 * reach, factor * factor
    return found


class Composition:
    """Composition of many releases on one grid; bounds epsilon and delta by exponentially tilted convolutions."""

    def __init__(self, parts: Sequence[tuple[Losses, int]]) -> None:
        parts = [(losses, count) for losses, count in parts if count]
        self.step = parts[0][0].step
        self.counts = np.asarray([count for _, count in parts], dtype=np.float64)
        self.laws = [_Law(losses) for losses, _ in parts]
        self.top = sum(count * law.values[-1] for law, count in zip(self.laws, self.counts, strict=True))
        self.bottom = sum(count * law.values[0] for law, count in zip(self.laws, self.counts, strict=True))
        self.total_variation = math.fsum(count * losses.total_variation for losses, count in parts)
        seen = math.fsum(count * math.log1p(-min(losses.infinite, 1 - ULP)) for losses, count in parts)
        self.infinite = -math.expm1(seen) * (1 + 1e-12)
        # delta at epsilon 0 of each release bounds its total variation
        gains = [float(one.masses @ np.maximum(-np.expm1(-np.maximum(one.values, 0.0)), 0.0)) for one, _ in parts]
        self.variation = math.fsum(
            count * ((gain + one.infinite) * (1 + 1e-12) + 2 * one.total_variation)
            for gain, (one, count) in zip(gains, parts, strict=True)
        )

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at `delta`: the smaller of the tilted sum's and the Chernoff bound."""
        left = delta - self.infinite
        if left <= 0:
            return math.inf
        if self.variation <= delta:
            return 0.0
        # (1 - exp(-x)) exp(-theta x) is at most exp(theta log(theta) - (1 + theta) log(1 + theta))
        theta, chernoff = self._best_tilt(
            lambda t, k: (k - math.log(left) + (t * math.log(t) - (1 + t) * math.log1p(t))) / t, math.log(1 / left)
        )
        found = [math.inf if self.total_variation else max(chernoff, 0.0)]
        for one in self._tilts(theta):
            found.append(one.epsilon(delta))
            if one.is_precise(found[-1], delta, self.infinite):
                break
        return min(found)

    def deltas(self, epsilons: Array, without_wide: bool = False) -> Array:
        """Return an upper bound on delta at each epsilon >= 0, the minimum of the bounds of several tilts.

        A tilt whose window is too wide for this grid raises `TooWideError` or, with `without_wide`, is left out.
        """
        sums = [self.tilted(0.0)]
        found = sums[0].deltas(epsilons)
        places = np.unique(np.linspace(0, len(epsilons) - 1, 8).round().astype(np.int64))
        for k in np.argsort(epsilons)[places]:
            epsilon = float(epsilons[k])
            if any(one.is_precise(epsilon, found[k], self.infinite) for one in sums):
                continue
            theta, _ = self._best_tilt(lambda t, cumulant, e=epsilon: cumulant - t * e, 20.0)  # type: ignore[misc]
            for one in self._tilts(theta, without_wide):
                found = np.minimum(found, one.deltas(epsilons))
                sums.append(one)
                if one.is_precise(epsilon, found[k], self.infinite):
                    break
        return found

    def _tilts(self, theta: float, without_wide: bool = False) -> Iterator[TiltedSum]:
        """Yield the sum tilted by theta, then by smaller tilts, each of which gives a bound.

        Tilts whose window is too wide are skipped; unless `without_wide`, `TooWideError` is then raised at the end.
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
        """Return the theta that minimises cost(theta, log M(theta)), by a grid search refined twice, and its cost."""
        deviation = math.sqrt(sum(c * law.variance for law, c in zip(self.laws, self.counts, strict=True)))
        middle = math.sqrt(2 * max(reach, 0.1)) / max(deviation, self.step)
        thetas = np.geomspace(middle * 1e-4, middle * 30, 24)
        for _ in range(3):
            costs = [cost(float(t), k) for t, k in zip(thetas, self._cumulants(thetas, rough=True), strict=True)]
            k = int(np.argmin(costs))
            best = float(thetas[k])
            thetas = np.geomspace(thetas[max(k - 1, 0)], thetas[min(k + 1, len(thetas) - 1)], 12)
        return best, cost(best, self._cumulant(best))

    def _cumulants(self, thetas: Array, rough: bool = False) -> Array:
        """Return log M(theta), the log moment generating function of the total finite loss; approximate if `rough`."""
        total = np.zeros(len(thetas))
        for law, count in zip(self.laws, self.counts, strict=True):
            logs, values = law.rough if rough else (law.logs, law.values)
            total += count * np.asarray([_log_sum(logs + theta * values) for theta in thetas])
        return total

    def _cumulant(self, theta: float) -> float:
        """Return log M(theta), raised by a bound on the rounding error of tilting all releases."""
        sizes = [law.depth + theta * law.reach + 8 for law in self.laws]
        return float(self._cumulants(np.asarray([theta]))[0]) + float(4 * ULP * (self.counts @ np.asarray(sizes)))

    def tilted(self, theta: float) -> TiltedSum:
        """Return the convolution of all releases, tilted by theta."""
        start, size, beyond = self._window(theta)
        wrapped = []
        for law in self.laws:  # each distribution on a circle of `size` points
            masses, first = law.tilted(theta), law.low % size
            circle = np.zeros(-(-(first + len(masses)) // size) * size)
            circle[first : first + len(masses)] = masses
            wrapped.append(np.asarray(circle.reshape(-1, size).sum(axis=0)))
        masses, error = _convolved(wrapped, self.counts)
        masses = np.roll(masses, -(start % size))
        whole = math.ceil(self.top / self.step) - start + 1
        masses = (np.maximum(masses, 0.0) + error)[: max(whole, 1)]
        return TiltedSum(self, start, masses, theta, self._cumulant(theta), error, beyond)

    def _window(self, theta: float) -> tuple[int, int, float]:
        """Return first index and size of the FFT's window, and a bound on the probability of losses above it."""
        here = float(self._cumulants(np.asarray([theta]), rough=True)[0])
        laws = [(law.moments(theta), c) for law, c in zip(self.laws, self.counts, strict=True)]
        mean, deviation = sum(c * m for (m, _), c in laws), math.sqrt(sum(c * v for (_, v), c in laws))
        moves = _MOVES * math.sqrt(2 * _RIGHT) / max(deviation, self.step)
        up, down = self._cumulants(theta + moves, rough=True), self._cumulants(theta - moves, rough=True)
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
        return start, size, math.exp(min(self._cumulant(far) - far * edge, 0.0))


class _Law:
    """Distribution of one release's finite privacy losses, prepared for exponential tilting.

    `rough` summarises it in blocks, each with its mass at its mean loss. The relative error of a block's exponential
    moment is (theta width)^2 / 8.
    """

    def __init__(self, losses: Losses) -> None:
        positive = np.flatnonzero(losses.masses > TINY)
        first, last = int(positive[0]), int(positive[-1])
        self.low, masses = losses.low + first, losses.masses[first : last + 1]
        self.values = losses.values[first : last + 1]
        with np.errstate(divide="ignore"):
            self.logs = np.log(masses)
        self.depth = float(-np.min(self.logs[np.isfinite(self.logs)]))
        self.reach = float(np.max(np.abs(self.values)))
        self.variance = self.moments(0.0)[1]
        # blocks of the summary: equally wide, and only a block of one point has much of the mass
        places = np.arange(0, len(masses), max(1, len(masses) // _BLOCKS))
        shares = np.floor(np.cumsum(masses) * (_BLOCKS / 8 / float(np.sum(masses))))
        heavy = np.flatnonzero(shares[1:] > shares[:-1]) + 1
        blocks = np.unique(np.concatenate([places, heavy, np.minimum(heavy + 1, len(masses) - 1)]))
        chances = np.add.reduceat(masses, blocks)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = np.add.reduceat(masses * self.values, blocks) / chances
            self.rough = np.log(chances), np.where(chances > 0, means, self.values[blocks])

    def tilted(self, theta: float) -> Array:
        """Return the tilted probabilities, p(l) exp(theta l) / M(theta)."""
        found = self.logs + theta * self.values
        return np.asarray(np.exp(found - _log_sum(found)))

    def moments(self, theta: float) -> tuple[float, float]:
        """Return mean and variance of the tilted distribution."""
        weights = self.tilted(theta)
        mean = float(weights @ self.values)
        return mean, float(weights @ (self.values - mean) ** 2)


def _log_sum(logs: Array) -> float:
    top = float(np.max(logs))
    return top + math.log(float(np.sum(np.exp(logs - top))))


def _convolved(laws: list[Array], counts: Array) -> tuple[Array, float]:
    """Return the circular convolution y of n_i copies of each distribution p_i, and a bound on its error.

        y = F^-1 prod_i f_i^n_i,    |y' - y| <= sum_i n_i |e_i| |f|^(n-1) / N + (power: 16 n ulp |f|^n / N) + |F^-1 err|

    F is the FFT of N points, f_i = F p_i with error e_i, |e_i|_2 <= g sqrt(N) |p_i|_2, and g = GAMMA log2(N). The bound
    follows by the mean value theorem and Cauchy-Schwarz.
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
    with np.errstate(divide="ignore"):  # powers by size and angle; 0 stays 0
        powers = [
            np.exp(n * np.log(np.abs(f[live]))) * np.exp(1j * (n * np.angle(f[live])))
            for f, n in zip(frequencies, counts, strict=True)
        ]
    product[live] = np.prod(powers, axis=0)
    return np.fft.irfft(product, size), error * (1 + 1e-6)


# ---- without a grid --------------------------------------------------------------------------------------------------


def single_deltas(pair: Pair, epsilons: Array) -> Array:
    """Return an upper bound on delta of one release at each epsilon e: P(L > e) - exp(e) Q(L > e), rounded up."""
    some, other = pair.tails(epsilons)
    with np.errstate(over="ignore", invalid="ignore"):
        above, scaled = np.exp(some), np.exp(np.minimum(epsilons + other, some))
        near = pair.total_variation * (1 + np.exp(epsilons)) if pair.total_variation else 0.0
    off = 2 * pair.slack * (4 + np.abs(epsilons)) * above
    return np.asarray(np.clip(above - np.nan_to_num(scaled) + off + TINY + near, 0.0, 1.0))


def single_epsilon(pair: Pair, delta: float) -> float:
    """Return the least epsilon of one release at `delta`; inf if none is found."""
    tried = np.concatenate([[0.0], _POSITIVE])
    for _ in range(8):
        good = np.flatnonzero(single_deltas(pair, tried) <= delta)
        if not len(good):
            return math.inf
        k = int(good[0])
        if k == 0:
            return float(tried[0])
        tried = np.linspace(tried[k - 1], tried[k], 101)[1:]
    return float(tried[-1])


def gaussian_delta(mu: float, at: float) -> float:
    """Return delta of a Gaussian release at epsilon e = `at` (Balle, Wang 2018).

    delta = Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu)
    """
    if mu == 0:
        return max(0.0, -math.expm1(at))
    first, second = float(log_ndtr(mu / 2 - at / mu)), at + float(log_ndtr(-mu / 2 - at / mu))
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the least epsilon with gaussian_delta(mu, epsilon) <= delta, by bisection, rounded up by 1e-10.

    The computation uses logarithms, so that delta may be as small as a float can be.
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
    """Return log gaussian_delta for mu > 0; -inf if the two tails are equal in floating point."""
    first, second = float(log_ndtr(mu / 2 - at / mu)), at + float(log_ndtr(-mu / 2 - at / mu))
    return first + math.log(-math.expm1(second - first)) if second < first else -math.inf


def repeated_pair(pair: tuple[float, float], count: int, delta: float) -> float:
    """Return the exact epsilon at `delta` of `count` releases, each DP with the (epsilon, delta) in `pair`.

    It is rounded up by 1e-9.
    """
    basic = count * pair[0] if count * pair[1] <= delta else math.inf
    lost, above, below = _pair_tails(pair, count)
    if lost >= delta:
        return basic
    left = (delta - lost) / (1 - lost)
    exact = float(np.max(np.log(above[above > left] - left) - below[above > left], initial=-math.inf))
    return min(basic, max(0.0, exact + 1e-9))


def repeated_pair_delta(pair: tuple[float, float], count: int, at: float) -> float:
    """Return delta at epsilon `at`, which may be negative, of `count` releases, each DP with the pair's parameters."""
    lost, above, below = _pair_tails(pair, count)
    return lost + (1 - lost) * max(0.0, float(np.max(above - np.exp(np.minimum(at + below, 700.0)))) + 1e-12)


@lru_cache(maxsize=32)
def _pair_tails(pair: tuple[float, float], count: int) -> tuple[float, Array, Array]:
    """Return 1 - (1-d)^k, Pr[B >= i] and log Pr[k - B >= i] for k = `count` releases with `pair` = (epsilon, d).

    delta(e) = 1 - (1-d)^k (1 - max_i (Pr[B >= i] - exp(e) Pr[k - B >= i])),   B ~ Bin(k, 1 / (1 + exp(-epsilon)))

    Theorem: Kairouz, Oh, Viswanath 2015, Theorem 3.3.
    """
    epsilon, delta = pair
    lost = -math.expm1(count * math.log1p(-delta)) if delta < 1 else 1.0
    tries, signed = np.arange(count + 1), (min(epsilon, 700.0), -min(epsilon, 700.0))
    ways = gammaln(count + 1) - (gammaln(tries + 1) + gammaln(count - tries + 1))
    chances = [ways - tries * math.log1p(math.exp(-e)) - (count - tries) * math.log1p(math.exp(e)) for e in signed]
    above, below = (np.logaddexp.accumulate(each[::-1]) for each in chances)
    return lost, np.exp(above), below
