"""Calibration: noise multiplier, rounds or cohort of a plan for a target epsilon. Called by `so.calibrate` and `cli`.

Epsilon falls with the noise multiplier and grows with rounds and cohort, so each search narrows a bracket. A search
begins at an estimate by the central limit theorem, continues with the accountant on a coarse grid, which only
overstates epsilon (by about 0.2%), and ends with the accountant on a refined grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sordino.accounting.accountant import bound, default_delta, delta_at
from sordino.accounting.bounds import AlreadyPrivate
from sordino.accounting.composition import Line
from sordino.accounting.events import GaussianNoise
from sordino.accounting.rounding import upto
from sordino.errors import ConfigError, PlanError, UnreachableError

if TYPE_CHECKING:
    from sordino.plan import Plan

TOLERANCE = 0.005
_LEAST, _MOST = 1e-2, 1e5  # noise multipliers searched


def noise_multiplier(line_of: Callable[[float], Line], epsilon: float, delta: float) -> float:
    """Return the least noise multiplier z, to 0.5% in epsilon, for which line_of(z) costs at most epsilon at delta."""
    _check_target(epsilon, delta)

    @cache
    def rough(z: float) -> float:
        return _epsilon(line_of(z), delta, rough=True)

    @cache
    def exact(z: float) -> float:
        return _epsilon(line_of(z), delta)

    near = _clt_multiplier(line_of, epsilon, delta)
    found = _bracketed(rough, epsilon, (near * 0.9, near * 1.1) if near else (0.5, 2.0), TOLERANCE / 5)
    share = max(exact(found) / epsilon, 0.5)  # epsilon falls at least as fast as the noise multiplier grows
    return found if share >= 1 - TOLERANCE else _bracketed(exact, epsilon, (found * share, found), 0.9 * TOLERANCE)


def rounds(line_of: Callable[[int], Line], epsilon: float, delta: float, most: int = 1_000_000) -> int:
    """Return the largest number n <= `most` of rounds for which `line_of(n)` costs at most (epsilon, delta)."""
    return _largest(line_of, epsilon, delta, most, "round", "add noise, or allow a larger epsilon")


def cohort(line_of: Callable[[int], Line], epsilon: float, delta: float, population: int, least: int = 1) -> int:
    """Return the largest cohort size n >= `least` for which `line_of(n)` costs at most (epsilon, delta)."""
    return _largest(line_of, epsilon, delta, population, "client", "add noise, or plan fewer rounds", least)


def _check_target(epsilon: float, delta: float) -> None:
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise UnreachableError(f"epsilon {epsilon}", "a positive finite epsilon", "choose, for example, epsilon = 8")
    if not 0 <= delta < 1:
        raise UnreachableError(f"delta {delta}", "a delta in [0, 1)", "choose, for example, population ** -1.1")


def _epsilon(line: Line, delta: float, rough: bool = False) -> float:
    return bound(line.entries, line.relation, delta, rough=rough).value


def _bracketed(cost: Callable[[float], float], target: float, bracket: tuple[float, float], slack: float) -> float:
    """Return z with cost(z) <= target and log(target) - log(cost(z)) <= `slack`, for a cost that falls with z."""
    low, high = bracket
    while cost(high) > target:
        low, high = high, high * 2
        if high > _MOST:
            found, needed = f"epsilon {upto(cost(_MOST))} at noise multiplier {_MOST:g}", f"epsilon {upto(target, 6)}"
            raise UnreachableError(found, needed, "allow a larger epsilon or delta, or fewer rounds")
    while cost(low) <= target:
        if low <= _LEAST:
            return low
        low, high = low / 2, low
    # false position on (log z, log epsilon); `high` always costs at most the target
    over, under = _log_ratio(cost(low), target), _log_ratio(cost(high), target)
    for step in range(60):
        if under > -slack or high / low < 1 + 1e-7:
            break
        share = over / (over - under) + 0.02 if step % 3 < 2 else 0.5
        middle = low * (high / low) ** min(share, 0.98)
        value = _log_ratio(cost(middle), target)
        low, over, high, under = (low, over, middle, value) if value <= 0 else (middle, value, high, under)
    return high


def _log_ratio(cost: float, target: float) -> float:
    return math.log(min(max(cost, 1e-12), 1e12) / target)


def _largest(
    line_of: Callable[[int], Line], epsilon: float, delta: float, most: int, what: str, fix: str, least: int = 1
) -> int:
    _check_target(epsilon, delta)
    found = _clt_count(line_of, epsilon, delta, least, most)
    for rough in (True, False):
        found = _crossing(
            lambda n, rough=rough: _log_ratio(_epsilon(line_of(n), delta, rough), epsilon),  # type: ignore[misc]
            *(found, least - 1, most + 1),
        )
    if found < least:
        cheapest, some = _epsilon(line_of(least), delta), f"{least} {what}{'s' if least > 1 else ''}"
        needed = f"epsilon at most {upto(epsilon, 6)}"
        raise UnreachableError(f"epsilon {upto(cheapest, 4)} already for {some}", needed, fix)
    return found


def _crossing(over: Callable[[int], float], n: int, low: int, high: int) -> int:
    """Return the largest integer n in [low, high) with over(n) <= 0, for an increasing function `over`."""
    slope, known = 0.5, None  # of over against log n: epsilon grows about as the square root of the rounds
    for step in itertools.count(1):
        if high - low <= 1:
            return low
        n = min(max(n, low + 1), high - 1)
        excess = over(n)
        low, high = (low, n) if excess > 0 else (n, high)
        if known is not None and known[0] != n:
            slope = min(max((excess - known[1]) / math.log(n / known[0]), 0.3), 3.0)
        known = (n, excess)
        if step % 4 == 0:
            n = (low + min(high, 4 * low + 2)) // 2
        else:
            n = round(n * math.exp(min(max(-excess / slope, -2.0), 2.0)))
    raise AssertionError


def _clt_multiplier(line_of: Callable[[float], Line], epsilon: float, delta: float) -> float | None:
    """Estimate the noise multiplier by the central limit theorem; None if an event has no estimate."""
    wanted, low, high = mu_of_epsilon(epsilon, delta), math.log(_LEAST), math.log(_MOST)
    for _ in range(24):
        middle = (low + high) / 2
        mu = _clt_mu(line_of(math.exp(middle)))
        if mu is None:
            return None
        low, high = (middle, high) if mu > wanted else (low, middle)
    return math.exp(high)


def _clt_count(line_of: Callable[[int], Line], epsilon: float, delta: float, least: int, most: int) -> int:
    """Estimate the largest count by the central limit theorem; `least` if an event has no estimate."""
    wanted, low, high = mu_of_epsilon(epsilon, delta), least, 2 * least
    while high <= most and (_clt_mu(line_of(high)) or math.inf) <= wanted:
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if (_clt_mu(line_of(middle)) or math.inf) <= wanted else (low, middle)
    return low


def mu_of_epsilon(epsilon: float, delta: float) -> float:
    """Return mu of the Gaussian release that costs exactly (epsilon, delta)."""
    low, high = 1e-9, 1e3
    for _ in range(50):
        middle = math.sqrt(low * high)
        fits = delta_at(((GaussianNoise(1 / middle), 1),), "add_remove", epsilon) <= delta
        low, high = (middle, high) if fits else (low, middle)
    return low


def _clt_mu(line: Line) -> float | None:
    """Estimate mu of all rounds together by the central limit theorem; None if an event has no estimate of mu."""
    squares = [(event.clt_mu_squared(line.relation), count) for event, count in line.entries]
    if any(square is None for square, _ in squares):
        return None
    return math.sqrt(sum(count * (square or 0.0) for square, count in squares))


# ---- plans -----------------------------------------------------------------------------------------------------------


def _with_noise(plan: Plan, noise: float | tuple[float, ...]) -> dict[str, Any]:
    """Return {name of the plan's field: part} for the part that adds noise, with other noise multiplier(s)."""
    name = "local" if isinstance(plan.bound, AlreadyPrivate) else "release"
    part = plan.local if name == "local" else plan.release
    return {name: part.with_noise_multipliers(noise) if isinstance(noise, tuple) else part.with_noise_multiplier(noise)}


def noisier(plan: Plan, noise_multiplier: float | tuple[float, ...]) -> Plan:
    """Return a copy of the plan with another noise multiplier, or with one for each silo."""
    return replace(plan, **_with_noise(plan, noise_multiplier))


def calibrate(plan: Plan, *, epsilon: float, delta: float | None = None, free: str = "noise_multiplier") -> Plan:
    """Return a copy of the plan that costs at most `epsilon` at `delta`.

    `free` names the quantity that is changed: "noise_multiplier", "rounds" or "cohort".
    """
    delta = default_delta(plan.units) if delta is None else delta
    weakest = _weakest(plan, delta, free)

    def longer(rounds: int) -> Plan:
        return replace(plan, rounds=rounds).fitted()

    def larger(cohort: int) -> Plan:
        return replace(plan, clients=plan.clients.with_cohort(cohort)).fitted()

    if free == "rounds":
        return longer(rounds(lambda n: longer(n).cost().line("models", weakest), epsilon, delta))
    if free == "cohort":
        population, least = plan.clients.population, getattr(plan.release, "at_least", 1)
        return larger(cohort(lambda n: larger(n).cost().line("models", weakest), epsilon, delta, population, least))

    def line_of(z: float) -> Line:  # no Plan is built for a trial of the search
        return plan.cost_with(**_with_noise(plan, z)).line("models", weakest)

    return noisier(plan, noise_multiplier(line_of, epsilon, delta))


def _weakest(plan: Plan, delta: float, free: str) -> int:
    """Return the silo with the largest epsilon, which is the smallest silo if all have the same noise multiplier."""
    lines = plan.cost().of("models")
    if free == "noise_multiplier" or len(lines) == 1:
        return 0 if plan.local.reads is None else int(np.argmin(plan.local.reads.sizes))
    return max(lines, key=lambda line: _epsilon(line, delta)).silos[0]


def calibrate_silos(plan: Plan, budgets: Sequence[Budget]) -> Plan:
    """Return a copy of the plan with a noise multiplier for each silo, so that each spends at most its own budget."""
    if len(budgets) != plan.clients.population:
        found = f"{len(budgets)} budgets for {plan.clients.population} silos"
        raise PlanError("calibration", found, "one budget per silo", "pass as many budgets as silos")
    solved: dict[tuple[int, Budget], float] = {}

    def solve(silo: int, budget: Budget) -> float:
        size = plan.local.reads.size(silo) if plan.local.reads is not None else 0
        if (size, budget) not in solved:
            solved[size, budget] = noise_multiplier(
                lambda z: plan.cost_with(**_with_noise(plan, z)).line("messages", silo), budget.epsilon, budget.delta
            )
        return solved[size, budget]

    return noisier(plan, tuple(solve(silo, budget) for silo, budget in enumerate(budgets)))


@dataclass(frozen=True)
class Budget:
    """Largest epsilon, at `delta`, that one client, or one record of a silo, may spend over the whole run."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < math.inf and 0 <= self.delta < 1):
            found = f"a budget of epsilon {self.epsilon}, delta {self.delta}"
            raise ConfigError(found, "a finite epsilon above 0, and delta in [0, 1)", "correct epsilon or delta")
