"""Promises for the rarer events: caps, tuning, shuffling; and that a plan may be built exactly if it can be billed."""

from __future__ import annotations

import math
import time

import pytest
from tests.privacy import oracles

from sordino.errors import PlanError
from sordino.parts.events import (
    Approximate,
    CappedPoisson,
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Relation,
    Shuffled,
    Tuned,
    Unprotected,
    billable,
)
from sordino.privacy import accounting
from sordino.privacy.accounting import delta_at, deltas_at, epsilon

RELATIONS: tuple[Relation, ...] = ("add_remove", "replace_one", "zero_out")


def cost(event: Event, count: int, relation: Relation, delta: float) -> float:
    return epsilon([(event, count)], relation, delta).value


# ---- caps and tuning ------------------------------------------------------------------------------------------------


def test_a_cap_of_half_as_much_again_is_almost_free_and_a_tighter_one_is_not() -> None:
    free = cost(PoissonSampled(0.05, GaussianNoise(2.0)), 200, "add_remove", 1e-5)
    capped = [cost(CappedPoisson(0.05, 2000, cap, GaussianNoise(2.0)), 200, "add_remove", 1e-5) for cap in (150, 120)]
    assert free < capped[0] < 1.001 * free
    assert capped[1] > 1.25 * free


@pytest.mark.parametrize("shape", [0.0, 1.0])
def test_tuning_costs_more_than_one_run_and_less_than_showing_every_run(shape: float) -> None:
    run = PoissonSampled(0.05, GaussianNoise(2.0))
    tuned = epsilon([(Tuned(run, 200, mean=20.0, shape=shape), 1)], "add_remove", 1e-5)
    assert tuned.method == "rdp"
    one = accounting.rdp_epsilon([(run, 200)], "add_remove", 1e-5)
    assert one is not None
    assert one < tuned.value < cost(run, 20 * 200, "add_remove", 1e-5) / 2


def test_tuning_twice_and_releasing_more_beside_it_both_cost_more() -> None:
    tuned, more = Tuned(GaussianNoise(10.0), 5, 3.0), GaussianNoise(5.0)
    once = cost(tuned, 1, "replace_one", 1e-5)
    assert cost(tuned, 2, "replace_one", 1e-5) > once
    assert epsilon([(tuned, 1), (more, 1)], "replace_one", 1e-5).value > once


# ---- shuffling ------------------------------------------------------------------------------------------------------

CROWD = Shuffled(100_000, Approximate(4.0))


def test_one_shuffled_round_costs_the_checked_epsilon() -> None:
    found = cost(CROWD, 1, "replace_one", 1e-6)
    assert found == pytest.approx(0.1698, abs=1e-4)
    assert 0.1675 <= found <= 0.1728


@pytest.mark.parametrize("rounds", [2, 10])
def test_a_few_shuffled_rounds_cost_their_sum_at_a_share_of_delta(rounds: int) -> None:
    found = cost(CROWD, rounds, "replace_one", 1e-6)
    assert cost(CROWD, 1, "replace_one", 1e-6) * rounds < found
    assert found == pytest.approx(rounds * cost(CROWD, 1, "replace_one", 1e-6 / rounds), rel=1e-6)


def test_many_shuffled_rounds_cost_less_than_their_sum() -> None:
    one = cost(CROWD, 1, "replace_one", 1e-6)
    assert 10 * one < cost(CROWD, 100, "replace_one", 1e-6) < 0.8 * 100 * one


def test_a_shuffled_gaussian_is_amplified_where_it_is_noisy_and_never_above_its_own_messages() -> None:
    for multiplier, amplified in ((5.0, True), (2.0, True), (0.5, False)):
        local = cost(GaussianNoise(multiplier), 3, "replace_one", 1e-6)
        found = cost(Shuffled(100_000, GaussianNoise(multiplier)), 3, "replace_one", 1e-6)
        assert found < local / 2 if amplified else found == local


def test_one_shuffled_gaussian_report_is_no_less_than_the_gaussian_itself() -> None:
    for multiplier in (1.0, 4.0):
        found = cost(Shuffled(1, GaussianNoise(multiplier)), 1, "replace_one", 1e-5)
        assert oracles.gaussian_delta(found, 2 / multiplier) <= 1e-5 * (1 + 1e-6)
        assert oracles.gaussian_delta(found * 0.999, 2 / multiplier) > 1e-5


@pytest.mark.parametrize("relation", ["add_remove", "zero_out"])
def test_shuffling_is_refused_for_a_relation_its_theorem_does_not_cover(relation: Relation) -> None:
    with pytest.raises(PlanError, match="accounting"):
        epsilon([(CROWD, 1)], relation, 1e-6)


def test_the_curve_of_shuffled_rounds_holds_where_their_epsilon_does() -> None:
    gauss = Shuffled(100_000, GaussianNoise(3.0))
    found = cost(gauss, 2, "replace_one", 1e-6)
    assert delta_at([(gauss, 2)], "replace_one", found) <= 1.01e-6
    curve = deltas_at([(gauss, 2)], "replace_one", [-1.0, 0.0, 0.5, 1.0, 5.0])
    assert curve == sorted(curve, reverse=True)
    assert curve[0] >= 1 - math.exp(-1)


# ---- what can be billed ---------------------------------------------------------------------------------------------

NOISE: list[Event] = [GaussianNoise(2.0), LaplaceNoise(2.0), Approximate(0.5, 1e-9), Unprotected()]
SAMPLED: list[Event] = [
    wrapped
    for inner in [*NOISE, PoissonSampled(0.1, GaussianNoise(2.0))]
    for wrapped in (
        PoissonSampled(0.1, inner),
        CappedPoisson(0.1, 100, 15, inner),
        FixedSampled(100, 10, inner),
        Shuffled(1000, inner),
    )
]


def accepted(event: Event, relation: Relation) -> bool:
    try:
        return not math.isnan(cost(event, 2, relation, 1e-5))
    except PlanError:
        return False


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("event", [*NOISE, *SAMPLED], ids=str)
def test_an_event_is_billable_exactly_if_the_accountant_accepts_it(event: Event, relation: Relation) -> None:
    assert billable(event, relation) == accepted(event, relation)


def test_tuning_is_billable_exactly_if_the_accountant_accepts_it() -> None:
    tuned = [Tuned(event, 3, 2.0) for event in [*NOISE, *SAMPLED]]
    cases = [(event, relation) for event in tuned for relation in RELATIONS]
    assert [case for case in cases if billable(*case) != accepted(*case)] == []


@pytest.mark.parametrize("inner", [CappedPoisson(0.1, 100, 15, GaussianNoise(2.0)), Approximate(0.5)], ids=str)
def test_tuning_what_has_no_renyi_bound_is_refused(inner: Event) -> None:
    with pytest.raises(PlanError, match="Renyi"):
        cost(Tuned(inner, 3, 2.0), 1, "add_remove", 1e-5)


def test_every_kind_of_event_is_among_those_tried() -> None:
    tried = {type(event) for event in [*NOISE, *SAMPLED]} | {Tuned}
    assert tried == set(Event.__subclasses__())


# ---- next to no noise -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (PoissonSampled(0.01, GaussianNoise(0.01)), "add_remove"),
        (FixedSampled(100, 100, GaussianNoise(0.03)), "replace_one"),
        (CappedPoisson(0.01, 1000, 15, GaussianNoise(0.01)), "zero_out"),
        (LaplaceNoise(0.001), "replace_one"),
        (PoissonSampled(0.01, LaplaceNoise(0.001)), "add_remove"),
        (PoissonSampled(0.01, GaussianNoise(1e6)), "add_remove"),
    ],
    ids=str,
)
def test_absurd_noise_gets_an_answer_in_seconds(event: Event, relation: Relation) -> None:
    began = time.process_time()
    found = cost(event, 10, relation, 1e-5)
    assert time.process_time() - began < 8
    unsampled = getattr(event, "event", event)
    assert 0 <= found <= 1.01 * cost(unsampled, 10, "replace_one", 1e-5)


def test_a_tiny_delta_gets_an_answer_in_seconds() -> None:
    began = time.process_time()
    assert cost(PoissonSampled(0.01, GaussianNoise(1.0)), 1000, "add_remove", 1e-14) == pytest.approx(4.36, abs=0.05)
    assert time.process_time() - began < 8
