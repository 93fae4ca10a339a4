"""Epsilon at other deltas, the curve, and one number for it: never better than what was proved."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from sordino.accounting import accountant
from sordino.accounting.composition import Line
from sordino.accounting.events import Approximate, GaussianNoise, LaplaceNoise, PoissonSampled, Unprotected
from sordino.accounting.profiles import EPSILONS, LEFT, dominates, gaussian, least_mu, regret, summary
from sordino.accounting.rounding import rounded_up

SAMPLED = Line("models", "add_remove", ((PoissonSampled(0.05, GaussianNoise(2.0)), 100),))
LAPLACE = Line("models", "replace_one", ((LaplaceNoise(5.0), 4),))
PLAIN = Line("models", "add_remove", ((GaussianNoise(2.0), 4),))
NONE = Line("models", "add_remove", ((Unprotected(), 1),))


def gaussian_delta(mu: float, epsilon: float) -> float:
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def test_sums_of_gaussian_releases_are_their_own_mu() -> None:
    assert gaussian(PLAIN) == {"mu": 1.0, "regret": 0.0, "left": 0.0}


def test_everybody_in_every_round_has_the_mu_of_the_gaussian_release_that_it_is() -> None:
    """The long way, by the curve of a sampled release of rate 1, ends where the closed form does."""
    found = gaussian(Line("models", "add_remove", ((PoissonSampled(1.0, GaussianNoise(2.0)), 4),)))
    assert found is not None
    assert 1.0 <= found["mu"] <= 1.001
    assert found["regret"] <= 3e-4


@pytest.mark.parametrize("line", [SAMPLED, LAPLACE])
def test_mu_is_never_better_than_the_curve_and_not_much_worse(line: Line) -> None:
    """At a thousand epsilons that were not among the nodes; a hundredth less would be caught somewhere."""
    found = gaussian(line)
    assert found is not None
    mu, asked = found["mu"], np.linspace(0.0, 6.0, 1000).tolist()
    proved = accountant.deltas_at(line.entries, line.relation, asked)
    assert all(d <= gaussian_delta(mu, e) + 1.01 * LEFT for e, d in zip(asked, proved, strict=True))
    assert any(d > gaussian_delta(0.99 * mu, e) + LEFT for e, d in zip(asked, proved, strict=True))


def test_a_curve_that_bulges_between_the_nodes_is_not_dominated() -> None:
    """Two nodes on the Gaussian curve itself: a chord between them lies above it, so mu must not pass."""
    nodes = np.array([0.0, 1.0, 3.0, 40.0])
    deltas = np.array([gaussian_delta(1.0, float(e)) for e in nodes])
    assert not dominates(1.0, nodes, deltas)
    found = least_mu(nodes, deltas)
    assert found is not None
    assert found > 1.01
    x = np.linspace(math.exp(1.0), math.exp(3.0), 500)
    chord = np.interp(x, np.exp(nodes[1:3]), deltas[1:3])
    assert all(c <= gaussian_delta(found, float(e)) + LEFT for c, e in zip(chord, np.log(x), strict=True))


def test_regret_is_the_distance_along_the_diagonal() -> None:
    """Of mu = 1 told as mu = 2: the largest k with f_1(a + k) - k = f_2(a), found by hand on a fine grid."""
    nodes = 12.0 * np.linspace(0, 1, 401) ** 1.5
    deltas = np.array([gaussian_delta(1.0, float(e)) for e in nodes])

    def error(mu: float, false: float) -> float:
        return float(norm.cdf(norm.ppf(1 - min(false, 1.0)) - mu)) if false < 1 else 0.0

    best = 0.0
    for a in np.linspace(1e-4, 0.5, 400):
        low, high = 0.0, 1.0
        while high - low > 1e-6:
            k = (low + high) / 2
            low, high = (low, k) if error(1.0, a + k) - k <= error(2.0, a) else (k, high)
        best = max(best, high)
    assert regret(nodes, deltas, 2.0) == pytest.approx(best, abs=2e-3)
    assert regret(nodes, deltas, 1.0) <= 2e-3


def test_the_curve_is_never_below_what_was_proved() -> None:
    told = summary([SAMPLED])
    proved = accountant.deltas_at(SAMPLED.entries, SAMPLED.relation, EPSILONS)
    assert [one["epsilon"] for one in told["curve"]] == list(EPSILONS)
    assert all(one["delta"] >= d for one, d in zip(told["curve"], proved, strict=True))
    for one in told["other_deltas"]:
        value = accountant.epsilon(SAMPLED.entries, SAMPLED.relation, one["delta"]).value
        assert value <= one["epsilon"] <= value + 2e-6


def test_several_silos_are_told_the_worst_of_each_point() -> None:
    both, worse = summary([PLAIN, LAPLACE]), summary([LAPLACE])
    assert both["gdp"]["mu"] == max(1.0, worse["gdp"]["mu"])
    for one, two, of_both in zip(summary([PLAIN])["curve"], worse["curve"], both["curve"], strict=True):
        assert of_both["delta"] == max(one["delta"], two["delta"])


def test_where_nothing_is_promised_nothing_is_told() -> None:
    nothing: dict[str, object] = {"other_deltas": [], "gdp": None, "curve": []}
    assert summary([NONE]) == nothing
    assert summary([PLAIN, NONE]) == nothing


def test_a_pair_with_a_chance_of_total_loss_has_no_mu() -> None:
    assert summary([Line("models", "replace_one", ((Approximate(1.0, 1e-6), 1),))])["gdp"] is None


@pytest.mark.parametrize("delta", [0.3334, 1.23456e-7, 9.999e-5, 1e-30, 1.0, 0.01])
def test_rounding_is_upwards_and_to_three_digits(delta: float) -> None:
    found = rounded_up(delta)
    assert delta <= found <= max(delta * 1.01, 1e-12)
    assert float(f"{found:.2e}") == found
