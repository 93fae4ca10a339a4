"""A sweep as a file: `base`, or the tables of a run themselves; `[sweep]` with `grid` or `random`; and its cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sordino import codec
from sordino.config import Config, overridden, parse, read_table
from sordino.data import datasets, own
from sordino.data.halves import Half
from sordino.errors import ConfigError
from sordino.tuning.space import Changes, axes, drawn, grid

SMALLER = ("loss", "rmse", "error", "mae")  # figures of which less is better; of any other, more is
SEED, COINS = "run.seed", "run.coins"


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """`[sweep]`: what is tried, by which figure the best is chosen, and whose the training data are.

    `seeds` are the same for every setting, so that differences between settings are taken seed by seed; on private data
    they seed the coins alone, since another cut would make other clients. The rows that choose are a `share` of the
    public test rows, by the public seed `split`, or the rows of the file `validation`.
    """

    metric: str = ""  # empty: accuracy for classes, rmse for numbers
    seeds: tuple[int, ...] = ()
    data: Literal["public", "synthetic", "private"] | None = None  # None: as the data set is
    validation: str | None = None
    split: int = 0
    share: float = 0.5
    grid: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.grid) == bool(self.random):
            found = "[sweep.grid] and [sweep.random]" if self.grid else "neither [sweep.grid] nor [sweep.random]"
            raise ConfigError(found, "one of them", 'write "recipe.lr" = [0.1, 0.3] under [sweep.grid]')

    def settings(self) -> list[Changes]:
        """What is tried; run.seed among the keys is no setting."""
        if self.grid:
            return grid([axis for axis in axes(self.grid) if axis.key != SEED])
        table = dict(self.random)
        trials, seed = (table.pop(name, value) for name, value in (("trials", 10), ("seed", 0)))
        if type(trials) is not int or type(seed) is not int:
            raise ConfigError(f"[sweep.random] trials = {trials}, seed = {seed}", "whole numbers")
        return drawn(axes(table), trials, seed)

    @property
    def half(self) -> Half:
        """The rows that choose."""
        return Half("validation", self.split, self.share)


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    number: int
    changes: Changes
    seed: int
    config: Config

    @property
    def name(self) -> str:
        """Its folder."""
        return f"{self.number:03d}-seed{self.seed}"

    @property
    def words(self) -> str:
        """What is special about it."""
        said = [f"{key}={shown_value(value)}" for key, value in self.changes.items()]
        return ", ".join([*said, f"seed {self.seed}"])


def shown_value(value: Any) -> str:
    """A setting in a table: short, and a part by its kind."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{name}={shown_value(item)}" for name, item in value.items() if name != "kind")
        return f"{value.get('kind', '')}({inside})" if inside else str(value.get("kind", "{}"))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Sweep:
    """A whole file: what it says, and the table that every cell changes."""

    spec: SweepSpec
    table: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """A file; `base` is found beside it."""
        data = read_table(path)
        if "sweep" not in data:
            raise ConfigError(f"no [sweep] in {path}", "what to try", "see docs/tuning.md")
        return cls.of(data, path.parent)

    @classmethod
    def of(cls, data: Mapping[str, Any], beside: Path = Path()) -> Sweep:
        """What a file says; the tables of the file itself stand over those of its `base`."""
        rest = {name: value for name, value in data.items() if name not in ("base", "sweep")}
        table = rest if "base" not in data else _over(read_table(beside / str(data["base"])), rest)
        spec: SweepSpec = codec.read(SweepSpec, data["sweep"], "sweep")
        return cls(spec, table)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Paired: the same for every setting."""
        swept = [axis.values for axis in axes(self.spec.grid) if axis.key == SEED]
        listed = self.spec.seeds or (swept[0] if swept else (parse(self.table).run.seed,))
        found: tuple[int, ...] = codec.read(tuple[int, ...], list(listed), "sweep.seeds")
        if len(set(found)) < len(found):
            raise ConfigError(f"seeds = {list(found)}", "each seed once")
        return found

    def cells(self) -> list[Cell]:
        """Every run, each read whole: a mistake in any of them is found before the first."""
        return [
            Cell(number, changes, seed, self.config(changes, seed))
            for number, changes in enumerate(self.spec.settings())
            for seed in self.seeds
        ]

    def config(self, changes: Changes, seed: int | None = None, judged: bool = True) -> Config:
        """The file of one cell, judged by the rows that choose; else by those that report."""
        varied = COINS if self.data[0] == "private" else SEED  # of private data the clients stay who they are
        own = {} if seed is None else {varied: seed}
        made = parse(overridden(self.table, {**changes, **own}))
        if self.spec.validation is None:
            half = self.spec.half if judged else replace(self.spec.half, part="test")
            return replace(made, task=replace(made.task, half=half))
        options = {**made.task.options, "test": self.spec.validation}
        return replace(made, task=replace(made.task, options=options)) if judged else made

    @property
    def data(self) -> tuple[str, str]:
        """Whose the training rows are, and by whose word."""
        name, said = parse(self.table).task.dataset, self.spec.data
        if said is not None:
            return said, f'the file: [sweep] data = "{said}"'
        if name in own.NAMES or datasets.foreign(name):
            return "private", "nobody has said that they are public"
        return "public", f"the publisher of {name}"


def _over(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """One file over another, table by table."""
    found = dict(table)
    for name, value in changes.items():
        there = found.get(name)
        found[name] = _over(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return found
