"""Events: what was released, as data that is counted, hashed and written down. `accountant` turns them into epsilon.

Sizes are in units of the message's bound (the unit ball), for a sensitivity of 1. Where a client may be replaced, not
only removed, the sensitivity is 2.

An event bounds what it reveals by three statements:

    pairs  laws that dominate one release in both orders of neighbours (`pld.pairs`); composed exactly
    mu     a Gaussian release N(mu, 1) against N(0, 1) that dominates it, if there is one
    pure   the largest privacy loss, if there is one

An event without pairs has no bound, and no plan can be built with it; only the best of many trials (`Tuned`) is bounded
by Renyi divergences alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sordino.accounting import renyi
from sordino.accounting.pld import pairs, shuffle
from sordino.accounting.pld.loss_grid import gaussian_epsilon
from sordino.accounting.pld.pairs import Array, Orders
from sordino.accounting.trials import Trials
from sordino.codec import Part
from sordino.errors import ConfigError, PlanError, brief_repr

Relation = Literal["add_remove", "replace_one", "zero_out"]
_MOST_LOCAL = 30.0  # beyond this local epsilon exp(-epsilon0) leaves no clones


def sensitivity(relation: Relation) -> float:
    """Sensitivity of a message in the unit ball: 1 if it may be removed, 2 if it may become any other."""
    return 2.0 if relation == "replace_one" else 1.0


def _ratio(size: float, noise: float) -> float:
    """Sensitivity over noise; next to no noise is a very large number, not an infinite one."""
    return min(size / noise, 1e300) if noise > 0 else 1e300


class Event(Part):
    """One release, as one adversary sees it: base of all events, and of those of other packages."""

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """Dominating pairs, each true by itself; none: there is no proof by privacy losses.

        `share` is the delta that one release may spend on being only near what its pair dominates
        (`Pair.total_variation`).
        """
        return ()

    def mu(self, relation: Relation) -> float:
        """A Gaussian release that dominates this one; inf if none is known."""
        return math.inf

    def pure(self, relation: Relation) -> float:
        """The largest privacy loss; inf if there is none."""
        return math.inf

    def renyi(self, relation: Relation) -> Array | None:
        """Divergences at `renyi.ORDERS`, whatever the order of neighbours; None if they are not known."""
        return None

    @property
    def inclusion(self) -> float | None:
        """P[the unit is in the release], where that is what amplifies; None: not stated."""
        return None

    @property
    def seen_sampling(self) -> tuple[float, Event] | None:
        """(rate, event of a round that the unit is in), where a coin that is seen decides whether it is; else None."""
        return None

    @property
    def protects(self) -> bool:
        """Whether the release guarantees anything; False: epsilon is infinite."""
        return True

    @property
    def is_gaussian(self) -> bool:
        """Whether the release is Gaussian noise itself, so that `mu` is exact and not only a bound."""
        return False

    @property
    def proved_pair(self) -> tuple[float, float] | None:
        """The (epsilon, delta) that was proved by other means, where that is all that is known of the release."""
        return None

    @property
    def only_renyi(self) -> bool:
        """Whether Renyi divergences alone bound the release: it has no dominating pair."""
        return False

    @property
    def spends_delta(self) -> bool:
        """Whether its dominating pair uses up a share of delta (`pairs`)."""
        return False

    @property
    def messages(self) -> int:
        """How many noised messages one release is made of, where the sum of their noise cannot be drawn at once."""
        return 1

    def clt_mu_squared(self, relation: Relation) -> float | None:
        """mu^2 of one of many rounds, by the central limit theorem (Bu, Dong, Long, Su 2020): a guess, no bound."""
        size = min(self.mu(relation), self.pure(relation))
        return size**2 if size < 1e150 else None


Entries = Sequence[tuple[Event, int]]


@dataclass(frozen=True)
class GaussianNoise(Event, kind="gaussian"):
    """x + N(0, noise multiplier^2 I), ||x||_2 moves by 1."""

    noise_multiplier: float

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """N(mu, 1) against N(0, 1)."""
        return (Orders.symmetric(pairs.Gauss(self.mu(relation))),)

    def mu(self, relation: Relation) -> float:
        """Sensitivity over noise, exactly."""
        return _ratio(sensitivity(relation), self.noise_multiplier)

    @property
    def is_gaussian(self) -> bool:
        return True

    def renyi(self, relation: Relation) -> Array | None:
        return renyi.gaussian(self.mu(relation))


@dataclass(frozen=True)
class LaplaceNoise(Event, kind="laplace"):
    """x + Laplace(noise_multiplier) per coordinate, ||x||_1 moves by 1; the scalar case is tight for any split."""

    noise_multiplier: float

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """The scalar case, moved by the whole L1 sensitivity."""
        return (Orders.symmetric(pairs.Exponential(self.pure(relation))),)

    def pure(self, relation: Relation) -> float:
        """Sensitivity over scale."""
        return _ratio(sensitivity(relation), self.noise_multiplier)

    def renyi(self, relation: Relation) -> Array | None:
        return renyi.laplace(self.pure(relation))


@dataclass(frozen=True)
class PoissonSampled(Event, kind="poisson_sampled"):
    """`event` of a cohort in which each unit is present with probability `rate`, sampling unseen.

    Any event can be sampled that states one dominating pair for both orders of neighbours, the pair being its own
    mirror image: (P, Q) ~ (Q, P). Guarantee: `pairs.poisson_sampled` dominates where a unit is added, removed or
    zeroed out. Where it is replaced, three releases meet (without it, with either value), and only Gaussian noise is
    accounted.
    """

    rate: float
    event: Event

    @property
    def inclusion(self) -> float:
        return self.rate

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """(1-q) Q + q P against Q in both orders; against (1-q) Q + q P', P and P' opposite, if replaced."""
        if relation != "replace_one":
            return tuple(pairs.poisson_sampled(self.rate, pair) for pair in _mirror_pairs(self.event, relation, share))
        gaussian = self.event.is_gaussian
        return (Orders.symmetric(pairs.Swapped(self.rate, self.event.mu("add_remove"))),) if gaussian else ()

    def mu(self, relation: Relation) -> float:
        """That of being there for sure (joint convexity)."""
        return self.event.mu(relation)

    def renyi(self, relation: Relation) -> Array | None:
        """Of Gaussian noise, where the unit is removed."""
        known = self.event.is_gaussian and relation != "replace_one"
        return renyi.poisson_gaussian(self.rate, self.event.mu(relation)) if known else None

    def clt_mu_squared(self, relation: Relation) -> float | None:
        """q^2 (exp(mu^2) - 1) of the inner one."""
        return _sampled_guess(self.rate, self.event, relation)

    def pure(self, relation: Relation) -> float:
        """log(1 + q (exp(loss) - 1)), where the unit is removed."""
        return math.inf if relation == "replace_one" else _sampled_loss(self.rate, self.event.pure(relation))


@dataclass(frozen=True)
class CappedPoisson(Event, kind="capped_poisson"):
    """Poisson sampling of which at most `cap` units are kept (a uniform subset), Gaussian noise."""

    rate: float
    population: int
    cap: int
    event: Event

    @property
    def inclusion(self) -> float:
        return self.rate

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """With room for us our coin adds us; without, we take a random other's place (pairs.capped)."""
        if not self.event.is_gaussian:
            return ()
        mu = self.event.mu("add_remove")
        replaced, removed = relation == "replace_one", relation == "add_remove"
        return (pairs.capped(self.rate, self.population, self.cap, mu, replaced=replaced, removed=removed),)

    def clt_mu_squared(self, relation: Relation) -> float | None:
        return _sampled_guess(self.rate, self.event, relation)

    def mu(self, relation: Relation) -> float:
        """A replacement at worst: a sensitivity of 2."""
        return self.event.mu("replace_one") if self.event.is_gaussian else math.inf


@dataclass(frozen=True)
class FixedSampled(Event, kind="fixed_sampled"):
    """`event` of a uniformly random cohort of exactly `cohort` out of `population`, cohort unseen."""

    population: int
    cohort: int
    event: Event

    @property
    def inclusion(self) -> float:
        return self.cohort / self.population

    @property
    def spends_delta(self) -> bool:
        return self.event.spends_delta

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """The amplified curve and its mirror image (`pairs.Mirrored`), where a unit is replaced.

        A cohort with our unit, and one without it that has another in its place, differ by a replacement too: one pair
        that dominates replacements in both orders dominates all that the theorem asks for.
        """
        if relation != "replace_one":
            return ()
        found = _mirror_pairs(self.event, relation, share)
        return tuple(Orders.symmetric(pairs.Mirrored(self.inclusion, pair)) for pair in found)

    def clt_mu_squared(self, relation: Relation) -> float | None:
        """q^2 (exp(mu^2) - 1) of the inner one."""
        return _sampled_guess(self.inclusion, self.event, relation)

    def mu(self, relation: Relation) -> float:
        """That of being there for sure, replaced."""
        return self.event.mu(relation) if relation == "replace_one" else math.inf

    def pure(self, relation: Relation) -> float:
        """log(1 + q (exp(loss) - 1)), where the unit is replaced."""
        return _sampled_loss(self.inclusion, self.event.pure(relation)) if relation == "replace_one" else math.inf

    def renyi(self, relation: Relation) -> Array | None:
        """Those of its pair, for Gaussian noise."""
        known = self.event.is_gaussian and relation == "replace_one"
        return renyi.fixed_size_gaussian(self.inclusion, self.event.mu(relation)) if known else None


@dataclass(frozen=True)
class PubliclySampled(Event, kind="publicly_sampled"):
    """`event` of a round that the unit is in with probability `rate`; who is in it is seen, and depends on no data.

        delta(e) = rate delta_event(e) + (1 - rate) (1 - exp(e))_+

    Guarantee: averaged over the coins. A mixture by a seen coin is dominated by the mixture of pairs, and composes like
    any pair: T of them are sum_k Bin(T, rate)(k) delta_k(e), delta_k that of k rounds. A cost states it for neighbours
    with the same cohorts alone: a client is zeroed out or replaced there, never added or removed.
    """

    rate: float
    event: Event

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ConfigError(f"a publicly sampled event with rate {brief_repr(self.rate)}", "a rate between 0 and 1")

    @property
    def protects(self) -> bool:
        return self.event.protects

    @property
    def spends_delta(self) -> bool:
        return self.event.spends_delta

    @property
    def seen_sampling(self) -> tuple[float, Event]:
        return self.rate, self.event

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """Those of the inner event where the coin takes the unit, else equal laws."""
        q = self.rate
        return tuple(
            Orders(pairs.PublicCoin(q, each.removed), pairs.PublicCoin(q, each.added))
            for each in self.event.pairs(relation, share)
        )

    def mu(self, relation: Relation) -> float:
        return self.event.mu(relation)

    def pure(self, relation: Relation) -> float:
        return self.event.pure(relation)

    def renyi(self, relation: Relation) -> Array | None:
        """The mixture of moments."""
        one = self.event.renyi(relation)
        return None if one is None else renyi.by_public_coin(self.rate, one)

    def clt_mu_squared(self, relation: Relation) -> float | None:
        """The mean over the coins."""
        inner = self.event.clt_mu_squared(relation)
        return None if inner is None else self.rate * inner


@dataclass(frozen=True)
class Shuffled(Event, kind="shuffled"):
    """`reports` messages, each privatised by `event`, seen only as a shuffled bag."""

    reports: int
    event: Event

    @property
    def spends_delta(self) -> bool:
        return True

    @property
    def messages(self) -> int:
        return self.reports

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """Each message in the clear (shuffling is a post-processing), or the clones of several (epsilon0, delta0)."""
        if relation != "replace_one" or not self.event.protects:
            return ()
        found = [
            shuffle.clones(reports=self.reports, epsilon0=own, delta0=lost)
            for own, lost in self._local(relation, share)
            if own <= _MOST_LOCAL
        ]
        return (*self.event.pairs(relation), *(Orders.symmetric(pair) for pair in found))

    def _local(self, relation: Relation, share: float) -> list[tuple[float, float]]:
        """One message's own (epsilon0, delta0): a Gaussian has one for every delta0."""
        if self.event.proved_pair is not None:
            return [self.event.proved_pair]
        if self.event.is_gaussian and share > 0:
            mu, lost = self.event.mu(relation), share / (2 * self.reports)
            return [(gaussian_epsilon(mu, lost * part), lost * part) for part in (0.03, 1e-3)]
        return [(self.event.pure(relation), 0.0)]

    def mu(self, relation: Relation) -> float:
        return self.event.mu(relation) if relation == "replace_one" else math.inf

    def pure(self, relation: Relation) -> float:
        return self.event.pure(relation) if relation == "replace_one" else math.inf


@dataclass(frozen=True)
class Approximate(Event, kind="approximate"):
    """Anything proved (epsilon, delta)-private by other means."""

    epsilon: float
    delta: float = 0.0

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        """Randomised response, or all is seen."""
        return (Orders.symmetric(pairs.Response(self.epsilon, self.delta)),)

    @property
    def proved_pair(self) -> tuple[float, float] | None:
        return self.epsilon, self.delta

    def pure(self, relation: Relation) -> float:
        """epsilon, unless something may be lost."""
        return self.epsilon if self.delta == 0 else math.inf


@dataclass(frozen=True)
class Tuned(Event, kind="tuned"):
    """`count` times `event` is one trial; of a random number of them (`trials`) nothing but the best is shown.

    It has a Renyi bound only, and only of what has one itself. A table that is looked at is not this, but composition.
    """

    event: Event
    count: int
    trials: Trials

    def __post_init__(self) -> None:
        if self.count < 1 or self.event.only_renyi:
            raise ConfigError(f"a trial of {self.count} times {self.event.kind!r}", "at least one event, tuned once")

    @property
    def protects(self) -> bool:
        return self.event.protects

    @property
    def only_renyi(self) -> bool:
        return True

    def renyi(self, relation: Relation) -> Array | None:
        """Papernot, Steinke 2022, of one trial."""
        one = self.event.renyi(relation)
        return None if one is None else self.trials.divergences(self.count * one)


@dataclass(frozen=True)
class Unprotected(Event, kind="unprotected"):
    """A release with no guarantee: epsilon is infinite."""

    @property
    def protects(self) -> bool:
        return False

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        return (Orders.symmetric(pairs.Response(0.0, 1.0)),)


def _mirror_pairs(event: Event, relation: Relation, share: float) -> tuple[pairs.Pair, ...]:
    """The pairs of an event that sampling may mix: stated for both orders of neighbours, and their own mirror images.

    The proofs need no more than that a pair dominates both orders. That it is its own mirror image is asked besides:
    what is not was most likely proved for one order alone, and would be amplified in the other without a proof.
    """
    found = event.pairs(relation, share) if event.protects else ()
    return tuple(one.removed for one in found if one.removed == one.added and pairs.is_own_mirror(one.removed))


def _sampled_loss(rate: float, loss: float) -> float:
    """log(1 + q (exp(loss) - 1)): the most that a mixture with weight q can lose, in either order."""
    return math.log1p(rate * math.expm1(loss)) if loss < 700 else loss


def _sampled_guess(rate: float, event: Event, relation: Relation) -> float | None:
    inner = event.clt_mu_squared(relation)
    return None if inner is None else rate**2 * math.expm1(min(inner, 100.0))


def no_bound(event: Event, relation: Relation) -> PlanError:
    """The refusal of an event that has no bound under a relation, in one sentence."""
    found = f"no accountant for {event} when neighbours {relation}"
    needed = "an event with a proved bound; one that is sampled needs a pair that is its own mirror image"
    return PlanError("accounting", found, needed)


def has_bound(event: Event, relation: Relation) -> bool:
    """Whether the event states what it can tell apart when neighbours differ by `relation`; what does not, cannot."""
    if event.only_renyi:
        return not event.protects or event.renyi(relation) is not None
    return bool(event.pairs(relation))
