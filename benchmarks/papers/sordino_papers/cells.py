"""A published number, and what it takes to compute ours beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.codec import digest, dump
from sordino.data.clients import Records
from sordino.loop import Round
from sordino.plan import Plan
from sordino.task import Task

Result = dict[str, Any]
Results = Mapping[str, Result]
Row = dict[str, Any]


def no_claims(results: Results) -> Iterable[Row]:
    """A table about which nothing is claimed."""
    return ()


@dataclass(frozen=True)
class Job:
    """One run of a cell: the plan, the task, and the delta its epsilon is stated at.

    `figures` reads further numbers off the last round (a train accuracy, say); they are kept seed by seed.
    """

    plan: Plan
    task: Task
    delta: float
    validation: Records | None = None  # for the paper's own protocol, where it picks a round by validation
    figures: Callable[[Round], Mapping[str, float | None]] | None = None
    train: bool = False  # keep train_accuracy and train_loss of the last round too: not private, for simulation

    @property
    def settings(self) -> str:
        """What a result depends on, short of the code: plan, delta, model and the sizes of the data, as one hash.

        Numbers count to six digits: the last ones of a noise multiplier that was solved for differ between processors.
        """
        clients, test = self.task.clients, self.task.test
        shapes = {slot.name: list(slot.shape) for slot in self.task.layout.slots}
        sizes = [clients.population, len(clients.records), 0 if test is None else len(test)]
        known = {"plan": dump(self.plan), "delta": self.delta, "model": shapes, "sizes": sizes}
        return digest(_short(as_first_named(known)))[:16]


FIRST_NAMES = {  # name in a plan today -> name when the kept results were computed; their hashes are over the latter
    "clip_norm": "radius",
    "noise_multiplier": "multiplier",
    "noise_multipliers": "multipliers",
    "cyclic_poisson": "turns",
    "min_separation": "separated",
}


def as_first_named(item: Any) -> Any:
    """Plain data with the keys and kinds that kept results were hashed under: a rename makes no result stale."""
    if isinstance(item, Mapping):
        return {FIRST_NAMES.get(key, key): as_first_named(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [as_first_named(value) for value in item]
    return FIRST_NAMES.get(item, item) if isinstance(item, str) else item


def _short(item: Any) -> Any:
    """The same with every number to six digits."""
    if isinstance(item, float):
        return float(f"{item:.6g}")
    if isinstance(item, Mapping):
        return {key: _short(value) for key, value in item.items()}
    return [_short(value) for value in item] if isinstance(item, list | tuple) else item


@dataclass(frozen=True)
class Cell:
    """One entry of a published table. `build(seed)` gives the run; `published` is the paper's figure in percent."""

    id: str
    title: str
    build: Callable[[int], Job]
    published: float | None = None
    claimed: float | None = None  # epsilon as published
    note: str = ""
    seeds: int = 5  # 3 where a run takes above three minutes


@dataclass(frozen=True)
class Table:
    """Cells that belong together, under one id.

    `chosen` says which data chose which hyper-parameter. `claims(results)` gives rows of `verdicts.verdict` and
    `verdicts.fact`; a KeyError means that a cell has not been run yet. `quick` names the cell that stands for the table
    where one is asked for (none: the one that took least). A table with `full` needs more than two cores: it is run by
    `--full` only, takes about `hours`, and is no part of `all`.
    """

    id: str
    title: str
    cells: tuple[Cell, ...]
    about: str = ""
    chosen: str = ""
    claims: Callable[[Results], Iterable[Row]] = no_claims
    quick: str | None = None
    full: bool = False
    hours: str = ""
    draw: Callable[[Results, Path], None] | None = None


def index(tables: Iterable[Table]) -> dict[str, tuple[Cell, ...]]:
    """Every id that can be run: a cell's own, and a table's for all its cells."""
    listed: dict[str, tuple[Cell, ...]] = {}
    for table in tables:
        listed[table.id] = table.cells
        listed |= {cell.id: (cell,) for cell in table.cells}
    return listed
