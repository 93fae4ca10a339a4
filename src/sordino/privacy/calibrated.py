"""A plan solved for a budget: its multiplier, its rounds or its cohort, or a multiplier of its own for every silo.

`calibrate` searches; here stands what it may change. A part that has noise says itself how it takes another multiplier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sordino.errors import PlanError
from sordino.parts.bounds import Spent
from sordino.privacy import accounting, calibrate
from sordino.privacy.bill import Line
from sordino.privacy.budget import Budget
from sordino.privacy.delta import default_delta

if TYPE_CHECKING:
    from sordino.plan import Plan


def noisier(plan: Plan, multiplier: float) -> Plan:
    """The same plan with another multiplier, the same for all; of a message that is private already, its solver's."""
    if isinstance(plan.bound, Spent):
        return replace(plan, local=plan.local.with_multiplier(multiplier))
    return replace(plan, release=plan.release.with_multiplier(multiplier))


def own_noise(plan: Plan, multipliers: tuple[float, ...]) -> Plan:
    """The same plan with a multiplier for every silo."""
    if isinstance(plan.bound, Spent):
        return replace(plan, local=plan.local.with_multipliers(multipliers))
    return replace(plan, release=plan.release.with_multipliers(multipliers))


def calibrated(plan: Plan, *, epsilon: float, delta: float | None = None, free: str = "multiplier") -> Plan:
    """The plan with its multiplier, rounds or cohort (`free`) changed so that it costs `epsilon` at `delta`."""
    delta = default_delta(plan.units) if delta is None else delta
    weakest = _weakest(plan, delta, free)

    def line_of(changed: Plan) -> Line:
        return changed.bill().line("models", weakest)

    def longer(rounds: int) -> Plan:
        return replace(plan, rounds=rounds)

    def larger(cohort: int) -> Plan:
        return replace(plan, clients=plan.clients.with_cohort(cohort))

    if free == "rounds":
        return longer(calibrate.rounds(lambda n: line_of(longer(n)), epsilon, delta))
    if free == "cohort":
        population, least = plan.clients.population, getattr(plan.release, "at_least", 1)
        return larger(calibrate.cohort(lambda n: line_of(larger(n)), epsilon, delta, population, least))
    return noisier(plan, calibrate.multiplier(lambda z: line_of(noisier(plan, z)), epsilon, delta))


def _weakest(plan: Plan, delta: float, free: str) -> int:
    """Whose line decides: with one multiplier for all the smallest silo, whose records are read most."""
    lines = plan.bill().of("models")
    if free == "multiplier" or len(lines) == 1:
        return 0 if plan.local.reads is None else int(np.argmin(plan.local.reads.sizes))
    return max(lines, key=lambda line: accounting.bound(line.entries, line.relation, delta).value).silos[0]


def calibrated_silos(plan: Plan, budgets: Sequence[Budget]) -> Plan:
    """The plan with a multiplier of its own for every silo, so that each spends its own budget and no more."""
    if len(budgets) != plan.clients.population:
        raise PlanError(
            "calibration", f"{len(budgets)} budgets for {plan.clients.population} silos", "one budget per silo"
        )
    solved: dict[tuple[int, Budget], float] = {}

    def solve(silo: int, budget: Budget) -> float:
        size = plan.local.reads.size(silo) if plan.local.reads is not None else 0
        if (size, budget) not in solved:
            solved[size, budget] = calibrate.multiplier(
                lambda z: noisier(plan, z).bill().line("messages", silo), budget.epsilon, budget.delta
            )
        return solved[size, budget]

    return own_noise(plan, tuple(solve(silo, budget) for silo, budget in enumerate(budgets)))
