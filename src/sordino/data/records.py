"""`Dataset` (training and test arrays), the checks of every data set, and the partitions over clients.

Called by all readers in data/, by `task` and by the configuration. The partition rules are Iid, Dirichlet, Shards,
SortedTarget and Natural. Every record goes to at most one client, so that a record-level guarantee holds for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sordino import codec
from sordino.codec import Part
from sordino.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sordino.certificate.facts import Declared
    from sordino.data.tables import Encoding, PendingColumn

Array = NDArray[Any]
Ints = NDArray[np.int64]
MOST_CLASSES = 1_000_000
NO_ROW = -100  # label of a row that a person does not have: IGNORED of the losses, which cost nothing


@codec.hides_values
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Dataset:
    """Training and test records, with the natural client of each record if the data set has natural clients."""

    x: Array  # float32 [n, ...], or int64 [n, length] for text
    y: Array  # int64 labels or float32 targets, [n]; [n, rows] where a record is a person with several rows
    test_x: Array  # of no record where nothing was declared public
    test_y: Array
    groups: Ints | None = None  # natural client of each training record, [n]
    test_groups: Ints | None = None  # same numbering; new numbers for clients that only appear in the test
    classes: int | None = None  # None: regression
    target_unit: float = 1.0  # regression: one unit of y in the original unit (dollars, percent)
    offsets: Ints | None = None  # of memory-mapped records, in the order of their clients: not read, not checked
    names: tuple[str, ...] = ()  # of the natural clients, in the order of their numbers, where they have names
    waiting: tuple[PendingColumn, ...] = ()  # coordinates of x that are scaled once a noised histogram is released
    encoding: Encoding | None = None  # of a table: what its coordinates mean
    rows: int = 1  # rows of a record: more than one where all rows of a person are one record
    declared: tuple[Declared, ...] = ()  # public data and weights behind x, where x are features
    name: str = ""
    description: str = ""
    licence: str = ""


def without_test(
    x: Array, y: Array, groups: Ints | None = None, classes: int | None = None, names: tuple[str, ...] = (),
    rows: int = 1,
) -> Dataset:  # fmt: skip
    """Return a data set without test records, after checking it; a record has `rows` rows."""
    x, y = check_records(x, y, groups, classes, rows=rows)
    return Dataset(x=x, y=y, test_x=x[:0], test_y=y[:0], groups=groups, classes=classes, names=names, rows=rows)


def fixed_order(n: int) -> Ints:
    """Return a fixed public permutation: the numbers 0 .. n - 1 sorted by their SplitMix64 hash."""
    z = (np.arange(n, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable").astype(np.int64)


def hold_out(
    x: Array, y: Array, groups: Ints | None = None, classes: int | None = None, unit: float = 1.0, share: float = 0.2,
    rows: int = 1,
) -> Dataset:  # fmt: skip
    """Split records into training and test records: the last `share` of each group in `fixed_order` is the test.

    The records are checked before they are reordered, so that an error gives the record's number in the file.
    """
    x, y = check_records(x, y, groups, classes, rows=rows)
    order = fixed_order(len(y))
    parts = [order] if groups is None else [order[groups[order] == g] for g in np.unique(groups)]
    cuts = [len(part) - int(len(part) * share) for part in parts]
    train = np.concatenate([part[:cut] for part, cut in zip(parts, cuts, strict=True)])
    test = np.concatenate([part[cut:] for part, cut in zip(parts, cuts, strict=True)])
    owners, test_owners = (None, None) if groups is None else (groups[train], groups[test])
    return Dataset(
        x=x[train], y=y[train], test_x=x[test], test_y=y[test], groups=owners, test_groups=test_owners, classes=classes,
        target_unit=unit, rows=rows,
    )  # fmt: skip


# ---- declarations of public rows, for the user's own files -----------------------------------------------------------


def check_public_source(path: str | Path, test: Any, **others: Any) -> None:
    """Refuse two declarations of public test rows, and a test file that is the training file."""
    given = [name for name, value in {"test": test, **others}.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(" and ".join(given), "one declaration of which rows are public", f"drop {given[0]}")
    if isinstance(test, str | Path) and Path(path).expanduser().resolve() == Path(test).expanduser().resolve():
        found = f"test = {Path(test).name!r}, which is the training file"
        fix = "name another file, or drop test: then no row is public"
        raise ConfigError(found, "a file of rows that may be public", fix)


def with_public_fraction(data: Dataset, path: str | Path, fraction: float | None) -> Dataset:
    """Return the data set with a `fraction` of its rows as public test records; unchanged if it is None."""
    if fraction is None:
        return data
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        fix = "write 0.2, for example, to declare a fifth of the rows public"
        raise ConfigError(f"public_test_fraction = {fraction!r}", "a share of the rows between 0 and 1", fix)
    with name_file(path):
        held = hold_out(data.x, data.y, data.groups, data.classes, share=fraction, rows=data.rows)
        if not len(held.test_y):
            found = f"{len(data.y)} records, of which public_test_fraction = {fraction:g} leaves no test record"
            raise DataError(found, "at least one public test record", "raise public_test_fraction, or drop it")
    held = replace(held, names=data.names, target_unit=data.target_unit)
    return replace(held, waiting=data.waiting, encoding=data.encoding)


@contextmanager
def name_file(path: str | Path) -> Iterator[None]:
    """Add the path of a file to any `DataError` that is raised inside this context."""
    try:
        yield
    except DataError as error:
        if str(path) in error.found:
            raise
        raise DataError(f"{error.found} in {path}", error.needed, error.fix) from None


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_classes(classes: int | None) -> int | None:
    """Return the number of classes; refuse any value but None and whole numbers from 1 to `MOST_CLASSES`."""
    whole = isinstance(classes, int) and not isinstance(classes, bool)
    if classes is not None and not (whole and 1 <= classes <= MOST_CLASSES):
        needed = f"a whole number from 1 to {MOST_CLASSES}"
        fix = "correct classes, or leave it out and store y as floats for regression"
        raise DataError(f"{classes!r} classes", needed, fix)
    return classes


def select_records(data: Dataset, train: int | None, test: int | None, validation: bool) -> Dataset:
    """Return the first `train` training and the first `test` test records, checked and in their final types.

    With `validation` the test records are the training records after the first `train`.
    """
    lazy = data.offsets is not None
    if lazy and (train is not None or validation):
        fix = "write a folder of fewer records"
        raise ConfigError("train or validation for memory-mapped data", "a folder that is used whole", fix)
    if validation and train is None:
        fix = "add train = 50000, or another number"
        raise ConfigError("validation = true without train", "the number of records to train on", fix)
    if validation and train is not None and 1 <= train < len(data.y):
        later = None if data.groups is None else data.groups[train:]
        data = replace(data, test_x=data.x[train:], test_y=data.y[train:], test_groups=later)
    for option, asked, present in (("train", train, len(data.y) - validation), ("test", test, len(data.test_y))):
        if asked is not None and not 1 <= asked <= present:
            needed = f"a number from 1 to the number of records, {present}"
            raise DataError(f"{option} = {asked}", needed, f"correct {option}, or leave it out")
    groups = None if data.groups is None else data.groups[:train]
    test_groups = None if data.test_groups is None else data.test_groups[:test]
    x, y, test_x, test_y = data.x[:train], data.y[:train], data.test_x[:test], data.test_y[:test]
    if not lazy:
        x, y = check_records(x, y, groups, data.classes, rows=data.rows)
    if len(test_x) or len(test_y):
        test_x, test_y = check_records(test_x, test_y, test_groups, data.classes, "test_", data.rows)
    if x.shape[1:] != test_x.shape[1:]:
        found = f"training records of shape {x.shape[1:]}, test records of {test_x.shape[1:]}"
        raise DataError(found, "training and test records of the same shape", "reshape one of the arrays")
    return replace(data, x=x, y=y, groups=groups, test_x=test_x, test_y=test_y, test_groups=test_groups)


def check_records(
    x: Array, y: Array, groups: Ints | None, classes: int | None, part: str = "", rows: int = 1
) -> tuple[Array, Array]:
    """Return x and y in their final types; refuse unequal lengths, labels out of range, NaN and infinity.

    Pixels (uint8) are divided by 255, their public range. `part` is "" or "test_", the prefix of names in errors. A
    record of several `rows` has one label per row; an absent row has the label -100.
    """
    if x.ndim < 2 or y.ndim != (1 if rows == 1 else 2):
        found = f"{part}x of shape {x.shape} and {part}y of shape {y.shape}"
        raise DataError(found, "x of shape [n, ...] and y of shape [n]", "reshape the arrays")
    lengths = {"x": len(x), "y": len(y)} | ({} if groups is None else {"groups": len(groups)})
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{n} records in {part}{name}" for name, n in lengths.items())
        raise DataError(found, "the same number of records in each array", "cut the longer arrays")
    if not len(y):
        fix = "use at least five records, which can be split into two parts"
        raise DataError(f"no records in {part}y", "at least one record", fix)
    if x.dtype == np.uint8:
        x = np.divide(x, np.float32(255), dtype=np.float32)
    if classes is not None:
        if y.dtype.kind not in "iu":
            fix = "store it as int64, or leave classes out for regression"
            raise DataError(f"{part}y of type {y.dtype}", "integer labels", fix)
        wrong = np.flatnonzero(((y < 0) | (y >= classes)) & ((rows == 1) | (y != NO_ROW)))
        if len(wrong):
            found = f"label {y[wrong[0]]} in {part}y, record {wrong[0]}"
            raise DataError(found, f"labels from 0 to {classes - 1}", "correct the label, or the number of classes")
    final_x = int64(x, part + "x") if x.dtype.kind in "iu" else _finite_float32(x, part + "x")
    return final_x, _finite_float32(y, part + "y") if classes is None else y.astype(np.int64, copy=False)


def int64(values: Array, label: str) -> Array:
    """Return integers as int64; refuse unsigned integers that are too large for this type."""
    if values.dtype == np.uint64 and values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise DataError(f"the number {values.max()} in {label}", "integers that fit in int64", "use smaller numbers")
    return values.astype(np.int64, copy=False)


def _finite_float32(values: Array, label: str) -> Array:
    if values.dtype.kind not in "fiub":
        raise DataError(f"{label} of type {values.dtype}", "real numbers", "convert the array to float32")
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and is refused
        values = values.astype(np.float32, copy=False)
    finite = np.isfinite(values)
    if not finite.all():
        wrong = int(values.size - np.count_nonzero(finite))
        record, *inside = (int(i) for i in np.unravel_index(int(np.argmin(finite)), values.shape))
        where = f"record {record}" + (f", position {tuple(inside)}" if inside else "")
        found = f"{wrong} NaN or infinite value(s) in {label}, the first in {where}"
        raise DataError(found, "finite numbers", "impute missing values by public constants before training")
    return values


# ---- partitions over simulated clients -------------------------------------------------------------------------------


@codec.hides_values
@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Result of a partition: client i holds the records index[offsets[i]:offsets[i+1]]."""

    index: Ints  # [records assigned]
    offsets: Ints  # [population + 1], from 0 to len(index)

    @property
    def population(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ints:
        """Number of records of every client, [population]."""
        return np.diff(self.offsets)

    def of(self, client: int) -> Ints:
        """Return the record numbers of one client."""
        if not 0 <= client < self.population:
            needed = f"a number from 0 to {self.population - 1}"
            raise DataError(f"client {client}", needed, "correct the number of the client")
        return self.index[self.offsets[client] : self.offsets[client + 1]]


class Partitioner(Part):
    """Rule that assigns the records of a data set to simulated clients."""

    def __post_init__(self) -> None:
        for name in ("clients", "per_client"):
            value = getattr(self, name, None)
            if isinstance(value, int) and value < 1:
                raise DataError(f"{name} = {value}", f"{name} >= 1", f"set {name} to at least 1")

    @abstractmethod
    def split(self, y: Array, groups: Array | None, rng: np.random.Generator) -> Split:
        """Assign records to clients, by their targets `y` or their natural clients `groups` (None: there are none)."""


@dataclass(frozen=True, slots=True)
class Iid(Partitioner, kind="iid"):
    """Random partition into clients whose sizes differ by at most one."""

    clients: int

    def split(self, y: Array, groups: Array | None, rng: np.random.Generator) -> Split:
        _check_enough(len(y), self.clients, "one record per client")
        return Split(rng.permutation(len(y)).astype(np.int64), np.arange(self.clients + 1) * len(y) // self.clients)


@dataclass(frozen=True, slots=True)
class Dirichlet(Partitioner, kind="dirichlet"):
    """Partition with label skew (Hsu et al., 2019): small `alpha` is strong skew.

    Of each class client i gets the share p_i, where p ~ Dirichlet(alpha, ..., alpha). A client with fewer than `least`
    records gets random records of clients that have more.
    """

    clients: int
    alpha: float
    least: int = 1

    def __post_init__(self) -> None:
        Partitioner.__post_init__(self)
        if not 0 < self.alpha < np.inf:
            found = f"alpha = {self.alpha}"
            raise DataError(found, "0 < alpha < infinity", "use 0.1 for strong skew, 100 for almost none")
        if self.least < 0:
            raise DataError(f"least = {self.least}", "least >= 0", "set least = 1, or leave it out")

    def split(self, y: Array, groups: Array | None, rng: np.random.Generator) -> Split:
        _check_labels(y, "Dirichlet")
        _check_enough(len(y), self.clients * max(self.least, 1), f"{max(self.least, 1)} record(s) per client")
        order, owners = _random_then_sorted(y, rng), []
        for n in np.unique(y, return_counts=True)[1]:  # of each class, edges at the rounded cumulative shares
            cumulative = np.cumsum(rng.dirichlet(np.full(self.clients, self.alpha)))
            edges = np.rint(np.minimum(cumulative, 1.0) * n).astype(np.int64)
            edges[-1] = n
            owners.append(np.repeat(np.arange(self.clients), np.diff(edges, prepend=0)))
        return _grouped(order, self._top_up(np.concatenate(owners), rng), self.clients)

    def _top_up(self, owner: Ints, rng: np.random.Generator) -> Ints:
        sizes = np.bincount(owner, minlength=self.clients)
        lack = np.maximum(self.least - sizes, 0)
        order = _random_then_sorted(owner, rng)
        rank = np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner[order]]
        spare = order[rank >= self.least]
        moved = owner.copy()
        moved[rng.choice(spare, int(lack.sum()), replace=False)] = np.repeat(np.arange(self.clients), lack)
        return moved


@dataclass(frozen=True, slots=True)
class Shards(Partitioner, kind="shards"):
    """Partition into shards (McMahan et al., 2017), by which a client has few classes.

    The records, sorted by label, are cut into clients * per_client shards, and each client gets `per_client` of them.
    """

    clients: int
    per_client: int = 2

    def split(self, y: Array, groups: Array | None, rng: np.random.Generator) -> Split:
        _check_labels(y, "Shards")
        shards = self.clients * self.per_client
        _check_enough(len(y), shards, "one record per shard")
        client_of_shard = rng.permutation(shards) // self.per_client
        owner = np.repeat(client_of_shard, np.diff(np.arange(shards + 1) * len(y) // shards))
        return _grouped(_random_then_sorted(y, rng), owner, self.clients)


@dataclass(frozen=True, slots=True)
class SortedTarget(Partitioner, kind="sorted_target"):
    """Partition into silos of equal size by sorted target, the most heterogeneous partition of a regression."""

    clients: int

    def split(self, y: Array, groups: Array | None, rng: np.random.Generator) -> Split:
        _check_enough(len(y), self.clients, "one record per client")
        return Split(_random_then_sorted(y, rng), np.arange(self.clients + 1) * len(y) // self.clients)


@dataclass(frozen=True, slots=True)
class Natural(Partitioner, kind="natural"):
    """Partition by the natural clients of the data (writers, roles, hospitals): all, or `clients` random ones."""

    clients: int | None = None

    def split(self, y: Array, groups: Array | None, rng: np.random.Generator) -> Split:
        """Return one client per group, in the order of the group numbers."""
        if groups is None:
            raise DataError("a data set without groups", "the natural client of every record", "use Iid or Dirichlet")
        if len(groups) != len(y):
            found = f"{len(groups)} groups for {len(y)} records"
            raise DataError(found, "one group per record", "cut the longer array")
        known, code = np.unique(groups, return_inverse=True)
        chosen = np.arange(len(known))
        if self.clients is not None:
            if self.clients > len(known):
                fix = f"set clients to at most {len(known)}"
                raise DataError(f"{len(known)} natural clients", f"clients = {self.clients} of them", fix)
            chosen = np.sort(rng.choice(len(known), self.clients, replace=False))
        client = np.full(len(known), -1, dtype=np.int64)
        client[chosen] = np.arange(len(chosen))
        rows = np.flatnonzero(client[code] >= 0)
        return _grouped(rows, client[code[rows]], len(chosen))


def _random_then_sorted(key: Array, rng: np.random.Generator) -> Ints:
    shuffled = rng.permutation(len(key)).astype(np.int64)
    return shuffled[np.argsort(key[shuffled], kind="stable")]


def _grouped(records: Ints, owner: Ints, clients: int) -> Split:
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=clients))]).astype(np.int64)
    return Split(records[np.argsort(owner, kind="stable")].astype(np.int64), offsets)


def _check_enough(records: int, needed: int, what: str) -> None:
    if records < needed:
        found, fix = f"{records} records for this partition", "ask for fewer clients, or load more data"
        raise DataError(found, f"at least {needed} ({what})", fix)


def _check_labels(y: Array, rule: str) -> None:
    if y.ndim != 1:
        raise DataError(f"targets of shape {list(y.shape)}", f"one label per record, for {rule}", "use Iid")
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"targets of type {y.dtype}", f"integer labels, for {rule}", "use SortedTarget for regression")
