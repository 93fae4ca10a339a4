"""Promises of the Gaussian's epsilon: what fifty digits say, and never less."""

from __future__ import annotations

import math

import mpmath
import pytest

from sordino.accounting.pld import gaussian_delta, gaussian_epsilon


def exact_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu), the second tail times exp(e) far out, so with many digits."""
    with mpmath.workdps(400):
        m, e, root = mpmath.mpf(mu), mpmath.mpf(epsilon), mpmath.sqrt(2)
        first, second = mpmath.erfc((e / m - m / 2) / root) / 2, mpmath.erfc((e / m + m / 2) / root) / 2
        return first - mpmath.exp(e) * second


@pytest.mark.parametrize("delta", [0.3, 1e-3, 1e-5, 1e-9, 1e-30, 1e-150])
@pytest.mark.parametrize("mu", [1e-3, 0.03, 0.5, 1.0, 4.0, 30.0, 200.0])
def test_epsilon_is_the_least_that_holds(mu: float, delta: float) -> None:
    found = gaussian_epsilon(mu, delta)
    assert exact_delta(mu, found) <= delta, "below the truth"
    if found:
        assert exact_delta(mu, found * (1 - 1e-8) - 1e-12) > delta, "above the truth"


def test_epsilon_and_delta_are_inverse() -> None:
    for mu in (0.1, 1.0, 5.0):
        for times in (1.0, 4.0, 20.0):
            delta = gaussian_delta(mu, times * mu)
            assert gaussian_epsilon(mu, delta) == pytest.approx(times * mu, rel=1e-8)


@pytest.mark.parametrize(
    ("mu", "delta", "epsilon"),
    [
        (0.0, 0.0, 0.0),
        (0.0, 1e-5, 0.0),
        (1.0, 0.0, math.inf),
        (math.inf, 1e-5, math.inf),
        (1.0, 1.0, 0.0),
        (0.1, 0.5, 0.0),
    ],
)
def test_edges(mu: float, delta: float, epsilon: float) -> None:
    assert gaussian_epsilon(mu, delta) == epsilon
