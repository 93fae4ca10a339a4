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

A backup is one moment of the database, by SQLite's own backup, marked so that nothing is charged to it. `restore` puts
it in the place of a ledger and compares it with the head file there: where lines are missing, or nobody knows, it adds
a line that says so, and nothing is charged before the operator has lowered each limit.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sordino import codec
from sordino.accounting.bounds import Unit
from sordino.accounting.events import Relation
from sordino.accounting.rounding import upto
from sordino.codec import durable_files
from sordino.errors import BudgetError, ConfigError, StorageError, brief_repr
from sordino.ledger import journal as journals
from sordino.ledger import totals
from sordino.ledger.journal import BACKUP, FORMAT, FREE, MARK, Head, HeadFile, Journal, connect
from sordino.ledger.totals import (
    Account,
    Entry,
    Item,
    JobEntry,
    Limit,
    LimitEntry,
    RestoreEntry,
    RoundEntry,
    RunEntry,
    Standing,
    Total,
    items,
    total,
)

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
    digest: str  # of the last line
    restored: RestoreEntry | None = None  # lines were lost, and nothing is charged before the limit is lowered


@dataclass(frozen=True)
class Request:
    """Request of a run to a data set: events for one `unit`, proved when neighbours differ by `relation`.

    `plan` is the hash of the run's plan: a second request under the name of the same run must be for the same plan.
    """

    unit: Unit
    relation: Relation
    items: tuple[Item, ...]
    plan: str = ""


class Ledger:
    """A ledger file: every method is one transaction, whole or without effect."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._accounts: dict[str, Account] = {}  # by data set

    @classmethod
    def open(cls, path: Path, *, create: bool = False, wait: float = WAIT) -> Ledger:
        """Open the ledger in a file, which `create` makes if it is missing; a damaged one is refused."""
        found = cls(Journal(Path(path), wait, create))
        try:
            with found._transaction(write=False):
                return found
        except BaseException:
            found.close()
            raise

    @property
    def path(self) -> Path:
        return self.journal.path

    def close(self) -> None:
        """Close the file; nothing is lost without it."""
        self.journal.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- charging
    def limit(self, name: str, limit: Limit) -> None:
        """Set, raise or lower what a data set may spend; its unit and relation stay once something was spent."""
        _check_name(name, "data set")
        with self._transaction(write=True):
            account = self._accounts.get(name)
            if account is not None and account.restored is not None:
                was = account.limit
                if not (limit.epsilon < was.epsilon and limit.delta <= was.delta):
                    raise self._lines_lost(name, account, account.restored)
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
        """Admit a run, or refuse it if the data set has no budget for all that it asks for beside what is spent.

        `whole`: it is charged now, which covers the first message of `jobs` jobs; else nothing is set aside, and each
        job is charged when it comes. The same run again is charged only for what it asks for beyond what it was
        charged. `chain` is the head of the run folder's charge log; `released`, how many releases of the run were
        counted in what it asks for.
        """
        _check_name(run, "run")
        with self._transaction(write=True):
            account = self._account(name)
            if self._find(run) not in (None, account):
                found = f"the run {brief_repr(run)} again, on {name!r}"
                raise ConfigError(found, "the data set that it was admitted to")
            now, count = (asked.items, jobs) if whole else ((), 0)
            line = RunEntry(name, run, asked.unit, asked.relation, now, count, asked.plan, _now(), chain)
            line, known = account.merged(line), run in account.runs
            self._check_alone(run, len(account.runs[run].released) if known else 0, released)
            if known and whole and line is account.runs[run].line:
                return  # charged already
            charged = account.runs[run].charged if known else Total()
            most = charged | total(asked.items) | total(line.items)
            self._check_limit(account, line, account.charged - charged + most)
            if not known or line is not account.runs[run].line:
                self._append(line)

    def consider(self, name: str, asked: Request) -> None:
        """Refuse what the data set has no budget for now; nothing is charged and nothing set aside."""
        with self._transaction(write=False):
            line = RunEntry(name, "", asked.unit, asked.relation, (), 0, asked.plan, "")
            account = self._account(name)
            self._check_limit(account, line, account.charged + total(asked.items))

    def released(self, run: str) -> tuple[list[RoundEntry], bool]:
        """Return the noted releases of a run that was charged whole, and whether all were noted, from the first."""
        with self._transaction(write=False):
            account = self._find(run)
            if account is None:
                return [], False
            return list(account.runs[run].released), bool(account.runs[run].line.chain)

    def note_release(self, run: str, number: int, head: str, released: int) -> None:
        """Note a release of round `number` (from 1) before its noise is drawn, after `released` others of this run.

        Guarantee: releases of one run, from however many copies of its folder, are noted one after the other. A copy
        that was admitted when there were k of them was charged for those and for all that it will release; it may go
        on only as long as no other copy has. So all that was released was charged.
        """
        with self._transaction(write=True):
            account = self._account_of(run)
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
        """Charge what a run has cost beyond what it was charged, whatever the limit: it was released."""
        with self._transaction(write=True):
            account = self._account_of(run)
            before = account.runs[run].line
            line = account.merged(replace(before, items=spent, at=_now()))
            if line is not before:
                self._append(line)

    def charge(self, run: str, job: str, asked: tuple[Item, ...], *, round: int | None = None) -> Receipt:
        """Charge one message before its noise is drawn: one transaction that composes, refuses or writes.

        A run that was charged whole was charged for one job of each `round`; another job of the same round is charged.
        """
        _check_name(job, "job")
        with self._transaction(write=True):
            account = self._account_of(run)
            if self._run_of(job) not in (None, run):
                found = f"the job {brief_repr(job)} of the run {brief_repr(run)}"
                raise ConfigError(found, "one that no other run has had")
            stored = self.journal.message(job)
            if stored is not None:
                return Receipt(run, job, *stored)
            entered = account.runs[run]
            if entered.covers(job, round):
                asked = ()
            else:
                self._check_limit(account, entered.line, account.charged + total(asked))
            self._append(JobEntry(entered.line.dataset, run, job, asked, _now(), round))
            return Receipt(run, job, self.journal.head.lines)

    def store(self, receipt: Receipt, message: bytes) -> bytes:
        """Store a message before it is sent; return the message to send: the first that was stored for the job."""
        with self._transaction(write=True):
            stored = self.journal.message(receipt.job)
            if stored is not None:
                return stored[1]
            if self._run_of(receipt.job) != receipt.run:
                raise ConfigError(f"a message of the job {brief_repr(receipt.job)}", "a job that was charged")
            self.journal.keep(receipt.job, receipt.run, receipt.charge, message)
            return message

    def release(self, run: str, job: str, asked: tuple[Item, ...], make: Callable[[], bytes]) -> bytes:
        """Return the bytes to send for a job: charged, then made, then stored; or those that were stored before."""
        receipt = self.charge(run, job, asked)
        return self.store(receipt, make()) if receipt.message is None else receipt.message

    # ---- reading
    def replay(self, job: str) -> bytes | None:
        """Return the message that was stored for a job."""
        with self.journal.transaction(write=False):
            stored = self.journal.message(job)
            return None if stored is None else stored[1]

    @property
    def names(self) -> list[str]:
        """Names of the data sets."""
        with self._transaction(write=False):
            return sorted(self._accounts)

    def statement(self, name: str) -> Statement:
        """Return what a data set has spent in all."""
        with self._transaction(write=False):
            account, head = self._account(name), self.journal.head
            limit, held, runs = account.limit, account.charged.copy(), list(account.runs.values())
            counts = (len(runs), sum(run.jobs.total() for run in runs), items(held))
            restored = account.restored
        return Statement(name, limit, limit.epsilon_of(held), *counts, head.lines, head.digest, restored)

    def standing(self, run: str) -> Standing:
        """Return what the data set that a run was charged to has spent, and what of it was this run's."""
        with self._transaction(write=False):
            account, head = self._account_of(run), self.journal.head
            entered, held = account.runs[run], items(account.charged)
            name, own = entered.line.dataset, items(entered.charged)
            return Standing(name, account.limit, len(account.runs), head.lines, head.digest, held, own)

    def charges(self, run: str) -> dict[str, int]:
        """Return how often each job of a run was charged."""
        with self._transaction(write=False):
            return dict(self._account_of(run).runs[run].jobs)

    def history(self, name: str) -> list[Entry]:
        """Return every line of a data set in order."""
        with self._transaction(write=False):
            self._account(name)
            found = [totals.parse(body) for body in self.journal.lines()]
        return [entry for entry in found if entry.dataset == name or isinstance(entry, RestoreEntry)]

    # ---- within a transaction
    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[None]:
        """Read the lines that are new, then do the work; after a failure the whole file is read again."""
        try:
            with self.journal.transaction(write=write):
                self.journal.follow(self._take)
                yield
        except BaseException:
            self._accounts, self.journal.head = {}, Head()
            raise

    def _take(self, body: str) -> None:
        totals.take(self._accounts, totals.parse(body))

    def _append(self, entry: Entry) -> None:
        self.journal.append(totals.to_json(entry))
        self.journal.follow(self._take)

    def _account(self, name: str) -> Account:
        known = self._accounts
        if name not in known:
            fix = codec.nearest(name, sorted(known)) if known else f"sordino ledger limit {self.path} {name} ..."
            raise ConfigError(f"the data set {brief_repr(name)} in the ledger {self.path}", "one that has a limit", fix)
        return known[name]

    def _find(self, run: str) -> Account | None:
        """Return the account that a run is charged to."""
        return next((account for account in self._accounts.values() if run in account.runs), None)

    def _account_of(self, run: str) -> Account:
        found = self._find(run)
        if found is None:
            raise ConfigError(f"the run {brief_repr(run)} in the ledger {self.path}", "a run that was admitted")
        return found

    def _run_of(self, job: str) -> str | None:
        """Return the run that a job was charged for."""
        runs = (found for account in self._accounts.values() for found in account.runs.items())
        return next((name for name, run in runs if job in run.jobs), None)

    def _check_limit(self, account: Account, line: RunEntry, needed: Total) -> None:
        """Refuse a charge that the limit cannot bound, or after which more would be spent than the limit."""
        limit, name = account.limit, line.dataset
        if account.restored is not None:
            raise self._lines_lost(name, account, account.restored)
        reason = limit.mismatch(line.unit, line.relation)
        if reason is not None:
            raise ConfigError(f"a charge to {name!r} in {self.path} where {reason}", "one that the limit can bound")
        beyond = limit.beyond(needed)
        if beyond is not None:
            raise BudgetError(
                f"the data set {name!r} would have spent epsilon {upto(beyond, 4)} with this, and may spend "
                f"{upto(limit.epsilon, 6)} at delta {upto(limit.delta)}; nothing was charged to {self.path}"
            )

    def _lines_lost(self, name: str, account: Account, restored: RestoreEntry) -> ConfigError:
        lines = "an unknown number of" if restored.lost is None else str(restored.lost)
        found = f"the data set {name!r} of a ledger that was restored on {restored.at[:10]} without {lines} last lines"
        needed = f"a limit below epsilon {upto(account.limit.epsilon, 6)}, less by what those lines may have spent"
        return ConfigError(found, needed, f"sordino ledger limit {self.path} {name} --epsilon ...")

    # ---- backups
    def backup(self, target: Path) -> Head:
        """Copy one moment of the ledger, charges and messages, to a new file; return the head of the copy."""
        if target.exists():
            raise ConfigError(f"{target}, which exists", "a new file for the backup", "choose another name")
        with _partial_copy(target) as partial:
            with self._transaction(write=False):
                self.journal.copy_to(partial)
            head = _finish_copy(partial, BACKUP)
            os.link(partial, target)
            durable_files.sync(target.parent)
        return head


def restore(source: Path, target: Path) -> int | None:
    """Put a copy of a ledger in its place; return how many lines are missing in it, None if nobody knows.

    The order is database, then head file: killed in between, the ledger is refused and `restore` is called again.
    """
    if target.exists():
        try:
            Ledger.open(target).close()
        except StorageError as error:
            if error.needed == FREE:
                raise
        else:
            found = f"the ledger {target}, which is whole"
            raise ConfigError(found, "one that is missing, damaged or old", "leave it in place")
    try:
        noted = HeadFile.of(target).read()
    except StorageError:  # damaged: nobody knows how many lines there were
        noted = None
    with _partial_copy(target) as partial:
        if not source.is_file():
            raise StorageError(f"the backup {source}, which is not a file", "a file of 'sordino ledger backup'")
        with closing(connect(source, WAIT)) as database, closing(connect(partial, WAIT)) as copy:
            if journals.marks(database) not in ((BACKUP, FORMAT), (MARK, FORMAT)):
                raise StorageError(f"{source}, which is not a backup", "a file of 'sordino ledger backup'")
            database.backup(copy)
        lost = _missing(partial, noted)
        head = _finish_copy(partial, MARK, None if lost == 0 else RestoreEntry(_now(), lost))
        os.replace(partial, target)
        durable_files.sync(target.parent)
        HeadFile.of(target).replace(head, stat.S_IMODE(target.stat().st_mode))
    return lost


def _missing(copy: Path, noted: Head | None) -> int | None:
    """Return how many lines a copy has less than the head file names; None if nobody knows."""
    head = _finish_copy(copy)
    if noted is None:
        return None
    with closing(connect(copy, WAIT)) as database:
        row = database.execute("SELECT digest FROM entries WHERE id = ?", (noted.lines,)).fetchone()
    if noted.lines == 0 or (row is not None and row[0] == noted.digest):
        return 0
    return noted.lines - head.lines if noted.lines > head.lines else None


def _finish_copy(copy: Path, mark: int | None = None, entry: Entry | None = None) -> Head:
    """Check every line of a copy, append `entry`, set its application_id to `mark`, and return its head."""
    with closing(connect(copy, WAIT)) as database:
        heads = [head for head, _ in journals.checked_lines(database, Head())]
        head = heads[-1] if heads else Head()
        database.execute("PRAGMA synchronous=EXTRA")
        if entry is not None:
            database.execute("BEGIN IMMEDIATE")
            journals.append_line(database, head, totals.to_json(entry))
            database.execute("COMMIT")
        if mark is not None:
            database.execute(f"PRAGMA application_id={mark}")
    return head if entry is None else _finish_copy(copy)


@contextmanager
def _partial_copy(target: Path) -> Iterator[Path]:
    """Make a temporary file beside `target`, removed at the end; errors of the copy become `StorageError`."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
        os.close(descriptor)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        found = f"a copy for {target} that is not a whole ledger ({str(error)[:100]})"
        raise StorageError(found, "a whole ledger, or a backup of one", "take another backup") from None
    except OSError as error:
        raise StorageError(f"{target}, which cannot be written ({error.strerror})", "a folder to write to") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _check_name(name: str, what: str) -> None:
    if not (name.isprintable() and name == name.strip() and 1 <= len(name) <= LONGEST):
        raise ConfigError(f"{brief_repr(name)} as the name of a {what}", f"1 to {LONGEST} printable characters")
