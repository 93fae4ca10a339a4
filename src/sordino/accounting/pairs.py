"""Dominating pairs (P, Q) of releases, by their privacy loss distribution. Events return them, `pld` composes them.

    L = log dP/dQ,    tails(l) = log P(L > l), log Q(L > l),    delta(e) = P(L > e) - exp(e) Q(L > e)

A pair dominates a release if its delta(e) is at least that of the release for every two neighbours and every real e;
then any sequence of releases, chosen adaptively or not, is dominated by the product of their pairs (Zhu, Dong, Wang
2022, "Optimal accounting of differential privacy via characteristic function", Thm 10). Both orders of neighbours
count: `Orders` has a pair for each. The last section has the pair of one shuffled round (`Clones`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, log_ndtr

from sordino.errors import SideConditionError

Array = NDArray[np.float64]
Tails = tuple[Array, Array]


class Pair(ABC):
    """Dominating pair of distributions P and Q, given by the tails of their privacy loss L.

    total_variation  distance of the release from the mechanism that the pair dominates
    slack            relative error of `tails`
    largest_loss     the largest finite loss if it is an atom, so that a grid can include it, else inf
    factors          the pairs whose product the pair is; empty if it is no product
    """

    total_variation: float = 0.0
    slack: float = 2e-15
    largest_loss: float = math.inf
    factors: tuple[Pair, ...] = ()

    @abstractmethod
    def tails(self, losses: Array) -> Tails:
        """Return log P(L > l) and log Q(L > l) for each l in `losses`."""

    def atoms(self) -> tuple[Array, Array, float] | None:
        """Return the finite losses in ascending order, upper bounds on their P-probabilities, and one for infinity.

        None if the pair is not a finite list of outcomes.
        """
        return None


@dataclass(frozen=True)
class Orders:
    """Dominating pairs for both orders of neighbours: the unit is in P and not in Q (`removed`), or vice versa."""

    removed: Pair
    added: Pair

    @classmethod
    def symmetric(cls, pair: Pair) -> Orders:
        """Use one pair, which dominates both orders of neighbours, for both."""
        return cls(pair, pair)


@dataclass(frozen=True)
class Gauss(Pair):
    """Gaussian pair N(mu, 1) against N(0, 1): L is N(mu^2/2, mu^2) under P and N(-mu^2/2, mu^2) under Q."""

    mu: float

    def tails(self, losses: Array) -> Tails:
        """Return log Phi(mu/2 - l/mu) and log Phi(-mu/2 - l/mu)."""
        with np.errstate(over="ignore"):
            away = losses / self.mu
        return log_ndtr(self.mu / 2 - away), log_ndtr(-self.mu / 2 - away)


@dataclass(frozen=True)
class Both(Pair):
    """Product of a Gaussian pair and a pair with atoms: the adversary sees both outcomes, and the losses add up.

    The accountant composes the two as separate releases (`factors`)."""

    first: Gauss
    second: Pair

    @property
    def factors(self) -> tuple[Pair, ...]:  # type: ignore[override]
        return self.first, self.second

    def tails(self, losses: Array) -> Tails:
        """Return the log tails: those of `first` at l minus each atom of `second`, averaged."""
        found = self.second.atoms()
        if found is None:
            raise SideConditionError(f"a product with {self.second}", "a second pair that is a list of outcomes")
        values, masses, infinite = found
        with np.errstate(divide="ignore", over="ignore"):
            logs = np.log(masses), np.log(masses) - values
        both = [np.full(len(losses), -np.inf), np.full(len(losses), -np.inf)]
        for k in range(0, len(values), 64):
            inner = self.first.tails(losses[:, None] - values[k : k + 64])
            for place in (0, 1):
                both[place] = np.logaddexp(
                    both[place], np.logaddexp.reduce(inner[place] + logs[place][k : k + 64], axis=1)
                )
        return np.minimum(np.logaddexp(both[0], math.log(max(infinite, 1e-300))), 0.0), np.minimum(both[1], 0.0)


@dataclass(frozen=True)
class Exponential(Pair):
    """Laplace pair: noise of scale 1 whose centre moves by `size` between neighbours.

    L lies in [-size, size], with an atom at both ends; swapping the neighbours does not change its distribution.
    """

    size: float

    @property
    def largest_loss(self) -> float:  # type: ignore[override]
        return self.size

    def tails(self, losses: Array) -> Tails:
        """Return the logs of P(L > l) = 1 - exp((l - size)/2)/2 and Q(L > l) = exp(-(l + size)/2)/2, for |l| < size."""
        inside = np.clip(losses, -self.size, self.size)
        some = np.log1p(-np.exp((inside - self.size) / 2) / 2)
        other = -(inside + self.size) / 2 - math.log(2)
        out, all_of = losses >= self.size, losses < -self.size
        return tuple(np.where(out, -np.inf, np.where(all_of, 0.0, each)) for each in (some, other))  # type: ignore[return-value]


@dataclass(frozen=True)
class Response(Pair):
    """Dominating pair of any (epsilon, delta)-DP release: randomised response that reveals all with probability delta.

    Theorem: Kairouz, Oh, Viswanath 2015, "The composition theorem for differential privacy", Thm 3.
    """

    epsilon: float
    delta: float = 0.0

    @property
    def largest_loss(self) -> float:  # type: ignore[override]
        return self.epsilon

    def tails(self, losses: Array) -> Tails:
        """Return the log tails of a loss with atoms at -epsilon, at epsilon and, under P only, at infinity."""
        rest, high = math.log1p(-self.delta) if self.delta < 1 else -math.inf, -math.log1p(math.exp(-self.epsilon))
        lost = math.log(self.delta) if self.delta > 0 else -math.inf
        first, second = losses < -self.epsilon, losses < self.epsilon
        above = np.where(first, 0.0, np.where(second, np.logaddexp(lost, rest + high), lost))
        return above, np.where(first, rest, np.where(second, rest + high - self.epsilon, -np.inf))


def inner_loss(losses: Array, rate: float) -> Array:
    """Return the y with log(1 + q (exp(y) - 1)) = l for each l in `losses`, or -inf if there is none; q is `rate`.

    y is the loss before sampling that sampling at rate q turns into l.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(losses, 1.0)) / rate, -1.0))
        large = losses - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(losses, 1.0)))
    return np.where(losses < 1, small, large)


@dataclass(frozen=True)
class _Sampled(Pair):
    """Base of pairs of a release that includes the unit with probability `rate`; `inner` is without sampling."""

    rate: float
    inner: Pair

    @property
    def total_variation(self) -> float:  # type: ignore[override]
        return self.inner.total_variation

    @property
    def slack(self) -> float:  # type: ignore[override]
        return self.inner.slack


@dataclass(frozen=True)
class Present(_Sampled):
    """Pair (1-q) Q + q P against Q, where `inner` is (P, Q): the unit is sampled secretly with probability q."""

    @property
    def largest_loss(self) -> float:  # type: ignore[override]
        inner = self.inner.largest_loss
        return math.log1p(self.rate * math.expm1(inner)) if inner < 700 else math.inf

    def tails(self, losses: Array) -> Tails:
        """Return log P(L > l) and log Q(L > l) of the sampled loss L = log(1 - q + q exp(y)), y the loss of `inner`.

        L increases in y, so L > l exactly if y > inner_loss(l); q is `rate`.
        """
        moved, still = self.inner.tails(inner_loss(losses, self.rate))
        return log_mixture(self.rate, moved, still), still


@dataclass(frozen=True)
class Absent(_Sampled):
    """Pair P against (1-q) P + q Q, where `inner` is (P, Q): the unit is in the second data set, sampled secretly.

    L is at most -log(1 - q).
    """

    @property
    def largest_loss(self) -> float:  # type: ignore[override]
        inner = self.inner.largest_loss
        return -math.log1p(self.rate * math.expm1(-inner)) if inner < math.inf else math.inf

    def tails(self, losses: Array) -> Tails:
        """Return log P(L > l) and log Q(L > l) of the sampled loss L = -log(1 - q + q exp(-y)), y the loss of `inner`.

        L increases in y, so L > l exactly if y > -inner_loss(-l); q is `rate`.
        """
        still, moved = self.inner.tails(-inner_loss(-losses, self.rate))
        return still, log_mixture(self.rate, moved, still)


@dataclass(frozen=True)
class Swapped(Pair):
    """Pair (1-q) N(0, 1) + q N(mu, 1) against (1-q) N(0, 1) + q N(-mu, 1), for Poisson sampling under replace-one."""

    rate: float
    mu: float

    def tails(self, losses: Array) -> Tails:
        """Return the log tails of L, which is odd and increasing in the outcome x; exp(mu x) solves a quadratic."""
        # x >= 0 with (1-q) + q c w = exp(l) ((1-q) + q c / w),  w = exp(mu x),  c = exp(-mu^2/2)
        size = np.abs(losses)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            absent = math.log1p(-self.rate) if self.rate < 1 else -math.inf
            first = absent + size + np.log(-np.expm1(-size))
            second = math.log(2 * self.rate) - self.mu**2 / 2 + size / 2
            top = np.maximum(first, second)
            root = np.log((np.exp(first - top) + np.hypot(np.exp(first - top), np.exp(second - top))) / 2)
            outcome = np.maximum((top + root - math.log(self.rate)) / self.mu + self.mu / 2, 0.0)
        x = np.sign(losses) * outcome
        still = log_ndtr(-x)
        some, other = log_ndtr(self.mu - x), log_ndtr(-self.mu - x)
        return log_mixture(self.rate, some, still), log_mixture(self.rate, other, still)


@dataclass(frozen=True)
class Mirrored(_Sampled):
    """Pair of sampling without replacement at rate q, given by its privacy curve delta(l):

        delta(l) = q delta_inner(y)   at l = log(1 + q (exp(y) - 1)) >= 0
        delta(-l) = 1 - exp(-l) + exp(-l) delta(l)        since neighbours count in both orders

    At l = 0 the slope jumps by (1 - q) delta_inner(0) >= 0, so the curve is convex in exp(l), and is that of a pair.
    Guarantee: dominates (1-q) A + q B against (1-q) A + q B' whenever `inner` dominates B against A and B against B',
    and the same with B and B' swapped. Theorem: Balle, Barthe, Gaboardi 2018, Thm 2 and 9 (advanced joint convexity).
    """

    def tails(self, losses: Array) -> Tails:
        """Return the log tails: above 0 those of `Present`; P(L > -l) = 1 - Q(L >= l) and Q(L > -l) = 1 - P(L >= l)."""
        above, below = Present(self.rate, self.inner).tails(np.abs(losses))
        with np.errstate(divide="ignore"):
            mirror = np.log1p(-np.exp(below)), np.log1p(-np.exp(above))
        return np.where(losses >= 0, above, mirror[0]), np.where(losses >= 0, below, mirror[1])


@dataclass(frozen=True)
class Either(Pair):
    """Mixture of two pairs, `first` with probability `share` and else `second`; the adversary sees which one."""

    share: float
    first: Pair
    second: Pair

    def tails(self, losses: Array) -> Tails:
        one, other = self.first.tails(losses), self.second.tails(losses)
        return log_mixture(self.share, one[0], other[0]), log_mixture(self.share, one[1], other[1])


@dataclass(frozen=True)
class PublicMixture(_Sampled):
    """Mixture of `inner` with probability `rate` and of loss 0 otherwise, for sampling that the adversary sees.

    The sampling depends on no data.
    """

    @property
    def total_variation(self) -> float:  # type: ignore[override]
        return self.rate * self.inner.total_variation

    @property
    def largest_loss(self) -> float:  # type: ignore[override]
        return self.inner.largest_loss

    def tails(self, losses: Array) -> Tails:
        """Return the logs of q times the tails of `inner`, plus 1 - q for l < 0."""
        nothing = np.where(losses < 0, 0.0, -np.inf)
        some, other = self.inner.tails(losses)
        return log_mixture(self.rate, some, nothing), log_mixture(self.rate, other, nothing)


def log_mixture(share: float, first: Array, second: Array) -> Array:
    """Return log(share exp(first) + (1 - share) exp(second)) without overflow."""
    if share >= 1:
        return first
    if share <= 0:
        return second
    return np.asarray(np.logaddexp(math.log(share) + first, math.log1p(-share) + second))


def poisson_sampled(rate: float, inner: Pair) -> Orders:
    """Return the pairs of Poisson sampling under add_remove or zero_out; `inner` dominates the release in both orders.

    Proof: let T be the other units of the cohort, A the release of T and B that of T with the changed unit, both
    averaged over T. The sampled release is (1-q) A + q B if the unit is in the data, and A if not. H_t(P, Q) is the
    hockey-stick divergence sup_S P(S) - t Q(S). For every t = exp(e), and c = 1 - t (1-q),

        H_t((1-q) A + q B, A) = q H_s(B, A),   s = (t - 1 + q) / q        for t >= 1 - q, else 1 - t for any A and B
        H_t(A, (1-q) A + q B) = c H_s(A, B),   s = t q / c                for c > 0, else 0 for any A and B

    by collecting the terms of A. H_s is jointly convex, and `inner` dominates (B, A) and (A, B) for every T, so also on
    average: with `inner` in their place both right-hand sides only grow, and are those of `Present` and `Absent`. An
    absent unit and an empty message give the same sum, so zero_out has the same pairs.
    """
    return Orders(Present(rate, inner), Absent(rate, inner))


@lru_cache(maxsize=256)
def is_own_mirror(pair: Pair) -> bool:
    """Return whether (P, Q) and (Q, P) have the same privacy curve, delta(e) = 1 - exp(e) + exp(e) delta(-e).

    The equation is checked at 64 values of e. A tight pair that dominates a release in both orders of neighbours has
    this symmetry. An asymmetric pair that an event returns for both orders was most likely proved for one order only.
    """
    e = np.geomspace(1e-4, 30.0, 64)
    with np.errstate(all="ignore"):
        at, opposite = (np.exp(some) - np.exp(x + other) for x, (some, other) in ((x, pair.tails(x)) for x in (e, -e)))
        gap = np.exp(-e / 2) * at - np.exp(e / 2) * (opposite + np.expm1(-e))
    return bool(np.all(np.abs(gap) <= 1e-8))


def capped(rate: float, population: int, cap: int, mu: float, *, replaced: bool, removed: bool) -> Orders:
    """Return the pairs of Poisson sampling truncated to `cap` units, with Gaussian noise (proof: docs/privacy.md).

    `mu` is that of one unit's message at sensitivity 1. Of N - 1 other units (N = `population`), J ~ Bin(N - 1, q) are
    drawn at rate q:
        J < cap   the unit is added with probability q                                       sensitivity 1
        J >= cap  the unit replaces a random other one with probability q'                   sensitivity 2
    q' = Pr[the unit is in the cohort | J >= cap] = (cap / N) Pr[Bin(N, q) > cap] / Pr[J >= cap]
    """
    full = float(bdtrc(cap - 1, population - 1, rate)) if cap <= population - 1 else 0.0
    room = Orders.symmetric(Swapped(rate, mu)) if replaced else poisson_sampled(rate, Gauss(mu))
    if full <= 0:
        return room
    kept = min(rate, cap / population * float(bdtrc(cap, population, rate)) / full)
    place = poisson_sampled(kept, Gauss(2 * mu)) if removed else Orders.symmetric(Mirrored(kept, Gauss(2 * mu)))
    return Orders(Either(full, place.removed, room.removed), Either(full, place.added, room.added))


# ---- amplification by shuffling --------------------------------------------------------------------------------------

_SLACK = 1e-11  # relative error of the probabilities, each of which is raised by it
_TAIL = 80.0  # outcomes rarer than exp(-80) are not listed: their loss counts as infinite
_BLOCK = 2e-3  # values of C that differ by less than this share count as the least of them


@dataclass(frozen=True)
class Clones(Pair):
    """Dominating pair of one shuffled round of n reports, for amplification by shuffling under replace-one.

    n clients each send one report of a local randomiser, and a trusted shuffler permutes the reports at random. The
    randomiser is (eps0, delta0)-DP for any two inputs. All clients run the same randomiser (in general it may depend on
    the place in the shuffled order and on earlier reports, never on the client). Neighbours differ in the input of one
    client, and n is public. Rounds, chosen adaptively or not, compose by composing their pairs.

        C ~ Bin(n - 1, exp(-eps0)),  A ~ Bin(C, 1/2),  D ~ Bern(exp(eps0) / (exp(eps0) + 1))
        P = (A + D, C - A + 1 - D)   against   Q = (A + 1 - D, C - A + D)

    n is `reports`, eps0 is `epsilon0`; C is the number of clones: reports that are equally likely to come from either
    input of the changed client.

    Given C = c the loss depends on r = k / (c + 1) alone, where k is the first count, with distribution

        k ~ 2 (a r + (1-a)(1-r)) Bin(c + 1, 1/2)  under P,      L = log (a r + (1-a)(1-r)) / ((1-a) r + a (1-r)),
        k ~ 2 ((1-a) r + a (1-r)) Bin(c + 1, 1/2) under Q,      a = exp(eps0) / (exp(eps0) + 1)

    Guarantee: for delta0 = 0 the shuffled reports of two neighbours are a post-processing of (P, Q), so their hockey
    stick is at most that of (P, Q), whatever n and eps0. For delta0 > 0 see `distance_to_pure`. No asymptotic closed
    form is used, so none of their side conditions is needed.

    Theorem: Feldman, McMillan, Talwar 2021, "Hiding among the clones" (arXiv 2012.12803), Sec 3: the reduction to
    clones, its numerical analysis, and the theorem for approximate randomisers. The "stronger" clones of their 2022
    paper, with 2/(exp(eps0) + 1) for exp(-eps0), are not used.
    """

    reports: int
    epsilon0: float
    total_variation: float = 0.0
    slack = _SLACK

    def tails(self, losses: Array) -> Tails:
        found, some, other = _outcomes(self.reports, self.epsilon0)
        k = np.searchsorted(found, losses, side="right")
        with np.errstate(divide="ignore"):
            return np.log(some[k]), np.log(other[k])


def clones(*, reports: int, epsilon0: float, delta0: float = 0.0) -> Clones:
    """Return the dominating pair of one shuffled round of (epsilon0, delta0)-DP reports."""
    if reports < 1:
        raise SideConditionError(f"reports = {reports}", "at least one report", "correct reports")
    if not 0 <= epsilon0 < math.inf:
        raise SideConditionError(f"epsilon0 = {epsilon0}", "a finite local epsilon, at least 0", "correct epsilon0")
    if not 0 <= delta0 <= 1:
        raise SideConditionError(f"delta0 = {delta0}", "0 <= delta0 <= 1", "correct delta0")
    return Clones(reports, epsilon0, distance_to_pure(reports=reports, epsilon0=epsilon0, delta0=delta0))


@lru_cache(maxsize=8)
def _outcomes(reports: int, epsilon0: float) -> tuple[Array, Array, Array]:
    """Return the sorted losses of all outcomes, and under P and Q the probability of a loss at least as large."""
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
    """Return the distribution of C in blocks, each rounded down to its smallest value, and the omitted probability."""
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
    """Return Bin(m, 1/2) for each m, one row each: values, probabilities, and the omitted probability (Hoeffding)."""
    most = float(np.max(trials))
    reach = min(math.ceil(math.sqrt(_TAIL * most / 2)) + 1, math.ceil(most / 2) + 1)
    values = np.floor(trials / 2)[:, None] + np.arange(-reach, reach + 1)
    inside = (values >= 0) & (values <= trials[:, None])
    ratios = (trials[:, None] - values + 1) / np.where(values >= 1, values, np.inf)
    logs = np.log(np.where(inside & (values >= 1), ratios, 1.0))
    masses = _from_ratios(logs, inside)
    return np.where(inside, values, 0.0), masses, 2 * math.exp(-_TAIL) if reach <= most / 2 else 0.0


def _from_ratios(logs: Array, inside: NDArray[np.bool_] | None = None) -> Array:
    """Return the distribution along the last axis, given the log-ratios of successive probabilities."""
    heights = np.cumsum(logs, axis=-1)
    heights = heights if inside is None else np.where(inside, heights, -np.inf)
    masses = np.exp(heights - np.max(heights, axis=-1, keepdims=True))
    return np.asarray(masses / np.sum(masses, axis=-1, keepdims=True))


def distance_to_pure(*, reports: int, epsilon0: float, delta0: float) -> float:
    """Bound the total variation distance between a round of (eps0, delta0)-DP and one of eps0-DP randomisers.

    delta(e) grows by (exp(e) + 1) times this distance.

        Feldman, McMillan, Talwar 2021, Thm 3.8:   (1 + exp(-eps0)/2) n delta0
        here:                                      max(1 + exp(-eps0)/2, 2 exp(-eps0)) n delta0

    The bound is the larger of the published constant and one with this short proof. Write R0, R1 for the reports of
    the changed client and R for that of another. (i) R0, R1 lie within delta0 of some R0', R1' that are
    eps0-indistinguishable, with (1 - delta0) R0' <= R0, and so for R1' (Kairouz, Oh, Viswanath 2015). (ii) The clone G
    = exp(-eps0) (R0' + R1')/2 exceeds R by a mass of at most 2 exp(-eps0) delta0, so R lies that near to an R' >= G.
    (iii) With R0', R1', R' the reduction to (P, Q) is exact, and D(P||Q) <= D(P'||Q') + TV(P, P') + exp(e) TV(Q, Q').
    Over many rounds the total variations add up.
    """
    per_report = max(1 + math.exp(-epsilon0) / 2, 2 * math.exp(-epsilon0))
    return per_report * reports * delta0 * (1 + _SLACK)
