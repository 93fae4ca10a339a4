"""Amplification by shuffling, replace-one: what a shuffler adds to local randomisers.

n clients each send one report of a local randomiser, and a trusted shuffler forgets who sent which. Each randomiser is
(eps0, delta0)-DP for its client: any two inputs, replace-one. All clients run the same randomiser, on whatever inputs
(in general it may depend on the place in the shuffled order and on the reports before it, never on who the client is).
The pair is that of one round, neighbours differ in the input of one client (replace-one), and n is public. Rounds,
chosen adaptively or not, compose by composing their pairs (`Clones` is one, for `pld`).

    C ~ Bin(n - 1, exp(-eps0)),  A ~ Bin(C, 1/2),  D ~ Bern(exp(eps0) / (exp(eps0) + 1))
    P = (A + D, C - A + 1 - D)   against   Q = (A + 1 - D, C - A + D)

Symbols -> arguments: n -> `reports`, eps0 -> `epsilon0`, delta0 -> `delta0`; C counts the clones, the reports that a
fair coin gives to either input of the changed client.

Given C = c the loss depends on r = k / (c + 1) alone, k the first count, and k has a simple law:

    k ~ 2 (a r + (1-a)(1-r)) Bin(c + 1, 1/2)  under P,      L = log (a r + (1-a)(1-r)) / ((1-a) r + a (1-r)),
    k ~ 2 ((1-a) r + a (1-r)) Bin(c + 1, 1/2) under Q,      a = exp(eps0) / (exp(eps0) + 1)

Guarantee: for delta0 = 0 the shuffled reports of two neighbours are a post-processing of (P, Q), so their hockey stick
is at most that of (P, Q), whatever n and eps0. For delta0 > 0 see `replacement`. No asymptotic closed form is
used, so none of their side conditions is needed.

Theorem: Feldman, McMillan, Talwar 2021, "Hiding among the clones" (arXiv 2012.12803), Sec 3: the reduction to clones,
its numerical analysis, and the theorem for approximate randomisers. The "stronger" clones of their 2022 paper, with
2/(exp(eps0) + 1) for exp(-eps0), are not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.pld.pairs import Array, Pair, Tails
from sordino.errors import SideConditionError

_SLACK = 1e-11  # relative error allowed for the chances: each is moved against us by it
_TAIL = 80.0  # outcomes rarer than exp(-80) are not listed: their loss counts as infinite
_BLOCK = 2e-3  # values of C that differ by less than this share count as the least of them


@dataclass(frozen=True)
class Clones(Pair):
    """One shuffled round of n reports, each eps0-DP, as the pair (P, Q) above; its own mirror image."""

    reports: int
    epsilon0: float
    total_variation: float = 0.0
    slack = _SLACK

    def tails(self, losses: Array) -> Tails:
        """Sums over the outcomes whose loss is larger; what is not listed counts for P."""
        found, some, other = _outcomes(self.reports, self.epsilon0)
        k = np.searchsorted(found, losses, side="right")
        with np.errstate(divide="ignore"):
            return np.log(some[k]), np.log(other[k])


def clones(*, reports: int, epsilon0: float, delta0: float = 0.0) -> Clones:
    """The pair of one round of (eps0, delta0)-DP randomisers."""
    _require(reports=reports, epsilon0=epsilon0, delta0=delta0)
    return Clones(reports, epsilon0, replacement(reports=reports, epsilon0=epsilon0, delta0=delta0))


@lru_cache(maxsize=8)
def _outcomes(reports: int, epsilon0: float) -> tuple[Array, Array, Array]:
    """Losses in order; and of all from each on, and after the last, their chance under P and under Q."""
    counts, chances, missed = _clone_counts(reports - 1, math.exp(-epsilon0))
    firsts, halves, cut = _halves(counts + 1)
    share, other = firsts / (counts + 1)[:, None], math.exp(-epsilon0)
    with_it, without = share + other * (1 - share), other * share + (1 - share)  # times 1 + exp(-eps0)
    with np.errstate(divide="ignore"):
        losses = np.log1p(-math.expm1(-epsilon0) * (2 * share - 1) / without).ravel()
    order = np.argsort(losses)
    weights = chances[:, None] * halves * (2 / (1 + other))
    above = [np.append(np.cumsum((weights * each).ravel()[order][::-1])[::-1], 0.0) for each in (with_it, without)]
    some = np.minimum(above[0] * (1 + _SLACK) + missed + cut, 1.0)
    return losses[order], np.append(1.0, some[1:]), above[1]


def _clone_counts(trials: int, probability: float) -> tuple[Array, Array, float]:
    """The law of C in blocks, each by its least value (one clone more is a post-processing); and what is not listed."""
    mean, variance = trials * probability, trials * probability * (1 - probability)
    reach = _TAIL / 3 + math.sqrt((_TAIL / 3) ** 2 + 2 * _TAIL * variance)  # Bernstein
    low, high = max(0, math.floor(mean - reach)), min(trials, math.ceil(mean + reach))
    if not 0 < probability < 1:
        return np.asarray([float(trials if probability else 0)]), np.ones(1), 0.0
    values = np.arange(low, high + 1, dtype=np.float64)
    odds = math.log(probability) - math.log(-math.expm1(math.log(probability)))
    masses = _from_ratios(np.log((trials - values + 1) / np.maximum(values, 1)) + odds)
    starts = np.arange(0, len(values), max(1, math.floor(_BLOCK * low)))
    whole = low == 0 and high == trials
    return values[starts], np.add.reduceat(masses, starts), 0.0 if whole else 2 * math.exp(-_TAIL)


def _halves(trials: Array) -> tuple[Array, Array, float]:
    """Bin(m, 1/2) for every m, a row each: values, chances, and the chance of what is not listed (Hoeffding)."""
    most = float(np.max(trials))
    reach = min(math.ceil(math.sqrt(_TAIL * most / 2)) + 1, math.ceil(most / 2) + 1)
    values = np.floor(trials / 2)[:, None] + np.arange(-reach, reach + 1)
    inside = (values >= 0) & (values <= trials[:, None])
    ratios = (trials[:, None] - values + 1) / np.where(values >= 1, values, np.inf)
    logs = np.log(np.where(inside & (values >= 1), ratios, 1.0))
    masses = _from_ratios(logs, inside)
    return np.where(inside, values, 0.0), masses, 2 * math.exp(-_TAIL) if reach <= most / 2 else 0.0


def _from_ratios(logs: Array, inside: NDArray[np.bool_] | None = None) -> Array:
    """A law, along the last axis, by the logarithm of each chance over the one before: each is small, so exact."""
    heights = np.cumsum(logs, axis=-1)
    heights = heights if inside is None else np.where(inside, heights, -np.inf)
    masses = np.exp(heights - np.max(heights, axis=-1, keepdims=True))
    return np.asarray(masses / np.sum(masses, axis=-1, keepdims=True))


def replacement(*, reports: int, epsilon0: float, delta0: float) -> float:
    """The total variation between one round of real randomisers and of pure ones; delta grows by (exp(e) + 1) times it.

        paper, Thm 3.8:   (1 + exp(-eps0)/2) n delta0
        here:             max(1 + exp(-eps0)/2, 2 exp(-eps0)) n delta0

    The larger of two: the published constant, and one with a short proof. Write R0, R1 for the reports of the changed
    client and R for that of another. (i) R0, R1 lie within delta0 of some R0', R1' that are eps0-indistinguishable,
    with (1 - delta0) R0' <= R0, and so for R1' (Kairouz, Oh, Viswanath 2015). (ii) The clone G = exp(-eps0)
    (R0' + R1')/2 exceeds R by a mass of at most 2 exp(-eps0) delta0, so R lies that near to an R' >= G. (iii) With
    R0', R1', R' the reduction to (P, Q) is exact, and D(P||Q) <= D(P'||Q') + TV(P, P') + exp(e) TV(Q, Q'). Over many
    rounds the total variations add up.
    """
    per_report = max(1 + math.exp(-epsilon0) / 2, 2 * math.exp(-epsilon0))
    return per_report * reports * delta0 * (1 + _SLACK)


def _require(*, reports: int, epsilon0: float, delta0: float) -> None:
    if reports < 1:
        raise SideConditionError(f"reports = {reports}", "at least one report")
    if not 0 <= epsilon0 < math.inf:
        raise SideConditionError(f"epsilon0 = {epsilon0}", "a finite local epsilon, at least 0")
    if not 0 <= delta0 <= 1:
        raise SideConditionError(f"delta0 = {delta0}", "0 <= delta0 <= 1")
