"""A published number, and what it takes to compute ours beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sordino.data.task import Records, Task
from sordino.plan import Plan


@dataclass(frozen=True)
class Job:
    """One run of a cell: the plan, the task, and the delta its epsilon is stated at."""

    plan: Plan
    task: Task
    delta: float
    validation: Records | None = None  # for the paper's own protocol, where it picks a round by validation


@dataclass(frozen=True)
class Cell:
    """One entry of a published table. `build(seed)` gives the run; `published` is the paper's figure in percent."""

    id: str
    title: str
    build: Callable[[int], Job]
    published: float | None = None
    claimed: float | None = None  # epsilon as published
    note: str = ""
    seeds: int = 3


@dataclass(frozen=True)
class Table:
    """Cells that belong together, under one id."""

    id: str
    title: str
    cells: tuple[Cell, ...]
    about: str = ""


def index(tables: Iterable[Table]) -> dict[str, tuple[Cell, ...]]:
    """Every id that can be run: a cell's own, and a table's for all its cells."""
    listed: dict[str, tuple[Cell, ...]] = {}
    for table in tables:
        listed[table.id] = table.cells
        listed |= {cell.id: (cell,) for cell in table.cells}
    return listed
