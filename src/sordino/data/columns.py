"""Columns of a table: what is declared of each, and how its tokens become numbers.

    [task.options.columns.amount]
    range = [0, 500_000]                     # public: goes to [-1, 1], and what lies outside is clamped
    missing = 0                              # public: stands for no value
    [task.options.columns.state]
    categories = ["CA", "NY", "other"]       # public: one coordinate each; "other" takes whatever is not named

Nothing here is computed from the rows. A range or an imputation that nobody knows is read off a noised histogram, at a
price (`quantiles`, `missing = "median"`): until that is released the column is held as its share of a public range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sordino import codec
from sordino.data.files import TextTable
from sordino.data.records import Array, to_unit
from sordino.data.tabular import MISSING
from sordino.errors import ConfigError, brief_repr

if TYPE_CHECKING:
    from sordino.parts.preparation import Histogram

OTHER = "other"  # the category that takes what is not declared
READ = ("mean", "median")  # imputations that are read off a histogram


@dataclass(frozen=True, kw_only=True)
class HistogramSpec:
    """A noised histogram of a column: what it costs, and the public grid `within` which all values are counted."""

    epsilon: float
    within: tuple[float, float]
    bins: int = 64
    grid: Literal["even", "log"] = "even"


@dataclass(frozen=True, kw_only=True)
class Column:
    """What is declared of one column; nothing: it must be numbers, none may be missing, and they are not scaled."""

    range: tuple[float, float] | None = None
    categories: tuple[str, ...] = ()
    missing: Any = None  # a number, or a category; "category"; "mean" or "median" of a histogram; None: refused
    quantiles: tuple[float, float] | None = None  # the range, read off a histogram
    histogram: HistogramSpec | None = None

    @property
    def scaled(self) -> bool:
        return self.range is not None or self.histogram is not None or bool(self.categories)

    @property
    def flagged(self) -> bool:
        """Whether a missing value has a coordinate of its own."""
        return bool(self.missing == "category")

    @property
    def width(self) -> int:
        return (len(self.categories) or 1) + self.flagged


# ---- reading what is declared ----------------------------------------------------------------------------------------


def column_declarations(columns: Any, ranges: Mapping[str, Any] | None = None) -> dict[str, Column]:
    """The columns of `[task.options.columns]`, and those of `ranges`, which is short for their ranges."""
    place = "task.options.columns"
    if columns is not None and not isinstance(columns, Mapping):
        raise ConfigError(f"{place} = {brief_repr(columns)}", "a table by columns", f"write [{place}.NAME]")
    tables = {str(name): table for name, table in (columns or {}).items()}
    twice = next((name for name in ranges or {} if name in tables), None)
    if twice is not None:
        raise ConfigError(f"column {twice!r} both in ranges and in columns", "one of them", "drop it from ranges")
    tables |= {name: {"range": pair} for name, pair in dict(ranges or {}).items()}
    return {name: _column(name, table, f"{place}.{name}") for name, table in tables.items()}


def _column(name: str, table: Any, where: str) -> Column:
    if isinstance(table, Mapping) and isinstance(table.get("categories"), list | tuple):
        words = [str(value) if type(value) in (int, float) else value for value in table["categories"]]
        table = {**table, "categories": [_plain(word) if isinstance(word, str) else word for word in words]}
    column: Column = codec.read(Column, table, where)
    for key in ("range", "quantiles"):
        _check_pair(getattr(column, key), f"{where}.{key}", key)
    if column.histogram is not None:
        histogram_release(name, column)
    _check_one_way(column, where)
    _check_missing(column, where)
    return column


def _check_pair(pair: tuple[float, float] | None, where: str, key: str) -> None:
    low, high = (-1e300, 1e300) if key == "range" else (0.0, 1.0)
    if pair is not None and not low <= pair[0] < pair[1] <= high:
        needed = "two numbers, low < high" if key == "range" else "two levels, 0 <= low < high <= 1"
        raise ConfigError(f"{where} = {list(pair)}", needed)


def _check_one_way(column: Column, where: str) -> None:
    given = [field.name for field in fields(column) if field.name != "missing" and getattr(column, field.name)]
    if column.categories and len(given) > 1:
        raise ConfigError(f"{where} with {' and '.join(given)}", "categories, or numbers", "drop one of them")
    if len(set(column.categories)) < len(column.categories):
        raise ConfigError(f"{where}.categories = {brief_repr(list(column.categories))}", "every category once")
    if column.range is not None and column.quantiles is not None:
        raise ConfigError(f"{where} with range and quantiles", "a public range, or one at a price", "drop one of them")
    asks = column.quantiles is not None or column.missing in READ
    if asks and column.histogram is None:
        what = "quantiles" if column.quantiles is not None else f"missing = {column.missing!r}"
        fix = "add histogram = { epsilon = 0.1, within = [LOW, HIGH] }, or declare public values"
        raise ConfigError(
            f"{where} with {what}, which private rows would tell", "a noised histogram to read it off", fix
        )
    if column.histogram is not None and not asks:
        found = f"{where} with a histogram, and nothing that is read off it"
        raise ConfigError(found, 'quantiles = [0.01, 0.99], or missing = "median"', "or drop it: it costs epsilon")


def _check_missing(column: Column, where: str) -> None:
    missing, place = column.missing, f"{where}.missing = {brief_repr(column.missing)}"
    if missing is None or missing == "category":
        return
    if column.categories:
        if str(missing) not in column.categories:
            raise ConfigError(place, '"category" (one of its own), or one of ' + ", ".join(column.categories)[:200])
        return
    if missing in READ:
        return
    if type(missing) not in (int, float) or not math.isfinite(missing):
        raise ConfigError(
            place, 'a number, "category", "mean" or "median"', "or leave it out: a missing value is refused"
        )
    if column.range is not None and not column.range[0] <= missing <= column.range[1]:
        raise ConfigError(place, f"a number inside the range {list(column.range)}", "else it would be clamped")


def histogram_release(name: str, column: Column) -> Histogram:
    """The release that a column asks for."""
    from sordino.parts.preparation import Histogram

    asked = column.histogram
    assert asked is not None
    return Histogram(name, asked.epsilon, *asked.within, asked.bins, asked.grid)


# ---- tokens into numbers ---------------------------------------------------------------------------------------------


def encode(rows: TextTable, name: str, column: Column) -> Array:
    """A column as the model reads it, [n, width]."""
    return _one_hot(rows, name, column) if column.categories else _numeric(rows, name, column)


def _one_hot(rows: TextTable, name: str, column: Column) -> Array:
    """One coordinate per category; a missing value in the place that is declared for it, or refused."""
    code = {word: place for place, word in enumerate(column.categories)}
    absent = len(code) if column.flagged else code.get(str(column.missing))
    places = [_place(rows, name, i, token, code, absent) for i, token in enumerate(rows.column(name))]
    return np.eye(column.width, dtype=np.float64)[places]


def _place(rows: TextTable, name: str, row: int, token: str, code: Mapping[str, int], absent: int | None) -> int:
    place = code.get(token, code.get(_plain(token)))
    if place is not None:
        return place
    if token in MISSING:
        return absent if absent is not None else rows.refuse(name, row, "a missing value", "a category", _FILL)
    if OTHER in code:
        return code[OTHER]
    known = "one of " + ", ".join(code)[:200]
    return rows.refuse(
        name, row, repr(token[:40]), known, f'add it to categories, or "{OTHER}" for all that is not there'
    )


_FILL = 'declare missing = "category", or one of the categories, for this column'


def _plain(token: str) -> str:
    """2.0 and 2 are one category: a column with missing values is often stored as floats."""
    try:
        value = float(token)
    except ValueError:
        return token
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 2**53 else token


def _numeric(rows: TextTable, name: str, column: Column) -> Array:
    """The number, scaled, and where it is declared so whether there is none."""
    values = rows.numbers(name, missing=column.missing is not None)
    absent = np.isnan(values)
    known = column.missing if type(column.missing) in (int, float) else None
    if known is not None and column.histogram is None:
        values = np.where(absent, known, values)
    main = _scaled(values, column)
    if column.histogram is not None:
        held = -1.0 if known is None else _share(np.array(float(known)), column.histogram.within)
    else:
        held = 0.0
    main = np.where(absent & np.isnan(main), held, main)
    return np.stack([main, absent], axis=1) if column.flagged else main[:, None]


def _scaled(values: Array, column: Column) -> Array:
    if column.histogram is not None:
        return _share(values, column.histogram.within)
    return values if column.range is None else to_unit(values, *column.range)


def _share(values: Array, within: tuple[float, float]) -> Array:
    """From a public range to [0, 1], clipped there."""
    low, high = within
    return np.clip((values - low) / (high - low), 0.0, 1.0)


# ---- once a histogram is released ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PendingColumn:
    """A coordinate of x that is held as a share of a public range (missing: -1) until its histogram is released."""

    place: int
    column: Column
    release: Histogram

    def read(self, total: Array) -> dict[str, Any]:
        """What the noised histogram says of the column, in its own unit: all that prepares new rows the same way."""
        low, high = self._span(total)
        span = [self.release.value(low), self.release.value(high)]
        fill = self._fill(total)
        return {"range": span, **({} if fill is None else {"missing": self.release.value(fill)})}

    def _span(self, total: Array) -> tuple[float, float]:
        """The range that goes to [-1, 1], as shares."""
        if self.column.quantiles is not None:
            return self.release.span(total, self.column.quantiles)
        low, high = (self.release.low, self.release.high) if self.column.range is None else self.column.range
        width = self.release.high - self.release.low
        return (low - self.release.low) / width, (high - self.release.low) / width

    def _fill(self, total: Array) -> float | None:
        match self.column.missing:
            case "mean":
                return self.release.mean(total)
            case "median":
                return self.release.quantile(total, 0.5)
        return None

    def apply(self, shares: Array, total: Array) -> Array:
        """[n], from shares to [-1, 1], imputed."""
        low, high = self._span(total)
        fill, held = self._fill(total), shares.astype(np.float64)
        scaled = np.clip(2 * (np.where(held < 0, fill or 0.0, held) - low) / (high - low) - 1, -1, 1)
        return scaled if fill is not None else np.where(held < 0, 0.0, scaled)


def scale_columns(x: Array, waiting: tuple[PendingColumn, ...], found: Mapping[str, Array]) -> Array:
    """The records once every histogram is released."""
    done = x.copy()
    for one in waiting:
        done[:, one.place] = one.apply(x[:, one.place], found[one.release.column])
    return done
