"""The sensitivity of bands wider than the separation is that of the worst pattern that can be drawn."""

from __future__ import annotations

import numpy as np
import pytest
from tests.accounting.matrix_oracles import every_pattern

from sordino.accounting import sensitivity
from sordino.accounting.composition import Participation
from sordino.accounting.sensitivity import Patterns
from sordino.parts.samplers import RoundRobin

RISING = np.array([1.0, 0.2, 0.9, 0.1, 0.5, 0.8])


@pytest.mark.parametrize("bands", [3, 4, 6])
@pytest.mark.parametrize(("most", "apart"), [(6, 2), (3, 2), (4, 3), (2, 5), (3, 4), (12, 2)])
def test_bands_of_up_to_three_separations_have_the_sensitivity_of_their_worst_pattern(
    bands: int, most: int, apart: int
) -> None:
    coins, allowed = np.random.default_rng(bands), Patterns(12, most, apart)
    for column in (RISING[:bands], np.append(1.0, coins.uniform(-1, 1, bands - 1))):
        gram = np.abs(sensitivity._gram(column, 12))
        worst = np.sqrt(max(gram[np.ix_(p, p)].sum() for p in every_pattern(allowed)))
        assert worst <= sensitivity.sensitivity_bound(gram, allowed) <= worst * (1 + 1e-9)


@pytest.mark.parametrize(("most", "apart"), [(7, 2), (3, 2), (5, 3), (14, 1), (4, 1)])
def test_wider_bands_are_never_below_their_worst_pattern_and_close_to_it(most: int, apart: int) -> None:
    coins, allowed, ratios = np.random.default_rng(7), Patterns(14, most, apart), []
    every = every_pattern(allowed)
    for _ in range(10):
        gram = np.abs(sensitivity._gram(np.append(1.0, coins.uniform(-1, 1, 13)), 14))
        worst = np.sqrt(max(gram[np.ix_(p, p)].sum() for p in every))
        ratios.append(sensitivity.sensitivity_bound(gram, allowed) / worst)
        assert sensitivity._by_one_gap(gram, apart, allowed.reachable) >= worst**2 * (1 - 1e-12)  # of long runs
    assert min(ratios) >= 1
    assert max(ratios) < (1.05 if most != 4 else 1.12)  # few rounds of many: rows gather more than so few


def test_forgetting_rounds_before_the_last_would_fall_below_the_worst_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: what a round sees of earlier rounds than the last two is counted."""
    allowed, gram = Patterns(14, 14, 1), np.abs(sensitivity._gram(np.ones(9), 14))
    worst = np.sqrt(max(gram[np.ix_(p, p)].sum() for p in every_pattern(allowed)))
    assert sensitivity.sensitivity_bound(gram, allowed) >= worst
    monkeypatch.setattr(sensitivity, "_earlier", lambda size, apart: np.zeros_like(size))
    assert sensitivity.sensitivity_bound(gram, allowed) < 0.95 * worst


@pytest.mark.parametrize(("population", "cohort", "rounds"), [(6, 2, 11), (8, 2, 14), (4, 4, 5), (7, 2, 12)])
def test_clients_in_turn_are_billed_for_the_rounds_that_they_can_be_in(
    population: int, cohort: int, rounds: int
) -> None:
    """Where they come every so many rounds exactly, nobody comes sooner or later: no other pattern counts."""
    clients, column = RoundRobin(population, cohort), np.array([1.0, 0.1, 0.2, 0.1, 0.9, 0.8])
    gram, nobody = np.abs(sensitivity._gram(column, rounds)), np.random.default_rng(0)
    cohorts = [set(clients.draw(t, nobody).tolist()) for t in range(rounds)]
    own = [[t for t in range(rounds) if one in cohorts[t]] for one in range(population)]
    worst = np.sqrt(max(gram[np.ix_(each, each)].sum() for each in own))
    found = sensitivity.sensitivity_bound(gram, Participation.planned(clients, rounds).patterns(clients))
    assert worst <= found
    assert found == pytest.approx(worst) if population % cohort == 0 else found < 1.3 * worst
