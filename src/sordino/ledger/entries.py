"""The lines of a ledger, and their sum: an account for every data set.

A line is data, written by the codec as JSON (`journal` keeps them in order); an account is what all lines of a data set
come to. Nothing here touches a file.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache

from sordino import codec
from sordino.accounting.bounds import Unit
from sordino.accounting.events import Relation
from sordino.errors import ConfigError, brief_repr
from sordino.ledger.totals import Item, Limit, Total, items, total


@dataclass(frozen=True)
class LimitEntry:
    """The operator sets what a data set may spend."""

    dataset: str
    limit: Limit
    at: str


@dataclass(frozen=True)
class RunEntry:
    """A run on a data set. `items` are charged whole, now; a later line of the same run stands for all of it.

    `jobs` of its messages are covered by them; every other, and every one that is drawn again, is charged by itself.
    """

    dataset: str
    run: str
    unit: Unit
    relation: Relation
    items: tuple[Item, ...]
    jobs: int
    plan: str  # its hash: a run is admitted for one plan
    at: str
    chain: str = ""  # head of the run folder's chain of charges when it was admitted; empty: it has none


@dataclass(frozen=True)
class JobEntry:
    """One message of a run, before its noise is drawn; no items: the run was charged for it."""

    dataset: str
    run: str
    job: str
    items: tuple[Item, ...]
    at: str
    round: int | None = None  # from 0, where the job has one: the same round in another job was run again


@dataclass(frozen=True)
class RoundEntry:
    """One release of a run that was charged whole, noted before its noise is drawn; it costs nothing more.

    So the ledger knows which rounds were released, whichever copy of the run's folder they were released from.
    """

    dataset: str
    run: str
    round: int  # from 1; 0: what the plan releases of columns before the first round
    head: str  # of the run folder's chain, with this charge
    at: str


@dataclass(frozen=True)
class RestoreEntry:
    """A backup was put in the place of a ledger that held more: what was charged since is not known."""

    at: str
    lost: int | None = None  # lines, by the head file that was found; None: nobody knows
    dataset: str = ""  # all of them


Entry = LimitEntry | RunEntry | JobEntry | RoundEntry | RestoreEntry
_LINES: dict[str, type[Entry]] = {
    "limit": LimitEntry, "run": RunEntry, "job": JobEntry, "round": RoundEntry, "restored": RestoreEntry,
}  # fmt: skip


def name_of(entry: Entry) -> str:
    """Which sort of line it is."""
    return next(name for name, kind in _LINES.items() if isinstance(entry, kind))


def to_json(entry: Entry) -> str:
    """A line as JSON."""
    return codec.to_json({"line": name_of(entry), **codec.dump(entry)})


def parse(body: str) -> Entry:
    """A line as this program writes it; items that are the same in many lines are read once."""
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


@dataclass
class Run:
    """A run: its line, what it was charged whole, and what its jobs were charged, and how often each."""

    line: RunEntry
    whole: Total
    single: Total = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)
    released: list[RoundEntry] = field(default_factory=list)
    rounds: set[int] = field(default_factory=set)  # of its jobs

    @property
    def charged(self) -> Total:
        """All that this run was charged."""
        return self.whole + self.single

    def covers(self, job: str, round: int | None = None) -> bool:
        """Whether the run's whole charge covers the next message of a job: never one of a round again."""
        return job not in self.jobs and round not in self.rounds and len(self.jobs) < self.line.jobs


@dataclass
class Account:
    """One data set: its limit, its runs, and all that they have spent."""

    limit: Limit
    charged: Total = field(default_factory=Counter)
    runs: dict[str, Run] = field(default_factory=dict)
    restored: RestoreEntry | None = None  # lines were lost, and nobody has lowered the limit since

    def admit(self, line: RunEntry) -> None:
        """The line stands in the place of the run's line before, which is never more."""
        run = self.runs.setdefault(line.run, Run(line, Counter()))
        self.charged = self.charged - run.whole + total(line.items)
        run.line, run.whole = line, total(line.items)

    def charge(self, line: JobEntry) -> None:
        """One message."""
        run = self.runs[line.run]
        self.charged.update(total(line.items))
        run.single.update(total(line.items))
        run.jobs[line.job] += 1
        run.rounds |= set() if line.round is None else {line.round}

    def merged(self, line: RunEntry) -> RunEntry:
        """The line, with no less than the run was charged whole before."""
        if line.run not in self.runs:
            return line
        before = self.runs[line.run].line
        if (before.unit, before.relation, before.plan) != (line.unit, line.relation, line.plan):
            asked = f"plan {line.plan[:12]}, one {line.unit}, {line.relation}"
            found = f"the run {brief_repr(line.run)} again, with {asked}"
            needed = f"plan {before.plan[:12]}, one {before.unit}, {before.relation}, as it was admitted"
            raise ConfigError(found, needed, "give it a name of its own")
        both = total(before.items) | total(line.items)
        merged = replace(line, items=items(both), jobs=max(before.jobs, line.jobs), chain=line.chain or before.chain)
        same = (both, merged.jobs, merged.chain) == (total(before.items), before.jobs, before.chain)
        return before if same else merged

    def with_all(self, run: str, asked: Total) -> Total:
        """Everything spent, if the run came to no less than it asks for."""
        charged = self.runs[run].charged if run in self.runs else Counter()
        return self.charged - charged + (charged | asked)


@dataclass
class Accounts:
    """All data sets of a ledger."""

    of: dict[str, Account] = field(default_factory=dict)

    def take(self, entry: Entry) -> None:
        """One more line; KeyError if it speaks of what was never entered."""
        match entry:
            case LimitEntry():
                account = self.of.setdefault(entry.dataset, Account(entry.limit))
                account.limit, account.restored = entry.limit, None
            case RunEntry():
                self.of[entry.dataset].admit(entry)
            case JobEntry():
                self.of[entry.dataset].charge(entry)
            case RoundEntry():
                self.of[entry.dataset].runs[entry.run].released.append(entry)
            case RestoreEntry():
                for account in self.of.values():
                    account.restored = entry

    def run(self, name: str) -> Account | None:
        """The account that a run is charged to."""
        return next((account for account in self.of.values() if name in account.runs), None)

    def whose(self, job: str) -> str | None:
        """The run that a job was charged for."""
        runs = (found for account in self.of.values() for found in account.runs.items())
        return next((name for name, run in runs if job in run.jobs), None)
