"""Promises of the fixed-size curve: never below the truth, right shape, right numbers, and a doubled sensitivity."""

from __future__ import annotations

import math
from functools import cache

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.accounting import oracles
from tests.accounting.pld.without_replacement import gaussian_delta, hockey_stick

from sordino.errors import SideConditionError

DELTA = 2000**-1.1
RATE, ROUNDS = 0.05, 200
rates = st.floats(1e-6, 1.0)
noise_multipliers = st.floats(0.05, 200.0)


def composed_epsilon(*, rate: float, noise_multiplier: float, rounds: int, delta: float, step: float) -> float:
    """The composition by connect-the-dots at one step."""
    reach = math.ceil(12 / step)
    curve = hockey_stick(
        step * np.arange(-reach, reach + 1, dtype=np.float64), rate=rate, noise_multiplier=noise_multiplier
    )
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -reach, reach, curve)
    return float(pmf.self_compose(rounds, 1e-12).get_epsilon_for_delta(delta))


@cache
def refined_epsilon(noise_multiplier: float) -> float:
    """T=200, q=.05: the step is halved until epsilon moves by less than 1%."""
    step, before = 4e-3, math.inf
    while True:
        epsilon = composed_epsilon(rate=RATE, noise_multiplier=noise_multiplier, rounds=ROUNDS, delta=DELTA, step=step)
        if abs(epsilon - before) < 0.01 * epsilon:
            return epsilon
        step, before = step / 2, epsilon


@cache
def certified(noise_multiplier: float) -> float:
    return oracles.lower_bound(rate=RATE, noise_multiplier=noise_multiplier, rounds=ROUNDS, delta=DELTA)


def at(epsilon: float, *, rate: float, noise_multiplier: float) -> float:
    return float(hockey_stick(np.array([epsilon]), rate=rate, noise_multiplier=noise_multiplier)[0])


def mixture_delta(epsilon: float, *, rate: float, noise_multiplier: float) -> mpmath.mpf:
    """delta of (1-q) N(0, z^2) + q N(2, z^2) against N(0, z^2): the exact curve of one pair of neighbours."""
    with mpmath.workdps(40):
        z, threshold = mpmath.mpf(noise_multiplier), mpmath.expm1(epsilon) / rate
        if threshold <= -1:
            return -mpmath.expm1(epsilon)
        cut = z**2 / 2 * mpmath.log1p(threshold) + 1  # the loss exceeds epsilon beyond it
        return (
            (1 - rate) * mpmath.ncdf(-cut / z)
            + rate * mpmath.ncdf((2 - cut) / z)
            - mpmath.exp(epsilon) * mpmath.ncdf(-cut / z)
        )


@pytest.mark.parametrize(
    ("noise_multiplier", "upper", "lower"), [(2.4, 3.06, 2.62), (2.2, 3.59, 3.07), (2.0, 4.31, 3.69), (1.8, 5.36, 4.60)]
)
def test_fixed_size_epsilon_matches_the_checked_numbers(noise_multiplier: float, upper: float, lower: float) -> None:
    assert refined_epsilon(noise_multiplier) == pytest.approx(upper, rel=0.02)
    assert certified(noise_multiplier) == pytest.approx(lower, abs=0.01)


@pytest.mark.parametrize("noise_multiplier", [2.4, 2.2, 2.0, 1.8])
def test_fixed_size_epsilon_is_never_below_the_certified_lower_bound(noise_multiplier: float) -> None:
    assert refined_epsilon(noise_multiplier) >= certified(noise_multiplier)


@pytest.mark.parametrize("noise_multiplier", [2.4, 2.2, 2.0, 1.8])
def test_sensitivity_one_instead_of_two_would_fall_below_the_certified_lower_bound(noise_multiplier: float) -> None:
    sabotaged = refined_epsilon(2 * noise_multiplier)  # sensitivity C at z is sensitivity 2C at 2z
    assert sabotaged < certified(noise_multiplier)


def test_a_forgotten_negative_half_would_be_noticed() -> None:
    epsilons = np.array([-0.5, -0.05])
    one_sided = RATE * gaussian_delta(np.zeros(2), mu=2 / 2.4)
    truth = [float(mixture_delta(e, rate=RATE, noise_multiplier=2.4)) for e in epsilons]
    assert np.all(one_sided < truth)
    assert np.all(hockey_stick(epsilons, rate=RATE, noise_multiplier=2.4) >= truth)


@pytest.mark.parametrize("noise_multiplier", [0.5, 2.0, 20.0])
def test_the_oracle_itself_stays_below_the_plain_gaussian(noise_multiplier: float) -> None:
    epsilon = oracles.lower_bound(rate=1.0, noise_multiplier=noise_multiplier * 10, rounds=100, delta=1e-5)
    truth = oracles.gaussian_delta(epsilon, 2 / noise_multiplier)
    slightly_more = oracles.gaussian_delta(epsilon * 1.01 + 0.005, 2 / noise_multiplier)
    assert slightly_more < 1e-5 <= truth


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 0.1, 1.0, 10.0, 100.0])
def test_gaussian_delta_is_the_closed_form_rounded_up(mu: float, epsilon: float) -> None:
    ours, truth = float(gaussian_delta(np.array([epsilon]), mu=mu)[0]), oracles.gaussian_delta(epsilon, mu)
    assert ours >= truth
    assert ours <= float(truth) * (1 + 1e-9) + 1e-307


@given(epsilon=st.floats(0, 50), mu=st.floats(0.01, 40))
@settings(max_examples=60, deadline=None)
def test_gaussian_delta_never_falls_below_the_closed_form(epsilon: float, mu: float) -> None:
    assert gaussian_delta(np.array([epsilon]), mu=mu)[0] >= oracles.gaussian_delta(epsilon, mu)


@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("epsilon", [-30.0, -2.0, -0.1, 0.0, 0.1, 2.0, 8.0])
def test_rate_one_is_the_plain_gaussian_of_mu_two_over_z(epsilon: float, noise_multiplier: float) -> None:
    truth = oracles.gaussian_delta(epsilon, 2 / noise_multiplier)
    assert at(epsilon, rate=1.0, noise_multiplier=noise_multiplier) == pytest.approx(float(truth), rel=1e-9)


@given(epsilon=st.floats(-20, 20), rate=rates, noise_multiplier=st.floats(0.2, 20))
@settings(max_examples=100, deadline=None)
def test_one_round_is_never_below_the_exact_curve_of_a_pair(
    epsilon: float, rate: float, noise_multiplier: float
) -> None:
    truth = mixture_delta(epsilon, rate=rate, noise_multiplier=noise_multiplier)
    assert at(epsilon, rate=rate, noise_multiplier=noise_multiplier) >= float(truth) * (
        1 - 1e-9
    )  # where the oracle itself cancels


@pytest.mark.parametrize("epsilon", [1e-8, 1e-3, 0.5, 0.999, 1.001, 3.0])
@pytest.mark.parametrize("rate", [1e-6, 0.05, 0.999])
def test_above_zero_the_theorem_is_attained_by_a_pair(epsilon: float, rate: float) -> None:
    truth = float(mixture_delta(epsilon, rate=rate, noise_multiplier=1.5))
    assert at(epsilon, rate=rate, noise_multiplier=1.5) == pytest.approx(truth, rel=1e-9, abs=1e-300)


def secants(curve: NDArray[np.float64], epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    steps: NDArray[np.float64] = np.exp(epsilons[:-1]) * np.expm1(np.diff(epsilons))
    return np.diff(curve) / steps


@given(rate=rates, noise_multiplier=noise_multipliers, reach=st.floats(0.05, 12))
@settings(max_examples=100, deadline=None)
def test_the_curve_is_decreasing_and_convex_in_exp_epsilon(rate: float, noise_multiplier: float, reach: float) -> None:
    epsilons = np.linspace(-reach, reach, 401)
    curve = hockey_stick(epsilons, rate=rate, noise_multiplier=noise_multiplier)
    slopes = secants(curve, epsilons)
    rounding = 4e-12 * (curve[:-1] + 1e-300) / (np.exp(epsilons[:-1]) * np.expm1(np.diff(epsilons)))
    assert np.all(np.diff(curve) <= 1e-15)
    assert np.all(np.diff(slopes) >= -(rounding[1:] + rounding[:-1]))


@given(epsilon=st.floats(-1e300, 1e300), rate=rates, noise_multiplier=st.floats(1e-100, 1e100))
@settings(max_examples=200, deadline=None)
def test_every_real_epsilon_gives_a_delta_between_0_and_1(epsilon: float, rate: float, noise_multiplier: float) -> None:
    delta = at(epsilon, rate=rate, noise_multiplier=noise_multiplier)
    assert 0 < delta <= 1
    assert delta >= -math.expm1(min(epsilon, 0.0))


@given(epsilon=st.floats(-5, 5), rate=st.floats(0.001, 0.5), noise_multiplier=st.floats(0.3, 20))
@settings(max_examples=60, deadline=None)
def test_more_noise_and_a_smaller_rate_never_cost_more(epsilon: float, rate: float, noise_multiplier: float) -> None:
    here = at(epsilon, rate=rate, noise_multiplier=noise_multiplier) * (1 + 1e-11)
    assert at(epsilon, rate=rate, noise_multiplier=1.1 * noise_multiplier) <= here
    assert at(epsilon, rate=0.9 * rate, noise_multiplier=noise_multiplier) <= here


@pytest.mark.parametrize(
    ("rate", "noise_multiplier"), [(0.0, 1.0), (1.1, 1.0), (math.nan, 1.0), (0.1, 0.0), (0.1, math.inf)]
)
def test_a_rate_or_noise_outside_the_theorem_is_refused(rate: float, noise_multiplier: float) -> None:
    with pytest.raises(SideConditionError):
        hockey_stick(np.zeros(1), rate=rate, noise_multiplier=noise_multiplier)
