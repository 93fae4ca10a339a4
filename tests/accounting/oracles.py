"""Independent truths for the privacy tests: certified lower bounds, mpmath, exhaustive enumeration. No accountant."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable

import mpmath
import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

STEP = 2e-5  # of the privacy loss; rounding down costs at most rounds * STEP of epsilon
MARGIN = 1e-8  # of delta: more than all floating-point error and wrapped mass, both checked below


def lower_bound(*, rate: float, noise_multiplier: float, rounds: int, delta: float) -> float:
    """A certified lower bound on epsilon at `delta` of `rounds` rounds of fixed-size sampling under replace-one.

    The neighbours: all clients send -1, except that one sends +1 in D. A cohort with that client sums to 2 more than
    one without it, which has another client in its place. One round is then exactly
        P = (1-q) N(0, z^2) + q N(2, z^2)    against    Q = N(0, z^2)
    and the bound is the epsilon of their composition with each loss rounded down and the left tail thrown away.
    """
    low, masses = _rounded_down_losses(rate=rate, noise_multiplier=noise_multiplier)
    size = 2 ** math.ceil(math.log2(48 / STEP))  # losses in [-24, 24) at least
    assert _chance_beyond(size // 2 * STEP, low, masses, rounds) < MARGIN / 4
    assert _transform_error(size, masses, rounds) < MARGIN / 4
    wrapped = np.zeros(size)
    np.add.at(wrapped, (np.arange(masses.size) + low) % size, masses)
    composed = np.fft.irfft(np.fft.rfft(wrapped) ** rounds, size)
    losses, chances = np.arange(size // 2) * STEP, composed[: size // 2]
    above = np.cumsum(chances[::-1])[::-1]
    below = np.cumsum((chances * np.exp(-losses))[::-1])[::-1]
    violated = np.flatnonzero(above - np.exp(losses) * below - MARGIN > delta)
    return float(losses[violated[-1]]) if violated.size else 0.0


def _rounded_down_losses(*, rate: float, noise_multiplier: float) -> tuple[int, Array]:
    """The law under P of floor(loss / STEP), at most the true loss everywhere: (least value, masses from there on)."""
    points = np.linspace(-9 * noise_multiplier, 2 + 9 * noise_multiplier, 400_001)
    loss = np.log1p(
        rate * np.expm1((2 * points - 2) / noise_multiplier**2)
    )  # increasing: each cell starts with its least
    tail = (1 - rate) * special.ndtr(-points / noise_multiplier) + rate * special.ndtr((2 - points) / noise_multiplier)
    masses = np.append(-np.diff(tail), tail[-1])
    cells = np.floor(loss / STEP).astype(np.int64)
    return int(cells[0]), np.bincount(cells - cells[0], weights=masses).astype(np.float64)


def _chance_beyond(half: float, low: int, masses: Array, rounds: int) -> float:
    """Chernoff: the chance that the composed loss leaves (-half, half), where the transform would wrap it."""
    losses = (np.arange(masses.size) + low) * STEP

    def chance(slope: float) -> float:
        return float(rounds * np.log(np.sum(masses * np.exp(slope * losses))) - abs(slope) * half)

    return sum(math.exp(min(chance(sign * s) for s in (0.5, 1.0, 2.0, 4.0))) for sign in (1, -1))


def _transform_error(size: int, masses: Array, rounds: int) -> float:
    """The rounding of all composed masses together: rounds * 5e-15 in the 2-norm of `masses`, by Cauchy-Schwarz."""
    return 5e-15 * rounds * math.sqrt(size * float(np.sum(masses**2)))


def gaussian_delta(epsilon: float, mu: float) -> mpmath.mpf:
    """Phi(mu/2 - eps/mu) - exp(eps) Phi(-mu/2 - eps/mu), with enough digits for any cancellation."""
    with mpmath.workdps(60 + int(2 * abs(epsilon) / 2.3)):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


def clone_delta(epsilon: float, *, reports: int, epsilon0: float) -> mpmath.mpf:
    """The hockey stick of the clone pair, summed over every outcome (c, k), with 40 digits."""
    with mpmath.workdps(40):
        p, e = mpmath.exp(-mpmath.mpf(epsilon0)), mpmath.exp(mpmath.mpf(epsilon))
        a = 1 / (1 + p)
        total = mpmath.mpf(0)
        for c in range(reports):
            weight = mpmath.binomial(reports - 1, c) * p**c * (1 - p) ** (reports - 1 - c) / mpmath.mpf(2) ** c
            for k in range(c + 2):
                with_one = mpmath.binomial(c, k - 1) if k else mpmath.mpf(0)
                without = mpmath.binomial(c, k)
                gap = a * with_one + (1 - a) * without - e * ((1 - a) * with_one + a * without)
                total += weight * max(gap, mpmath.mpf(0))
        return total


def shuffled_response_delta(epsilon: float, *, epsilon0: float, delta0: float, others: Iterable[int]) -> float:
    """The exact delta of shuffled randomised responses, by enumeration of every report vector, worst of both orders.

    Each client sends its bit in clear with chance delta0, else its bit by randomised response: (eps0, delta0)-DP, and
    a clear report is marked so. `others` are the bits of the clients that do not change.
    """
    rest = list(others)
    left = _histogram([0, *rest], epsilon0, delta0)
    right = _histogram([1, *rest], epsilon0, delta0)
    scale = math.exp(epsilon)

    def hockey(p: Counter[tuple[int, ...]], q: Counter[tuple[int, ...]]) -> float:
        return sum(max(0.0, p[key] - scale * q[key]) for key in p)

    return max(hockey(left, right), hockey(right, left))


def _histogram(bits: list[int], epsilon0: float, delta0: float) -> Counter[tuple[int, ...]]:
    keep = math.exp(epsilon0) / (math.exp(epsilon0) + 1)
    chances: Counter[tuple[int, ...]] = Counter()
    symbols = range(4 if delta0 > 0 else 2)  # 2 and 3 are the marked clear reports
    for reports in itertools.product(symbols, repeat=len(bits)):
        weight = 1.0
        for bit, report in zip(bits, reports, strict=True):
            clear = report == bit + 2
            noisy = keep if report == bit else 1 - keep
            weight *= (delta0 if clear else 0.0) if report >= 2 else (1 - delta0) * noisy
        chances[tuple(sorted(reports))] += weight  # type: ignore[assignment]
    return chances


# ---- Poisson sampling: a lower bound by merging outcomes ------------------------------------------------------------


def poisson_lower_bound(
    *, rate: float, noise_multiplier: float, rounds: int, delta: float, step: float, reach: float
) -> float:
    """A certified lower bound on epsilon of Poisson rounds, one client removed, sharp also where the rate is small.

    One round is P = (1-q) N(0, 1) + q N(mu, 1) against Q = N(0, 1), mu = 1/z. Its outcomes are merged into intervals
    whose losses log P(I)/Q(I) are multiples of `step`: merging is post-processing, so it can only lower delta.
    Losses above the window, which ends at `reach` or later, wrap to smaller ones, which lowers it too; none is below.
    """
    losses, chances = _merged_outcomes(rate=rate, mu=1 / noise_multiplier, step=step)
    first = losses[0]
    size = 2 ** math.ceil(math.log2(reach / step - rounds * first))
    law = np.zeros(size)
    np.add.at(law, np.minimum(np.asarray(losses) - first, size // 2), chances)
    composed = np.fft.irfft(np.fft.rfft(law) ** rounds, size)
    values = (np.arange(size) + rounds * first) * step
    values, composed = values[values >= 0], composed[values >= 0]
    above = np.cumsum(composed[::-1])[::-1]
    below = np.cumsum((composed * np.exp(-values))[::-1])[::-1]
    violated = np.flatnonzero(above - np.exp(values) * below - 1e-3 * delta > delta)  # the transform errs by less
    return float(values[violated[-1]]) if violated.size else 0.0


def _merged_outcomes(*, rate: float, mu: float, step: float) -> tuple[list[int], list[float]]:
    """Losses in steps, and their chances under P, of intervals from the least outcome on; the last is rounded down."""
    first = math.ceil(math.log1p(-rate) / step) + 1
    loss, low, losses, chances = first, -math.inf, [], []
    while True:
        high = _end_of_interval(low, loss * step, rate, mu)
        losses.append(loss)
        chances.append(_chances(low, high, rate, mu)[0])
        if high == _FARTHEST:
            losses[-1] = losses[-2]
            return losses, chances
        low, loss = high, max(loss + 1, first + int(1.02 * (loss - first)))


_FARTHEST = 38.0


def _end_of_interval(low: float, loss: float, rate: float, mu: float) -> float:
    """The b with log P(low, b)/Q(low, b) = loss, from above, by halving; the farthest outcome if that has less."""

    def enough(b: float) -> bool:
        p, q = _chances(low, b, rate, mu)
        return p > 0 and q > 0 and math.log(p / q) >= loss

    if not enough(_FARTHEST):
        return _FARTHEST
    a, b = max(low, -_FARTHEST), _FARTHEST
    for _ in range(50):
        middle = (a + b) / 2
        a, b = (a, middle) if enough(middle) else (middle, b)
    return b


def _chances(low: float, high: float, rate: float, mu: float) -> tuple[float, float]:
    """Of low < x < high, under P and under Q, from whichever tail is the smaller."""

    def between(a: float, b: float) -> float:
        a, b = (a, b) if a > 0 else (-b, -a)
        return (math.erfc(a / math.sqrt(2)) - math.erfc(b / math.sqrt(2))) / 2

    still = between(low, high)
    return (1 - rate) * still + rate * between(low - mu, high - mu), still


def public_coin_delta(epsilon: float, *, rate: float, rounds: int, mu: float, steps: int = 1) -> float:
    """sum_k Bin(rounds, rate)(k) delta_Gauss(sqrt(k steps) mu; epsilon): the cohorts are seen, the coins averaged over.

    Each of k rounds has `steps` Gaussian releases; binomial weights and Gaussian tails with 30 digits at least.
    """
    total = mpmath.mpf(0)
    with mpmath.workdps(30):
        q = mpmath.mpf(rate)
        for k in range(1, rounds + 1):
            weight = mpmath.binomial(rounds, k) * q**k * (1 - q) ** (rounds - k)
            if weight > mpmath.mpf(10) ** -25:
                total += weight * gaussian_delta(epsilon, mu * math.sqrt(k * steps))
    return float(total)
