"""Backups of a ledger: a copy that is right while silos are served, and `restore`. `sordino ledger backup` calls it.

A backup is one moment of the database, by SQLite's own backup, marked so that nothing is charged to it. `restore` puts
it in the place of a ledger and compares it with the head file there: where lines are missing, or nobody knows, it adds
a line that says so, and nothing is charged before the operator has lowered each limit.
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
from sordino.ledger.head_file import Head, HeadFile, sync_folder
from sordino.ledger.journal import BACKUP, FORMAT, FREE, MARK, append_line, checked_lines, connect, marks
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
            sync_folder(target.parent)
        finally:
            os.unlink(partial)
    return head


def restore(source: Path, target: Path) -> int | None:
    """Put a copy of a ledger in its place; how many lines are missing in it, None if nobody knows.

    The order is database, then head file: killed in between, the ledger is refused and `restore` is called again.
    """
    _check_needed(target)
    try:
        said = HeadFile.of(target).read()
    except StorageError:  # damaged: nobody knows how many lines there were
        said = None
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
            sync_folder(target.parent)
        finally:
            partial.unlink(missing_ok=True)
        HeadFile.of(target).replace(head, stat.S_IMODE(target.stat().st_mode))
    return lost


def _check_needed(target: Path) -> None:
    if not target.exists():
        return
    try:
        Ledger.open(target).close()
    except StorageError as error:
        if error.needed == FREE:
            raise
        return
    found = f"the ledger {target}, which is whole"
    raise ConfigError(found, "one that is missing, damaged or old", "leave it in place")


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
    if not source.is_file():
        raise StorageError(f"the backup {source}, which is not a file", "a file of 'sordino ledger backup'")
    with closing(connect(source, WAIT)) as database:
        if marks(database) not in ((BACKUP, FORMAT), (MARK, FORMAT)):
            raise StorageError(f"{source}, which is not a backup", "a file of 'sordino ledger backup'")
        with closing(connect(partial, WAIT)) as copy:
            database.backup(copy)


def _checked(copy: Path) -> Head:
    """The head of a copy whose every line was read and found whole."""
    head = Head()
    with closing(connect(copy, WAIT)) as database:
        for head, _ in checked_lines(database, head):  # noqa: B020, B007
            pass
    return head


def _append(copy: Path, entry: entries.Entry) -> None:
    head = _checked(copy)
    with closing(connect(copy, WAIT)) as database:
        database.execute("BEGIN IMMEDIATE")
        append_line(database, head, entries.to_json(entry))
        database.execute("COMMIT")


def _stamp(copy: Path, mark: int) -> None:
    with closing(connect(copy, WAIT)) as database:
        database.execute("PRAGMA synchronous=EXTRA")
        database.execute(f"PRAGMA application_id={mark}")


def _beside(target: Path) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    os.close(descriptor)
    return Path(name)


@contextmanager
def _sentence(file: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        found = f"a copy for {file} that is not a whole ledger ({str(error)[:100]})"
        raise StorageError(found, "a whole ledger, or a backup of one", "take another backup") from None
    except OSError as error:
        raise StorageError(f"{file}, which cannot be written ({error.strerror})", "a folder to write to") from None
