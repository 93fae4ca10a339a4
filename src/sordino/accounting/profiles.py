"""Privacy profiles of a cost: bounds on membership tests, GDP mu, and curves. Called by certificates and reports.

delta(e) is the least delta at epsilon e.

Ceilings   Any test that tells two neighbours apart with false-positive rate a has true-positive rate at most
           min over e of exp(e) a + delta(e)                        (Wasserman, Zhou 2010; Kairouz et al. 2015).
mu         The least mu with delta(e) <= delta_mu(e) + 1e-10 at every e >= 0, for a Gaussian release of sensitivity mu,
           delta_mu(e) = Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu)                (Dong, Roth, Su 2022, Corollary 1)
regret     The least k with f(a + k) - k <= f_mu(a) at every a, where f(a) is the least false-negative rate of a test
           with false-positive rate a: the loss by stating mu instead of the whole curve        (Kaissis et al. 2024)
by participations   delta(e) = sum_k Bin(T, q)(k) delta_k(e) holds on average over random cohorts that the adversary
           sees. Once cohorts are drawn, the adversary knows k, and delta_k holds for a client in k of T rounds.

Guarantee: every number is rounded up, so each stated bound holds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import bdtrc, ndtr, ndtri

from sordino.accounting import accountant
from sordino.accounting.composition import Line, binomial_quantile
from sordino.accounting.events import Event
from sordino.accounting.pairs import Array
from sordino.accounting.rounding import rounded_up, upto, upward

DELTAS = (1e-5, 1e-6)  # at which epsilon is stated beside the certificate's own
EPSILONS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0)  # at which delta is stated
LEFT = 1e-10  # probability that mu does not cover
TAILS = (1e-2, 1e-6)  # probabilities that a client is in more rounds than are stated
_NODES, _FARTHEST = 401, 512.0  # epsilons at which the curve is compared, and the largest of them
_KINDS = 8  # silos that differ: for more, computing mu takes too long


@dataclass(frozen=True)
class Ceiling:
    """Upper bounds on true-positive rate and area under the ROC curve of every membership test."""

    true_positives: float  # at 1% false positives
    auc: float


def ceiling(line: Line, at: float = 0.01) -> Ceiling:
    """Return bounds on all membership tests of one adversary; both are 1 if there is no guarantee."""
    if not protects(line):
        return Ceiling(1.0, 1.0)
    mu = accountant.gaussian_mu(line.entries, line.relation)
    if mu is not None:
        return Ceiling(power(mu, at), _phi(mu / math.sqrt(2)))
    found, above = _from_curve(line, at), accountant.dominating_mu(line.entries, line.relation)
    return Ceiling(min(found.true_positives, power(above, at)), min(found.auc, _phi(above / math.sqrt(2))))


def power(mu: float, at: float) -> float:
    """Return Phi(Phi^-1(at) + mu), the largest true-positive rate at false-positive rate `at` under mu-GDP."""
    return _phi(float(ndtri(at)) + mu)


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _from_curve(line: Line, at: float) -> Ceiling:
    epsilons = np.sinh(np.linspace(-6, 6, 3001)) / 10  # within 20 of 0, and close together where epsilon is small
    deltas = np.asarray(accountant.deltas_at(line.entries, line.relation, epsilons.tolist()))
    grid = np.union1d(np.geomspace(1e-6, 1, 600), np.linspace(0, 1, 600))
    rates = true_positives(grid, epsilons, deltas)
    area = float(np.sum(np.diff(grid) * rates[1:]))  # the curve rises, so right ends give an upper sum
    return Ceiling(float(true_positives(np.asarray([at]), epsilons, deltas)[0]), min(1.0, area))


def true_positives(false_positives: Array, epsilons: Array, deltas: Array) -> Array:
    """Return the largest true-positive rate, min over e of exp(e) a + delta(e), at each false-positive rate a."""
    bounds = np.exp(epsilons)[None, :] * false_positives[:, None] + deltas[None, :]
    return np.asarray(np.minimum(1.0, bounds.min(axis=1)), dtype=np.float64)


def protects(line: Line) -> bool:
    """Return whether all events of a cost line have a finite epsilon."""
    return all(event.protects for event, count in line.entries if count)


@lru_cache(maxsize=256)
def gaussian(line: Line) -> dict[str, float] | None:
    """Return mu of Gaussian DP, its regret, and the delta that mu does not cover; None if no mu is found."""
    if not protects(line):
        return None
    exact = accountant.gaussian_mu(line.entries, line.relation)
    if exact is not None:
        return {"mu": _up(exact), "regret": 0.0, "left": 0.0}
    asked = [2.0**k for k in range(-6, 10)]
    found = accountant.deltas_at(line.entries, line.relation, asked)
    end = next((e for e, d in zip(asked, found, strict=True) if d <= LEFT), None)
    if end is None:
        return None
    nodes = end * np.linspace(0.0, 1.0, _NODES) ** 1.5  # from 0 to where delta is below `LEFT`, close together near 0
    deltas = np.asarray(accountant.deltas_at(line.entries, line.relation, nodes.tolist()))
    mu = least_mu(nodes, deltas)
    return None if mu is None else {"mu": mu, "regret": regret(nodes, deltas, mu), "left": LEFT}


def least_mu(nodes: Array, deltas: Array) -> float | None:
    """Return the least mu, in steps of 1e-4, with delta_mu(e) + LEFT >= delta(e); `deltas` are at epsilons `nodes`."""
    low, high = 0.0, 1.0
    while not dominates(high, nodes, deltas):
        low, high = high, 2 * high
        if high > _FARTHEST:
            return None
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if dominates(middle, nodes, deltas) else (middle, high)
    rounded = _up(high)
    return rounded if dominates(rounded, nodes, deltas) else None


def dominates(mu: float, nodes: Array, deltas: Array) -> bool:
    """Return whether delta(e) <= delta_mu(e) + LEFT for all e; `deltas` are known at epsilons `nodes`.

    Both curves are convex in x = exp(e). Between two nodes delta lies below its chord, and delta_mu above its tangents
    at both nodes, so it is enough to compare the chord with the point where the tangents cross.
    """
    x, slope, first = np.exp(nodes), -ndtr(-mu / 2 - nodes / mu), ndtr(mu / 2 - nodes / mu)
    # delta_mu, rounded down where the difference is lost in rounding
    above = np.maximum(first - x * ndtr(-mu / 2 - nodes / mu) - 1e-14 * first, 0.0) + LEFT
    if np.any(deltas > above):
        return False
    bend = np.diff(slope)
    safe = np.where(bend > 0, bend, 1.0)
    cross = np.where(bend > 0, (above[:-1] - above[1:] + slope[1:] * x[1:] - slope[:-1] * x[:-1]) / safe, x[1:])
    cross = np.clip(cross, x[:-1], x[1:])
    floor = np.maximum(above[:-1] + slope[:-1] * (cross - x[:-1]), above[1:] + slope[1:] * (cross - x[1:]))
    chord = deltas[:-1] + np.diff(deltas) * (cross - x[:-1]) / np.diff(x)
    return bool(np.all(chord <= floor))


def regret(nodes: Array, deltas: Array, mu: float) -> float:
    """Return the regret of stating mu: the least k with f(a + k) - k <= f_mu(a), for the trade-off curves f, f_mu."""
    nodes, deltas = nodes[::2], deltas[::2]
    false = np.union1d(np.geomspace(1e-12, 0.5, 300), 1 - np.geomspace(1e-12, 0.5, 300))
    both = np.concatenate([-nodes[::-1], nodes])
    mirrored = -np.expm1(-nodes[::-1]) + np.exp(-nodes[::-1]) * deltas[::-1]
    ours = 1 - true_positives(false, both, np.concatenate([mirrored, deltas]))
    theirs = ndtr(ndtri(1 - false) - mu)
    low, high = 0.0, 1.0
    while high - low > 1e-5:
        k = (low + high) / 2
        holds = bool(np.all(np.interp(false + k, false, ours, right=0.0) - k <= theirs))
        low, high = (low, k) if holds else (k, high)
    return _up(high)


def _up(value: float) -> float:
    return float(math.ceil(value * 1e4 - 1e-9) / 1e4)


def summary(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the privacy profile that holds for every silo: at each point the largest value over all silos.

    With more than 8 kinds of silos, mu is left out.
    """
    kinds = sorted({replace(line, adversary="models", silos=()) for line in lines}, key=repr)
    found = [copy.deepcopy(points(line)) for line in kinds]
    gdp = [gaussian(line) for line in kinds] if len(kinds) <= _KINDS else [None]
    return {
        "other_deltas": _worst([one["other_deltas"] for one in found], "epsilon"),
        "gdp": None if None in gdp else max((one for one in gdp if one is not None), key=lambda one: one["mu"]),
        "curve": _worst([one["curve"] for one in found], "delta"),
    }


def _worst(found: list[list[dict[str, Any]]], figure: str) -> list[dict[str, Any]]:
    if not all(found):
        return []
    none = next((points for points in found if any(one[figure] is None for one in points)), None)
    return none or [max(points, key=lambda one: one[figure]) for points in zip(*found, strict=True)]


@lru_cache(maxsize=256)
def points(line: Line) -> dict[str, Any]:
    """Return epsilon at the deltas `DELTAS`, and delta at the epsilons `EPSILONS`; empty if nothing is protected."""
    if not protects(line):
        return {"other_deltas": [], "curve": []}
    found = [(delta, accountant.epsilon(line.entries, line.relation, delta).value) for delta in DELTAS]
    deltas = accountant.deltas_at(line.entries, line.relation, EPSILONS)
    return {
        "other_deltas": [{"delta": delta, "epsilon": upward(value)} for delta, value in found],
        "curve": [{"epsilon": e, "delta": rounded_up(d)} for e, d in zip(EPSILONS, deltas, strict=True)],
    }


def by_participations(line: Line, delta: float) -> list[dict[str, Any]]:
    """Return epsilon of a client in k rounds, for three values of k; empty unless cohorts are random and visible."""
    sampled = [(event, count) for event, count in line.entries if event.seen_sampling is not None]
    if len(sampled) != 1 or sampled[0][0].seen_sampling is None:
        return []
    (event, count), (rate, _) = sampled[0], sampled[0][0].seen_sampling
    ks = {math.ceil(count * rate - 1e-9), *(binomial_quantile(count, rate, tail) for tail in TAILS)}
    return [_in_k_rounds(line, event, count, k, delta) for k in sorted(ks)]


@lru_cache(maxsize=256)
def _in_k_rounds(line: Line, event: Event, count: int, k: int, delta: float) -> dict[str, Any]:
    assert event.seen_sampling is not None
    rate, inner = event.seen_sampling
    rest = tuple((each, n) for each, n in line.entries if each != event)
    found = accountant.epsilon(((inner, k), *rest), line.relation, delta)
    more = rounded_up(float(bdtrc(k, count, rate))) if k < count else 0.0
    return {"participations": k, "chance_of_more": more, "epsilon": upward(found.value)}


def participations_in_words(found: list[dict[str, Any]]) -> str:
    """Format the result of `by_participations` as one clause."""
    costs = [
        f"{'without limit' if one['epsilon'] is None else upto(one['epsilon'], 4)} in {one['participations']} "
        f"(chance of more {upto(one['chance_of_more'], 2)})"
        for one in found
    ]
    return f"averaged over the random cohorts; by the number of rounds that a client is in: {', '.join(costs)}"
