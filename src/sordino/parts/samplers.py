"""Client samplers: which clients take part in a round, and the amplified event where that is not seen.

Amplification holds only against an adversary who does not see the cohort; `Plan.cost` uses `amplify` for that one only.
`relation` is the change of the data that the amplified event is proved for.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sordino import codec
from sordino.accounting.events import (
    CappedPoisson,
    Event,
    FixedSampled,
    PoissonSampled,
    PubliclySampled,
    Relation,
    Unprotected,
)
from sordino.accounting.trials import binomial_most, binomial_within
from sordino.codec import Part
from sordino.codec.boundary import array, number, of_type, returns
from sordino.errors import PlanError, brief_repr
from sordino.parts.record_samplers import SamplingLaw, independent_coins
from sordino.parts.releases import Release
from sordino.parts.schedules import CLIENTS, share
from sordino.rng import Seeded, Streams

Cohort = NDArray[np.int64]
NO_COINS = Seeded(0).at(0, "none")  # for a public sampler, which draws none


def cohort(found: object, population: int) -> str:
    """Distinct clients, ascending."""
    wrong = array(found, (None,), "i", 0, population)
    return wrong or ("" if bool(np.all(np.diff(np.asarray(found)) > 0)) else "distinct clients, ascending")


class Sampler(Part):
    """A sampler of clients: draws the cohort of each round from a public population."""

    population: int
    relation: ClassVar[Relation]
    random: ClassVar[bool] = True  # False: who takes part is public before the run
    amplifies: ClassVar[bool] = False  # True: `amplify` is proved against one who sees neither coins nor cohort

    @property
    @abstractmethod
    @returns(lambda found, *_: number(found, 0.0, above=True))
    def expected(self) -> float:
        """Mean cohort size: the public denominator."""

    @abstractmethod
    @returns(lambda found, part, *_: cohort(found, part.population))
    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        """The cohort of round t: distinct clients, ascending."""

    @abstractmethod
    @returns(of_type(Event))
    def amplify(self, event: Event) -> Event:
        """The event as seen by one who does not see the coins."""

    @property
    def size(self) -> int | None:
        """The cohort's size, where it is the same in every round and known before."""
        return None

    @property
    def min_separation(self) -> int | None:
        """Any two rounds of one client are at least so many rounds from each other; None: nothing is promised."""
        return None

    @property
    def periodic(self) -> bool:
        """Whether any two rounds of one client are a multiple of `apart` from each other."""
        return False

    def law(self) -> SamplingLaw | None:
        """How clients are drawn, for `sordino audit` to compare draws with; None: not stated.

        Of a public sampler (`random` False) `most` and `apart` say all that its cost rests on.
        """
        return None if self.random else self.public_law(self.size)

    def public_law(self, size: int | None) -> SamplingLaw:
        """Of public cohorts, of `size` clients where that is said."""
        return SamplingLaw(
            self.population,
            size=size,
            secret=False,
            max_participations=self.max_participations,
            min_separation=self.min_separation,
        )

    def amplified_rounds(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        """In how many of rounds 0 to `rounds` - 1, and of those that were `repeated`, the coins may take one client.

        `repeated` names the rounds, once for each time that they were run again. Guarantee: never fewer than the truth.
        """
        return rounds + len(repeated)

    def participations_with_repeats(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        """The same as `most`, with rounds that were `repeated`: the same clients again where cohorts are public."""
        if self.random or not repeated:
            return self.max_participations(rounds) + len(repeated)
        again = np.concatenate([self.draw(t, NO_COINS) for t in repeated])
        return int((self.participations(rounds) + np.bincount(again, minlength=self.population)).max())

    @property
    def inclusion_rate(self) -> float | None:
        """The probability that one client is in a round that can take it; None: not stated.

        By coins of every round's own, which depend on no data: then a client is in Bin(amplified rounds, rate) of them.
        """
        return None

    def publicly_sampled(self, event: Event) -> Event:
        """The event of a round that can take a client, to one who sees the coins and has not seen them yet."""
        rate = self.inclusion_rate
        if isinstance(event, Unprotected) or rate is None or rate >= 1:
            return event
        return PubliclySampled(rate, event)

    def with_cohort(self, cohort: int) -> Sampler:
        """The same sampler with another expected cohort."""
        raise PlanError("calibration", f"sampler {self.kind!r}", "poisson or fixed, whose cohort can be chosen")

    @abstractmethod
    @returns(lambda found, *_: number(found, 0))
    def max_participations(self, rounds: int) -> int:
        """The most rounds that any one client is in (random cohorts: but for probability 1e-6)."""

    def participations(self, rounds: int) -> NDArray[np.float64]:
        """In how many rounds every client is: on average, or exactly where cohorts are public."""
        if self.random:
            return np.full(self.population, self.expected / self.population * rounds)
        # unless a sampler says more, all come equally often
        return np.full(self.population, float(self.max_participations(rounds)))

    def participation_cdf(self, allowed: Cohort, rounds: int) -> NDArray[np.float64]:
        """The probability that a client is in at most so many of the rounds, for each number; 1 where nobody knows."""
        return np.ones(len(allowed))

    def shrunk(self, share: float) -> Sampler:
        """The same rates over about this share of the population, for `sordino audit`; itself if it cannot shrink."""
        return self

    def worst_populations(self) -> tuple[Sampler, ...]:
        """Samplers with the same amplification over the populations that hide one client least; for `sordino audit`."""
        return (self,)

    def for_one_client(self) -> Sampler:
        """A sampler of as few clients as possible that draws client 0 in the same rounds at the same rate."""
        return self


def check_count(name: str, value: int) -> None:
    """Refuse a number of clients that means nothing."""
    if not 1 <= value <= CLIENTS:
        needed = f"at least 1, and at most {CLIENTS:,}"
        raise PlanError("sampling", f"{name} = {brief_repr(value)}", needed, f"set {name} to the number of clients")


@dataclass(frozen=True)
class Everyone(Sampler, kind="everyone"):
    """All clients, every round: no amplification; neighbours replace one client's data."""

    population: int
    relation: ClassVar[Relation] = "replace_one"
    random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("population", self.population)

    @property
    def expected(self) -> float:
        return float(self.population)

    def law(self) -> SamplingLaw:
        return self.public_law(self.population)

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        return np.arange(self.population, dtype=np.int64)

    def amplify(self, event: Event) -> Event:
        return event

    def max_participations(self, rounds: int) -> int:
        return rounds

    def shrunk(self, share: float) -> Sampler:
        return Everyone(_fewer(self.population, share))

    @property
    def min_separation(self) -> int | None:
        return 1


@dataclass(frozen=True)
class Poisson(Sampler, kind="poisson"):
    """Each client independently with probability `rate`; at most `cap` of them if a cap is set.

    Guarantee: add/remove one client, amplified by PLD of the subsampled mechanism (Zhu & Wang 2019; truncated form
    for a cap). The denominator is rate * population, never the realised cohort.
    """

    population: int
    rate: float
    cap: int | None = None
    relation: ClassVar[Relation] = "add_remove"
    amplifies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("population", self.population)
        if not share(self.rate):
            fix = "rate = expected cohort / population"
            raise PlanError("sampling", f"rate {brief_repr(self.rate)}", "a rate in (0, 1]", fix)
        if self.cap is not None:
            check_count("cap", self.cap)

    @property
    def expected(self) -> float:
        return self.rate * self.population

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        size = int(rng.binomial(self.population, self.rate))
        size = size if self.cap is None else min(size, self.cap)
        return np.sort(rng.choice(self.population, size, replace=False).astype(np.int64))

    def law(self) -> SamplingLaw:
        return independent_coins(self.population, self.rate, self.cap)

    def amplify(self, event: Event) -> Event:
        if self.cap is not None and self.cap < self.population:
            return CappedPoisson(self.rate, self.population, self.cap, event)
        return PoissonSampled(self.rate, event)

    @property
    def inclusion_rate(self) -> float | None:
        """q; with a cap E[min(B, cap)] / N, B ~ Bin(N, q), rounded up."""
        if self.cap is None or self.cap >= self.population:
            return self.rate
        from scipy.special import bdtr, bdtrc

        n, q, cap = self.population, self.rate, self.cap
        kept = cap / n * float(bdtrc(cap, n, q)) + q * (float(bdtr(cap - 1, n - 1, q)) if n > 1 else 0.0)
        return min(q, kept * (1 + 1e-9))

    def with_cohort(self, cohort: int) -> Sampler:
        return replace(self, rate=cohort / self.population)

    def max_participations(self, rounds: int) -> int:
        return binomial_most(self.population, rounds, self.rate)

    def participations_with_repeats(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        return self.max_participations(rounds + len(repeated))  # every round has coins of its own

    def participation_cdf(self, allowed: Cohort, rounds: int) -> NDArray[np.float64]:
        if self.cap is not None:
            return np.ones(len(allowed))  # a cap makes the rate smaller than it is written
        return binomial_within(allowed, rounds, self.rate)

    def shrunk(self, share: float) -> Sampler:
        cap = None if self.cap is None else _fewer(self.cap, share)
        return Poisson(_fewer(self.population, share), self.rate, cap)

    def worst_populations(self) -> tuple[Sampler, ...]:
        """Of two clients the cohort's size tells most; of fifty, a denominator that follows the cohort."""
        if self.cap is not None:
            return (self,)
        return tuple(Poisson(few, self.rate) for few in sorted({min(self.population, few) for few in (2, 50)}))


@dataclass(frozen=True)
class FixedSize(Sampler, kind="fixed"):
    """A uniformly random cohort of exactly `cohort` clients, without replacement.

    Guarantee: replace one client (sensitivity 2), amplified by Balle, Barthe, Gaboardi 2018, Theorem 9.
    """

    population: int
    cohort: int
    relation: ClassVar[Relation] = "replace_one"
    amplifies: ClassVar[bool] = True

    @property
    def size(self) -> int | None:
        return self.cohort

    def __post_init__(self) -> None:
        check_count("population", self.population)
        if not 1 <= self.cohort <= self.population:
            found = f"a cohort of {self.cohort} out of {self.population}"
            raise PlanError("sampling", found, "1 <= cohort <= population")

    @property
    def expected(self) -> float:
        return float(self.cohort)

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        return np.sort(rng.choice(self.population, self.cohort, replace=False).astype(np.int64))

    def law(self) -> SamplingLaw:
        return SamplingLaw(self.population, self.cohort / self.population, size=self.cohort)

    def amplify(self, event: Event) -> Event:
        return FixedSampled(self.population, self.cohort, event)

    @property
    def inclusion_rate(self) -> float | None:
        return self.cohort / self.population

    def with_cohort(self, cohort: int) -> Sampler:
        return replace(self, cohort=cohort)

    def max_participations(self, rounds: int) -> int:
        return binomial_most(self.population, rounds, self.cohort / self.population)

    def participations_with_repeats(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        return self.max_participations(rounds + len(repeated))  # every round has coins of its own

    def participation_cdf(self, allowed: Cohort, rounds: int) -> NDArray[np.float64]:
        return binomial_within(allowed, rounds, self.cohort / self.population)

    def shrunk(self, share: float) -> Sampler:
        return FixedSize(_fewer(self.population, share), _fewer(self.cohort, share))

    def worst_populations(self) -> tuple[Sampler, ...]:
        shared = math.gcd(self.population, self.cohort)
        return (FixedSize(self.population // shared, self.cohort // shared),)


@dataclass(frozen=True)
class RoundRobin(Sampler, kind="roundrobin"):
    """Clients in turn, `cohort` at a time: public, so no amplification; each is charged for its own rounds.

    They come in the order 0, 1, 2, ..., or in another one that is public too and fixed before the run: `order` names
    every client once, `seed` shuffles them. Where clients are sorted (silos by target), a shuffled order lets every
    round see all kinds. Guarantee: who is in which round depends on no data, so the cost is the same for any order.
    """

    population: int
    cohort: int
    seed: int | None = None
    order: tuple[int, ...] | None = None
    relation: ClassVar[Relation] = "zero_out"
    random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("population", self.population)
        if not 1 <= self.cohort <= self.population:
            needed = "1 <= cohort <= population"
            raise PlanError("sampling", f"a cohort of {self.cohort} out of {self.population}", needed)
        if self.seed is not None and self.order is not None:
            raise PlanError("sampling", f"seed = {self.seed} and an order", "one of them", "drop one")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise PlanError("sampling", f"seed = {brief_repr(self.seed)}", "a whole number of at most 64 bits")
        if self.order is not None and sorted(self.order) != list(range(self.population)):
            found = f"an order of {len(self.order)} that is no permutation of {self.population} clients"
            raise PlanError("sampling", found, f"each of 0 to {self.population - 1} once")

    @property
    def expected(self) -> float:
        return float(self.cohort)

    def law(self) -> SamplingLaw:
        return self.public_law(self.cohort)

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        places = np.arange(t * self.cohort, (t + 1) * self.cohort, dtype=np.int64) % self.population
        turns = self._turns()
        return np.sort(places if turns is None else turns[places])

    def _turns(self) -> Cohort | None:
        """Who comes first, second, ...; None where that is 0, 1, ..."""
        if self.order is not None:
            return np.asarray(self.order, dtype=np.int64)
        return None if self.seed is None else _shuffled(self.population, self.seed)

    def amplify(self, event: Event) -> Event:
        return event

    def max_participations(self, rounds: int) -> int:
        return -(-rounds * self.cohort // self.population)

    @property
    def min_separation(self) -> int | None:
        return self.population // self.cohort

    @property
    def periodic(self) -> bool:
        return self.population % self.cohort == 0

    def shrunk(self, share: float) -> Sampler:
        return RoundRobin(_fewer(self.population, share), _fewer(self.cohort, share), self.seed)

    def participations(self, rounds: int) -> NDArray[np.float64]:
        taken = rounds * self.expected - np.arange(self.population)  # in turn, from the first
        counts, turns = np.maximum(np.ceil(taken / self.population), 0.0), self._turns()
        if turns is None:
            return counts
        found = np.empty_like(counts)
        found[turns] = counts
        return found


def _fewer(count: int, share: float) -> int:
    return max(1, round(count * share))


@lru_cache(maxsize=4)
def _shuffled(population: int, seed: int) -> Cohort:
    """A public order of all clients."""
    return Seeded(seed).at(0, "turns").permutation(population).astype(np.int64)


@dataclass(frozen=True)
class MinSeparation(Sampler, kind="min_separation"):
    """A random cohort of those who have rested: a client comes again after at least `rest` rounds, by public coins.

    For deployments in which devices check in: whoever is drawn rests, so correlated noise knows how far apart a
    client's rounds are. Guarantee: who is in which round depends on no data; nothing is amplified.
    """

    population: int
    cohort: int
    rest: int
    seed: int = 0
    relation: ClassVar[Relation] = "zero_out"
    random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("population", self.population)
        check_count("rest", self.rest)
        if not 1 <= self.cohort * self.rest <= self.population:
            found = f"cohorts of {self.cohort} that rest {self.rest} rounds, out of {self.population}"
            raise PlanError("sampling", found, "cohort * rest <= population", "a shorter rest, or smaller cohorts")

    @property
    def expected(self) -> float:
        return float(self.cohort)

    @property
    def size(self) -> int | None:
        return self.cohort

    @property
    def min_separation(self) -> int | None:
        return self.rest

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        return _rested(self)[t]

    def amplify(self, event: Event) -> Event:
        return event

    def max_participations(self, rounds: int) -> int:
        return int(self.participations(rounds).max())

    def participations(self, rounds: int) -> NDArray[np.float64]:
        met = [_rested(self)[t] for t in range(rounds)]
        return np.bincount(np.concatenate(met), minlength=self.population).astype(np.float64)


class _Rested:
    """The cohorts of a `MinSeparation`, drawn in turn and kept: round t needs those before it."""

    def __init__(self, sampler: MinSeparation) -> None:
        self.sampler, self.coins = sampler, Seeded(sampler.seed)
        self.ready = np.zeros(sampler.population, dtype=np.int64)  # the first round that a client may come to
        self.drawn: list[Cohort] = []

    def __getitem__(self, t: int) -> Cohort:
        while len(self.drawn) <= t:
            now = len(self.drawn)
            free = np.flatnonzero(self.ready <= now)
            rng = self.coins.at(now, "rested")
            chosen = np.sort(rng.choice(free, self.sampler.cohort, replace=False).astype(np.int64))
            self.ready[chosen] = now + self.sampler.rest
            self.drawn.append(chosen)
        return self.drawn[t]


@lru_cache(maxsize=8)
def _rested(sampler: MinSeparation) -> _Rested:
    return _Rested(sampler)


@dataclass(frozen=True)
class CyclicPoisson(Sampler, kind="cyclic_poisson"):
    """`groups` of clients in turn, each client of the round's group with probability `rate`: BandMF's sampling.

    Client i is in group i mod `groups`. Guarantee: add/remove one client; its rounds are `groups` apart, so T rounds
    are ceil(T / groups) amplified ones, also under correlated noise of at most `groups` bands (Choquette-Choo 2023).
    """

    population: int
    groups: int
    rate: float
    relation: ClassVar[Relation] = "add_remove"
    amplifies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("population", self.population)
        if not 1 <= self.groups <= self.population:
            raise PlanError("sampling", f"{self.groups} groups of {self.population} clients", "1 to population groups")
        if not share(self.rate):
            found = f"rate {brief_repr(self.rate)}"
            raise PlanError("sampling", found, "a rate in (0, 1]", "groups * cohort / population")

    @property
    def expected(self) -> float:
        return self.rate * self.population / self.groups

    @property
    def min_separation(self) -> int | None:
        return self.groups

    def amplified_rounds(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        """Of the group with most rounds: round t, whenever it is run, takes from group t mod `groups`."""
        planned = (rounds + self.groups - 1 - np.arange(self.groups)) // self.groups
        again = np.bincount(np.asarray(repeated, dtype=np.int64) % self.groups, minlength=self.groups)
        return int((planned + again).max())

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        group = np.arange(t % self.groups, self.population, self.groups, dtype=np.int64)
        return group[rng.random(len(group)) < self.rate]

    def law(self) -> SamplingLaw:
        group = np.arange(self.population) % self.groups

        def size_sf(t: int, k: int) -> float:
            from scipy.special import bdtrc

            most = int((group == t % self.groups).sum())
            return 0.0 if k >= most else float(bdtrc(k, most, self.rate))

        return SamplingLaw(
            self.population,
            lambda t: np.where(group == t % self.groups, self.rate, 0.0),
            size_sf=size_sf,
            min_separation=self.groups,
        )

    def amplify(self, event: Event) -> Event:
        return PoissonSampled(self.rate, event)

    @property
    def inclusion_rate(self) -> float | None:
        return self.rate

    def with_cohort(self, cohort: int) -> Sampler:
        return replace(self, rate=cohort * self.groups / self.population)

    def max_participations(self, rounds: int) -> int:
        return self.participations_with_repeats(rounds)

    def participations_with_repeats(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        return binomial_most(self.population, self.amplified_rounds(rounds, repeated), self.rate)

    def participation_cdf(self, allowed: Cohort, rounds: int) -> NDArray[np.float64]:
        return binomial_within(allowed, self.amplified_rounds(rounds), self.rate)

    def for_one_client(self) -> Sampler:
        return replace(self, population=self.groups)


_LOG = logging.getLogger("sordino")


@codec.hides_values
@dataclass(frozen=True)
class SeparationGuard:
    """The last round of every client and how many it had; `max_participations` is what it is charged for."""

    clients: Sampler
    max_participations: int
    last: NDArray[np.int64]
    count: NDArray[np.int64]

    def admit(self, t: int, cohort: Cohort) -> Cohort:
        """Those of a cohort who may come to round t; they rest from now on."""
        if isinstance(self.clients, CyclicPoisson):
            may = np.asarray(cohort % self.clients.groups == t % self.clients.groups)
        else:
            may = t - self.last[cohort] >= (self.clients.min_separation or 1)
            may = may if self.clients.random else may & (self.count[cohort] < self.max_participations)
        kept: Cohort = cohort[may]
        self.last[kept] = t
        self.count[kept] += 1
        if len(kept) < len(cohort):
            _LOG.warning("round %d: %d clients came too early and are left out", t + 1, len(cohort) - len(kept))
        return kept


def separation_guard(
    clients: Sampler, release: Release, rounds: int, streams: Streams, t: int
) -> SeparationGuard | None:
    """Where a run stands before round t: public cohorts are drawn again; where coins were secret, everybody rests."""
    if not release.correlated:
        return None
    began = t - 1 if t and clients.random else -rounds - (clients.min_separation or 1)
    last, count = np.full(clients.population, began, dtype=np.int64), np.zeros(clients.population, dtype=np.int64)
    guard = SeparationGuard(clients, clients.max_participations(rounds), last, count)
    for before in range(0 if clients.random else t):
        guard.admit(before, clients.draw(before, streams.at(before, "cohort")))
    return guard
