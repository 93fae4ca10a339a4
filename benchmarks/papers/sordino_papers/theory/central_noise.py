"""Closed forms of papers 000 and 004, which raise where they are not proved. None of them feeds a certificate.

These functions reproduce published numbers. The certificate comes from the accountant, which needs several times
less noise; here a side condition that fails is a `SideConditionError` with the numbers in the sentence.

    uniform_noise, poisson_noise      paper 000 (DP-Fed-LS), Theorems 1 and 2
    lssgd_noise                       paper 004 (DP-LSSGD), Theorem 2
    subsampled_rdp, smallest_epsilon  the subsampling lemma under each theorem, and how far it reaches

Papers 001 and 002 are in `local_noise`, the propositions on smoothing in `smoothing`.

One proof carries the three theorems. A lemma says that a Gaussian whose std is `ratio` times its sensitivity, on a
subsample of rate q, is (order, factor q^2 order / ratio^2)-RDP while ratio^2 >= floor and the order stays in reach.
Spending the part `split` of epsilon on T such rounds and the rest on the conversion to (epsilon, delta) gives

    order = 1 + log(1/delta) / ((1-split) epsilon),      ratio^2 = factor q^2 T order / (split epsilon).

Proof gap common to the three: the lemmas sum over integer orders, and the theorems use them at real orders, sometimes
below 2. At the settings of paper 000 the values are nevertheless far above what a tight accountant asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from sordino.errors import SideConditionError

Floats = npt.NDArray[np.float64]
Reach = Callable[[Floats, Floats, float], Floats]

_GRID = 4001  # points per zoom of the search over the split
_ZOOMS = 4
_LOWEST_LOGIT = -40.0  # split = 4e-18
_ACCOUNTANT = "calibrate with the accountant"


def require(holds: bool, found: str, needed: str, fix: str = "") -> None:
    """Raise `SideConditionError` unless the condition holds (comparisons with NaN do not hold)."""
    if not holds:
        raise SideConditionError(found, needed, fix)


def require_positive(**values: float) -> None:
    """Every value finite and above zero."""
    for name, value in values.items():
        require(0.0 < value < math.inf, f"{name} = {value:g}", f"a finite {name} > 0", f"give a positive {name}")


def require_count(**values: int) -> None:
    """Every value a whole number, at least one."""
    for name, value in values.items():
        whole = 1 <= value < math.inf and float(value).is_integer()
        require(whole, f"{name} = {value:g}", f"a whole {name} >= 1", f"give a whole {name}")


def require_budget(*, epsilon: float, delta: float) -> None:
    """epsilon > 0 and 0 < delta < 1."""
    require_positive(epsilon=epsilon)
    require(0.0 < delta < 1.0, f"delta = {delta:g}", "0 < delta < 1", "take delta near population^-1.1")


def require_rate(rate: float) -> None:
    """0 < rate <= 1."""
    require(0.0 < rate <= 1.0, f"rate = {rate:g}", "0 < rate <= 1", "give the fraction sampled per round")


# ---------------------------------------------------------------------------------- subsampled Gaussian, RDP lemmas


def _reach_of_000(order: Floats, squared: Floats, rate: float) -> Floats:
    return np.asarray(1.0 + 2.0 / 3.0 * squared * np.log(1.0 / (rate * order * (1.0 + squared))))


def _reach_of_004(order: Floats, squared: Floats, rate: float) -> Floats:
    return np.asarray(np.log(1.0 / (rate * (1.0 + squared))) + 0.0 * order)


@dataclass(frozen=True)
class SubsamplingLemma:
    """A subsampled Gaussian is (order, factor rate^2 order / ratio^2)-RDP; ratio = std / sensitivity.

    Side conditions: ratio^2 >= floor, and order <= reach(order, ratio^2, rate).
    """

    name: str
    factor: float
    floor: float
    reach: Reach


UNIFORM = SubsamplingLemma("Lemma 3 of paper 000", 3.5, 2.0 / 3.0, _reach_of_000)
"""Without replacement, replace one: order - 1 <= 2/3 ratio^2 log(1/(rate order (1 + ratio^2))), ratio^2 >= 2/3."""

POISSON = SubsamplingLemma("Lemma 4 of paper 000", 2.0, 5.0 / 9.0, _reach_of_000)
"""Poisson, add or remove one: the same reach, ratio^2 >= 5/9.

Its step (B.5), e^(1/r) <= 7/(2r) with r = ratio^2, fails for r > 2.27; keeping the -1 that (B.4) drops repairs it.
"""

CLASSIC = SubsamplingLemma("Lemma 11 of paper 004", 5.0, 1.5, _reach_of_004)
"""Without replacement, replace one: order <= log(1/(rate (1 + ratio^2))), ratio^2 >= 1.5."""


def subsampled_rdp(lemma: SubsamplingLemma, *, order: float, ratio: float, rate: float) -> float:
    """Renyi divergence of one subsampled Gaussian round: factor rate^2 order / ratio^2.

    `ratio` is noise std over sensitivity (2 clip norm for replace one, clip norm for add or remove one). Raises outside
    the lemma's floor and reach. Lemmas 3 and 4 of paper 000, Lemma 11 of paper 004.
    """
    require_positive(ratio=ratio)
    require_rate(rate)
    require(1.0 < order < math.inf, f"order = {order:g}", "a finite order > 1")
    squared = ratio**2
    require(squared >= lemma.floor, f"ratio^2 = {squared:.4g}", f"ratio^2 >= {lemma.floor:.4g} ({lemma.name})")
    reach = float(lemma.reach(np.array([order]), np.array([squared]), rate)[0])
    require(order <= reach, f"order = {order:.4g}", f"order <= {reach:.4g} ({lemma.name})", "lower the order")
    return lemma.factor * rate**2 * order / squared


@dataclass(frozen=True)
class RenyiNoise:
    """What a theorem prescribes: the noise `std`, the Renyi `order` it used, and the `split` (the paper's lambda, mu).

    The std is on the SUM of the clipped updates in paper 000, on the batch MEAN in paper 004.
    """

    std: float
    order: float
    split: float


@dataclass(frozen=True)
class _Search:
    """The noise as a function of logit(split), for one lemma and one budget."""

    lemma: SubsamplingLemma
    epsilon: float
    delta: float
    rounds: int
    rate: float

    @property
    def best_logit(self) -> float:
        """Where the noise would be least without side conditions: split = 1/(1 + sqrt(a/(a+epsilon)))."""
        return 0.5 * math.log1p(self.epsilon / -math.log(self.delta))

    def order(self, logit: Floats) -> Floats:
        return np.asarray(1.0 - math.log(self.delta) / (expit(-logit) * self.epsilon))

    def squared(self, logit: Floats) -> Floats:
        scale = self.lemma.factor * self.rate**2 * self.rounds / self.epsilon
        return np.asarray(scale * self.order(logit) / expit(logit))

    def reach(self, logit: Floats) -> Floats:
        return self.lemma.reach(self.order(logit), self.squared(logit), self.rate)

    def admissible(self, logit: Floats) -> npt.NDArray[np.bool_]:
        return (self.squared(logit) >= self.lemma.floor) & (self.order(logit) <= self.reach(logit))

    def grid(self) -> Floats:
        return np.linspace(_LOWEST_LOGIT, self.best_logit, _GRID)

    def has_split(self) -> bool:
        return bool(self.admissible(self.grid()).any())

    def solve(self) -> float:
        """The admissible logit with the least noise: noise falls up to `best_logit`, so it is the largest one."""
        grid = self.grid()
        for _ in range(_ZOOMS):
            good = np.flatnonzero(self.admissible(grid))
            if good.size == 0:
                raise self.refusal()
            last = int(good[-1])
            grid = np.linspace(grid[last], grid[min(last + 1, _GRID - 1)], _GRID)
        return float(grid[0])

    def refusal(self) -> SideConditionError:
        """No split works: say how near the best one comes, and which epsilon would do."""
        grid = self.grid()
        grid = grid[self.squared(grid) >= self.lemma.floor]
        near = grid[[int(np.argmax(self.reach(grid) - self.order(grid)))]]
        split, order, reach, squared = (float(f(near)[0]) for f in (expit, self.order, self.reach, self.squared))
        least = _smallest_epsilon(self)
        return SideConditionError(
            f"no admissible split at epsilon = {self.epsilon:g}: at the nearest, {split:.3g}, the Renyi order is "
            f"{order:.4g} with ratio^2 = {squared:.4g}",
            f"order <= {reach:.4g} and ratio^2 >= {self.lemma.floor:.4g} ({self.lemma.name})",
            f"raise epsilon to {least:.4g} or more, or {_ACCOUNTANT}"
            if math.isfinite(least)
            else f"lower the rate {self.rate:g}, beyond the theorem at every epsilon, or {_ACCOUNTANT}",
        )


def _smallest_epsilon(search: _Search) -> float:
    """Bisection: what is admissible stays so for a larger epsilon (same ratio, smaller order)."""

    def reached(epsilon: float) -> bool:
        return _Search(search.lemma, epsilon, search.delta, search.rounds, search.rate).has_split()

    low, high = 1e-6, 1e6
    if not reached(high):
        return math.inf
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def smallest_epsilon(lemma: SubsamplingLemma, *, delta: float, rounds: int, rate: float) -> float:
    """The least epsilon for which the theorem built on `lemma` has an admissible split; inf if there is none."""
    return _smallest_epsilon(_checked(lemma, epsilon=1.0, delta=delta, rounds=rounds, rate=rate))


def _checked(lemma: SubsamplingLemma, *, epsilon: float, delta: float, rounds: int, rate: float) -> _Search:
    require_budget(epsilon=epsilon, delta=delta)
    require_count(rounds=rounds)
    require_rate(rate)
    return _Search(lemma, epsilon, delta, rounds, rate)


def _noise(search: _Search, sensitivity: float) -> RenyiNoise:
    logit = np.array([search.solve()])
    std = sensitivity * math.sqrt(float(search.squared(logit)[0]))
    return RenyiNoise(std, float(search.order(logit)[0]), float(expit(logit)[0]))


def uniform_noise(*, epsilon: float, delta: float, rounds: int, rate: float, clip_norm: float) -> RenyiNoise:
    """Noise on the sum of clipped updates, cohorts of fixed size without replacement (sensitivity 2 C, clip norm C).

        nu = (rate C / epsilon) sqrt(14 rounds / lambda * (log(1/delta)/(1-lambda) + epsilon))

    Side conditions: nu^2/(4 C^2) >= 2/3 and
    alpha - 1 <= nu^2/(6 C^2) log(1/(rate alpha (1 + nu^2/(4 C^2)))), alpha = 1 + log(1/delta)/((1-lambda)
    epsilon); lambda in (0, 1) is searched for the least nu. Paper 000, Theorem 1. Replace one, client level.
    """
    require_positive(clip_norm=clip_norm)
    search = _checked(UNIFORM, epsilon=epsilon, delta=delta, rounds=rounds, rate=rate)
    return _noise(search, 2.0 * clip_norm)


def poisson_noise(*, epsilon: float, delta: float, rounds: int, rate: float, clip_norm: float) -> RenyiNoise:
    """Noise on the sum of clipped updates, Poisson cohorts (sensitivity C, the clip norm).

        nu = (rate C / epsilon) sqrt(2 rounds / lambda * (log(1/delta)/(1-lambda) + epsilon))

    Side conditions: nu^2/C^2 >= 5/9 and
    alpha - 1 <= 2 nu^2/(3 C^2) log(1/(rate alpha (1 + nu^2/C^2))); alpha and lambda as in `uniform_noise`.
    Paper 000, Theorem 2. Add or remove one, client level.
    """
    require_positive(clip_norm=clip_norm)
    search = _checked(POISSON, epsilon=epsilon, delta=delta, rounds=rounds, rate=rate)
    return _noise(search, clip_norm)


def lssgd_noise(*, epsilon: float, delta: float, rounds: int, clip_norm: float, records: int, batch: int) -> RenyiNoise:
    """Noise on the mean of a batch of clipped record gradients (sensitivity 2 clip norm / batch).

        nu^2 = 20 rounds alpha C^2 / (mu records^2 epsilon),   alpha = 1 + log(1/delta)/((1-mu) epsilon)

    Side conditions: 5 batch^2 rounds alpha / (mu records^2 epsilon) >= 1.5 and
    alpha <= log(mu records^3 epsilon / (5 batch^3 rounds alpha + mu batch records^2 epsilon)), mu in (0, 1) searched.
    Paper 004, Theorem 2. The published settings (epsilon .1 to .3) have no admissible mu: `smallest_epsilon` is 4.13.
    """
    require_positive(clip_norm=clip_norm)
    require_count(records=records, batch=batch)
    require(batch <= records, f"batch = {batch}", f"batch <= records = {records}", "lower the batch")
    search = _checked(CLASSIC, epsilon=epsilon, delta=delta, rounds=rounds, rate=batch / records)
    return _noise(search, 2.0 * clip_norm / batch)
