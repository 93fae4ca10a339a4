"""What was released, as data: events are counted, hashed and written down; `accounting` turns them into epsilon.

Sizes are in units of the message's bound (the unit ball), for a movement of 1. That a client may be replaced, not
only removed, doubles the movement; that is the *relation's* business, applied once, in `accounting`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sordino.codec import Part

Relation = Literal["add_remove", "replace_one", "zero_out"]


class Event(Part):
    """One release, as the adversary of a bill's line sees it."""


@dataclass(frozen=True)
class GaussianNoise(Event, kind="gaussian"):
    """x + N(0, multiplier^2 I), ||x||_2 moves by 1."""

    multiplier: float


@dataclass(frozen=True)
class LaplaceNoise(Event, kind="laplace"):
    """x + Laplace(multiplier) per coordinate, ||x||_1 moves by 1; the scalar case is tight for any split."""

    multiplier: float


@dataclass(frozen=True)
class PoissonSampled(Event, kind="poisson_sampled"):
    """`event` of a cohort in which each unit is present with probability `rate`, coins unseen."""

    rate: float
    event: Event


@dataclass(frozen=True)
class CappedPoisson(Event, kind="capped_poisson"):
    """Poisson sampling of which at most `cap` units are kept (a uniform subset), Gaussian noise."""

    rate: float
    population: int
    cap: int
    event: Event


@dataclass(frozen=True)
class FixedSampled(Event, kind="fixed_sampled"):
    """`event` of a uniformly random cohort of exactly `cohort` out of `population`, coins unseen."""

    population: int
    cohort: int
    event: Event


@dataclass(frozen=True)
class Shuffled(Event, kind="shuffled"):
    """`reports` messages, each privatised by `event`, seen only as a shuffled bag."""

    reports: int
    event: Event


@dataclass(frozen=True)
class Approximate(Event, kind="approximate"):
    """Anything proved (epsilon, delta)-private by other means."""

    epsilon: float
    delta: float = 0.0


@dataclass(frozen=True)
class Tuned(Event, kind="tuned"):
    """`count` times `event`, repeated a random number of times of which only the best is released.

    The number of tries is truncated negative binomial with this `shape` and `mean` (Papernot & Steinke 2022); shape 1
    is geometric, 0 logarithmic, inf Poisson. A fixed grid whose table is looked at is NOT this: it is composition.
    """

    event: Event
    count: int
    mean: float
    shape: float = 1.0


@dataclass(frozen=True)
class Unprotected(Event, kind="unprotected"):
    """A release with no guarantee: epsilon is infinite."""


def billable(event: Event, relation: Relation) -> bool:
    """Whether `accounting` has a proved bound for this event when neighbours differ by `relation`."""
    match event:
        case PoissonSampled(_, GaussianNoise()):
            return True
        case PoissonSampled(_, LaplaceNoise()):
            return relation != "replace_one"
        case CappedPoisson(_, _, _, inner):
            return isinstance(inner, GaussianNoise)
        case FixedSampled(_, _, inner):
            return isinstance(inner, GaussianNoise) and relation == "replace_one"
        case Shuffled(_, inner):
            return isinstance(inner, GaussianNoise | LaplaceNoise | Approximate) and relation == "replace_one"
        case PoissonSampled():
            return False
        case Tuned(inner, _, _, _):
            return _has_renyi_bound(inner, relation)
    return True


def _has_renyi_bound(event: Event, relation: Relation) -> bool:
    """Tuning is only proved through Renyi bounds: plain noise, or Gaussian noise amplified under its own relation."""
    match event:
        case PoissonSampled(_, inner):
            return isinstance(inner, GaussianNoise) and relation != "replace_one"
        case FixedSampled(_, _, inner):
            return isinstance(inner, GaussianNoise) and relation == "replace_one"
    return isinstance(event, GaussianNoise | LaplaceNoise | Unprotected)
