"""Which delta may be stated: small against one over the number of units (PRIVACY rule 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.accounting.rounding import atleast, upto
from sordino.errors import ConfigError

if TYPE_CHECKING:
    from sordino.plan import Plan


LARGEST_DEFAULT = 1e-3  # population^-1.1 is below it from 534 units on; for fewer it would promise little or nothing


def largest_delta(population: int) -> float:
    """population^-1.1, the largest delta that we let pass without an override."""
    return float(population**-1.1) if population > 1 else 1e-5


def default_delta(population: int) -> float:
    """min(population^-1.1, 1e-3): of five units the first is .17, a chance of one in six to reveal everything."""
    return min(largest_delta(population), LARGEST_DEFAULT)


def check_delta(delta: float, population: int, override: bool) -> None:
    """delta must be a probability, and small against 1 / population (PRIVACY rule 10); of records, that of a silo."""
    if not 0 <= delta < 1:
        raise ConfigError(f"delta = {delta}", "a number in [0, 1)", f"use {atleast(default_delta(population))}")
    if delta > largest_delta(population) * (1 + 1e-9) and not override:
        limit = f"at most population^-1.1 = {atleast(largest_delta(population))}"
        raise ConfigError(f"delta = {delta}", limit, "lower it, or set allow_large_delta = true under [privacy]")


def few(population: int) -> bool:
    """Whether there are so few units that population^-1.1 is no delta to state unasked."""
    return largest_delta(population) > LARGEST_DEFAULT


def meaning_of_delta(delta: float, population: int, unit: str) -> str:
    """What a delta promises to so few: a mechanism may reveal a unit whole with probability delta."""
    chance, expected = upto(delta, 2), upto(delta * population, 2)
    return (
        f"delta {chance} for {population} {unit}s: with probability up to {chance} anything about one {unit} may be "
        f"revealed; with {population} {unit}s that is up to {expected} {unit}s in expectation"
    )


def silo_deltas(plan: Plan) -> tuple[float, ...]:
    """The default of every silo's own size, where records are the unit and silos differ in size; else nothing."""
    reads = plan.local.reads
    return () if reads is None or len(set(reads.sizes)) < 2 else tuple(default_delta(size) for size in reads.sizes)


def check_deltas(plan: Plan, delta: float, deltas: tuple[float, ...], override: bool) -> None:
    """`check_delta` for all: each silo's against the number of its own records."""
    if not deltas:
        return check_delta(delta, plan.units, override)
    if len(deltas) != plan.clients.population:
        raise ConfigError(f"{len(deltas)} deltas for {plan.clients.population} silos", "one per silo, in their order")
    for silo, own in enumerate(deltas):
        check_delta(own, plan.units if plan.local.reads is None else plan.local.reads.size(silo), override)
