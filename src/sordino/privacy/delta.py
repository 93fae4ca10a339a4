"""Which delta may be stated: small against one over the number of units (PRIVACY rule 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.errors import ConfigError
from sordino.privacy.rounding import atleast

if TYPE_CHECKING:
    from sordino.plan import Plan


def default_delta(population: int) -> float:
    """population^-1.1, the largest delta that we let pass without an override."""
    return float(population**-1.1) if population > 1 else 1e-5


def check_delta(delta: float, population: int, override: bool) -> None:
    """delta must be a probability, and small against 1 / population (PRIVACY rule 10); of records, that of a silo."""
    if not 0 <= delta < 1:
        raise ConfigError(f"delta = {delta}", "a number in [0, 1)", f"use {atleast(default_delta(population))}")
    if delta > default_delta(population) * (1 + 1e-9) and not override:
        limit = f"at most population^-1.1 = {atleast(default_delta(population))}"
        raise ConfigError(f"delta = {delta}", limit, "lower it, or set allow_large_delta = true under [privacy]")


def silo_deltas(plan: Plan) -> tuple[float, ...]:
    """size^-1.1 of every silo, where records are the unit and silos differ in size; else nothing."""
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
