"""Promises of Poisson sampling at small rates: close to the truth from above, whatever chose tilt and window."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as plds
from tests.accounting import oracles

from sordino.accounting import accountant, pairs, pld
from sordino.accounting.events import GaussianNoise, PoissonSampled

# rate, noise multiplier, rounds, delta; epsilon, which two other ways agree on; step of the lower bound
TABLE = [
    (1e-5, 0.6, 10_000, 1e-5, 0.01417, 2e-7),
    (1e-4, 0.8, 10_000, 1e-5, 0.06218, 2e-6),
    (1e-3, 0.6, 10_000, 1e-5, 2.4562, 2e-5),
    (1e-4, 0.5, 10_000, 1e-6, 1.9534, 4e-6),
    (1e-4, 0.6, 10_000, 1e-5, 0.27482, 2e-6),
    (1e-5, 0.5, 100_000, 1e-5, 0.2047, 4e-7),
]


def cost(rate: float, noise_multiplier: float, rounds: int, delta: float) -> float:
    return accountant.bound(
        [(PoissonSampled(rate, GaussianNoise(noise_multiplier)), rounds)], "add_remove", delta
    ).value


@pytest.mark.parametrize(("rate", "noise_multiplier", "rounds", "delta", "checked", "step"), TABLE)
def test_small_rates_cost_the_checked_epsilon_and_never_less_than_a_certified_lower_bound(
    rate: float, noise_multiplier: float, rounds: int, delta: float, checked: float, step: float
) -> None:
    found = cost(rate, noise_multiplier, rounds, delta)
    least = oracles.poisson_lower_bound(
        rate=rate, noise_multiplier=noise_multiplier, rounds=rounds, delta=delta, step=step, reach=2 * checked
    )
    assert least <= found <= 1.02 * checked
    assert least >= 0.95 * found  # the lower bound is sharp enough to mean something


@pytest.mark.parametrize(("rate", "noise_multiplier", "rounds", "delta", "checked"), [row[:5] for row in TABLE[:3]])
def test_the_curve_at_small_rates_goes_through_the_checked_point(
    rate: float, noise_multiplier: float, rounds: int, delta: float, checked: float
) -> None:
    entries = [(PoissonSampled(rate, GaussianNoise(noise_multiplier)), rounds)]
    found = accountant.deltas_at(entries, "add_remove", [checked, 8.0])
    assert 0.98 * delta <= found[0] <= 1.03 * delta
    assert found[1] < found[0]


class OneBlock(pld._Law):
    """The law of a loss whose summary is one point: all mass at the mean loss."""

    def __init__(self, losses: pld.Losses) -> None:
        super().__init__(losses)
        masses = np.exp(self.logs)
        total = float(np.sum(masses))
        self.rough = np.log([total]), np.array([float(np.sum(masses * self.values)) / total])


def test_a_wrong_summary_of_the_law_makes_the_bound_loose_and_never_false(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: rough values choose tilt and window only, so even a summary by one point leaves an upper bound."""
    law = pld.losses_on(pairs.Present(1e-4, pairs.Gauss(1.25)), 3e-5, 1e-16)
    exact = pld.Composition([(law, 10_000)]).epsilon(1e-5)
    monkeypatch.setattr(pld, "_Law", OneBlock)
    wrong = pld.Composition([(law, 10_000)]).epsilon(1e-5)
    assert 0.0621 < exact < 0.064
    assert wrong > 1.5 * exact


def test_a_window_sought_by_large_changes_of_the_tilt_alone_would_be_loose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: rare large losses make the window seem wide, so the grid becomes coarse; the cost is still a bound."""
    found = cost(1e-6, 0.5, 100_000, 1e-6)
    assert found < 0.0230
    monkeypatch.setattr(pld, "_MOVES", np.geomspace(0.02, 4, 16))
    accountant._composition.cache_clear()
    accountant._on_grid.cache_clear()
    assert cost(1e-6, 0.5, 100_000, 1e-6) > 2 * found


def library(rate: float, noise_multiplier: float, rounds: int, delta: float, near: float) -> float:
    grid = min(near / (10 * math.sqrt(rounds)), 1e-2)
    once = plds.from_gaussian_mechanism(noise_multiplier, value_discretization_interval=grid, sampling_prob=rate)
    return float(once.self_compose(rounds).get_epsilon_for_delta(delta))


def cases() -> list[tuple[float, float, int, float]]:
    coins = random.Random(23)
    scales = [(-6.0, 0.0), (math.log10(0.4), 2.0), (0.3, 4.0), (-9.0, -3.0)]
    drawn = ([10 ** coins.uniform(*ends) for ends in scales] for _ in range(30))
    return [(rate, noise_multiplier, round(rounds), delta) for rate, noise_multiplier, rounds, delta in drawn]


@pytest.mark.parametrize(("rate", "noise_multiplier", "rounds", "delta"), cases())
def test_at_any_rate_epsilon_is_at_most_the_librarys_and_one_percent(
    rate: float, noise_multiplier: float, rounds: int, delta: float
) -> None:
    found = cost(rate, noise_multiplier, rounds, delta)
    assert found <= 1.01 * library(rate, noise_multiplier, rounds, delta, max(found, 5e-3)) + 1e-9
