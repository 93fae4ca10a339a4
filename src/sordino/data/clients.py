"""Records, and the clients that hold them: one table, and the rows of each client. Called by `task` and engines.

Per-silo values by name (`silos.NY = { epsilon = 1 }`, `sizes = { NY = 300, LA = 120 }`) are resolved here, once, into
the order of `[task] silos`; the data are then cut in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino import codec
from sordino.data.partition import Partitioner
from sordino.errors import ConfigError, DataError
from sordino.rng import Seeded


@codec.hides_values
@dataclass(frozen=True)
class Records:
    """Inputs x [n, ...] and targets y [n, ...] of n records."""

    x: Tensor
    y: Tensor
    lazy: bool = False  # memory-mapped: read when used, so not checked at the start

    def __len__(self) -> int:
        return len(self.x)


@codec.hides_values
@dataclass(frozen=True)
class Clients:
    """All clients' records in one table; client i holds rows index[offsets[i] : offsets[i + 1]].

    Per client only one offset is stored, so a million clients take eight megabytes. `here` lists the clients whose
    records this process holds: all in a simulation, one in a silo, none on a server.
    """

    records: Records
    index: NDArray[np.int64]
    offsets: NDArray[np.int64]
    here: tuple[int, ...] | None = None  # None: all of them
    names: tuple[str, ...] = ()  # of the clients, where they have any

    @classmethod
    def of(cls, clients: Sequence[Any]) -> Clients:
        """From a list with one entry per client: (x, y), `Records`, or any map-style Dataset of (x, y) pairs."""
        if len(clients) == 0:
            raise DataError("an empty list of clients", "at least one client", "pass one data set per client")
        parts = [records_of(entry, f"client {i}") for i, entry in enumerate(clients)]
        full = [part for part in parts if len(part)]
        if not full:
            raise DataError(f"{len(parts)} clients without a record", "at least one record")
        table = Records(torch.cat([part.x for part in full]), torch.cat([part.y for part in full]))
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        return cls(table, np.arange(offsets[-1], dtype=np.int64), offsets)

    @classmethod
    def cut(cls, records: Records, partition: Partitioner, groups: Any = None, seed: int = 0) -> Clients:
        """One table of records cut into clients by a partition; its random choices follow from the public `seed`."""
        split = partition.split(records.y.numpy(), groups, Seeded(seed).at(0, "partition"))
        return cls(records, split.index, split.offsets)

    @classmethod
    def elsewhere(cls, population: int, like: Records | None = None) -> Clients:
        """Clients whose records are not here; `like` are public records of the same shape."""
        sides = (torch.empty(0), torch.empty(0)) if like is None else (like.x, like.y)
        x, y = (side.new_empty(0, *side.shape[1:]) for side in sides)
        return cls(Records(x, y), np.zeros(0, dtype=np.int64), np.zeros(population + 1, dtype=np.int64), ())

    @classmethod
    def alone(cls, client: int, population: int, own: Records) -> Clients:
        """One client of a population, with its own records and no others."""
        if not 0 <= client < population:
            raise DataError(f"silo {client} of {population}", f"a number from 0 to {population - 1}")
        offsets = np.zeros(population + 1, dtype=np.int64)
        offsets[client + 1 :] = len(own)
        return cls(own, np.arange(len(own), dtype=np.int64), offsets, (client,))

    def name(self, client: int) -> str:
        """A client's name, quoted, or its number."""
        return repr(self.names[client]) if self.names else str(client)

    @property
    def held(self) -> NDArray[np.int64]:
        """The clients whose records are here."""
        return np.arange(self.population) if self.here is None else np.asarray(self.here, dtype=np.int64)

    @property
    def population(self) -> int:
        return len(self.offsets) - 1

    def size(self, client: int) -> int:
        """How many records a client holds."""
        return int(self.offsets[client + 1] - self.offsets[client])

    def rows(self, client: int) -> NDArray[np.int64]:
        """Rows of the table that a client holds."""
        return self.index[self.offsets[client] : self.offsets[client + 1]]


def records_of(entry: Any, name: str) -> Records:
    """A user's (x, y) pair or map-style data set as records; `name` is what errors call it."""
    if isinstance(entry, Records):
        return entry
    pair = entry if isinstance(entry, tuple | list) and len(entry) == 2 else _collated(entry, name)
    try:
        x, y = torch.as_tensor(pair[0]), torch.as_tensor(pair[1])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} of a kind that is no tensor ({error})", "(x, y) tensors or a data set") from None
    x, y = (side.float() if side.dtype == torch.float64 else side for side in (x, y))
    if len(x) != len(y):
        raise DataError(f"{name} with {len(x)} inputs and {len(y)} targets", "as many targets as inputs")
    return Records(x, y)


def _collated(entry: Any, name: str) -> tuple[Tensor, Tensor]:
    """A map-style data set of (x, y) pairs as two tensors."""
    if isinstance(entry, Mapping) or not (hasattr(entry, "__len__") and hasattr(entry, "__getitem__")):
        raise DataError(f"{name} of type {type(entry).__name__}", "(x, y) tensors or a map-style data set")
    pairs = [entry[i] for i in range(len(entry))]
    if not pairs:
        return torch.empty(0), torch.empty(0, dtype=torch.int64)
    xs, ys = zip(*pairs, strict=True)
    return torch.stack([torch.as_tensor(x) for x in xs]), torch.as_tensor(cast(Any, ys))


def check_finite(records: Records, name: str) -> None:
    """Refuse NaN and infinity; memory-mapped records are not read."""
    if records.lazy:
        return
    for side, tensor in (("x", records.x), ("y", records.y)):
        if tensor.is_floating_point() and not all(bool(part.isfinite().all()) for part in torch.split(tensor, 65536)):
            count = int((~tensor.isfinite()).sum())
            found = f"{count} NaN or infinite values in {side} of {name}"
            raise DataError(found, "finite numbers", "drop or impute them first")


PER_SILO = {
    "recipe": ("sizes", "epsilons", "deltas", "noise_multipliers"),
    "privacy": ("silos", "deltas"),
}  # however deep inside


def resolve_silo_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with its tables by silo name as lists, in the order of `[task] silos`, or sorted."""
    data = dict(table)
    tables = {place: named for part, keys in PER_SILO.items() for place, named in _tables(data.get(part), part, keys)}
    if not tables:
        return data
    task = dict(data["task"]) if isinstance(data.get("task"), Mapping) else {}
    names = _names(task.get("silos"), tables)
    lists = {place: [named[name] for name in names] for place, named in tables.items()}
    return _listed(data, "", lists) | {"task": {**task, "silos": names}}


def _tables(part: Any, where: str, keys: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every table keyed by silo name, with its place: recipe.sizes, recipe.records.sizes."""
    for key, value in part.items() if isinstance(part, Mapping) else ():
        if isinstance(value, Mapping):
            place = f"{where}.{key}"
            yield from [(place, value)] if key in keys else _tables(value, place, keys)


def _listed(part: Mapping[str, Any], where: str, lists: Mapping[str, list[Any]]) -> dict[str, Any]:
    inside = {key: _listed(value, f"{where}{key}.", lists) for key, value in part.items() if isinstance(value, Mapping)}
    return {**part, **inside, **{key: lists[where + key] for key in part if where + key in lists}}


def _names(given: Any, tables: dict[str, Mapping[str, Any]]) -> list[str]:
    """The silos' names, after checking that every table has exactly them."""
    first = next(iter(tables.values()))
    names = [str(name) for name in given] if isinstance(given, list) else sorted(first)
    for where, table in tables.items():
        check_names(list(table), names, where, "[task] silos" if isinstance(given, list) else next(iter(tables)))
    return names


def check_names(found: list[str], known: list[str], where: str, of: str) -> None:
    """Refuse unknown, repeated and missing names."""
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"silo {twice!r} twice in {where}", "every silo once")
    unknown = next((name for name in found if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"silo {unknown!r} in {where}", f"a silo of {of}", codec.nearest(unknown, known))
    missing = next((name for name in known if name not in found), None)
    if missing is not None:
        raise ConfigError(f"no silo {missing!r} in {where}", f"every silo of {of}", f"add {where}.{missing}")
