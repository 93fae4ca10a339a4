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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
from absl import logging as absl_logging
from dp_accounting import dp_event as de
from dp_accounting import gaussian_mechanism, rdp
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as plds
from dp_accounting.privacy_accountant import NeighboringRelation, UnsupportedEventError

from sordino.errors import PlanError
from sordino.privacy import shuffle, without_replacement
from sordino.privacy.events import (
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

absl_logging.set_verbosity(absl_logging.ERROR)

Entries = Sequence[tuple[Event, int]]
Method = Literal["pld", "gdp", "rdp", "none"]
VERSION = f"dp-accounting {version('dp-accounting')}"
COARSE, FINE = 1e-3, 1e-6  # first and last grid
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
    """The smallest epsilon we can prove at `delta` for all entries together."""
    if any(isinstance(event, Unprotected) and count for event, count in entries):
        return Epsilon(math.inf, "none")
    entries = _unshuffled(entries, relation, delta)
    mu = gaussian_mu(entries, relation)
    second = rdp_epsilon(entries, relation, delta)
    if any(isinstance(event, Tuned) for event, _ in entries):
        return Epsilon(math.inf if second is None else second, "rdp", rdp=second)
    if mu is not None:
        return Epsilon(_gaussian_epsilon(mu, delta), "gdp", rdp=second)
    value, grid = _refined(tuple(entries), relation, lambda pld: float(pld.get_epsilon_for_delta(delta)))
    return Epsilon(min(value, _pure_epsilon(entries, relation), _basic_epsilon(entries, delta)), "pld", grid, second)


def epsilon_on(entries: Entries, relation: Relation, delta: float, grid: float) -> float:
    """Epsilon on one given grid, without a second opinion: the inner loop of a calibration."""
    entries = _unshuffled(entries, relation, delta)
    mu = gaussian_mu(entries, relation)
    if mu is not None:
        return _gaussian_epsilon(mu, delta)
    coarse = float(_composed(tuple(entries), relation, grid).get_epsilon_for_delta(delta))
    return min(coarse, _pure_epsilon(entries, relation))


def delta_at(entries: Entries, relation: Relation, at: float) -> float:
    """The smallest delta we can prove at epsilon `at`."""
    if any(isinstance(event, Unprotected) and count for event, count in entries):
        return 1.0
    mu = gaussian_mu(entries, relation)
    if mu is not None:
        return _gaussian_delta(mu, at)
    return _refined(tuple(entries), relation, lambda pld: float(pld.get_delta_for_epsilon(at)))[0]


def deltas_at(entries: Entries, relation: Relation, epsilons: Sequence[float]) -> list[float]:
    """delta at many epsilons, negative ones too: the curve that bounds every attack."""
    mu = gaussian_mu(entries, relation)
    if mu is not None:
        return [_gaussian_delta(mu, at) for at in epsilons]
    _, grid = _refined(tuple(entries), relation, lambda pld: float(pld.get_epsilon_for_delta(1e-6)))
    curve = _composed(tuple(entries), relation, grid).get_delta_for_epsilon(np.asarray(epsilons))
    return [float(value) for value in curve]


def group_epsilon(entries: Entries, relation: Relation, delta: float, size: int) -> float:
    """Epsilon for a group of `size` units that change together: size * mu in GDP (Dong, Roth, Su 2022, Theorem 2.14).

    Only for sums of Gaussian releases; the classic exponential formula is useless beyond a group of three.
    """
    mu = gaussian_mu(entries, relation)
    if mu is None:
        raise PlanError("group privacy", "releases that are not plain Gaussian", "Gaussian noise without sampling")
    return _gaussian_epsilon(size * mu, delta)


def gaussian_mu(entries: Entries, relation: Relation) -> float | None:
    """mu of a sum of Gaussian releases, movement / multiplier each, or None if anything else is among them."""
    if not all(isinstance(event, GaussianNoise) for event, _ in entries):
        return None
    return math.sqrt(sum((count / _shrunk(_scale(event), relation) ** 2 for event, count in entries), 0.0))


def _unshuffled(entries: Entries, relation: Relation, delta: float) -> list[tuple[Event, int]]:
    """Shuffled rounds as the (epsilon, delta) that amplification proves for each; half of delta is spent on that."""
    rounds = sum(count for event, count in entries if isinstance(event, Shuffled))
    share = delta if rounds == 1 and len(entries) == 1 else delta / (2 * max(rounds, 1))
    return [(_amplified(e, relation, share) if isinstance(e, Shuffled) else e, count) for e, count in entries]


def _amplified(event: Shuffled, relation: Relation, delta: float) -> Event:
    """The best of several splits of one message's noise into (epsilon0, delta0)."""
    pairs = _local_pairs(event.event, relation, delta, event.reports)
    found = [shuffle.shuffled_epsilon(reports=event.reports, epsilon0=e, delta=delta, delta0=d) for e, d in pairs]
    return Approximate(min(found), delta)


def _local_pairs(event: Event, relation: Relation, delta: float, reports: int) -> list[tuple[float, float]]:
    """One message's own (epsilon0, delta0): a Gaussian has one for every delta0."""
    match event:
        case Approximate(eps, own):
            return [(eps, own)]
        case LaplaceNoise(b):
            return [(1 / _shrunk(b, relation), 0.0)]
        case GaussianNoise(z):
            mu = 1 / _shrunk(z, relation)
            return [(_gaussian_epsilon(mu, own), own) for own in delta / reports * np.geomspace(1e-6, 0.3, 12)]
    raise PlanError("accounting", f"no amplification by shuffling for {event}", "gaussian or laplace noise")


def _pure_epsilon(entries: Entries, relation: Relation) -> float:
    """sum of movement / multiplier over Laplace releases: true at any delta, 0 too; inf if anything else is there."""
    if not all(isinstance(event, LaplaceNoise) for event, _ in entries):
        return math.inf
    return sum((count / _shrunk(_scale(event), relation) for event, count in entries), 0.0)


def _basic_epsilon(entries: Entries, delta: float) -> float:
    """Basic composition of (epsilon, delta) pairs: sums of both, if the deltas fit; else inf."""
    pairs = [(event, count) for event, count in entries if isinstance(event, Approximate)]
    if len(pairs) < len(entries) or sum(count * event.delta for event, count in pairs) > delta:
        return math.inf
    return sum((count * event.epsilon for event, count in pairs), 0.0)


def _scale(event: Event) -> float:
    assert isinstance(event, GaussianNoise | LaplaceNoise)
    return event.multiplier


def _shrunk(multiplier: float, relation: Relation) -> float:
    """The multiplier per unit of movement: replacing moves a message by up to 2."""
    return multiplier / 2 if relation == "replace_one" else multiplier


def _gaussian_epsilon(mu: float, delta: float) -> float:
    return 0.0 if mu == 0 else max(0.0, float(gaussian_mechanism.get_epsilon_gaussian(1 / mu, delta)))


def _gaussian_delta(mu: float, at: float) -> float:
    """Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu) (Balle & Wang 2018)."""
    from scipy.special import log_ndtr

    if mu == 0:
        return max(0.0, -math.expm1(at))
    first, second = float(log_ndtr(mu / 2 - at / mu)), at + float(log_ndtr(-mu / 2 - at / mu))
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def _refined(entries: tuple[tuple[Event, int], ...], relation: Relation, ask: Any) -> tuple[float, float]:
    """Quarter the grid until the answer moves by less than 1%; the finer of the two answers is kept."""
    grid = COARSE
    value = ask(_composed(entries, relation, grid))
    while grid > FINE and value > 0 and math.isfinite(value):
        finer = ask(_composed(entries, relation, grid / 4))
        grid, moved, value = grid / 4, abs(value - finer), min(value, finer)
        if moved < MOVE * value:
            break
    return value, grid


@lru_cache(maxsize=32)
def _composed(entries: tuple[tuple[Event, int], ...], relation: Relation, grid: float) -> Any:
    pld = plds.identity(value_discretization_interval=grid)
    for event, count in entries:
        if count:
            pld = pld.compose(_pld(event, count, relation, grid))
    return pld


def _pld(event: Event, count: int, relation: Relation, grid: float) -> Any:
    """PLD of `count` times one event."""
    match event:
        case GaussianNoise(z):
            return plds.from_gaussian_mechanism(
                _shrunk(z, relation) / math.sqrt(count), value_discretization_interval=grid
            )
        case LaplaceNoise(b):
            return plds.from_laplace_mechanism(_shrunk(b, relation), value_discretization_interval=grid).self_compose(
                count
            )
        case PoissonSampled(rate, GaussianNoise(z)):
            once = plds.from_gaussian_mechanism(
                z, value_discretization_interval=grid, sampling_prob=rate, neighboring_relation=_NEIGHBOURS[relation]
            )
            return once.self_compose(count)
        case PoissonSampled(rate, LaplaceNoise(b)) if relation != "replace_one":
            return plds.from_laplace_mechanism(b, value_discretization_interval=grid, sampling_prob=rate).self_compose(
                count
            )
        case CappedPoisson(rate, population, cap, GaussianNoise(z)):
            return _capped(rate, population, cap, z, relation, grid).self_compose(count)
        case FixedSampled(population, cohort, GaussianNoise(z)) if relation == "replace_one":
            return _fixed(cohort / population, z, grid).self_compose(count)
        case Approximate(eps, delta):
            return plds.from_privacy_parameters(
                _parameters(eps, delta), value_discretization_interval=grid
            ).self_compose(count)
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
    mu = 2 / z
    edge = math.ceil(math.log1p(rate * math.expm1(min(mu * mu / 2 + 10 * mu, 700.0))) / grid) + 1
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
            return de.GaussianDpEvent(_shrunk(z, relation))
        case LaplaceNoise(b):
            return de.LaplaceDpEvent(_shrunk(b, relation))
        case PoissonSampled(rate, GaussianNoise(z)) if relation != "replace_one":
            return de.PoissonSampledDpEvent(rate, de.GaussianDpEvent(z))
        case FixedSampled(population, cohort, GaussianNoise(z)) if relation == "replace_one":
            return de.SampledWithoutReplacementDpEvent(population, cohort, de.GaussianDpEvent(z / 2))
        case Tuned(inner, count, mean, shape):
            return de.RepeatAndSelectDpEvent(de.SelfComposedDpEvent(_rdp_event(inner, relation), count), mean, shape)
    raise PlanError("accounting", f"no Renyi bound for {event}")
