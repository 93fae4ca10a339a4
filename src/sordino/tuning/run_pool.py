"""Execution of the runs of a sweep: each in its own folder, in this process or in several; a finished run is kept."""

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

from sordino import codec
from sordino.config import Config
from sordino.errors import BudgetError, CertificateError, ConfigError, DivergedError, SordinoError, UserError
from sordino.tuning.search_space import SweepRun

RUNS, DIVERGED = "runs", ".diverged"
Progress = Callable[[float, float, str], None]  # work done, work in all, what was done last
Failure = tuple[str, str]  # which kind of error, and its sentence


@dataclass(frozen=True)
class StoredRun:
    """A run of a sweep and its folder."""

    run: SweepRun
    folder: Path

    @property
    def diverged(self) -> bool:
        """Whether it ended in a model that is not finite; it is not run again, since that would be a new release."""
        return self.folder.with_name(self.folder.name + DIVERGED).exists()

    @property
    def done(self) -> bool:
        return self.diverged or (self.folder / "certificate.json").is_file()


def run_all(stored: Sequence[StoredRun], workers: int, own: Sequence[Path], progress: Progress) -> None:
    """Execute every run that is not done, so many at a time."""
    left = [one for one in stored if not one.done]
    if workers == 1 or len(left) < 2:
        results: Iterator[tuple[StoredRun, Failure | None]] = (
            (one, execute_run(one.run.config, one.folder)) for one in left
        )
    else:
        results = _in_processes(left, workers, own)
    for done, (one, failure) in enumerate(results, start=1):
        if failure is not None:
            text = f"run {one.run.name}: {failure[1].removeprefix('found ')}"
            if failure[0] == "user":
                raise ConfigError(text)
            raise BudgetError(text) if failure[0] == "budget" else CertificateError("run", text)
        progress(done, len(left), f"{one.run.name} ({one.run.text})" + " diverged" * one.diverged)


def _in_processes(
    stored: Sequence[StoredRun], workers: int, own: Sequence[Path]
) -> Iterator[tuple[StoredRun, Failure | None]]:
    """In processes of their own, which end with this one."""
    before = set(multiprocessing.active_children())
    fresh = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(stored)), fresh, initializer=_start_worker, initargs=(tuple(own),))
    try:
        jobs = {pool.submit(execute_run, one.run.config, one.folder): one for one in stored}
        for job in as_completed(jobs):
            yield jobs[job], job.result()
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise


def _start_worker(own: tuple[Path, ...]) -> None:
    """In a process of the pool: load the user's own parts, ignore interrupts, end when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    codec.load_plugins()
    for file in own:
        codec.load_parts_file(file)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def execute_run(config: Config, folder: Path) -> Failure | None:
    """Run, or finish, one run; a model that diverged is a result, and is recorded beside its folder."""
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
