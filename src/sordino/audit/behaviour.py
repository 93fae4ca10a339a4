"""The behaviour audit: statistical tests of a plan's noise, sampling and sensitivity, on trial rounds."""

from __future__ import annotations

from dataclasses import replace

from sordino.audit.noise_test import Finding, noise_tests, not_examined
from sordino.audit.sampling_test import batch_tests, cohort_tests, trial_round_tests
from sordino.audit.sensitivity_test import sensitivity_tests
from sordino.audit.trial_rounds import ROUNDS, run_trial_rounds
from sordino.plan import Plan


def audit_behaviour(plan: Plan, *, seed: int = 0, rounds: int = ROUNDS) -> list[Finding]:
    """All tests; a false alarm among them has probability at most `noise_test.FALSE_ALARM`."""
    if not promises(plan):
        return [not_examined("everything", "the plan promises nothing to anybody")]
    plan = replace(plan, prepare=())  # its rounds
    trials = run_trial_rounds(plan, seed, rounds)
    return [
        *noise_tests(trials),
        *cohort_tests(plan, seed),
        *batch_tests(plan, seed),
        *trial_round_tests(trials),
        *sensitivity_tests(plan, seed),
    ]


def promises(plan: Plan) -> bool:
    """Whether the cost of the plan guarantees anything to any adversary."""
    return any(event.protects for line in plan.forecast.lines for event, _ in line.entries)
