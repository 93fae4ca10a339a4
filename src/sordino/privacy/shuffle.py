"""Amplification by shuffling, replace-one: what a shuffler adds to local randomisers.

n clients each send one report of a local randomiser, and a trusted shuffler forgets who sent which. Each randomiser is
(eps0, delta0)-DP for its client: any two inputs, replace-one. All clients run the same randomiser, on whatever inputs
(in general it may depend on the place in the shuffled order and on the reports before it, never on who the client is).
The bound is for one round, neighbours differ in the input of one client (replace-one), and n is public.

    C ~ Bin(n - 1, exp(-eps0)),  A ~ Bin(C, 1/2),  D ~ Bern(exp(eps0) / (exp(eps0) + 1))
    P = (A + D, C - A + 1 - D)   against   Q = (A + 1 - D, C - A + D)

Symbols -> arguments: n -> `reports`, eps0 -> `epsilon0`, delta0 -> `delta0`; C counts the clones, the reports that a
fair coin gives to either input of the changed client.

Guarantee: for delta0 = 0 the shuffled reports of two neighbours are a post-processing of (P, Q), so their hockey stick
is at most that of (P, Q), whatever n and eps0. For delta0 > 0 see `_replacement_cost`. No asymptotic closed form is
used, so none of their side conditions is needed.

Theorem: Feldman, McMillan, Talwar 2021, "Hiding among the clones" (arXiv 2012.12803), Sec 3: the reduction to clones,
its numerical analysis, and the theorem for approximate randomisers. The "stronger" clones of their 2022 paper, with
2/(exp(eps0) + 1) for exp(-eps0), are not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sordino.errors import SideConditionError

_SLACK = 1e-10  # relative error allowed for scipy's binomials: each term is moved against us by it
_TAIL = 60.0  # values of C rarer than exp(-60) are not summed: their mass is added to delta
_STEPS = 32  # grid points, then halvings, of the search for epsilon
_LARGEST = 700.0  # exp of it is finite


def shuffled_epsilon(*, reports: int, epsilon0: float, delta: float, delta0: float = 0.0) -> float:
    """An upper bound on the eps of one shuffled round at `delta`, at most epsilon0.

        eps = the least e with delta(e) <= delta, found to about 1e-9 and rounded up

    If shuffling proves nothing, the local epsilon is the answer: shuffling is a post-processing of (eps0, delta0)-DP.
    Raises SideConditionError for delta < delta0, where not even that holds.
    """
    _require(reports=reports, epsilon0=epsilon0, delta0=delta0)
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

        delta(e) <= min( sum_c Pr[C = c] delta_c(e) + Pr[C outside the sum] + cost of delta0,
                         delta0 + (1 - delta0) (exp(eps0) - exp(e))_+ / (exp(eps0) + 1) )

    The second is the local curve (Kairouz, Oh, Viswanath 2015), which shuffling, a post-processing, cannot worsen.
    """
    _require(reports=reports, epsilon0=epsilon0, delta0=delta0)
    if not epsilon >= 0:
        raise SideConditionError(f"epsilon = {epsilon}", "epsilon >= 0")
    if epsilon >= epsilon0:
        return delta0
    local = delta0 + (1 - delta0) * _first_gap(epsilon, epsilon0) * (1 + _SLACK)
    epsilon = min(epsilon, _LARGEST)  # delta decreases in epsilon, so a smaller one bounds it
    clones = _clone_delta(epsilon, reports=reports, epsilon0=epsilon0)
    return min(1.0, local, clones + _replacement_cost(epsilon, reports=reports, epsilon0=epsilon0, delta0=delta0))


def _clone_delta(epsilon: float, *, reports: int, epsilon0: float) -> float:
    """The hockey stick of (P, Q) at epsilon < epsilon0, rounded up.

    delta_c decreases in c (one more clone is a post-processing), so a block of values of C counts with its first
    delta_c, what lies below the blocks with 1, and what lies above with the last delta_c.
    """
    count = _clones(reports - 1, math.exp(-epsilon0))
    deltas = _delta_given_clones(count.firsts, epsilon=epsilon, epsilon0=epsilon0)
    total = float(np.sum(count.masses * deltas)) + count.below + count.above * float(deltas[-1])
    return total * (1 + _SLACK)


class _Clones(NamedTuple):
    """The law of C in blocks of consecutive values."""

    firsts: NDArray[np.float64]  # the least value of each block
    masses: NDArray[np.float64]
    below: float  # Pr[C < first block]
    above: float  # Pr[C > last block]


@lru_cache(maxsize=64)
def _clones(trials: int, probability: float) -> _Clones:
    """Bin(trials, probability) within the reach of Bernstein's inequality at exp(-_TAIL), in blocks of std/64."""
    mean, variance = trials * probability, trials * probability * (1 - probability)
    reach = _TAIL / 3 + math.sqrt((_TAIL / 3) ** 2 + 2 * _TAIL * variance)
    low, high = max(0, math.floor(mean - reach)), min(trials, math.ceil(mean + reach))
    from scipy import stats  # half a second to import

    law: Any = stats.binom(trials, probability)
    starts = np.arange(0, high - low + 1, max(1, math.floor(math.sqrt(variance) / 64)))
    masses = np.add.reduceat(law.pmf(np.arange(low, high + 1)), starts)
    return _Clones((starts + low).astype(np.float64), masses, float(law.cdf(low - 1)), float(law.sf(high)))


def _delta_given_clones(clones: NDArray[np.float64], *, epsilon: float, epsilon0: float) -> NDArray[np.float64]:
    """The hockey stick given C = c, rounded up: with B ~ Bin(c, 1/2) and a = exp(eps0) / (exp(eps0) + 1),

        dP/dQ > exp(e)  iff  C - A + 1 - D < t,     t = (c + 1) (a - s) / (2a - 1),   s = exp(e) / (exp(e) + 1)
        delta_c = (a - exp(e) (1 - a)) Pr[B = j] - (exp(e) - 1) Pr[B > j],            j = c + 1 - ceil(t)

    P and Q are mirror images, so one order is enough. Another j would give less: t is written without cancellation,
    so that its rounding costs less than the slack.
    """
    from scipy import stats

    threshold = _first_gap(epsilon, epsilon0) / (1 + math.exp(epsilon)) / math.tanh(epsilon0 / 2)  # t / (c + 1)
    last = clones + 1 - np.ceil((clones + 1) * threshold)
    gain: NDArray[np.float64] = _first_gap(epsilon, epsilon0) * stats.binom.pmf(last, clones, 0.5)
    loss: NDArray[np.float64] = math.expm1(epsilon) * stats.binom.sf(last, clones, 0.5)
    return np.maximum(gain * (1 + _SLACK) - loss * (1 - _SLACK), 0.0)


def _first_gap(epsilon: float, epsilon0: float) -> float:
    """a - exp(e) (1 - a), the hockey stick of randomised response itself: (1 - exp(e - eps0)) / (1 + exp(-eps0))."""
    return -math.expm1(epsilon - epsilon0) / (1 + math.exp(-epsilon0))


def _replacement_cost(epsilon: float, *, reports: int, epsilon0: float, delta0: float) -> float:
    """What delta0 adds to delta: (exp(e) + 1) times the total variation between real and pure randomisers.

        paper, Thm 3.8:   (exp(e) + 1) (1 + exp(-eps0)/2) n delta0
        here:             (exp(e) + 1) max(1 + exp(-eps0)/2, 2 exp(-eps0)) n delta0

    The larger of two: the published constant, and one with a short proof. Write R0, R1 for the reports of the changed
    client and R for that of another. (i) R0, R1 lie within delta0 of some R0', R1' that are eps0-indistinguishable,
    with (1 - delta0) R0' <= R0, and so for R1' (Kairouz, Oh, Viswanath 2015). (ii) The clone G = exp(-eps0)
    (R0' + R1')/2 exceeds R by a mass of at most 2 exp(-eps0) delta0, so R lies that near to an R' >= G. (iii) With
    R0', R1', R' the reduction to (P, Q) is exact, and D(P||Q) <= D(P'||Q') + TV(P, P') + exp(e) TV(Q, Q').
    """
    per_report = max(1 + math.exp(-epsilon0) / 2, 2 * math.exp(-epsilon0))
    return (math.exp(epsilon) + 1) * per_report * reports * delta0 * (1 + _SLACK)


def _require(*, reports: int, epsilon0: float, delta0: float) -> None:
    if reports < 1:
        raise SideConditionError(f"reports = {reports}", "at least one report")
    if not 0 <= epsilon0 < math.inf:
        raise SideConditionError(f"epsilon0 = {epsilon0}", "a finite local epsilon, at least 0")
    if not 0 <= delta0 <= 1:
        raise SideConditionError(f"delta0 = {delta0}", "0 <= delta0 <= 1")
