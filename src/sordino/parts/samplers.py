"""Client samplers: the part `Plan.clients`, which draws the clients of each round and states their amplification.

Amplification holds only against an adversary who does not see the cohort; `Plan.cost` uses `amplify` for that adversary
alone. `relation` is the neighbouring relation that the amplified event is proved for. `SeparationGuard`, called by the
loop, enforces the minimum separation between two rounds of a client that the cost of correlated noise assumes.
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
from sordino.accounting import allocation, events
from sordino.accounting.composition import binomial_most, binomial_within
from sordino.accounting.events import Event, Relation
from sordino.codec import Part
from sordino.codec.boundary import array, number, of_type, returns
from sordino.errors import PlanError, brief_repr
from sordino.parts.record_samplers import PassKey, SamplingLaw, pass_key, poisson_law
from sordino.parts.schedules import CLIENTS, require, require_values, share
from sordino.rng import Seeded, Streams, secure_generator

Cohort = NDArray[np.int64]
NO_RANDOMNESS = Seeded(0).at(0, "none")  # the generator passed to a public sampler, which draws nothing from it
_LOG = logging.getLogger("sordino")
MOST_KEPT = 1024  # kept bins: the price of a run looks at all pairs of bins


def _check_cohort(found: object, population: int) -> str:
    wrong = array(found, (None,), "i", 0, population)
    return wrong or ("" if bool(np.all(np.diff(np.asarray(found)) > 0)) else "distinct clients, ascending")


class Sampler(Part):
    """Base class of client samplers, which draw the cohort of each round from a public population."""

    population: int
    relation: ClassVar[Relation]
    random: ClassVar[bool] = True  # False: the cohorts are public before the run
    amplifies: ClassVar[bool] = False  # True: `amplify` is proved against an adversary who does not see the cohort
    pass_rounds: int = 1  # consecutive rounds whose cohorts one draw decides: `draw` gets the same random bits in each
    keeps_bins: ClassVar[bool] = False  # True: one secret bin a client for the whole run (`Release.kept_bins_event`)

    @property
    @abstractmethod
    @returns(lambda found, *_: number(found, 0.0, above=True))
    def expected(self) -> float:
        """Mean cohort size, which is the public denominator of a round's mean."""

    @abstractmethod
    @returns(lambda found, part, *_: _check_cohort(found, part.population))
    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        """Return the cohort of round t as distinct client numbers, ascending."""

    @abstractmethod
    @returns(of_type(Event))
    def amplify(self, event: Event) -> Event:
        """Return the privacy event of one round for an adversary who does not see the cohort."""

    @abstractmethod
    @returns(lambda found, *_: number(found, 0))
    def max_participations(self, rounds: int) -> int:
        """Return the most rounds that one client is in; random cohorts exceed it with a probability of at most 1e-6."""

    @property
    def size(self) -> int | None:
        """Cohort size if it is the same in every round and public; else None."""
        return None

    @property
    def min_separation(self) -> int | None:
        """Least distance in rounds between two participations of one client; None if no distance is guaranteed."""
        return None

    @property
    def periodic(self) -> bool:
        """Whether the distance between any two rounds of one client is a multiple of `min_separation`."""
        return False

    def law(self) -> SamplingLaw | None:
        """Return the distribution of cohorts, which `sordino audit` compares draws with; None if it is not stated.

        For public cohorts (`random` False) it states the maximum participation and the minimum separation alone.
        """
        if self.random:
            return None
        most, apart = self.max_participations, self.min_separation
        return SamplingLaw(self.population, size=self.size, secret=False, max_participations=most, min_separation=apart)

    def amplified_rounds(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        """Return an upper bound on the number of rounds, out of all `rounds`, in which one client may be sampled.

        `repeated` lists the rounds that were run again, once per repetition; they count too.
        """
        return rounds + len(repeated)

    def participations_with_repeats(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        """Return `max_participations` including rounds run again, which have the same clients if cohorts are public."""
        if self.random or not repeated:
            return self.max_participations(rounds) + len(repeated)
        again = np.concatenate([self.draw(t, NO_RANDOMNESS) for t in repeated])
        return int((self.participations(rounds) + np.bincount(again, minlength=self.population)).max())

    @property
    def inclusion_rate(self) -> float | None:
        """Probability that a client is in a round which may sample it; None if it is not stated.

        It is stated only if rounds are sampled independently of each other and of the data: the number of a client's
        rounds is then binomial, with `amplified_rounds` trials.
        """
        return None

    def publicly_sampled(self, event: Event) -> Event:
        """Return the event of one round for an adversary who will see the cohort, as priced before it is drawn."""
        rate = self.inclusion_rate
        if isinstance(event, events.Unprotected) or rate is None or rate >= 1:
            return event
        return events.PubliclySampled(rate, event)

    def with_cohort(self, cohort: int) -> Sampler:
        """Return the same sampler with another expected cohort size."""
        needed = "a sampler whose cohort size can be set"
        raise PlanError("calibration", f"sampler {self.kind!r}", needed, "use poisson or fixed")

    def participations(self, rounds: int) -> NDArray[np.float64]:
        """Return each client's number of rounds [population]: the exact one if cohorts are public, else the mean."""
        each = self.expected / self.population * rounds if self.random else float(self.max_participations(rounds))
        return np.full(self.population, each)

    def participation_cdf(self, allowed: Cohort, rounds: int) -> NDArray[np.float64]:
        """Return the probability that a client is in at most k of `rounds` rounds, for each k in `allowed`.

        It is 1 where the distribution is unknown."""
        return np.ones(len(allowed))

    def shrunk(self, share: float) -> Sampler:
        """Return a sampler with the same rates for about this share of the population, which `sordino audit` runs."""
        return self

    def worst_populations(self) -> tuple[Sampler, ...]:
        """Return samplers of small populations, at the same cost, in which one client is easiest to detect."""
        return (self,)

    def for_one_client(self) -> Sampler:
        """Return a sampler with the fewest clients under which client 0 takes part with the same distribution."""
        return self


_COUNT = f"at least 1, and at most {CLIENTS:,}"


def _check_cohort_size(population: int, cohort: int) -> None:
    require_values(1 <= population <= CLIENTS, "sampling", _COUNT, population=population)
    found = f"a cohort of {cohort} out of {population}"
    require(1 <= cohort <= population, "sampling", found, "1 <= cohort <= population", "change cohort")


def _scaled_count(count: int, share: float) -> int:
    return max(1, round(count * share))


class _RandomCohorts(Sampler):
    amplifies: ClassVar[bool] = True

    @property
    def _rate(self) -> float:
        """An upper bound on the probability that a client is in a round."""
        raise NotImplementedError

    def max_participations(self, rounds: int) -> int:
        return self.participations_with_repeats(rounds)

    def participations_with_repeats(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        return binomial_most(self.population, self.amplified_rounds(rounds, repeated), self._rate)

    def participation_cdf(self, allowed: Cohort, rounds: int) -> NDArray[np.float64]:
        return binomial_within(allowed, self.amplified_rounds(rounds), self._rate)


class _PublicCohorts(Sampler):
    cohort: int
    relation: ClassVar[Relation] = "zero_out"
    random: ClassVar[bool] = False

    @property
    def expected(self) -> float:
        return float(self.cohort)

    @property
    def size(self) -> int | None:
        return int(self.expected)

    def amplify(self, event: Event) -> Event:
        return event


@dataclass(frozen=True)
class Everyone(_PublicCohorts, kind="everyone"):
    """Full participation: all clients are in every round, without amplification; neighbours replace one client."""

    population: int
    relation: ClassVar[Relation] = "replace_one"

    def __post_init__(self) -> None:
        require_values(1 <= self.population <= CLIENTS, "sampling", _COUNT, population=self.population)

    @property
    def expected(self) -> float:
        return float(self.population)

    @property
    def min_separation(self) -> int | None:
        return 1

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        return np.arange(self.population, dtype=np.int64)

    def max_participations(self, rounds: int) -> int:
        return rounds

    def shrunk(self, share: float) -> Sampler:
        return Everyone(_scaled_count(self.population, share))


@dataclass(frozen=True)
class Poisson(_RandomCohorts, kind="poisson"):
    """Poisson sampling of clients: each independently with probability `rate`; at most `cap` of them if a cap is set.

    Guarantee: add/remove one client, amplified by PLD of the subsampled mechanism (Zhu & Wang 2019; truncated form
    for a cap). The denominator is rate * population, never the realised cohort.
    """

    population: int
    rate: float
    cap: int | None = None
    relation: ClassVar[Relation] = "add_remove"

    def __post_init__(self) -> None:
        require_values(1 <= self.population <= CLIENTS, "sampling", _COUNT, population=self.population)
        fix = "set rate = expected cohort / population"
        require_values(share(self.rate), "sampling", "a rate in (0, 1]", fix, rate=self.rate)
        if self.cap is not None:
            require_values(1 <= self.cap <= CLIENTS, "sampling", _COUNT, cap=self.cap)

    @property
    def _rate(self) -> float:
        return self.rate

    @property
    def expected(self) -> float:
        return self.rate * self.population

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        size = int(rng.binomial(self.population, self.rate))
        size = size if self.cap is None else min(size, self.cap)
        return np.sort(rng.choice(self.population, size, replace=False).astype(np.int64))

    def law(self) -> SamplingLaw:
        return poisson_law(self.population, self.rate, self.cap)

    def amplify(self, event: Event) -> Event:
        if self.cap is not None and self.cap < self.population:
            return events.CappedPoisson(self.rate, self.population, self.cap, event)
        return events.PoissonSampled(self.rate, event)

    @property
    def inclusion_rate(self) -> float | None:
        """Probability that a client is in a round: `rate` q; with a cap E[min(B, cap)] / N for B ~ Bin(N, q)."""
        if self.cap is None or self.cap >= self.population:
            return self.rate
        from scipy.special import bdtr, bdtrc

        n, q, cap = self.population, self.rate, self.cap
        included = cap / n * float(bdtrc(cap, n, q)) + q * (float(bdtr(cap - 1, n - 1, q)) if n > 1 else 0.0)
        return min(q, included * (1 + 1e-9))  # rounded up

    def with_cohort(self, cohort: int) -> Sampler:
        return replace(self, rate=cohort / self.population)

    def participation_cdf(self, allowed: Cohort, rounds: int) -> NDArray[np.float64]:
        # With a cap the inclusion probability is below `rate`, so the binomial distribution does not apply
        return np.ones(len(allowed)) if self.cap is not None else super().participation_cdf(allowed, rounds)

    def shrunk(self, share: float) -> Sampler:
        cap = None if self.cap is None else _scaled_count(self.cap, share)
        return Poisson(_scaled_count(self.population, share), self.rate, cap)

    def worst_populations(self) -> tuple[Sampler, ...]:
        # With 2 clients the cohort size reveals most; with 50 a denominator that depends on the data is detected
        if self.cap is not None:
            return (self,)
        return tuple(Poisson(few, self.rate) for few in sorted({min(self.population, few) for few in (2, 50)}))


@dataclass(frozen=True)
class FixedSize(_RandomCohorts, kind="fixed"):
    """Sampling without replacement: a uniformly random cohort of exactly `cohort` clients.

    Guarantee: replace one client (sensitivity 2), amplified by Balle, Barthe, Gaboardi 2018, Theorem 9.
    """

    population: int
    cohort: int
    relation: ClassVar[Relation] = "replace_one"

    def __post_init__(self) -> None:
        _check_cohort_size(self.population, self.cohort)

    @property
    def _rate(self) -> float:
        return self.cohort / self.population

    @property
    def size(self) -> int | None:
        return self.cohort

    @property
    def expected(self) -> float:
        return float(self.cohort)

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        return np.sort(rng.choice(self.population, self.cohort, replace=False).astype(np.int64))

    def law(self) -> SamplingLaw:
        return SamplingLaw(self.population, self._rate, size=self.cohort)

    def amplify(self, event: Event) -> Event:
        return events.FixedSampled(self.population, self.cohort, event)

    @property
    def inclusion_rate(self) -> float | None:
        return self._rate

    def with_cohort(self, cohort: int) -> Sampler:
        return replace(self, cohort=cohort)

    def shrunk(self, share: float) -> Sampler:
        return FixedSize(_scaled_count(self.population, share), _scaled_count(self.cohort, share))

    def worst_populations(self) -> tuple[Sampler, ...]:
        shared = math.gcd(self.population, self.cohort)
        return (FixedSize(self.population // shared, self.cohort // shared),)


@dataclass(frozen=True)
class RoundRobin(_PublicCohorts, kind="roundrobin"):
    """Round robin: `cohort` clients take part at a time, in a public order, without amplification.

    The order is 0, 1, 2, ..., or another public order that is fixed before the run: `order` names every client once,
    `seed` shuffles the clients. If clients are sorted (silos by target), shuffle them.
    Guarantee: zero out one client; each client is charged for its own rounds, whatever the order.
    """

    population: int
    cohort: int
    seed: int | None = None
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_cohort_size(self.population, self.cohort)
        if self.seed is not None and self.order is not None:
            fix = "drop seed or order"
            raise PlanError("sampling", f"seed = {self.seed} and an order", "either a seed or an order", fix)
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            found, needed = f"seed = {brief_repr(self.seed)}", "a whole number of at most 64 bits"
            raise PlanError("sampling", found, needed, "choose a smaller seed")
        if self.order is not None and sorted(self.order) != list(range(self.population)):
            found = f"an order of length {len(self.order)} that is no permutation of the {self.population} clients"
            needed = f"each number from 0 to {self.population - 1} once"
            raise PlanError("sampling", found, needed, "complete the order, or set a seed instead")

    def _clients_at(self, places: Cohort) -> Cohort:
        if self.order is not None:
            return np.asarray(self.order, dtype=np.int64)[places]
        return places if self.seed is None else _public_order(self.population, self.seed)[places]

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        places = np.arange(t * self.cohort, (t + 1) * self.cohort, dtype=np.int64) % self.population
        return np.sort(self._clients_at(places))

    def max_participations(self, rounds: int) -> int:
        return -(-rounds * self.cohort // self.population)

    @property
    def min_separation(self) -> int | None:
        return self.population // self.cohort

    @property
    def periodic(self) -> bool:
        return self.population % self.cohort == 0

    def shrunk(self, share: float) -> Sampler:
        return RoundRobin(_scaled_count(self.population, share), _scaled_count(self.cohort, share), self.seed)

    def participations(self, rounds: int) -> NDArray[np.float64]:
        taken = rounds * self.expected - np.arange(self.population)  # in turn, from the first
        found = np.empty(self.population)
        found[self._clients_at(np.arange(self.population))] = np.maximum(np.ceil(taken / self.population), 0.0)
        return found


@lru_cache(maxsize=4)
def _public_order(population: int, seed: int) -> Cohort:
    return Seeded(seed).at(0, "turns").permutation(population).astype(np.int64)


@dataclass(frozen=True)
class MinSeparation(_PublicCohorts, kind="min_separation"):
    """Random public cohorts with a minimum separation: a client is drawn again after at least `rest` rounds.

    Correlated noise needs this separation. Guarantee: zero out one client, without amplification.
    """

    population: int
    cohort: int
    rest: int
    seed: int = 0

    def __post_init__(self) -> None:
        require_values(1 <= self.population <= CLIENTS, "sampling", _COUNT, population=self.population)
        require_values(1 <= self.rest <= CLIENTS, "sampling", _COUNT, rest=self.rest)
        found = f"cohorts of {self.cohort} that rest {self.rest} rounds, out of {self.population}"
        fits = 1 <= self.cohort * self.rest <= self.population
        require(fits, "sampling", found, "cohort * rest <= population", "lower rest or cohort")

    @property
    def min_separation(self) -> int | None:
        return self.rest

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        return self._cohorts(t)[t]

    def max_participations(self, rounds: int) -> int:
        return int(self.participations(rounds).max())

    def participations(self, rounds: int) -> NDArray[np.float64]:
        drawn = np.concatenate(self._cohorts(rounds - 1)[:rounds])
        return np.bincount(drawn, minlength=self.population).astype(np.float64)

    def _cohorts(self, last: int) -> list[Cohort]:
        ready, drawn = _cohort_cache(self)  # a cohort depends on all earlier ones
        while len(drawn) <= last:
            free = np.flatnonzero(ready <= len(drawn))
            rng = Seeded(self.seed).at(len(drawn), "rested")
            chosen = np.sort(rng.choice(free, self.cohort, replace=False).astype(np.int64))
            ready[chosen] = len(drawn) + self.rest
            drawn.append(chosen)
        return drawn


@lru_cache(maxsize=8)
def _cohort_cache(sampler: MinSeparation) -> tuple[Cohort, list[Cohort]]:
    """Return each client's next allowed round, and the cohorts drawn so far; `MinSeparation` extends both in place."""
    return np.zeros(sampler.population, dtype=np.int64), []


@dataclass(frozen=True)
class CyclicPoisson(_RandomCohorts, kind="cyclic_poisson"):
    """Cyclic Poisson sampling (BandMF): `groups` of clients take turns, and each client of a group is drawn at `rate`.

    Client i is in group i mod `groups`. Guarantee: add/remove one client; its rounds are at least `groups` apart, so T
    rounds cost ceil(T / groups) amplified releases, also under correlated noise of at most `groups` bands
    (Choquette-Choo 2023).
    """

    population: int
    groups: int
    rate: float
    relation: ClassVar[Relation] = "add_remove"

    def __post_init__(self) -> None:
        require_values(1 <= self.population <= CLIENTS, "sampling", _COUNT, population=self.population)
        found = f"{self.groups} groups of {self.population} clients"
        needed = "a number of groups from 1 to the population"
        require(1 <= self.groups <= self.population, "sampling", found, needed, "lower groups")
        fix = "set rate = groups * cohort / population"
        require_values(share(self.rate), "sampling", "a rate in (0, 1]", fix, rate=self.rate)

    @property
    def _rate(self) -> float:
        return self.rate

    @property
    def expected(self) -> float:
        return self.rate * self.population / self.groups

    @property
    def min_separation(self) -> int | None:
        return self.groups

    def amplified_rounds(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        """Return the number of rounds, repeated ones included, of the group that has the most rounds."""
        planned = (rounds + self.groups - 1 - np.arange(self.groups)) // self.groups
        again = np.bincount(np.asarray(repeated, dtype=np.int64) % self.groups, minlength=self.groups)
        return int((planned + again).max())

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        group = np.arange(t % self.groups, self.population, self.groups, dtype=np.int64)
        return group[rng.random(len(group)) < self.rate]

    def law(self) -> SamplingLaw:
        group = np.arange(self.population) % self.groups

        def inclusion(t: int) -> NDArray[np.float64]:
            return np.where(group == t % self.groups, self.rate, 0.0)

        def size_sf(t: int, k: int) -> float:
            from scipy.special import bdtrc

            most = int((group == t % self.groups).sum())
            return 0.0 if k >= most else float(bdtrc(k, most, self.rate))

        return SamplingLaw(self.population, inclusion, size_sf=size_sf, min_separation=self.groups)

    def amplify(self, event: Event) -> Event:
        return events.PoissonSampled(self.rate, event)

    @property
    def inclusion_rate(self) -> float | None:
        return self.rate

    def with_cohort(self, cohort: int) -> Sampler:
        return replace(self, rate=cohort * self.groups / self.population)

    def for_one_client(self) -> Sampler:
        return replace(self, population=self.groups)


@dataclass(frozen=True)
class RandomAllocation(_RandomCohorts, kind="random_allocation"):
    """Random allocation: in every pass of `bins` rounds each client takes part in exactly one secret random round.

    The round is drawn uniformly for each client, independently of other clients, and anew for every pass. So every
    client takes part once a pass, as with a shuffled order, and cohorts have population / bins clients on average.

    Guarantee: add/remove or zero out one client, at the cost of `events.Allocated` for each pass that was begun
    (docs/privacy.md, "Random allocation"). The allocation must stay secret, so this sampler is refused where a release
    or an engine shows cohorts. The denominator is population / bins. For k rounds out of t set bins = t / k.
    """

    population: int
    bins: int
    relation: ClassVar[Relation] = "add_remove"

    def __post_init__(self) -> None:
        require_values(1 <= self.population <= CLIENTS, "sampling", _COUNT, population=self.population)
        fits, needed = 2 <= self.bins <= allocation.MOST_BINS, f"at least 2, and at most {allocation.MOST_BINS:,}"
        fix = "set bins to the number of rounds in which every client takes part once"
        require_values(fits, "sampling", needed, fix, bins=self.bins)

    @property
    def pass_rounds(self) -> int:  # type: ignore[override]
        return self.bins

    @property
    def expected(self) -> float:
        return self.population / self.bins

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        """Return the clients allocated to round t; `rng` must begin with the same bits in all rounds of a pass."""
        return np.flatnonzero(rng.integers(0, self.bins, self.population) == t % self.bins).astype(np.int64)

    def law(self) -> SamplingLaw:
        return replace(poisson_law(self.population, 1 / self.bins), pass_rounds=self.bins)

    def amplify(self, event: Event) -> Event:
        """Return the privacy event of one pass of `bins` rounds; `amplified_rounds` counts passes."""
        return events.Allocated(self.bins, event)

    def amplified_rounds(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        """Return the number of passes; each round that was run again counts as another pass."""
        return -(-rounds // self.bins) + len(repeated)

    def max_participations(self, rounds: int) -> int:
        return self.amplified_rounds(rounds)

    def participations_with_repeats(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        return self.amplified_rounds(rounds, repeated)

    def participation_cdf(self, allowed: Cohort, rounds: int) -> NDArray[np.float64]:
        return np.asarray(allowed >= self.amplified_rounds(rounds), dtype=np.float64)

    def shrunk(self, share: float) -> Sampler:
        return replace(self, population=_scaled_count(self.population, share))

    def worst_populations(self) -> tuple[Sampler, ...]:
        return tuple(replace(self, population=few) for few in sorted({min(self.population, few) for few in (2, 50)}))

    def for_one_client(self) -> Sampler:
        return replace(self, population=1)


@dataclass(frozen=True)
class KeptBins(_RandomCohorts, kind="kept_bins"):
    """Kept bins: each client has one secret bin of `bins`, drawn once; round t has the clients of bin t mod `bins`.

    Bins are drawn uniformly and independently, and kept for the whole run: a client's rounds are exactly `bins` apart,
    so noise may be correlated with any number of bands.

    Guarantee: add/remove or zero out one client, at the price of `events.KeptBins` for the run (docs/privacy.md, "Kept
    bins"). It needs the bins to stay secret; who sees one cohort knows them for all passes. A round repeated after a
    kill has the same clients, and costs one more release without amplification.
    """

    population: int
    bins: int
    relation: ClassVar[Relation] = "add_remove"
    keeps_bins: ClassVar[bool] = True
    pass_rounds: ClassVar[int] = 1 << 40  # type: ignore[misc]  # longer than any run: one draw decides all rounds

    def __post_init__(self) -> None:
        require_values(1 <= self.population <= CLIENTS, "sampling", _COUNT, population=self.population)
        found, needed = f"bins = {brief_repr(self.bins)}", f"at least 2, and at most {MOST_KEPT:,}"
        require(2 <= self.bins <= MOST_KEPT, "sampling", found, needed, "bins = rounds of a pass")

    @property
    def expected(self) -> float:
        return self.population / self.bins

    @property
    def min_separation(self) -> int | None:
        return self.bins

    @property
    def periodic(self) -> bool:
        return True

    def draw(self, t: int, rng: np.random.Generator) -> Cohort:
        """Return the clients whose bin is t mod `bins`; `rng` starts equally in all rounds."""
        return np.flatnonzero(rng.integers(0, self.bins, self.population) == t % self.bins).astype(np.int64)

    def law(self) -> SamplingLaw:
        """Return participation and separation alone: that bins are uniform and secret is not examined."""
        most, apart = self.max_participations, self.min_separation
        return SamplingLaw(self.population, secret=False, max_participations=most, min_separation=apart)

    def amplify(self, event: Event) -> Event:
        """Return the event itself: a single round is not amplified, the run is."""
        return event

    def amplified_rounds(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        return -(-rounds // self.bins) + len(repeated)

    def max_participations(self, rounds: int) -> int:
        return self.amplified_rounds(rounds)

    def participations_with_repeats(self, rounds: int, repeated: Sequence[int] = ()) -> int:
        return self.amplified_rounds(rounds, repeated)

    def participation_cdf(self, allowed: Cohort, rounds: int) -> NDArray[np.float64]:
        return np.asarray(allowed >= self.amplified_rounds(rounds), dtype=np.float64)

    def shrunk(self, share: float) -> Sampler:
        return replace(self, population=_scaled_count(self.population, share))

    def for_one_client(self) -> Sampler:
        return replace(self, population=1)


def draw_seeded(clients: Sampler, streams: Streams, t: int) -> Cohort:
    """Return the cohort of round t in a simulation, drawn from the stream of the first round of its pass."""
    return clients.draw(t, streams.at(t - t % clients.pass_rounds, "cohort"))


@codec.hides_values
@dataclass
class PassDraws:
    """Cohorts of a sampler that draws once for a pass of several rounds (`Sampler.pass_rounds`).

    In a simulation every round opens the stream of the pass's first round again. For release the pass has a secret
    128-bit key, which the checkpoint stores until the pass ends. If the run was killed in a round that was already
    charged, an empty key replaces it and the rest of the pass is drawn anew: `amplified_rounds` counts another pass.
    """

    clients: Sampler
    streams: Streams
    key: PassKey = None

    def draw(self, t: int) -> Cohort:
        if self.streams.mode == "simulation":
            return draw_seeded(self.clients, self.streams, t)
        self.key = pass_key(self.key, self.streams, t, self.clients.pass_rounds, self.clients.kind)
        assert self.key
        return self.clients.draw(t, secure_generator(sum(part << 62 * k for k, part in enumerate(self.key)) % 2**128))

    def key_after(self, t: int) -> PassKey:
        """Return the secret key of the current pass, for the checkpoint after round t; None if the pass has ended."""
        return None if (t + 1) % self.clients.pass_rounds == 0 else self.key


@codec.hides_values
@dataclass(frozen=True)
class SeparationGuard:
    """Guard of the minimum separation, which leaves out clients that are drawn too early or too often."""

    clients: Sampler
    max_participations: int  # rounds that one client is charged for
    last: NDArray[np.int64]  # each client's last round
    count: NDArray[np.int64]  # each client's number of rounds

    def admit(self, t: int, cohort: Cohort) -> Cohort:
        """Return the clients of a cohort that may take part in round t, and record that they do."""
        if self.clients.keeps_bins:  # a client's rounds are those of its bin, also after a resumption
            may = np.ones(len(cohort), dtype=np.bool_)
        elif isinstance(self.clients, CyclicPoisson):
            may = np.asarray(cohort % self.clients.groups == t % self.clients.groups)
        else:
            may = t - self.last[cohort] >= (self.clients.min_separation or 1)
            may = may if self.clients.random else may & (self.count[cohort] < self.max_participations)
        admitted: Cohort = cohort[may]
        self.last[admitted] = t
        self.count[admitted] += 1
        if len(admitted) < len(cohort):
            _LOG.warning("round %d: %d clients were drawn too early: left out", t + 1, len(cohort) - len(admitted))
        return admitted


def separation_guard(clients: Sampler, rounds: int, streams: Streams, t: int) -> SeparationGuard:
    """Return the guard of a run with correlated noise in its state before round t.

    Public cohorts of earlier rounds are computed again; with secret cohorts every client counts as drawn in round t-1.
    """
    began = t - 1 if t and clients.random else -rounds - (clients.min_separation or 1)
    last, count = np.full(clients.population, began, dtype=np.int64), np.zeros(clients.population, dtype=np.int64)
    guard = SeparationGuard(clients, clients.max_participations(rounds), last, count)
    for before in range(0 if clients.random else t):
        guard.admit(before, clients.draw(before, streams.at(before, "cohort")))
    return guard
