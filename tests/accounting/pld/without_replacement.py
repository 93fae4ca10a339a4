"""The privacy curve of fixed-size sampling without replacement, replace-one, in closed form: an oracle for `Mirrored`.

A round draws m of N clients uniformly without replacement, adds up their messages (each in the unit ball) and adds
Gaussian noise. Replacing one client moves the sum of a cohort that holds it by at most 2, never by 1.

    delta(eps) = sup over neighbours of  E_P[(1 - exp(eps - L))_+],   L = log dP/dQ

Symbols -> arguments: q = m/N -> `rate`, z -> `noise_multiplier` (noise std over clip norm), eps -> `epsilons`.

Guarantee: `hockey_stick` is, at every real eps, at least the delta of the round under replace-one; it is decreasing
and convex in exp(eps), so it is the curve of some pair of distributions that dominates the round, and rounds, chosen
adaptively or not, compose by composing that pair (Zhu, Dong, Wang 2022, "Optimal accounting", Sec 3).

Theorem: Balle, Barthe, Gaboardi 2018, "Privacy amplification by subsampling", Thm 9.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from sordino.errors import SideConditionError

SENSITIVITY = 2.0  # of a sum of unit-ball messages, when one client is replaced

_ULP = float(np.finfo(np.float64).eps)
_TINY = float(np.finfo(np.float64).tiny)
_TAIL = 60.0  # standard deviations beyond which the normal tail is below the smallest double
_SLACK = 1e-12  # relative error allowed for erfcx, exp and ndtr together

Curve = NDArray[np.float64]


def hockey_stick(epsilons: Curve, *, rate: float, noise_multiplier: float) -> Curve:
    """An upper bound on delta(eps) of one round, for any real eps.

        delta(log(1 + q (exp(e) - 1))) <= q delta_gauss(e)                      for e >= 0
        delta(-eps) = 1 - exp(-eps) + exp(-eps) delta(eps)                      the other half, by symmetry

    The second line holds because under replace-one each pair of neighbours counts in both orders. Where the two halves
    meet the slope jumps by (1 - q) delta_gauss(0) >= 0, so the curve stays convex in exp(eps). Rounded up.
    """
    _require(rate=rate, noise_multiplier=noise_multiplier)
    epsilons = np.asarray(epsilons, dtype=np.float64)
    size = np.abs(epsilons)
    positive = rate * gaussian_delta(_inner_epsilon(size, rate), mu=SENSITIVITY / noise_multiplier)
    negative = -np.expm1(-size) + np.exp(-size) * positive
    return _rounded_up(np.where(epsilons >= 0, positive, negative))


def gaussian_delta(epsilons: Curve, *, mu: float) -> Curve:
    """delta of N(0, 1) against N(mu, 1), for eps >= 0, rounded up.

        delta = Phi(a) - exp(eps) Phi(b),   a = mu/2 - eps/mu,   b = a - mu
              = phi(a) (M(a) - M(b)),       M(t) = Phi(t)/phi(t) = sqrt(pi/2) erfcx(-t/sqrt 2)

    because exp(eps) phi(b) = phi(a): nothing overflows, and far out both terms carry the same tiny factor.
    Theorem: Balle, Wang 2018, "Improving the Gaussian mechanism", Thm 8.
    """
    start = mu / 2 - np.minimum(epsilons, mu * (mu / 2 + _TAIL)) / mu  # a, kept within _TAIL on both sides
    start = np.minimum(start, _TAIL)
    scale = np.exp(-start * start / 2) / 2  # phi(a) sqrt(pi/2)
    near = np.where(start < 0, scale * special.erfcx(np.maximum(-start, 0) / math.sqrt(2)), special.ndtr(start))
    far = scale * special.erfcx((mu - start) / math.sqrt(2))
    return _rounded_up(np.maximum(near - far, 0) + 4 * _ULP * near)


def _inner_epsilon(outer: Curve, rate: float) -> Curve:
    """The e >= 0 with log(1 + q (exp(e) - 1)) = eps, without overflow for large eps nor cancellation for small."""
    small = np.log1p(np.expm1(np.minimum(outer, 1.0)) / rate)
    large = outer - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(outer, 1.0)))
    return np.where(outer < 1, small, large)


def _rounded_up(deltas: Curve) -> Curve:
    """At least the exact value, at most 1, never exactly 0: an underflow is an upper bound too."""
    return np.minimum(deltas * (1 + _SLACK) + _TINY, 1.0)


def _require(*, rate: float, noise_multiplier: float) -> None:
    if not 0 < rate <= 1:
        raise SideConditionError(f"rate = {rate}", "0 < rate <= 1, the cohort over the clients")
    if not 0 < noise_multiplier < math.inf:
        raise SideConditionError(
            f"noise_multiplier = {noise_multiplier}", "a finite noise multiplier above 0", "add noise"
        )
