"""Federated simulation by Sordino as a user writes it: a recipe, a task, `sordino.loop`; a grid by `run_grid`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from federations import MULTIPLIER, RADIUS, RATE, Federation, Grid, Work
from numpy.typing import NDArray

from sordino import kernels
from sordino.data.clients import Clients, Records
from sordino.engines.batches import Batches
from sordino.loop import run
from sordino.parts.strategies import Banded
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.samplers import Everyone, FixedSize, RoundRobin
from sordino.plan import Plan
from sordino.recipes import dp_fed_avg, dp_ftrl, noisy_minibatch_sgd
from sordino.task import Task
from sordino.version import __version__
from sordino_papers import grid as grids

VERSIONS = {"sordino": __version__, "torch": torch.__version__}
Mark = Callable[[], None]


def task_of(work: Federation | Grid, loss: str = "cross_entropy") -> Task:
    """The workload's records as one table, client after client."""
    x, y = work.data()
    offsets = np.arange(len(x) + 1, dtype=np.int64) * x.shape[1]
    clients = Clients(Records(x.flatten(0, 1), y.flatten()), np.arange(offsets[-1], dtype=np.int64), offsets)
    return Task(work.model(), clients, loss=loss)


def plan_of(work: Federation, rounds: int) -> Plan:
    return dp_fed_avg(
        rounds=rounds,
        clients=FixedSize(work.clients, work.cohort),
        lr=RATE,
        clip_norm=RADIUS,
        noise_multiplier=MULTIPLIER,
        epochs=work.epochs,
        batch=work.batch,
    )


def banded_plan(work: Federation, rounds: int) -> Plan:
    """The same with noise that rounds share: clients in turn, as many bands as rounds between two of one's own."""
    return dp_ftrl(
        rounds=rounds,
        clients=RoundRobin(work.clients, work.cohort),
        lr=RATE,
        clip_norm=RADIUS,
        noise_multiplier=MULTIPLIER,
        strategy=Banded(work.clients // work.cohort),
        epochs=work.epochs,
        batch=work.batch,
    )


class Reads:
    """Counts what every chunk's steps read from here on: `Batches` is all that an engine knows of them."""

    def __init__(self) -> None:
        self.work, make = Work(), Batches.__init__

        def made(batches: Batches, reader: Any, rows: Any, real: Any) -> None:
            make(batches, reader, rows, real)
            self.work += Work(int(real.any(2).sum()), int(real.sum()))

        Batches.__init__ = made  # type: ignore[method-assign]
        self._together(grids._together)

    def _together(self, draw: Callable[..., NDArray[np.int64]]) -> None:
        """A grid with exact=False draws the rows of all runs in one go."""

        def drawn(*args: Any) -> NDArray[np.int64]:
            rows = draw(*args)
            self.work += Work(len(rows), rows.size)
            return rows

        grids._together = drawn


def federation(work: Federation, rounds: int, mark: Mark, engine: Any = None, plan: Any = plan_of) -> Work:
    task, reads = task_of(work), Reads()
    for _ in run(plan(work, rounds), task, engine=engine):
        mark()
    return reads.work


def grid_plan(work: Grid, run: int) -> Plan:
    """Runs differ in step size and noise."""
    return noisy_minibatch_sgd(
        rounds=work.rounds,
        clients=Everyone(work.silos),
        records=FixedRecords(work.batch, (work.records,)),
        clip_norm=RADIUS,
        noise_multiplier=MULTIPLIER * (1 + run % 6),
        lr=RATE * (1 + run % 10),
    )


def grid(work: Grid, times: int, mark: Mark, exact: bool = True) -> Work:
    """All runs, `times` over."""
    task, plans, reads = task_of(work, "logistic"), [grid_plan(work, run) for run in range(work.runs)], Reads()
    for turn in range(times):
        grids.run_grid(plans, task, range(turn * work.runs, (turn + 1) * work.runs), exact=exact)
        mark()
    return reads.work


def simulated(work: Federation | Grid, rounds: int, mark: Mark) -> Work:
    return grid(work, rounds, mark) if isinstance(work, Grid) else federation(work, rounds, mark)


def two_workers(work: Federation, rounds: int, mark: Mark) -> Work:
    """The same run with its clients in two processes: this one starts both, and they run this again."""
    engines, launch = (importlib.import_module(f"sordino.{name}") for name in ("engines.distributed", "launch"))
    if "RANK" not in os.environ:
        raise SystemExit(launch.launch(sys.argv, 2))
    launch.follow()
    half = federation(work, rounds, mark, engines.Distributed())  # of this rank; the other has as many clients
    return half + half


def not_compiled(work: Federation | Grid, rounds: int, mark: Mark) -> Work:
    """As without numba."""
    kernels.AVAILABLE = False
    return simulated(work, rounds, mark)


METHODS = {
    "run": simulated,
    "run, 2 workers": two_workers,
    "run, banded": partial(federation, plan=banded_plan),
    "run, exact=False": partial(grid, exact=False),
    "run, not compiled": not_compiled,
}
