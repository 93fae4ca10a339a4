"""Search space of a sweep and its list of runs, read from `[sweep]`. Used by `sordino sweep` and `tune --private`."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sordino import codec
from sordino.config import Config, overridden, parse, read_table
from sordino.config.sections import HoldoutPart
from sordino.data import datasets
from sordino.errors import ConfigError, brief_repr
from sordino.plan import Plan
from sordino.recipes import RECIPES
from sordino.report.text_table import value_text
from sordino.rng import Seeded
from sordino.tuning.calibrated_file import solve

Changes = dict[str, Any]  # key of the file -> its value in one run
MOST = 10_000  # combinations of a search space
RUNS = "runs"  # folder of the runs in a sweep's folder
SEED, DRAW_SEED, EPSILON = "run.seed", "run.draw_seed", "epsilon"


@dataclass(frozen=True)
class Interval:
    """Interval of a search space; values are drawn uniformly, with `log` uniformly in the logarithm."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and self.low < self.high < math.inf) or (self.log and self.low <= 0):
            needed = "low < high, both finite" + (" and above 0" if self.log else "")
            raise ConfigError(f"an interval from {self.low:g} to {self.high:g}", needed, "correct low and high")

    def draw(self, rng: np.random.Generator) -> float | int:
        """Draw a number of the interval, rounded to an integer or to four digits."""
        ends = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        found = float(rng.uniform(*ends))
        found = min(max(math.exp(found) if self.log else found, self.low), self.high)
        return round(found) if self.integer else float(f"{found:.4g}")


Space = dict[str, tuple[Any, ...] | Interval]  # key of the file -> values to try


def read_space(table: Mapping[str, Any], prefix: str = "") -> Space:
    """Read a search space from TOML: a list or an interval { low, high, log, integer } for every key.

    Nested tables stand for keys with dots.
    """
    found: Space = {}
    for name, values in table.items():
        key = f"{prefix}{name}"
        if isinstance(values, Mapping) and "low" in values:
            found[key] = codec.read(Interval, values, key)
        elif isinstance(values, Mapping):
            found |= read_space(values, f"{key}.")
        elif not isinstance(values, list | tuple):
            needed = "a list of values, or an interval { low = ..., high = ... }"
            raise ConfigError(f"{key} = {brief_repr(values)} in a search", needed, f"write {key} = [...]")
        elif not values:
            raise ConfigError(f"{key} = [] in a search", "at least one value", f"give values, or remove {key}")
        else:
            found[key] = tuple(values)
    return found


def draw_changes(space: Space, rng: np.random.Generator) -> Changes:
    return {
        key: values.draw(rng) if isinstance(values, Interval) else values[int(rng.integers(len(values)))]
        for key, values in space.items()
    }


def combinations(space: Space) -> list[Changes]:
    """Return all combinations of a grid; the last key varies fastest, and an interval is refused."""
    lists: dict[str, tuple[Any, ...]] = {}
    for key, values in space.items():
        if isinstance(values, Interval):
            raise ConfigError(f"an interval for {key} in a grid", "a list of values", "write it under [sweep.random]")
        lists[key] = values
    if math.prod(map(len, lists.values())) > MOST:
        found, fix = f"a grid of more than {MOST:,} combinations", "use [sweep.random] with trials = ..."
        raise ConfigError(found, "fewer combinations", fix)
    return [dict(zip(lists, one, strict=True)) for one in itertools.product(*lists.values())]


def random_combinations(space: Space, trials: int, seed: int) -> list[Changes]:
    """Draw `trials` random combinations with a public seed."""
    if not 1 <= trials <= MOST:
        raise ConfigError(f"[sweep.random] trials = {trials}", f"1 to {MOST:,} trials", "set trials = 20")
    rng = Seeded(seed).at(0, "trials of a sweep")
    return [draw_changes(space, rng) for _ in range(trials)]


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """Table `[sweep]` of a file: the search space, the metric that selects the best, and whether the data are private.

    `recipe` compares whole recipes: names, or { name = ..., own keys = [values] }; keys of `[recipe]` are given to each
    recipe that has them as arguments. For every value of `epsilon`, the noise of each run is calibrated to it.
    `seeds` are the same for every setting, so that settings are compared seed by seed; on private data they seed
    sampling and noise only, since another partition would make other clients. The best setting is selected on a `share`
    of the public test rows, drawn by the public seed `split`, or on the rows of the file `validation`.
    """

    metric: str = ""  # empty: accuracy for classes, rmse for numbers
    seeds: tuple[int, ...] = ()
    data: Literal["public", "synthetic", "private"] | None = None  # None: as the data set is
    validation: str | None = None
    split: int = 0
    share: float = 0.5
    epsilon: tuple[float, ...] = ()
    recipe: tuple[Any, ...] = ()
    grid: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, table: Any) -> SweepSpec:
        """Read `[sweep]`, where `epsilon = 8` means [8], and `[sweep.recipe.NAME]` means { name = NAME, ... }."""
        data = dict(table) if isinstance(table, Mapping) else table
        if isinstance(data, dict):
            if isinstance(data.get("epsilon"), int | float):
                data["epsilon"] = [data["epsilon"]]
            if isinstance(data.get("recipe"), Mapping):
                data["recipe"] = [{"name": name, **keys} for name, keys in data["recipe"].items()]
        found: SweepSpec = codec.read(cls, data, "sweep")
        return found

    def __post_init__(self) -> None:
        if self.grid and self.random:
            fix = "write the lists of [sweep.grid] under [sweep.random]"
            raise ConfigError("both [sweep.grid] and [sweep.random]", "one of the two tables", fix)
        if not (self.grid or self.random or self.recipe or self.epsilon):
            found = "[sweep] without grid, random, recipe and epsilon"
            raise ConfigError(found, "at least one of them", 'write "recipe.lr" = [0.1, 0.3] under [sweep.grid]')

    def settings(self) -> list[Changes]:
        """Return every combination of epsilon, recipe and keys, each once; run.seed is not part of a setting.

        Where recipes are compared, each recipe gets only those common keys that are its arguments.
        """
        found: list[Changes] = []
        for epsilon, own, common in itertools.product(self.epsilon or (None,), self._recipes(), self._common()):
            name = own.get("recipe.name")
            if name is not None:
                takes = _arguments(name)
                common = {k: v for k, v in common.items() if not k.startswith("recipe.") or k.split(".")[1] in takes}
            changes = {**({} if epsilon is None else {EPSILON: epsilon}), **common, **own}
            if changes not in found:
                found.append(changes)
        return found

    def _common(self) -> list[Changes]:
        if not self.random:
            return combinations({key: values for key, values in read_space(self.grid).items() if key != SEED})
        table = dict(self.random)
        trials, seed = (table.pop(name, value) for name, value in (("trials", 10), ("seed", 0)))
        if type(trials) is not int or type(seed) is not int:
            found = f"[sweep.random] trials = {trials}, seed = {seed}"
            raise ConfigError(found, "whole numbers", "set trials = 20, and leave out seed")
        return random_combinations(read_space(table), trials, seed)

    def _recipes(self) -> list[Changes]:
        found: list[Changes] = []
        for given in self.recipe:
            own = {"name": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
            if not isinstance(own.get("name"), str):
                fix = 'write "dp_fed_sam", or { name = "dp_fed_sam", rho = [0.1, 0.5] }'
                raise ConfigError(f"{brief_repr(given)} in [sweep] recipe", "the name of a recipe", fix)
            values = {k: v if isinstance(v, list | tuple) else [v] for k, v in own.items()}
            found += combinations(read_space(values, "recipe."))
        return found or [{}]


def _arguments(name: str) -> frozenset[str]:
    return frozenset(inspect.signature(RECIPES[name]).parameters) if name in RECIPES else frozenset()


@dataclass(frozen=True)
class SweepRun:
    """Run of a sweep: a setting, a seed, and the folder that the run is written to."""

    number: int
    changes: Changes
    seed: int
    config: Config
    folder: Path

    @property
    def diverged_file(self) -> Path:
        """File beside the run's folder that marks the run as diverged; such a run is never repeated."""
        return self.folder.with_name(f"{self.folder.name}.diverged")

    @property
    def diverged(self) -> bool:
        return self.diverged_file.exists()

    @property
    def done(self) -> bool:
        return self.diverged or (self.folder / "certificate.json").is_file()

    @property
    def text(self) -> str:
        return ", ".join([*(f"{key}={value_text(value)}" for key, value in self.changes.items()), f"seed {self.seed}"])


@dataclass(frozen=True)
class Sweep:
    """Sweep over a search space: every run is the configuration `table` with some values changed."""

    spec: SweepSpec
    table: dict[str, Any]
    _plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict, compare=False, repr=False)  # solved for epsilon

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """Read the file of a sweep; its key `base` is a path relative to the file."""
        data = read_table(path)
        if "sweep" not in data:
            raise ConfigError(f"no [sweep] in {path}", "a [sweep] with the values to try", "see docs/tuning.md")
        return cls.of(data, path.parent)

    @classmethod
    def of(cls, data: Mapping[str, Any], beside: Path = Path()) -> Sweep:
        """Build a sweep from a file's table, whose values replace those of the file named by `base`."""
        rest = {name: value for name, value in data.items() if name not in ("base", "sweep")}
        table = rest if "base" not in data else _over(read_table(beside / str(data["base"])), rest)
        return cls(SweepSpec.read(data["sweep"]), table)

    @property
    def seeds(self) -> tuple[int, ...]:
        own = self.table.get("run", {}).get("seed", 0) if isinstance(self.table.get("run", {}), Mapping) else 0
        seeds = self.spec.seeds or read_space(self.spec.grid).get(SEED, (own,))
        found: tuple[int, ...] = codec.read(tuple[int, ...], seeds, "sweep.seeds")
        if len(set(found)) < len(found):
            raise ConfigError(f"seeds = {list(found)}", "each seed once", "remove the repeated seeds")
        return found

    def runs(self, out: Path = Path()) -> list[SweepRun]:
        """Return all runs with their checked configurations, so that a mistake is found before the first run."""
        found = []
        for number, changes in enumerate(self.spec.settings()):
            recipe = f"-{changes['recipe.name']}" if "recipe.name" in changes else ""
            for seed in self.seeds:
                folder = out / RUNS / f"{number:03d}{recipe}-seed{seed}"
                found.append(SweepRun(number, changes, seed, self.config(changes, seed), folder))
        return found

    def config(self, changes: Changes, seed: int | None = None, validation: bool = True) -> Config:
        """Return one run's configuration; `validation`: its test rows are those that select the best setting."""
        varied = DRAW_SEED if self.data[0] == "private" else SEED  # private data keep the same partition into clients
        made = self._solved(changes, {} if seed is None else {varied: seed})
        if self.spec.validation is None:
            half = HoldoutPart("validation" if validation else "test", self.spec.split, self.spec.share)
            return replace(made, task=replace(made.task, half=half))
        options = {**made.task.options, "test": self.spec.validation}
        return replace(made, task=replace(made.task, options=options)) if validation else made

    def _solved(self, changes: Changes, seed: Changes) -> Config:
        """Return one run's configuration; if the setting has an epsilon, the noise is calibrated to it."""
        rest = {key: value for key, value in changes.items() if key != EPSILON}
        table, epsilon = dict(self.table), changes.get(EPSILON)
        name, recipe = changes.get("recipe.name"), self.table.get("recipe", {})
        if name is not None and isinstance(recipe, Mapping):  # keep the common keys that are arguments of this recipe
            names = [given if isinstance(given, str) else given["name"] for given in self.spec.recipe]
            any_recipe = frozenset().union(*map(_arguments, names))  # keys of no recipe stay, and are refused later
            own = {key: value for key, value in recipe.items() if key in _arguments(name) or key not in any_recipe}
            table["recipe"] = {**own, "name": name}
        if epsilon is None:
            return parse(overridden(table, {**rest, **seed}))
        takes, delta = _arguments(str(table.get("recipe", {}).get("name"))), table.get("privacy", {}).get("delta")
        target: Changes = {}
        if "epsilons" in takes:
            target = {"recipe.epsilons": [epsilon], **({} if delta is None else {"recipe.deltas": [delta]})}
        elif "epsilon" in takes:
            target = {"recipe.epsilon": epsilon, **({} if delta is None else {"recipe.delta": delta})}
        if target:
            return parse(overridden(table, {**rest, **seed, **target}))
        fixed = "release" in table.get("recipe", {}) or "noise_multiplier" not in takes
        made = parse(overridden(table, {**rest, **seed, **({} if fixed else {"recipe.noise_multiplier": 1.0})}))
        key = codec.digest(made.plan), epsilon, made.delta, made.deltas
        if key not in self._plans:
            self._plans[key] = solve(made, epsilon=epsilon)
        return replace(made, plan=self._plans[key])

    @property
    def data(self) -> tuple[str, str]:
        """Whether the training rows are public, synthetic or private, and who declared it."""
        task, declared = self.table.get("task", {}), self.spec.data
        name = str(task.get("dataset", "digits")) if isinstance(task, Mapping) else "digits"
        if declared is not None:
            return declared, f'the file: [sweep] data = "{declared}"'
        if name in datasets.OWN or datasets.foreign(name):
            return "private", "not declared public"
        return "public", f"the publisher of {name}"


def _over(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(table)
    for name, value in changes.items():
        there = found.get(name)
        found[name] = _over(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return found
