"""Promises of the ceilings: closed form for Gaussians, never below the best attack that can be simulated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from sordino.accounting import accountant, profiles
from sordino.accounting.composition import Line
from sordino.accounting.events import (
    Approximate,
    CappedPoisson,
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Relation,
    Shuffled,
    Unprotected,
)
from sordino.accounting.profiles import Ceiling, ceiling, power, true_positives

SAMPLES = 200_000


def line(event: Event, count: int = 1, relation: Relation = "add_remove") -> Line:
    return Line("models", relation, ((event, count),))


def exact(mu: float, at: float = 0.01) -> Ceiling:
    """Phi(Phi^-1(a) + mu) and Phi(mu / sqrt 2), by scipy."""
    return Ceiling(float(stats.norm.cdf(stats.norm.ppf(at) + mu)), float(stats.norm.cdf(mu / math.sqrt(2))))


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 4.0, 50.0])
@pytest.mark.parametrize(("relation", "moved"), [("add_remove", 1), ("zero_out", 1), ("replace_one", 2)])
def test_a_gaussian_has_the_ceilings_of_its_mu(noise_multiplier: float, relation: Relation, moved: int) -> None:
    found, truth = ceiling(line(GaussianNoise(noise_multiplier), 4, relation)), exact(2 * moved / noise_multiplier)
    assert found.true_positives == pytest.approx(truth.true_positives, rel=1e-9)
    assert found.auc == pytest.approx(truth.auc, rel=1e-9)


@pytest.mark.parametrize("noise_multiplier", [0.5, 2.0, 30.0])
@pytest.mark.parametrize("at", [0.01])
def test_the_curve_is_above_the_closed_form_by_less_than_a_percent(noise_multiplier: float, at: float) -> None:
    """At rate 1 Poisson sampling is the plain Gaussian, but goes through the curve."""
    sampled, truth = line(PoissonSampled(1.0, GaussianNoise(noise_multiplier))), exact(1 / noise_multiplier, at)
    found = profiles._from_curve(sampled, at)
    assert ceiling(sampled, at).auc == pytest.approx(truth.auc, rel=1e-12)
    assert truth.true_positives <= found.true_positives <= 1.01 * truth.true_positives
    assert truth.auc <= found.auc <= 1.01 * truth.auc


def best_attack(scores: NDArray[np.float64], innocent: NDArray[np.float64]) -> Ceiling:
    """What a threshold on a score reaches in a sample, less four standard errors."""
    threshold = np.quantile(innocent, 0.99)
    found = float(np.mean(scores > threshold))
    auc = float(stats.mannwhitneyu(scores, innocent).statistic) / len(scores) / len(innocent)
    return Ceiling(found - 4 * math.sqrt(0.25 / len(scores)), auc - 4 * math.sqrt(0.25 / len(scores)))


def sampled(rate: float, noise_multiplier: float, rounds: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scores of the optimal test, the sum of log densities, on real rounds with and without the client."""
    rng = np.random.default_rng(seed)
    noise = noise_multiplier * rng.standard_normal((2, rounds, SAMPLES))
    noise[0] += rng.random((rounds, SAMPLES)) < rate
    ratio = np.log1p(rate * np.expm1((2 * noise - 1) / (2 * noise_multiplier**2))).sum(axis=1)
    return ratio[0], ratio[1]


@pytest.mark.parametrize(("rate", "noise_multiplier", "rounds"), [(0.1, 0.5, 1), (0.3, 1.0, 8)])
def test_the_optimal_attack_on_a_poisson_gaussian_stays_below(
    rate: float, noise_multiplier: float, rounds: int
) -> None:
    found = ceiling(line(PoissonSampled(rate, GaussianNoise(noise_multiplier)), rounds))
    reached = best_attack(*sampled(rate, noise_multiplier, rounds, seed=1))
    assert 0.8 * found.true_positives < reached.true_positives < found.true_positives
    assert 0.9 * found.auc < reached.auc < found.auc


def test_noise_that_was_halved_would_break_the_ceilings() -> None:
    """Sabotage: the mechanism adds half the noise that it is charged for."""
    found = ceiling(line(PoissonSampled(0.3, GaussianNoise(1.0)), 8))
    reached = best_attack(*sampled(0.3, 0.5, 8, seed=1))
    assert reached.true_positives > found.true_positives
    assert reached.auc > found.auc


def test_the_optimal_attack_on_laplace_stays_below() -> None:
    rng, noise_multiplier = np.random.default_rng(2), 0.5
    noise = rng.laplace(scale=noise_multiplier, size=(2, 3, SAMPLES))
    noise[0] += 1
    scores = ((np.abs(noise) - np.abs(noise - 1)) / noise_multiplier).sum(axis=1)
    reached = best_attack(scores[0] + 1e-9 * rng.random(SAMPLES), scores[1] + 1e-9 * rng.random(SAMPLES))
    found = ceiling(line(LaplaceNoise(noise_multiplier), 3))
    assert 0.9 * found.true_positives < reached.true_positives < found.true_positives
    assert 0.97 * found.auc < reached.auc < found.auc


def test_a_pure_epsilon_has_the_ceiling_of_randomised_response() -> None:
    found = ceiling(line(Approximate(1.0)))
    assert found.true_positives == pytest.approx(math.e * 0.01, rel=0.01)
    corner = 1 / (1 + math.e)  # two straight pieces that meet at (corner, 1 - corner)
    assert 1 - corner <= found.auc <= 1.01 * (1 - corner)


EVENTS: list[tuple[Any, Relation]] = [
    (GaussianNoise, "zero_out"),
    (LaplaceNoise, "replace_one"),
    (lambda z: PoissonSampled(0.2, GaussianNoise(z)), "add_remove"),
    (lambda z: PoissonSampled(0.2, LaplaceNoise(z)), "add_remove"),
    (lambda z: CappedPoisson(0.2, 50, 15, GaussianNoise(2 * z)), "add_remove"),
    (lambda z: FixedSampled(50, 10, GaussianNoise(z)), "replace_one"),
    (lambda z: Shuffled(5000, GaussianNoise(z)), "replace_one"),
]


@pytest.mark.parametrize(("make", "relation"), EVENTS)
def test_more_noise_lowers_both_ceilings_and_more_rounds_raise_them(make: Any, relation: Relation) -> None:
    found = [ceiling(line(make(z), 3, relation)) for z in (1.5, 3.0)]
    assert 1 > found[0].true_positives > found[1].true_positives > 0.01
    assert 1 > found[0].auc > found[1].auc > 0.5
    longer = ceiling(line(make(3.0), 6, relation))
    assert longer.true_positives > found[1].true_positives
    assert longer.auc > found[1].auc


@pytest.mark.parametrize(("make", "relation"), EVENTS)
def test_the_ceiling_is_below_what_epsilon_alone_would_say(make: Any, relation: Relation) -> None:
    one = line(make(3.0), 3, relation)
    spent = accountant.epsilon(one.entries, one.relation, 1e-6).value
    assert ceiling(one).true_positives <= 1.005 * (math.exp(spent) * 0.01 + 1e-6)


def test_no_guarantee_is_a_ceiling_of_one() -> None:
    assert ceiling(line(Unprotected())) == Ceiling(1.0, 1.0)
    mixed = Line("models", "add_remove", ((GaussianNoise(9.0), 1), (Unprotected(), 1)))
    assert ceiling(mixed) == Ceiling(1.0, 1.0)
    assert ceiling(Line("models", "add_remove", ((GaussianNoise(9.0), 1), (Unprotected(), 0)))).auc < 0.6


def test_nothing_released_is_a_guess() -> None:
    found = ceiling(Line("models", "add_remove", ()))
    assert (found.true_positives, found.auc) == pytest.approx((0.01, 0.5))


def test_a_left_end_of_each_piece_would_fall_below_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the lower sum of the curve is no ceiling."""
    rates = profiles.true_positives

    def lower(grid: NDArray[np.float64], *curve: NDArray[np.float64]) -> NDArray[np.float64]:
        found = rates(grid, *curve)
        return np.concatenate([found[:1], found[:-1]])

    monkeypatch.setattr(profiles, "true_positives", lower)
    assert ceiling(line(PoissonSampled(1.0, GaussianNoise(0.5)))).auc < exact(2.0).auc


def test_the_power_of_a_test_rises_with_its_false_alarms() -> None:
    rates = [power(1.0, at) for at in (1e-6, 0.01, 0.5, 0.99)]
    assert rates == sorted(rates)
    curve = true_positives(np.asarray([0.0, 0.5, 1.0]), np.asarray([-9.0, 0.0, 9.0]), np.asarray([0.9999, 0.3, 0.0]))
    assert curve == pytest.approx([0.0, 0.8, 1.0], abs=1e-3)
