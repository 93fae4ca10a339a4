"""What is searched: keys of the file, each with a list of values or an interval; all combinations, or random ones.

A sweep as a file: `base`, or the tables of a run themselves; `[sweep]` with `grid` or `random`; and its cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sordino import codec
from sordino.config import Config, overridden, parse, read_table
from sordino.config.holdout import HoldoutPart
from sordino.data import arrays, datasets
from sordino.errors import ConfigError, brief_repr
from sordino.rng import Seeded

Changes = dict[str, Any]  # a value for each key
MOST = 10_000  # combinations


@dataclass(frozen=True)
class Interval:
    """Numbers from low to high, evenly, or evenly in their logarithm; whole ones if asked."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and self.low < self.high < math.inf) or (self.log and self.low <= 0):
            needed = "low < high, both finite" + (" and above 0" if self.log else "")
            raise ConfigError(f"an interval from {self.low:g} to {self.high:g}", needed)

    def draw(self, coins: np.random.Generator) -> float | int:
        """One number, to four digits: it is written into a file."""
        ends = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        found = float(coins.uniform(*ends))
        found = min(max(math.exp(found) if self.log else found, self.low), self.high)
        return round(found) if self.whole else float(f"{found:.4g}")


@dataclass(frozen=True)
class Axis:
    """One key and what it may be."""

    key: str
    values: tuple[Any, ...] = ()
    interval: Interval | None = None

    @classmethod
    def of(cls, key: str, given: Any) -> Axis:
        """As a file writes it: a list, or { low, high, log, whole }."""
        if isinstance(given, list | tuple):
            if not given:
                raise ConfigError(f"{key} = [] in a search", "at least one value")
            return cls(key, tuple(given))
        if isinstance(given, Mapping) and "low" in given:
            return cls(key, (), codec.read(Interval, given, key))
        raise ConfigError(f"{key} = {brief_repr(given)} in a search", "a list of values, or { low = ..., high = ... }")

    def draw(self, coins: np.random.Generator) -> Any:
        """One value."""
        return (
            self.values[int(coins.integers(len(self.values)))] if self.interval is None else self.interval.draw(coins)
        )


def axes(table: Mapping[str, Any]) -> tuple[Axis, ...]:
    """The keys of a table; a table in it that is no interval is more of a dotted key (recipe.lr without quotes)."""
    found: list[Axis] = []
    for key, given in table.items():
        if isinstance(given, Mapping) and "low" not in given:
            found += [Axis(f"{key}.{one.key}", one.values, one.interval) for one in axes(given)]
        else:
            found.append(Axis.of(key, given))
    return tuple(found)


def grid(space: Sequence[Axis]) -> list[Changes]:
    """All combinations, the last key fastest."""
    loose = next((axis.key for axis in space if axis.interval is not None), None)
    if loose is not None:
        raise ConfigError(f"an interval for {loose} in a grid", "a list of values", "write it under [sweep.random]")
    if math.prod(len(axis.values) for axis in space) > MOST:
        raise ConfigError(f"a grid of more than {MOST:,} combinations", "fewer", "use [sweep.random] trials = ...")
    return [
        dict(zip([a.key for a in space], one, strict=True)) for one in itertools.product(*(a.values for a in space))
    ]


def drawn(space: Sequence[Axis], trials: int, seed: int) -> list[Changes]:
    """So many random combinations, by a public seed."""
    if not 1 <= trials <= MOST:
        raise ConfigError(f"[sweep.random] trials = {trials}", f"1 to {MOST:,}")
    coins = Seeded(seed).at(0, "trials of a sweep")
    return [{axis.key: axis.draw(coins) for axis in space} for _ in range(trials)]


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
    def half(self) -> HoldoutPart:
        """The rows that choose."""
        return HoldoutPart("validation", self.split, self.share)


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
        if name in arrays.NAMES or datasets.foreign(name):
            return "private", "nobody has said that they are public"
        return "public", f"the publisher of {name}"


def _over(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """One file over another, table by table."""
    found = dict(table)
    for name, value in changes.items():
        there = found.get(name)
        found[name] = _over(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return found
