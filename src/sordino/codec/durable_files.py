"""Durable files, whose writes are complete or have no effect, and are on disk when the call returns. `runs` calls them.

Every change to a run's folder goes through this module; tests stop it at each of its steps.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from sordino.errors import CertificateError, StorageError

PUBLIC, PRIVATE = 0o666, 0o600  # file modes before the umask: for what may be released, and for the owner alone
PARTIAL = ".partial"
SAFE = "charged rounds stay charged, and the last checkpoint is complete"


def read(file: Path) -> bytes:
    """Return the content of a run's file; if it is missing, raise `CertificateError`."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise CertificateError(file.name, f"{file.name} is missing in {file.parent}") from None
    except OSError as error:
        found = f"{file}, which cannot be read ({error.strerror})"
        raise StorageError(found, "a readable file", "change its permissions") from None


def write(file: Path, data: bytes, mode: int = PUBLIC) -> None:
    """Replace a file atomically: after a crash it has either the new or the old content."""
    stage(file, data, mode)
    move(file.with_name(file.name + PARTIAL), file)


def stage(file: Path, data: bytes, mode: int) -> None:
    """Write the new content of `file` to a synced file beside it; `move` then replaces the old content."""
    partial = file.with_name(file.name + PARTIAL)
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb", buffering=0) as opened:
            _write_synced(opened.fileno(), data)
    except OSError as error:
        with suppress(OSError):
            os.unlink(partial)
        raise trouble(file, error) from None


def move(old: Path, new: Path) -> None:
    """Rename a file or a folder, replacing the target, and sync the folder."""
    try:
        os.replace(old, new)
        sync(new.parent)
    except OSError as error:
        raise trouble(new, error) from None


def append(file: Path, data: bytes, size: int) -> None:
    """Append to an existing file of `size` bytes, synced; a failed append does not change the file."""
    try:
        with open(os.open(file, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as opened:
            descriptor = opened.fileno()
            found = os.fstat(descriptor).st_size
            if found != size:
                changed = f"{file.name} has {found} bytes where this run wrote {size}: something else changed it"
                raise CertificateError(file.name, f"{changed}; {SAFE}")
            try:
                _write_synced(descriptor, data)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
    except OSError as error:
        raise trouble(file, error) from None


def cut(file: Path, size: int) -> None:
    """Shorten a file to `size` bytes, synced; a shorter file is not changed."""
    try:
        with open(os.open(file, os.O_WRONLY), "wb", buffering=0) as opened:
            if os.fstat(opened.fileno()).st_size > size:
                os.ftruncate(opened.fileno(), size)
                os.fsync(opened.fileno())
    except OSError as error:
        raise trouble(file, error) from None


def remove(file: Path) -> None:
    """Delete a file, if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(file)


def sync(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def trouble(file: Path, error: OSError) -> StorageError:
    """Return the `StorageError` of a failed write, which says what is safe and how to continue."""
    reason = error.strerror or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        found, fix = f"no space left to write {file} ({reason})", f"free some and add --resume: {SAFE}"
        return StorageError(found, "disk space", fix)
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        fix = "restore the folder and add --resume, or start a new run in another --out; charged rounds stay charged"
        found = f"{file}, which was removed during the run ({reason})"
        return StorageError(found, "the folder that the run was started in", fix)
    found = f"{file}, which cannot be written ({reason})"
    return StorageError(found, "a folder to write to", f"make the folder writable and add --resume: {SAFE}")
