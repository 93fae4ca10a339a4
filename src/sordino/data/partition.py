"""Partitions of one data set over simulated clients: Iid, Dirichlet, Shards, SortedTarget, Natural.

A partition is a `Split` in compressed rows: client i holds index[offsets[i]:offsets[i+1]]. Every record goes to at most
one client, so one person's record never counts twice in a record-level guarantee.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino import codec
from sordino.codec import Part
from sordino.errors import DataError

Ints = NDArray[np.int64]


@codec.hides_values
@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Client i holds the records index[offsets[i]:offsets[i+1]]."""

    index: Ints  # [records assigned]
    offsets: Ints  # [population + 1], from 0 to len(index)

    @property
    def population(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ints:
        """The number of records of every client, [population]."""
        return np.diff(self.offsets)

    def of(self, client: int) -> Ints:
        """The records of one client."""
        if not 0 <= client < self.population:
            raise DataError(f"client {client}", f"0 <= client < {self.population}")
        return self.index[self.offsets[client] : self.offsets[client + 1]]


class Partitioner(Part):
    """Partition rule: assigns the records of a data set to clients."""

    @abstractmethod
    def split(self, y: NDArray[Any], groups: NDArray[Any] | None, rng: np.random.Generator) -> Split:
        """Assign the records with targets `y` and natural groups `groups`."""


@dataclass(frozen=True, slots=True)
class Iid(Partitioner, kind="iid"):
    """Records at random; sizes differ by at most one."""

    clients: int

    def __post_init__(self) -> None:
        _at_least_one("clients", self.clients)

    def split(self, y: NDArray[Any], groups: NDArray[Any] | None, rng: np.random.Generator) -> Split:
        """A random order, cut evenly."""
        _enough(len(y), self.clients, "one record per client")
        return Split(rng.permutation(len(y)).astype(np.int64), _even(len(y), self.clients))


@dataclass(frozen=True, slots=True)
class Dirichlet(Partitioner, kind="dirichlet"):
    """Label skew: of each class, client i gets the share p_i, p ~ Dirichlet(alpha, ..., alpha) (Hsu et al., 2019).

    A client left with fewer than `least` records is topped up with random ones that the others can spare.
    """

    clients: int
    alpha: float
    least: int = 1

    def __post_init__(self) -> None:
        _at_least_one("clients", self.clients)
        if not 0 < self.alpha < np.inf:
            found = f"alpha = {self.alpha}"
            raise DataError(found, "0 < alpha < infinity", "use 0.1 for strong skew, 100 for almost none")
        if self.least < 0:
            raise DataError(f"least = {self.least}", "least >= 0")

    def split(self, y: NDArray[Any], groups: NDArray[Any] | None, rng: np.random.Generator) -> Split:
        """One draw of shares per class, then the top-up."""
        _labels(y, "Dirichlet")
        _enough(len(y), self.clients * max(self.least, 1), f"{max(self.least, 1)} record(s) per client")
        order = _random_then_sorted(y, rng)
        counts = np.unique(y, return_counts=True)[1]
        owner = np.concatenate([self._owners(int(n), rng) for n in counts])
        return _gather(order, self._top_up(owner, rng), self.clients)

    def _owners(self, n: int, rng: np.random.Generator) -> Ints:
        """The client of each of the n records of one class: edges at the rounded cumulative shares."""
        cumulative = np.cumsum(rng.dirichlet(np.full(self.clients, self.alpha)))
        edges = np.rint(np.minimum(cumulative, 1.0) * n).astype(np.int64)
        edges[-1] = n
        return np.repeat(np.arange(self.clients), np.diff(edges, prepend=0))

    def _top_up(self, owner: Ints, rng: np.random.Generator) -> Ints:
        """Move random spare records (beyond the first `least` of their client) to the clients that lack some."""
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
    """Sorted by label, cut into clients * per_client shards, dealt at random (McMahan et al., 2017)."""

    clients: int
    per_client: int = 2

    def __post_init__(self) -> None:
        _at_least_one("clients", self.clients)
        _at_least_one("per_client", self.per_client)

    def split(self, y: NDArray[Any], groups: NDArray[Any] | None, rng: np.random.Generator) -> Split:
        """Equal shards of the sorted records, `per_client` for each client."""
        _labels(y, "Shards")
        shards = self.clients * self.per_client
        _enough(len(y), shards, "one record per shard")
        client_of_shard = rng.permutation(shards) // self.per_client
        owner = np.repeat(client_of_shard, np.diff(_even(len(y), shards)))
        return _gather(_random_then_sorted(y, rng), owner, self.clients)


@dataclass(frozen=True, slots=True)
class SortedTarget(Partitioner, kind="sorted_target"):
    """Silos by sorted target, as in regression on charges or interest rates: the most heterogeneous equal silos."""

    clients: int

    def __post_init__(self) -> None:
        _at_least_one("clients", self.clients)

    def split(self, y: NDArray[Any], groups: NDArray[Any] | None, rng: np.random.Generator) -> Split:
        """The sorted order, cut evenly; ties at random."""
        _enough(len(y), self.clients, "one record per client")
        return Split(_random_then_sorted(y, rng), _even(len(y), self.clients))


@dataclass(frozen=True, slots=True)
class Natural(Partitioner, kind="natural"):
    """The real groups of the data: writers, roles, hospitals. `clients` of them at random, or all."""

    clients: int | None = None

    def __post_init__(self) -> None:
        if self.clients is not None:
            _at_least_one("clients", self.clients)

    def split(self, y: NDArray[Any], groups: NDArray[Any] | None, rng: np.random.Generator) -> Split:
        """One client per group, in the order of the group numbers."""
        if groups is None:
            raise DataError("a data set without groups", "the natural client of every record", "use Iid or Dirichlet")
        if len(groups) != len(y):
            raise DataError(f"{len(groups)} groups for {len(y)} records", "one group per record")
        known, code = np.unique(groups, return_inverse=True)
        chosen = self._chosen(len(known), rng)
        client = np.full(len(known), -1, dtype=np.int64)
        client[chosen] = np.arange(len(chosen))
        kept = np.flatnonzero(client[code] >= 0)
        return _gather(kept, client[code[kept]], len(chosen))

    def _chosen(self, known: int, rng: np.random.Generator) -> Ints:
        """The numbers of the groups that take part, ascending."""
        if self.clients is None:
            return np.arange(known)
        if self.clients > known:
            raise DataError(f"{known} groups", f"at least {self.clients}", f"ask for clients <= {known}")
        return np.sort(rng.choice(known, self.clients, replace=False))


def _even(n: int, parts: int) -> Ints:
    """Edges of n records in `parts` parts whose sizes differ by at most one, [parts + 1]."""
    return np.arange(parts + 1, dtype=np.int64) * n // parts


def _random_then_sorted(key: NDArray[Any], rng: np.random.Generator) -> Ints:
    """The order that sorts `key`, ties at random."""
    shuffled = rng.permutation(len(key)).astype(np.int64)
    return shuffled[np.argsort(key[shuffled], kind="stable")]


def _gather(records: Ints, owner: Ints, clients: int) -> Split:
    """`records` grouped by `owner`, a client number for each of them."""
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=clients))]).astype(np.int64)
    return Split(records[np.argsort(owner, kind="stable")].astype(np.int64), offsets)


def _at_least_one(field: str, value: int) -> None:
    if value < 1:
        raise DataError(f"{field} = {value}", f"{field} >= 1")


def _enough(records: int, needed: int, what: str) -> None:
    if records < needed:
        raise DataError(f"{records} records", f"at least {needed} ({what})", "ask for fewer clients, or load more data")


def _labels(y: NDArray[Any], rule: str) -> None:
    if y.ndim != 1:
        raise DataError(f"targets of shape {list(y.shape)}", f"one label per record, for {rule}", "use Iid")
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"targets of type {y.dtype}", f"integer labels, for {rule}", "use SortedTarget for regression")
