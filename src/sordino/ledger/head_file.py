"""The head of a ledger in a second file: a database that is older than its head file is refused.

    head = (number of lines, digest of the last)        ledger.db -> ledger.db.head

Order of a charge:   commit line n to the database (synced)  ->  head file says n (synced)  ->  the noise is drawn.

Claim 1, a crash never refuses a healthy ledger. The head file says n only after line n was committed, and lines are
only added. So the database holds line n with that digest at every later moment, whatever was killed in between: at most
it is ahead of the head file, by lines whose noise was not drawn or is being charged by other processes now.
Claim 2, no database is accepted that lacks a charge whose noise was drawn. That charge n was in the head file before
its noise, and the head file never goes back: writers take a lock, and write only what is greater. A database that was
copied earlier, cut or rolled back has fewer than n lines, or another digest at n, and is refused.
Both hold for every single file that is changed. Whoever rolls back the database and the head file together is not
noticed here, only by run folders and servers that have seen more.

Two slots of one sector each, written in turn and in place: a write that is torn spoils the older slot alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sordino.errors import StorageError

SUFFIX = ".head"
SLOT = 512
ROOT = hashlib.sha256(b"sordino ledger").hexdigest()


@dataclass(frozen=True)
class Head:
    """How many lines were written, and the digest of the last."""

    lines: int = 0
    digest: str = ROOT

    def to_bytes(self) -> bytes:
        """One slot of the file."""
        said = f"{self.lines} {self.digest}"
        return f"{said} {hashlib.sha256(said.encode()).hexdigest()}".encode().ljust(SLOT - 1) + b"\n"

    @classmethod
    def of_bytes(cls, slot: bytes) -> Head | None:
        """What a slot says; None if it is not what was written."""
        try:
            lines, digest, _ = slot.decode("ascii").split()
            found = cls(int(lines), digest)
        except ValueError:
            return None
        return found if found.to_bytes() == slot else None


@dataclass(frozen=True)
class HeadFile:
    """The file beside a ledger."""

    path: Path

    @classmethod
    def of(cls, ledger: Path) -> HeadFile:
        """The one of a ledger."""
        return cls(ledger.with_name(ledger.name + SUFFIX))

    def read(self) -> Head | None:
        """The newest head that was written; None if there is no file."""
        try:
            return self._newest(self.path.read_bytes())
        except FileNotFoundError:
            return None

    def create(self, head: Head, mode: int) -> None:
        """A file that says `head`; one that is there already is only moved forward."""
        partial = self._partial(head, mode)
        try:
            os.link(partial, self.path)
            sync_folder(self.path.parent)
        except FileExistsError:
            self.advance(head)
        finally:
            os.unlink(partial)

    def advance(self, head: Head) -> None:
        """Say `head`, on disk when this returns; a file that says more already stays as it is."""
        with _closing(os.open(self.path, os.O_RDWR)) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the lock goes with the descriptor
            data = os.pread(descriptor, 2 * SLOT, 0)
            newest = self._newest(data)
            if newest.lines < head.lines:
                slots = [Head.of_bytes(data[:SLOT]), Head.of_bytes(data[SLOT:])]
                os.pwrite(descriptor, head.to_bytes(), SLOT * (slots[0] == newest))
                os.fdatasync(descriptor)

    def replace(self, head: Head, mode: int) -> None:
        """Say `head` whatever was said before: a ledger was restored."""
        os.replace(self._partial(head, mode), self.path)
        sync_folder(self.path.parent)

    def _partial(self, head: Head, mode: int) -> str:
        """The whole content under another name, synced."""
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent)
        with _closing(descriptor):
            os.fchmod(descriptor, mode)
            os.write(descriptor, head.to_bytes() * 2)
            os.fsync(descriptor)
        return name

    def _newest(self, data: bytes) -> Head:
        found = [head for head in (Head.of_bytes(data[:SLOT]), Head.of_bytes(data[SLOT : 2 * SLOT])) if head]
        if not found:
            fix = "bring back the file, or restore the ledger from a backup (sordino ledger restore)"
            raise StorageError(f"{self.path}, which is damaged", "the head of a ledger as it was written", fix)
        return max(found, key=lambda head: head.lines)


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder."""
    with _closing(os.open(folder, os.O_RDONLY | os.O_DIRECTORY)) as descriptor:
        os.fsync(descriptor)
