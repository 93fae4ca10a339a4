"""Copies of a ledger: a backup that is right while silos are served, and the way back from one.

A backup is one moment of the database, by SQLite's own backup, marked so that nothing is charged to it. Putting it in
the place of a ledger is `restore`, which compares it with the head file of that ledger: where lines are missing, or
nobody knows, it adds a line that says so, and nothing is charged before the operator has lowered each limit.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from sordino.errors import ConfigError, StorageError
from sordino.ledger import entries
from sordino.ledger.head_file import ROOT, Head, HeadFile
from sordino.ledger.journal import BACKUP, FORMAT, FREE, MARK, connect, marks, next_digest
from sordino.ledger.ledger import WAIT, Ledger


def backup(ledger: Ledger, target: Path) -> Head:
    """Copy one moment of a ledger, charges, messages and all, to a new file: what head it has."""
    if target.exists():
        raise ConfigError(f"{target}, which exists", "a new file for the backup", "choose another name")
    with _sentence(target):
        partial = _beside(target)
        try:
            ledger.copy_to(partial)
            head = _checked(partial)
            _stamp(partial, BACKUP)
            os.link(partial, target)
            _sync(target.parent)
        finally:
            os.unlink(partial)
    return head


def restore(source: Path, target: Path) -> int | None:
    """Put a copy of a ledger in its place; how many lines are missing in it, None if nobody knows.

    The order is database, then head file: killed in between, the ledger is refused and `restore` is called again.
    """
    _check_needed(target)
    said = _readable(HeadFile.of(target))
    with _sentence(target):
        partial = _beside(target)
        try:
            _copy(source, partial)
            lost = _missing(partial, _checked(partial), said)
            if lost != 0:
                _append(partial, entries.RestoreEntry(datetime.now(UTC).isoformat(timespec="seconds"), lost))
            _stamp(partial, MARK)
            head = _checked(partial)
            os.replace(partial, target)
            _sync(target.parent)
        finally:
            partial.unlink(missing_ok=True)
        HeadFile.of(target).replace(head, stat.S_IMODE(target.stat().st_mode))
    return lost


def _check_needed(target: Path) -> None:
    """A ledger that is whole is not replaced."""
    if not target.exists():
        return
    try:
        Ledger.open(target).close()
    except StorageError as error:
        if error.needed == FREE:
            raise
        return
    raise ConfigError(
        f"the ledger {target}, which is whole", "one that is missing, damaged or old", "leave it in place"
    )


def _readable(file: HeadFile) -> Head | None:
    """What a head file says; None if it is missing or damaged."""
    try:
        return file.read()
    except StorageError:
        return None


def _missing(copy: Path, has: Head, said: Head | None) -> int | None:
    """Lines that the head file names and the copy has not."""
    if said is None:
        return None
    with closing(connect(copy, WAIT)) as database:
        row = database.execute("SELECT digest FROM entries WHERE id = ?", (said.lines,)).fetchone()
    if said.lines == 0 or (row is not None and row[0] == said.digest):
        return 0
    return said.lines - has.lines if said.lines > has.lines else None


def _copy(source: Path, partial: Path) -> None:
    """One moment of a file that is a ledger or a backup of one."""
    if not source.is_file():
        raise StorageError(f"the backup {source}, which is not a file", "a file of 'sordino ledger backup'")
    with closing(connect(source, WAIT)) as database:
        if marks(database) not in ((BACKUP, FORMAT), (MARK, FORMAT)):
            raise StorageError(f"{source}, which is not a backup", "a file of 'sordino ledger backup'")
        with closing(connect(partial, WAIT)) as copy:
            database.backup(copy)


def _checked(copy: Path) -> Head:
    """The head of a copy whose every line was read and found whole."""
    head = Head(0, ROOT)
    with closing(connect(copy, WAIT)) as database:
        for number, body, digest in database.execute("SELECT id, body, digest FROM entries ORDER BY id"):
            if number != head.lines + 1 or not isinstance(body, str) or digest != next_digest(head.digest, body):
                raise sqlite3.DatabaseError(f"line {head.lines + 1} is not what was written")
            head = Head(number, digest)
        if database.execute("SELECT id, digest FROM head").fetchall() != [(head.lines, head.digest)]:
            raise sqlite3.DatabaseError("its last lines are missing")
    return head


def _append(copy: Path, entry: entries.Entry) -> None:
    head, body = _checked(copy), entries.to_json(entry)
    row = (head.lines + 1, body, next_digest(head.digest, body))
    with closing(connect(copy, WAIT)) as database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO entries VALUES (?, ?, ?)", row)
        database.execute("UPDATE head SET id = ?, digest = ?", (row[0], row[2]))
        database.execute("COMMIT")


def _stamp(copy: Path, mark: int) -> None:
    """Say what a file is; synced."""
    with closing(connect(copy, WAIT)) as database:
        database.execute("PRAGMA synchronous=EXTRA")
        database.execute(f"PRAGMA application_id={mark}")


def _beside(target: Path) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    os.close(descriptor)
    return Path(name)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _sentence(file: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        found = f"a copy for {file} that is not a whole ledger ({str(error)[:100]})"
        raise StorageError(found, "a whole ledger, or a backup of one", "take another backup") from None
    except OSError as error:
        raise StorageError(f"{file}, which cannot be written ({error.strerror})", "a folder to write to") from None
