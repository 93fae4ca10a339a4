"""The file of a ledger: SQLite, write-ahead, synced at every commit; lines are only ever added, each bound to the last.

    digest_k = sha256(digest_k-1, body_k)        head = (number of lines, digest of the last)

A write is one immediate transaction: it is whole or was never made, whatever is killed when. A line that is damaged,
dropped or moved breaks the chain; who rewrites the whole file can make it agree. Every complaint is one sentence.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from sordino.errors import StorageError, UserError

FORMAT = 1
MARK = 0x536F7264  # application_id of the file
ROOT = hashlib.sha256(b"sordino ledger").hexdigest()
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
        self.path, self.wait = path, wait
        self.read, self.digest = 0, ROOT
        if create and not path.exists():
            with self._sentences():
                _make(path)
        if not path.is_file():
            what = "which is not a file" if path.exists() else "which is not there"
            raise StorageError(f"the ledger {path}, {what}", "a ledger", MAKES)
        with self._sentences():
            address = f"{path.absolute().as_uri()}?mode=rw"
            self._database = sqlite3.connect(address, timeout=wait, isolation_level=None, uri=True)
            try:
                self._prepare()
            except BaseException:
                self.close()
                raise

    def _prepare(self) -> None:
        """A file of ours, of this format."""
        mark, version = (int(self._database.execute(f"PRAGMA {name}").fetchone()[0]) for name in _MARKS)
        if mark != MARK:
            raise StorageError(f"{self.path}, which is not a ledger", "a ledger", MAKES)
        if version != FORMAT:
            found = f"the ledger {self.path} of format {version}"
            raise StorageError(found, f"format {FORMAT}", "use the version of sordino that wrote it")
        self._database.execute("PRAGMA synchronous=FULL")

    def close(self) -> None:
        """Nothing is lost by not calling it."""
        with suppress(sqlite3.Error):
            self._database.close()

    # ---- transactions ------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Alone with the file; what fails leaves nothing, and the lines are to be read anew."""
        with self._sentences():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def looking(self) -> Iterator[None]:
        """One moment of the file."""
        with self._sentences():
            self._database.execute("BEGIN")
            try:
                yield
            finally:
                with suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")

    def follow(self, take: Take) -> None:
        """Hand on the lines since the last look, each of them checked; then the head."""
        rows = self._database.execute("SELECT id, body, digest FROM entries WHERE id > ? ORDER BY id", (self.read,))
        for number, body, digest in rows:
            if number != self.read + 1 or not isinstance(body, str) or digest != _next(self.digest, body):
                raise self.damaged(f"line {self.read + 1} is not what was written")
            try:
                take(body)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise self.damaged(f"line {number} cannot be read ({type(error).__name__})") from None
            self.read, self.digest = number, digest
        if self._database.execute("SELECT id, digest FROM head").fetchall() != [(self.read, self.digest)]:
            raise self.damaged("its last lines are missing")

    def append(self, body: str) -> None:
        """The next line, and the new head; `follow` has read all that were there."""
        row = (self.read + 1, body, _next(self.digest, body))
        self._database.execute("INSERT INTO entries VALUES (?, ?, ?)", row)
        self._database.execute("UPDATE head SET id = ?, digest = ?", (row[0], row[2]))

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

    def drop(self, run: str) -> None:
        """Away with the messages of a run."""
        self._database.execute("DELETE FROM messages WHERE run = ?", (run,))

    # ---- words -------------------------------------------------------------------------------------------------------

    def damaged(self, how: str) -> StorageError:
        """The file is there, and is not what was written."""
        fix = "bring back a copy, or set a limit in a new file that leaves out what was spent"
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
            found = f"the ledger {self.path}, which cannot be opened ({error.strerror})"
            raise StorageError(found, "a folder to write to") from None

    def _sentence(self, said: str) -> UserError:
        path, held = self.path, f"which others have held for {self.wait:g} seconds"
        known = {
            "locked": (f"the ledger {path}, {held}", "one that is free", "try again: nothing was charged"),
            "busy": (f"the ledger {path}, {held}", "one that is free", "try again: nothing was charged"),
            "readonly": (f"the ledger {path}, which cannot be written", "a file and a folder to write to", "chmod u+w"),
            "unable to open": (f"the ledger {path}, which cannot be opened", "a file and a folder to write to", ""),
            "not a database": (f"{path}, which is not a ledger", "a ledger", MAKES),
            "full": (f"no room to write the ledger {path}", "room", "make some: nothing was charged"),
        }
        words = next((words for word, words in known.items() if word in said), None)
        return self.damaged(said) if words is None else StorageError(*words)


def _make(path: Path) -> None:
    """A new file under another name, whole, then its own; of two who make it one is first. Nothing is written over."""
    made, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)  # its owner's alone
    os.close(made)
    partial = Path(name)
    try:
        with closing(sqlite3.connect(partial, isolation_level=None)) as database:
            marks = (f"PRAGMA application_id={MARK}", f"PRAGMA user_version={FORMAT}")
            for statement in ("PRAGMA journal_mode=WAL", "BEGIN IMMEDIATE", *_TABLES, *marks, "COMMIT"):
                database.execute(statement)
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        for left in path.parent.glob(f"{partial.name}*"):
            left.unlink(missing_ok=True)


def _next(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}\n{body}".encode("utf-8", "surrogatepass")).hexdigest()
