"""Promises about paper 003's theorems: the claimed numbers are its own, and each is refuted by an example."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from sordino.accounting.accountant import epsilon as proved
from sordino.accounting.events import GaussianNoise, PoissonSampled
from sordino.engines.inprocess import InProcess
from sordino.errors import SideConditionError
from sordino.loop import run
from sordino.parts.samplers import Everyone
from sordino.recipes import dp_fed_sam
from sordino.task import Task
from sordino_papers.theory import sharpness
from sordino_papers.theory.sharpness import (
    Descent,
    Sharp,
    claimed_descent,
    claimed_epsilon,
    claimed_generalisation,
    claimed_round_epsilon,
    claimed_sensitivity,
    generalisation_gap,
)

PAPER = Sharp(
    clip_norm=0.2, noise_multiplier=0.95, cohort=50, population=500, dimension=100_000, rounds=200, smooth=1.0, rho=0.5
)


def update(x: torch.Tensor, y: torch.Tensor, rho: float, step: float) -> torch.Tensor:
    """What one client's model moves by in one full-batch step of SAM, without clip or noise to speak of."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    task = Task.of(layer, [(x, y)], loss="mse")
    plan = dp_fed_sam(
        rounds=1, clients=Everyone(1), clip_norm=1e6, noise_multiplier=0.0, lr=step, rho=rho, momentum=0.0
    )
    (done,) = run(plan, task, engine=InProcess())
    return done.state.memory["params"]


def test_theorem_1_is_refuted_by_one_record() -> None:
    step, rho, x = 0.1, 0.01, torch.ones(2, 1)
    mine, other = torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [3.0]])  # one record of two is another
    moved = float((update(x, mine, rho, step) - update(x, other, rho, step)).square().sum())
    claimed = claimed_sensitivity(step=step, rho=rho, steps=1, smooth=2.0)  # (w - y)^2 is 2-smooth
    assert moved == pytest.approx((step * 2 * 1.0) ** 2, rel=1e-3)  # eta |mean slope - mean slope'|
    assert moved > 10 * claimed
    assert claimed_sensitivity(step=step, rho=0.0, steps=1, smooth=2.0) == 0.0


def test_theorem_3_is_refuted_by_a_large_bound_on_gradients() -> None:
    fine = Descent(smooth=1.0, gradient=1.0, gap=1.0, steps=10, rounds=100, uneven=0.2)
    assert claimed_descent(replace(fine, gradient=30.0)) < 0  # a mean of squares is claimed to be negative


def test_the_claimed_descent_is_the_last_line_of_the_proof_at_a_worked_case() -> None:
    d = Descent(2.0, 3.0, 0.5, 4, 25, rho=0.1, sampled=0.2, apart=0.3, kept=0.9, uneven=0.1, noise=0.05)
    eta = 1 / (2 * 10)
    known = [
        2 * 2 * 0.5 / 10,
        0.1 * (0.04 - 18),
        30 * eta**2 * 4 * 0.9 * (2 * 4 * 0.01 * 0.2 + 24 * (0.9 + 6 * 0.04)),
        72 * eta**4 * 64 * 64 * 0.01,
        3 * eta * 2 * (0.04 + 9),
        2 * 0.05 / (eta * 4),
    ]
    assert claimed_descent(d) == pytest.approx(sum(known))


def test_theorem_4_claims_less_than_a_round_costs() -> None:
    delta = 1 / 500
    true = proved(((PoissonSampled(0.1, GaussianNoise(0.95)), 1),), "add_remove", delta).value
    claimed = claimed_round_epsilon(PAPER, delta=delta)
    assert claimed < 1e-5
    assert true > 1e3 * claimed
    assert claimed_round_epsilon(replace(PAPER, rho=0.0), delta=delta) == 0.0  # noise or not


def test_theorem_5_promises_a_gap_that_memorising_exceeds() -> None:
    quiet = replace(PAPER, noise_multiplier=0.01)  # next to no noise: nothing keeps a net from memorising
    assert claimed_generalisation(quiet, delta=1 / 500) < 0.3
    assert claimed_generalisation(PAPER, delta=1 / 500) < 1e-2


def test_the_sound_gap_is_the_total_variation_of_the_worst_pair() -> None:
    for epsilon, delta in ((0.1, 1e-5), (1.0, 1e-3), (5.0, 1e-2)):
        e = math.exp(epsilon)
        p = np.array([delta, (1 - delta) * e / (1 + e), (1 - delta) / (1 + e), 0.0])
        q = p[::-1]  # the canonical (epsilon, delta) pair
        worst = np.abs(p - q).sum() / 2
        assert generalisation_gap(epsilon=epsilon, delta=delta) == pytest.approx(worst)


def test_a_side_condition_that_fails_is_named() -> None:
    with pytest.raises(SideConditionError, match="eta"):
        claimed_sensitivity(step=1.0, rho=0.1, steps=10, smooth=1.0)
    with pytest.raises(SideConditionError, match="delta"):
        claimed_round_epsilon(PAPER, delta=1.5)


@pytest.mark.parametrize(("rounds", "epsilon"), [(200, 8.51), (300, 10.79)])
def test_eq_16_gives_the_epsilons_of_the_papers_settings(rounds: int, epsilon: float) -> None:
    found = claimed_epsilon(rate=0.1, noise_multiplier=0.95, rounds=rounds, delta=1 / 500)
    assert found == pytest.approx(epsilon, abs=0.006)


def test_eq_16_at_an_integer_order_is_the_sum_over_binomials() -> None:
    """E[(1 - q + q mu_1/mu_0)^a] = sum_k C(a, k) (1-q)^(a-k) q^k exp((k^2 - k)/(2 sigma^2))."""
    q, sigma, order, delta = 0.1, 2.0, 4, 1e-3
    total = sum(
        math.comb(order, k) * (1 - q) ** (order - k) * q**k * math.exp((k * k - k) / (2 * sigma**2))
        for k in range(order + 1)
    )
    by_hand = 7 * math.log(total) / 3 + math.log(1 - 1 / order) - (math.log(order) + math.log(delta)) / 3
    orders, sharpness.ORDERS = sharpness.ORDERS, (float(order),)
    try:
        assert claimed_epsilon(rate=q, noise_multiplier=sigma, rounds=7, delta=delta) == pytest.approx(
            by_hand, rel=1e-6
        )
    finally:
        sharpness.ORDERS = orders
