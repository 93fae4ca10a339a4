"""The files of a ledger: a SQLite database of hash-chained lines, and a head file. Called by `ledger`.

    digest_k = sha256(digest_k-1, body_k)       head = (number of lines, digest of the last)       ledger.db.head = head

Lines are only ever added. A write is one immediate transaction: it is whole or was never made, whatever is killed when.
A line that is damaged, dropped or moved breaks the chain. Committed lines are in the one file: SQLite uses a rollback
journal (never a write-ahead log, whose charges a copy of the database alone leaves out), and its removal is synced
before a charge counts. A database that is older than its head file is refused:

Order of a charge:   commit line n to the database (synced)  ->  head file says n (synced)  ->  the noise is drawn.

Claim 1, a crash never refuses a healthy ledger. The head file says n only after line n was committed, and lines are
only added. So the database holds line n with that digest at every later moment, whatever was killed in between: at most
it is ahead of the head file, by lines whose noise was not drawn or is being charged by other processes now.
Claim 2, no database is accepted that lacks a charge whose noise was drawn. That charge n was in the head file before
its noise, and the head file never goes back: writers take a lock, and write only what is greater. A database that was
copied earlier, cut or rolled back has fewer than n lines, or another digest at n, and is refused.
Both hold for every single file that is changed. Whoever rolls back the database and the head file together is not
noticed here, only by run folders and servers that have seen more.

The head file has two slots of one sector each, written in turn and in place: a write that is torn spoils the older slot
alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sordino.codec import durable_files
from sordino.errors import StorageError, UserError

FORMAT = 2
MARK = 0x536F7264  # application_id of the file
BACKUP = 0x536F7242  # application_id of a backup, which is not charged
SLOT = 512  # bytes of a slot of the head file
ROOT = hashlib.sha256(b"sordino ledger").hexdigest()
RESTORES = "bring back the newest file, or: sordino ledger restore BACKUP LEDGER"
FREE = "one that is free"
MAKES = "sordino ledger limit makes one"
_TABLES = (
    "CREATE TABLE entries (id INTEGER PRIMARY KEY, body TEXT NOT NULL, digest TEXT NOT NULL)",
    "CREATE TABLE head (one INTEGER PRIMARY KEY CHECK (one = 1), id INTEGER NOT NULL, digest TEXT NOT NULL)",
    "CREATE TABLE messages (job TEXT PRIMARY KEY, run TEXT NOT NULL, charge INTEGER NOT NULL, body BLOB NOT NULL, "
    "digest TEXT NOT NULL)",
    f"INSERT INTO head VALUES (1, 0, '{ROOT}')",
)


@dataclass(frozen=True)
class Head:
    """How many lines were written to a ledger, and the digest of the last."""

    lines: int = 0
    digest: str = ROOT

    def to_bytes(self) -> bytes:
        """Return the head with its checksum as one slot of the head file."""
        text = f"{self.lines} {self.digest}"
        return f"{text} {hashlib.sha256(text.encode()).hexdigest()}".encode().ljust(SLOT - 1) + b"\n"

    @classmethod
    def of_bytes(cls, slot: bytes) -> Head | None:
        """Read one slot of the head file; None if it is damaged."""
        try:
            lines, digest, _ = slot.decode("ascii").split()
            found = cls(int(lines), digest)
        except ValueError:
            return None
        return found if found.to_bytes() == slot else None


@dataclass(frozen=True)
class HeadFile:
    """The file beside a ledger that says how far the ledger was written."""

    path: Path

    @classmethod
    def of(cls, ledger: Path) -> HeadFile:
        return cls(ledger.with_name(ledger.name + ".head"))

    def read(self) -> Head | None:
        """Return the newest head that was written; None if there is no file."""
        try:
            return self._newest(self.path.read_bytes())
        except FileNotFoundError:
            return None

    def create(self, head: Head, mode: int) -> None:
        """Create the file with `head`; one that is there already is only moved forward."""
        partial = self._partial(head, mode)
        try:
            os.link(partial, self.path)
            durable_files.sync(self.path.parent)
        except FileExistsError:
            self.advance(head)
        finally:
            os.unlink(partial)

    def advance(self, head: Head) -> None:
        """Write `head`, on disk when this returns; a file that says more already stays as it is."""
        with open(self.path, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the lock ends when the file is closed
            data = os.pread(file.fileno(), 2 * SLOT, 0)
            newest = self._newest(data)
            if newest.lines < head.lines:
                os.pwrite(file.fileno(), head.to_bytes(), SLOT * (Head.of_bytes(data[:SLOT]) == newest))
                os.fdatasync(file.fileno())

    def replace(self, head: Head, mode: int) -> None:
        """Write `head` whatever the file said before, for a ledger that was restored."""
        os.replace(self._partial(head, mode), self.path)
        durable_files.sync(self.path.parent)

    def _partial(self, head: Head, mode: int) -> str:
        """Write the whole content under another name, synced."""
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent)
        with open(descriptor, "wb", buffering=0) as file:
            os.fchmod(descriptor, mode)
            file.write(head.to_bytes() * 2)
            os.fsync(descriptor)
        return name

    def _newest(self, data: bytes) -> Head:
        found = [head for head in (Head.of_bytes(data[:SLOT]), Head.of_bytes(data[SLOT : 2 * SLOT])) if head]
        if not found:
            fix = "bring back the file, or restore the ledger from a backup (sordino ledger restore)"
            raise StorageError(f"{self.path}, which is damaged", "the head of a ledger as it was written", fix)
        return max(found, key=lambda head: head.lines)


class Journal:
    """Lines in order, and messages by job; `head` says how far the lines were read and found whole."""

    def __init__(self, path: Path, wait: float, create: bool = False) -> None:
        self.path, self.wait, self.head_file, self.head = path, wait, HeadFile.of(path), Head()
        self._noted = Head()  # what the head file said before this transaction began
        with self._storage_errors():
            if create and not path.exists():
                noted = self.head_file.read()
                if noted is not None and noted.lines and not path.exists():
                    beside = f"{self.head_file.path}, by which {noted.lines} lines were written to it"
                    found = f"no ledger {path}, and {beside}"
                    raise StorageError(found, "both files, or none", RESTORES)
                make(path)
        if not path.is_file():
            what = "which is not a file" if path.exists() else "which is not there"
            raise StorageError(f"the ledger {path}, {what}", "a ledger", MAKES)
        with self._storage_errors():
            self._file = _identity(path)
            self._database = connect(path, wait)
            try:
                self._prepare()
            except BaseException:
                self.close()
                raise

    def _prepare(self) -> None:
        mark, version = marks(self._database)
        if mark == BACKUP:
            raise StorageError(f"{self.path}, which is a backup", "a ledger", f"sordino ledger restore {self.path} ...")
        if mark != MARK:
            raise StorageError(f"{self.path}, which is not a ledger", "a ledger", MAKES)
        if version != FORMAT:
            found = f"the ledger {self.path} of format {version}"
            raise StorageError(found, f"format {FORMAT}", "use the version of sordino that wrote it")
        if self._database.execute("PRAGMA journal_mode=DELETE").fetchone()[0] != "delete":
            raise self._storage_error("locked")  # others read its write-ahead log
        self._database.execute("PRAGMA synchronous=EXTRA")

    def close(self) -> None:
        """Close the database; nothing is lost without it."""
        with suppress(sqlite3.Error):
            self._database.close()

    # ---- transactions
    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """Read one moment of the file, or, to `write`, be alone with it; a failure leaves nothing written.

        When a write returns, the head file says what was committed: only then is noise drawn. The head file is read
        before the database: lines that are written in between are no reason to refuse.
        """
        with self._storage_errors():
            if _identity(self.path) != self._file:
                found = f"another file in the place of the ledger {self.path}, which was opened before"
                raise StorageError(found, "the file that was opened", "nothing was charged; start anew")
            noted = self.head_file.read()
            if noted is None:
                found = f"the ledger {self.path} without {self.head_file.path}, which says how far it was written"
                raise StorageError(found, "both files: a copy of one alone may be old", RESTORES)
            self._noted = noted
            self._database.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield
                if write:
                    self._database.execute("COMMIT")
                    if self.head.lines > self._noted.lines:
                        self.head_file.advance(self.head)
            finally:
                with suppress(sqlite3.Error):  # after a commit there is nothing to roll back
                    self._database.execute("ROLLBACK")

    def follow(self, take: Callable[[str], None]) -> None:
        """Check the lines since the last call, pass each to `take`, and compare the end with the head file."""
        for head, body in checked_lines(self._database, self.head):
            try:
                take(body)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise self.damaged(f"line {head.lines} cannot be read ({type(error).__name__})") from None
            self.head = head
        self.check_head(self._noted, f"{self.head_file.path.name} beside it")

    def check_head(self, noted: Head, where: str) -> None:
        """Refuse a database that lacks the line which `where` names, or has another in its place."""
        digest, lines = self.head.digest, self.head.lines
        if lines > noted.lines > 0:
            query = "SELECT digest FROM entries WHERE id = ?"
            digest = self._database.execute(query, (noted.lines,)).fetchone()[0]
        if lines < noted.lines or (noted.lines and digest != noted.digest):
            has = f"{lines} lines where {noted.lines} were" if lines < noted.lines else "other lines than were"
            found = f"the ledger {self.path}, which is older than {where}: {has} written"
            raise StorageError(found, "a ledger that holds all that was charged", RESTORES)

    def append(self, body: str) -> None:
        """Add the next line and the new head; `follow` has read all that were there."""
        append_line(self._database, self.head, body)

    def lines(self) -> list[str]:
        return [body for (body,) in self._database.execute("SELECT body FROM entries ORDER BY id")]

    def message(self, job: str) -> tuple[int, bytes] | None:
        """Return the line that a job was charged by and its stored message, if there is one."""
        query = "SELECT charge, body, digest FROM messages WHERE job = ?"
        row = self._database.execute(query, (job,)).fetchone()
        if row is None:
            return None
        charge, body, digest = row
        if not isinstance(body, bytes) or digest != hashlib.sha256(body).hexdigest():
            raise self.damaged("a stored message is not what was written")
        return int(charge), body

    def keep(self, job: str, run: str, charge: int, message: bytes) -> None:
        """Store the message of a job."""
        row = (job, run, charge, message, hashlib.sha256(message).hexdigest())
        self._database.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?)", row)

    def copy_to(self, file: Path) -> None:
        """Copy this moment of the database into another file; other writers wait for the copy."""
        with closing(connect(file, self.wait)) as copy:
            self._database.backup(copy)

    # ---- errors
    def damaged(self, how: str) -> StorageError:
        """Return the error of a ledger that is not what was written."""
        fix = "sordino ledger restore BACKUP LEDGER, or a lower limit in a new file that leaves out what was spent"
        return StorageError(f"the ledger {self.path}, which is damaged: {how}", "a ledger that is whole", fix)

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Turn errors of SQLite and of the disk into `StorageError`."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._storage_error(str(error)) from None
        except UnicodeDecodeError:  # SQLite quotes a damaged name in its complaint
            raise self.damaged("its tables have no readable names") from None
        except OSError as error:
            found = f"the ledger {self.path}, or its head file, which cannot be opened ({error.strerror})"
            raise StorageError(found, "a folder to write to") from None

    def _storage_error(self, text: str) -> UserError:
        path, folder = self.path, "a file and a folder to write to"
        busy = (f"the ledger {path}, which others have held for {self.wait:g} seconds", FREE)
        known = {
            "locked": (*busy, "try again: nothing was charged"),
            "busy": (*busy, "try again: nothing was charged"),
            "readonly": (f"the ledger {path}, which cannot be written", folder, "chmod u+w"),
            "unable to open": (f"the ledger {path}, which cannot be opened", folder, ""),
            "not a database": (f"{path}, which is not a ledger", "a ledger", MAKES),
            "full": (f"no room to write the ledger {path}", "room", "make some: nothing was charged"),
        }
        words = next((words for word, words in known.items() if word in text), None)
        return self.damaged(text) if words is None else StorageError(*words)


def connect(path: Path, wait: float) -> sqlite3.Connection:
    """Open a database that exists; no file is created."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", timeout=wait, isolation_level=None, uri=True)


def marks(database: sqlite3.Connection) -> tuple[int, int]:
    """Return application_id and format of a file."""
    mark, version = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    return int(mark), int(version)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def make(path: Path) -> None:
    """Create an empty ledger under another name and link it to `path`; an existing file is never written over."""
    made, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)  # its owner's alone
    os.close(made)
    partial = Path(name)
    try:
        with closing(sqlite3.connect(partial, isolation_level=None)) as database:
            stamps = (f"PRAGMA application_id={MARK}", f"PRAGMA user_version={FORMAT}")
            for statement in ("PRAGMA synchronous=EXTRA", "BEGIN IMMEDIATE", *_TABLES, *stamps, "COMMIT"):
                database.execute(statement)
        HeadFile.of(path).create(Head(), stat.S_IMODE(partial.stat().st_mode))
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        for left in path.parent.glob(f"{partial.name}*"):
            left.unlink(missing_ok=True)


def checked_lines(database: sqlite3.Connection, head: Head) -> Iterator[tuple[Head, str]]:
    """Yield every line after `head` with the head after it; `sqlite3.DatabaseError` where the chain is broken."""
    query = "SELECT id, body, digest FROM entries WHERE id > ? ORDER BY id"
    for number, body, digest in database.execute(query, (head.lines,)):
        if number != head.lines + 1 or not isinstance(body, str) or digest != next_digest(head.digest, body):
            raise sqlite3.DatabaseError(f"line {head.lines + 1} is not what was written")
        head = Head(number, digest)
        yield head, body
    if database.execute("SELECT id, digest FROM head").fetchall() != [(head.lines, head.digest)]:
        raise sqlite3.DatabaseError("its last lines are missing")


def append_line(database: sqlite3.Connection, head: Head, body: str) -> None:
    """Add the line after `head`, and the new head, in the transaction of the caller."""
    row = (head.lines + 1, body, next_digest(head.digest, body))
    database.execute("INSERT INTO entries VALUES (?, ?, ?)", row)
    database.execute("UPDATE head SET id = ?, digest = ?", (row[0], row[2]))


def next_digest(before: str, body: str) -> str:
    """Return the digest of a line that follows the one with the digest `before`."""
    return hashlib.sha256(f"{before}\n{body}".encode("utf-8", "surrogatepass")).hexdigest()
