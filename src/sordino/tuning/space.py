"""What is searched: keys of the file, each with a list of values or an interval; all combinations, or random ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sordino import codec
from sordino.errors import ConfigError, shown
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
        raise ConfigError(f"{key} = {shown(given)} in a search", "a list of values, or { low = ..., high = ... }")

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
