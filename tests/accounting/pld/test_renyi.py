"""Promises of the divergences: what an integral with twenty digits says, rounded up, for both sampled pairs."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from sordino.accounting import pairs, pld, renyi


def moment(rate: float, mu: float, power: float, start: float) -> mpmath.mpf:
    """The integral over x > start of phi(x) (1 - q + q exp(mu x - mu^2/2))^power."""
    with mpmath.workdps(20):
        q, m = mpmath.mpf(rate), mpmath.mpf(mu)
        top = max(start, power * mu, 0) + 14
        corners = [start + k * (top - start) / 4 for k in range(5)]
        return mpmath.quad(lambda x: mpmath.npdf(x) * (1 - q + q * mpmath.exp(m * x - m * m / 2)) ** power, corners)


@pytest.mark.parametrize(("rate", "mu"), [(0.01, 0.3), (0.6, 2.0)])
def test_divergences_are_the_integrals_rounded_up(rate: float, mu: float) -> None:
    for k in (4, 38):
        order = float(renyi.ORDERS[k])
        one = mpmath.log(moment(rate, mu, order, -14)) / (order - 1)
        assert one - 1e-12 <= renyi.poisson_gaussian(rate, mu)[k] <= one * (1 + 1e-9) + 1e-7
        both = moment(rate, mu, order, mu / 2) + moment(rate, mu, 1 - order, mu / 2)
        other = mpmath.log(both + (1 - rate) * mpmath.erf(mu / mpmath.sqrt(8))) / (order - 1)
        assert other - 1e-12 <= renyi.fixed_size_gaussian(rate, mu)[k] <= other * (1 + 1e-9) + 1e-7


@pytest.mark.parametrize("pair", [pairs.Mirrored(0.2, pairs.Gauss(1.0)), pairs.Present(0.2, pairs.Gauss(1.0))], ids=str)
def test_divergences_are_those_of_the_pair(pair: pairs.Mirrored | pairs.Present) -> None:
    of = renyi.fixed_size_gaussian if isinstance(pair, pairs.Mirrored) else renyi.poisson_gaussian
    ours, on_grid = of(0.2, 1.0), pld.losses_on(pair, 0.002, 1e-30)
    for k in (9, 29, 59):
        theta = float(renyi.ORDERS[k]) - 1
        seen = math.log(float(on_grid.masses @ np.exp(theta * on_grid.values))) / theta
        assert ours[k] == pytest.approx(seen, rel=1e-4)


def test_absurd_questions_prove_nothing_or_nearly_nothing() -> None:
    for mu in (1e-300, 1e-9, 1e9, 1e300):
        for found in (
            renyi.gaussian(mu),
            renyi.laplace(mu),
            renyi.poisson_gaussian(0.1, mu),
            renyi.fixed_size_gaussian(0.1, mu),
        ):
            assert np.all(found >= -1e-9)
            assert renyi.epsilon(found, 1e-5) >= 0
