"""Wall and processor time at the end of every round, over a whole tree of processes. The standard library alone."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

BLOCKS = 3  # rounds are taken in so many blocks, of which the least counts
TICK = os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Called once at the end of every round; the first round, with everything before it, is warm-up."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def __call__(self) -> None:
        self.marks.append((tree_seconds(), time.perf_counter()))

    def least(self) -> dict[str, float]:
        """Seconds per round, the least over blocks of equal numbers of rounds after the warm-up."""
        return least_block(self.marks)


def least_block(marks: list[tuple[float, float]]) -> dict[str, float]:
    """Of marks (cpu, wall) at the ends of rounds: the least mean over at most three blocks, each figure by itself."""
    width = max(1, (len(marks) - 1) // BLOCKS)
    ends = marks[::width][: (len(marks) - 1) // width + 1]
    spans = [[(b - a) / width for a, b in zip(*both, strict=True)] for both in pairwise(ends)]
    return {name: min(span[i] for span in spans) for i, name in enumerate(("cpu", "wall"))}


def tree_seconds() -> float:
    """Processor seconds of this process, of its children that have ended, and of all that descend from it."""
    root = os.getppid() if "RANK" in os.environ else os.getpid()  # of several ranks: whoever started them all
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = sum(_ticks(child) for child in descendants(root) if child != os.getpid()) / TICK
    return time.process_time() + ended.ru_utime + ended.ru_stime + alive


def descendants(pid: int) -> list[int]:
    """Every living process below this one."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found + [below for child in found for below in descendants(child)]


def _ticks(pid: int) -> int:
    """User and system time of a process and of its ended children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(int(value) for value in fields[11:15])


def adopt_orphans() -> None:
    """Descendants whose parent ends become ours, so that none leaves the tree."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
