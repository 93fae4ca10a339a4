"""Federated simulation by Sordino as a user writes it: a recipe, a task, `sordino.run`; a grid by `run_grid`."""

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
from torch import Tensor

from sordino.data.task import Clients, Records, Task
from sordino.grid import run_grid
from sordino.parts.gradients import Batch
from sordino.parts.samplers import Everyone, FixedSize
from sordino.plan import Plan
from sordino.recipes import dp_fed_avg, noisy_minibatch_sgd
from sordino.run import run
from sordino.version import __version__

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
        radius=RADIUS,
        multiplier=MULTIPLIER,
        epochs=work.epochs,
        batch=work.batch,
    )


class Reads:
    """Counts every batch that an engine makes from here on: what was read, not what was asked for."""

    def __init__(self) -> None:
        self.work, make = Work(), Batch.__init__

        def made(batch: Batch, x: Tensor, y: Tensor, mask: Tensor | None = None, *more: Any, **named: Any) -> None:
            make(batch, x, y, mask, *more, **named)
            self.work += Work(len(y), y.numel()) if mask is None else Work(int(mask.any(1).sum()), int(mask.sum()))

        Batch.__init__ = made  # type: ignore[method-assign]


def federation(work: Federation, rounds: int, mark: Mark, engine: Any = None) -> Work:
    task, reads = task_of(work), Reads()
    for _ in run(plan_of(work, rounds), task, engine=engine):
        mark()
    return reads.work


def grid_plan(work: Grid, run: int) -> Plan:
    """Runs differ in step size and noise."""
    return noisy_minibatch_sgd(
        rounds=work.rounds,
        clients=Everyone(work.silos),
        sizes=(work.records,),
        batch=work.batch,
        radius=RADIUS,
        multiplier=MULTIPLIER * (1 + run % 6),
        lr=RATE * (1 + run % 10),
    )


def grid(work: Grid, times: int, mark: Mark, exact: bool = True) -> Work:
    """All runs, `times` over."""
    task, plans, reads = task_of(work, "logistic"), [grid_plan(work, run) for run in range(work.runs)], Reads()
    for turn in range(times):
        run_grid(plans, task, range(turn * work.runs, (turn + 1) * work.runs), exact=exact)
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


METHODS = {"run": simulated, "run, 2 workers": two_workers, "run, exact=False": partial(grid, exact=False)}
