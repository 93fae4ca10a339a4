"""Kills and damage: a process that ends at a chosen step of its writing, and files that are not what was written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

How = Literal["before", "half", "after"]  # of the step that it dies in
STEPS = ("mkdir", "open", "write", "fsync", "ftruncate", "replace", "unlink")


class Killed(BaseException):
    """SIGKILL, as far as one process can play it to itself: no handler for errors sees it."""


@dataclass
class Dying:
    """`os` as runs/ sees it; at step number `at` the process dies, and whatever it tries after that does nothing."""

    at: int = -1  # never
    how: How = "before"
    done: int = 0
    dead: bool = field(default=False, init=False)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return real if name not in STEPS else lambda *args, **options: self._step(name, real, args, options)

    def _step(self, name: str, real: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.dead:
            raise Killed
        self.done += 1
        if self.done - 1 != self.at:
            return real(*args, **options)
        self.dead = True
        if self.how == "after":
            real(*args, **options)
        elif self.how == "half" and name == "write":
            real(args[0], bytes(args[1])[: max(1, len(args[1]) // 2)])
        raise Killed


@contextmanager
def dying(at: int = -1, how: How = "before") -> Iterator[Dying]:
    """Everything that runs/ does to the disk goes through one `Dying`."""
    system = Dying(at, how)
    with patch("sordino.codec.durable_files.os", system), patch("sordino.runs.writer.os", system):
        yield system
