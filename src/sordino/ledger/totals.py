"""Lines of a ledger, and totals of all charges to a data set: one composition over all its runs.

    epsilon of a data set = max over its records of epsilon( all releases that read the record )

A release reads the whole data set, one silo, or one block (a range in a public order of the records, as in one pass).
Disjoint blocks of one order have no record in common, so they compose in parallel, across runs too. All events are
composed under the relation of the limit; epsilons are never added.

Lines are dataclasses that the codec writes as JSON (`journal` stores them in order); an account adds up all lines of a
data set. No function here reads or writes a file. Called by the ledger and by certificates.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from sordino import codec
from sordino.accounting import accountant
from sordino.accounting.bounds import Protected
from sordino.accounting.events import Entries, Event, Relation
from sordino.errors import ConfigError, PlanError, brief_repr

LIMITS = (2**31, 32)  # the largest count; the most kinds of records that are composed one by one


@dataclass(frozen=True)
class Block:
    """Range start <= i < stop in a public order of the records, the only records that a release reads."""

    order: str
    start: int
    stop: int


@dataclass(frozen=True)
class Item:
    """Privacy event with the number of its charges, to one block of records, to one named silo, or to all records."""

    event: Event
    count: int = 1
    block: Block | None = None
    silo: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= LIMITS[0]:
            found = f"an event charged {brief_repr(self.count)} times"
            raise ConfigError(found, f"a count from 1 to {LIMITS[0]:,}", "correct the count")
        if self.block is not None and not 0 <= self.block.start < self.block.stop:
            raise ConfigError(f"the block {self.block}", "a block with 0 <= start < stop", "correct its ends")


Total = Counter[tuple[Event, Block | None, str]]  # counts of items


def total(items: tuple[Item, ...]) -> Total:
    """Add up the counts of items with the same event, block and silo."""
    found: Total = Counter()
    for item in items:
        found[item.event, item.block, item.silo] += item.count
    return found


def items(held: Total) -> tuple[Item, ...]:
    return tuple(Item(event, count, block, silo) for (event, block, silo), count in held.items() if count)


@dataclass(frozen=True)
class Limit:
    """Upper limit on the (epsilon, delta) of all releases of a data set, for neighbours that differ in one `unit`."""

    epsilon: float
    delta: float
    unit: Protected
    relation: Relation = "replace_one"

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < math.inf and 0 <= self.delta < 1):
            found = f"a limit of epsilon {brief_repr(self.epsilon)}, delta {brief_repr(self.delta)}"
            raise ConfigError(found, "a finite epsilon above 0, and delta in [0, 1)", "correct epsilon or delta")

    def mismatch(self, unit: Protected, relation: Relation) -> str | None:
        """Return why releases of this unit and relation cannot be compared with this limit; None if they can.

        A `replace_one` limit covers all relations, since replacing a unit is removing (or zeroing) it and adding
        another. Any other limit covers its own relation only.
        """
        if unit != self.unit:
            return f"one {unit} is protected, and the limit is for one {self.unit}"
        if relation != self.relation and self.relation != "replace_one":
            return f"neighbours differ by {relation}, and the limit is for {self.relation}"
        return None

    @property
    def proved_at(self) -> float:
        """The delta at which charges are composed: the next float below the limit's.

        The gap (1e-21 at delta 1e-5) is for secure sums, whose rounding moves their law by less than 1e-40 per round
        from the Gaussian noise that is charged (`accounting.secure_sums`).
        """
        return max(0.0, math.nextafter(self.delta, -1.0))

    def beyond(self, held: Total) -> float | None:
        """Return the epsilon of all charges if it is above the limit, else None; infinity if an event has no bound.

        Cheap upper bounds are tried before the tightest one.
        """
        try:
            for entries in filter(None, records(held)):
                cheap = accountant.bound(entries, self.relation, self.proved_at, rough=True).value <= self.epsilon
                if cheap or accountant.bound(entries, self.relation, self.proved_at).value <= self.epsilon:
                    continue
                proved = accountant.epsilon(entries, self.relation, self.proved_at).value
                if not proved <= self.epsilon:
                    return proved
        except PlanError:
            return math.inf
        return None

    def epsilon_of(self, held: Total) -> float:
        """Return the largest epsilon over all records, at the limit's delta; infinity if there is no guarantee."""
        try:
            charged = filter(None, records(held))
            return max((accountant.epsilon(each, self.relation, self.proved_at).value for each in charged), default=0.0)
        except PlanError:
            return math.inf


@dataclass(frozen=True)
class Statement:
    """Statement on all charges to one data set so far, and its limit; a run writes it to ledger.json at its end."""

    dataset: str
    limit: Limit
    runs: int
    lines: int  # number of lines in the ledger
    digest: str  # of the last line
    items: tuple[Item, ...]  # charges of all runs
    own: tuple[Item, ...] = ()  # charges of the run that the statement was made for
    charges: int | None = None  # number of messages that were charged one by one; not in ledger.json
    restored: RestoreEntry | None = None  # lines were lost, and nothing is charged before the limit is lowered

    @property
    def epsilon(self) -> float:
        """Epsilon of all charges to the data set, at the limit's delta."""
        return self.limit.epsilon_of(total(self.items))

    def covers(self, cost: tuple[Item, ...]) -> bool:
        """Return whether the run's own charges include `cost`, and the charges of all runs include the run's own."""
        return total(cost) <= total(self.own) <= total(self.items)


# ---- events of single records
def records(held: Total) -> list[Entries]:
    """Return the events that read one record, once for each group of records with the same events."""
    silos = sorted({silo for _, _, silo in held if silo}) or [""]
    kinds = {frozenset(found.items()) for silo in silos for found in _records_of_silo(held, silo)}
    return [tuple(sorted(kind, key=repr)) for kind in sorted(kinds, key=repr)]


def _records_of_silo(held: Total, silo: str) -> list[Counter[Event]]:
    """Return the events of single records of a silo, for each position in the public order that blocks refer to.

    With several orders, or too many kinds of positions, each event is counted as often as at its worst position.
    """
    whole: Counter[Event] = Counter()
    orders: dict[str, list[tuple[Block, Event, int]]] = {}
    for (event, block, name), count in held.items():
        if name not in ("", silo) or not count:
            continue
        if block is None:
            whole[event] += count
        else:
            orders.setdefault(block.order, []).append((block, event, count))
    each = [_positions(blocks) for blocks in orders.values()]
    if len(each) == 1 and len(each[0]) <= LIMITS[1]:
        return [+(whole + read) for read in each[0]]
    for kinds in each:
        most: Counter[Event] = Counter()
        for kind in kinds:
            most |= kind
        whole += most
    return [+whole]


def _positions(blocks: list[tuple[Block, Event, int]]) -> list[Counter[Event]]:
    """Return the different multisets of events that read a position of the records' public order."""
    steps: dict[int, Counter[Event]] = {}
    for block, event, count in blocks:
        steps.setdefault(block.start, Counter())[event] += count
        steps.setdefault(block.stop, Counter())[event] -= count
    here: Counter[Event] = Counter()
    found: dict[frozenset[tuple[Event, int]], Counter[Event]] = {}
    for position in sorted(steps):
        here.update(steps[position])
        here = +here
        found.setdefault(frozenset(here.items()), here.copy())
    return list(found.values())


# ---- lines
@dataclass(frozen=True)
class LimitEntry:
    """Ledger line that sets the limit of a data set."""

    dataset: str
    limit: Limit
    at: str


@dataclass(frozen=True)
class RunEntry:
    """Ledger line that admits a run and charges `items` at once; a later line of the same run replaces it.

    `items` cover the first message of `jobs` jobs; any other message, and any repeated message, is charged separately.
    """

    dataset: str
    run: str
    unit: Protected
    relation: Relation
    items: tuple[Item, ...]
    jobs: int
    plan: str  # hash of the plan that the run was admitted with
    at: str
    chain: str = ""  # head of the run folder's charge log at admission; empty: the run has no charge log
    project: str = ""  # name that the federation's file gives, for readers of the ledger; nothing depends on it


@dataclass(frozen=True)
class JobEntry:
    """Ledger line that charges one message before its noise is drawn; no items: the charge at admission covers it."""

    dataset: str
    run: str
    job: str
    items: tuple[Item, ...]
    at: str
    round: int | None = None  # from 0, where the job has one; a round in two jobs was run twice


@dataclass(frozen=True)
class RoundEntry:
    """Ledger line that records one release of a run that was charged at admission, before its noise is drawn.

    It adds no cost. These lines show which rounds any copy of the run's folder has released.
    """

    dataset: str
    run: str
    round: int  # from 1; 0: histograms of columns, released before the first round
    head: str  # of the run folder's charge log, this charge included
    at: str


@dataclass(frozen=True)
class RestoreEntry:
    """Ledger line that says that a backup replaced a ledger with more lines, whose charges are unknown."""

    at: str
    lost: int | None = None  # number of lost lines by the head file; None: unknown
    dataset: str = ""  # always empty: the line is about all data sets


Entry = LimitEntry | RunEntry | JobEntry | RoundEntry | RestoreEntry
_LINES: dict[str, type[Entry]] = {
    "limit": LimitEntry, "run": RunEntry, "job": JobEntry, "round": RoundEntry, "restored": RestoreEntry,
}  # fmt: skip


def name_of(entry: Entry) -> str:
    return next(name for name, kind in _LINES.items() if isinstance(entry, kind))


def to_json(entry: Entry) -> str:
    return codec.to_json({"line": name_of(entry), **codec.dump(entry)})


def parse(body: str) -> Entry:
    """Parse a ledger line that `to_json` wrote; equal items of many lines are parsed once."""
    table = json.loads(body)
    kind = _LINES[table.pop("line")]
    if "items" in table:
        table["items"] = _items(json.dumps(table["items"]))
    found: Entry = codec.read(kind, table, "line")
    return found


@lru_cache(maxsize=1024)
def _items(text: str) -> tuple[Item, ...]:
    found: tuple[Item, ...] = codec.read(tuple[Item, ...], json.loads(text), "items")
    return found


# ---- accounts
@dataclass
class Run:
    """Run in an account, with its admission line, its charges, its jobs and its recorded releases."""

    line: RunEntry
    whole: Total  # charged at admission
    single: Total = field(default_factory=Counter)  # charged message by message
    jobs: Counter[str] = field(default_factory=Counter)
    released: list[RoundEntry] = field(default_factory=list)
    rounds: set[int] = field(default_factory=set)  # of its jobs

    @property
    def charged(self) -> Total:
        return self.whole + self.single

    def covers(self, job: str, round: int | None = None) -> bool:
        """Return whether the charge at admission covers the next message of a job; it covers no repeated round."""
        return job not in self.jobs and round not in self.rounds and len(self.jobs) < self.line.jobs


@dataclass
class Account:
    """Account of one data set: its limit, its runs, and the charges of all runs."""

    limit: Limit
    charged: Total = field(default_factory=Counter)
    runs: dict[str, Run] = field(default_factory=dict)
    restored: RestoreEntry | None = None  # lines were lost, and the limit was not lowered since

    def admit(self, line: RunEntry) -> None:
        """Replace the admission line of a run by a line that does not charge less."""
        run = self.runs.setdefault(line.run, Run(line, Counter()))
        self.charged = self.charged - run.whole + total(line.items)
        run.line, run.whole = line, total(line.items)

    def charge(self, line: JobEntry) -> None:
        run = self.runs[line.run]
        self.charged.update(total(line.items))
        run.single.update(total(line.items))
        run.jobs[line.job] += 1
        run.rounds |= set() if line.round is None else {line.round}

    def merged(self, line: RunEntry) -> RunEntry:
        """Return a run's new admission line, raised to its earlier charge; refuse another plan, unit or relation."""
        if line.run not in self.runs:
            return line
        before = self.runs[line.run].line
        if (before.unit, before.relation, before.plan) != (line.unit, line.relation, line.plan):
            asked = f"plan {line.plan[:12]}, one {line.unit}, {line.relation}"
            found = f"a second admission of the run {brief_repr(line.run)}, with {asked}"
            needed = f"plan {before.plan[:12]}, one {before.unit}, {before.relation}, as this run was admitted"
            raise ConfigError(found, needed, "choose another name for the run")
        both = total(before.items) | total(line.items)
        merged = replace(line, items=items(both), jobs=max(before.jobs, line.jobs), chain=line.chain or before.chain)
        same = (both, merged.jobs, merged.chain) == (total(before.items), before.jobs, before.chain)
        return before if same else merged


def take(accounts: dict[str, Account], entry: Entry) -> None:
    """Add one ledger line to the accounts; raise KeyError if the line's data set or run is unknown."""
    match entry:
        case LimitEntry():
            account = accounts.setdefault(entry.dataset, Account(entry.limit))
            account.limit, account.restored = entry.limit, None
        case RunEntry():
            accounts[entry.dataset].admit(entry)
        case JobEntry():
            accounts[entry.dataset].charge(entry)
        case RoundEntry():
            accounts[entry.dataset].runs[entry.run].released.append(entry)
        case RestoreEntry():
            for account in accounts.values():
                account.restored = entry


def running_epsilons(history: Sequence[Entry]) -> list[float | None]:
    """Return, for each line of one data set, epsilon of all charges up to it; None where the line changes nothing."""
    accounts: dict[str, Account] = {}
    found: list[float | None] = []
    for entry in history:
        take(accounts, entry)
        charges = isinstance(entry, RunEntry | JobEntry) and bool(entry.items)
        account = accounts.get(entry.dataset)
        found.append(account.limit.epsilon_of(account.charged) if charges and account is not None else None)
    return found
