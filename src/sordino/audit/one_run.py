"""Lower bounds from one training run: m canaries, each in by a fair coin; some coins are guessed, so many rightly.

    epsilon   Steinke, Nasr, Jagielski 2023, Theorem 5.2: right guesses are dominated by W = Binomial(r, expit(eps)),
              with 2 m delta max_i P[v > W >= v - i] / i added for delta
    f-DP      Mahloujifar, Melis, Chaudhuri 2024, Algorithm 3: a recursion over the number of right guesses, for any
              trade-off curve; here of a Gaussian with mu, or of the certificate itself

Guarantee: each bound is above the truth with probability at most `alpha` over the canaries' coins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from sordino.audit.tradeoff import Limit

Array = NDArray[np.float64]
Inverse = Callable[[float], float]  # the least false-alarm rate at which a power is allowed
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of the canaries that are guessed; the best counts, at alpha / 5 each


@dataclass(frozen=True)
class Guesses:
    """`right` of `made` guesses about `canaries` fair coins."""

    canaries: int
    made: int
    right: int


def guesses(scores: Array, inside: NDArray[np.bool_], share: float) -> Guesses:
    """The largest scores are said to be in, as many of the smallest to be out; the rest is silence."""
    half = max(1, round(share * len(scores) / 2))
    order = np.argsort(scores, kind="stable")
    right = int((~inside[order[:half]]).sum() + inside[order[-half:]].sum())
    return Guesses(len(scores), 2 * half, right)


def chance(found: Guesses, epsilon: float, delta: float) -> float:
    """The most probability that an (epsilon, delta) release leaves to so many right guesses."""
    r, v = found.made, found.right
    rate = float(special.expit(epsilon))
    at_least = float(special.bdtrc(v - 1, r, rate)) if v else 1.0
    below = np.arange(v - 1, -1, -1)
    logs = special.gammaln(r + 1) - special.gammaln(below + 1) - special.gammaln(r - below + 1)
    masses = np.exp(logs + special.xlogy(below, rate) + special.xlog1py(r - below, -rate))
    steepest = float(np.max(np.cumsum(masses) / np.arange(1, v + 1))) if v else 0.0
    return min(1.0, at_least + 2 * found.canaries * delta * steepest)


def least_epsilon(found: Guesses, delta: float, alpha: float) -> float:
    """The largest epsilon under which so many right guesses have a chance of at most alpha."""
    return _largest(lambda epsilon: chance(found, epsilon, delta) <= alpha, 50.0)


def least_mu(found: Guesses, alpha: float) -> float:
    """The largest mu of which a Gaussian release would leave so many right guesses at most alpha."""
    return _largest(lambda mu: rejects(gaussian(mu), found, alpha), 20.0)


def rejects(inverse: Inverse, found: Guesses, alpha: float) -> bool:
    """Whether a trade-off curve leaves so many right guesses a chance of at most alpha."""
    m, made, right = found.canaries, found.made, found.right
    if not right or right == made:
        right = min(right, made - 1)  # the recursion needs one of each kind; fewer right ones prove less
    r, h = alpha * right / m, alpha * (made - right) / m
    for i in range(right - 1, -1, -1):
        grown = max(h, inverse(min(r, 1.0)))
        r, h = r + i / (made - i) * (grown - h), grown
        if r + h > made / m:
            return True
    return False


def gaussian(mu: float) -> Inverse:
    """Of mu-GDP: Phi(Phi^-1(power) - mu)."""
    return lambda power: float(special.ndtr(special.ndtri(power) - mu))


def certified(limit: Limit) -> Inverse:
    """Of a certificate's curve: power <= min over e of exp(e) a + delta(e), solved for a."""
    if limit.mu is not None:
        return gaussian(limit.mu)
    return lambda power: float(np.clip(np.max((power - limit.deltas) * np.exp(-limit.epsilons)), 0.0, 1.0))


def _largest(refuted: Callable[[float], bool], most: float) -> float:
    """By halving: what is refuted at x is refuted below it."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, most
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
