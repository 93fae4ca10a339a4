"""The ledger of a data set: events charged by all runs, and a refusal where the next release exceeds its limit.

Order of a release: charge (one immediate transaction: compose all that was charged with the new event, refuse or
write), then noise, then the message is stored, then it is sent. The same job again gets the same bytes and costs
nothing; a job that was charged and whose message was not stored is charged again, since other noise is drawn.

A data set is named by its operator, never by its content: a neighbour would get a fresh budget. What is written down
are events, not epsilons: they are composed anew each time (`totals`), in a file that only grows (`journal`). Called by
runs, DP-SGD loops, silos and `sordino ledger`.

Guarantee: whatever is killed when, and however many processes race, all that was ever released of a data set composes
to at most its limit. That holds for the settings of later runs fixed beforehand, or, where all events are Gaussian,
chosen by looking at earlier releases too (Smith, Thakurta 2022: fully adaptive composition for Gaussian privacy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sordino import codec
from sordino.accounting.bounds import Unit
from sordino.accounting.events import Relation
from sordino.accounting.rounding import upto
from sordino.errors import BudgetError, ConfigError, brief_repr
from sordino.ledger import entries
from sordino.ledger.entries import Account, Accounts, Entry, JobEntry, LimitEntry, RestoreEntry, RoundEntry, RunEntry
from sordino.ledger.head_file import ROOT
from sordino.ledger.journal import Journal
from sordino.ledger.totals import Item, Limit, Standing, Total, items, total

WAIT = 30.0  # seconds until a ledger that others write to is given up
LONGEST = 200  # characters of a name


@dataclass(frozen=True)
class Receipt:
    """Receipt of a charge: the job may draw its noise; with a `message`, it was answered before and costs nothing."""

    run: str
    job: str
    charge: int  # the line of the ledger
    message: bytes | None = None


@dataclass(frozen=True)
class Statement:
    """Statement of one data set: epsilon of all charges at the limit's delta, under its relation."""

    dataset: str
    limit: Limit
    epsilon: float
    runs: int
    charges: int
    items: tuple[Item, ...]
    lines: int  # of the ledger, up to here
    digest: str  # of the last of them
    restored: RestoreEntry | None = None  # lines were lost, and nothing is charged before its limit is lowered


@dataclass(frozen=True)
class Request:
    """Request of a run to a data set: events for one `unit`, proved when neighbours differ by `relation`.

    `plan` is the hash of its plan: who asks again under the name of the same run must ask for the same plan.
    """

    unit: Unit
    relation: Relation
    items: tuple[Item, ...]
    plan: str = ""


class Ledger:
    """A ledger file: every method is one transaction, whole or without effect."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self._accounts = journal, Accounts()

    @classmethod
    def open(cls, path: Path, *, create: bool = False, wait: float = WAIT) -> Ledger:
        """The ledger in a file; made if it is missing and `create` says so. A damaged one is refused."""
        found = cls(Journal(Path(path), wait, create))
        try:
            with found._looking():
                return found
        except BaseException:
            found.close()
            raise

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.journal.path

    def close(self) -> None:
        """Nothing is lost by not calling it."""
        self.journal.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what may be spent, and what is ------------------------------------------------------------------------------

    def limit(self, name: str, limit: Limit) -> None:
        """Set, raise or lower what a data set may spend; its unit and relation stay once something was spent."""
        _named(name, "data set")
        with self._writing():
            account = self._accounts.of.get(name)
            if account is not None and account.restored is not None:
                was = account.limit
                if not (limit.epsilon < was.epsilon and limit.delta <= was.delta):
                    raise self._lost(name, account, account.restored)
            before = limit if account is None or not account.runs else account.limit
            if (before.unit, before.relation) != (limit.unit, limit.relation):
                found = f"a limit for one {limit.unit}, {limit.relation}, on {name!r}"
                needed = f"one {before.unit}, {before.relation}: what runs on it was admitted for that"
                raise ConfigError(found, needed, "give those, or another name")
            if account is None or account.limit != limit:
                self._append(LimitEntry(name, limit, _now()))

    def admit(
        self, run: str, name: str, asked: Request, *, whole: bool, jobs: int = 0, chain: str = "", released: int = 0
    ) -> None:
        """Admit a run: refused if the data set has no budget for all that it asks for beside what is spent.

        `whole`: it is charged now, which covers the first message of `jobs` jobs; else nothing is set aside, and each
        job is charged by itself. The same run again is charged only for what it asks for beyond what it was charged.
        `chain` is the head of the run folder's chain of charges; `released`, how many releases of the run what it asks
        for was computed with.
        """
        _named(run, "run")
        with self._writing():
            account = self._account(name)
            if self._accounts.run(run) not in (None, account):
                found = f"the run {brief_repr(run)} again, on {name!r}"
                raise ConfigError(found, "the data set that it was admitted to")
            now, count = (asked.items, jobs) if whole else ((), 0)
            line = RunEntry(name, run, asked.unit, asked.relation, now, count, asked.plan, _now(), chain)
            line, known = account.merged(line), run in account.runs
            self._check_alone(run, len(account.runs[run].released) if known else 0, released)
            if known and whole and line is account.runs[run].line:
                return  # charged already
            self._afford(account, line, account.with_all(run, total(asked.items) | total(line.items)))
            if not known or line is not account.runs[run].line:
                self._append(line)

    def consider(self, name: str, asked: Request) -> None:
        """Refuse what the data set has no budget for now; nothing is charged and nothing set aside."""
        with self._looking():
            line = RunEntry(name, "", asked.unit, asked.relation, (), 0, asked.plan, "")
            account = self._account(name)
            self._afford(account, line, account.charged + total(asked.items))

    def released(self, run: str) -> tuple[list[RoundEntry], bool]:
        """The releases of a run that was charged whole; and whether all of them were noted, from the first."""
        with self._looking():
            account = self._accounts.run(run)
            if account is None:
                return [], False
            return list(account.runs[run].released), bool(account.runs[run].line.chain)

    def note_release(self, run: str, number: int, head: str, released: int) -> None:
        """Note a release of round `number` (from 1) before its noise is drawn, after `released` others of this run.

        Guarantee: releases of one run, from however many copies of its folder, are noted one after the other. Who was
        admitted when there were k of them was charged for those and for all that it will release itself; it may go on
        only as long as nobody else has. So all that was released was charged.
        """
        with self._writing():
            account = self._of_run(run)
            self._check_alone(run, len(account.runs[run].released), released)
            self._append(RoundEntry(account.runs[run].line.dataset, run, number, head, _now()))

    def _check_alone(self, run: str, found: int, known: int) -> None:
        if found != known:
            raise ConfigError(
                f"{found} releases of the run {brief_repr(run)} in the ledger {self.path}, {known} in its folder",
                "one folder for a run: another copy of it has gone on meanwhile",
                "nothing of this round was released; --resume charges for what both have released",
            )

    def charge_at_least(self, run: str, spent: tuple[Item, ...]) -> None:
        """What a run has cost after all, where that is more than it was charged: written down whatever the limit."""
        with self._writing():
            account = self._of_run(run)
            before = account.runs[run].line
            line = account.merged(replace(before, items=spent, at=_now()))
            if line is not before:
                self._append(line)

    def charge(self, run: str, job: str, asked: tuple[Item, ...], *, round: int | None = None) -> Receipt:
        """Charge one message before its noise is drawn: one transaction that composes, refuses or writes.

        A run that was charged whole was charged for one job of each `round`; another job of the same is charged by
        itself.
        """
        _named(job, "job")
        with self._writing():
            account = self._of_run(run)
            if self._accounts.whose(job) not in (None, run):
                found = f"the job {brief_repr(job)} of the run {brief_repr(run)}"
                raise ConfigError(found, "one that no other run has had")
            stored = self.journal.message(job)
            if stored is not None:
                return Receipt(run, job, *stored)
            entered = account.runs[run]
            covered = entered.covers(job, round)
            items_now = () if covered else asked
            if not covered:
                self._afford(account, entered.line, account.charged + total(items_now))
            self._append(JobEntry(entered.line.dataset, run, job, items_now, _now(), round))
            return Receipt(run, job, self.journal.read)

    def store(self, receipt: Receipt, message: bytes) -> bytes:
        """Keep a message before it is sent. What comes back is to be sent: the first that was kept for the job."""
        with self._writing():
            stored = self.journal.message(receipt.job)
            if stored is not None:
                return stored[1]
            if self._accounts.whose(receipt.job) != receipt.run:
                raise ConfigError(f"a message of the job {brief_repr(receipt.job)}", "a job that was charged")
            self.journal.keep(receipt.job, receipt.run, receipt.charge, message)
            return message

    def release(self, run: str, job: str, asked: tuple[Item, ...], make: Callable[[], bytes]) -> bytes:
        """The bytes that may be sent for a job: charged, then made, then stored; or those that were stored before."""
        receipt = self.charge(run, job, asked)
        return self.store(receipt, make()) if receipt.message is None else receipt.message

    def replay(self, job: str) -> bytes | None:
        """The message that was stored for a job."""
        with self.journal.looking():
            stored = self.journal.message(job)
            return None if stored is None else stored[1]

    # ---- what is written down ----------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The data sets."""
        with self._looking():
            return sorted(self._accounts.of)

    def statement(self, name: str) -> Statement:
        """What a data set has spent in all."""
        with self._looking():
            account = self._account(name)
            limit, held, runs = account.limit, account.charged.copy(), list(account.runs.values())
            at, digest = self.journal.read, self.journal.digest
            restored = account.restored
        charges = sum(run.jobs.total() for run in runs)
        return Statement(name, limit, limit.epsilon_of(held), len(runs), charges, items(held), at, digest, restored)

    def standing(self, run: str) -> Standing:
        """The data set that a run was charged to, as it is now."""
        with self._looking():
            account = self._of_run(run)
            entered, held = account.runs[run], items(account.charged)
            at, digest = self.journal.read, self.journal.digest
            name, own = entered.line.dataset, items(entered.charged)
            return Standing(name, account.limit, len(account.runs), at, digest, held, own)

    def charges(self, run: str) -> dict[str, int]:
        """How often each job of a run was charged."""
        with self._looking():
            return dict(self._of_run(run).runs[run].jobs)

    def copy_to(self, file: Path) -> None:
        """One moment of the ledger, found whole, into another file."""
        with self._looking():
            self.journal.copy_to(file)

    def history(self, name: str) -> list[Entry]:
        """Every line of a data set, the first first."""
        with self._looking():
            self._account(name)
            found = [entries.parse(body) for body in self.journal.lines()]
        return [entry for entry in found if entry.dataset == name or isinstance(entry, RestoreEntry)]

    # ---- within a transaction ----------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._sure(), self.journal.writing():
            self.journal.follow(self._take)
            yield

    @contextmanager
    def _looking(self) -> Iterator[None]:
        with self._sure(), self.journal.looking():
            self.journal.follow(self._take)
            yield

    @contextmanager
    def _sure(self) -> Iterator[None]:
        """After a failure nothing in memory is believed: the file is read again, from its first line."""
        try:
            yield
        except BaseException:
            self._accounts, self.journal.read, self.journal.digest = Accounts(), 0, ROOT
            raise

    def _take(self, body: str) -> None:
        self._accounts.take(entries.parse(body))

    def _append(self, entry: Entry) -> None:
        self.journal.append(entries.to_json(entry))
        self.journal.follow(self._take)

    def _account(self, name: str) -> Account:
        known = self._accounts.of
        if name not in known:
            fix = codec.nearest(name, sorted(known)) if known else f"sordino ledger limit {self.path} {name} ..."
            raise ConfigError(f"the data set {brief_repr(name)} in the ledger {self.path}", "one that has a limit", fix)
        return known[name]

    def _of_run(self, run: str) -> Account:
        found = self._accounts.run(run)
        if found is None:
            raise ConfigError(f"the run {brief_repr(run)} in the ledger {self.path}", "a run that was admitted")
        return found

    def _afford(self, account: Account, line: RunEntry, needed: Total) -> None:
        """Refuse what the limit cannot bound, or does not hold."""
        limit, name = account.limit, line.dataset
        if account.restored is not None:
            raise self._lost(name, account, account.restored)
        reason = limit.mismatch(line.unit, line.relation)
        if reason is not None:
            raise ConfigError(f"a charge to {name!r} in {self.path} where {reason}", "one that the limit can bound")
        beyond = limit.beyond(needed)
        if beyond is not None:
            raise BudgetError(
                f"the data set {name!r} would have spent epsilon {upto(beyond, 4)} with this, and may spend "
                f"{upto(limit.epsilon, 6)} at delta {upto(limit.delta)}; nothing was charged to {self.path}"
            )

    def _lost(self, name: str, account: Account, restored: RestoreEntry) -> ConfigError:
        """Lines were lost: what they have spent is for the operator to say."""
        lines = "an unknown number of" if restored.lost is None else str(restored.lost)
        found = f"the data set {name!r} of a ledger that was restored on {restored.at[:10]} without {lines} last lines"
        needed = f"a limit below epsilon {upto(account.limit.epsilon, 6)}, less by what those lines may have spent"
        return ConfigError(found, needed, f"sordino ledger limit {self.path} {name} --epsilon ...")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _named(name: str, what: str) -> None:
    if not (name.isprintable() and name == name.strip() and 1 <= len(name) <= LONGEST):
        raise ConfigError(f"{brief_repr(name)} as the name of a {what}", f"1 to {LONGEST} printable characters")
