"""Epsilon and delta of one shuffled round, read off its dominating pair: what the tests compare with enumerations."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sordino.accounting.pairs import _SLACK, clones
from sordino.errors import SideConditionError

_STEPS = 32  # grid points, then halvings, of the search for epsilon


def shuffled_epsilon(*, reports: int, epsilon0: float, delta: float, delta0: float = 0.0) -> float:
    """An upper bound on the eps of one shuffled round at `delta`, at most epsilon0.

        eps = the least e with delta(e) <= delta, found to about 1e-9 and rounded up

    If shuffling proves nothing, the local epsilon is the answer: shuffling is a post-processing of (eps0, delta0)-DP.
    Raises SideConditionError for delta < delta0, where not even that holds.
    """
    clones(reports=reports, epsilon0=epsilon0, delta0=delta0)
    if not (0 < delta < 1 and delta0 <= delta):
        raise SideConditionError(f"delta = {delta}", f"0 < delta < 1 and delta >= delta0 = {delta0}")

    def holds(epsilon: float) -> bool:
        return shuffled_delta(epsilon, reports=reports, epsilon0=epsilon0, delta0=delta0) <= delta

    return _least(holds, epsilon0)


def _least(holds: Callable[[float], bool], largest: float) -> float:
    """The least of [0, largest] where `holds`, rounded up to a value where it does; `largest` if none is found.

    For delta0 > 0 the bound is not monotone but convex in exp(e): `holds` is true on an interval, which a grid finds.
    """
    grid = largest * np.union1d(np.geomspace(1e-7, 1, _STEPS), np.linspace(0, 1, _STEPS))
    low, high = 0.0, float(largest)
    for epsilon in grid[:-1].tolist():
        if holds(epsilon):
            high = epsilon
            break
        low = epsilon
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def shuffled_delta(epsilon: float, *, reports: int, epsilon0: float, delta0: float = 0.0) -> float:
    """An upper bound on the delta of one shuffled round at `epsilon` >= 0.

        delta(e) <= min( P(L > e) - exp(e) Q(L > e) + (exp(e) + 1) * replacement,
                         delta0 + (1 - delta0) (exp(eps0) - exp(e))_+ / (exp(eps0) + 1) )

    The second is the local curve (Kairouz, Oh, Viswanath 2015), which shuffling, a post-processing, cannot worsen.
    """
    pair = clones(reports=reports, epsilon0=epsilon0, delta0=delta0)
    if not epsilon >= 0:
        raise SideConditionError(f"epsilon = {epsilon}", "epsilon >= 0")
    if epsilon >= epsilon0:
        return delta0
    local = delta0 + (1 - delta0) * _first_gap(epsilon, epsilon0) * (1 + _SLACK)
    some, other = (math.exp(float(each[0])) for each in pair.tails(np.asarray([epsilon])))
    near = (math.exp(min(epsilon, 700.0)) + 1) * pair.total_variation
    return min(1.0, local, max(0.0, some * (1 + _SLACK) - math.exp(min(epsilon, 700.0)) * other * (1 - _SLACK)) + near)


def _first_gap(epsilon: float, epsilon0: float) -> float:
    """a - exp(e) (1 - a), the hockey stick of randomised response itself: (1 - exp(e - eps0)) / (1 + exp(-eps0))."""
    return -math.expm1(epsilon - epsilon0) / (1 + math.exp(-epsilon0))
