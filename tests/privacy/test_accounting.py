"""Promises of the accountant: the checked numbers of the published claims, tight, never below the truth."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from tests.privacy import oracles

from sordino.errors import PlanError
from sordino.parts.samplers import Poisson
from sordino.privacy import accounting
from sordino.privacy.accounting import delta_at, deltas_at, epsilon, group_epsilon
from sordino.privacy.bill import Participation, client_bill, spent_bill
from sordino.privacy.bounds import Spent
from sordino.privacy.events import (
    Approximate,
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Relation,
    Unprotected,
)
from sordino.privacy.release import NoiseShares

RELATIONS: tuple[Relation, ...] = ("add_remove", "replace_one", "zero_out")
CNN, LSTM = 2000**-1.1, 975**-1.1


def cost(event: Event, count: int, relation: Relation, delta: float) -> float:
    return epsilon([(event, count)], relation, delta).value


@pytest.fixture
def fresh() -> Iterator[None]:
    """No remembered distribution from before a sabotage, and none of it after."""
    caches = (accounting._composed, accounting._once, accounting._amplified)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


# ---- the table of PRIVACY.md ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("multiplier", "pld", "rdp"), [(2.4, 0.94, 1.07), (2.2, 1.06, 1.20), (2.0, 1.20, 1.37), (1.8, 1.39, 1.58)]
)
def test_poisson_cohorts_of_a_twentieth_cost_the_checked_epsilon(multiplier: float, pld: float, rdp: float) -> None:
    found = epsilon([(PoissonSampled(0.05, GaussianNoise(multiplier)), 200)], "add_remove", CNN)
    assert found.value == pytest.approx(pld, abs=0.006)
    assert found.rdp == pytest.approx(rdp, abs=0.006)


@pytest.mark.parametrize(
    ("multiplier", "upper", "lower"), [(2.4, 3.06, 2.62), (2.2, 3.59, 3.07), (2.0, 4.31, 3.69), (1.8, 5.36, 4.60)]
)
def test_fixed_cohorts_of_a_twentieth_cost_the_checked_epsilon(multiplier: float, upper: float, lower: float) -> None:
    found = cost(FixedSampled(2000, 100, GaussianNoise(multiplier)), 200, "replace_one", CNN)
    assert found == pytest.approx(upper, rel=0.02)
    assert found >= lower


@pytest.mark.parametrize(("multiplier", "pld"), [(1.4, 6.38), (1.2, 8.19), (1.0, 11.22), (0.8, 17.08)])
def test_poisson_cohorts_of_a_fifth_cost_the_checked_epsilon(multiplier: float, pld: float) -> None:
    assert cost(PoissonSampled(0.2, GaussianNoise(multiplier)), 100, "add_remove", LSTM) == pytest.approx(pld, abs=0.01)


@pytest.mark.parametrize(("multiplier", "lower"), [(1.4, 22.3), (1.2, 30.9), (1.0, 46.3), (0.8, 77.1)])
def test_fixed_cohorts_of_a_fifth_cost_at_least_the_certified_lower_bound(multiplier: float, lower: float) -> None:
    found = cost(FixedSampled(975, 195, GaussianNoise(multiplier)), 100, "replace_one", LSTM)
    assert lower <= found < 1.2 * lower


@pytest.mark.parametrize(("rounds", "pld", "lower"), [(200, 7.30, 36.9), (300, 9.37, 48.4)])
def test_paper_003_is_right_for_poisson_and_five_times_more_for_fixed_cohorts(
    rounds: int, pld: float, lower: float
) -> None:
    noise = GaussianNoise(0.95)
    assert cost(PoissonSampled(0.1, noise), rounds, "add_remove", 1 / 500) == pytest.approx(pld, abs=0.006)
    assert cost(FixedSampled(500, 50, noise), rounds, "replace_one", 1 / 500) >= lower


def test_a_secure_aggregation_server_that_saw_a_client_twenty_times_learns_zero_out_24() -> None:
    bill = client_bill(Poisson(500, 0.1), NoiseShares(0.95, at_least=40), Participation(releases=200, most=20))
    line = bill.line("cohort")
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
    assert (product, visible) == (pytest.approx(0.30, abs=0.005), pytest.approx(1.51, abs=0.005))
    with pytest.raises(PlanError, match="accounting"):
        epsilon([(PoissonSampled(0.1, record), 1000)], "add_remove", 1e-5)
    for line in spent_bill(Spent(record), Participation(releases=1000, most=100)).lines:
        assert line.entries == ((record, 100),)


# ---- against independent truths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("multiplier", [0.2, 1.0, 7.0, 300.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_sums_of_gaussians_are_the_closed_form(relation: Relation, multiplier: float, delta: float) -> None:
    entries: list[tuple[Event, int]] = [(GaussianNoise(multiplier), 3), (GaussianNoise(2 * multiplier), 4)]
    mu = 2 / multiplier * (2 if relation == "replace_one" else 1)  # sqrt(3 + 4/4) = 2
    found = epsilon(entries, relation, delta)
    assert (found.method, found.grid) == ("gdp", None)
    assert oracles.gaussian_delta(found.value, mu) <= delta * (1 + 1e-6)
    assert found.value == 0 or oracles.gaussian_delta(found.value * (1 - 1e-6), mu) > delta * (1 - 1e-4)
    at = found.value + 0.1
    assert delta_at(entries, relation, at) == pytest.approx(float(oracles.gaussian_delta(at, mu)), rel=1e-9, abs=1e-300)


def test_forgetting_that_replacing_moves_by_two_would_fall_below_the_truth(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = FixedSampled(2000, 100, GaussianNoise(1.8))
    assert cost(GaussianNoise(2.0), 1, "replace_one", 1e-5) == pytest.approx(4.38, abs=0.005)
    monkeypatch.setattr(accounting, "_shrunk", lambda multiplier, relation: multiplier)
    assert cost(GaussianNoise(2.0), 1, "replace_one", 1e-5) == pytest.approx(1.99, abs=0.01)
    assert oracles.gaussian_delta(1.99, 1.0) > 5e-6  # which is the truth of half the movement
    assert oracles.gaussian_delta(1.99, 0.5) < 1e-5
    assert cost(fixed, 200, "replace_one", CNN) >= 4.60  # its doubling is its own, not the relation's


def laplace_delta(at: float, size: float) -> float:
    """The hockey stick of one Laplace release whose largest loss is `size`: closed form."""
    if at >= size:
        return 0.0
    return 1 - math.exp((at - size) / 2) if at > -size else -math.expm1(at)


def two_laplace_delta(at: float, one: float, other: float) -> float:
    """Of two releases: the mean over the first one's loss (two atoms and a density) of the second one's curve."""
    atoms = 0.5 * laplace_delta(at - one, other) + 0.5 * math.exp(-one) * laplace_delta(at + one, other)
    corners = sorted({-one, one, *(x for x in (at - other, at + other) if -one < x < one)})
    pieces = (
        integrate.quad(lambda x: math.exp((x - one) / 2) / 4 * laplace_delta(at - x, other), a, b)[0]
        for a, b in zip(corners, corners[1:], strict=False)
    )
    return atoms + sum(pieces)


@pytest.mark.parametrize("multiplier", [0.4, 1.0, 5.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_two_laplace_releases_are_the_exact_composition(multiplier: float, share: float) -> None:
    at = share * 2 / multiplier
    truth = two_laplace_delta(at, 1 / multiplier, 1 / multiplier)
    ours = delta_at([(LaplaceNoise(multiplier), 2)], "add_remove", at)
    assert truth * (1 - 1e-9) <= ours <= truth * 1.02 + 1e-6
    assert cost(LaplaceNoise(multiplier), 2, "add_remove", truth) == pytest.approx(at, rel=0.01, abs=2e-3)


@pytest.mark.parametrize("split", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("at", [0.01, 0.5, 0.95])
def test_a_laplace_vector_is_bounded_by_the_scalar_at_its_l1_norm(split: float, at: float) -> None:
    truth = two_laplace_delta(at, split, 1 - split) if split else laplace_delta(at, 1.0)
    ours = delta_at([(LaplaceNoise(1.0), 1)], "add_remove", at)
    assert ours >= truth * (1 - 1e-9)
    assert split or ours == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize("count", [1, 7, 50])
def test_laplace_is_pure_at_delta_zero_and_never_costs_more_than_pure(count: int) -> None:
    pure = count * 2 / 3.0
    assert cost(LaplaceNoise(3.0), count, "replace_one", 0.0) == pytest.approx(pure, rel=1e-9)
    assert cost(LaplaceNoise(3.0), count, "replace_one", 1e-5) <= pure


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("rate", "multiplier"), [(0.05, 0.7), (0.3, 1.0), (0.9, 2.0)])
def test_one_poisson_round_is_the_integral_of_its_densities(relation: Relation, rate: float, multiplier: float) -> None:
    x = np.linspace(-40, 40, 400_001)
    still, moved = stats.norm.pdf(x, 0, multiplier), stats.norm.pdf(x, 1, multiplier)
    other = (1 - rate) * still + rate * moved[::-1] if relation == "replace_one" else still
    with_it = (1 - rate) * still + rate * moved
    for at in (0.02, 0.3, 1.0):
        pairs = ((with_it, other), (other, with_it))
        truth = max(float(np.sum(np.maximum(p - math.exp(at) * q, 0))) * (x[1] - x[0]) for p, q in pairs)
        ours = delta_at([(PoissonSampled(rate, GaussianNoise(multiplier)), 1)], relation, at)
        assert truth * (1 - 1e-6) <= ours <= truth * 1.01 + 1e-9


@pytest.mark.parametrize("count", [1, 2, 30, 1000])
@pytest.mark.parametrize("pair", [Approximate(0.05, 1e-8), Approximate(0.7, 0.0), Approximate(3.0, 1e-9)])
def test_repeated_pairs_cost_their_optimal_composition(count: int, pair: Approximate) -> None:
    grid = pair.epsilon / 50  # the losses are whole multiples of it, so that the library rounds nothing
    library = accounting._composed(((pair, count),), "zero_out", grid).get_epsilon_for_delta(1e-4)
    assert cost(pair, count, "zero_out", 1e-4) == pytest.approx(min(library, count * pair.epsilon), rel=1e-6, abs=2e-9)


def test_pairs_that_spent_all_of_delta_cost_their_sum_and_more_than_delta_is_refused() -> None:
    assert cost(Approximate(0.5, 1e-5), 1, "zero_out", 1e-5) == 0.5
    assert cost(Approximate(0.5, 1e-5), 2, "zero_out", 1.5e-5) == math.inf


# ---- shapes ---------------------------------------------------------------------------------------------------------

events = st.one_of(
    st.builds(GaussianNoise, st.floats(0.5, 20)),
    st.builds(LaplaceNoise, st.floats(0.5, 20)),
    st.builds(PoissonSampled, st.floats(0.01, 0.5), st.builds(GaussianNoise, st.floats(0.6, 8))),
    st.builds(FixedSampled, st.just(1000), st.integers(10, 500), st.builds(GaussianNoise, st.floats(1.0, 8))),
)


@given(event=events, count=st.sampled_from([1, 10, 300]), delta=st.sampled_from([1e-8, 1e-5, 1e-3]))
@settings(max_examples=25, deadline=None)
def test_the_first_opinion_is_never_above_the_second(event: Event, count: int, delta: float) -> None:
    relation: Relation = "replace_one" if isinstance(event, FixedSampled) else "add_remove"
    first = accounting.bound([(event, count)], relation, delta).value
    second = accounting.rdp_epsilon([(event, count)], relation, delta)
    assert second is not None
    assert 0 <= first <= second


def test_the_second_opinion_is_the_answer_where_it_is_the_smaller() -> None:
    found = epsilon([(LaplaceNoise(100.0), 10_000)], "zero_out", 1e-16)  # below what the library's tails resolve
    assert (found.method, found.value) == ("rdp", found.rdp)
    assert found.value < 10 < accounting.bound([(LaplaceNoise(100.0), 10_000)], "zero_out", 1e-16).value


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


@pytest.mark.parametrize("size", [1, 2, 10])
def test_a_group_multiplies_mu(size: int) -> None:
    found = group_epsilon([(GaussianNoise(10.0), 4)], "zero_out", 1e-5, size)
    assert found == pytest.approx(cost(GaussianNoise(10.0 / size), 4, "zero_out", 1e-5), rel=1e-9)
    with pytest.raises(PlanError, match="group privacy"):
        group_epsilon([(LaplaceNoise(10.0), 4)], "zero_out", 1e-5, size)


def test_no_release_costs_nothing_and_an_unprotected_one_everything() -> None:
    assert epsilon([], "add_remove", 1e-5).value == 0
    assert epsilon([(Unprotected(), 0), (GaussianNoise(1.0), 0)], "add_remove", 1e-5).value == 0
    assert cost(Unprotected(), 1, "add_remove", 1e-5) == math.inf
    assert delta_at([(GaussianNoise(1.0), 1), (Unprotected(), 1)], "add_remove", 5.0) == 1
