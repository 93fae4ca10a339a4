"""Record samplers, which draw the records that a silo reads in each step and state the amplification by sampling.

The sampling stays inside the silo, so it amplifies even against an adversary who reads every message. `sizes` are
public: one number of records per silo, or one number for all. The mean divides by the plan's batch size, never by the
realised number of records. `SamplingLaw` is the distribution of draws that `sordino audit` tests.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sordino import codec
from sordino.accounting import allocation
from sordino.accounting.events import Allocated, Event, FixedSampled, PoissonSampled, Relation
from sordino.codec import Part
from sordino.codec.boundary import array, number, of_type, returns
from sordino.errors import PlanError, brief_repr
from sordino.parts.mechanisms import Floats
from sordino.parts.schedules import CLIENTS, positive, require
from sordino.rng import Mode, Seeded, Streams, secure_generator

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class SamplingLaw:
    """Probability distribution by which units (clients, or the records of a silo) are drawn.

    inclusion           P[a unit is drawn in round t]: a number for all, or a function t -> [population]
    size                number of units drawn in every round; None: the number varies
    cap                 largest number of units drawn in a round
    size_sf             (t, k) -> P[more than k units are drawn in round t], where the number varies; None: not stated
    independent         within a round units are drawn independently, or negatively associated (without replacement);
                        False: any dependence within a round, such as whole groups
    secret              each round is drawn independently of the others and unpredictably; False: the draw is public,
                        and the cost depends on the next two fields alone
    max_participations  rounds -> the most of these rounds that one unit is in
    min_separation      least distance in rounds between two rounds of one unit
    pass_rounds         above 1: each unit is in exactly one of so many consecutive rounds, which are drawn together
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
    pass_rounds: int = 1

    def inclusions(self, t: int) -> Floats:
        """Return P[drawn in round t] of every unit: [population]."""
        found = self.inclusion(t) if callable(self.inclusion) else self.inclusion
        return np.broadcast_to(np.asarray(found, dtype=np.float64), (self.population,))


def poisson_law(population: int, rate: float, cap: int | None = None) -> SamplingLaw:
    """Return the distribution of Poisson sampling; if more than `cap` units are drawn, `cap` of them are chosen."""
    from scipy.special import bdtrc

    cap = None if cap is not None and cap >= population else cap
    most = population if cap is None else cap

    def size_sf(t: int, k: int) -> float:
        return 0.0 if k >= most else float(bdtrc(k, population, rate))

    mean = population * rate if cap is None else math.fsum(size_sf(0, k) for k in range(cap))  # E min(B, cap)
    return SamplingLaw(population, mean / population, cap=cap, size_sf=size_sf)


class RecordSampler(Part):
    """Base class of record samplers, which draw the batch of one silo for each step."""

    sizes: tuple[int, ...]
    relation: ClassVar[Relation] = "replace_one"
    disjoint: ClassVar[bool] = False  # True: the batches of an epoch have no record in common
    fixed: ClassVar[bool] = True  # True: every batch has exactly `count` records
    pass_rounds: int = 1  # consecutive steps whose batches one draw decides: `draw` gets the same random bits in each

    @property
    @abstractmethod
    @returns(lambda found, *_: number(found, 0.0, above=True))
    def count(self) -> float:
        """Expected number of records in a batch: the denominator of a sum over the batch."""

    @abstractmethod
    @returns(lambda found, part, t, silo, size, rng: array(found, (None,), "i", 0, size))
    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> Rows:
        """Return the batch of step t as positions among the silo's `size` records."""

    @returns(of_type(Event))
    def amplify(self, event: Event, silo: int) -> Event:
        """Return the event for one record of a silo, for an adversary who does not see which records were read."""
        return event

    def law(self, silo: int) -> SamplingLaw | None:
        """Return the distribution of a silo's batches, which `sordino audit` compares draws with; None: not stated."""
        return None

    def public_law(self, silo: int, size: int) -> SamplingLaw:
        """Return the `SamplingLaw` of public batches: how often, and at which distance, one record is read at most."""
        most, apart = partial(self.max_participations, silo=silo), self.min_separation(silo)
        return SamplingLaw(self.size(silo), size=size, secret=False, max_participations=most, min_separation=apart)

    def size(self, silo: int) -> int:
        """Return the declared number of records of a silo."""
        return self.sizes[silo] if len(self.sizes) > 1 else self.sizes[0]

    def epoch(self, step: int, silo: int) -> int:
        """Return the number of a step's epoch, whose steps read disjoint records; by default each step is an epoch."""
        return step

    def max_participations(self, steps: int, silo: int) -> int:
        """Return the largest number of times that one record is read in the first `steps` steps."""
        return self.epoch(steps - 1, silo) + 1 if steps > 0 else 0

    def min_separation(self, silo: int) -> int | None:
        """Return the least distance between two steps that read one record; None: no distance is guaranteed."""
        return None

    def block(self, step: int, silo: int) -> tuple[int, int, int] | None:
        """Return (o, start, stop) if a step reads positions start to stop of the public permutation number o.

        It is None for batches that are not blocks of a public permutation."""
        return None

    def max_repeated_reads(self, steps: int, silo: int) -> int:
        """Return the largest number of times that one record is read in `steps` consecutive steps, run once again."""
        return steps

    def reads_again(self, repeated: Counter[int], silo: int) -> int:
        """Return how often one record is read again at most, in steps that were run again; `repeated` counts them.

        Steps of one epoch read disjoint records, so only the most repeated step of each epoch counts.
        """
        most: Counter[int] = Counter()
        for step, count in repeated.items():
            most |= Counter({self.epoch(step, silo): count})
        return most.total()

    def max_rounds(self) -> int | None:
        """Return the largest number of rounds that the silos have records for; None if there is no limit."""
        return None

    def shrunk(self, sizes: tuple[int, ...], share: float, rounds: int) -> RecordSampler | None:
        """Return the same sampling of smaller silos with `sizes` records, for `sordino audit`; None if there is none.

        The sizes are about `share` of the present ones, and records suffice for `rounds` rounds."""
        return None

    def for_silos(self, silos: int) -> RecordSampler:
        """Return the same sampler for the first `silos` silos."""
        return replace(self, sizes=self.sizes[:silos]) if len(self.sizes) > 1 else self  # type: ignore[type-var]

    def check(self, population: int) -> None:
        """Raise an error if `sizes` has neither one entry nor one per silo."""
        found, needed = f"{len(self.sizes)} sizes for {population} silos", "one size per silo, or one for all"
        require(len(self.sizes) in (1, population), "records", found, needed, "set sizes in records")


def _check(sizes: tuple[int, ...], batch: float) -> None:
    needed = f"at least one record in each silo, and at most {CLIENTS:,}"
    fits = len(sizes) > 0 and min(sizes) >= 1 and max(sizes) <= CLIENTS
    require(fits, "records", f"sizes {brief_repr(list(sizes))}", needed, "set sizes to the silos' numbers of records")
    found = f"a batch of {batch:g} where the smallest silo has {min(sizes)} records"
    needed, fits = "a batch above 0, and no larger than the smallest silo", positive(batch) and batch <= min(sizes)
    require(fits, "records", found, needed, "lower batch")


@dataclass(frozen=True)
class AllRecords(RecordSampler, kind="all_records"):
    """Full batches: every round reads all records, without amplification; the mean is that of the silos' pooled data.

    Guarantee: replace one record (sensitivity 2).
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
    batch: float  # records of a batch, exactly or on average

    def __post_init__(self) -> None:
        _check(self.sizes, self.batch)

    @property
    def count(self) -> float:
        return float(self.batch)


@dataclass(frozen=True)
class PoissonRecords(_Batches, kind="poisson_records"):
    """Poisson sampling of records: each record is drawn independently with probability batch / size of its silo.

    Guarantee: add or remove one record (sensitivity 1), amplified by PLD of the subsampled mechanism.
    """

    batch: float
    sizes: tuple[int, ...]
    relation: ClassVar[Relation] = "add_remove"
    fixed: ClassVar[bool] = False

    def rate(self, silo: int) -> float:
        """Return the probability that one record of a silo is drawn."""
        return self.batch / self.size(silo)

    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> Rows:
        return rng.choice(size, int(rng.binomial(size, self.rate(silo))), replace=False, shuffle=False).astype(np.int64)

    def law(self, silo: int) -> SamplingLaw:
        return poisson_law(self.size(silo), self.rate(silo))

    def amplify(self, event: Event, silo: int) -> Event:
        return PoissonSampled(self.rate(silo), event)

    def shrunk(self, sizes: tuple[int, ...], share: float, rounds: int) -> RecordSampler:
        return PoissonRecords(min(self.batch * share, min(sizes)), sizes)


@dataclass(frozen=True)
class FixedRecords(_Batches, kind="fixed_records"):
    """Sampling without replacement: a uniformly random batch of exactly `batch` records of a silo.

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


@dataclass(frozen=True)
class AllocatedRecords(RecordSampler, kind="allocated_records"):
    """Random allocation of records: in every pass of `bins` steps each record is in exactly one secret random batch.

    The batch is drawn uniformly for each record, independently of other records, and anew for every pass, so batches
    have size / bins records on average (binomial), as with a shuffled loader.

    Guarantee: add or remove one record, at the cost of `events.Allocated` for each pass that was begun
    (docs/privacy.md, "Random allocation"). The allocation must stay secret. For k reads in t steps set bins = t / k.
    """

    bins: int
    sizes: tuple[int, ...]
    relation: ClassVar[Relation] = "add_remove"
    fixed: ClassVar[bool] = False
    disjoint: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.sizes, 1)
        found, needed = f"bins = {brief_repr(self.bins)}", f"at least 2, and at most {allocation.MOST_BINS:,}"
        fits = 2 <= self.bins <= allocation.MOST_BINS
        require(fits, "records", found, needed, "set bins to the number of steps in which a record is read once")

    @property
    def pass_rounds(self) -> int:  # type: ignore[override]
        return self.bins

    @property
    def count(self) -> float:
        return float(np.mean(self.sizes)) / self.bins

    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> Rows:
        """Return the records allocated to step t; `rng` must begin with the same bits in all steps of a pass."""
        return np.flatnonzero(rng.integers(0, self.bins, size) == t % self.bins).astype(np.int64)

    def law(self, silo: int) -> SamplingLaw:
        return replace(poisson_law(self.size(silo), 1 / self.bins), pass_rounds=self.bins)

    def amplify(self, event: Event, silo: int) -> Event:
        """Return the privacy event of one pass of `bins` steps; `max_participations` counts passes."""
        return Allocated(self.bins, event)

    def epoch(self, step: int, silo: int) -> int:
        return step // self.bins

    def reads_again(self, repeated: Counter[int], silo: int) -> int:
        return repeated.total()  # a step that was repeated after a kill began another pass

    def shrunk(self, sizes: tuple[int, ...], share: float, rounds: int) -> RecordSampler:
        return AllocatedRecords(self.bins, sizes)


def batch_stream(records: RecordSampler | None, streams: Streams, t: int, silo: int) -> np.random.Generator:
    """Return the random stream of a client's batches in round t, the same in all rounds of a pass.

    A simulation opens the stream of the pass's first round again. For release only `PassStreams` can do so.
    """
    if records is None or records.pass_rounds == 1:
        return streams.at(t, "batches", silo)
    if isinstance(streams, PassStreams):
        return streams.batches(t, silo)
    if streams.mode != "simulation":
        found = f"record sampler {records.kind!r} for release, without a key of the current pass"
        raise PlanError("records", found, "a run with one key for all rounds of a pass", "use poisson_records")
    return streams.at(t - t % records.pass_rounds, "batches", silo)


def pass_key(key: PassKey, streams: Streams, t: int, rounds: int, kind: str) -> PassKey:
    """Return the secret key of the pass that round t is in; it is new in the first round, and after a kill."""
    if key is None and t % rounds:
        found = f"round {t + 1}, in the middle of a pass of {kind!r}, without the pass's key"
        raise PlanError("sampling", found, "the state after the round before", "resume from its checkpoint")
    return tuple(streams.at(t, "cohort").integers(0, 2**62, 3).tolist()) if t % rounds == 0 or not key else key


PassKey = tuple[int, ...] | None  # three numbers of 62 bits; None between two passes, empty after a kill


@codec.hides_values
@dataclass
class PassStreams:
    """Secret random streams of a run whose batches are drawn once for a pass of several rounds.

    A pass has a secret key, which the checkpoint stores until the pass ends. If the run was killed in a round that was
    already charged, an empty key replaces it and the rest of the pass is drawn anew: `RecordSampler.reads_again` counts
    another pass.
    """

    records: RecordSampler
    inner: Streams
    key: PassKey = None
    begun: int = -1  # the round whose key is held

    @property
    def mode(self) -> Mode:
        return self.inner.mode

    def key_after(self, t: int) -> PassKey:
        """Return the secret key of the current pass, for the checkpoint after round t; None if the pass has ended."""
        return None if (t + 1) % self.records.pass_rounds == 0 else self.key

    def at(self, t: int, purpose: str, client: int = -1) -> np.random.Generator:
        return self.inner.at(t, purpose, client)

    def batches(self, t: int, client: int) -> np.random.Generator:
        """Return a new generator of a client's batches, which is the same in all rounds of the pass of round t."""
        if self.begun != t:
            key = pass_key(self.key, self.inner, t, self.records.pass_rounds, self.records.kind)
            self.key, self.begun = key, t
        name = f"{self.key} {client}".encode()
        return secure_generator(int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little"))


def subsets(sizes: Sequence[Rows], batch: int, rngs: Sequence[np.random.Generator]) -> Rows:
    """Draw a uniformly random set of `batch` distinct numbers below each size, as rows [number of sizes, batch].

    `sizes` is a list of arrays, one per generator. This is Floyd's algorithm, vectorised: step j draws a number up to
    size - batch + j and takes it or, if it was taken before, size - batch + j. A number below n is n times one of 2^53
    equidistant points of [0, 1), rounded down.
    """
    highest = np.concatenate(sizes)[:, None] - batch + np.arange(batch)
    groups = np.split(highest, np.cumsum([len(own) for own in sizes])[:-1])
    drawn = [(rng.random(own.shape) * (own + 1)).astype(np.int64) for own, rng in zip(groups, rngs, strict=True)]
    picks = np.ascontiguousarray(np.concatenate(drawn).T)  # [batch, m]: a step is one row
    for j in range(1, batch):
        taken = np.flatnonzero((picks[:j] == picks[j]).any(axis=0))
        picks[j, taken] = highest[taken, j]
    return picks.T


class _PublicBatches(_Batches):
    batch: int  # a public permutation of size records has size // batch batches; the rest is not read
    disjoint: ClassVar[bool] = True

    @abstractmethod
    def order(self, epoch: int) -> int:
        """Return the number of the public permutation whose batches an epoch reads."""

    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> Rows:
        epoch, place = divmod(t, size // self.batch)
        return _public_order(silo, size, self.order(epoch))[place * self.batch : (place + 1) * self.batch]

    def law(self, silo: int) -> SamplingLaw:
        return self.public_law(silo, self.batch)

    def epoch(self, step: int, silo: int) -> int:
        return step // (self.size(silo) // self.batch)

    def block(self, step: int, silo: int) -> tuple[int, int, int] | None:
        epoch, place = divmod(step, self.size(silo) // self.batch)
        return self.order(epoch), place * self.batch, (place + 1) * self.batch


@dataclass(frozen=True)
class OnePass(_PublicBatches, kind="one_pass"):
    """One pass: round t reads the t-th block of a public permutation, so batches are disjoint.

    Guarantee: replace one record (sensitivity 2); each record is in one release, so by parallel composition the whole
    run costs one release. The permutation is always the same, so a round that is run again reads the same block.
    """

    batch: int
    sizes: tuple[int, ...]

    def order(self, epoch: int) -> int:
        return 0

    def draw(self, t: int, silo: int, size: int, rng: np.random.Generator) -> Rows:
        return _public_order(silo, size, 0)[t * self.batch : (t + 1) * self.batch]

    def epoch(self, step: int, silo: int) -> int:
        return 0

    def min_separation(self, silo: int) -> int | None:
        return self.size(silo) // self.batch  # a record is read at most once, so any distance holds

    def block(self, step: int, silo: int) -> tuple[int, int, int] | None:
        return 0, step * self.batch, (step + 1) * self.batch

    def max_repeated_reads(self, steps: int, silo: int) -> int:
        return 1

    def max_rounds(self) -> int | None:
        return min(self.sizes) // self.batch

    def shrunk(self, sizes: tuple[int, ...], share: float, rounds: int) -> RecordSampler:
        return OnePass(max(1, min(sizes) // rounds), sizes)


@dataclass(frozen=True)
class ShuffledRecords(_PublicBatches, kind="shuffled_records"):
    """Shuffled epochs: each epoch is a new public permutation of a silo's records, cut into size // batch batches.

    The remaining records are not read in that epoch. Guarantee: replace one record (sensitivity 2); a record is in one
    release per epoch, so T rounds cost ceil(T / (size // batch)) releases. Nothing is amplified, so the order may be
    public.
    """

    batch: int
    sizes: tuple[int, ...]

    def order(self, epoch: int) -> int:
        return 1 + epoch

    def min_separation(self, silo: int) -> int | None:
        return 1  # the last record of one epoch may be the first of the next

    def max_repeated_reads(self, steps: int, silo: int) -> int:
        return min(steps, 1 + -(-(steps - 1) // (self.size(silo) // self.batch)))


@dataclass(frozen=True)
class RecordsInTurn(_PublicBatches, kind="records_in_turn"):
    """Fixed cyclic batches: one public permutation of a silo's records, cut into size // batch batches.

    The remaining records are never read. Guarantee: replace one record (sensitivity 2); the reads of a record are
    exactly size // batch steps apart, as correlated noise requires. Nothing is amplified, so the order may be public.
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
def _public_order(silo: int, size: int, number: int) -> Rows:
    return Seeded(0).at(number, "one pass", silo).permutation(size).astype(np.int64)


def batches(sampler: RecordSampler, t: int, silo: int, size: int, rng: np.random.Generator, steps: int) -> Rows:
    """Draw the `steps` batches of one silo in round t as rows [steps, longest batch], padded with -1."""
    if isinstance(sampler, FixedRecords) and sampler.batch == 1:
        return rng.integers(size, size=(steps, 1))
    drawn = [sampler.draw(step, silo, size, rng) for step in range(t * steps, (t + 1) * steps)]
    table = np.full((steps, max(max(len(rows) for rows in drawn), 1)), -1, dtype=np.int64)
    for row, rows in zip(table, drawn, strict=True):
        row[: len(rows)] = rows
    return table
