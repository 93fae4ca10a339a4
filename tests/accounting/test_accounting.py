"""Promises of the accountant: the checked numbers of the published claims, opinions in order, relations apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import plan

from sordino.accounting import accountant
from sordino.accounting.accountant import delta_at, deltas_at, epsilon
from sordino.accounting.composition import Participation, client_cost
from sordino.accounting.events import (
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Relation,
    Unprotected,
)
from sordino.errors import PlanError
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import PoissonRecords
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import LocalNoise, NoiseShares
from sordino.parts.samplers import Poisson

RELATIONS: tuple[Relation, ...] = ("add_remove", "replace_one", "zero_out")
CNN, LSTM = 2000**-1.1, 975**-1.1


def cost(event: Event, count: int, relation: Relation, delta: float) -> float:
    return epsilon([(event, count)], relation, delta).value


@pytest.mark.parametrize(
    ("noise_multiplier", "pld", "rdp"), [(2.4, 0.94, 1.07), (2.2, 1.06, 1.20), (2.0, 1.20, 1.37), (1.8, 1.39, 1.58)]
)
def test_poisson_cohorts_of_a_twentieth_cost_the_checked_epsilon(
    noise_multiplier: float, pld: float, rdp: float
) -> None:
    found = epsilon([(PoissonSampled(0.05, GaussianNoise(noise_multiplier)), 200)], "add_remove", CNN)
    assert found.value == pytest.approx(pld, abs=0.006)
    assert found.rdp == pytest.approx(rdp, abs=0.006)


@pytest.mark.parametrize(
    ("noise_multiplier", "upper", "lower"), [(2.4, 3.06, 2.62), (2.2, 3.59, 3.07), (2.0, 4.31, 3.69), (1.8, 5.36, 4.60)]
)
def test_fixed_cohorts_of_a_twentieth_cost_the_checked_epsilon(
    noise_multiplier: float, upper: float, lower: float
) -> None:
    found = cost(FixedSampled(2000, 100, GaussianNoise(noise_multiplier)), 200, "replace_one", CNN)
    assert found == pytest.approx(upper, rel=0.02)
    assert found >= lower


@pytest.mark.parametrize(("noise_multiplier", "pld"), [(1.4, 6.38), (1.2, 8.19), (1.0, 11.22), (0.8, 17.08)])
def test_poisson_cohorts_of_a_fifth_cost_the_checked_epsilon(noise_multiplier: float, pld: float) -> None:
    assert cost(PoissonSampled(0.2, GaussianNoise(noise_multiplier)), 100, "add_remove", LSTM) == pytest.approx(
        pld, abs=0.01
    )


@pytest.mark.parametrize(("noise_multiplier", "lower"), [(1.4, 22.3), (1.2, 30.9), (1.0, 46.3), (0.8, 77.1)])
def test_fixed_cohorts_of_a_fifth_cost_at_least_the_certified_lower_bound(
    noise_multiplier: float, lower: float
) -> None:
    found = cost(FixedSampled(975, 195, GaussianNoise(noise_multiplier)), 100, "replace_one", LSTM)
    assert lower <= found < 1.2 * lower


@pytest.mark.parametrize(("rounds", "pld", "lower"), [(200, 7.30, 36.9), (300, 9.37, 48.4)])
def test_paper_003_is_right_for_poisson_and_five_times_more_for_fixed_cohorts(
    rounds: int, pld: float, lower: float
) -> None:
    noise = GaussianNoise(0.95)
    assert cost(PoissonSampled(0.1, noise), rounds, "add_remove", 1 / 500) == pytest.approx(pld, abs=0.006)
    assert cost(FixedSampled(500, 50, noise), rounds, "replace_one", 1 / 500) >= lower


def test_a_secure_aggregation_server_that_saw_a_client_twenty_times_learns_zero_out_24() -> None:
    cost = client_cost(
        Poisson(500, 0.1), NoiseShares(0.95, at_least=40), Participation(releases=200, max_participations=20)
    )
    line = cost.line("cohort")
    assert line.relation == "zero_out"
    assert epsilon(line.entries, line.relation, 1 / 500).value == pytest.approx(23.9, abs=0.06)


def test_six_is_reached_with_a_quarter_of_the_noise_of_theorem_1() -> None:
    assert cost(PoissonSampled(0.05, GaussianNoise(0.555)), 30, "add_remove", 1000**-1.1) == pytest.approx(6, rel=2e-3)


@pytest.mark.parametrize(("claimed", "true"), [(1, 2), (3, 6), (5, 10)])
def test_laplace_costs_twice_the_claim_of_paper_002_when_a_client_is_replaced(claimed: float, true: float) -> None:
    for delta in (0.0, 1e-12):
        assert cost(LaplaceNoise(1 / claimed), 1, "replace_one", delta) == pytest.approx(true, rel=1e-6)
    assert cost(LaplaceNoise(1 / claimed), 1, "zero_out", 0.0) == pytest.approx(claimed, rel=1e-12)


def test_fifty_clients_at_a_fifth_cost_the_checked_epsilon_as_poisson() -> None:
    found = cost(PoissonSampled(0.2, GaussianNoise(3.0)), 100, "add_remove", 50**-1.1)
    assert found == pytest.approx(1.33, abs=0.005)


def test_rates_of_silos_and_records_never_multiply() -> None:
    record = PoissonSampled(0.01, GaussianNoise(0.8))
    product = cost(PoissonSampled(0.001, GaussianNoise(0.8)), 1000, "add_remove", 1e-5)
    visible = cost(record, 100, "add_remove", 1e-5)
    assert product == pytest.approx(0.30, abs=0.005)
    assert visible == pytest.approx(1.51, abs=0.005)
    with pytest.raises(PlanError, match="accounting"):
        epsilon([(PoissonSampled(0.1, record), 1000)], "add_remove", 1e-5)
    silos = plan(
        rounds=1000, clients=Poisson(100, 0.1), local=BatchGradient(PoissonRecords(2, (200,)), 1.0), encode=(),
        release=LocalNoise(Gaussian(0.8)),
    )  # fmt: skip
    for line in silos.cost(Participation(releases=1000, max_participations=100)).lines:
        assert line.entries == ((record, 100),)


events = st.one_of(
    st.builds(GaussianNoise, st.floats(0.5, 20)),
    st.builds(LaplaceNoise, st.floats(0.5, 20)),
    st.builds(PoissonSampled, st.floats(0.01, 0.5), st.builds(GaussianNoise, st.floats(0.6, 8))),
    st.builds(FixedSampled, st.just(1000), st.integers(10, 500), st.builds(GaussianNoise, st.floats(1.0, 8))),
)


@given(event=events, count=st.sampled_from([1, 10, 300]), delta=st.sampled_from([1e-8, 1e-5, 1e-3]))
@settings(max_examples=8, deadline=None)
def test_the_first_opinion_is_never_above_the_second(event: Event, count: int, delta: float) -> None:
    relation: Relation = "replace_one" if isinstance(event, FixedSampled) else "add_remove"
    first = accountant.bound([(event, count)], relation, delta).value
    second = accountant.rdp_epsilon([(event, count)], relation, delta)
    assert second is not None
    assert 0 <= first <= second


def test_the_second_opinion_is_the_answer_where_it_is_the_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(LaplaceNoise(100.0), 10_000)]
    first = epsilon(entries, "zero_out", 1e-16)
    assert first.method == "pld"
    assert first.rdp is not None
    assert first.value < first.rdp < 10
    monkeypatch.setattr(accountant, "rdp_epsilon", lambda *_: first.value / 2)
    assert epsilon(entries, "zero_out", 1e-16) == accountant.Epsilon(first.value / 2, "rdp", rdp=first.value / 2)


@pytest.mark.parametrize("relation", RELATIONS)
def test_replacing_costs_a_gaussian_exactly_half_the_multiplier_and_zeroing_nothing_more(relation: Relation) -> None:
    seen = cost(GaussianNoise(1.5), 9, relation, 1e-5)
    as_removed = cost(GaussianNoise(0.75 if relation == "replace_one" else 1.5), 9, "add_remove", 1e-5)
    assert seen == as_removed


@pytest.mark.parametrize(
    "event", [PoissonSampled(0.1, GaussianNoise(1.0)), FixedSampled(100, 10, GaussianNoise(3.0)), LaplaceNoise(4.0)]
)
def test_delta_at_undoes_epsilon(event: Event) -> None:
    found = epsilon([(event, 20)], "replace_one", 1e-4).value
    assert delta_at([(event, 20)], "replace_one", found) == pytest.approx(1e-4, rel=0.02)


@pytest.mark.parametrize("event", [PoissonSampled(0.1, GaussianNoise(1.0)), GaussianNoise(3.0), LaplaceNoise(4.0)])
def test_the_curve_falls_from_one_to_nothing_and_holds_at_every_point(event: Event) -> None:
    at = np.linspace(-15, 15, 61)
    curve = np.asarray(deltas_at([(event, 4)], "add_remove", at.tolist()))
    assert np.all(np.diff(curve) <= 1e-12)
    assert np.all((curve >= -np.expm1(np.minimum(at, 0)) - 1e-12) & (curve <= 1))
    assert curve[-1] < 1e-9 < 0.999 < curve[0]


def test_no_release_costs_nothing_and_an_unprotected_one_everything() -> None:
    assert epsilon([], "add_remove", 1e-5).value == 0
    assert epsilon([(Unprotected(), 0), (GaussianNoise(1.0), 0)], "add_remove", 1e-5).value == 0
    assert cost(Unprotected(), 1, "add_remove", 1e-5) == math.inf
    assert delta_at([(GaussianNoise(1.0), 1), (Unprotected(), 1)], "add_remove", 5.0) == 1
