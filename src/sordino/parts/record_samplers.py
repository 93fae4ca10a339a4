"""Record samplers: which of a silo's records a round reads, and the amplified event of one record.

`SamplingLaw` is how samplers of records and of clients state for `sordino audit` how they draw.

The sampling stays inside the silo, so it amplifies even against one who reads every message. `sizes` are public: one
number of records per silo, or one number for all. The batch is a constant of the plan, never the number that happened
to come.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.events import Event, FixedSampled, PoissonSampled, Relation
from sordino.codec import Part
from sordino.codec.boundary import array, number, of_type, returns
from sordino.errors import PlanError, brief_repr
from sordino.parts.mechanisms import Floats
from sordino.parts.schedules import CLIENTS, positive
from sordino.rng import Seeded

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class SamplingLaw:
    """How units (clients, or the records of a silo) are drawn.

    inclusion           P[a unit is drawn in round t]: a number for all, or a function t -> [population]
    size                exactly so many are drawn in every round; None: their number varies
    cap                 never more than so many
    size_sf             (t, k) -> P[more than k are drawn in round t], where the number varies; None: not stated
    independent         within a round units are drawn independently, or negatively associated (without replacement);
                        False: any dependence within a round, as of whole groups
    secret              every round's draw is independent of the others and foreseen by nobody; False: it is public, and
                        the cost rests on the next two alone
    max_participations  rounds -> the most of them that one unit is in
    min_separation      any two rounds of one unit are at least so many rounds apart
    """

    population: int
    inclusion: float | Callable[[int], Floats] = 1.0
    size: int | None = None
    cap: int | None = None
    size_sf: Callable[[int, int], float] | None = None
    independent: bool = True
    secret: bool = True
    max_participations: Callable[[int], int] | None = None
    min_separation: int | None = None

    def inclusions(self, t: int) -> Floats:
        """P[drawn in round t] of every unit."""
        found = self.inclusion(t) if callable(self.inclusion) else self.inclusion
        return np.broadcast_to(np.asarray(found, dtype=np.float64), (self.population,))


def independent_coins(population: int, rate: float, cap: int | None = None) -> SamplingLaw:
    """Poisson sampling: each unit by its own coin; of more than `cap` a uniform subset of that many stays."""
    from scipy.special import bdtrc

    if cap is not None and cap >= population:
        cap = None

    def size_sf(t: int, k: int) -> float:
        most = population if cap is None else cap
        return 0.0 if k >= most else float(bdtrc(k, population, rate))

    mean = population * rate if cap is None else math.fsum(size_sf(0, k) for k in range(cap))  # E min(B, cap)
    return SamplingLaw(population, mean / population, cap=cap, size_sf=size_sf)


class RecordSampler(Part):
    """A sampler of records: draws the batch of one silo for each step."""

    sizes: tuple[int, ...]
    relation: ClassVar[Relation] = "replace_one"
    disjoint: ClassVar[bool] = False  # True: the batches of an epoch have no record in common
    fixed: ClassVar[bool] = True  # True: every batch has exactly `count` records

    @property
    @abstractmethod
    @returns(lambda found, *_: number(found, 0.0, above=True))
    def count(self) -> float:
        """Records in a batch, on average: what a sum is divided by."""

    @abstractmethod
    @returns(lambda found, part, t, silo, size, rng: array(found, (None,), "i", 0, size))
    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> Rows:
        """Positions among the silo's `size` records."""

    @returns(of_type(Event))
    def amplify(self, event: Event, silo: int) -> Event:
        """The event for one record of a silo, to one who does not see which were read."""
        return event

    def law(self, silo: int) -> SamplingLaw | None:
        """How a silo's records are drawn, step by step, for `sordino audit` to compare draws with; None: not stated."""
        return None

    def public_law(self, silo: int, size: int) -> SamplingLaw:
        """Of batches of `size` that nobody needs to keep secret: the cost rests on `most` and `apart` alone."""
        most = partial(self.max_participations, silo=silo)
        return SamplingLaw(
            self.size(silo), size=size, secret=False, max_participations=most, min_separation=self.min_separation(silo)
        )

    def size(self, silo: int) -> int:
        """How many records a silo has declared."""
        return self.sizes[silo] if len(self.sizes) > 1 else self.sizes[0]

    def epoch(self, step: int, silo: int) -> int:
        """Steps of the same epoch read disjoint records; unless a sampler says more, each step is its own."""
        return step

    def max_participations(self, steps: int, silo: int) -> int:
        """In how many of the first `steps` steps one record is read, at most."""
        return self.epoch(steps - 1, silo) + 1 if steps > 0 else 0

    def min_separation(self, silo: int) -> int | None:
        """Any two steps that read one record are at least so many steps from each other; None: nothing is promised."""
        return None

    def block(self, step: int, silo: int) -> tuple[int, int, int] | None:
        """All that a step reads: positions start to stop of public order o, as (o, start, stop); None: nobody says."""
        return None

    def max_repeated_reads(self, steps: int, silo: int) -> int:
        """In how many of any `steps` steps in a row one record is read, at most: what running them again costs."""
        return steps

    def max_rounds(self) -> int | None:
        """The most rounds that can be run; None: any number."""
        return None

    def shrunk(self, sizes: tuple[int, ...], share: float, rounds: int) -> RecordSampler | None:
        """The same sampling for smaller silos of `sizes`, this share of its own, and so many rounds."""
        return None

    def for_silos(self, silos: int) -> RecordSampler:
        """The same sampler for the first silos only."""
        return replace(self, sizes=self.sizes[:silos]) if len(self.sizes) > 1 else self  # type: ignore[type-var]

    def check(self, population: int) -> None:
        """Refuse a list of sizes that does not fit the silos."""
        if len(self.sizes) not in (1, population):
            found = f"{len(self.sizes)} sizes for {population} silos"
            raise PlanError("records", found, "one size per silo, or one for all", "set sizes in records")


def _check(sizes: tuple[int, ...], batch: float) -> None:
    if not sizes or min(sizes) < 1 or max(sizes) > CLIENTS:
        needed = f"at least one record in each silo, and at most {CLIENTS:,}"
        raise PlanError("records", f"sizes {brief_repr(list(sizes))}", needed)
    if not (positive(batch) and batch <= min(sizes)):
        found = f"a batch of {batch:g} where the smallest silo has {min(sizes)} records"
        raise PlanError("records", found, "a batch above 0, and no larger than the smallest silo", "lower batch")


@dataclass(frozen=True)
class AllRecords(RecordSampler, kind="all_records"):
    """Every record, every round: no amplification; neighbours replace one record (sensitivity 2).

    A silo weighs as many records as it holds: the mean is that of the pooled data.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check(self.sizes, 1)

    @property
    def count(self) -> float:
        return float(np.mean(self.sizes))

    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> Rows:
        return np.arange(size, dtype=np.int64)

    def law(self, silo: int) -> SamplingLaw:
        return self.public_law(silo, self.size(silo))

    def shrunk(self, sizes: tuple[int, ...], share: float, rounds: int) -> RecordSampler:
        return AllRecords(sizes)

    def min_separation(self, silo: int) -> int | None:
        return 1


class _Batches(RecordSampler):
    """Batches of `batch` records, in number or on average: a constant of the plan."""

    batch: float

    def __post_init__(self) -> None:
        _check(self.sizes, self.batch)

    @property
    def count(self) -> float:
        return float(self.batch)


@dataclass(frozen=True)
class PoissonRecords(_Batches, kind="poisson_records"):
    """Each record independently with probability batch / size of its silo.

    Guarantee: add or remove one record (sensitivity 1), amplified by PLD of the subsampled mechanism.
    """

    batch: float
    sizes: tuple[int, ...]
    relation: ClassVar[Relation] = "add_remove"
    fixed: ClassVar[bool] = False

    def rate(self, silo: int) -> float:
        """The coin of one record."""
        return self.batch / self.size(silo)

    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> Rows:
        return rng.choice(size, int(rng.binomial(size, self.rate(silo))), replace=False, shuffle=False).astype(np.int64)

    def law(self, silo: int) -> SamplingLaw:
        return independent_coins(self.size(silo), self.rate(silo))

    def amplify(self, event: Event, silo: int) -> Event:
        return PoissonSampled(self.rate(silo), event)

    def shrunk(self, sizes: tuple[int, ...], share: float, rounds: int) -> RecordSampler:
        return PoissonRecords(min(self.batch * share, min(sizes)), sizes)


@dataclass(frozen=True)
class FixedRecords(_Batches, kind="fixed_records"):
    """A uniformly random batch of exactly `batch` of a silo's records, without replacement.

    Guarantee: replace one record (sensitivity 2), amplified by Balle, Barthe, Gaboardi 2018, Theorem 9.
    """

    batch: int
    sizes: tuple[int, ...]

    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> Rows:
        return rng.choice(size, self.batch, replace=False, shuffle=False).astype(np.int64)

    def law(self, silo: int) -> SamplingLaw:
        return SamplingLaw(self.size(silo), self.batch / self.size(silo), size=self.batch)

    def amplify(self, event: Event, silo: int) -> Event:
        return event if self.batch == self.size(silo) else FixedSampled(self.size(silo), self.batch, event)

    def shrunk(self, sizes: tuple[int, ...], share: float, rounds: int) -> RecordSampler:
        return FixedRecords(max(1, min(round(self.batch * share), min(sizes))), sizes)


def subsets(sizes: Sequence[Rows], batch: int, rngs: Sequence[np.random.Generator]) -> Rows:
    """For each size a uniformly random set of `batch` numbers below it: [sum of m, batch], each group by its own coins.

    Floyd's algorithm, all at once: step j draws a number up to size - batch + j and takes it, or, if it was taken
    before, size - batch + j itself. A number below n is n times one of 2^53 equidistant points of [0, 1), rounded down.
    """
    highest = np.concatenate(sizes)[:, None] - batch + np.arange(batch)
    groups = np.split(highest, np.cumsum([len(own) for own in sizes])[:-1])
    drawn = [(rng.random(own.shape) * (own + 1)).astype(np.int64) for own, rng in zip(groups, rngs, strict=True)]
    picks = np.ascontiguousarray(np.concatenate(drawn).T)  # [batch, m]: a step is one row
    for j in range(1, batch):
        taken = np.flatnonzero((picks[:j] == picks[j]).any(axis=0))
        picks[j, taken] = highest[taken, j]
    return picks.T


@dataclass(frozen=True)
class OnePass(_Batches, kind="one_pass"):
    """Round t reads the t-th block of a public permutation: disjoint batches, so each record is in one release.

    Guarantee: replace one record (sensitivity 2), parallel composition: the whole run costs one release. The
    permutation is public and always the same, so a run that is resumed, or a round that is run again, reads the same
    block.
    """

    batch: int
    sizes: tuple[int, ...]
    disjoint: ClassVar[bool] = True

    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> Rows:
        return _order(silo, size)[t * self.batch : (t + 1) * self.batch]

    def law(self, silo: int) -> SamplingLaw:
        return self.public_law(silo, self.batch)

    def epoch(self, step: int, silo: int) -> int:
        return 0

    def min_separation(self, silo: int) -> int | None:
        return self.size(silo) // self.batch  # at most one step: any distance is true

    def block(self, step: int, silo: int) -> tuple[int, int, int] | None:
        return 0, step * self.batch, (step + 1) * self.batch

    def max_repeated_reads(self, steps: int, silo: int) -> int:
        return 1

    def max_rounds(self) -> int | None:
        return min(self.sizes) // self.batch

    def shrunk(self, sizes: tuple[int, ...], share: float, rounds: int) -> RecordSampler:
        return OnePass(max(1, min(sizes) // rounds), sizes)


class _Epochs(_Batches):
    """A public order of a silo's records, cut into size // batch batches; a rest sits the epoch out."""

    batch: int
    disjoint: ClassVar[bool] = True

    @abstractmethod
    def order(self, epoch: int) -> int:
        """Which of the public orders an epoch is read in."""

    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> Rows:
        first = t % (size // self.batch) * self.batch
        return _order(silo, size, self.order(t // (size // self.batch)))[first : first + self.batch]

    def law(self, silo: int) -> SamplingLaw:
        return self.public_law(silo, self.batch)

    def epoch(self, step: int, silo: int) -> int:
        return step // (self.size(silo) // self.batch)

    def block(self, step: int, silo: int) -> tuple[int, int, int] | None:
        first = step % (self.size(silo) // self.batch) * self.batch
        return self.order(self.epoch(step, silo)), first, first + self.batch


@dataclass(frozen=True)
class ShuffledRecords(_Epochs, kind="shuffled_records"):
    """Epoch e is a public permutation of a silo's records, cut into size // batch batches; a rest sits the epoch out.

    What an ordinary shuffled loader does. Guarantee: replace one record (sensitivity 2); a record is in one release per
    epoch, so T rounds cost ceil(T / (size // batch)) of them; nothing is amplified, so the coins need not be secret.
    """

    batch: int
    sizes: tuple[int, ...]

    def order(self, epoch: int) -> int:
        return 1 + epoch

    def min_separation(self, silo: int) -> int | None:
        return 1  # the last of one epoch may be the first of the next

    def max_repeated_reads(self, steps: int, silo: int) -> int:
        return min(steps, 1 + -(-(steps - 1) // (self.size(silo) // self.batch)))


@dataclass(frozen=True)
class RecordsInTurn(_Epochs, kind="records_in_turn"):
    """One public permutation of a silo's records, cut into size // batch batches that come in turn, epoch after epoch.

    A loader that was shuffled once; a rest is never read. Guarantee: replace one record (sensitivity 2); its reads are
    exactly size // batch steps apart, which correlated noise uses; nothing is amplified, so the order is no secret.
    """

    batch: int
    sizes: tuple[int, ...]

    def order(self, epoch: int) -> int:
        return 0

    def min_separation(self, silo: int) -> int | None:
        return self.size(silo) // self.batch

    def max_repeated_reads(self, steps: int, silo: int) -> int:
        return -(-steps // (self.size(silo) // self.batch))

    def shrunk(self, sizes: tuple[int, ...], share: float, rounds: int) -> RecordSampler:
        return RecordsInTurn(max(1, min(round(self.batch * share), min(sizes))), sizes)


@lru_cache(maxsize=64)
def _order(silo: int, size: int, epoch: int = 0) -> Rows:
    """A public permutation of a silo's records: in every run the same."""
    return Seeded(0).at(epoch, "one pass", silo).permutation(size).astype(np.int64)


def batches(sampler: RecordSampler, t: int, silo: int, size: int, rng: np.random.Generator, steps: int) -> Rows:
    """`steps` batches of one silo in one round: [steps, b], padded with -1."""
    if isinstance(sampler, FixedRecords) and sampler.batch == 1:
        return rng.integers(size, size=(steps, 1))
    drawn = list(_drawn(sampler, t * steps, silo, size, rng, steps))
    table = np.full((steps, max(max(len(rows) for rows in drawn), 1)), -1, dtype=np.int64)
    for row, rows in zip(table, drawn, strict=True):
        row[: len(rows)] = rows
    return table


def _drawn(s: RecordSampler, first: int, silo: int, size: int, rng: np.random.Generator, steps: int) -> Iterator[Rows]:
    for step in range(first, first + steps):
        yield s.draw(step, silo, size, rng)
