"""Totals of a data set: all charges over every run on it, as one composition. The ledger and certificates call it.

    spent(data set) = max over its records of epsilon( everything that record was in )

A release reads the whole data set, or one block of a public order of its records (one pass), or one silo of it. Blocks
of one order that do not overlap have no record in common, so they compose in parallel, across runs too: the records
that were read most count. All is composed under the one relation of the limit; epsilons are never added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sordino.accounting import accountant
from sordino.accounting.bounds import Unit
from sordino.accounting.events import Entries, Event, Relation
from sordino.errors import ConfigError, PlanError, brief_repr

LIMITS = (2**31, 32)  # the largest count; kinds of records that are told apart


@dataclass(frozen=True)
class Block:
    """Positions start <= i < stop of a public order of the records: all that a release has read."""

    order: str
    start: int
    stop: int


@dataclass(frozen=True)
class Item:
    """`event` so many times; of one block of the records, of one silo by its name, or of all."""

    event: Event
    count: int = 1
    block: Block | None = None
    silo: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= LIMITS[0]:
            raise ConfigError(f"an event {brief_repr(self.count)} times", f"1 to {LIMITS[0]:,} times")
        if self.block is not None and not 0 <= self.block.start < self.block.stop:
            raise ConfigError(f"the block {self.block}", "positions from `start` up to `stop`, at least one")


Held = tuple[Event, Block | None, str]  # what makes two items the same but for their counts
Total = Counter[Held]


def total(items: tuple[Item, ...]) -> Total:
    """Identical events, counted."""
    found: Total = Counter()
    for item in items:
        found[item.event, item.block, item.silo] += item.count
    return found


def items(held: Mapping[Held, int]) -> tuple[Item, ...]:
    """A total as items."""
    return tuple(Item(event, count, block, silo) for (event, block, silo), count in held.items() if count)


@dataclass(frozen=True)
class Limit:
    """The most that a data set may spend, when neighbours differ in one `unit` by `relation`."""

    epsilon: float
    delta: float
    unit: Unit
    relation: Relation = "replace_one"

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < math.inf and 0 <= self.delta < 1):
            found = f"a limit of epsilon {brief_repr(self.epsilon)}, delta {brief_repr(self.delta)}"
            raise ConfigError(found, "epsilon above 0 and finite, and delta in [0, 1)")

    def mismatch(self, unit: Unit, relation: Relation) -> str | None:
        """Why releases of this unit and relation cannot be held against this limit; None: they can.

        Whoever is replaced is removed, or zeroed, and another added: the movement of 2 is in what an event states for
        `replace_one`. Of the other relations none follows from another.
        """
        if unit != self.unit:
            return f"one {unit} is protected, and the limit is for one {self.unit}"
        if relation != self.relation and self.relation != "replace_one":
            return f"neighbours differ by {relation}, and the limit is for {self.relation}"
        return None

    def holds(self, held: Mapping[Held, int]) -> bool:
        """Whether all of it together is within the limit; an event that states nothing for the relation is not."""
        return self.beyond(held) is None

    def beyond(self, held: Mapping[Held, int]) -> float | None:
        """The epsilon of it, if that is more than the limit.

        Any upper bound will do, the cheap one first: the answer depends on nothing but the events.
        """
        try:
            over = [self._epsilon(each) for each in records(held) if each and self._rough(each) > self.epsilon]
        except PlanError:
            return math.inf
        return next((found for found in over if not found <= self.epsilon), None)

    def _rough(self, entries: Entries) -> float:
        return accountant.bound(entries, self.relation, self.delta, rough=True).value

    def _epsilon(self, entries: Entries) -> float:
        first = accountant.bound(entries, self.relation, self.delta)
        return first.value if first.value <= self.epsilon else self._proved(entries)

    def _proved(self, entries: Entries) -> float:
        return accountant.epsilon(entries, self.relation, self.delta).value

    def epsilon_of(self, held: Mapping[Held, int]) -> float:
        """The epsilon of the records that most was read of, at the limit's delta; inf: nothing is guaranteed."""
        try:
            return max((self._proved(entries) for entries in records(held) if entries), default=0.0)
        except PlanError:
            return math.inf


@dataclass(frozen=True)
class Standing:
    """A data set after a run was charged: its limit, all that was spent, and what of it was this run's."""

    dataset: str
    limit: Limit
    runs: int
    lines: int  # of the ledger, up to here
    digest: str  # of the last of them
    items: tuple[Item, ...]
    own: tuple[Item, ...]

    @property
    def epsilon(self) -> float:
        """What the data set has spent in all."""
        return self.limit.epsilon_of(total(self.items))

    def covers(self, cost: tuple[Item, ...]) -> bool:
        """Whether a cost is within what this run was charged, and that within what the data set has spent."""
        return total(cost) <= total(self.own) <= total(self.items)


def records(held: Mapping[Held, int]) -> list[Entries]:
    """Everything that one record was in, for each kind of record."""
    silos = sorted({silo for _, _, silo in held if silo}) or [""]
    kinds = {kind for silo in silos for kind in _of_silo(held, silo)}
    return [tuple(sorted(kind, key=repr)) for kind in sorted(kinds, key=repr)]


Kind = frozenset[tuple[Event, int]]


def _of_silo(held: Mapping[Held, int], silo: str) -> Iterator[Kind]:
    whole: Counter[Event] = Counter()
    orders: dict[str, list[tuple[Block, Event, int]]] = {}
    for (event, block, whose), count in held.items():
        if whose not in ("", silo) or not count:
            continue
        if block is None:
            whole[event] += count
        else:
            orders.setdefault(block.order, []).append((block, event, count))
    yield from (_kind(whole + read) for read in _read(list(orders.values())))


def _read(orders: list[list[tuple[Block, Event, int]]]) -> list[Counter[Event]]:
    """What single records were in beside the whole: by positions in one order; of several orders, the most of each."""
    if not orders:
        return [Counter()]
    each = [_positions(blocks) for blocks in orders]
    if len(each) == 1 and len(each[0]) <= LIMITS[1]:
        return each[0]
    ceiling: Counter[Event] = Counter()
    for kinds in each:
        most: Counter[Event] = Counter()
        for kind in kinds:
            most |= kind
        ceiling += most
    return [ceiling]


def _positions(blocks: list[tuple[Block, Event, int]]) -> list[Counter[Event]]:
    """The different kinds of positions, by a walk along the order."""
    steps: dict[int, Counter[Event]] = {}
    for block, event, count in blocks:
        steps.setdefault(block.start, Counter())[event] += count
        steps.setdefault(block.stop, Counter())[event] -= count
    here: Counter[Event] = Counter()
    found: dict[Kind, Counter[Event]] = {}
    for at in sorted(steps):
        here.update(steps[at])
        here = +here
        found.setdefault(_kind(here), here.copy())
    return list(found.values())


def _kind(counts: Counter[Event]) -> Kind:
    return frozenset((event, count) for event, count in counts.items() if count)
