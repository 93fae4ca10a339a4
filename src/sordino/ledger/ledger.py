"""Ledger of data sets: records the charges of all runs, and refuses a charge that would exceed a data set's limit.

Order of a release: charge (one transaction that composes all earlier charges with the new event, and refuses the charge
or writes it), draw the noise, store the message, send the message. A repeated job gets the stored bytes and costs
nothing; a job whose message was not stored is charged again, since new noise is drawn.

A data set is named by its operator, never by a hash of its content: a neighbouring data set would get a fresh budget.
Lines have events, not epsilons: events are composed anew each time (`totals`), from an append-only file (`journal`).
Called by runs, DP-SGD loops, silos and `sordino ledger`.

Guarantee: even if processes are killed at any time and many write at once, all releases of a data set compose to at
most its limit. This holds if the settings of later runs are fixed beforehand or, if all events are Gaussian, also if
they depend on earlier releases (Smith, Thakurta 2022: fully adaptive composition, Gaussian privacy).

A backup is a snapshot of the database by SQLite's own backup, marked so that nothing is charged to it. `restore`
replaces a ledger by a backup and compares it with the ledger's head file: if lines are missing, or the number of
missing lines is unknown, it appends a `RestoreEntry`, and no charge is accepted before every limit has been lowered.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sordino import codec
from sordino.accounting.bounds import Protected
from sordino.accounting.events import Relation
from sordino.accounting.rounding import upto
from sordino.codec import durable_files
from sordino.errors import BudgetError, ConfigError, StorageError, brief_repr
from sordino.ledger import journal as journals
from sordino.ledger import totals
from sordino.ledger.journal import BACKUP, FORMAT, FREE, MARK, Head, HeadFile, Journal, connect
from sordino.ledger.totals import Account, Entry, Item, Limit, RestoreEntry, RoundEntry, RunEntry, Statement, total

WAIT = 30.0  # seconds to wait for a ledger that another process has locked
LONGEST = 200  # characters of a name


@dataclass(frozen=True)
class Receipt:
    """Receipt of a charge, with which a job may draw its noise.

    If `message` is not None, the job was charged before, and its stored message is sent again at no cost.
    """

    run: str
    job: str
    charge: int  # the line of the ledger
    message: bytes | None = None


@dataclass(frozen=True)
class Request:
    """Request of a run to be charged to a data set: events whose cost is for one `unit` under one `relation`.

    `plan` is the hash of the run's plan; a second request of the same run must have the same plan.
    """

    unit: Protected
    relation: Relation
    items: tuple[Item, ...]
    plan: str = ""


class Ledger:
    """Ledger of data sets in one file; each method is one atomic transaction."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._accounts: dict[str, Account] = {}  # by data set

    @classmethod
    def open(cls, path: Path, *, create: bool = False, wait: float = WAIT) -> Ledger:
        """Open a ledger file and check all its lines; refuse a damaged file. `create` creates a missing file."""
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
        self.journal.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- charging
    def limit(self, name: str, limit: Limit) -> None:
        """Set, raise or lower the limit of a data set; unit and relation cannot change after a run was admitted."""
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
                needed = f"one {before.unit}, {before.relation}, for which runs on this data set were admitted"
                raise ConfigError(found, needed, "use that unit and relation, or another name for the data set")
            if account is None or account.limit != limit:
                self._append(totals.LimitEntry(name, limit, _now()))

    def admit(
        self, run: str, name: str, asked: Request, *, whole: bool, jobs: int = 0, chain: str = "", released: int = 0,
        project: str = "",
    ) -> None:  # fmt: skip
        """Admit a run, or refuse it if its request and all earlier charges together exceed the data set's limit.

        With `whole` the request is charged now and covers the first message of `jobs` jobs; without `whole`, nothing is
        charged now, and each job is charged when it arrives. A run that is admitted again is charged only for what it
        requests beyond its earlier charge. `chain` is the last hash of the run folder's charge log, and `released` the
        number of the run's releases that the request includes.
        """
        _check_name(run, "run")
        with self._transaction(write=True):
            account = self._account(name)
            if self._find(run) not in (None, account):
                found = f"the run {brief_repr(run)} for the data set {name!r}"
                fix = "use that data set, or another name for the run"
                raise ConfigError(found, "the data set to which this run was first charged", fix)
            now, count = (asked.items, jobs) if whole else ((), 0)
            line = RunEntry(name, run, asked.unit, asked.relation, now, count, asked.plan, _now(), chain, project)
            line, known = account.merged(line), run in account.runs
            self._check_alone(run, len(account.runs[run].released) if known else 0, released)
            if known and whole and line is account.runs[run].line:
                return  # charged already
            charged = account.runs[run].charged if known else totals.Total()
            most = charged | total(asked.items) | total(line.items)
            self._check_limit(account, line, account.charged - charged + most)
            if not known or line is not account.runs[run].line:
                self._append(line)

    def consider(self, name: str, asked: Request) -> None:
        """Refuse a request that exceeds the data set's remaining budget; nothing is charged."""
        with self._transaction(write=False):
            line = RunEntry(name, "", asked.unit, asked.relation, (), 0, asked.plan, "")
            account = self._account(name)
            self._check_limit(account, line, account.charged + total(asked.items))

    def released(self, run: str) -> tuple[list[RoundEntry], bool]:
        """Return the recorded releases of a run, and whether they include its first one.

        Only runs that were charged at admission have recorded releases.
        """
        with self._transaction(write=False):
            account = self._find(run)
            if account is None:
                return [], False
            return list(account.runs[run].released), bool(account.runs[run].line.chain)

    def note_release(self, run: str, number: int, head: str, released: int) -> None:
        """Record a release of round `number` (from 1), after `released` others, before its noise is drawn.

        Guarantee: every release of a run was charged, also if the run's folder was copied. A copy that is admitted
        after k releases is charged for those k and for all that this copy will release; the next release of any other
        copy is then refused, since that copy expects fewer than the ledger has.
        """
        with self._transaction(write=True):
            account = self._account_of(run)
            self._check_alone(run, len(account.runs[run].released), released)
            self._append(RoundEntry(account.runs[run].line.dataset, run, number, head, _now()))

    def _check_alone(self, run: str, found: int, known: int) -> None:
        if found != known:
            raise ConfigError(
                f"{found} releases of the run {brief_repr(run)} in the ledger {self.path}, and {known} in its folder",
                "equal numbers; another copy of the run's folder has released rounds meanwhile",
                "continue with --resume, which charges for the releases of both copies; this round was not released",
            )

    def charge_at_least(self, run: str, spent: tuple[Item, ...]) -> None:
        """Raise a run's charge to at least `spent`, even beyond the limit, since these releases have happened."""
        with self._transaction(write=True):
            account = self._account_of(run)
            before = account.runs[run].line
            line = account.merged(replace(before, items=spent, at=_now()))
            if line is not before:
                self._append(line)

    def charge(self, run: str, job: str, asked: tuple[Item, ...], *, round: int | None = None) -> Receipt:
        """Charge one message before its noise is drawn; refuse it if all charges together would exceed the limit.

        A charge at admission covers one job of each `round`; a second job of the same round is charged.
        """
        _check_name(job, "job")
        with self._transaction(write=True):
            account = self._account_of(run)
            if self._run_of(job) not in (None, run):
                found = f"the job {brief_repr(job)} of the run {brief_repr(run)}"
                raise ConfigError(found, "a job name that no other run has used", "choose another name for the job")
            stored = self.journal.message(job)
            if stored is not None:
                return Receipt(run, job, *stored)
            entered = account.runs[run]
            if entered.covers(job, round):
                asked = ()
            else:
                self._check_limit(account, entered.line, account.charged + total(asked))
            self._append(totals.JobEntry(entered.line.dataset, run, job, asked, _now(), round))
            return Receipt(run, job, self.journal.head.lines)

    def store(self, receipt: Receipt, message: bytes) -> bytes:
        """Store the message of a charged job before it is sent; return the first message stored for that job."""
        with self._transaction(write=True):
            stored = self.journal.message(receipt.job)
            if stored is not None:
                return stored[1]
            if self._run_of(receipt.job) != receipt.run:
                found = f"a message of the job {brief_repr(receipt.job)}"
                raise ConfigError(found, "a job that was charged", "charge the job first")
            self.journal.store(receipt.job, receipt.run, receipt.charge, message)
            return message

    # ---- reading
    def replay(self, job: str) -> bytes | None:
        """Return the stored message of a job; None if there is none."""
        with self.journal.transaction(write=False):
            stored = self.journal.message(job)
            return None if stored is None else stored[1]

    @property
    def names(self) -> list[str]:
        """Names of all data sets with a limit."""
        with self._transaction(write=False):
            return sorted(self._accounts)

    def statement(self, name: str = "", *, run: str = "") -> Statement:
        """Return the statement on the data set `name`, or on the data set of `run` with the run's own charges."""
        with self._transaction(write=False):
            account, head = self._account_of(run) if run else self._account(name), self.journal.head
            charged = (len(account.runs), head.lines, head.digest, totals.items(account.charged))
            if run:
                entered = account.runs[run]
                return Statement(entered.line.dataset, account.limit, *charged, totals.items(entered.charged))
            jobs = sum(one.jobs.total() for one in account.runs.values())
            return Statement(name, account.limit, *charged, charges=jobs, restored=account.restored)

    def charges(self, run: str) -> dict[str, int]:
        """Return the number of charges of each job of a run, by the job's name."""
        with self._transaction(write=False):
            return dict(self._account_of(run).runs[run].jobs)

    def history(self, name: str) -> list[Entry]:
        """Return all lines of a data set in the order in which they were written."""
        with self._transaction(write=False):
            self._account(name)
            found = [totals.parse(body) for body in self.journal.lines()]
        return [entry for entry in found if entry.dataset == name or isinstance(entry, RestoreEntry)]

    # ---- within a transaction
    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[None]:
        """Open a transaction and read the new lines; after an error the next transaction reads the whole file."""
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
            fix = codec.nearest(name, sorted(known)) if known else f"run: sordino ledger limit {self.path} {name} ..."
            found = f"the data set {brief_repr(name)}, which has no limit in the ledger {self.path}"
            raise ConfigError(found, "a data set that has a limit", fix)
        return known[name]

    def _find(self, run: str) -> Account | None:
        return next((account for account in self._accounts.values() if run in account.runs), None)

    def _account_of(self, run: str) -> Account:
        found = self._find(run)
        if found is None:
            unknown = f"the run {brief_repr(run)}, which is not in the ledger {self.path}"
            raise ConfigError(unknown, "a run that was admitted to this ledger", "correct the name of the run")
        return found

    def _run_of(self, job: str) -> str | None:
        runs = (found for account in self._accounts.values() for found in account.runs.items())
        return next((name for name, run in runs if job in run.jobs), None)

    def _check_limit(self, account: Account, line: RunEntry, needed: totals.Total) -> None:
        """Refuse total charges `needed` above the limit, and a line with another unit or relation than the limit."""
        limit, name = account.limit, line.dataset
        if account.restored is not None:
            raise self._lines_lost(name, account, account.restored)
        reason = limit.mismatch(line.unit, line.relation)
        if reason is not None:
            found = f"a charge to the data set {name!r} in {self.path}: {reason}"
            fix = "change the plan, or set a limit for its unit and relation on another name"
            raise ConfigError(found, "a charge with the unit and relation of the limit", fix)
        beyond = limit.beyond(needed)
        if beyond is not None:
            raise BudgetError(
                f"the data set {name!r} would have spent epsilon {upto(beyond, 4)} with this charge, and its limit is "
                f"{upto(limit.epsilon, 6)} at delta {upto(limit.delta)}; nothing was charged to {self.path}; fix: plan "
                "fewer rounds or more noise, or raise the limit (sordino ledger limit)"
            )

    def _lines_lost(self, name: str, account: Account, restored: RestoreEntry) -> ConfigError:
        lines = "an unknown number of" if restored.lost is None else str(restored.lost)
        found = f"the data set {name!r} in a ledger restored on {restored.at[:10]} without {lines} of its lines"
        needed = f"a limit below epsilon {upto(account.limit.epsilon, 6)}, lowered by the possible cost of those lines"
        return ConfigError(found, needed, f"run: sordino ledger limit {self.path} {name} --epsilon ...")

    # ---- backups
    def backup(self, target: Path) -> Head:
        """Copy a snapshot of the ledger (charges and messages) to a new file; return the head of the copy."""
        if target.exists():
            raise ConfigError(f"{target}, which exists already", "a new file for the backup", "choose another name")
        with _partial_copy(target) as partial:
            with self._transaction(write=False):
                self.journal.copy_to(partial)
            head = _finish_copy(partial, BACKUP)
            os.link(partial, target)
            durable_files.sync(target.parent)
        return head


def restore(source: Path, target: Path) -> int | None:
    """Replace the ledger `target` by the backup `source`; return the number of lost lines, None if it is unknown.

    The database is replaced before the head file, so that after a kill in between the ledger is refused until the next
    restore.
    """
    if target.exists():
        try:
            Ledger.open(target).close()
        except StorageError as error:
            if error.needed == FREE:
                raise
        else:
            found = f"the ledger {target}, which is not damaged"
            raise ConfigError(found, "a ledger that is missing, damaged or old", "use the ledger without a restore")
    try:
        noted = HeadFile.of(target).read()
    except StorageError:  # a damaged head file does not say how many lines there were
        noted = None
    with _partial_copy(target) as partial:
        needed, fix = "a file that 'sordino ledger backup' has written", "pass the path of a backup"
        if not source.is_file():
            raise StorageError(f"the backup {source}, which is not a file", needed, fix)
        with closing(connect(source, WAIT)) as database, closing(connect(partial, WAIT)) as copy:
            if journals.marks(database) not in ((BACKUP, FORMAT), (MARK, FORMAT)):
                raise StorageError(f"{source}, which is not a backup", needed, fix)
            database.backup(copy)
        lost = _count_missing_lines(partial, noted)
        head = _finish_copy(partial, MARK, None if lost == 0 else RestoreEntry(_now(), lost))
        os.replace(partial, target)
        durable_files.sync(target.parent)
        HeadFile.of(target).replace(head, stat.S_IMODE(target.stat().st_mode))
    return lost


def _count_missing_lines(copy: Path, noted: Head | None) -> int | None:
    head = _finish_copy(copy)
    if noted is None:
        return None
    with closing(connect(copy, WAIT)) as database:
        row = database.execute("SELECT digest FROM entries WHERE id = ?", (noted.lines,)).fetchone()
    if noted.lines == 0 or (row is not None and row[0] == noted.digest):
        return 0
    return noted.lines - head.lines if noted.lines > head.lines else None


def _finish_copy(copy: Path, mark: int | None = None, entry: Entry | None = None) -> Head:
    """Check all lines of a copied database, append `entry`, set the application_id to `mark`; return the head."""
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
    """Yield a temporary file beside `target`; errors of SQLite and of the disk become `StorageError`."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
        os.close(descriptor)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        found = f"a copy for {target} that is not a whole ledger ({str(error)[:100]})"
        raise StorageError(found, "an undamaged ledger, or a backup of one", "use another backup") from None
    except OSError as error:
        found = f"{target}, which cannot be written ({error.strerror})"
        raise StorageError(found, "a writable folder", "correct the path, or its permissions") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _check_name(name: str, what: str) -> None:
    if not (name.isprintable() and name == name.strip() and 1 <= len(name) <= LONGEST):
        needed = f"1 to {LONGEST} printable characters, without blanks at its ends"
        raise ConfigError(f"{brief_repr(name)} as the name of a {what}", needed, "choose another name")
