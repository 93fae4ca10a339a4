"""Given a target epsilon, find the one free number: multiplier, rounds or cohort.

Epsilon falls with the multiplier and grows with rounds and cohort, so each search is a bisection. The search walks on
a coarse grid, which only ever overstates epsilon; the answer is checked on the refined one and lies within 0.5%.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sordino.errors import UnreachableError
from sordino.privacy import accounting
from sordino.privacy.bill import Line

TOLERANCE = 0.005
_LEAST, _MOST = 1e-2, 1e5  # multipliers searched


def check_target(epsilon: float, delta: float) -> None:
    """Refuse a target that means nothing."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise UnreachableError(f"epsilon {epsilon}", "a positive finite epsilon")
    if not 0 <= delta < 1:
        raise UnreachableError(f"delta {delta}", "a delta in [0, 1)", "use population ** -1.1")


def multiplier(line_of: Callable[[float], Line], epsilon: float, delta: float) -> float:
    """The smallest multiplier, to 0.5% in epsilon, whose line costs at most `epsilon` at `delta`."""
    check_target(epsilon, delta)

    def cost_on(grid: float) -> Callable[[float], float]:
        return lambda z: _epsilon(line_of(z), delta, grid)

    grid = accounting.COARSE
    found = _bracketed(cost_on(grid), epsilon)
    while True:
        exact = _exact(line_of(found), delta)
        if exact.value > epsilon:
            found *= 1 + TOLERANCE / 4
        elif exact.value >= epsilon * (1 - TOLERANCE) or exact.grid is None or grid <= exact.grid:
            return found
        else:
            grid = exact.grid
            found = _bracketed(cost_on(grid), epsilon, near=found)


def rounds(line_of: Callable[[int], Line], epsilon: float, delta: float, most: int = 1_000_000) -> int:
    """The most rounds whose line costs at most `epsilon` at `delta`."""
    check_target(epsilon, delta)
    return _largest(line_of, epsilon, delta, most, "round", "more noise")


def cohort(line_of: Callable[[int], Line], epsilon: float, delta: float, population: int) -> int:
    """The largest cohort whose line costs at most `epsilon` at `delta`."""
    check_target(epsilon, delta)
    return _largest(line_of, epsilon, delta, population, "client", "more noise or fewer rounds")


def _exact(line: Line, delta: float) -> accounting.Epsilon:
    return accounting.epsilon(line.entries, line.relation, delta)


def _epsilon(line: Line, delta: float, grid: float) -> float:
    return accounting.epsilon_on(line.entries, line.relation, delta, grid)


def _bracketed(cost: Callable[[float], float], target: float, near: float | None = None) -> float:
    """Root of cost(z) = target on a log scale, approached from the safe side."""
    low, high = (near * 0.8, near * 1.25) if near else (0.5, 2.0)
    while cost(high) > target:
        low, high = high, high * 2
        if high > _MOST:
            raise UnreachableError(
                f"epsilon {cost(_MOST):.3g} at multiplier {_MOST:g}",
                f"epsilon {target:g}",
                "allow a larger epsilon or delta, or fewer rounds",
            )
    while cost(low) <= target and low > _LEAST:
        low, high = low / 2, low
    return _bisect(cost, target, low, high)


def _bisect(cost: Callable[[float], float], target: float, low: float, high: float) -> float:
    """False position on (log z, log epsilon); `high` always costs at most the target, and comes within 0.1% of it."""
    over, under = _log_ratio(cost(low), target), _log_ratio(cost(high), target)
    for step in range(60):
        if under > -TOLERANCE / 5 or high / low < 1 + 1e-7:
            break
        share = over / (over - under) + 0.02 if step % 3 < 2 else 0.5
        middle = low * (high / low) ** min(share, 0.98)
        value = _log_ratio(cost(middle), target)
        low, over, high, under = (low, over, middle, value) if value <= 0 else (middle, value, high, under)
    return high


def _log_ratio(cost: float, target: float) -> float:
    return math.log(max(cost, 1e-12) / target)


def _largest(line_of: Callable[[int], Line], epsilon: float, delta: float, most: int, what: str, fix: str) -> int:
    """Largest n in [1, most] that costs at most epsilon."""

    def fits(n: int) -> bool:
        line = line_of(n)
        return _epsilon(line, delta, accounting.COARSE) <= epsilon or _exact(line, delta).value <= epsilon

    if not fits(1):
        least = _exact(line_of(1), delta).value
        raise UnreachableError(f"epsilon {least:.4g} for one {what} already", f"epsilon at most {epsilon:g}", fix)
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
