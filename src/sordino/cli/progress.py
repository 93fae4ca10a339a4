"""How long work speaks: a bar with the time left on a terminal, plain lines in a pipe, nothing beside JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sordino.cli.app import listened

Told = Callable[[float, float, str], None]  # work done, work in all, what was last done


@contextmanager
def working(name: str, quiet: bool) -> Iterator[Told]:
    """Tell how much of the work is done, in any unit; the time left is what the rest takes at the same pace."""
    if quiet:
        yield lambda done, total, note: None
    elif sys.stdout.isatty():
        with _bar(name) as told:
            yield told
    else:
        yield _lines(name, time.monotonic)


def _lines(name: str, clock: Callable[[], float]) -> Told:
    began, share = clock(), forward()

    def told(done: float, total: float, note: str) -> None:
        with listened(sys.stdout):
            print(f"{name} {100 * share(done, total):.0f}%: {note}{left(clock() - began, done, total)}", flush=True)

    return told


def forward() -> Callable[[float, float], float]:
    """The share that is done; where work is found on the way it stands still, and never goes back."""
    most = 0.0

    def share(done: float, total: float) -> float:
        nonlocal most
        most = max(most, min(done / max(total, 1e-9), 1.0))
        return most

    return share


def left(spent: float, done: float, total: float) -> str:
    """The time that is left, in words; nothing at the end, or where nothing is known yet."""
    if done <= 0 or done >= total:
        return ""
    seconds = spent / done * (total - done)
    return f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"


@contextmanager
def _bar(name: str) -> Iterator[Told]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(name), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    )  # fmt: skip
    with Progress(*columns, speed_estimate_period=600) as bar:
        job, share = bar.add_task("", total=1.0), forward()
        yield lambda done, total, note: bar.update(job, completed=share(done, total), description=note)
