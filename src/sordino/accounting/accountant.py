"""Accountant: computes epsilon at a delta, and delta at an epsilon, from privacy events. Called by costs and ledgers.

The first bound composes the dominating pairs of the events as privacy loss distributions (`pld`). It is rounded up
throughout, on a grid refined until epsilon changes by less than 1%; sums of Gaussians, single releases and repeated
(epsilon, delta) pairs need no grid. The second bound uses Renyi divergences (RDP), if all events have them. For the
best of a random number of trials it is the only bound.

The tests compare with Google's dp_accounting, which is not used here: its RDP under replace-one ignores that the
sensitivity is 2, a coarse grid of its PLD can triple a small epsilon, and the rounding error of its transform, which
its bounds do not include, decides epsilon at a small delta (tests/accounting/test_accounting_library.py).

The last section checks that a delta is small against 1 / (number of units).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from sordino.accounting import pld, renyi
from sordino.accounting.events import Entries, Relation, no_bound
from sordino.accounting.pairs import Array, Pair
from sordino.accounting.rounding import atleast, upto
from sordino.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from sordino.plan import Plan

VERSION = "sordino accountant 3"  # raised when a bound changes; 1 was dp-accounting 0.6.0
MOVE = 0.01  # refine until epsilon moves by less than this fraction
_ABSURD = 1e5  # next to no noise: beyond this mu, or loss, no grid is asked
_CURVE, _FARTHEST = 1e-6, 1e-12  # a whole curve: shuffled rounds spend a share of the one, the grid ends at the other
_SPARE = 1e-7  # share of delta that may be lost beyond the grid
LARGEST_DEFAULT = 1e-3  # population^-1.1 is below it from 534 units on; for fewer it would promise little or nothing
Answer = TypeVar("Answer")
Composed = tuple[tuple[tuple[Pair, int], ...], ...]  # for each order of neighbours, pairs and how often


@dataclass(frozen=True)
class Epsilon:
    """Upper bound on epsilon, with its method, the last grid step, and the Renyi bound (`rdp`)."""

    value: float
    method: Literal["pld", "gdp", "rdp", "none"]
    grid: float | None = None
    rdp: float | None = None


def epsilon(entries: Entries, relation: Relation, delta: float) -> Epsilon:
    """Return the smallest upper bound on epsilon at `delta` for the composition of all entries."""
    first = bound(entries, relation, delta)
    if first.method == "none":
        return first
    second = rdp_epsilon(entries, relation, delta)
    if second is not None and second < first.value:
        return Epsilon(second, "rdp", rdp=second)
    return replace(first, rdp=second)


def epsilon_near(entries: Entries, relation: Relation, delta: float, distance: float) -> Epsilon:
    """Return epsilon at `delta` of releases that are within total variation `distance` of those in `entries`.

    With P', Q' for the releases in `entries` and P, Q for the true ones, delta(e) <= delta'(e) + (1 + exp(e)) distance.
    So this share of delta is reserved at an e slightly above the epsilon for distance 0, and the result is valid if the
    rest of delta gives an epsilon of at most e.
    """
    if not distance:
        return epsilon(entries, relation, delta)
    most = 1.01 * epsilon(entries, relation, delta).value + 0.1
    aside = (1.0 + math.exp(min(most, 700.0))) * distance
    left = math.nextafter(delta - aside * (1 + 1e-9), -1.0)
    if most > 700.0 or left <= 0:
        return Epsilon(math.inf, "none")
    found = epsilon(entries, relation, left)
    return found if found.value <= most else Epsilon(math.inf, "none")


def bound(
    entries: Entries, relation: Relation, delta: float, grid: float | None = None, rough: bool = False
) -> Epsilon:
    """Return the upper bound on epsilon by privacy loss distributions.

    `grid` is the grid step. By default the step is refined until epsilon changes by less than 1%, unless `rough`.
    """
    entries = tuple((event, count) for event, count in entries if count)
    if not all(event.protects for event, _ in entries):
        return Epsilon(math.inf, "none")
    if any(event.only_renyi for event, _ in entries):
        return Epsilon(renyi.epsilon(_divergences(entries, relation), delta), "rdp")
    mu = dominating_mu(entries, relation)
    if all(event.is_gaussian for event, _ in entries):
        return Epsilon(pld.gaussian_epsilon(mu, delta), "gdp")
    # without a grid: all losses added up, (epsilon, delta) pairs composed, the Gaussians that dominate each
    pure, proved = [event.pure(relation) for event, _ in entries], [event.proved_pair for event, _ in entries]
    known = [(*pair, count) for pair, (_, count) in zip(proved, entries, strict=True) if pair is not None]
    without = [math.fsum(count * loss for loss, (_, count) in zip(pure, entries, strict=True))]
    if len(known) == len(entries) and math.fsum(count * lost for _, lost, count in known) <= delta:
        without.append(math.fsum(count * own for own, _, count in known))
    repeated = _repeated_pair(entries) if known else None
    if repeated is not None:
        without.append(pld.repeated_pair(*repeated, delta))
    without.append(pld.gaussian_epsilon(mu, delta))
    # next to no noise: a grid would say no more than the sum of all
    sizes = [min(event.mu(relation), loss) for (event, _), loss in zip(entries, pure, strict=True)]
    absurd = any(_ABSURD < size < math.inf for size in (*sizes, *(own for own, _, _ in known)))
    ways = _alternatives(entries, relation, delta)
    if delta <= 0 or absurd or repeated is not None:
        return Epsilon(min(without), "pld")
    value, last = min((_on_grid(each, delta, grid, rough) for each in ways), key=lambda one: one[0])
    return Epsilon(min(value, *without), "pld", last)


def check_provable(plan: Plan, delta: float, deltas: tuple[float, ...] = ()) -> None:
    """Refuse a plan with an event for which the accountant has no bound, before the plan runs."""
    for line in plan.forecast.lines:
        for own in {deltas[silo] for silo in line.silos or range(len(deltas))} if deltas else {delta}:
            bound(line.entries, line.relation, own)


def delta_at(entries: Entries, relation: Relation, at: float) -> float:
    """Return the smallest upper bound on delta at epsilon `at`."""
    return deltas_at(entries, relation, [at])[0]


def deltas_at(entries: Entries, relation: Relation, epsilons: Sequence[float]) -> list[float]:
    """Return the privacy profile: the smallest upper bound on delta at each epsilon, which may be negative."""
    entries = tuple((event, count) for event, count in entries if count)
    if not all(event.protects for event, _ in entries):
        return [1.0 for _ in epsilons]
    mu = gaussian_mu(entries, relation)
    if mu is not None:
        return [pld.gaussian_delta(mu, at) for at in epsilons]
    pair = _repeated_pair(entries)
    if pair is not None:
        return [pld.repeated_pair_delta(*pair, at) for at in epsilons]
    sizes = np.abs(np.asarray(epsilons, dtype=np.float64))
    if any(event.only_renyi for event, _ in entries):
        curves = [renyi.deltas(_divergences(entries, relation), sizes)]
    else:
        curves = [_curve(each, sizes) for each in _alternatives(entries, relation, _CURVE)]
    order, curve = np.argsort(sizes), np.minimum.reduce(curves)
    curve[order] = np.minimum.accumulate(curve[order])  # delta falls, even where what bounds it does not
    # at a negative epsilon, by the other order of neighbours: delta(e) = 1 - exp(e) + exp(e) delta(-e)
    mirrored = -np.expm1(-sizes) + np.exp(-sizes) * curve
    return [float(d) for d in np.where(np.asarray(epsilons) < 0, mirrored, curve)]


def gaussian_mu(entries: Entries, relation: Relation) -> float | None:
    """Return mu of the composition of Gaussian releases; None if an entry is no Gaussian release."""
    return dominating_mu(entries, relation) if all(event.is_gaussian for event, _ in entries) else None


def dominating_mu(entries: Entries, relation: Relation) -> float:
    """Return mu of one Gaussian release that dominates all entries together; inf if an event has no mu."""
    return math.hypot(*(math.sqrt(count) * event.mu(relation) for event, count in entries if count))


def _repeated_pair(entries: Entries) -> tuple[tuple[float, float], int] | None:
    """Return ((epsilon, delta), count) if the entries are one repeated event with only such a guarantee."""
    count, pair = entries[0][1], entries[0][0].proved_pair
    return (pair, count) if len(entries) == 1 and count <= pld.MOST_PAIRS and pair is not None else None


# ---- on a grid ------------------------------------------------------------------------------------------------------


def _alternatives(entries: Entries, relation: Relation, delta: float) -> list[Composed]:
    """Return several lists of dominating pairs. Each list covers all events, and alone gives a valid bound."""
    share = max(delta, 0.0) / max(1, sum(count for event, count in entries if event.spends_delta))
    found = [(event.pairs(relation, share), count) for event, count in entries]
    for (event, _), (ways, _) in zip(entries, found, strict=True):
        if not ways:
            raise no_bound(event, relation)
    made: list[Composed] = []
    for k in range(max(len(ways) for ways, _ in found)):
        orders = [(ways[min(k, len(ways) - 1)], count) for ways, count in found]
        removed = tuple((pair, count) for one, count in orders for pair in one.removed.factors or (one.removed,))
        added = tuple((pair, count) for one, count in orders for pair in one.added.factors or (one.added,))
        made.append((removed,) if removed == added else (removed, added))
    return made


@lru_cache(maxsize=256)
def _on_grid(composed: Composed, delta: float, grid: float | None, rough: bool) -> tuple[float, float | None]:
    """Return (epsilon, grid step) for the step `grid`; by default steps are quartered until epsilon falls by < 1%."""
    if all(len(order) == 1 and order[0][1] == 1 for order in composed):
        return max(pld.single_epsilon(order[0][0], delta) for order in composed), None
    tail = max(delta * _SPARE / sum(count for _, count in composed[0]), 1e-300)
    steps = [grid or pld.fitting_step(order, tail) for order in composed]
    value = max(_on_steps(composed, steps, tail, lambda one: one.epsilon(delta)))
    while grid is None and not rough and 0 < value < math.inf:
        asked = [step / 4 for step in steps]
        steps = list(asked)
        finer = max(_on_steps(composed, steps, tail, lambda one: one.epsilon(delta)))
        gained, value = value - finer, min(value, finer)
        if gained < MOVE * value or steps != asked:
            break
    return value, max(steps)


def _on_steps(
    composed: Composed, steps: list[float], tail: float, ask: Callable[[pld.Composition], Answer]
) -> list[Answer]:
    """Return `ask(composition)` for both orders of neighbours, add and remove.

    `steps` are the grid spacings of the losses, made coarser in place if a grid has too many points.
    """
    while True:
        try:
            return [ask(_composition(order, step, tail)) for order, step in zip(composed, steps, strict=True)]
        except pld.TooWideError as wide:
            steps[:] = [step * 1.1 * wide.factor for step in steps]


@lru_cache(maxsize=16)
def _composition(order: tuple[tuple[Pair, int], ...], step: float, tail: float) -> pld.Composition:
    return pld.Composition([(pld.losses_on(pair, step, tail), count) for pair, count in order])


def _curve(composed: Composed, epsilons: Array) -> Array:
    """Return delta at each epsilon >= 0 for the worse order of neighbours, by the finest grid that is not too large."""
    if all(len(order) == 1 and order[0][1] == 1 for order in composed):
        return np.asarray(np.maximum.reduce([pld.single_deltas(order[0][0], epsilons) for order in composed]))
    tail = max(_FARTHEST * _SPARE / sum(count for _, count in composed[0]), 1e-300)
    asked = [pld.fitting_step(order, tail) / 4 for order in composed]
    steps = list(asked)
    worst: Array = np.maximum.reduce(_on_steps(composed, steps, tail, lambda one: one.deltas(epsilons)))
    if steps == asked:
        return worst
    try:
        orders = [_composition(order, step, tail) for order, step in zip(composed, asked, strict=True)]
        fine = np.maximum.reduce([one.deltas(epsilons, without_wide=True) for one in orders])
    except pld.TooWideError:
        return worst
    return np.asarray(np.minimum(worst, fine))


# ---- second bound ---------------------------------------------------------------------------------------------------


def rdp_epsilon(entries: Entries, relation: Relation, delta: float) -> float | None:
    """Return the Renyi bound on epsilon; None if an event has no Renyi divergences."""
    if any(count and event.renyi(relation) is None for event, count in entries):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        value = renyi.epsilon(_divergences(entries, relation), delta)
    return value if value < math.inf else None


def _divergences(entries: Entries, relation: Relation) -> Array:
    total = np.zeros_like(renyi.ORDERS)
    for event, count in entries:
        one = event.renyi(relation) if count else total
        if one is None:
            found = f"no Renyi divergences for {event} under {relation} neighbours, which private tuning needs"
            needed = "Gaussian or Laplace noise, with a sampler that has a Renyi bound"
            raise PlanError("accounting", found, needed, "tune without --private, or change noise or sampler")
        with np.errstate(over="ignore", invalid="ignore"):
            total = total + count * one
    return total


# ---- checks of delta -------------------------------------------------------------------------------------------------


def largest_delta(population: int) -> float:
    """Return population^-1.1, the largest delta that is accepted without allow_large_delta."""
    return float(population**-1.1) if population > 1 else 1e-5


def default_delta(population: int) -> float:
    """Return the default delta, min(population^-1.1, 1e-3); for five units, population^-1.1 = 0.17 protects little."""
    return min(largest_delta(population), LARGEST_DEFAULT)


def check_delta(delta: float, population: int, override: bool) -> None:
    """Refuse a delta outside [0, 1) or, unless `override`, above population^-1.1."""
    if not 0 <= delta < 1:
        raise ConfigError(f"delta = {delta}", "a number in [0, 1)", f"use {atleast(default_delta(population))}")
    if delta > largest_delta(population) * (1 + 1e-9) and not override:
        limit = f"at most population^-1.1 = {atleast(largest_delta(population))}"
        raise ConfigError(f"delta = {delta}", limit, "lower it, or set allow_large_delta = true under [privacy]")


def check_deltas(plan: Plan, delta: float, deltas: tuple[float, ...], override: bool) -> None:
    """Apply `check_delta` to the one delta of a plan, or to each silo's delta and number of records."""
    if not deltas:
        return check_delta(delta, plan.units, override)
    if len(deltas) != plan.clients.population:
        found = f"{len(deltas)} deltas for {plan.clients.population} silos"
        raise ConfigError(found, "one delta per silo, in the silos' order", "pass as many deltas as silos")
    for silo, own in enumerate(deltas):
        check_delta(own, plan.units if plan.local.reads is None else plan.local.reads.size(silo), override)


def silo_deltas(plan: Plan) -> tuple[float, ...]:
    """Return the default delta of each silo if the unit is a record and silos differ in size; otherwise nothing."""
    reads = plan.local.reads
    return () if reads is None or len(set(reads.sizes)) < 2 else tuple(default_delta(size) for size in reads.sizes)


def few(population: int) -> bool:
    """Return whether a population is so small that population^-1.1 exceeds the largest default delta."""
    return largest_delta(population) > LARGEST_DEFAULT


def meaning_of_delta(delta: float, population: int, unit: str) -> str:
    """Return a sentence on the meaning of a delta in a small population."""
    chance, expected = upto(delta, 2), upto(delta * population, 2)
    return (
        f"delta {chance} for {population} {unit}s: with probability up to {chance} anything about one {unit} may be "
        f"revealed; with {population} {unit}s that is up to {expected} {unit}s in expectation"
    )
