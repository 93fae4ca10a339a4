"""Promises of the best of a random number of tries: accounted as its theorem says, never below the truth, by one law.

Oracles: the exact law of the best of K Gaussian tries (K's generating function, no accountant), and dp_accounting.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event as de
from dp_accounting import rdp
from dp_accounting.privacy_accountant import NeighboringRelation
from numpy.typing import NDArray
from scipy import stats

from sordino import codec
from sordino.accounting import renyi
from sordino.accounting.accountant import delta_at, deltas_at, epsilon
from sordino.accounting.events import (
    Approximate,
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Tuned,
)
from sordino.accounting.renyi import Trials
from sordino.errors import ConfigError, PlanError
from sordino.rng import Seeded

Array = NDArray[np.float64]
LAWS = [Trials(10.0), Trials(3.0, shape=0.0), Trials(30.0, shape=0.5), Trials(5.0, shape=2.0), Trials(8.0, "poisson")]
NAMES = [f"{one.law}-{one.mean:g}-{one.shape:g}" for one in LAWS]


def cost(event: Event, delta: float = 1e-5) -> float:
    return epsilon([(event, 1)], "add_remove", delta).value


# ---- beside the library ----------------------------------------------------------------------------------------------


def theirs(inner: de.DpEvent, count: int, tries: Trials, delta: float) -> float:
    """What Google's accountant says of the same event."""
    shape = math.inf if tries.law == "poisson" else tries.shape
    accountant = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(de.RepeatAndSelectDpEvent(de.SelfComposedDpEvent(inner, count), tries.mean, shape))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("tries", LAWS, ids=NAMES)
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_it_costs_what_the_library_says(tries: Trials, delta: float) -> None:
    """The library's divergences of a sampled Gaussian are a little above the integral at orders that are not whole."""
    sampled, other = PoissonSampled(0.1, GaussianNoise(1.5)), de.PoissonSampledDpEvent(0.1, de.GaussianDpEvent(1.5))
    found = [cost(Tuned(event, n, tries), delta) for event, n in ((GaussianNoise(4.0), 7), (LaplaceNoise(5.0), 3))]
    oracle = [
        theirs(event, n, tries, delta) for event, n in ((de.GaussianDpEvent(4.0), 7), (de.LaplaceDpEvent(5.0), 3))
    ]
    assert found == pytest.approx(oracle, rel=1e-8)
    assert cost(Tuned(sampled, 50, tries), delta) == pytest.approx(theirs(other, 50, tries, delta), rel=5e-3)


@pytest.mark.parametrize("tries", LAWS, ids=NAMES)
def test_one_try_alone_would_be_caught_as_too_cheap(tries: Trials) -> None:
    """Sabotage: the cost of the run that is shown, as if it were the only one."""
    one = epsilon([(GaussianNoise(4.0), 7)], "add_remove", 1e-6).value
    assert one < 0.7 * theirs(de.GaussianDpEvent(4.0), 7, tries, 1e-6)


def test_replaced_units_move_twice_as_far() -> None:
    moved = epsilon([(Tuned(GaussianNoise(8.0), 7, Trials(5.0)), 1)], "replace_one", 1e-6).value
    assert moved == pytest.approx(cost(Tuned(GaussianNoise(4.0), 7, Trials(5.0)), 1e-6), rel=1e-9)


# ---- beside the truth ------------------------------------------------------------------------------------------------


def slope(tries: Trials, s: Array) -> Array:
    """The derivative of K's generating function, E[K s^(K-1)]."""
    if tries.law == "poisson":
        return np.asarray(tries.mean * np.exp(-tries.mean * (1 - s)))
    gamma, eta = tries.gamma, tries.shape
    if eta == 0:
        return np.asarray((1 - gamma) / (1 - (1 - gamma) * s) / math.log(1 / gamma))
    return np.asarray(eta * (1 - gamma) * (1 - (1 - gamma) * s) ** (-eta - 1) / (gamma**-eta - 1))


def exact_delta(tries: Trials, noise: float, at: float) -> float:
    """The hockey stick of the largest of K draws of N(0, z^2) and of N(1, z^2), the worse order."""
    x = np.linspace(-12 * noise, 1 + 12 * noise, 100_001)
    one, other = (stats.norm.pdf(x, m, noise) * slope(tries, stats.norm.cdf(x, m, noise)) for m in (0.0, 1.0))
    width = float(x[1] - x[0])
    return max(float(np.sum(np.maximum(p - math.exp(at) * q, 0))) * width for p, q in ((one, other), (other, one)))


@pytest.mark.parametrize("tries", LAWS, ids=NAMES)
@pytest.mark.parametrize("noise", [0.7, 2.0, 6.0])
def test_the_bill_is_never_below_the_exact_law_of_the_best(tries: Trials, noise: float) -> None:
    accounted = deltas_at([(Tuned(GaussianNoise(noise), 1, tries), 1)], "add_remove", [0.05, 0.3, 1.0, 2.5])
    for at, most in zip([0.05, 0.3, 1.0, 2.5], accounted, strict=True):
        assert exact_delta(tries, noise, at) <= most * (1 + 1e-6) + 1e-9


def test_the_exact_law_shows_that_one_try_is_not_the_bill() -> None:
    """Sabotage, by no accountant: the best of 30 draws tells more than one draw may."""
    single = delta_at([(GaussianNoise(2.0), 1)], "add_remove", 0.5)
    assert exact_delta(Trials(30.0), 2.0, 0.5) > 1.5 * single


# ---- the number of tries ---------------------------------------------------------------------------------------------


def chance(tries: Trials, k: int) -> float:
    """P(K = k), by the formulas of the module."""
    if tries.law == "poisson":
        return math.exp(k * math.log(tries.mean) - tries.mean - math.lgamma(k + 1))
    gamma, eta = tries.gamma, tries.shape
    first = (1 - gamma) / -math.log(gamma) if eta == 0 else eta * (1 - gamma) / (gamma**-eta - 1)
    return first * math.prod((1 - gamma) * (n + eta) / (n + 1) for n in range(1, k)) if k else 0.0


@pytest.mark.parametrize("tries", LAWS, ids=NAMES)
def test_what_is_drawn_has_the_law_that_is_billed(tries: Trials) -> None:
    coins = Seeded(5).at(0, "tries")
    drawn = np.asarray([tries.draw(coins) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(tries.mean, abs=5 * drawn.std() / math.sqrt(len(drawn)))
    for k in range(4):
        expected = chance(tries, k)
        assert np.mean(drawn == k) == pytest.approx(expected, abs=5 * math.sqrt(0.25 / len(drawn)))
    assert sum(chance(tries, k) for k in range(800)) == pytest.approx(1.0, abs=1e-4)


def test_the_mean_that_is_billed_is_that_of_gamma() -> None:
    assert Trials(10.0).gamma == pytest.approx(0.1, rel=1e-9)  # geometric
    for tries in LAWS[:4]:
        chances = np.asarray([chance(tries, k) for k in range(1000)])
        assert float(chances @ np.arange(1000)) == pytest.approx(tries.mean, rel=1e-4)


@pytest.mark.parametrize("given", [{"mean": 0.5}, {"mean": 1.0}, {"mean": math.nan}, {"shape": -1.0}, {"mean": 1e9}])
def test_a_law_that_means_nothing_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Trials(**given)  # type: ignore[arg-type]


# ---- as an event -----------------------------------------------------------------------------------------------------


def test_it_composes_and_is_written_and_read() -> None:
    event = Tuned(PoissonSampled(0.1, GaussianNoise(2.0)), 20, Trials(4.0, shape=0.0))
    assert codec.read(Event, codec.dump(event)) == event
    once = cost(event)
    assert once < epsilon([(event, 2)], "add_remove", 1e-5).value < 2 * once
    assert epsilon([(event, 1), (GaussianNoise(5.0), 1)], "add_remove", 1e-5).value > once


def test_it_is_cheaper_than_the_table_of_as_many_tries_and_dearer_than_one() -> None:
    run = PoissonSampled(0.05, GaussianNoise(2.0))
    tuned = cost(Tuned(run, 200, Trials(20.0)))
    one, table = (epsilon([(run, 200 * n)], "add_remove", 1e-5).value for n in (1, 20))
    assert one < tuned < table / 1.5


def test_what_has_no_renyi_bound_cannot_be_tuned() -> None:
    for inner in (Approximate(1.0, 1e-6), FixedSampled(10, 2, GaussianNoise(1.0))):
        with pytest.raises(PlanError, match="no Renyi divergences"):
            cost(Tuned(inner, 3, Trials()))
    with pytest.raises(ConfigError):
        Tuned(Tuned(GaussianNoise(1.0), 1, Trials()), 1, Trials())


def test_the_conversion_to_delta_is_that_of_epsilon() -> None:
    divergences = renyi.gaussian(1.3)
    for delta in (1e-3, 1e-6):
        at = renyi.epsilon(divergences, delta)
        assert renyi.deltas(divergences, np.asarray([at]))[0] == pytest.approx(delta, rel=1e-6)
