"""Promises of the calibration: any two numbers give the third, within 0.5%, in seconds, or a clear refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import plan

from sordino import calibrate
from sordino.accounting import accountant, calibration
from sordino.accounting.accountant import default_delta
from sordino.accounting.composition import Line
from sordino.accounting.events import Approximate, Event, GaussianNoise, LaplaceNoise, PoissonSampled, Relation
from sordino.errors import PlanError, UnreachableError
from sordino.parts.encoding import Clip
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.releases import CentralNoise, LocalNoise, NoiseShares, NoNoise, ShuffledNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin
from sordino.plan import Plan

L1 = (Clip(1.0, norm=1),)
PLANS: dict[str, dict[str, Any]] = {
    "poisson": {"rounds": 200, "clients": Poisson(2000, 0.05)},
    "long poisson": {"rounds": 10_000, "clients": Poisson(10_000, 0.01)},
    "capped": {"rounds": 200, "clients": Poisson(2000, 0.05, cap=150)},
    "fixed": {"rounds": 200, "clients": FixedSize(2000, 100)},
    "everyone": {"rounds": 200, "clients": Everyone(2000)},
    "round robin": {"rounds": 200, "clients": RoundRobin(2000, 100)},
    "laplace": {"rounds": 20, "clients": Everyone(2000), "encode": L1, "release": CentralNoise(Laplace(1.0))},
    "sampled laplace": {
        "rounds": 200,
        "clients": Poisson(2000, 0.05),
        "encode": L1,
        "release": CentralNoise(Laplace(1.0)),
    },
    "shares": {"rounds": 200, "clients": Poisson(2000, 0.05), "release": NoiseShares(1.0, at_least=80)},
    "local": {"rounds": 20, "clients": Poisson(2000, 0.05), "release": LocalNoise(Gaussian(1.0))},
    "local laplace": {"rounds": 5, "clients": Everyone(2000), "encode": L1, "release": LocalNoise(Laplace(1.0))},
    "shuffled": {
        "rounds": 10,
        "clients": Everyone(100_000),
        "release": ShuffledNoise(Gaussian(1.0), at_least=100_000),
    },
}
SAMPLED = ("poisson", "long poisson", "fixed")


def cost(one: Plan) -> float:
    line = one.cost().line("models")
    return accountant.epsilon(line.entries, line.relation, default_delta(one.clients.population)).value


@pytest.mark.parametrize(("name", "target"), [*((name, 1.5) for name in PLANS), ("poisson", 8.0), ("fixed", 0.1)])
def test_epsilon_and_rounds_give_the_multiplier_and_back(name: str, target: float) -> None:
    wanted = plan(**PLANS[name])
    noisy = calibrate(wanted, epsilon=target)
    assert 0.995 * target <= cost(noisy) <= target
    assert replace(noisy, release=wanted.release) == wanted
    long = calibrate(noisy, epsilon=target, free="rounds")
    assert wanted.rounds <= long.rounds <= 1.03 * wanted.rounds + 4  # +4: forecasts of `most` stand still for a while
    assert cost(long) <= target


@pytest.mark.parametrize("name", ["poisson", "fixed", "everyone", "laplace", "shares"])
def test_the_rounds_found_are_the_most(name: str) -> None:
    one = plan(**PLANS[name])
    noisy = calibrate(one, epsilon=3.0)
    found = calibrate(noisy, epsilon=2.0, free="rounds")
    assert cost(found) <= 2.0 < cost(replace(found, rounds=found.rounds + 1))


@pytest.mark.parametrize("name", SAMPLED)
def test_epsilon_and_multiplier_give_the_largest_cohort(name: str) -> None:
    noisy = calibrate(plan(**PLANS[name]), epsilon=2.0)
    found = calibrate(noisy, epsilon=2.0, free="cohort")
    assert round(found.clients.expected) == round(noisy.clients.expected)
    more = calibrate(noisy, epsilon=3.0, free="cohort")
    assert more.clients.expected > 1.3 * found.clients.expected
    assert cost(more) <= 3.0


def test_a_cohort_that_is_not_chosen_cannot_be_free() -> None:
    with pytest.raises(PlanError, match="calibration"):
        calibrate(plan(clients=Everyone(6)), epsilon=1.0, free="cohort")


def test_everyone_may_be_the_largest_cohort() -> None:
    found = calibrate(plan(rounds=1, clients=FixedSize(50, 5), release=CentralNoise(Gaussian(50.0))), epsilon=9.0)
    assert calibrate(replace(found, release=CentralNoise(Gaussian(50.0))), epsilon=9.0, free="cohort").clients == (
        FixedSize(50, 50)
    )


# ---- a line that is nobody's plan -----------------------------------------------------------------------------------


def lines(make: Callable[[float], Event], relation: Relation, count: int) -> Callable[[float], Line]:
    return lambda z: Line("models", relation, ((make(z), count),))


def spent(line: Line, delta: float) -> float:
    return accountant.epsilon(line.entries, line.relation, delta).value


@given(
    target=st.floats(0.05, 10),
    delta=st.sampled_from([1e-9, 1e-6, 1e-3]),
    count=st.sampled_from([1, 30, 500]),
    rate=st.sampled_from([0.01, 0.2, 1.0]),
)
@settings(max_examples=5, deadline=None)
def test_the_multiplier_meets_any_target_within_half_a_percent(
    target: float, delta: float, count: int, rate: float
) -> None:
    line_of = lines(lambda z: PoissonSampled(rate, GaussianNoise(z)), "add_remove", count)
    found = calibration.noise_multiplier(line_of, target, delta)
    assert spent(line_of(found), delta) <= target
    assert spent(line_of(found), delta) >= 0.995 * target or found <= 0.02


@given(target=st.floats(0.1, 30), noise_multiplier=st.floats(0.5, 50))
@settings(max_examples=40, deadline=None)
def test_the_rounds_of_a_gaussian_are_those_of_its_closed_form(target: float, noise_multiplier: float) -> None:
    def line_of(n: int) -> Line:
        return Line("models", "zero_out", ((GaussianNoise(noise_multiplier), n),))

    if spent(line_of(1), 1e-5) > target:
        with pytest.raises(UnreachableError, match="already for 1 round"):
            calibration.rounds(line_of, target, 1e-5)
    else:
        found = calibration.rounds(line_of, target, 1e-5)
        assert spent(line_of(found), 1e-5) <= target < spent(line_of(found + 1), 1e-5)


def test_any_noise_will_do_where_sampling_alone_meets_the_target() -> None:
    line_of = lines(lambda z: PoissonSampled(1e-6, GaussianNoise(z)), "add_remove", 3)
    assert spent(line_of(0.02), 1e-5) == 0
    assert calibration.noise_multiplier(line_of, 0.5, 1e-5) <= 0.01


def test_pure_laplace_is_calibrated_at_delta_zero() -> None:
    found = calibration.noise_multiplier(lines(LaplaceNoise, "replace_one", 4), 2.0, 0.0)
    assert found == pytest.approx(4.0, rel=0.005)
    assert found >= 4.0


def test_a_multiplier_guessed_far_off_costs_time_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    line_of = lines(lambda z: PoissonSampled(0.05, GaussianNoise(z)), "add_remove", 200)
    right = calibration.noise_multiplier(line_of, 2.0, 1e-4)
    for guess in (0.3, 300.0):
        monkeypatch.setattr(calibration, "_clt_multiplier", lambda *_, guess=guess: guess)
        assert calibration.noise_multiplier(line_of, 2.0, 1e-4) == pytest.approx(right, rel=0.005)


@pytest.mark.parametrize("count", [1, 20_000])
def test_a_count_guessed_far_off_costs_time_and_nothing_else(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def line_of(n: int) -> Line:
        return Line("models", "add_remove", ((PoissonSampled(0.05, GaussianNoise(2.0)), n),))

    monkeypatch.setattr(calibration, "_clt_count", lambda *_: count)
    found = calibration.rounds(line_of, 1.0, 1e-4)
    assert spent(line_of(found), 1e-4) <= 1.0 < spent(line_of(found + 1), 1e-4)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("free", ["noise_multiplier", "rounds"])
def test_an_epsilon_that_means_nothing_is_refused(target: float, free: str) -> None:
    with pytest.raises(UnreachableError, match="positive finite epsilon"):
        calibrate(plan(), epsilon=target, free=free)


@pytest.mark.parametrize("delta", [-1e-9, 1.0, math.nan])
def test_a_delta_that_means_nothing_is_refused(delta: float) -> None:
    with pytest.raises(UnreachableError, match="delta"):
        calibrate(plan(), epsilon=1.0, delta=delta)


@pytest.mark.parametrize(
    ("changes", "target", "delta", "free"),
    [
        ({"rounds": 1, "clients": Everyone(6)}, 1e-9, 1e-9, "noise_multiplier"),
        ({"rounds": 1, "clients": Everyone(6)}, 1e-9, 1e-9, "rounds"),
        ({"rounds": 1, "clients": Everyone(6)}, 1.0, 0.0, "noise_multiplier"),
        ({"rounds": 1, "clients": Poisson(600, 0.1)}, 1.0, 0.0, "noise_multiplier"),
        ({"rounds": 1, "clients": Poisson(600, 0.1)}, 1.0, 0.0, "rounds"),
        ({"rounds": 1, "clients": FixedSize(600, 60)}, 1.0, 0.0, "noise_multiplier"),
        ({"rounds": 10_000, "clients": FixedSize(600, 60)}, 0.01, 1e-9, "cohort"),
        ({"rounds": 3, "clients": Everyone(600), "release": NoNoise()}, 1.0, 1e-5, "rounds"),
        (
            {"rounds": 3, "clients": Everyone(600), "release": ShuffledNoise(Gaussian(1.0), 600)},
            1.0,
            0.0,
            "noise_multiplier",
        ),
    ],
    ids=str,
)
def test_a_target_out_of_reach_is_refused_in_one_sentence(
    changes: dict[str, Any], target: float, delta: float, free: str
) -> None:
    with pytest.raises(UnreachableError, match="epsilon") as refused:
        calibrate(plan(**changes), epsilon=target, delta=delta, free=free)
    assert refused.value.found
    assert refused.value.needed
    assert refused.value.fix


def test_a_release_without_a_multiplier_is_refused() -> None:
    with pytest.raises(PlanError, match="calibration"):
        calibrate(plan(release=NoNoise()), epsilon=1.0)


def test_a_budget_of_pairs_counts_them() -> None:
    def line_of(n: int) -> Line:
        return Line("models", "zero_out", ((Approximate(0.1, 1e-9), n),))

    assert calibration.rounds(line_of, 1.05, 1e-12 + 10e-9) == 10
