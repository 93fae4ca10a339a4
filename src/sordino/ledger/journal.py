"""Files of a ledger: a SQLite database of hash-chained lines, and a head file. Called by `ledger`.

    digest_k = sha256(digest_k-1, body_k)       head = (number of lines, digest of the last)

The head file, ledger.db.head, has the head. Lines are only appended. A write is one immediate transaction, so a kill
leaves all of it or nothing. A line that is damaged, dropped or moved breaks the hash chain. All committed lines are in
the database file: SQLite uses a rollback journal (never a write-ahead log, whose charges would be missing in a copy of
the database file), and its removal is synced before a charge counts.

Order of a charge:   commit line n to the database (synced)  ->  write n to the head file (synced)  ->  draw the noise.

Claim 1: no crash makes an undamaged ledger refused. The head file has n only after line n was committed, and lines are
only appended. So the database has line n with that digest from then on; after a kill it may be ahead of the head file,
by lines whose noise was not drawn or that other processes are charging now.
Claim 2: no database is accepted that lacks a charge whose noise was drawn. Charge n was in the head file before its
noise was drawn, and the head file never decreases: writers take a lock and write larger numbers only. A database that
was copied earlier, cut or rolled back has fewer than n lines, or another digest at n, and is refused.
Both claims hold if one of the two files is changed. A rollback of both files together is detected only by run folders
and servers that have records of later charges.

The head file has two slots of one sector each, written in turn: an incomplete write damages only the older slot.
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
MARK = 0x536F7264  # application_id of a ledger
BACKUP = 0x536F7242  # application_id of a backup, to which nothing is charged
SLOT = 512  # bytes of a slot of the head file
ROOT = hashlib.sha256(b"sordino ledger").hexdigest()
RESTORES = "restore the newest copy of the file, or run: sordino ledger restore BACKUP LEDGER"
FREE = "a ledger that is not locked"
MAKES = "create a ledger with: sordino ledger limit"
_TABLES = (
    "CREATE TABLE entries (id INTEGER PRIMARY KEY, body TEXT NOT NULL, digest TEXT NOT NULL)",
    "CREATE TABLE head (one INTEGER PRIMARY KEY CHECK (one = 1), id INTEGER NOT NULL, digest TEXT NOT NULL)",
    "CREATE TABLE messages (job TEXT PRIMARY KEY, run TEXT NOT NULL, charge INTEGER NOT NULL, body BLOB NOT NULL, "
    "digest TEXT NOT NULL)",
    f"INSERT INTO head VALUES (1, 0, '{ROOT}')",
)


@dataclass(frozen=True)
class Head:
    """Number of lines in a ledger, and the digest of the last line."""

    lines: int = 0
    digest: str = ROOT

    def to_bytes(self) -> bytes:
        """Return one slot of the head file: number of lines, digest and checksum."""
        text = f"{self.lines} {self.digest}"
        return f"{text} {hashlib.sha256(text.encode()).hexdigest()}".encode().ljust(SLOT - 1) + b"\n"

    @classmethod
    def of_bytes(cls, slot: bytes) -> Head | None:
        """Read one slot of the head file; None if the slot is damaged."""
        try:
            lines, digest, _ = slot.decode("ascii").split()
            found = cls(int(lines), digest)
        except ValueError:
            return None
        return found if found.to_bytes() == slot else None


@dataclass(frozen=True)
class HeadFile:
    """File beside a ledger with the number of committed lines and the digest of the last."""

    path: Path

    @classmethod
    def of(cls, ledger: Path) -> HeadFile:
        return cls(ledger.with_name(ledger.name + ".head"))

    def read(self) -> Head | None:
        """Return the newest head (number of lines and last digest) in the file; None if there is no file."""
        try:
            return self._newest(self.path.read_bytes())
        except FileNotFoundError:
            return None

    def create(self, head: Head, mode: int) -> None:
        """Create the file with `head`; if the file exists, `advance` it."""
        partial = self._partial(head, mode)
        try:
            os.link(partial, self.path)
            durable_files.sync(self.path.parent)
        except FileExistsError:
            self.advance(head)
        finally:
            os.unlink(partial)

    def advance(self, head: Head) -> None:
        """Write `head` and sync it to disk, unless the file has a head with as many lines."""
        with open(self.path, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the lock ends when the file is closed
            data = os.pread(file.fileno(), 2 * SLOT, 0)
            newest = self._newest(data)
            if newest.lines < head.lines:
                os.pwrite(file.fileno(), head.to_bytes(), SLOT * (Head.of_bytes(data[:SLOT]) == newest))
                os.fdatasync(file.fileno())

    def replace(self, head: Head, mode: int) -> None:
        """Overwrite the file with `head`, for a ledger that was restored from a backup."""
        os.replace(self._partial(head, mode), self.path)
        durable_files.sync(self.path.parent)

    def _partial(self, head: Head, mode: int) -> str:
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent)
        with open(descriptor, "wb", buffering=0) as file:
            os.fchmod(descriptor, mode)
            file.write(head.to_bytes() * 2)
            os.fsync(descriptor)
        return name

    def _newest(self, data: bytes) -> Head:
        found = [head for head in (Head.of_bytes(data[:SLOT]), Head.of_bytes(data[SLOT : 2 * SLOT])) if head]
        if not found:
            fix = "restore the file, or restore the ledger from a backup (sordino ledger restore)"
            raise StorageError(f"{self.path}, which is damaged", "the head file of a ledger", fix)
        return max(found, key=lambda head: head.lines)


class Journal:
    """Database of a ledger, with its lines in order and stored messages by job; `head` is the last checked line."""

    def __init__(self, path: Path, wait: float, create: bool = False) -> None:
        self.path, self.wait, self.head_file, self.head = path, wait, HeadFile.of(path), Head()
        self._noted = Head()  # content of the head file before this transaction began
        with self._storage_errors():
            if create and not path.exists():
                noted = self.head_file.read()
                if noted is not None and noted.lines and not path.exists():
                    found = f"no ledger {path}, but its head file {self.head_file.path} with {noted.lines} lines"
                    raise StorageError(found, "both files, or neither", RESTORES)
                make(path)
        if not path.is_file():
            what = "which is not a file" if path.exists() else "which does not exist"
            raise StorageError(f"the ledger {path}, {what}", "a ledger", MAKES)
        with self._storage_errors():
            self._file = _identity(path)
            self._database = connect(path, wait)
            try:
                self._check_format()
            except BaseException:
                self.close()
                raise

    def _check_format(self) -> None:
        mark, version = marks(self._database)
        if mark == BACKUP:
            fix = f"restore it: sordino ledger restore {self.path} LEDGER"
            raise StorageError(f"{self.path}, which is a backup", "a ledger", fix)
        if mark != MARK:
            raise StorageError(f"{self.path}, which is not a ledger", "a ledger", MAKES)
        if version != FORMAT:
            found = f"the ledger {self.path} of format {version}"
            raise StorageError(found, f"format {FORMAT}", "use the version of sordino that wrote it")
        if self._database.execute("PRAGMA journal_mode=DELETE").fetchone()[0] != "delete":
            raise self._storage_error("locked")  # another process reads a write-ahead log
        self._database.execute("PRAGMA synchronous=EXTRA")

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._database.close()

    # ---- transactions
    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """Open a transaction for reading, or an exclusive one if `write`; an error rolls it back.

        After a write the head file counts the new lines; only then may noise be drawn. The head file is read before
        the database, so that lines which other processes commit in between do not look like damage.
        """
        with self._storage_errors():
            if _identity(self.path) != self._file:
                found = f"a ledger {self.path} that was replaced by another file since it was opened"
                raise StorageError(found, "the file that was opened", "start the command again; nothing was charged")
            noted = self.head_file.read()
            if noted is None:
                found = f"the ledger {self.path} without its head file {self.head_file.path}"
                raise StorageError(found, "both files, since a copy of the ledger alone may be old", RESTORES)
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
        """Check the lines since the last call, call `take` with each of them, and compare with the head file."""
        for head, body in checked_lines(self._database, self.head):
            try:
                take(body)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise self.damaged(f"line {head.lines} cannot be read ({type(error).__name__})") from None
            self.head = head
        self.check_head(self._noted, f"{self.head_file.path.name} beside it")

    def check_head(self, noted: Head, where: str) -> None:
        """Refuse a database without the line of the head `noted`, or with another digest there.

        The error message describes the origin of `noted` by `where`.
        """
        digest, lines = self.head.digest, self.head.lines
        if lines > noted.lines > 0:
            query = "SELECT digest FROM entries WHERE id = ?"
            digest = self._database.execute(query, (noted.lines,)).fetchone()[0]
        if lines < noted.lines or (noted.lines and digest != noted.digest):
            has = f"{lines} of {noted.lines} lines" if lines < noted.lines else "other lines than were written"
            found = f"the ledger {self.path}, which is older than {where}: it has {has}"
            raise StorageError(found, "a ledger with all charges", RESTORES)

    def append(self, body: str) -> None:
        append_line(self._database, self.head, body)

    def lines(self) -> list[str]:
        return [body for (body,) in self._database.execute("SELECT body FROM entries ORDER BY id")]

    def message(self, job: str) -> tuple[int, bytes] | None:
        """Return the number of the line that charged a job, and the job's stored message; None if there is none."""
        query = "SELECT charge, body, digest FROM messages WHERE job = ?"
        row = self._database.execute(query, (job,)).fetchone()
        if row is None:
            return None
        charge, body, digest = row
        if not isinstance(body, bytes) or digest != hashlib.sha256(body).hexdigest():
            raise self.damaged("a stored message does not match its checksum")
        return int(charge), body

    def store(self, job: str, run: str, charge: int, message: bytes) -> None:
        row = (job, run, charge, message, hashlib.sha256(message).hexdigest())
        self._database.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?)", row)

    def copy_to(self, file: Path) -> None:
        """Copy a snapshot of the database into another file; other writers wait until it is copied."""
        with closing(connect(file, self.wait)) as copy:
            self._database.backup(copy)

    # ---- errors
    def damaged(self, how: str) -> StorageError:
        fix = "run sordino ledger restore BACKUP LEDGER, or create a new ledger with a lower limit"
        return StorageError(f"the ledger {self.path}, which is damaged: {how}", "an undamaged ledger", fix)

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._storage_error(str(error)) from None
        except UnicodeDecodeError:  # SQLite quotes a damaged name in its error message
            raise self.damaged("its tables have no readable names") from None
        except OSError as error:
            found = f"the ledger {self.path}, or its head file, which cannot be opened ({error.strerror})"
            raise StorageError(found, "a writable folder", "correct the path, or its permissions") from None

    def _storage_error(self, text: str) -> UserError:
        path, folder = self.path, "a writable file in a writable folder"
        locked = f"the ledger {path}, which other processes have locked for {self.wait:g} seconds"
        busy = (locked, FREE, "try again; nothing was charged")
        known = {
            "locked": busy,
            "busy": busy,
            "readonly": (f"the ledger {path}, which cannot be written", folder, "run chmod u+w on file and folder"),
            "unable to open": (f"the ledger {path}, which cannot be opened", folder, "correct path or permissions"),
            "not a database": (f"{path}, which is not a ledger", "a ledger", MAKES),
            "full": (f"a full disk under the ledger {path}", "free space", "free space; nothing was charged"),
        }
        words = next((words for word, words in known.items() if word in text), None)
        return self.damaged(text) if words is None else StorageError(*words)


def connect(path: Path, wait: float) -> sqlite3.Connection:
    """Open an existing SQLite database; a missing file is not created."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", timeout=wait, isolation_level=None, uri=True)


def marks(database: sqlite3.Connection) -> tuple[int, int]:
    """Return the application_id and the format number of a SQLite database."""
    mark, version = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    return int(mark), int(version)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def make(path: Path) -> None:
    """Create an empty ledger under a temporary name and link it to `path`; an existing file is never overwritten."""
    made, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)  # mode 0600
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
    """Yield (new head, body) of each line after `head`; raise `sqlite3.DatabaseError` if the hash chain is broken."""
    query = "SELECT id, body, digest FROM entries WHERE id > ? ORDER BY id"
    for number, body, digest in database.execute(query, (head.lines,)):
        if number != head.lines + 1 or not isinstance(body, str) or digest != _next_digest(head.digest, body):
            raise sqlite3.DatabaseError(f"line {head.lines + 1} does not continue the hash chain")
        head = Head(number, digest)
        yield head, body
    if database.execute("SELECT id, digest FROM head").fetchall() != [(head.lines, head.digest)]:
        raise sqlite3.DatabaseError("its last lines are missing")


def append_line(database: sqlite3.Connection, head: Head, body: str) -> None:
    """Append the line after `head`, and store the new head, in the caller's transaction."""
    row = (head.lines + 1, body, _next_digest(head.digest, body))
    database.execute("INSERT INTO entries VALUES (?, ?, ?)", row)
    database.execute("UPDATE head SET id = ?, digest = ?", (row[0], row[2]))


def _next_digest(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}\n{body}".encode("utf-8", "surrogatepass")).hexdigest()
