"""Privacy events: descriptions of releases, from which `accountant` computes epsilon. The parts of a plan create them.

Noise multipliers are relative to the message's bound (the unit ball), for a sensitivity of 1. If a client may be
replaced, not only removed, the sensitivity is 2.

An event bounds its privacy loss by three methods:

    pairs  dominating pairs of one release in both orders of neighbours (module `pairs`), which compose exactly
    mu     mu of a Gaussian release N(mu, 1) against N(0, 1) that dominates the event, if there is one
    pure   the largest privacy loss, if there is one

An event without pairs has no bound, and no plan can be built with it; only the best of many trials (`Tuned`) is bounded
by Renyi divergences alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sordino.accounting import allocation, pairs, renyi
from sordino.accounting.pairs import Array, Orders
from sordino.accounting.pld import gaussian_epsilon
from sordino.accounting.renyi import Trials
from sordino.codec import Part
from sordino.errors import ConfigError, PlanError, brief_repr

Relation = Literal["add_remove", "replace_one", "zero_out"]
_MOST_LOCAL = 30.0  # beyond this local epsilon exp(-epsilon0) leaves no clones


def sensitivity(relation: Relation) -> float:
    """Return the sensitivity of a message in the unit ball: 1 if it may be removed, 2 if it may be replaced."""
    return 2.0 if relation == "replace_one" else 1.0


class Event(Part):
    """Base class of all privacy events: one release, as one adversary observes it.

    protects       whether the release has a guarantee; if not, epsilon is infinite
    is_gaussian    whether the release is Gaussian noise, so that `mu` is exact
    proved_pair    (epsilon, delta) of a release about which nothing else is known, else None
    only_renyi     whether only Renyi divergences bound the release, which then has no dominating pair
    spends_delta   whether its dominating pair uses a share of delta (`pairs`)
    messages       number of noised messages in the release, if their noise cannot be drawn as one sum
    inclusion      P[the unit is in the release], if sampling amplifies; None: not known
    seen_sampling  (rate, event of a round that includes the unit), if the adversary sees which rounds include it
    """

    protects: bool = True
    is_gaussian: bool = False
    proved_pair: tuple[float, float] | None = None
    only_renyi: bool = False
    spends_delta: bool = False
    messages: int = 1
    inclusion: float | None = None
    seen_sampling: tuple[float, Event] | None = None

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """Return dominating pairs, each of which gives a valid bound; an empty tuple if none is known.

        `share` is the part of delta that one release may use for `Pair.total_variation`.
        """
        return ()

    def mu(self, relation: Relation) -> float:
        """Return mu of a Gaussian release that dominates this one; inf if none is known."""
        return math.inf

    def pure(self, relation: Relation) -> float:
        """Return the epsilon of pure DP (the largest privacy loss); inf if the loss is unbounded."""
        return math.inf

    def renyi(self, relation: Relation) -> Array | None:
        """Return divergences at `renyi.ORDERS` for both orders of neighbours; None if they are not known."""
        return None

    def clt_mu_squared(self, relation: Relation) -> float | None:
        """Estimate mu^2 of one of many rounds by the central limit theorem (Bu, Dong, Long, Su 2020), not a bound."""
        size = min(self.mu(relation), self.pure(relation))
        return size**2 if size < 1e150 else None


Entries = Sequence[tuple[Event, int]]


@dataclass(frozen=True)
class GaussianNoise(Event, kind="gaussian"):
    """Release x + N(0, noise_multiplier^2 I) of a vector x with L2 sensitivity 1."""

    noise_multiplier: float
    is_gaussian = True

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        return (Orders.symmetric(pairs.Gauss(self.mu(relation))),)

    def mu(self, relation: Relation) -> float:
        """Return mu = sensitivity / noise multiplier, at most 1e300."""
        noise = self.noise_multiplier
        return min(sensitivity(relation) / noise, 1e300) if noise > 0 else 1e300

    def renyi(self, relation: Relation) -> Array | None:
        return renyi.gaussian(self.mu(relation))


@dataclass(frozen=True)
class LaplaceNoise(Event, kind="laplace"):
    """Release of a vector x with L1 sensitivity 1, plus Laplace noise of scale noise_multiplier per coordinate."""

    noise_multiplier: float

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        return (Orders.symmetric(pairs.Exponential(self.pure(relation))),)

    def pure(self, relation: Relation) -> float:
        noise = self.noise_multiplier
        return min(sensitivity(relation) / noise, 1e300) if noise > 0 else 1e300

    def renyi(self, relation: Relation) -> Array | None:
        return renyi.laplace(self.pure(relation))


class _Amplified(Event):
    """Base of events amplified by secret sampling; a cohort includes a unit with probability `inclusion`."""

    event: Event

    def clt_mu_squared(self, relation: Relation) -> float | None:
        """Return the estimate q^2 (exp(mu^2) - 1), with q the probability of inclusion and mu before sampling."""
        inner = self.event.clt_mu_squared(relation)
        return None if inner is None or self.inclusion is None else self.inclusion**2 * math.expm1(min(inner, 100.0))


@dataclass(frozen=True)
class PoissonSampled(_Amplified, kind="poisson_sampled"):
    """Poisson sampling of `event`: each unit is in the cohort with probability `rate`; the adversary sees no cohort.

    `event` must have one dominating pair for both orders of neighbours that is its own mirror image: (P, Q) and (Q, P)
    have the same privacy curve. Guarantee: `pairs.poisson_sampled` dominates if a unit is added, removed or zeroed out.
    Replace-one is accounted for Gaussian noise only.
    """

    rate: float
    event: Event

    @property
    def inclusion(self) -> float:  # type: ignore[override]
        return self.rate

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """Return (1-q) Q + q P against Q or, under replace_one, against (1-q) Q + q P', P' the mirror image of P."""
        if relation != "replace_one":
            return tuple(pairs.poisson_sampled(self.rate, pair) for pair in _mirror_pairs(self.event, relation, share))
        gaussian = self.event.is_gaussian
        return (Orders.symmetric(pairs.Swapped(self.rate, self.event.mu("add_remove"))),) if gaussian else ()

    def mu(self, relation: Relation) -> float:
        """Return mu of a release that always includes the unit, which is a bound by joint convexity."""
        return self.event.mu(relation)

    def renyi(self, relation: Relation) -> Array | None:
        known = self.event.is_gaussian and relation != "replace_one"
        return renyi.poisson_gaussian(self.rate, self.event.mu(relation)) if known else None

    def pure(self, relation: Relation) -> float:
        """Return log(1 + q (exp(l) - 1)), the largest loss after sampling at rate q if it is l before sampling."""
        loss = self.event.pure(relation)
        mixed = math.log1p(self.rate * math.expm1(loss)) if loss < 700 else loss
        return math.inf if relation == "replace_one" else mixed


@dataclass(frozen=True)
class CappedPoisson(_Amplified, kind="capped_poisson"):
    """Poisson sampling truncated to a uniformly random subset of at most `cap` units, with Gaussian noise."""

    rate: float
    population: int
    cap: int
    event: Event

    @property
    def inclusion(self) -> float:  # type: ignore[override]
        return self.rate

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        if not self.event.is_gaussian:
            return ()
        mu = self.event.mu("add_remove")
        replaced, removed = relation == "replace_one", relation == "add_remove"
        return (pairs.capped(self.rate, self.population, self.cap, mu, replaced=replaced, removed=removed),)

    def mu(self, relation: Relation) -> float:
        """Return mu under replacement (sensitivity 2), the worst case."""
        return self.event.mu("replace_one") if self.event.is_gaussian else math.inf


@dataclass(frozen=True)
class FixedSampled(_Amplified, kind="fixed_sampled"):
    """Sampling without replacement of `event`: a secret, uniformly random cohort of `cohort` of `population` units."""

    population: int
    cohort: int
    event: Event

    @property
    def inclusion(self) -> float:  # type: ignore[override]
        return self.cohort / self.population

    @property
    def spends_delta(self) -> bool:  # type: ignore[override]
        return self.event.spends_delta

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """Return the pair `pairs.Mirrored` under replace_one; other relations have none.

        A cohort with the unit and one without it also differ by a replacement. So the theorem needs only a pair that
        dominates replacements in both orders.
        """
        if relation != "replace_one":
            return ()
        found = _mirror_pairs(self.event, relation, share)
        return tuple(Orders.symmetric(pairs.Mirrored(self.inclusion, pair)) for pair in found)

    def mu(self, relation: Relation) -> float:
        return self.event.mu(relation) if relation == "replace_one" else math.inf

    def pure(self, relation: Relation) -> float:
        loss = self.event.pure(relation)
        mixed = math.log1p(self.inclusion * math.expm1(loss)) if loss < 700 else loss
        return mixed if relation == "replace_one" else math.inf

    def renyi(self, relation: Relation) -> Array | None:
        known = self.event.is_gaussian and relation == "replace_one"
        return renyi.fixed_size_gaussian(self.inclusion, self.event.mu(relation)) if known else None


@dataclass(frozen=True)
class Allocated(_Amplified, kind="allocated"):
    """Random allocation: one pass of `bins` rounds of `event`, of which each unit is in exactly one.

    The unit's round is drawn uniformly and independently of other units and passes, and the adversary sees no cohort.
    Guarantee: `allocation.allocated` dominates the whole pass if a unit is added, removed or zeroed out and the noise
    is Gaussian. For any other noise or relation the pass costs at most one round with the unit: the unit's round is the
    same for both neighbours, and delta is jointly convex.
    """

    bins: int
    event: Event

    def __post_init__(self) -> None:
        if not 1 <= self.bins <= allocation.MOST_BINS:
            found = f"an allocated event with bins = {brief_repr(self.bins)}"
            raise ConfigError(found, f"a number of bins from 1 to {allocation.MOST_BINS:,}", "correct bins")

    @property
    def protects(self) -> bool:  # type: ignore[override]
        return self.event.protects

    @property
    def spends_delta(self) -> bool:  # type: ignore[override]
        return self.event.spends_delta

    @property
    def inclusion(self) -> float:  # type: ignore[override]
        return 1 / self.bins

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        mu = self.event.mu(relation)
        if not self.event.is_gaussian or relation == "replace_one" or mu > allocation.MOST_MU or self.bins == 1:
            return self.event.pairs(relation, share)
        return (allocation.allocated(self.bins, mu),)

    def mu(self, relation: Relation) -> float:
        return self.event.mu(relation)

    def pure(self, relation: Relation) -> float:
        return self.event.pure(relation)

    def renyi(self, relation: Relation) -> Array | None:
        """Return the divergences of one round with the unit, a bound since divergences are jointly quasi-convex."""
        return self.event.renyi(relation)

    def clt_mu_squared(self, relation: Relation) -> float | None:
        """Return the estimate (exp(mu^2) - 1) / bins, the variance of dP/dQ under Q."""
        inner = self.event.clt_mu_squared(relation)
        return None if inner is None else math.expm1(min(inner, 100.0)) / self.bins


@dataclass(frozen=True)
class KeptBins(Event, kind="kept_bins"):
    """Kept bins: a whole run in which each unit has one secret bin of `bins`, kept in all passes.

    `event` is the run for one who knows the bin. For every k the run is dominated by a Gaussian release of noise
    multiplier shared[k] (inf: none) beside one pass of random allocation onto kept[k] bins with own[k]
    (`accounting.kept_bins`).

    Guarantee: add/remove or zero out one unit; the adversary sees no cohort. For replace-one the run costs `event`: the
    bin is the same for both neighbours, and delta is jointly convex.
    """

    bins: int
    event: GaussianNoise
    kept: tuple[int, ...]
    own: tuple[float, ...]
    shared: tuple[float, ...]

    def __post_init__(self) -> None:
        alike = len(self.kept) == len(self.own) == len(self.shared)
        if not alike or not all(2 <= n <= self.bins <= allocation.MOST_BINS for n in self.kept):
            found = f"an event of {brief_repr(self.bins)} kept bins with choices {brief_repr(self.kept)}"
            raise ConfigError(found, "choices from 2 to the number of bins, each with two noise multipliers")
        if not all(z > 0 for z in (*self.own, *self.shared)):
            raise ConfigError("an event of kept bins without noise", "noise multipliers above 0")

    @property
    def inclusion(self) -> float:  # type: ignore[override]
        return 1 / self.bins

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        found = list(self.event.pairs(relation, share))
        if relation == "replace_one":
            return tuple(found)
        for n, own, shared in zip(self.kept, self.own, self.shared, strict=True):
            if 1 / own > allocation.MOST_MU:
                continue
            one = allocation.allocated(n, 1 / own)
            if shared < math.inf:
                beside = pairs.Gauss(1 / shared)
                one = Orders(pairs.Both(beside, one.removed), pairs.Both(beside, one.added))
            found.append(one)
        return tuple(found[1:] or found)  # without amplification only if nothing else is there

    def mu(self, relation: Relation) -> float:
        return self.event.mu(relation)

    def renyi(self, relation: Relation) -> Array | None:
        """Return the divergences for one who knows the bin: a bound, since they are jointly quasi-convex."""
        return self.event.renyi(relation)

    def clt_mu_squared(self, relation: Relation) -> float | None:
        """Return the least 1 / shared^2 + (exp(1 / own^2) - 1) / n of all choices: the variance of dP/dQ under Q."""
        ways = zip(self.kept, self.own, self.shared, strict=True)
        found = [shared**-2.0 + math.expm1(min(own**-2.0, 100.0)) / n for n, own, shared in ways]
        return min(found, default=self.event.clt_mu_squared(relation))


@dataclass(frozen=True)
class PubliclySampled(Event, kind="publicly_sampled"):
    """Sampling of `event` that the adversary sees: a round includes the unit with probability `rate`.

        delta(e) = rate delta_event(e) + (1 - rate) (1 - exp(e))_+

    The guarantee is averaged over the sampling, which depends on no data. The mixture of pairs dominates and composes
    like any pair: T rounds have sum_k Bin(T, rate)(k) delta_k(e), with delta_k for k rounds that include the unit. It
    is used only for neighbours with the same cohorts: a client is zeroed out or replaced, never added or removed.
    """

    rate: float
    event: Event

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            found = f"a publicly sampled event with rate {brief_repr(self.rate)}"
            raise ConfigError(found, "a rate between 0 and 1", "correct the rate; at rate 1 use the event itself")

    @property
    def protects(self) -> bool:  # type: ignore[override]
        return self.event.protects

    @property
    def spends_delta(self) -> bool:  # type: ignore[override]
        return self.event.spends_delta

    @property
    def seen_sampling(self) -> tuple[float, Event]:  # type: ignore[override]
        return self.rate, self.event

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        return tuple(
            Orders(pairs.PublicMixture(self.rate, each.removed), pairs.PublicMixture(self.rate, each.added))
            for each in self.event.pairs(relation, share)
        )

    def mu(self, relation: Relation) -> float:
        return self.event.mu(relation)

    def pure(self, relation: Relation) -> float:
        return self.event.pure(relation)

    def renyi(self, relation: Relation) -> Array | None:
        one = self.event.renyi(relation)
        return None if one is None else renyi.publicly_sampled(self.rate, one)

    def clt_mu_squared(self, relation: Relation) -> float | None:
        inner = self.event.clt_mu_squared(relation)
        return None if inner is None else self.rate * inner


@dataclass(frozen=True)
class Shuffled(Event, kind="shuffled"):
    """Shuffling of `reports` messages, each privatised by `event`; the adversary sees them in random order."""

    reports: int
    event: Event
    spends_delta = True

    @property
    def messages(self) -> int:  # type: ignore[override]
        return self.reports

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """Return the pairs of one message, since shuffling is post-processing, and those of `pairs.clones`."""
        if relation != "replace_one" or not self.event.protects:
            return ()
        local = [(self.event.pure(relation), 0.0)]
        if self.event.proved_pair is not None:
            local = [self.event.proved_pair]
        elif self.event.is_gaussian and share > 0:  # a Gaussian message has an epsilon0 for every delta0
            mu, lost = self.event.mu(relation), share / (2 * self.reports)
            local = [(gaussian_epsilon(mu, lost * part), lost * part) for part in (0.03, 1e-3)]
        found = [
            pairs.clones(reports=self.reports, epsilon0=own, delta0=lost) for own, lost in local if own <= _MOST_LOCAL
        ]
        return (*self.event.pairs(relation), *(Orders.symmetric(pair) for pair in found))

    def mu(self, relation: Relation) -> float:
        return self.event.mu(relation) if relation == "replace_one" else math.inf

    def pure(self, relation: Relation) -> float:
        return self.event.pure(relation) if relation == "replace_one" else math.inf


@dataclass(frozen=True)
class Approximate(Event, kind="approximate"):
    """Release that was proved (epsilon, delta)-DP by other means."""

    epsilon: float
    delta: float = 0.0

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        return (Orders.symmetric(pairs.Response(self.epsilon, self.delta)),)

    @property
    def proved_pair(self) -> tuple[float, float]:  # type: ignore[override]
        return self.epsilon, self.delta

    def pure(self, relation: Relation) -> float:
        return self.epsilon if self.delta == 0 else math.inf


@dataclass(frozen=True)
class Tuned(Event, kind="tuned"):
    """Private selection: the best of a random number of trials (`trials`), each of which costs `count` times `event`.

    Only the best trial is released; if all trials are published, their costs compose instead. The bound uses the Renyi
    divergences of `event`, which must have them.
    """

    event: Event
    count: int
    trials: Trials
    only_renyi = True

    def __post_init__(self) -> None:
        if self.count < 1 or self.event.only_renyi:
            found = f"a trial that costs {self.count} times {self.event.kind!r}"
            needed = "a count of at least 1, and an event that is not itself `Tuned`"
            raise ConfigError(found, needed, "correct the count or the event")

    @property
    def protects(self) -> bool:  # type: ignore[override]
        return self.event.protects

    def renyi(self, relation: Relation) -> Array | None:
        one = self.event.renyi(relation)
        return None if one is None else self.trials.divergences(self.count * one)


@dataclass(frozen=True)
class Unprotected(Event, kind="unprotected"):
    """Release without any guarantee: its epsilon is infinite."""

    protects = False

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        return (Orders.symmetric(pairs.Response(0.0, 1.0)),)


def _mirror_pairs(event: Event, relation: Relation, share: float) -> tuple[pairs.Pair, ...]:
    """Return the pairs of an event that dominate both orders of neighbours and are symmetric.

    The proofs of amplification need only domination. Symmetry is required as a safeguard, because an asymmetric pair
    was most likely proved for one order only.
    """
    found = event.pairs(relation, share) if event.protects else ()
    return tuple(one.removed for one in found if one.removed == one.added and pairs.is_own_mirror(one.removed))


def no_bound(event: Event, relation: Relation) -> PlanError:
    """Return the error for an event that has no bound under a neighbouring relation."""
    found = f"no privacy bound for {event} under {relation} neighbours"
    needed = "an event with a dominating pair; a sampled event needs a pair that is its own mirror image"
    return PlanError("accounting", found, needed, "use Gaussian noise, another sampler, or another release")


def has_bound(event: Event, relation: Relation) -> bool:
    """Return whether an event has a bound, which may be infinite, under a neighbouring relation."""
    if not event.protects:
        return True
    return event.renyi(relation) is not None if event.only_renyi else bool(event.pairs(relation))
