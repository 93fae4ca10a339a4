"""Behaviour audit: rehearsed rounds of a plan, their noise, their sampling, and how far one unit moves a sum."""

from __future__ import annotations

from dataclasses import replace

from sordino.audit.noise_test import Finding, noise_law, not_examined
from sordino.audit.rehearsal import ROUNDS, rehearse
from sordino.audit.sampling_test import batch_law, cohort_law, rehearsed_law
from sordino.audit.sensitivity_test import movements
from sordino.plan import Plan


def audit_behaviour(plan: Plan, *, seed: int = 0, rounds: int = ROUNDS) -> list[Finding]:
    """All questions; a false alarm among them has probability at most `law.FALSE_ALARM`."""
    if not promises(plan):
        return [not_examined("everything", "the plan promises nothing to anybody")]
    plan = replace(plan, prepare=())  # its rounds
    rehearsed = rehearse(plan, seed, rounds)
    return [
        *noise_law(rehearsed),
        *cohort_law(plan, seed),
        *batch_law(plan, seed),
        *rehearsed_law(rehearsed),
        *movements(plan, seed),
    ]


def promises(plan: Plan) -> bool:
    """Whether the bill promises anybody anything."""
    return any(event.protects for line in plan.forecast.lines for event, _ in line.entries)
