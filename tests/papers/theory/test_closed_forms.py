"""The papers' closed forms give the published numbers where they are proved, and refuse elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise, product
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from sordino.errors import SideConditionError
from sordino_papers.theory import central_noise as closed_forms
from sordino_papers.theory import local_noise, smoothing
from sordino_papers.theory.central_noise import (
    CLASSIC,
    POISSON,
    UNIFORM,
    RenyiNoise,
    SubsamplingLemma,
    lssgd_noise,
    poisson_noise,
    smallest_epsilon,
    subsampled_rdp,
    uniform_noise,
)
from sordino_papers.theory.local_noise import (
    Objective,
    Relation,
    client_distance_bound,
    client_gaussian_std,
    client_laplace_scale,
    gaussian_constant,
    laplace_constant,
    one_pass_std,
    round_robin_participations,
    shuffled_std,
    silo_experiment_std,
    silo_std,
    sound_client_gaussian_std,
    upload_sensitivity,
)
from sordino_papers.theory.smoothing import effective_dimension, smoothing_beta, smoothing_gamma, smoothing_risk

Numbers = dict[str, Any]
Call = Callable[..., float | RenyiNoise]
Floats = npt.NDArray[np.float64]

FED: Numbers = {"epsilon": 6.0, "delta": 1000**-1.1, "rounds": 30, "rate": 0.05, "clip_norm": 0.4}
LSSGD: Numbers = {"epsilon": 5.0, "delta": 1e-5, "rounds": 19532, "clip_norm": 1.0, "records": 50_000, "batch": 128}
SILO: Numbers = {"epsilon": 3.0, "delta": 1238**-2, "rounds": 35, "clip_norm": 1.0, "records": 1238, "batch": 1238}
ONE_PASS: Numbers = {"epsilon": 1.0, "delta": 1e-6, "clip_norm": 1.0, "batch": 50}
SHUFFLED: Numbers = {
    "epsilon": 0.01,
    "delta": 1e-4,
    "rounds": 200,
    "clip_norm": 1.0,
    "records": 10,
    "cohort": 600,
    "population": 1000,
    "constant": 1.0,
}
CLIENT: Numbers = {"participations": 5, "steps": 4, "learning_rate": 0.1, "clip_norm": 3.0}
LAPLACE: Numbers = {"epsilon": 1.0, "relation": "replace_one", **CLIENT}
GAUSS: Numbers = {"epsilon": 2.0, "delta": 1e-4, "relation": "replace_one", "c1": 10.0, "c2": 2.0, **CLIENT}
OBJECTIVE = Objective(smoothness=4.0, convexity=0.5, gradient=1.5, heterogeneity=0.3, distance=2.0)
BOUND: Numbers = {"steps": 4, "rounds": 25, "cohort": 5, "population": 20, "constant": 1e-3, "growth": 2.0}
EVERY_FORMULA: list[tuple[Call, Numbers]] = [
    (uniform_noise, FED),
    (poisson_noise, FED),
    (lssgd_noise, LSSGD),
    (silo_std, SILO),
    (silo_experiment_std, SILO),
    (one_pass_std, ONE_PASS),
    (shuffled_std, SHUFFLED),
    (client_laplace_scale, LAPLACE),
    (client_gaussian_std, GAUSS),
]


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact epsilon of a mu-GDP mechanism (Balle and Wang 2018)."""

    def excess(epsilon: float) -> float:
        tail = math.exp(epsilon + float(log_ndtr(-epsilon / mu - mu / 2)))
        return float(ndtr(mu / 2 - epsilon / mu)) - tail - delta

    return float(brentq(excess, 0.0, 200.0)) if excess(0.0) > 0 else 0.0


def dense(strength: float, dimension: int) -> Floats:
    """A = I + s L of the cycle, built edge by edge."""
    matrix = np.eye(dimension)
    for i in range(dimension):
        step = np.zeros(dimension)
        step[i] -= 1.0
        step[(i + 1) % dimension] += 1.0
        matrix += strength * np.outer(step, step)
    return matrix


# ------------------------------------------------------------------------------------------ paper 000, Theorems 1, 2


@pytest.mark.parametrize(("epsilon", "std"), [(6, 1.077), (7, 0.885), (8, 0.776), (9, 0.701)])
def test_theorem_1_gives_the_noise_of_table_2_under_uniform_sampling(epsilon: float, std: float) -> None:
    assert uniform_noise(**FED | {"epsilon": epsilon}).std == pytest.approx(std, abs=6e-4)


@pytest.mark.parametrize(("epsilon", "std"), [(6, 0.454), (7, 0.389), (8, 0.346), (9, 0.315)])
def test_theorem_2_gives_the_noise_of_table_2_under_poisson_sampling(epsilon: float, std: float) -> None:
    assert poisson_noise(**FED | {"epsilon": epsilon, "delta": 500**-1.1}).std == pytest.approx(std, abs=6e-4)


def published_std(noise: RenyiNoise, constant: float) -> float:
    """Equations (4) and (5) of paper 000 as printed, at the split that was found."""
    inner = -math.log(FED["delta"]) / (1 - noise.split) + FED["epsilon"]
    scale = FED["rate"] * FED["clip_norm"] / FED["epsilon"]
    return float(scale * math.sqrt(constant * FED["rounds"] / noise.split * inner))


@pytest.mark.parametrize(("formula", "constant", "wide"), [(uniform_noise, 14, 2), (poisson_noise, 2, 1)])
def test_the_split_found_meets_the_printed_equation_and_both_side_conditions(
    formula: Callable[..., RenyiNoise], constant: float, wide: int
) -> None:
    noise = formula(**FED)
    assert noise.std == pytest.approx(published_std(noise, constant), rel=1e-9)
    squared = (noise.std / (wide * FED["clip_norm"])) ** 2
    reach = 2 / 3 * squared * math.log(1 / (FED["rate"] * noise.order * (1 + squared)))
    assert squared >= 5 / 9
    assert noise.order - 1 <= reach * (1 + 1e-9)
    assert noise.order - 1 >= reach * (1 - 1e-6), "the noise is the least: the binding condition is tight"


def test_no_split_of_a_fine_grid_beats_the_search() -> None:
    split = np.linspace(0, 1, 200_001)[1:-1]
    order = 1 - math.log(FED["delta"]) / ((1 - split) * FED["epsilon"])
    squared = 3.5 * FED["rate"] ** 2 * FED["rounds"] * order / (split * FED["epsilon"])
    good = (squared >= 2 / 3) & (order - 1 <= 2 / 3 * squared * np.log(1 / (FED["rate"] * order * (1 + squared))))
    best = 2 * FED["clip_norm"] * math.sqrt(squared[good].min())
    assert uniform_noise(**FED).std == pytest.approx(best, rel=1e-3)
    assert uniform_noise(**FED).std <= best


def test_without_a_binding_condition_the_noise_is_the_unconstrained_minimum() -> None:
    numbers = FED | {"epsilon": 4.0, "delta": 1e-5, "rounds": 1_000_000, "rate": 1e-3}
    log = -math.log(numbers["delta"])
    scale = numbers["rate"] * numbers["clip_norm"] / numbers["epsilon"] * math.sqrt(2 * numbers["rounds"])
    expected = scale * (math.sqrt(log) + math.sqrt(log + numbers["epsilon"]))
    assert poisson_noise(**numbers).std == pytest.approx(expected, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(epsilon=st.floats(6.0, 20.0), more=st.floats(1.0, 2.0), wide=st.floats(0.1, 10.0))
def test_more_budget_never_needs_more_noise_and_noise_scales_with_the_radius(
    epsilon: float, more: float, wide: float
) -> None:
    for formula in (uniform_noise, poisson_noise):
        std = formula(**FED | {"epsilon": epsilon}).std
        assert formula(**FED | {"epsilon": epsilon * more}).std <= std * (1 + 1e-9)
        assert formula(**FED | {"epsilon": epsilon, "clip_norm": wide * 0.4}).std == pytest.approx(wide * std)


@settings(max_examples=25, deadline=None)
@given(rounds=st.integers(1, 40), more=st.integers(0, 40), rate=st.floats(0.01, 0.05))
def test_more_rounds_never_need_less_noise(rounds: int, more: int, rate: float) -> None:
    for formula in (uniform_noise, poisson_noise):
        few = formula(**FED | {"rounds": rounds, "rate": rate, "epsilon": 9.0}).std
        many = formula(**FED | {"rounds": rounds + more, "rate": rate, "epsilon": 9.0}).std
        assert many >= few * (1 - 1e-9)


def test_a_budget_below_the_theorem_is_refused_with_the_numbers_and_the_epsilon_that_would_do() -> None:
    least = smallest_epsilon(UNIFORM, delta=FED["delta"], rounds=30, rate=0.05)
    with pytest.raises(SideConditionError, match=r"epsilon = 0\.1.*Renyi order is \d+.*order <= .*ratio\^2 >= 0\.6667"):
        uniform_noise(**FED | {"epsilon": 0.1})
    with pytest.raises(SideConditionError, match=f"raise epsilon to {least:.4g}"):
        uniform_noise(**FED | {"epsilon": least * 0.99})
    assert uniform_noise(**FED | {"epsilon": least * 1.001}).std > 0


def test_a_rate_beyond_the_lemma_is_refused_at_every_epsilon() -> None:
    assert smallest_epsilon(UNIFORM, delta=1e-3, rounds=30, rate=0.7) == math.inf
    with pytest.raises(SideConditionError, match=r"lower the rate 0\.7"):
        uniform_noise(**FED | {"rate": 0.7, "epsilon": 50.0})


# ------------------------------------------------------------------------------------------------ subsampling lemmas


@pytest.mark.parametrize(("lemma", "value"), [(UNIFORM, 3.5), (POISSON, 2.0), (CLASSIC, 5.0)])
def test_the_lemma_is_its_factor_times_rate_squared_times_order_over_ratio_squared(
    lemma: SubsamplingLemma, value: float
) -> None:
    assert subsampled_rdp(lemma, order=2.0, ratio=2.0, rate=0.01) == pytest.approx(value * 1e-4 * 2 / 4)


@pytest.mark.parametrize(("lemma", "floor"), [(UNIFORM, "0.6667"), (POISSON, "0.5556"), (CLASSIC, "1.5")])
def test_the_lemma_refuses_too_little_noise_and_too_high_an_order(lemma: SubsamplingLemma, floor: str) -> None:
    with pytest.raises(SideConditionError, match=rf"ratio\^2 = 0\.49.*>= {floor}"):
        subsampled_rdp(lemma, order=2.0, ratio=0.7, rate=0.01)
    with pytest.raises(SideConditionError, match=r"order = 40; needed order <= -?\d"):
        subsampled_rdp(lemma, order=40.0, ratio=2.0, rate=0.01)


def poisson_divergence(order: int, ratio: float, rate: float) -> float:
    """Mironov, Talwar and Zhang 2019, integer orders: the exact worst Renyi divergence of a Poisson Gaussian."""
    terms = (
        mpmath.binomial(order, j)
        * mpmath.mpf(1 - rate) ** (order - j)
        * mpmath.mpf(rate) ** j
        * mpmath.exp(mpmath.mpf(j * (j - 1)) / (2 * ratio**2))
        for j in range(order + 1)
    )
    return float(mpmath.log(mpmath.fsum(terms)) / (order - 1))


def test_where_the_poisson_lemma_answers_it_bounds_the_exact_divergence() -> None:
    answered = 0
    for order, ratio, rate in product((2, 3, 5, 9, 20), (0.76, 1.0, 1.5, 2.5, 5.0), (1e-4, 1e-3, 1e-2, 0.05)):
        with suppress(SideConditionError):
            bound = subsampled_rdp(POISSON, order=order, ratio=ratio, rate=rate)
            answered += 1
            assert poisson_divergence(order, ratio, rate) <= bound
    assert answered > 30


# ------------------------------------------------------------------------------------------------ paper 004, Theorem 2


@pytest.mark.parametrize("epsilon", [0.1, 0.15, 0.2, 0.25, 0.3, 1.0, 4.1])
def test_theorem_2_of_004_refuses_its_own_settings(epsilon: float) -> None:
    with pytest.raises(
        SideConditionError, match=rf"no admissible split at epsilon = {epsilon:g}.*raise epsilon to 4\.1"
    ):
        lssgd_noise(**LSSGD | {"epsilon": epsilon})


def test_theorem_2_of_004_answers_from_epsilon_4_15() -> None:
    least = smallest_epsilon(CLASSIC, delta=1e-5, rounds=LSSGD["rounds"], rate=128 / 50_000)
    assert least == pytest.approx(4.13, abs=0.02)
    assert lssgd_noise(**LSSGD | {"epsilon": 4.15}).std > 0


def test_theorem_2_of_004_is_the_printed_equation_at_an_admissible_mu() -> None:
    noise, n, b, rounds, epsilon = lssgd_noise(**LSSGD), 50_000, 128, LSSGD["rounds"], LSSGD["epsilon"]
    mu, alpha = noise.split, noise.order
    assert alpha == pytest.approx(math.log(1e5) / ((1 - mu) * epsilon) + 1)
    assert noise.std**2 == pytest.approx(20 * rounds * alpha / (mu * n**2 * epsilon))
    assert 5 * b**2 * rounds * alpha / (mu * n**2 * epsilon) >= 1.5
    assert alpha <= math.log(mu * n**3 * epsilon / (5 * b**3 * rounds * alpha + mu * b * n**2 * epsilon)) + 1e-9


# ------------------------------------------------------------------------------------------ papers 000, 004: smoothing


@pytest.mark.parametrize(
    ("strength", "gamma", "beta"),
    [(1, 0.447, 0.268), (2, 0.333, 0.185), (3, 0.277, 0.149), (4, 0.243, 0.128), (5, 0.218, 0.114)],
)
@pytest.mark.parametrize("dimension", [1000, 100_000])
def test_gamma_and_beta_are_the_published_tables(strength: float, gamma: float, beta: float, dimension: int) -> None:
    assert smoothing_gamma(strength=strength, dimension=dimension) == pytest.approx(gamma, abs=6e-4)
    assert smoothing_beta(strength=strength, dimension=dimension) == pytest.approx(beta, abs=6e-4)


@settings(max_examples=60, deadline=None)
@given(strength=st.floats(0.0, 1e4), dimension=st.integers(1, 300))
def test_the_closed_forms_of_smoothing_are_their_sums(strength: float, dimension: int) -> None:
    terms = 1 / (1 + 2 * strength * (1 - np.cos(2 * np.pi * np.arange(1, dimension + 1) / dimension)))
    numbers: Numbers = {"strength": strength, "dimension": dimension}
    assert effective_dimension(**numbers) == pytest.approx(terms.sum(), rel=1e-9)
    assert smoothing_beta(**numbers) == pytest.approx((terms**2).mean(), rel=1e-9)
    assert (
        1 / dimension * (1 - 1e-9) <= smoothing_beta(**numbers) <= smoothing_gamma(**numbers) * (1 + 1e-9) <= 1 + 2e-9
    )


@pytest.mark.parametrize("strength", [0.5, 3.0, 40.0])
@pytest.mark.parametrize("dimension", [1, 2, 3, 16])
def test_effective_dimension_is_the_trace_of_the_dense_inverse(strength: float, dimension: int) -> None:
    inverse = np.linalg.inv(dense(strength, dimension))
    assert effective_dimension(strength=strength, dimension=dimension) == pytest.approx(np.trace(inverse))
    assert smoothing_beta(strength=strength, dimension=dimension) == pytest.approx(
        np.trace(inverse @ inverse) / dimension
    )


@pytest.mark.parametrize("strength", [1e-8, 0.1, 1.0, 1e6])
@pytest.mark.parametrize("dimension", [2, 7, 500])
def test_propositions_5_and_8_as_printed_agree_at_fifty_digits(strength: float, dimension: int) -> None:
    with mpmath.workdps(80):
        s, d = mpmath.mpf(strength), dimension
        w = (2 * s + 1 - mpmath.sqrt(4 * s + 1)) / (2 * s)
        xi = -mpmath.sqrt(1 + 4 * s) / s
        gamma = (1 + w**d) / ((1 - w**d) * mpmath.sqrt(4 * s + 1))
        top = 2 * w ** (2 * d + 1) - xi * w ** (2 * d) + 2 * xi * d * w**d - 2 * w + xi
        beta = top / (s**2 * xi**3 * (1 - w**d) ** 2)
    assert smoothing_gamma(strength=strength, dimension=d) == pytest.approx(float(gamma), rel=1e-12)
    assert smoothing_beta(strength=strength, dimension=d) == pytest.approx(float(beta), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(strength=st.floats(0.0, 100.0), more=st.floats(0.0, 100.0), dimension=st.integers(2, 200))
def test_more_smoothing_never_keeps_more_noise(strength: float, more: float, dimension: int) -> None:
    for kept in (smoothing_gamma, smoothing_beta):
        after = kept(strength=strength + more, dimension=dimension)
        assert after <= kept(strength=strength, dimension=dimension) * (1 + 1e-12)


@pytest.mark.parametrize("strength", [0.0, 1.0, 12.5])
def test_proposition_1_is_the_bias_and_variance_of_the_dense_smoother(strength: float) -> None:
    signal = np.random.default_rng(7).normal(size=37)
    inverse = np.linalg.inv(dense(strength, 37))
    risk = smoothing_risk(signal, strength=strength, std=0.3)
    assert risk.bias == pytest.approx(np.sum((signal - inverse @ signal) ** 2), abs=1e-12)
    assert risk.variance == pytest.approx(0.09 * np.sum(inverse**2))
    assert risk.total == pytest.approx(risk.bias + risk.variance)


def test_smoothing_helps_the_sine_of_figure_1_only_when_the_noise_is_large() -> None:
    signal = np.sin(np.linspace(0, 30, 500))
    gains = [1 - smoothing_risk(signal, strength=1.0, std=std).total / (500 * std**2) for std in (1e-4, 0.1, 1.0)]
    assert gains[0] < 0 < gains[1] < gains[2]
    assert gains[2] == pytest.approx(1 - 0.268, abs=0.01)


# ----------------------------------------------------------------------------------------------------------- paper 001


@pytest.mark.parametrize(("epsilon", "true", "printed"), [(0.75, 0.0187, 0.02), (3, 0.0826, 0.10), (12, 0.362, 0.50)])
def test_theorem_2_1_is_sound_with_full_batches_and_very_loose(epsilon: float, true: float, printed: float) -> None:
    std = silo_std(**SILO | {"epsilon": epsilon})
    value = gaussian_epsilon(math.sqrt(35) * 2 / (1238 * std), SILO["delta"])
    assert value == pytest.approx(true, rel=5e-3)
    assert value <= printed < epsilon


def test_theorem_2_1_is_the_printed_equation() -> None:
    delta = SILO["delta"]
    variance = 256 * 35 * math.log(2.5 * 35 / delta) * math.log(2 / delta) / (1238**2 * 9)
    assert silo_std(**SILO) ** 2 == pytest.approx(variance)


def test_theorem_2_1_refuses_a_large_epsilon_and_a_small_batch_with_the_limits() -> None:
    with pytest.raises(SideConditionError, match=r"epsilon = 18; needed epsilon <= 14\.94"):
        silo_std(**SILO | {"epsilon": 18.0})
    with pytest.raises(SideConditionError, match=r"batch = 28; needed batch >= 28\.72"):
        silo_std(**SILO | {"batch": 28})
    assert silo_std(**SILO | {"batch": 29}) == silo_std(**SILO)
    with pytest.raises(SideConditionError, match="batch = 1239; needed batch <= 1238"):
        silo_std(**SILO | {"batch": 1239})


@pytest.mark.parametrize(("epsilon", "true"), [(1, 0.373), (4, 1.657), (16, 7.866)])
def test_theorem_2_3_spends_less_than_it_claims(epsilon: float, true: float) -> None:
    std = one_pass_std(**ONE_PASS | {"epsilon": epsilon})
    assert gaussian_epsilon(2 / (50 * std), 1e-6) == pytest.approx(true, abs=1e-3)


@settings(max_examples=50, deadline=None)
@given(part=st.floats(0.01, 1.0), digits=st.floats(0.5, 9.0))
def test_theorem_2_3_is_sound_up_to_its_side_condition(part: float, digits: float) -> None:
    delta = 10**-digits
    epsilon = -8 * math.log(delta) * part * (1 - 1e-9)
    std = one_pass_std(**ONE_PASS | {"epsilon": epsilon, "delta": delta})
    assert gaussian_epsilon(2 / (50 * std), delta) <= epsilon


def test_theorem_2_3_refuses_beyond_eight_logs() -> None:
    with pytest.raises(SideConditionError, match=r"epsilon = 111; needed epsilon <= 110\.5"):
        one_pass_std(**ONE_PASS | {"epsilon": 111.0})


@pytest.mark.parametrize(("epsilon", "true"), [(6, 5.69), (12, 12.88), (18, 21.39)])
def test_the_noise_of_the_experiments_of_001_overspends_at_large_epsilon(epsilon: float, true: float) -> None:
    std = silo_experiment_std(**SILO | {"epsilon": epsilon})
    assert gaussian_epsilon(math.sqrt(35) * 2 / (1238 * std), SILO["delta"]) == pytest.approx(true, abs=0.01)


def test_the_noise_of_the_experiments_of_001_needs_its_batch() -> None:
    with pytest.raises(SideConditionError, match=r"batch = 181; needed batch >= 181\.2"):
        silo_experiment_std(**SILO | {"batch": 181})


def test_theorem_4_1_is_the_printed_equation() -> None:
    r, m, n, k, d, e = 200, 600, 1000, 10, 1e-4, 0.01
    logs = math.log(r * m**2 / (n * d)) * math.log(r / d) * math.log(1 / d)
    assert shuffled_std(**SHUFFLED) ** 2 == pytest.approx(r * m * logs / (k**2 * n**2 * e**2))
    assert shuffled_std(**SHUFFLED | {"constant": 4.0}) == pytest.approx(2 * shuffled_std(**SHUFFLED))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 10.0}, r"epsilon = 10; needed epsilon <= 9\.903"),
        ({"cohort": 300}, r"cohort = 300; needed cohort >= 3\d\d"),
        ({"cohort": 1001}, "cohort = 1001; needed cohort <= 1000"),
        ({"rounds": 16}, r"rounds = 16; needed rounds >= 16\.67"),
        ({"epsilon": 1e-5, "rounds": 1}, r"rounds = 1; needed rounds >= 1\.667"),
    ],
)
def test_theorem_4_1_refuses_outside_each_of_its_conditions(change: Numbers, message: str) -> None:
    with pytest.raises(SideConditionError, match=message):
        shuffled_std(**SHUFFLED | change)


def test_theorem_4_1_asks_a_larger_cohort_when_a_silo_holds_one_record() -> None:
    edge = next(m for m in range(300, 600) if m >= 16 * math.log(18 * 200 * m**2 / (1000 * 1e-4)))
    assert shuffled_std(**SHUFFLED | {"cohort": edge}) > 0
    with pytest.raises(SideConditionError, match="needed cohort >="):
        shuffled_std(**SHUFFLED | {"cohort": edge, "records": 1})


# ----------------------------------------------------------------------------------------------------------- paper 002


def truly_spent(relation: Relation, epsilon: float) -> float:
    """Two clients whose gradients are +g and -g in one coordinate, T rounds of Laplace noise: T |shift| / scale."""
    scale = client_laplace_scale(**LAPLACE | {"epsilon": epsilon, "relation": relation})
    shift = 4 * 0.1 * 3.0 - 4 * 0.1 * -3.0
    return 5 * shift / scale


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 5.0])
def test_the_published_laplace_scale_spends_twice_its_epsilon_and_the_sound_one_exactly_it(epsilon: float) -> None:
    assert truly_spent("published", epsilon) == pytest.approx(2 * epsilon)
    assert truly_spent("replace_one", epsilon) == pytest.approx(epsilon)


def test_the_published_sensitivity_is_half_the_sound_one() -> None:
    numbers: Numbers = {"steps": 4, "learning_rate": 0.1, "clip_norm": 3.0}
    assert upload_sensitivity(**numbers, relation="published") == pytest.approx(1.2)
    assert upload_sensitivity(**numbers, relation="replace_one") == pytest.approx(2.4)
    with pytest.raises(SideConditionError, match="relation = 'zero'"):
        upload_sensitivity(**numbers, relation="zero")  # type: ignore[arg-type]


def test_theorem_2_of_002_is_the_printed_equation_and_refuses_at_its_limit() -> None:
    std = client_gaussian_std(**GAUSS | {"relation": "published"})
    assert std == pytest.approx(2.0 * math.sqrt(5 * math.log(1e4)) / 2.0 * 1.2)
    with pytest.raises(SideConditionError, match="epsilon = 50; needed epsilon < 50"):
        client_gaussian_std(**GAUSS | {"epsilon": 50.0})
    with pytest.raises(SideConditionError, match=r"epsilon = 2; needed epsilon < 0\.5"):
        client_gaussian_std(**GAUSS | {"rate": 0.1})


@settings(max_examples=50, deadline=None)
@given(part=st.floats(0.1, 2.34), digits=st.floats(3.0, 9.0), rounds=st.integers(1, 500))
def test_client_gaussian_noise_is_sound_under_replace_one(part: float, digits: float, rounds: int) -> None:
    delta = 10**-digits
    budget: Numbers = {"epsilon": -part * math.log(delta), "delta": delta, "participations": rounds}
    open_constants = client_gaussian_std(**GAUSS | budget | {"c1": 1e9})
    proved = sound_client_gaussian_std(**CLIENT | budget)
    for std in (open_constants, proved):
        assert gaussian_epsilon(math.sqrt(rounds) * 2.4 / std, delta) <= budget["epsilon"] * (1 + 1e-9)
    assert proved <= open_constants * 1.001
    half_the_noise = gaussian_epsilon(math.sqrt(rounds) * 2.4 / (proved / 2), delta)
    assert half_the_noise > budget["epsilon"], "the test would notice the missing factor of two"


def test_the_busiest_client_of_a_round_robin_is_counted() -> None:
    for rounds, cohort, population in [(10, 3, 10), (7, 3, 10), (1, 1, 5), (20, 4, 4)]:
        order = [i % population for i in range(rounds * cohort)]
        busiest = max(order.count(client) for client in range(population))
        assert round_robin_participations(rounds=rounds, cohort=cohort, population=population) == busiest


def test_the_noise_constants_of_theorem_3_are_the_variance_of_the_mean_of_the_uploads() -> None:
    dimension, cohort, population, rounds, steps, rate = 11, 5, 20, 40, 4, 0.1
    times = round_robin_participations(rounds=rounds, cohort=cohort, population=population)
    client = CLIENT | {"participations": times, "steps": steps, "learning_rate": rate}
    scale = client_laplace_scale(**client | {"epsilon": 2.0, "relation": "published"})
    spread: Numbers = {"epsilon": 2.0, "dimension": dimension, "population": population, "sensitivity": 3.0}
    laplace = laplace_constant(cohort=cohort, **spread) * steps**2 * rounds**2 * (rate / 2) ** 2
    assert laplace == pytest.approx(dimension * 2 * scale**2 / cohort)
    std = client_gaussian_std(**GAUSS | client | {"relation": "published"})
    gauss = gaussian_constant(delta=1e-4, c2=2.0, **spread) * steps**2 * rounds * (rate / 2) ** 2
    assert gauss == pytest.approx(dimension * std**2 / cohort)


def unrolled(objective: Objective, numbers: Numbers) -> list[float]:
    """The recursion of Appendix F, one local step at a time; the distance after each round."""
    steps, rounds, mu = numbers["steps"], numbers["rounds"], objective.convexity
    gamma = max(8 * objective.smoothness / mu, steps)
    drift = objective.drift(steps=steps, cohort=numbers["cohort"], population=numbers["population"])
    noise = numbers["constant"] * steps**2 * rounds ** numbers["growth"]
    distance, rows = objective.distance, []
    for k in range(steps * rounds):
        eta = 2 / (mu * (k + gamma))
        last = (k + 1) % steps == 0
        distance = (1 - mu * eta) * distance + eta**2 * (drift + noise * last)
        rows.append(distance)
    return rows[steps - 1 :: steps]


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 12),
    rounds=st.integers(1, 40),
    cohort=st.integers(1, 20),
    constant=st.floats(0.0, 10.0),
    growth=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_theorem_3_bounds_its_recursion(steps: int, rounds: int, cohort: int, constant: float, growth: float) -> None:
    numbers = BOUND | {"steps": steps, "rounds": rounds, "cohort": cohort, "constant": constant, "growth": growth}
    assert unrolled(OBJECTIVE, numbers)[-1] <= client_distance_bound(OBJECTIVE, **numbers) * (1 + 1e-12)


def test_theorem_3_is_the_printed_equation() -> None:
    gamma, k = 64.0, 100
    drift = 6 * 4 * 0.3 + 8 * 9 * 2.25 + 4 * 16 * 2.25 * 15 / (19 * 5)
    noise = 1e-3 * 16 * 25**2
    expected = (16 * drift + gamma * 2) / (k + gamma) + 16 * 25 / (k + gamma - 1) ** 2 * noise
    assert client_distance_bound(OBJECTIVE, **BOUND) == pytest.approx(expected)


def test_theorem_3_is_the_same_with_everyone_present_and_a_lone_client() -> None:
    alone = client_distance_bound(OBJECTIVE, **BOUND | {"cohort": 1, "population": 1})
    assert alone == client_distance_bound(OBJECTIVE, **BOUND | {"cohort": 20})


def test_theorem_3_refuses_constants_that_no_loss_has() -> None:
    with pytest.raises(SideConditionError, match="convexity = 5; needed convexity <= 4"):
        Objective(smoothness=4.0, convexity=5.0, gradient=1.0, heterogeneity=0.0, distance=1.0)
    with pytest.raises(SideConditionError, match="growth = 3"):
        client_distance_bound(OBJECTIVE, **BOUND | {"growth": 3.0})


# --------------------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize(("formula", "numbers"), EVERY_FORMULA)
@pytest.mark.parametrize(
    "wrong",
    [{"epsilon": v} for v in (0.0, -1.0, math.nan, math.inf)]
    + [{"delta": v} for v in (0.0, 1.0, -1e-5, math.nan)]
    + [{"clip_norm": v} for v in (0.0, -0.4, math.nan, math.inf)]
    + [{"rate": v} for v in (0.0, 1.01, math.nan)]
    + [{name: v} for name in ("rounds", "records", "batch", "cohort", "population") for v in (0, -3, 2.5)],
)
def test_a_number_out_of_range_is_refused_by_name(formula: Call, numbers: Numbers, wrong: Numbers) -> None:
    ((name, value),) = wrong.items()
    formula(**numbers)
    if name in numbers:
        with pytest.raises(SideConditionError, match=rf"{name} = {value:g}"):
            formula(**numbers | wrong)


@pytest.mark.parametrize("wrong", [{"strength": -0.1}, {"strength": math.nan}, {"dimension": 0}, {"dimension": 1.5}])
def test_smoothing_of_nothing_is_refused(wrong: Numbers) -> None:
    numbers: Numbers = {"strength": 1.0, "dimension": 4}
    with pytest.raises(SideConditionError, match=next(iter(wrong))):
        smoothing_gamma(**numbers | wrong)


@pytest.mark.parametrize("signal", [np.zeros((2, 2)), [], [1.0, math.nan]])
def test_the_risk_of_a_signal_that_is_none_is_refused(signal: npt.ArrayLike) -> None:
    with pytest.raises(SideConditionError, match="signal"):
        smoothing_risk(signal, strength=1.0, std=0.1)


@pytest.mark.parametrize(("formula", "numbers"), EVERY_FORMULA)
def test_more_epsilon_never_means_more_noise_in_any_formula(formula: Call, numbers: Numbers) -> None:
    noises = [formula(**numbers | {"epsilon": numbers["epsilon"] * factor}) for factor in (1.0, 1.2, 1.4)]
    values = [noise.std if isinstance(noise, RenyiNoise) else noise for noise in noises]
    assert all(0 < after <= before * (1 + 1e-9) for before, after in pairwise(values))


@pytest.mark.parametrize("module", [closed_forms, local_noise, smoothing])
def test_closed_forms_say_that_no_certificate_uses_them_and_import_no_accountant(module: Any) -> None:
    assert "certificate" in (module.__doc__ or "")
    assert not {"dp_accounting", "torch"} & set(vars(module))
