"""Durable files: a write is whole or was never made, is on disk when the call returns, and fails in one sentence.

Every change to a run's folder goes through this module; tests stop it at each of its steps.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from sordino.errors import CertificateError, StorageError

PUBLIC, PRIVATE = 0o666, 0o600  # before the umask: what may be released, and what only its owner may read
PARTIAL = ".partial"
SAFE = "what was charged stays charged, and the last checkpoint is whole"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def read(file: Path) -> bytes:
    """The whole file; one that is missing is damage."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise CertificateError(file.name, f"{file.name} is missing in {file.parent}") from None
    except OSError as error:
        raise StorageError(f"{file}, which cannot be read ({error.strerror})", "a file") from None


def write(file: Path, data: bytes, mode: int = PUBLIC) -> None:
    """Replace a file in one move: it is the new one, whole, or the one before."""
    stage(file, data, mode)
    move(file.with_name(file.name + PARTIAL), file)


def stage(file: Path, data: bytes, mode: int) -> None:
    """The new content beside the file, synced; `move` makes it the file."""
    partial = file.with_name(file.name + PARTIAL)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            _put(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with suppress(OSError):
            os.unlink(partial)
        raise trouble(file, error) from None


def move(old: Path, new: Path) -> None:
    """Give a file, or a folder, the name of another; synced."""
    try:
        os.replace(old, new)
        sync(new.parent)
    except OSError as error:
        raise trouble(new, error) from None


def append(file: Path, data: bytes, size: int) -> None:
    """Add to a file of `size` bytes, synced; nothing of it stays if that fails. It never makes a file anew."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
        try:
            _check_size(file, os.fstat(descriptor).st_size, size)
            try:
                _put(descriptor, data)
                os.fsync(descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise trouble(file, error) from None


def cut(file: Path, size: int) -> None:
    """Shorten a file, synced; nothing happens to one that is no longer."""
    try:
        descriptor = os.open(file, os.O_WRONLY)
        try:
            if os.fstat(descriptor).st_size > size:
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
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


def _put(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _check_size(file: Path, found: int, size: int) -> None:
    if found != size:
        raise CertificateError(
            file.name, f"{file.name} has {found} bytes where this run wrote {size}: something else changed it; {SAFE}"
        )


def trouble(file: Path, error: OSError) -> StorageError:
    """The error of a failed write: what happened, what is safe, and how to continue."""
    reason = error.strerror or type(error).__name__
    if error.errno in _FULL:
        return StorageError(f"no room to write {file} ({reason})", "room", f"make some and add --resume: {SAFE}")
    if error.errno in _GONE:
        fix = "put it back and add --resume, or start anew in another --out; what was charged stays spent"
        return StorageError(f"{file} gone from under the run ({reason})", "the folder that the run was started in", fix)
    found = f"{file}, which cannot be written ({reason})"
    return StorageError(found, "a folder to write to", f"mend that and add --resume: {SAFE}")
