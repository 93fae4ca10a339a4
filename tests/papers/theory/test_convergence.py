"""Promises of the convergence bounds: no run is above them where the constants are known; side conditions refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sordino.errors import SideConditionError
from sordino_papers.bounds import Quadratic, measured_federation, measured_sgd
from sordino_papers.theory.convergence import (
    COROLLARY,
    Landscape,
    SmoothedFederation,
    SmoothedSgd,
    convex_error,
    lssgd_convex_error,
    lssgd_nonconvex_error,
    nonconvex_error,
    private_federation,
    rounds_to_reach,
    strongly_convex_error,
)

FED = SmoothedFederation(
    population=20, cohort=10, steps=3, rounds=60, dimension=12, strength=1.0, server=4.0, ratio=1.0
)


@pytest.mark.parametrize("strength", [0.0, 0.25])
def test_no_run_is_above_the_bound_of_theorem_4(strength: float) -> None:
    problem = Quadratic(population=20, dimension=12, seed=1)
    fed = replace(FED, strength=strength, lipschitz=problem.steepest, rounds=250)
    error = strongly_convex_error(fed, problem.landscape(strength))
    found = [measured_federation(problem, fed, error.step, seed).weighted for seed in range(2)]
    assert np.mean(found) <= error.total


@pytest.mark.parametrize("strength", [0.0, 1.0, 3.0])
def test_no_run_is_above_the_bounds_of_theorems_5_and_6(strength: float) -> None:
    problem = Quadratic(population=20, dimension=12, seed=1)
    fed, land = replace(FED, strength=strength, lipschitz=problem.steepest, rounds=100), problem.landscape(strength)
    error = convex_error(fed, land)
    assert np.mean([measured_federation(problem, fed, error.step, seed).mean for seed in range(2)]) <= error.total
    error = nonconvex_error(fed, land)
    assert np.mean([measured_federation(problem, fed, error.step, seed).slopes for seed in range(2)]) <= error.total


def test_a_bound_that_forgets_the_noise_is_broken() -> None:
    problem = Quadratic(population=20, dimension=12, seed=1)
    fed = replace(FED, lipschitz=problem.steepest, rounds=200, ratio=2000.0)
    forgets = convex_error(replace(fed, ratio=0.0), problem.landscape(1.0))
    found = [measured_federation(problem, fed, forgets.step, seed).mean for seed in range(2)]
    assert np.mean(found) > forgets.total


@pytest.mark.parametrize("strength", [0.0, 2.0])
def test_no_run_is_above_the_bounds_of_dp_lssgd(strength: float) -> None:
    sgd = SmoothedSgd(rounds=200, step=1 / math.sqrt(200), batch=20, std=0.05, dimension=10, strength=strength)
    found = [measured_sgd(sgd, seed) for seed in range(2)]
    convex = np.mean([lssgd_convex_error(sgd, smooth=0.25, distance=f.distance) for f in found])
    slopes = np.mean([lssgd_nonconvex_error(sgd, smooth=0.25, gap=f.gap) for f in found])
    assert np.mean([f.mean for f in found]) <= convex
    assert np.mean([f.slopes for f in found]) <= slopes


def test_smoothing_lowers_what_the_noise_costs_and_raises_what_the_start_costs() -> None:
    land = Landscape(1.0, dissimilar=0.1, distance=1.0, gap=1.0)
    rough, smooth = (convex_error(replace(FED, strength=s, rounds=10**7), land) for s in (0.0, 3.0))
    assert smooth.privacy / smooth.step < rough.privacy / rough.step
    assert smooth.heterogeneity > 0.0
    early = [convex_error(replace(FED, strength=s, rounds=10, ratio=0.0), land).initial for s in (0.0, 3.0)]
    assert early[1] > early[0]


def test_rounds_to_reach_an_error_are_the_fewest() -> None:
    land = Landscape(1.0, dissimilar=0.01, distance=1.0, gap=1.0)
    needed = rounds_to_reach(0.05, convex_error, FED, land)
    assert needed is not None
    assert convex_error(replace(FED, rounds=needed), land).total <= 0.05
    assert convex_error(replace(FED, rounds=needed - 1), land).total > 0.05
    assert rounds_to_reach(1e-9, convex_error, FED, land, limit=1000) is None


def test_the_printed_corollary_lacks_a_factor_of_eighteen() -> None:
    splits = np.linspace(0.01, 0.99, 9801)
    c0 = 14 / splits * (1 + 1 / (1 - splits))
    assert pytest.approx(2 * math.sqrt(c0.min()), rel=1e-6) == COROLLARY
    assert COROLLARY > 18


def test_the_noise_of_theorem_1_is_taken_at_the_rounds_of_theorem_3() -> None:
    fed = SmoothedFederation(100_000, 100, 5, 1, 50, server=10.0, lipschitz=30.0)
    private = private_federation(fed, epsilon=4.0, delta=1e-6)
    c0 = (COROLLARY / 2) ** 2
    assert private.rounds == math.floor(16 * 1e10 / (c0 * 900 * 100 * math.log(1e6)))
    assert private.ratio > 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: strongly_convex_error(replace(FED, rounds=2), Landscape(1.0, 0.1, distance=1.0)), "at least"),
        (lambda: strongly_convex_error(FED, Landscape(1.0, distance=1.0)), "convex"),
        (lambda: replace(FED, server=0.5), "server"),
        (lambda: private_federation(FED, epsilon=20.0, delta=1e-5), "log"),
        (lambda: private_federation(replace(FED, server=2.0), epsilon=1.0, delta=1e-5), "sqrt"),
        (lambda: lssgd_convex_error(SmoothedSgd(10, 3.0, 5, 0.1, 10), smooth=0.25, distance=1.0), "step"),
        (lambda: lssgd_nonconvex_error(SmoothedSgd(10, 5.0, 5, 0.1, 10), smooth=0.25, gap=1.0), "step"),
    ],
)
def test_a_side_condition_that_fails_is_named(call: object, said: str) -> None:
    with pytest.raises(SideConditionError, match=said):
        call()  # type: ignore[operator]
