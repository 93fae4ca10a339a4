"""Promises of the shuffle bound: never below an exact enumeration, never above the local epsilon, right numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.accounting import oracles
from tests.accounting.pld.shuffled_round import shuffled_delta, shuffled_epsilon

from sordino.accounting import pairs
from sordino.errors import SideConditionError

local_epsilons = st.floats(0.01, 8.0)


def test_a_hundred_thousand_reports_give_the_checked_epsilon() -> None:
    epsilon = shuffled_epsilon(reports=100_000, epsilon0=4.0, delta=1e-6)
    assert epsilon == pytest.approx(0.1698, abs=1e-4)
    assert 0.1675 <= epsilon <= 0.1728


def test_too_few_reports_leave_about_the_local_epsilon() -> None:
    assert 3.98 < shuffled_epsilon(reports=1000, epsilon0=4.0, delta=1e-6) <= 4.0
    assert 7.99 < shuffled_epsilon(reports=1000, epsilon0=8.0, delta=1e-6) <= 8.0


def test_one_report_is_bare_randomised_response() -> None:
    for epsilon in (0.0, 0.3, 0.99):
        truth = (math.e - math.exp(epsilon)) / (math.e + 1)
        assert shuffled_delta(epsilon, reports=1, epsilon0=1.0) == pytest.approx(truth, rel=1e-8)


@pytest.mark.parametrize("reports", [1, 2, 5, 20, 60])
@pytest.mark.parametrize("epsilon0", [0.1, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.98])
def test_delta_is_the_clone_pair_rounded_up(reports: int, epsilon0: float, share: float) -> None:
    ours = shuffled_delta(share * epsilon0, reports=reports, epsilon0=epsilon0)
    truth = oracles.clone_delta(share * epsilon0, reports=reports, epsilon0=epsilon0)
    assert ours >= truth
    assert ours <= float(truth) * (1 + 1e-6) + 1e-18


def test_blocks_of_clones_only_round_up_and_only_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [shuffled_delta(e, reports=10_000, epsilon0=1.0) for e in (0.001, 0.01, 0.05)]
    assert len(pairs._clone_counts(9_999, math.exp(-1))[0]) < 500
    monkeypatch.setattr(pairs, "_BLOCK", 0.0)
    pairs._outcomes.cache_clear()
    truth = [shuffled_delta(e, reports=10_000, epsilon0=1.0) for e in (0.001, 0.01, 0.05)]
    pairs._outcomes.cache_clear()
    assert all(one <= other <= 1.01 * one for one, other in zip(truth, ours, strict=True))


def test_the_laws_of_clones_and_of_coins_are_binomial() -> None:
    counts, chances, missed = pairs._clone_counts(2000, 0.3)
    assert missed == 2 * math.exp(-pairs._TAIL)
    law = stats.binom(2000, 0.3)
    assert np.allclose(chances, law.pmf(counts), rtol=1e-9, atol=0)
    values, halves, _ = pairs._halves(np.asarray([1.0, 2.0, 7.0, 600.0]))
    for trials, k, chance in zip((1, 2, 7, 600), values, halves, strict=True):
        listed = chance > 0
        assert np.allclose(chance[listed], stats.binom.pmf(k[listed], trials, 0.5), rtol=1e-9, atol=0)
        assert chance.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("tail", [0.5, 1.0, 3.0])
def test_clones_left_out_of_the_sum_are_added_to_delta(tail: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_TAIL", tail)
    pairs._outcomes.cache_clear()
    for reports, epsilon0 in ((60, 1.0), (20, 4.0)):  # the sum misses clones on both sides; only above it
        for epsilon in (0.0, 0.2, 0.6, 0.9):
            ours = shuffled_delta(epsilon, reports=reports, epsilon0=epsilon0)
            assert ours >= oracles.clone_delta(epsilon, reports=reports, epsilon0=epsilon0)
    pairs._outcomes.cache_clear()


@pytest.mark.parametrize("reports", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("epsilon0", [0.2, 1.0, 3.0])
def test_delta_is_never_below_shuffled_randomised_response(reports: int, epsilon0: float) -> None:
    for ones in range(reports):
        others = [1] * ones + [0] * (reports - 1 - ones)
        for share in (0.0, 0.2, 0.5, 0.8, 0.99):
            exact = oracles.shuffled_response_delta(share * epsilon0, epsilon0=epsilon0, delta0=0.0, others=others)
            assert shuffled_delta(share * epsilon0, reports=reports, epsilon0=epsilon0) >= exact


@pytest.mark.parametrize("delta0", [1e-4, 1e-2])
@pytest.mark.parametrize("epsilon0", [0.2, 1.0, 3.0])
def test_delta_is_never_below_an_approximate_randomised_response(epsilon0: float, delta0: float) -> None:
    for others in ([0], [0, 1], [1, 1, 1], [0, 0, 1, 1]):
        for share in (0.0, 0.3, 0.7, 1.0):
            epsilon, reports = share * epsilon0, len(others) + 1
            exact = oracles.shuffled_response_delta(epsilon, epsilon0=epsilon0, delta0=delta0, others=others)
            assert shuffled_delta(epsilon, reports=reports, epsilon0=epsilon0, delta0=delta0) >= exact * (1 - 1e-12)


def test_clones_counted_twice_would_fall_below_the_enumeration() -> None:
    """Sabotage: with twice the reports, as if each were two clones, the bound is below the truth of n reports."""
    exact = oracles.shuffled_response_delta(0.1, epsilon0=0.5, delta0=0.0, others=[0, 0, 0, 1, 1])
    assert shuffled_delta(0.1, reports=6, epsilon0=0.5) >= exact
    assert shuffled_delta(0.1, reports=12, epsilon0=0.5) < exact


def test_a_forgotten_delta0_would_fall_below_the_enumeration() -> None:
    exact = oracles.shuffled_response_delta(1.99, epsilon0=2.0, delta0=0.05, others=[0, 0])
    assert shuffled_delta(1.99, reports=3, epsilon0=2.0) < exact
    assert shuffled_delta(1.99, reports=3, epsilon0=2.0, delta0=0.05) >= exact


@given(reports=st.integers(1, 10**6), epsilon0=local_epsilons, log_delta=st.floats(-12, -2))
@settings(max_examples=25, deadline=None)
def test_epsilon_holds_at_its_delta_and_is_at_most_local(reports: int, epsilon0: float, log_delta: float) -> None:
    delta = 10**log_delta
    epsilon = shuffled_epsilon(reports=reports, epsilon0=epsilon0, delta=delta)
    assert 0 <= epsilon <= epsilon0
    assert shuffled_delta(epsilon, reports=reports, epsilon0=epsilon0) <= delta
    if epsilon > 0:
        assert shuffled_delta(epsilon * (1 - 1e-6), reports=reports, epsilon0=epsilon0) > delta * (1 - 1e-6)


@given(reports=st.integers(1, 10**5), epsilon0=local_epsilons, share=st.floats(0, 0.9))
@settings(max_examples=60, deadline=None)
def test_delta_falls_with_epsilon_and_with_reports(reports: int, epsilon0: float, share: float) -> None:
    here = shuffled_delta(share * epsilon0, reports=reports, epsilon0=epsilon0)
    assert 0 <= here <= 1
    assert shuffled_delta((share + 0.05) * epsilon0, reports=reports, epsilon0=epsilon0) <= here + 1e-15
    assert shuffled_delta(share * epsilon0, reports=2 * reports, epsilon0=epsilon0) <= here * 1.001 + 1e-15


@given(epsilon0=local_epsilons, delta0=st.floats(1e-15, 1e-3), share=st.floats(0, 1), reports=st.integers(1, 1000))
@settings(max_examples=60, deadline=None)
def test_delta0_is_always_paid_for(epsilon0: float, delta0: float, share: float, reports: int) -> None:
    pure = shuffled_delta(share * epsilon0, reports=reports, epsilon0=epsilon0)
    impure = shuffled_delta(share * epsilon0, reports=reports, epsilon0=epsilon0, delta0=delta0)
    assert impure >= max(pure, delta0) * (1 - 1e-12)


def test_a_small_delta0_costs_a_little_and_a_large_one_all_amplification() -> None:
    pure = shuffled_epsilon(reports=100_000, epsilon0=4.0, delta=1e-6)
    small = shuffled_epsilon(reports=100_000, epsilon0=4.0, delta=1e-6, delta0=1e-13)
    large = shuffled_epsilon(reports=100_000, epsilon0=4.0, delta=1e-6, delta0=9e-7)
    assert pure < small < 1.01 * pure
    assert 3.99 < large <= 4.0


def test_the_local_guarantee_is_kept_when_delta_equals_delta0() -> None:
    assert shuffled_epsilon(reports=10, epsilon0=2.0, delta=1e-3, delta0=1e-3) == 2.0
    assert shuffled_delta(2.0, reports=10, epsilon0=2.0, delta0=1e-3) == 1e-3


def test_no_local_loss_is_no_central_loss() -> None:
    assert shuffled_epsilon(reports=10, epsilon0=0.0, delta=1e-6) == 0.0


def test_a_huge_local_epsilon_neither_overflows_nor_amplifies() -> None:
    assert shuffled_epsilon(reports=10, epsilon0=800.0, delta=1e-6) == pytest.approx(800.0, abs=1e-3)
    assert shuffled_delta(40.0, reports=10, epsilon0=800.0) == pytest.approx(1.0)
    assert shuffled_delta(705.0, reports=10, epsilon0=800.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("reports", "epsilon0"), [(10**4, 1.0), (10**6, 1.0), (10**9, 4.0), (10**9, 0.01), (1, 0.0)])
def test_the_list_of_outcomes_stays_short(reports: int, epsilon0: float) -> None:
    assert len(pairs._outcomes(reports, epsilon0)[0]) < 3_000_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"reports": 0},
        {"epsilon0": -1.0},
        {"epsilon0": math.inf},
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta0": -1e-9},
        {"delta0": 1e-3},
        {"delta0": math.nan},
    ],
)
def test_arguments_outside_the_theorem_are_refused(wrong: dict[str, float]) -> None:
    right: dict[str, float] = {"reports": 100, "epsilon0": 1.0, "delta": 1e-6, "delta0": 0.0}
    with pytest.raises(SideConditionError):
        shuffled_epsilon(**(right | wrong))  # type: ignore[arg-type]


def test_a_negative_epsilon_is_refused() -> None:
    with pytest.raises(SideConditionError):
        shuffled_delta(-0.1, reports=10, epsilon0=1.0)
