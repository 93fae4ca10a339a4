"""The file of a ledger: SQLite, synced at every commit; lines are only ever added, each bound to the one before.

    digest_k = sha256(digest_k-1, body_k)        head = (number of lines, digest of the last)

A write is one immediate transaction: it is whole or was never made, whatever is killed when. A line that is damaged,
dropped or moved breaks the chain; a database that is older than the head file beside it (`head_file`) is refused.
Committed lines are in the one file: the journal is a rollback journal (never a write-ahead log, whose charges a copy of
the database alone leaves out), and its removal is synced before a charge counts. Called by `ledger` and `backup`.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from sordino.errors import StorageError, UserError
from sordino.ledger.head_file import ROOT, Head, HeadFile

FORMAT = 2
MARK = 0x536F7264  # application_id of the file
BACKUP = 0x536F7242  # and of a backup, which is not charged
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
_MARKS = ("application_id", "user_version")
Take = Callable[[str], None]


class Journal:
    """Lines in order, and messages by job. `read` and `digest` say how far the lines were read and found whole."""

    def __init__(self, path: Path, wait: float, create: bool = False) -> None:
        self.path, self.wait, self.head_file = path, wait, HeadFile.of(path)
        self.read, self.digest = 0, ROOT
        self._noted = Head()  # what the head file said before this transaction began
        with self._sentences():
            if create and not path.exists():
                said = self.head_file.read()
                if said is not None and said.lines and not path.exists():
                    found = (
                        f"no ledger {path}, and {self.head_file.path}, by which {said.lines} lines were written to it"
                    )
                    raise StorageError(found, "both files, or none", RESTORES)
                make(path)
        if not path.is_file():
            what = "which is not a file" if path.exists() else "which is not there"
            raise StorageError(f"the ledger {path}, {what}", "a ledger", MAKES)
        with self._sentences():
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
            raise self._sentence("locked")  # others read its write-ahead log
        self._database.execute("PRAGMA synchronous=EXTRA")

    def close(self) -> None:
        """Nothing is lost by not calling it."""
        with suppress(sqlite3.Error):
            self._database.close()

    # ---- transactions ------------------------------------------------------------------------------------------------

    def _begin(self, statement: str) -> None:
        """The head file is read before the database: lines that are written in between are no reason to refuse."""
        if _identity(self.path) != self._file:
            found = f"another file in the place of the ledger {self.path}, which was opened before"
            raise StorageError(found, "the file that was opened", "nothing was charged; start anew")
        said = self.head_file.read()
        if said is None:
            found = f"the ledger {self.path} without {self.head_file.path}, which says how far it was written"
            raise StorageError(found, "both files: a copy of one alone may be old", RESTORES)
        self._noted = said
        self._database.execute(statement)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Alone with the file; what fails leaves nothing, and the lines are to be read anew.

        When this returns, the head file says what was committed: only then is noise drawn.
        """
        with self._sentences():
            self._begin("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
                if self.read > self._noted.lines:
                    self.head_file.advance(Head(self.read, self.digest))
            except BaseException:
                with suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def looking(self) -> Iterator[None]:
        """One moment of the file."""
        with self._sentences():
            self._begin("BEGIN")
            try:
                yield
            finally:
                with suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")

    def follow(self, take: Take) -> None:
        """Hand on the lines since the last look, each of them checked; then the head."""
        for head, body in checked_lines(self._database, Head(self.read, self.digest)):
            try:
                take(body)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise self.damaged(f"line {head.lines} cannot be read ({type(error).__name__})") from None
            self.read, self.digest = head.lines, head.digest
        self.check_head(self._noted, f"{self.head_file.path.name} beside it")

    def check_head(self, said: Head, where: str) -> None:
        """Refuse a database that lacks the line which is named elsewhere, or has another in its place."""
        digest = self.digest
        if self.read > said.lines > 0:
            query = "SELECT digest FROM entries WHERE id = ?"
            digest = self._database.execute(query, (said.lines,)).fetchone()[0]
        if self.read < said.lines or (said.lines and digest != said.digest):
            has = f"{self.read} lines where {said.lines} were" if self.read < said.lines else "other lines than were"
            found = f"the ledger {self.path}, which is older than {where}: {has} written"
            raise StorageError(found, "a ledger that holds all that was charged", RESTORES)

    def append(self, body: str) -> None:
        """The next line, and the new head; `follow` has read all that were there."""
        append_line(self._database, Head(self.read, self.digest), body)

    def lines(self) -> list[str]:
        """All of them."""
        return [body for (body,) in self._database.execute("SELECT body FROM entries ORDER BY id")]

    def message(self, job: str) -> tuple[int, bytes] | None:
        """What was stored for a job, and for which line."""
        query = "SELECT charge, body, digest FROM messages WHERE job = ?"
        row = self._database.execute(query, (job,)).fetchone()
        if row is None:
            return None
        charge, body, digest = row
        if not isinstance(body, bytes) or digest != hashlib.sha256(body).hexdigest():
            raise self.damaged("a stored message is not what was written")
        return int(charge), body

    def keep(self, job: str, run: str, charge: int, message: bytes) -> None:
        """Store a message."""
        row = (job, run, charge, message, hashlib.sha256(message).hexdigest())
        self._database.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?)", row)

    def copy_to(self, file: Path) -> None:
        """This moment of the database into another file; whoever writes waits for the copy."""
        with closing(connect(file, self.wait)) as copy:
            self._database.backup(copy)

    # ---- words -------------------------------------------------------------------------------------------------------

    def damaged(self, how: str) -> StorageError:
        """The file is there, and is not what was written."""
        fix = "sordino ledger restore BACKUP LEDGER, or a lower limit in a new file that leaves out what was spent"
        return StorageError(f"the ledger {self.path}, which is damaged: {how}", "a ledger that is whole", fix)

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        """What SQLite and the disk complain of, as one sentence each."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._sentence(str(error)) from None
        except UnicodeDecodeError:  # SQLite quotes a damaged name in its complaint
            raise self.damaged("its tables have no readable names") from None
        except OSError as error:
            found = f"the ledger {self.path}, or its head file, which cannot be opened ({error.strerror})"
            raise StorageError(found, "a folder to write to") from None

    def _sentence(self, said: str) -> UserError:
        path, held = self.path, f"which others have held for {self.wait:g} seconds"
        known = {
            "locked": (f"the ledger {path}, {held}", FREE, "try again: nothing was charged"),
            "busy": (f"the ledger {path}, {held}", FREE, "try again: nothing was charged"),
            "readonly": (f"the ledger {path}, which cannot be written", "a file and a folder to write to", "chmod u+w"),
            "unable to open": (f"the ledger {path}, which cannot be opened", "a file and a folder to write to", ""),
            "not a database": (f"{path}, which is not a ledger", "a ledger", MAKES),
            "full": (f"no room to write the ledger {path}", "room", "make some: nothing was charged"),
        }
        words = next((words for word, words in known.items() if word in said), None)
        return self.damaged(said) if words is None else StorageError(*words)


def connect(path: Path, wait: float) -> sqlite3.Connection:
    """A connection that makes no file."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", timeout=wait, isolation_level=None, uri=True)


def marks(database: sqlite3.Connection) -> tuple[int, int]:
    """application_id and format of a file."""
    mark, version = (int(database.execute(f"PRAGMA {name}").fetchone()[0]) for name in _MARKS)
    return mark, version


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def make(path: Path) -> None:
    """A new file under another name, whole, then its own; of two who make it one is first. Nothing is written over."""
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
    """Every line after `head`, with the head after it; an error of the database where the chain is broken."""
    query = "SELECT id, body, digest FROM entries WHERE id > ? ORDER BY id"
    for number, body, digest in database.execute(query, (head.lines,)):
        if number != head.lines + 1 or not isinstance(body, str) or digest != next_digest(head.digest, body):
            raise sqlite3.DatabaseError(f"line {head.lines + 1} is not what was written")
        head = Head(number, digest)
        yield head, body
    if database.execute("SELECT id, digest FROM head").fetchall() != [(head.lines, head.digest)]:
        raise sqlite3.DatabaseError("its last lines are missing")


def append_line(database: sqlite3.Connection, head: Head, body: str) -> None:
    """The line after `head`, and the new head, in the transaction of the caller."""
    row = (head.lines + 1, body, next_digest(head.digest, body))
    database.execute("INSERT INTO entries VALUES (?, ?, ?)", row)
    database.execute("UPDATE head SET id = ?, digest = ?", (row[0], row[2]))


def next_digest(before: str, body: str) -> str:
    """Of a line after the one with the digest `before`."""
    return hashlib.sha256(f"{before}\n{body}".encode("utf-8", "surrogatepass")).hexdigest()
