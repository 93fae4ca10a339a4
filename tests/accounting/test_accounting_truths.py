"""The accountant against truths that need no accountant: closed forms, integrals, and what a sabotage would give."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy import integrate, stats
from tests.accounting import oracles

from sordino.accounting import events
from sordino.accounting.accountant import delta_at, epsilon
from sordino.accounting.events import (
    Approximate,
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Relation,
)

RELATIONS: tuple[Relation, ...] = ("add_remove", "replace_one", "zero_out")


def cost(event: Event, count: int, relation: Relation, delta: float) -> float:
    return epsilon([(event, count)], relation, delta).value


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("noise_multiplier", [0.2, 1.0, 7.0, 300.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_sums_of_gaussians_are_the_closed_form(relation: Relation, noise_multiplier: float, delta: float) -> None:
    entries: list[tuple[Event, int]] = [(GaussianNoise(noise_multiplier), 3), (GaussianNoise(2 * noise_multiplier), 4)]
    mu = 2 / noise_multiplier * (2 if relation == "replace_one" else 1)  # sqrt(3 + 4/4) = 2
    found = epsilon(entries, relation, delta)
    assert (found.method, found.grid) == ("gdp", None)
    assert oracles.gaussian_delta(found.value, mu) <= delta * (1 + 1e-6)
    assert found.value == 0 or oracles.gaussian_delta(found.value * (1 - 1e-6), mu) > delta * (1 - 1e-4)
    at = found.value + 0.1
    assert delta_at(entries, relation, at) == pytest.approx(float(oracles.gaussian_delta(at, mu)), rel=1e-9, abs=1e-300)


def test_forgetting_that_replacing_moves_by_two_would_fall_below_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    gauss, fixed = GaussianNoise(2.0), FixedSampled(2000, 100, GaussianNoise(1.8))
    assert cost(gauss, 1, "replace_one", 1e-5) == pytest.approx(4.38, abs=0.005)
    monkeypatch.setattr(events, "sensitivity", lambda relation: 1.0)
    assert oracles.gaussian_delta(cost(gauss, 1, "replace_one", 1e-5), 1.0) > 1e-5
    assert cost(fixed, 200, "replace_one", 2000**-1.1) < 4.60


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
        for a, b in itertools.pairwise(corners)
    )
    return float(atoms + sum(pieces))


@pytest.mark.parametrize("noise_multiplier", [0.4, 1.0, 5.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_two_laplace_releases_are_the_exact_composition(noise_multiplier: float, share: float) -> None:
    at = share * 2 / noise_multiplier
    truth = two_laplace_delta(at, 1 / noise_multiplier, 1 / noise_multiplier)
    ours = delta_at([(LaplaceNoise(noise_multiplier), 2)], "add_remove", at)
    assert truth * (1 - 1e-9) <= ours <= truth * 1.02 + 1e-6
    assert cost(LaplaceNoise(noise_multiplier), 2, "add_remove", truth) == pytest.approx(at, rel=0.01, abs=2e-3)


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
@pytest.mark.parametrize(("rate", "noise_multiplier"), [(0.05, 0.7), (0.3, 1.0), (0.9, 2.0)])
def test_one_poisson_round_is_the_integral_of_its_densities(
    relation: Relation, rate: float, noise_multiplier: float
) -> None:
    x = np.linspace(-40, 40, 400_001)
    still, moved = stats.norm.pdf(x, 0, noise_multiplier), stats.norm.pdf(x, 1, noise_multiplier)
    other = (1 - rate) * still + rate * moved[::-1] if relation == "replace_one" else still
    with_it = (1 - rate) * still + rate * moved
    for at in (0.02, 0.3, 1.0):
        pairs = ((with_it, other), (other, with_it))
        truth = max(float(np.sum(np.maximum(p - math.exp(at) * q, 0))) * (x[1] - x[0]) for p, q in pairs)
        ours = delta_at([(PoissonSampled(rate, GaussianNoise(noise_multiplier)), 1)], relation, at)
        assert truth * (1 - 1e-6) <= ours <= truth * 1.01 + 1e-9


def repeated_pair_delta(at: float, pair: Approximate, count: int) -> mpmath.mpf:
    """The hockey stick of `count` releases, each of which shows all with chance delta, else one randomised response."""
    with mpmath.workdps(60 + 2 * int(at)):
        high = 1 / (1 + mpmath.exp(-mpmath.mpf(pair.epsilon)))
        low, scale = 1 - high, mpmath.exp(mpmath.mpf(at))
        gaps = (high**i * low ** (count - i) - scale * low**i * high ** (count - i) for i in range(count + 1))
        total = sum(mpmath.binomial(count, i) * max(gap, mpmath.mpf(0)) for i, gap in enumerate(gaps))
        return 1 - (1 - mpmath.mpf(pair.delta)) ** count * (1 - total)


@pytest.mark.parametrize("count", [1, 2, 30, 200])
@pytest.mark.parametrize("pair", [Approximate(0.05, 1e-8), Approximate(0.7, 0.0), Approximate(2.0, 1e-9)])
def test_repeated_pairs_cost_their_optimal_composition(count: int, pair: Approximate) -> None:
    found = cost(pair, count, "zero_out", 1e-4)
    assert repeated_pair_delta(found, pair, count) <= 1e-4
    assert repeated_pair_delta(found - 3e-9, pair, count) > 1e-4


def test_pairs_that_spent_all_of_delta_cost_their_sum_and_more_than_delta_is_refused() -> None:
    assert cost(Approximate(0.5, 1e-5), 1, "zero_out", 1e-5) == 0.5
    assert cost(Approximate(0.5, 1e-5), 2, "zero_out", 1.5e-5) == math.inf
