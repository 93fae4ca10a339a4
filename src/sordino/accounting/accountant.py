"""The accountant: events in, epsilon out, and delta at an epsilon. Costs, calibration, ledgers and audits call it.

First bound: the dominating pairs that the events state, composed as privacy loss distributions (`pld`), rounded up
throughout, on a grid refined until epsilon moves by less than 1%; sums of Gaussians, single releases and repeated
(epsilon, delta) pairs need no grid. Second bound: Renyi divergences (RDP), where the events state them. The best of a
random number of trials has no other proof: there they are the first.

Google's dp_accounting is a third opinion, in the tests only: its RDP under replace-one forgets that the sensitivity is
2, a coarse grid of its PLD can triple a small epsilon, and the rounding of its transform, which is in no bound,
decides epsilon at a small delta (tests/accounting/test_accounting_library.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np

from sordino.accounting import renyi
from sordino.accounting.events import Entries, Relation, no_bound
from sordino.accounting.pld import convolutions, loss_grid
from sordino.accounting.pld.loss_grid import gaussian_epsilon
from sordino.accounting.pld.pairs import Array, Pair
from sordino.errors import PlanError

Method = Literal["pld", "gdp", "rdp", "none"]
VERSION = "sordino accountant 3"  # raised when a bound changes; 1 was dp-accounting 0.6.0
COARSE = 1e-3  # a grid to look around on
MOVE = 0.01  # refine until epsilon moves by less than this fraction
_ABSURD = 1e5  # next to no noise: beyond this mu, or loss, no grid is asked
_CURVE, _FARTHEST = 1e-6, 1e-12  # a whole curve: shuffled rounds spend a share of the one, the grid ends at the other
Answer = TypeVar("Answer")
_SPARE = 1e-7  # share of delta that may be lost beyond the grid


@dataclass(frozen=True)
class Epsilon:
    """An upper bound; `rdp` is the second opinion, `grid` the last discretisation used."""

    value: float
    method: Method
    grid: float | None = None
    rdp: float | None = None


def epsilon(entries: Entries, relation: Relation, delta: float) -> Epsilon:
    """The smallest epsilon we can prove at `delta` for all entries together, and a second opinion."""
    first = bound(entries, relation, delta)
    if first.method == "none":
        return first
    second = rdp_epsilon(entries, relation, delta)
    if second is not None and second < first.value:
        return Epsilon(second, "rdp", rdp=second)
    return replace(first, rdp=second)


def bound(
    entries: Entries, relation: Relation, delta: float, grid: float | None = None, rough: bool = False
) -> Epsilon:
    """The first opinion alone, on one given grid or, None, on one that is refined unless `rough`: for a search."""
    entries = tuple((event, count) for event, count in entries if count)
    if _unprotected(entries):
        return Epsilon(math.inf, "none")
    if _tuned(entries):
        return Epsilon(renyi.epsilon(_divergences(entries, relation), delta), "rdp")
    mu = gaussian_mu(entries, relation)
    if mu is not None:
        return Epsilon(gaussian_epsilon(mu, delta), "gdp")
    without = _without_grid(entries, relation, delta)
    ways = _alternatives(entries, relation, delta)
    if delta <= 0 or _absurd(entries, relation) or _repeated(entries) is not None:
        return Epsilon(without, "pld")
    found = [_on_grid(each, delta, grid, rough) for each in ways]
    value, last = min(found, key=lambda one: one[0])
    return Epsilon(min(value, without), "pld", last)


def epsilon_on(entries: Entries, relation: Relation, delta: float, grid: float) -> float:
    """Epsilon on one given grid, without a second opinion."""
    return bound(entries, relation, delta, grid).value


def delta_at(entries: Entries, relation: Relation, at: float) -> float:
    """The smallest delta we can prove at epsilon `at`."""
    return deltas_at(entries, relation, [at])[0]


def deltas_at(entries: Entries, relation: Relation, epsilons: Sequence[float]) -> list[float]:
    """delta at many epsilons, negative ones too: the curve that bounds every attack."""
    entries = tuple((event, count) for event, count in entries if count)
    if _unprotected(entries):
        return [1.0 for _ in epsilons]
    mu = gaussian_mu(entries, relation)
    if mu is not None:
        return [loss_grid.gaussian_delta(mu, at) for at in epsilons]
    pair = _repeated(entries)
    if pair is not None:
        return [loss_grid.repeated_pair_delta(*pair, at) for at in epsilons]
    sizes = np.abs(np.asarray(epsilons, dtype=np.float64))
    if _tuned(entries):
        curves = [renyi.deltas(_divergences(entries, relation), sizes)]
    else:
        curves = [_curve(each, sizes) for each in _alternatives(entries, relation, _CURVE)]
    order, curve = np.argsort(sizes), np.minimum.reduce(curves)
    curve[order] = np.minimum.accumulate(curve[order])  # delta falls, even where what bounds it does not
    # at a negative epsilon, by the other order of neighbours: delta(e) = 1 - exp(e) + exp(e) delta(-e)
    mirrored = -np.expm1(-sizes) + np.exp(-sizes) * curve
    return [float(d) for d in np.where(np.asarray(epsilons) < 0, mirrored, curve)]


def gaussian_mu(entries: Entries, relation: Relation) -> float | None:
    """mu of a sum of Gaussian releases, movement / noise multiplier each, or None if anything else is among them."""
    if not all(event.is_gaussian for event, _ in entries):
        return None
    return dominating_mu(entries, relation)


def dominating_mu(entries: Entries, relation: Relation) -> float:
    """mu of a Gaussian release that dominates all entries together; inf if an event knows none."""
    return math.hypot(*(math.sqrt(count) * event.mu(relation) for event, count in entries if count))


def _unprotected(entries: Entries) -> bool:
    return not all(event.protects for event, count in entries if count)


def _tuned(entries: Entries) -> bool:
    """Whether the best of many trials is among them: it has divergences, and no pair that dominates it."""
    return any(event.only_renyi for event, _ in entries)


# ---- without a grid -------------------------------------------------------------------------------------------------


def _without_grid(entries: Entries, relation: Relation, delta: float) -> float:
    """The least of: all losses added up, all (epsilon, delta) pairs composed, the Gaussians that dominate each."""
    pure = math.fsum(count * event.pure(relation) for event, count in entries)
    pair = _repeated(entries)
    repeated = math.inf if pair is None else loss_grid.repeated_pair(*pair, delta)
    return min(pure, repeated, _basic(entries, delta), gaussian_epsilon(dominating_mu(entries, relation), delta))


def _repeated(entries: Entries) -> tuple[tuple[float, float], int] | None:
    """One (epsilon, delta) pair so many times, if that is all there is."""
    (event, count), alone = entries[0], len(entries) == 1
    few = alone and count <= loss_grid.MOST_PAIRS
    return (event.proved_pair, count) if few and event.proved_pair is not None else None


def _basic(entries: Entries, delta: float) -> float:
    """Basic composition of (epsilon, delta) pairs: sums of both, if the deltas fit; else inf."""
    pairs = [(event.proved_pair, count) for event, count in entries]
    known = [(*pair, count) for pair, count in pairs if pair is not None]
    if len(known) < len(entries) or math.fsum(count * lost for _, lost, count in known) > delta:
        return math.inf
    return math.fsum(count * epsilon for epsilon, _, count in known)


def _absurd(entries: Entries, relation: Relation) -> bool:
    """Whether some release has next to no noise, so that a grid would say no more than the sum of all."""
    sizes = (min(event.mu(relation), event.pure(relation)) for event, _ in entries)
    pairs = (event.proved_pair[0] for event, _ in entries if event.proved_pair is not None)
    return any(_ABSURD < size < math.inf for size in (*sizes, *pairs))


# ---- on a grid ------------------------------------------------------------------------------------------------------

Composed = tuple[tuple[tuple[Pair, int], ...], ...]  # for each order of neighbours, pairs and how often


def _alternatives(entries: Entries, relation: Relation, delta: float) -> list[Composed]:
    """What dominates all entries together, in each order; several ways where an event has several."""
    share = max(delta, 0.0) / max(1, sum(count for event, count in entries if event.spends_delta))
    found = [(event.pairs(relation, share), count) for event, count in entries]
    for (event, _), (ways, _) in zip(entries, found, strict=True):
        if not ways:
            raise no_bound(event, relation)
    return [
        _ordered([(ways[min(k, len(ways) - 1)], n) for ways, n in found]) for k in range(max(len(w) for w, _ in found))
    ]


def _ordered(found: Sequence[tuple[Any, int]]) -> Composed:
    removed = tuple((orders.removed, count) for orders, count in found)
    added = tuple((orders.added, count) for orders, count in found)
    return (removed,) if removed == added else (removed, added)


def _on_grid(
    composed: Composed, delta: float, grid: float | None = None, rough: bool = False
) -> tuple[float, float | None]:
    """Epsilon on this grid; or, None, on one that is quartered until it falls by less than 1%: the least is kept."""
    if all(len(order) == 1 and order[0][1] == 1 for order in composed):
        return max(loss_grid.single_epsilon(order[0][0], delta) for order in composed), None
    tail = _tail(composed, delta)
    steps = [grid or loss_grid.fitting_step(order, tail) for order in composed]
    value = max(_asked(composed, steps, tail, lambda one: one.epsilon(delta)))
    while grid is None and not rough and 0 < value < math.inf:
        asked = [step / 4 for step in steps]
        steps = list(asked)
        finer = max(_asked(composed, steps, tail, lambda one: one.epsilon(delta)))
        gained, value = value - finer, min(value, finer)
        if gained < MOVE * value or steps != asked:
            break
    return value, max(steps)


def _tail(composed: Composed, delta: float) -> float:
    """The chance that one release may lose beyond the grid."""
    return max(delta * _SPARE / sum(count for _, count in composed[0]), 1e-300)


def _asked(
    composed: Composed, steps: list[float], tail: float, ask: Callable[[convolutions.Composition], Answer]
) -> list[Answer]:
    """The answer of each order on its own step; `steps` become coarser if they would be too many points."""
    while True:
        try:
            return [ask(_composition(order, step, tail)) for order, step in zip(composed, steps, strict=True)]
        except loss_grid.TooWideError as wide:
            steps[:] = [step * 1.1 * wide.factor for step in steps]


@lru_cache(maxsize=16)
def _composition(order: tuple[tuple[Pair, int], ...], step: float, tail: float) -> convolutions.Composition:
    return convolutions.Composition([(loss_grid.losses_on(pair, step, tail), count) for pair, count in order])


def _curve(composed: Composed, epsilons: Array) -> Array:
    """delta at each epsilon >= 0, of the worse order."""
    if all(len(order) == 1 and order[0][1] == 1 for order in composed):
        once: Array = np.maximum.reduce([loss_grid.single_deltas(order[0][0], epsilons) for order in composed])
        return once
    tail = _tail(composed, _FARTHEST)
    asked = [loss_grid.fitting_step(order, tail) / 4 for order in composed]
    steps = list(asked)
    worst: Array = np.maximum.reduce(_asked(composed, steps, tail, lambda one: one.deltas(epsilons)))
    return worst if steps == asked else np.minimum(worst, _narrow_curve(composed, asked, tail, epsilons))


def _narrow_curve(composed: Composed, steps: list[float], tail: float, epsilons: Array) -> Array:
    """The same on a grid that is too fine for some epsilons: exact at the others, a bound at all, 1 at worst."""
    try:
        orders = [_composition(order, step, tail) for order, step in zip(composed, steps, strict=True)]
        return np.asarray(np.maximum.reduce([one.deltas(epsilons, without_wide=True) for one in orders]))
    except loss_grid.TooWideError:
        return np.ones_like(epsilons)


# ---- second opinion -------------------------------------------------------------------------------------------------


def rdp_epsilon(entries: Entries, relation: Relation, delta: float) -> float | None:
    """The Renyi bound, or None where an event has none."""
    if any(count and event.renyi(relation) is None for event, count in entries):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        value = renyi.epsilon(_divergences(entries, relation), delta)
    return value if value < math.inf else None


def _divergences(entries: Entries, relation: Relation) -> Array:
    """Of all entries together; refused where an event has none."""
    total = np.zeros_like(renyi.ORDERS)
    for event, count in entries:
        one = event.renyi(relation) if count else total
        if one is None:
            found = f"no Renyi bound for {event} when neighbours {relation}, and tuning is proved by no other"
            raise PlanError("accounting", found, "Gaussian or Laplace noise, sampled as its relation allows, or less")
        with np.errstate(over="ignore", invalid="ignore"):
            total = total + count * one
    return total
