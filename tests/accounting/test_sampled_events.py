"""Promises: an event that is its own mirror image can be sampled, a stranger's too, and never costs less than is true.

The oracle writes down the laws of a discrete Laplace release and of its sampled forms, outcome by outcome, and sums the
hockey-stick divergence; several rounds are convolved loss by loss.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from sordino.accounting.accountant import deltas_at, epsilon
from sordino.accounting.events import (
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Relation,
    Shuffled,
    Unprotected,
    has_bound,
)
from sordino.accounting.pairs import Gauss, Orders, Pair, Present, Tails, is_own_mirror
from sordino.errors import PlanError

Array = NDArray[np.float64]
OUTCOMES = np.arange(-2000, 2001)
EPSILONS = [0.0, 0.05, 0.2, 0.5, 1.0, 1.7, 3.0]


def discrete_laplace(decay: float, at: int) -> Array:
    """P(k) ~ exp(-decay |k - at|)."""
    weights = np.exp(-decay * np.abs(OUTCOMES - at))
    return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class TwoPoints(Pair):
    """The discrete Laplace law moved by `shift` against the one at 0, as its loss takes finitely many values."""

    decay: float
    shift: int

    @property
    def largest_loss(self) -> float:  # type: ignore[override]
        return self.decay * self.shift

    def tails(self, losses: Array) -> Tails:
        loss = self.decay * (np.abs(OUTCOMES) - np.abs(OUTCOMES - self.shift))
        order = np.argsort(loss)
        place = np.searchsorted(loss[order], losses + 1e-12, side="right")
        laws = [discrete_laplace(self.decay, at)[order] for at in (self.shift, 0)]
        above = [np.append(np.cumsum(law[::-1])[::-1], 0.0)[place] for law in laws]
        with np.errstate(divide="ignore"):
            return np.log(above[0]), np.log(above[1])


@dataclass(frozen=True)
class DiscreteLaplace(Event, kind="test_discrete_laplace"):
    """Integer noise on a sum that a unit moves by `steps`; states its pair and nothing else."""

    decay: float
    steps: int = 1

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        shift = self.steps * (2 if relation == "replace_one" else 1)
        return (Orders.symmetric(TwoPoints(self.decay, shift)),)


def losses_of(first: Array, second: Array) -> dict[float, float]:
    """Chance under `first` of every privacy loss."""
    found: dict[float, float] = defaultdict(float)
    for p, q in zip(first, second, strict=True):
        if p > 1e-300:
            found[round(math.log(p / q), 14)] += float(p)
    return found


def composed_delta(one: Mapping[float, float], rounds: int, at: float) -> float:
    """E[(1 - exp(at - L))_+] for the sum L of `rounds` independent losses."""
    total: dict[float, float] = {0.0: 1.0}
    for _ in range(rounds):
        new: dict[float, float] = defaultdict(float)
        for a, p in total.items():
            for b, q in one.items():
                new[round(a + b, 13)] += p * q
        total = new
    return math.fsum(p * max(0.0, -math.expm1(at - loss)) for loss, p in total.items())


def worst_delta(orders: list[tuple[Array, Array]], rounds: int, at: float) -> float:
    return max(composed_delta(losses_of(first, second), rounds, at) for first, second in orders)


@pytest.mark.parametrize("relation", ["add_remove", "zero_out"])
@pytest.mark.parametrize(("decay", "steps", "rate", "rounds"), [(0.5, 1, 0.1, 1), (0.5, 3, 0.2, 4), (1.2, 2, 0.7, 6)])
def test_a_strangers_event_is_poisson_sampled_and_meets_the_oracle(
    relation: Relation, decay: float, steps: int, rate: float, rounds: int
) -> None:
    absent, present = discrete_laplace(decay, 0), discrete_laplace(decay, steps)
    mixed = (1 - rate) * absent + rate * present
    truth = [worst_delta([(mixed, absent), (absent, mixed)], rounds, at) for at in EPSILONS]
    found = deltas_at([(PoissonSampled(rate, DiscreteLaplace(decay, steps)), rounds)], relation, EPSILONS)
    for ours, true in zip(found, truth, strict=True):
        assert true * (1 - 1e-9) - 1e-12 <= ours <= true * 1.01 + 1e-6


@pytest.mark.parametrize(("decay", "steps", "cohort", "rounds"), [(0.5, 1, 10, 1), (0.4, 2, 25, 4)])
def test_a_strangers_event_of_a_fixed_cohort_is_never_below_the_worst_world(
    decay: float, steps: int, cohort: int, rounds: int
) -> None:
    """Worlds: without our unit another stands at 0, or opposite to it; replaced, our unit goes to the other side."""
    rate, event = cohort / 100, FixedSampled(100, cohort, DiscreteLaplace(decay, steps))
    found = deltas_at([(event, rounds)], "replace_one", EPSILONS)
    high, low = discrete_laplace(decay, steps), discrete_laplace(decay, -steps)
    for other in (discrete_laplace(decay, 0), low, high):
        first, second = (1 - rate) * other + rate * high, (1 - rate) * other + rate * low
        for ours, at in zip(found, EPSILONS, strict=True):
            assert ours >= worst_delta([(first, second), (second, first)], rounds, at) * (1 - 1e-9)
    mixed = (1 - rate) * low + rate * high  # one round of the world that the bound is tight for
    single = deltas_at([(event, 1)], "replace_one", EPSILONS)
    for ours, at in zip(single, EPSILONS, strict=True):
        true = worst_delta([(mixed, low)], 1, at)
        assert true * (1 - 1e-9) <= ours <= true * 1.001 + 1e-9


def test_sampling_a_strangers_event_costs_less_than_not_sampling_it() -> None:
    event = DiscreteLaplace(0.5, 2)
    whole = epsilon([(event, 20)], "add_remove", 1e-6).value
    assert epsilon([(PoissonSampled(0.05, event), 20)], "add_remove", 1e-6).value < whole / 5


def test_a_fine_discrete_laplace_costs_what_the_continuous_one_does_when_sampled() -> None:
    fine, smooth = PoissonSampled(0.2, DiscreteLaplace(0.02, 50)), PoissonSampled(0.2, LaplaceNoise(1.0))
    ours, theirs = (epsilon([(event, 8)], "zero_out", 1e-6).value for event in (fine, smooth))
    assert ours == pytest.approx(theirs, rel=0.02)


@dataclass(frozen=True)
class OneOrder(Event, kind="test_one_order"):
    """Sabotage: the pair of one order of neighbours alone, stated for both."""

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        return (Orders.symmetric(Present(0.3, Gauss(1.0))),)


@dataclass(frozen=True)
class TwoOrders(Event, kind="test_two_orders"):
    """A pair for each order, honest and not each other's mirror image."""

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        return (Orders(Gauss(1.0), Gauss(0.5)),)


@pytest.mark.parametrize(
    "event", [OneOrder(), TwoOrders(), Unprotected(), PoissonSampled(0.1, GaussianNoise(1.0))], ids=str
)
def test_what_is_not_its_own_mirror_image_is_not_sampled_and_refused_in_one_sentence(event: Event) -> None:
    sampled = PoissonSampled(0.1, event)
    assert not has_bound(sampled, "add_remove")
    with pytest.raises(PlanError, match="its own mirror image"):
        epsilon([(sampled, 1)], "add_remove", 1e-5)


def test_a_false_claim_of_symmetry_would_have_cost_less_than_the_truth() -> None:
    """Why it is refused: amplified in the order that was never proved, the false pair is below the oracle."""
    absent, present = discrete_laplace(1.0, 0), discrete_laplace(1.0, 3)
    mixed = 0.7 * absent + 0.3 * present
    assert worst_delta([(mixed, absent)], 1, 1.0) > 10 * worst_delta([(absent, mixed)], 1, 1.0)
    assert not is_own_mirror(Present(0.3, TwoPoints(1.0, 3)))


@pytest.mark.parametrize("pair", [Gauss(0.3), Gauss(40.0), TwoPoints(0.7, 3), TwoPoints(0.05, 40)], ids=str)
def test_pairs_of_additive_noise_are_their_own_mirror_images(pair: Pair) -> None:
    assert is_own_mirror(pair)


def test_every_pair_of_a_shuffled_round_is_its_own_mirror_image() -> None:
    found = Shuffled(1000, LaplaceNoise(4.0)).pairs("replace_one")
    assert len(found) == 2
    assert all(is_own_mirror(orders.removed) for orders in found)
