"""Events in, epsilon out. The only file that imports dp_accounting (Google, pinned).

First opinion: privacy loss distributions (PLD), pessimistic, on a grid refined until epsilon moves by less than 1%;
sums of Gaussians need no grid (closed form). Second opinion: Renyi (RDP), where the library has the event.

Defects of the library that are wrapped here, each pinned by a test in tests/privacy/test_accounting.py:
its RDP under replace-one forgets that the movement is 2 (we pass half the multiplier); a coarse grid can triple a
small epsilon (we refine); `use_connect_dots=False` underestimates for mixtures (never passed); its "failed to
converge" lines are harmless (an order is dropped) and silenced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
from absl import logging as absl_logging

from sordino.errors import PlanError
from sordino.parts.events import (
    Approximate,
    CappedPoisson,
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Relation,
    Shuffled,
    Tuned,
    Unprotected,
)
from sordino.privacy import gridless, shuffle, without_replacement
from sordino.privacy.gridless import Entries, gaussian_epsilon, shrunk
from sordino.privacy.light import light_scipy

with light_scipy():
    from dp_accounting import dp_event as de
    from dp_accounting import rdp
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as plds
    from dp_accounting.privacy_accountant import NeighboringRelation, UnsupportedEventError

absl_logging.set_verbosity(absl_logging.ERROR)

Method = Literal["pld", "gdp", "rdp", "none"]
VERSION = f"dp-accounting {version('dp-accounting')}"
COARSE, FINE = 1e-3, 1e-6  # first and last grid
_HUGE = 300.0  # a Laplace loss beyond which the library overflows, and its pure epsilon is the answer
_CURVE = 1e-6  # a whole curve is refined, and shuffled rounds are amplified, at this delta
MOVE = 0.01  # refine until epsilon moves by less than this fraction
_NEIGHBOURS = {
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": NeighboringRelation.REPLACE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
}


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
    if first.method in ("none", "rdp"):
        return first
    second = rdp_epsilon(entries, relation, delta)
    if second is not None and second < first.value:
        return Epsilon(second, "rdp", rdp=second)
    return replace(first, rdp=second)


def bound(entries: Entries, relation: Relation, delta: float, grid: float | None = None) -> Epsilon:
    """The first opinion alone, on one given grid or, None, on a refined one: what a search asks for."""
    if _unprotected(entries):
        return Epsilon(math.inf, "none")
    if any(isinstance(event, Tuned) for event, _ in entries):
        return _tuned(entries, relation, delta)
    if any(isinstance(event, Shuffled) for event, _ in entries):
        amplified = _unshuffled(entries, relation, delta) if delta > 0 else local(entries)
        both = (bound(each, relation, delta, grid) for each in (amplified, local(entries)))
        return min(both, key=lambda found: found.value)
    mu = gaussian_mu(entries, relation)
    if mu is not None:
        return Epsilon(gaussian_epsilon(mu, delta), "gdp")
    (event, count), alone = entries[0], len(entries) == 1
    if alone and isinstance(event, Approximate):
        return Epsilon(gridless.repeated_pair(event, count, delta), "pld")
    without = min(gridless.pure_epsilon(entries, relation), gridless.basic_epsilon(entries, delta))
    if delta <= 0 or (math.isfinite(without) and max(gridless.losses(entries, relation), default=0.0) > _HUGE):
        return Epsilon(without, "pld")
    value, last = _on_grid(entries, relation, grid, lambda pld: float(pld.get_epsilon_for_delta(delta)))
    return Epsilon(min(value, without), "pld", last)


def epsilon_on(entries: Entries, relation: Relation, delta: float, grid: float) -> float:
    """Epsilon on one given grid, without a second opinion: the inner loop of a calibration."""
    return bound(entries, relation, delta, grid).value


def delta_at(entries: Entries, relation: Relation, at: float) -> float:
    """The smallest delta we can prove at epsilon `at`."""
    shuffled = any(isinstance(event, Shuffled) for event, _ in entries)
    if shuffled or _unprotected(entries) or gaussian_mu(entries, relation) is not None:
        return deltas_at(entries, relation, [at])[0]
    return _on_grid(entries, relation, None, lambda pld: float(pld.get_delta_for_epsilon(at)))[0]


def deltas_at(entries: Entries, relation: Relation, epsilons: Sequence[float]) -> list[float]:
    """delta at many epsilons, negative ones too: the curve that bounds every attack."""
    if _unprotected(entries):
        return [1.0 for _ in epsilons]
    if any(isinstance(event, Shuffled) for event, _ in entries):
        amplified = deltas_at(_unshuffled(entries, relation, _CURVE), relation, epsilons)
        return [min(pair) for pair in zip(amplified, deltas_at(local(entries), relation, epsilons), strict=True)]
    mu = gaussian_mu(entries, relation)
    if mu is not None:
        return [gridless.gaussian_delta(mu, at) for at in epsilons]
    (event, count), alone = entries[0], len(entries) == 1
    if alone and isinstance(event, Approximate):
        return [gridless.repeated_pair_delta(event, count, at) for at in epsilons]
    _, grid = _on_grid(entries, relation, None, lambda pld: float(pld.get_epsilon_for_delta(_CURVE)))
    curve = _composed(tuple(entries), relation, grid).get_delta_for_epsilon(np.asarray(epsilons))
    return [float(value) for value in curve]


def group_epsilon(entries: Entries, relation: Relation, delta: float, size: int) -> float:
    """Epsilon for a group of `size` units that change together: size * mu in GDP (Dong, Roth, Su 2022, Theorem 2.14).

    Only for sums of Gaussian releases; the classic exponential formula is useless beyond a group of three.
    """
    mu = gaussian_mu(entries, relation)
    if mu is None:
        raise PlanError("group privacy", "releases that are not plain Gaussian", "Gaussian noise without sampling")
    return gaussian_epsilon(size * mu, delta)


def gaussian_mu(entries: Entries, relation: Relation) -> float | None:
    """mu of a sum of Gaussian releases, movement / multiplier each, or None if anything else is among them."""
    noises = [(event, count) for event, count in entries if isinstance(event, GaussianNoise)]
    if len(noises) < len(entries):
        return None
    return math.sqrt(sum((count / shrunk(noise.multiplier, relation) ** 2 for noise, count in noises), 0.0))


def _unprotected(entries: Entries) -> bool:
    inner = [event.event if isinstance(event, Tuned) else event for event, count in entries if count]
    return any(isinstance(event, Unprotected) for event in inner)


def _tuned(entries: Entries, relation: Relation, delta: float) -> Epsilon:
    """Repeat-and-select has a Renyi bound only, and only of what has one itself."""
    found = rdp_epsilon(entries, relation, delta)
    if found is None:
        events = [event for event, _ in entries]
        raise PlanError("accounting", f"no Renyi bound for {events} when neighbours {relation}", "a simpler event")
    return Epsilon(found, "rdp", rdp=found)


def local(entries: Entries) -> list[tuple[Event, int]]:
    """Shuffled rounds as if every message were seen: shuffling is a post-processing of that."""
    return [(event.event if isinstance(event, Shuffled) else event, count) for event, count in entries]


def _unshuffled(entries: Entries, relation: Relation, delta: float) -> list[tuple[Event, int]]:
    """Shuffled rounds as the (epsilon, delta) that amplification proves for each, at an even share of delta.

    Few rounds, which composing costs no less than adding up, spend all of delta on this; many spend half.
    """
    rounds = sum(count for event, count in entries if isinstance(event, Shuffled))
    few = len(entries) == 1 and rounds <= 2 * math.log(2 / max(delta, 1e-300))
    share = delta / max(rounds, 1) / (1 if few else 2)
    return [(_amplified(e, relation, share) if isinstance(e, Shuffled) else e, count) for e, count in entries]


@lru_cache(maxsize=256)
def _amplified(event: Shuffled, relation: Relation, delta: float) -> Event:
    """The best of several splits of one message's noise into (epsilon0, delta0); replace-one only, as its theorem."""
    if relation != "replace_one":
        raise PlanError("accounting", f"no accountant for {event} when neighbours {relation}", "replace_one")
    best, amplified = math.inf, False
    for e, d in _local_pairs(event.event, relation, delta, event.reports):
        found = shuffle.shuffled_epsilon(reports=event.reports, epsilon0=e, delta=delta, delta0=d)
        if amplified and found > best:
            break  # a smaller delta0 only makes it worse from here on
        best, amplified = min(best, found), amplified or found < 0.99 * e
    return Approximate(best, delta)


def _local_pairs(event: Event, relation: Relation, delta: float, reports: int) -> list[tuple[float, float]]:
    """One message's own (epsilon0, delta0): a Gaussian has one for every delta0, tried from the largest on."""
    match event:
        case Approximate(eps, own):
            return [(eps, own)]
        case LaplaceNoise(b):
            return [(1 / shrunk(b, relation), 0.0)]
        case GaussianNoise(z):
            mu = 1 / shrunk(z, relation)
            return [(gaussian_epsilon(mu, own), own) for own in delta / reports * np.geomspace(0.1, 1e-6, 8)]
    raise PlanError("accounting", f"no amplification by shuffling for {event}", "gaussian or laplace noise")


def _on_grid(
    entries: Entries, relation: Relation, grid: float | None, ask: Callable[[Any], float]
) -> tuple[float, float]:
    """The answer on this grid; or, None, quartered until it falls by less than 1%: the least of them is kept."""
    step = (grid or COARSE) * _widening(entries, relation)
    value = ask(_composed(tuple(entries), relation, step))
    while grid is None and step > FINE and value > 0 and math.isfinite(value):
        finer = ask(_composed(tuple(entries), relation, step / 4))
        step, gained, value = step / 4, value - finer, min(value, finer)
        if gained < MOVE * value:
            break
    return value, step


def _widening(entries: Entries, relation: Relation) -> float:
    """1, or more where there is next to no noise: losses in the hundreds need no thousandths."""
    return max([1.0, *(loss / 25 for loss in gridless.losses(entries, relation))])


@lru_cache(maxsize=32)
def _composed(entries: tuple[tuple[Event, int], ...], relation: Relation, grid: float) -> Any:
    pld = plds.identity(value_discretization_interval=grid)
    for event, count in entries:
        if count:
            pld = pld.compose(_pld(event, count, relation, grid))
    return pld


def _pld(event: Event, count: int, relation: Relation, grid: float) -> Any:
    """PLD of `count` times one event."""
    if isinstance(event, GaussianNoise):
        return _once(GaussianNoise(event.multiplier / math.sqrt(count)), relation, grid)
    return _once(event, relation, grid).self_compose(count)


@lru_cache(maxsize=16)
def _once(event: Event, relation: Relation, grid: float) -> Any:
    match event:
        case GaussianNoise(z):
            return plds.from_gaussian_mechanism(shrunk(z, relation), value_discretization_interval=grid)
        case LaplaceNoise(b):
            return plds.from_laplace_mechanism(shrunk(b, relation), value_discretization_interval=grid)
        case PoissonSampled(rate, GaussianNoise(z)):
            return plds.from_gaussian_mechanism(
                z, value_discretization_interval=grid, sampling_prob=rate, neighboring_relation=_NEIGHBOURS[relation]
            )
        case PoissonSampled(rate, LaplaceNoise(b)) if relation != "replace_one":
            return plds.from_laplace_mechanism(b, value_discretization_interval=grid, sampling_prob=rate)
        case CappedPoisson(rate, population, cap, GaussianNoise(z)):
            return _capped(rate, population, cap, z, relation, grid)
        case FixedSampled(population, cohort, GaussianNoise(z)) if relation == "replace_one":
            return _fixed(cohort / population, z, grid)
        case Approximate(eps, delta):
            return plds.from_privacy_parameters(_parameters(eps, delta), value_discretization_interval=grid)
    raise PlanError(
        "accounting", f"no accountant for {event} when neighbours {relation}", "an event with a proved bound"
    )


def _parameters(eps: float, delta: float) -> Any:
    from dp_accounting.pld import common

    return common.DifferentialPrivacyParameters(eps, delta)


def _capped(rate: float, population: int, cap: int, z: float, relation: Relation, grid: float) -> Any:
    return plds.from_truncated_subsampled_gaussian_mechanism(
        dataset_size=population,
        sampling_probability=rate,
        truncated_batch_size=cap,
        noise_multiplier=z,
        value_discretization_interval=grid,
        neighboring_relation=_NEIGHBOURS[relation],
    )


def _fixed(rate: float, z: float, grid: float) -> Any:
    """Fixed-size sampling: connect the dots of the amplified hockey-stick curve (without_replacement.py)."""
    inner = 2 / z**2 + 20 / z  # mu^2 / 2 + 10 mu, mu = 2 / z
    outer = math.log1p(rate * math.expm1(inner)) if inner < 30 else max(inner + math.log(rate), 0.0) + 1
    edge = math.ceil(outer / grid) + 1
    deltas = without_replacement.hockey_stick(
        np.arange(-edge, edge + 1, dtype=np.float64) * np.float64(grid), rate=rate, multiplier=z
    )
    return plds.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, -edge, edge, deltas)
    )


def rdp_epsilon(entries: Entries, relation: Relation, delta: float) -> float | None:
    """The Renyi bound, or None where the library has none. Replace-one movement is put in by hand."""
    accountant = rdp.RdpAccountant(neighboring_relation=_NEIGHBOURS[_rdp_relation(entries, relation)])
    try:
        for event, count in entries:
            accountant.compose(_rdp_event(event, relation), count)
        return float(accountant.get_epsilon(delta))
    except (UnsupportedEventError, PlanError, ValueError):
        return None


def _rdp_relation(entries: Entries, relation: Relation) -> Relation:
    inner = [event.event if isinstance(event, Tuned) else event for event, _ in entries]
    sampled = any(isinstance(event, FixedSampled) for event in inner)
    return "replace_one" if sampled and relation == "replace_one" else "add_remove"


def _rdp_event(event: Event, relation: Relation) -> Any:
    match event:
        case GaussianNoise(z):
            return de.GaussianDpEvent(shrunk(z, relation))
        case LaplaceNoise(b):
            return de.LaplaceDpEvent(shrunk(b, relation))
        case PoissonSampled(rate, GaussianNoise(z)) if relation != "replace_one":
            return de.PoissonSampledDpEvent(rate, de.GaussianDpEvent(z))
        case FixedSampled(population, cohort, GaussianNoise(z)) if relation == "replace_one":
            return de.SampledWithoutReplacementDpEvent(population, cohort, de.GaussianDpEvent(z / 2))
        case Tuned(inner, count, mean, shape):
            return de.RepeatAndSelectDpEvent(de.SelfComposedDpEvent(_rdp_event(inner, relation), count), mean, shape)
    raise PlanError("accounting", f"no Renyi bound for {event}")
