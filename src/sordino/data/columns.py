"""Columns of a table: what is declared of each, and how its tokens become numbers. Called by `tables` and `tabular`.

    [task.options.columns.amount]
    range = [0, 500_000]                     # public: goes to [-1, 1], and what lies outside is clamped
    missing = 0                              # public: stands for no value
    [task.options.columns.state]
    categories = ["CA", "NY", "other"]       # public: one coordinate each; "other" takes whatever is not named

Nothing here is computed from the rows. A range or an imputation that is not known publicly is read off a histogram
released with noise, which costs epsilon (`quantiles`, `missing = "median"`); until its release the column is held as
its share of a public range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sordino import codec
from sordino.data.files import MISSING, TextTable
from sordino.data.records import Array, to_unit
from sordino.errors import ConfigError, brief_repr

if TYPE_CHECKING:
    from sordino.parts.mechanisms import Histogram

OTHER = "other"  # the category of every value that is not declared
ZEROS = "zeros"  # missing = "zeros": a missing category is all zeros
FROM_HISTOGRAM = ("mean", "median")  # imputations that are read off a histogram


@dataclass(frozen=True, kw_only=True)
class HistogramSpec:
    """Noised histogram of a column: its epsilon, and the public grid `within` which all values are counted."""

    epsilon: float
    within: tuple[float, float]
    bins: int = 64
    grid: Literal["even", "log"] = "even"


@dataclass(frozen=True, kw_only=True)
class Column:
    """Public declarations of one column; without any it holds numbers, none missing, that are not scaled."""

    range: tuple[float, float] | None = None
    categories: tuple[str, ...] = ()
    missing: Any = None  # a number or a category; "category"; "zeros"; "mean" or "median" of a histogram; None: refused
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


# ---- declarations ----------------------------------------------------------------------------------------------------


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
        table = {**table, "categories": [_canonical(word) if isinstance(word, str) else word for word in words]}
    column: Column = codec.read(Column, table, where)
    if column.range is not None and not -1e300 <= column.range[0] < column.range[1] <= 1e300:
        raise ConfigError(f"{where}.range = {list(column.range)}", "two numbers, low < high")
    if column.quantiles is not None and not 0.0 <= column.quantiles[0] < column.quantiles[1] <= 1.0:
        raise ConfigError(f"{where}.quantiles = {list(column.quantiles)}", "two levels, 0 <= low < high <= 1")
    if column.histogram is not None:
        histogram_release(name, column)
    _check_consistent(column, where)
    _check_missing(column, where)
    return column


def _check_consistent(column: Column, where: str) -> None:
    """Categories or numbers; a public range or a private one; a histogram exactly where something is read off it."""
    given = [field.name for field in fields(column) if field.name != "missing" and getattr(column, field.name)]
    if column.categories and len(given) > 1:
        raise ConfigError(f"{where} with {' and '.join(given)}", "categories, or numbers", "drop one of them")
    if len(set(column.categories)) < len(column.categories):
        raise ConfigError(f"{where}.categories = {brief_repr(list(column.categories))}", "every category once")
    if column.range is not None and column.quantiles is not None:
        raise ConfigError(f"{where} with range and quantiles", "a public range, or a private one", "drop one of them")
    uses = column.quantiles is not None or column.missing in FROM_HISTOGRAM
    if uses and column.histogram is None:
        what = "quantiles" if column.quantiles is not None else f"missing = {column.missing!r}"
        fix = "add histogram = { epsilon = 0.1, within = [LOW, HIGH] }, or declare public values"
        found = f"{where} with {what}, which depends on private rows"
        raise ConfigError(found, "a noised histogram to read it off", fix)
    if column.histogram is not None and not uses:
        found = f"{where} with a histogram, and nothing that is read off it"
        raise ConfigError(found, 'quantiles = [0.01, 0.99], or missing = "median"', "or drop it: it costs epsilon")


def _check_missing(column: Column, where: str) -> None:
    missing, place = column.missing, f"{where}.missing = {brief_repr(column.missing)}"
    if missing is None or missing == "category":
        return
    if column.categories:
        if str(missing) not in (*column.categories, ZEROS):
            known = ", ".join(column.categories)[:200]
            raise ConfigError(place, f'"category" (one of its own), "{ZEROS}", or one of {known}')
    elif missing in FROM_HISTOGRAM:
        return
    elif type(missing) not in (int, float) or not math.isfinite(missing):
        fix = "or leave it out: a missing value is refused"
        raise ConfigError(place, 'a number, "category", "mean" or "median"', fix)
    elif column.range is not None and not column.range[0] <= missing <= column.range[1]:
        raise ConfigError(place, f"a number inside the range {list(column.range)}", "else it would be clamped")


def histogram_release(name: str, column: Column) -> Histogram:
    """The private release that a column needs before the first round."""
    from sordino.parts.mechanisms import Histogram

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
    absent = len(code) if column.flagged or column.missing == ZEROS else code.get(str(column.missing))

    def place(row: int, token: str) -> int:
        known = code.get(token, code.get(_canonical(token)))
        if known is not None:
            return known
        if token in MISSING:
            fix = 'declare missing = "category", or one of the categories, for this column'
            return absent if absent is not None else rows.refuse(name, row, "a missing value", "a category", fix)
        if OTHER in code:
            return code[OTHER]
        fix = f'add it to categories, or "{OTHER}" for all that is not there'
        return rows.refuse(name, row, repr(token[:40]), "one of " + ", ".join(code)[:200], fix)

    places = [place(row, token) for row, token in enumerate(rows.column(name))]
    return np.eye(len(code) + 1, column.width, dtype=np.float64)[places]


def _canonical(token: str) -> str:
    """2.0 and 2 are one category: a column with missing values is often stored as floats."""
    try:
        value = float(token)
    except ValueError:
        return token
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 2**53 else token


def _numeric(rows: TextTable, name: str, column: Column) -> Array:
    """The number, scaled; where a missing value has a coordinate of its own, that one beside it."""
    values = rows.numbers(name, missing=column.missing is not None)
    absent = np.isnan(values)
    constant = float(column.missing) if type(column.missing) in (int, float) else math.nan
    if column.histogram is not None:
        held = -1.0 if math.isnan(constant) else float(_share(np.array(constant), column.histogram.within))
        main = np.where(absent, held, _share(values, column.histogram.within))
    else:
        values = np.where(absent, constant, values)
        main = values if column.range is None else to_unit(values, *column.range)
        main = np.where(np.isnan(main), 0.0, main)
    return np.stack([main, absent], axis=1) if column.flagged else main[:, None]


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
        fill = self._fill(total)
        span = [self.release.value(low), self.release.value(high)]
        return {"range": span, **({} if fill is None else {"missing": self.release.value(fill)})}

    def _span(self, total: Array) -> tuple[float, float]:
        """The range that goes to [-1, 1], as shares."""
        if self.column.quantiles is not None:
            return self.release.span(total, self.column.quantiles)
        low, high = (self.release.low, self.release.high) if self.column.range is None else self.column.range
        width = self.release.high - self.release.low
        return (low - self.release.low) / width, (high - self.release.low) / width

    def _fill(self, total: Array) -> float | None:
        if self.column.missing == "mean":
            return self.release.mean(total)
        return self.release.quantile(total, 0.5) if self.column.missing == "median" else None

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
