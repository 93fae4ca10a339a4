"""Promise: one round of every recipe is attacked and stays below its certificate; noise and coins are as accounted.

A new recipe fails here until it has an example: add its name to EXAMPLES with settings that its function takes; one
whose unit is a record, to those of test_record_audit.py, where one record is attacked.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.contracts.test_record_audit import EXAMPLES as RECORD_EXAMPLES

from sordino.audit.mechanism import audit_mechanism
from sordino.audit.noise_test import failures, unexamined
from sordino.audit.summary import audit_behaviour
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.releases import NoiseShares
from sordino.parts.samplers import FixedSize, Poisson, RoundRobin
from sordino.parts.sparsify import PublicDataMask, SparsifyMean, SparsifyUpdate
from sordino.plan import Plan
from sordino.recipes import RECIPES

USUAL: dict[str, Any] = {"rounds": 2, "lr": 0.1, "clip_norm": 0.7, "noise_multiplier": 1.0, "clients": Poisson(40, 0.3)}
SHARED: dict[str, Any] = {
    **USUAL,
    "clients": FixedSize(20, 5),
    "noise_multiplier": None,
    "release": NoiseShares(1.0, at_least=5),
}
WORK: dict[str, Any] = {"rounds": 12, "lr": 0.1, "clip_norm": 0.7, "noise_multiplier": 1.0}
TURNS: dict[str, Any] = {"rounds": 2, "population": 20, "cohort": 5, "lr": 0.1, "steps": 3, "clip_norm": 0.7}
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "dp_fed_avg": [USUAL],
    "dp_fed_ls": [USUAL],
    "dp_fed_sam": [{**USUAL, "denoiser": SparsifyMean(0.4)}, SHARED],
    "dp_fed_sam_top_k": [{**USUAL, "sparsify": SparsifyUpdate(0.4)}, USUAL],
    "fed_smp": [SHARED, {**USUAL, "mask": PublicDataMask()}],
    "blur": [{**USUAL, "sparsify": SparsifyUpdate(0.4, "influence")}],
    "scaffold": [USUAL],
    "dp_ftrl": [{**USUAL, "clients": RoundRobin(40, 10), "rounds": 12}],
    "band_mf": [{**WORK, "population": 40, "groups": 3, "cohort": 4.0, "rounds": 12}],
    "best": [{"population": 40, "epsilon": 8.0, "rounds": 3}],
    "head": [{"population": 40, "epsilon": 8.0, "rounds": 3}],
    "client_side_fed_avg": [{**TURNS, "mechanism": mechanism} for mechanism in (Laplace(2.0), Gaussian(1.0))],
}
TRIALS = 12_000


def examples(name: str) -> list[Plan]:
    """Small plans of a recipe."""
    if name not in EXAMPLES:
        pytest.fail(f"recipe {name!r} has no example: add one to EXAMPLES in {__file__}, so that it is audited")
    return [RECIPES[name](**settings) for settings in EXAMPLES[name]]


@pytest.mark.parametrize("name", sorted(set(RECIPES) - set(RECORD_EXAMPLES)))
def test_a_recipe_stays_below_its_certificate(name: str) -> None:
    for planned in examples(name):
        found = audit_mechanism(planned, delta=1e-5, trials=TRIALS)
        assert {audit.adversary for audit in found} >= {"models", "cohort"}
        for audit in found:
            assert audit.passed, audit
            assert audit.movement <= (2.0 if audit.relation == "replace_one" else 1.0)
        seen = next(audit for audit in found if audit.adversary == "cohort")
        assert seen.lower_mu > 0.7 * seen.upper_mu  # not vacuous: the attack comes near


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_runs_as_planned(name: str) -> None:
    planned = RECIPES[name](**{**EXAMPLES, **RECORD_EXAMPLES}[name][-1])
    found = audit_behaviour(planned, rounds=64)
    assert failures(found) == []
    assert unexamined(found) == []


def test_no_example_is_left_of_a_recipe_that_is_gone() -> None:
    assert set(EXAMPLES) | set(RECORD_EXAMPLES) <= set(RECIPES)
    assert not set(EXAMPLES) & set(RECORD_EXAMPLES)
