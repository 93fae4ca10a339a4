"""Promises of paper 001 for silos of their own kind, and of its lower bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sordino.errors import SideConditionError
from sordino.parts.server_optimizers import Accelerated, Stages
from sordino_papers import theory
from sordino_papers.theory import Federation, Silo, Unequal

EQUAL = Federation(
    records=1000, population=25, cohort=16, dimension=50, epsilon=1.0, delta=1e-6, clip_norm=2.0, distance=10.0,
    smoothness=0.25,
)  # fmt: skip
ALIKE = Unequal(
    silos=(Silo(1000, 1.0, 1e-6),) * 25, cohorts={16: 1.0}, dimension=50, clip_norm=2.0, distance=10.0, smoothness=0.25
)
MIXED = replace(ALIKE, silos=(*(Silo(1000, 1.0, 1e-6),) * 24, Silo(100, 0.1, 1e-6)))


# ---- Theorems 2.1 and E.1, complete versions -------------------------------------------------------------------------


@pytest.mark.parametrize("convexity", [0.0, 0.01])
def test_silos_that_are_alike_get_what_the_equal_theorem_prescribes(convexity: float) -> None:
    equal, found = replace(EQUAL, convexity=convexity), theory.unequal_minibatch(replace(ALIKE, convexity=convexity))
    wanted = (theory.strongly_convex if convexity else theory.convex)(equal, batch=1000)
    assert (found.rounds, found.theorem, set(found.batches)) == (wanted.rounds, wanted.theorem, {1000})
    assert found.risk == pytest.approx(wanted.risk)
    assert set(found.stds) == {wanted.std}
    assert found.server == wanted.server or found.server.lr == pytest.approx(wanted.server.lr)  # type: ignore[attr-defined]


@pytest.mark.parametrize("cohort", [16, 25])
def test_accelerated_silos_that_are_alike_get_what_the_equal_theorem_prescribes(cohort: int) -> None:
    found = theory.unequal_accelerated(replace(ALIKE, cohorts={cohort: 1.0}))
    xi = math.log(2.5 * found.rounds / 1e-6) * math.log(2e6) / 1000**2
    assert isinstance(found.server, Accelerated)
    if cohort == 25:  # the equal theorem keeps ln(1/delta) in its rounds, this one leaves logarithms out of them
        assert found.rounds == math.ceil(math.sqrt(0.25 * 10 / 2 * math.sqrt(25 * 1e6 / 50)))
        assert found.risk == pytest.approx(0.25 * 100 / found.rounds**2 + 20 * math.sqrt(50 * xi / 25))
        pull = math.sqrt(50 * found.stds[0] ** 2 / 25 / found.rounds) / 20
        assert found.server.weight_decay == pytest.approx(pull)


def test_stages_of_silos_that_are_alike_are_those_of_the_equal_theorem() -> None:
    """Theorem E.1, part 2, all silos and records in every round: the same stages for the same rounds and variance."""
    f = replace(ALIKE, cohorts={25: 1.0}, convexity=0.01)
    found = theory.unequal_accelerated(f)
    assert found.theorem == "E.1, strongly convex"
    reach = 1e6 / 50
    assert found.rounds == math.ceil(math.sqrt(0.25 / 0.01) * math.log(10 * 0.01 * 25 * reach / 2))
    variance = 50 * found.stds[0] ** 2 / 25
    wanted = theory.multi_stage(replace(EQUAL, cohort=25, convexity=0.01), found.rounds, variance)
    assert isinstance(found.server, Stages)
    for one, other in zip(found.server.stages, wanted.stages, strict=True):
        assert isinstance(one.server, Accelerated)
        assert isinstance(other.server, Accelerated)
        assert (one.rounds, one.server.mu) == (other.rounds, 0.01)
        assert one.server.v == pytest.approx(other.server.v)
    start = 2 * 10 * math.exp(-math.sqrt(0.01 / 0.25) * found.rounds)
    assert found.risk == pytest.approx(start + variance / 256 / (0.01 * found.rounds))
    assert theory.unequal_accelerated(replace(f, silos=MIXED.silos)).risk > found.risk


@pytest.mark.parametrize("convexity", [0.0, 0.01])
def test_non_smooth_silos_that_are_alike_get_what_the_equal_theorem_prescribes(convexity: float) -> None:
    """Theorem 2.2; M~ = M, for all silos are alike."""
    equal = replace(EQUAL, convexity=convexity, smoothness=math.inf)
    found = theory.unequal_non_smooth(replace(ALIKE, convexity=convexity))
    wanted = theory.non_smooth(equal, batch=1000)
    assert (found.rounds, found.theorem) == (wanted.rounds, wanted.theorem)
    assert found.risk == pytest.approx(wanted.risk)
    assert found.smoothing == pytest.approx(wanted.smoothing)


@pytest.mark.parametrize("convexity", [0.0, 0.01])
def test_accelerated_non_smooth_silos(convexity: float) -> None:
    """Theorem 2.4 by hand: beta, and the rounds of E.1 with it."""
    f = replace(ALIKE, cohorts={25: 1.0}, convexity=convexity)
    found = theory.unequal_non_smooth(f, accelerate=True)
    reach = 1e6 / 50
    beta = convexity * 25 * reach if convexity else 2 * math.sqrt(25 * reach) / 10
    assert found.smoothing == pytest.approx(beta)
    assert found.theorem == ("2.4, strongly convex" if convexity else "2.4, convex")
    if not convexity:
        assert found.rounds == math.ceil(math.sqrt(25 * reach))  # L sqrt(M~) / sqrt(d Psi~)
    smooth = theory.unequal_accelerated(
        replace(f, smoothness=beta, convexity=convexity * beta / (convexity + beta) if convexity else 0.0)
    )
    assert found.risk == pytest.approx(smooth.risk + 4 / (2 * beta))
    assert theory.unequal_non_smooth(replace(f, silos=MIXED.silos), accelerate=True).risk > found.risk


def test_psi_is_the_mean_of_the_m_largest_and_m_the_harmonic_mean() -> None:
    """Three silos with 1/(n epsilon)^2 of 1, 4, 16 (over 10^4), M_r of 1 or 3 with the same chance."""
    silos = (Silo(100, 1.0, 1e-5), Silo(50, 1.0, 1e-5), Silo(100, 0.25, 1e-5))
    f = Unequal(silos, {1: 0.5, 3: 0.5}, dimension=2, clip_norm=1.0, distance=1.0, smoothness=1.0)
    assert f.average() == pytest.approx(1e-4 * math.sqrt(0.5 * 16**2 + 0.5 * 7**2))
    assert f.cohort == pytest.approx(1 / (0.5 + 0.5 / 3)) == pytest.approx(1.5)
    assert f.steady_cohort == pytest.approx(1 / math.sqrt(0.5 + 0.5 / 9))
    logs = math.log(2.5 * 10 / 1e-5) * math.log(2e5)
    assert f.average(rounds=10) == pytest.approx(logs * f.average())


def test_one_weak_silo_costs_by_the_average_and_not_by_the_worst() -> None:
    alike, mixed, weak = (
        theory.unequal_minibatch(f) for f in (ALIKE, MIXED, replace(ALIKE, silos=(Silo(100, 0.1, 1e-6),) * 25))
    )
    assert mixed.decided_by == "average"
    assert alike.risk < mixed.risk < weak.risk
    assert mixed.stds[-1] == pytest.approx(100 * mixed.stds[0])  # a tenth of the records, a tenth of the epsilon


def test_the_smaller_of_average_and_worst_decides() -> None:
    """Silos that are alike have one psi, and M' <= M: the worst of them divided by M is the smaller number."""
    wild = replace(ALIKE, cohorts={1: 0.5, 25: 0.5})
    assert wild.steady_cohort < wild.cohort
    assert (MIXED.noise().by, wild.noise().by) == ("average", "worst")
    assert wild.noise().cohort == wild.cohort


def test_a_weight_multiplies_the_lipschitz_constant() -> None:
    """Appendix B: p_i N on L_i, beta and mu; two silos of weight 1.5 and 0.5."""
    f = replace(ALIKE, silos=(Silo(1000, 1.0, 1e-6, 1.5), Silo(1000, 1.0, 1e-6, 0.5)), cohorts={2: 1.0}, convexity=0.01)
    assert (f.lipschitz, f.beta, f.mu) == pytest.approx((3.0, 0.375, 0.005))
    assert f.average() == pytest.approx((1 + (0.5 / 1.5) ** 2) / 2 / 1e6)
    assert theory.unequal_minibatch(f).stds[0] == pytest.approx(3 * theory.unequal_minibatch(f).stds[1])


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: replace(ALIKE, cohorts={26: 1.0}), "1 to 25 silos"),
        (lambda: replace(ALIKE, cohorts={3: 0.5}), "sum 1"),
        (lambda: replace(ALIKE, silos=(Silo(10, 1.0, 1e-6, 2.0),) * 25), "mean 1"),
        (lambda: theory.unequal_minibatch(replace(ALIKE, silos=(Silo(1000, 15.0, 1e-6),) * 25)), "epsilon <= 14.51"),
        (lambda: theory.unequal_minibatch(ALIKE, share=0.0), "share"),
        (lambda: Silo(0, 1.0, 1e-6), "records"),
    ],
)
def test_silos_outside_the_theorem_are_refused(ask: Callable[[], Any], said: str) -> None:
    with pytest.raises(SideConditionError, match=said):
        ask()


# ---- Theorem 3.1 -----------------------------------------------------------------------------------------------------

CASE: dict[str, Any] = {
    "records": 10, "silos": 400, "dimension": 16, "epsilon": 0.5, "clip_norm": 2.0, "distance": 3.0, "deviation": 1.0,
    "rounds": theory.Rounds(epsilon=0.05, delta=5e-12, total=1e-9),
}  # fmt: skip


def test_the_lower_bounds_by_hand() -> None:
    found = theory.lower_bound(**CASE)
    assert found.statistics == pytest.approx(3 / math.sqrt(4000))
    assert found.privacy == pytest.approx(6 * 4 / (0.5 * 10 * 20))
    strong = theory.lower_bound(**CASE, convexity=0.5)
    assert strong.total == pytest.approx(1 / (0.5 * 4000) + 6 * 16 / (25 * 400))
    loose = theory.lower_bound(**{**CASE, "rounds": replace(CASE["rounds"], composition=2.0)}, convexity=0.5)
    assert loose.privacy == pytest.approx(strong.privacy / 16)


def test_no_lower_bound_is_above_what_any_model_has() -> None:
    found = theory.lower_bound(**{**CASE, "dimension": 10**6})
    assert found.privacy == found.trivial == 6.0


def test_the_upper_bound_is_above_the_lower_one_wherever_both_apply() -> None:
    """Theorem 2.1 against 3.1: equal in order, so never below it with the constants that the first one has."""
    for epsilon in (0.05, 0.2, 0.5):
        f = Federation(
            records=10, population=400, cohort=400, dimension=16, epsilon=epsilon, delta=1e-9, clip_norm=2.0,
            distance=3.0, smoothness=1.0,
        )  # fmt: skip
        assert theory.convex(f, batch=10).risk >= theory.lower_bound(**{**CASE, "epsilon": epsilon}).privacy


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epsilon": 21.0}, "epsilon <= 20"),
        ({"rounds": theory.Rounds(0.2, 5e-12, 1e-9)}, "epsilon_r = 0.2"),
        ({"silos": 300}, "silos >= "),
        ({"rounds": theory.Rounds(0.05, 5e-12, 1e-7)}, "total delta"),
        ({"clip_norm": 0.0}, "clip_norm"),
    ],
)
def test_outside_its_side_conditions_a_lower_bound_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SideConditionError, match=said):
        theory.lower_bound(**{**CASE, **change})
