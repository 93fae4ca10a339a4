"""Samplers with a minimum separation between two rounds of a client, and the guard that enforces it in a run.

The cost of correlated noise rests on that separation. A client that is drawn too early, or more often than it is
charged for, is left out of the cohort before anything of it is computed (`SeparationGuard`; the loop calls it).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sordino import codec
from sordino.accounting.composition import binomial_most, binomial_within
from sordino.accounting.events import Event, PoissonSampled, Relation
from sordino.errors import PlanError, brief_repr
from sordino.parts.record_samplers import SamplingLaw
from sordino.parts.release_base import Release
from sordino.parts.samplers import Cohort, Sampler, check_count
from sordino.parts.schedules import share
from sordino.rng import Seeded, Streams


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
