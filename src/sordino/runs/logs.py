"""Files that only grow, and how much of them is bound by a checkpoint or a certificate."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.errors import CertificateError
from sordino.runs import files


@dataclass(frozen=True)
class Mark:
    """The first `size` bytes of a file have this sha256."""

    size: int = 0
    sha256: str = hashlib.sha256().hexdigest()

    @classmethod
    def of(cls, data: bytes) -> Mark:
        return cls(len(data), hashlib.sha256(data).hexdigest())

    def check(self, data: bytes, name: str) -> bytes:
        """The bytes that are bound; what follows them was written after the checkpoint and is to be written again."""
        if Mark.of(data[: self.size]) != self:
            raise CertificateError(name, f"{name} is not what the checkpoint was written after")
        return data[: self.size]


class Log:
    """A file of lines that grows: its size and hash are known without reading it again."""

    def __init__(self, file: Path, data: bytes = b"") -> None:
        self.file, self.size, self._sha = file, len(data), hashlib.sha256(data)

    def append(self, line: bytes) -> None:
        """One more line, on disk when this returns."""
        files.append(self.file, line + b"\n", self.size)
        self.size += len(line) + 1
        self._sha.update(line + b"\n")

    @property
    def mark(self) -> Mark:
        return Mark(self.size, self._sha.hexdigest())


def entries(data: bytes, name: str) -> list[dict[str, Any]]:
    """The lines of a jsonl file, every one of them an object."""
    try:
        found = [json.loads(line) for line in data.decode().splitlines()]
    except (ValueError, RecursionError) as error:
        raise CertificateError(name, f"{name} holds a line that is not JSON ({error})") from None
    if not all(isinstance(entry, dict) for entry in found) or (data and not data.endswith(b"\n")):
        raise CertificateError(name, f"{name} holds a line that is not whole")
    return found
