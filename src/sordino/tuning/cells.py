"""The runs of a sweep: each in its own folder, in this process or in several; what is there is not run again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from sordino.codec import plugins
from sordino.config import Config
from sordino.errors import BudgetError, CertificateError, ConfigError, DivergedError, SordinoError, UserError
from sordino.tuning.spec import Cell

CELLS, DIVERGED = "cells", ".diverged"
Told = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Place:
    """Where a cell's run is, and whether it is over."""

    cell: Cell
    folder: Path

    @classmethod
    def of(cls, cell: Cell, out: Path) -> Place:
        return cls(cell, out / CELLS / cell.name)

    @property
    def diverged(self) -> bool:
        """Whether it ended in a model that is not finite; it is not run again, since that would be a new release."""
        return self.folder.with_name(self.folder.name + DIVERGED).exists()

    @property
    def done(self) -> bool:
        return self.diverged or (self.folder / "certificate.json").is_file()


def run_all(places: Sequence[Place], workers: int, own: Sequence[Path], told: Told) -> None:
    """Every cell that is not done, so many at a time."""
    left = [place for place in places if not place.done]
    ran = _here(left) if workers == 1 or len(left) < 2 else _elsewhere(left, workers, own)
    for done, (place, failure) in enumerate(ran, start=1):
        if failure is not None:
            raise _raised(place, *failure)
        told(done, len(left), f"{place.cell.name} ({place.cell.words})" + " diverged" * place.diverged)


Failure = tuple[str, str]  # what sort of error, and its sentence


def _here(places: Sequence[Place]) -> Iterator[tuple[Place, Failure | None]]:
    for place in places:
        yield place, run_cell(place.cell.config, place.folder)


def _elsewhere(places: Sequence[Place], workers: int, own: Sequence[Path]) -> Iterator[tuple[Place, Failure | None]]:
    """In processes of their own, which end with this one."""
    before = set(multiprocessing.active_children())
    fresh = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(places)), fresh, initializer=_begin, initargs=(tuple(own),))
    try:
        jobs = {pool.submit(run_cell, place.cell.config, place.folder): place for place in places}
        for job in as_completed(jobs):
            yield jobs[job], job.result()
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise


def _begin(own: tuple[Path, ...]) -> None:
    """In a process of the pool: the user's own parts, one thread, no interrupt of its own, an end with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plugins.load()
    for file in own:
        plugins.load_file(file)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def run_cell(config: Config, folder: Path) -> Failure | None:
    """Run, or finish, one cell; a model that diverged is a result, and is written down beside its folder."""
    import torch

    from sordino.runs.execution import execute

    torch.set_num_threads(1)
    try:
        execute(config, folder, resume=True)
    except DivergedError as error:
        folder.with_name(folder.name + DIVERGED).write_text(f"{error}\n", encoding="utf-8")
    except BudgetError as error:
        if not (folder / "certificate.json").is_file():  # not a budget that ended the run, but one that refused it
            return "budget", str(error)
    except SordinoError as error:
        return ("user" if isinstance(error, UserError) else "other"), str(error)
    return None


def _raised(place: Place, kind: str, sentence: str) -> SordinoError:
    said = f"cell {place.cell.name}: {sentence.removeprefix('found ')}"
    if kind == "user":
        return ConfigError(said)
    return BudgetError(said) if kind == "budget" else CertificateError("cell", said)
