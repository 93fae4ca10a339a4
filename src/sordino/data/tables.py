"""Tables of the user (.csv, .parquet): one file with a column of silos, or one file per silo.

`datasets.load("csv", ...)` calls `table`; `sordino plan` calls `preview`, which reads only the headers of files.
Every row is private unless the user declares otherwise. Public facts about columns are declared:

    [task.options.columns.amount]
    range = [0, 500_000]                     # public: scaled to [-1, 1]; values outside are clamped
    missing = 0                              # public: replaces a missing value
    [task.options.columns.state]
    categories = ["CA", "NY", "other"]       # public: one coordinate each; "other" stands for all other values
    [task.options.columns.admitted]
    date = "2010-01-01"                      # public: a date is the number of days since this one
    range = [0, 7000]

Columns are read in the order of their declarations, not of the file. All silos of a federation must have the same
`Encoding`, compared by its digest; the file format of a site (`format`) may differ. With
`person = { column = "patient", rows = 3 }` all rows of one person are one record, which is clipped as one.
Nothing is computed from the rows without noise. A range or an imputation that is not public is computed from a noised
histogram, which costs epsilon (`quantiles`, `missing = "median"`); before the histogram is released, the column is
stored as its position in a public range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from sordino import codec
from sordino.data.files import PARQUET, CsvFormat, TextTable, read_table, table_header
from sordino.data.records import (
    NO_ROW,
    Array,
    Dataset,
    check_classes,
    check_public_source,
    with_public_fraction,
    without_test,
)
from sordino.errors import ConfigError, DataError, brief_repr

if TYPE_CHECKING:
    from torch import Tensor

    from sordino.parts.mechanisms import Histogram

Paths = str | Path
MOST_FILES = 100_000
OTHER = "other"  # the category of every value that is not declared
ZEROS = "zeros"  # missing = "zeros": a missing category is all zeros
FROM_HISTOGRAM = ("mean", "median")  # imputations that are read off a histogram
MOST_ROWS = 1000  # of one person


@dataclass(frozen=True, kw_only=True)
class HistogramSpec:
    """Declaration of a noised histogram of one column: its epsilon, and its public range `within` and bins."""

    epsilon: float
    within: tuple[float, float]
    bins: int = 64
    grid: Literal["even", "log"] = "even"


@dataclass(frozen=True, kw_only=True)
class Column:
    """Public declarations about one column of a table; by default it has unscaled numbers, none of them missing."""

    range: tuple[float, float] | None = None
    categories: tuple[str, ...] = ()
    missing: Any = None  # a number or a category; "category"; "zeros"; "mean" or "median" of a histogram; None: refused
    quantiles: tuple[float, float] | None = None  # the range, read off a histogram
    histogram: HistogramSpec | None = None
    map: dict[str, str] = field(default_factory=dict)  # words of the files and what they stand for; "" is no value
    date: str | None = None  # ISO date: the column holds dates, read as days since this one
    absent: Any = None  # value of every row of a file without this column; "missing": as if each were missing

    @property
    def origin(self) -> datetime:
        """Date from which the days of this column of dates are counted."""
        return datetime.fromisoformat(str(self.date))

    def token(self, word: str) -> str:
        """Return the value that the declared `map` assigns to a word of the file, or the word itself."""
        return self.map.get(word, word)

    @property
    def flagged(self) -> bool:
        """Whether a missing value is encoded by a coordinate of its own."""
        return bool(self.missing == "category")

    @property
    def width(self) -> int:
        """Number of coordinates of x that encode this column."""
        return (len(self.categories) or 1) + self.flagged

    def release(self, name: str) -> Histogram:
        """Return the noised histogram that the column `name` needs before the first round."""
        from sordino.parts.mechanisms import Histogram

        asked = self.histogram
        assert asked is not None
        return Histogram(name, asked.epsilon, *asked.within, asked.bins, asked.grid)


# ---- declarations of columns -----------------------------------------------------------------------------------------


def column_declarations(columns: Any, ranges: Mapping[str, Any] | None = None) -> dict[str, Column]:
    """Parse the column declarations: `[task.options.columns]`, and `ranges`, the short form for public ranges."""
    place = "task.options.columns"
    if columns is not None and not isinstance(columns, Mapping):
        fix = f"write [{place}.NAME] with the name of the column"
        raise ConfigError(f"{place} = {brief_repr(columns)}", "one table per column", fix)
    tables = {str(name): table for name, table in (columns or {}).items()}
    twice = next((name for name in ranges or {} if name in tables), None)
    if twice is not None:
        found = f"column {twice!r} both in ranges and in columns"
        raise ConfigError(found, "one declaration of each column", "drop the column from ranges")
    tables |= {name: {"range": pair} for name, pair in dict(ranges or {}).items()}
    return {name: _column(name, table, f"{place}.{name}") for name, table in tables.items()}


def _column(name: str, table: Any, where: str) -> Column:
    if isinstance(table, Mapping) and isinstance(table.get("categories"), list | tuple):
        words = [str(value) if type(value) in (int, float) else value for value in table["categories"]]
        table = {**table, "categories": [_canonical(word) if isinstance(word, str) else word for word in words]}
    column: Column = codec.read(Column, table, where)
    if type(column.missing) is int and not column.categories:
        column = replace(column, missing=float(column.missing))
    _check_reading(column, where)
    if column.range is not None and not -1e300 <= column.range[0] < column.range[1] <= 1e300:
        found, fix = f"{where}.range = {list(column.range)}", "write, for example, range = [0, 100]"
        raise ConfigError(found, "two finite numbers with low < high", fix)
    if column.quantiles is not None and not 0.0 <= column.quantiles[0] < column.quantiles[1] <= 1.0:
        found, fix = f"{where}.quantiles = {list(column.quantiles)}", "write, for example, quantiles = [0.01, 0.99]"
        raise ConfigError(found, "two levels with 0 <= low < high <= 1", fix)
    if column.histogram is not None:
        column.release(name)  # refuses wrong values
    kinds = [one.name for one in fields(column) if one.name not in ("missing", "map", "absent")]
    given = [kind for kind in kinds if getattr(column, kind)]
    if column.categories and len(given) > 1:
        fix = "drop one of the two declarations"
        raise ConfigError(f"{where} with {' and '.join(given)}", "a column of categories, or one of numbers", fix)
    if len(set(column.categories)) < len(column.categories):
        found = f"{where}.categories = {brief_repr(list(column.categories))}"
        raise ConfigError(found, "each category once", "remove the repeated category")
    if column.range is not None and column.quantiles is not None:
        fix = "drop range or quantiles"
        raise ConfigError(f"{where} with range and quantiles", "a public range, or private quantiles", fix)
    uses = column.quantiles is not None or column.missing in FROM_HISTOGRAM
    if uses and column.histogram is None:
        what = "quantiles" if column.quantiles is not None else f"missing = {column.missing!r}"
        fix = "add histogram = { epsilon = 0.1, within = [LOW, HIGH] }, or declare public values"
        found = f"{where} with {what}, which would be computed from private rows"
        raise ConfigError(found, "a noised histogram from which it is computed", fix)
    if column.histogram is not None and not uses:
        found, fix = f"{where} with a histogram that is not used", "drop the histogram, which costs epsilon"
        raise ConfigError(found, 'a use of it: quantiles = [0.01, 0.99], or missing = "median"', fix)
    _check_missing(column, f"{where}.missing = {brief_repr(column.missing)}")
    if column.absent is not None:
        _check_absent(name, column, f"{where}.absent = {brief_repr(column.absent)}")
    return column


def _check_absent(name: str, column: Column, found: str) -> None:
    try:
        encode(TextTable(Path("fed.toml"), (name,), [[_absent_token(column)]]), name, column)
    except DataError as error:
        needed = f'{error.needed}, or "missing", which needs a declaration missing = ...'
        raise ConfigError(found, needed, "correct absent, or declare missing") from None


def _absent_token(column: Column) -> str:
    return "" if column.absent == "missing" else str(column.absent)


def _check_reading(column: Column, where: str) -> None:
    wrong = next((one for one in column.map.items() if not all(isinstance(side, str) for side in one)), None)
    if wrong is not None or (column.date is not None and column.map):
        found = f"{where}.map = {brief_repr(column.map)}"
        needed = "words of the file and their values, for a column without dates"
        raise ConfigError(found, needed, 'write, for example, map = { male = "M" }')
    if column.date is not None:
        try:
            column.origin.isoformat()
        except ValueError:
            needed = "the date from which days are counted, in ISO 8601"
            raise ConfigError(f"{where}.date = {column.date!r}", needed, 'write it like "2010-01-01"') from None


def _check_missing(column: Column, found: str) -> None:
    missing = column.missing
    if missing is None or missing == "category":
        return
    if column.categories:
        if str(missing) not in (*column.categories, ZEROS):
            needed = f'"category" (a further coordinate), "{ZEROS}", or one of {", ".join(column.categories)[:200]}'
            raise ConfigError(found, needed, "choose one of these")
    elif missing in FROM_HISTOGRAM:
        return
    elif type(missing) not in (int, float) or not math.isfinite(missing):
        fix = "correct it, or leave it out: then a missing value is refused"
        raise ConfigError(found, 'a number, "category", "mean" or "median"', fix)
    elif column.range is not None and not column.range[0] <= missing <= column.range[1]:
        needed = f"a number inside the range {list(column.range)}"
        raise ConfigError(found, needed, "choose such a number, since others are clamped")


# ---- tokens into numbers ---------------------------------------------------------------------------------------------


def to_unit(values: Array, low: float | Array, high: float | Array) -> Array:
    """Scale values from a public range to [-1, 1] and clip them there, so that a record's norm has a public bound."""
    return np.asarray(np.clip(2 * (values - low) / (high - low) - 1, -1, 1), dtype=np.float32)


def encode(rows: TextTable, name: str, column: Column) -> Array:
    """Return one column as model inputs [n, width]: one-hot categories, or scaled numbers.

    If the file does not have the column, each row gets the declared value `absent`.
    """
    if name not in rows.header:
        one = encode(TextTable(rows.path, (name,), [[_absent_token(column)]]), name, column)
        return np.repeat(one, len(rows.rows), axis=0)
    if column.categories:
        return _one_hot(rows, name, column)
    if column.date is not None:
        values = rows.dates(name, column.origin, missing=column.missing is not None)
    else:
        values = rows.numbers(name, missing=column.missing is not None, words=column.map)
    absent = np.isnan(values)
    constant = float(column.missing) if type(column.missing) in (int, float) else math.nan
    if column.histogram is not None:  # held as the share of a public range, clipped to [0, 1]; missing: -1
        low, high = column.histogram.within
        main = np.clip((np.where(absent, constant, values) - low) / (high - low), 0.0, 1.0)
        main = np.where(np.isnan(main), -1.0, main)
    else:
        values = np.where(absent, constant, values)
        main = values if column.range is None else to_unit(values, *column.range)
        main = np.where(np.isnan(main), 0.0, main)
    return np.stack([main, absent], axis=1) if column.flagged else main[:, None]


def _one_hot(rows: TextTable, name: str, column: Column) -> Array:
    code = {word: place for place, word in enumerate(column.categories)}
    absent = len(code) if column.flagged or column.missing == ZEROS else code.get(str(column.missing))
    places = []
    for row, token in enumerate(map(column.token, rows.column(name))):
        place = code.get(token, code.get(_canonical(token)))
        if place is None and rows.missing(token):
            place, fix = absent, 'declare missing = "category", or one of the categories, for this column'
            if place is None:
                rows.refuse(name, row, "a missing value", "a category", fix)
        elif place is None:
            place, fix = code.get(OTHER), f'add it to categories, or add "{OTHER}" for all undeclared values'
            if place is None:
                rows.refuse(name, row, repr(token[:40]), "one of " + ", ".join(code)[:200], fix)
        places.append(place)
    return np.eye(len(code) + 1, column.width, dtype=np.float64)[places]


def _canonical(token: str) -> str:
    """Return "2" for "2.0", since programs store integers of a column with missing values as floats."""
    try:
        value = float(token)
    except ValueError:
        return token
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 2**53 else token


@dataclass(frozen=True)
class PendingColumn:
    """Coordinate of x that is not scaled before its noised histogram is released.

    Until then it is the value's position in a public range, in [0, 1], or -1 for a missing value.
    """

    place: int
    column: Column
    release: Histogram

    def read(self, total: Array) -> dict[str, Any]:
        """Return range and imputation, in the column's unit, computed from the noised counts `total`, for new rows."""
        low, high, fill = self._estimate(total)
        span = [self.release.value(low), self.release.value(high)]
        return {"range": span, **({} if fill is None else {"missing": self.release.value(fill)})}

    def _estimate(self, total: Array) -> tuple[float, float, float | None]:
        """Return the low and high end of the range, and the imputation or None, as positions in the public range."""
        release, missing = self.release, self.column.missing
        median = release.quantile(total, 0.5) if missing == "median" else None
        fill = release.mean(total) if missing == "mean" else median
        if self.column.quantiles is not None:
            return *release.span(total, self.column.quantiles), fill
        low, high = (release.low, release.high) if self.column.range is None else self.column.range
        width = release.high - release.low
        return (low - release.low) / width, (high - release.low) / width, fill

    def apply(self, shares: Array, total: Array) -> Array:
        """Impute missing values and scale positions [n] in the public range to [-1, 1], by noised counts `total`."""
        (low, high, fill), held = self._estimate(total), shares.astype(np.float64)
        scaled = np.clip(2 * (np.where(held < 0, fill or 0.0, held) - low) / (high - low) - 1, -1, 1)
        return scaled if fill is not None else np.where(held < 0, 0.0, scaled)


def scale_columns(x: Array, waiting: tuple[PendingColumn, ...], found: Mapping[str, Array]) -> Array:
    """Return records with their pending columns scaled by the released histograms `found`, by column name."""
    done = x.copy()
    for one in waiting:
        done[:, one.place] = one.apply(x[:, one.place], found[one.release.column])
    return done


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Person:
    """Column with the person of each row; the first `rows` rows of a person are used as one record.

    No row of another person changes this record. So clipping a record bounds what a whole person contributes, and a
    record-level guarantee protects one person.
    """

    column: str
    rows: int

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MOST_ROWS:
            needed = f"a public number from 1 to {MOST_ROWS}, the largest number of rows of one person"
            raise ConfigError(f"person.rows = {self.rows}", needed, "correct rows")

    def records(self, rows: TextTable, owners: list[str]) -> list[list[int]]:
        """Return the row numbers of each record (a person within one silo), in the order of first appearance."""
        found: dict[tuple[str, str], list[int]] = {}
        for row, (owner, token) in enumerate(zip(owners, rows.column(self.column), strict=True)):
            if rows.missing(token):
                rows.refuse(self.column, row, "a row without a person", "the person of every row", "fill the cell")
            mine = found.setdefault((owner, token), [])
            if len(mine) < self.rows:
                mine.append(row)
        return list(found.values())


def stacked(values: Array, records: list[list[int]], rows: int, fill: float) -> Array:
    """Stack the values of each record's rows: [n, ...] if `rows` is 1, else [n, rows, ...], padded with `fill`."""
    if rows == 1:
        return values[[record[0] for record in records]]
    made = np.full((len(records), rows, *values.shape[1:]), fill, dtype=values.dtype)
    for place, record in enumerate(records):
        made[place, : len(record)] = values[record]
    return made


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Public encoding of table rows as x and y: columns in order, target, classes and person column.

    Nothing in it is computed from rows. All silos that train one model must have the same encoding.
    """

    names: tuple[str, ...]  # of the columns, in the order of the coordinates
    columns: tuple[Column, ...]
    target: str
    target_column: Column = field(default_factory=Column)
    classes: int | None = None
    words: tuple[str, ...] = ()
    person: Person | None = None

    @property
    def sha256(self) -> str:
        return codec.digest(self)

    @property
    def width(self) -> int:
        """Number of coordinates of x for one row."""
        return sum(column.width for column in self.columns)

    def features(self, rows: TextTable) -> Array:
        """Return the model inputs x of the rows, [n, width]."""
        if not len(rows.rows):
            raise DataError(f"no row under the header of {rows.path}", "at least one row", "check the path")
        return np.concatenate([encode(rows, *one) for one in zip(self.names, self.columns, strict=True)], axis=1)

    def targets(self, rows: TextTable) -> Array:
        """Return y of the rows: class labels, or numbers that are scaled if the target has a declared range."""
        own, words = self.target_column, self.target_column.map
        if self.words:
            code, tokens = {word: place for place, word in enumerate(self.words)}, rows.column(self.target)
            tokens = [own.token(token) for token in tokens]
            wrong = next((row for row, token in enumerate(tokens) if token not in code), None)
            if wrong is not None:
                found = "a missing label" if rows.missing(tokens[wrong]) else f"label {tokens[wrong][:40]!r}"
                fix = "add it to classes, or correct the row"
                rows.refuse(self.target, wrong, found, "one of " + ", ".join(code)[:200], fix)
            return np.array([code[token] for token in tokens])
        if self.classes is not None:
            return rows.labels(self.target, self.classes, words)
        numbers = rows.numbers(self.target, words=words)
        return numbers if own.range is None else to_unit(numbers, *own.range)

    def unscaled(self, values: Tensor) -> Tensor:
        """Return predicted numbers in the unit of the target column."""
        low, high = self.target_column.range or (-1.0, 1.0)
        return low + (values + 1) * (high - low) / 2

    def differs(self, other: Encoding) -> str:
        """Return a sentence on the first difference from another encoding; empty if both are equal."""
        mine, theirs = (dict(zip(one.names, one.columns, strict=True)) for one in (self, other))
        for name in [*mine, *theirs]:
            if name not in theirs or name not in mine:
                return f"column {name!r} is in one of the two only"
            parts = (
                one.name for one in fields(Column) if getattr(mine[name], one.name) != getattr(theirs[name], one.name)
            )
            part = next(parts, None)
            if part is not None:
                here, there = (brief_repr(getattr(side[name], part)) for side in (mine, theirs))
                return f"{part} of column {name!r} is {here} in one and {there} in the other"
        for part in (one.name for one in fields(self)):
            if getattr(self, part) != getattr(other, part):
                here, there = (brief_repr(getattr(side, part)) for side in (self, other))
                return f"{part.replace('names', 'order of columns')} is {here} in one and {there} in the other"
        return ""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options of a table, checked without opening a file."""

    paths: tuple[Path, ...]
    names: tuple[str, ...]  # of the files' silos; none if there is one file
    target: str
    groups: str | None
    classes: int | None
    words: tuple[str, ...]  # of the classes, where they have names
    columns: dict[str, Column]
    ignore: tuple[str, ...]
    format: CsvFormat
    person: Person | None

    def of(self, name: str) -> Column:
        return self.columns.get(name, Column())

    @property
    def no_features(self) -> list[str]:
        """Columns that are no model inputs: target, silo, person and ignored columns."""
        return [
            self.target, *([self.groups] if self.groups else []), *([self.person.column] if self.person else []),
            *self.ignore,
        ]  # fmt: skip

    def encoding(self, header: tuple[str, ...] = ()) -> Encoding:
        """Return the encoding: declared columns in the order of their declarations, then other columns of `header`."""
        out, others = self.no_features, [name for name in header if name not in self.columns]
        names = tuple(name for name in (*self.columns, *others) if name not in out)
        return Encoding(
            names=names, columns=tuple(self.of(name) for name in names), target=self.target,
            target_column=self.of(self.target), classes=self.classes, words=self.words, person=self.person,
        )  # fmt: skip


def table(
    *, target: str, path: Paths | None = None, files: Paths | list[str] | None = None, groups: str | None = None,
    classes: int | list[str] | None = None, columns: Mapping[str, Any] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None, ignore: list[str] | None = None,
    format: Mapping[str, Any] | None = None, person: Mapping[str, Any] | None = None,
    test: Paths | None = None, public_test_fraction: float | None = None,
) -> Dataset:  # fmt: skip
    """Read .csv or .parquet tables with a header; column `target` is predicted from all others.

    `path` is one file, and `groups` its column of silo names. Or `files` is a list, a pattern ("sites/*.csv") or a
    folder, with one file per silo, which gives the silo its name. `classes` makes the target a class label: it is the
    number of classes, or a list of their words. `columns` declares public facts about each column (range, categories,
    missing); `ranges` is the short form for public ranges, `ignore` lists columns that are not used. `format` is the
    .csv format (`CsvFormat`), `person` the column with the person of each row (`Person`). Test records are public by
    declaration: another file `test`, or a fixed `public_test_fraction` of the rows; otherwise there are none.
    """
    options = table_options(
        target, path, files, groups, classes, columns, ranges, ignore, test, public_test_fraction, format, person
    )
    if not options.paths:
        found = f"no file for files = {brief_repr(str(files))}"
        raise DataError(found, "at least one .csv or .parquet file", "correct files")
    tables = [read_table(one, options.format) for one in options.paths]
    encoding = _encoding(options, [(rows.path, rows.header) for rows in tables])
    sides, owners, most = [], list[list[str]](), 1 if options.person is None else options.person.rows
    for place, rows in enumerate(tables):
        mine = _owners(rows, groups) if groups is not None else [str(place)] * len(rows.rows)
        x, y = encoding.features(rows), encoding.targets(rows)
        if options.person is not None:
            records = options.person.records(rows, mine)
            x, y = stacked(x, records, most, 0.0), stacked(y, records, most, NO_ROW)
            mine = [mine[record[0]] for record in records]
        sides.append((x, y))
        owners.append(mine)
    x, y = (np.concatenate(side) for side in zip(*sides, strict=True))
    names, places = options.names, None
    if names:
        places = np.repeat(np.arange(len(tables)), [len(mine) for mine in owners])
    elif groups is not None:
        values, places = np.unique(np.array(owners[0], dtype=str), return_inverse=True)
        names, places = tuple(str(name) for name in values), places.astype(np.int64)
    low, high = options.of(target).range or (-1.0, 1.0)
    starts = np.cumsum([0, *(column.width for column in encoding.columns)]).tolist()
    held = zip(encoding.names, starts, encoding.columns, strict=False)
    pending = tuple(PendingColumn(at, own, own.release(name)) for name, at, own in held if own.histogram)
    data = without_test(x, y, places, options.classes, names, most)
    data = replace(data, target_unit=(high - low) / 2, waiting=pending, encoding=encoding)
    if test is None:
        return with_public_fraction(data, options.paths[0], public_test_fraction)
    test_x, test_y = encoded_rows(encoding, Path(test), options.format)
    return replace(data, test_x=test_x, test_y=test_y)


def _owners(rows: TextTable, groups: str) -> list[str]:
    tokens = rows.column(groups)
    empty = next((row for row, token in enumerate(tokens) if rows.missing(token)), None)
    if empty is not None:
        rows.refuse(groups, empty, "a row without a silo", "the name of its silo", "fill the cell")
    return tokens


def encoded_rows(encoding: Encoding, path: Path, format: CsvFormat | None = None) -> tuple[Array, Array]:
    """Return x and y of a file, in the shape of training records; each row is one record."""
    rows = read_table(path, format)
    _check_columns([encoding.target, *_needed(encoding)], rows.path, rows.header)
    x, y, most = encoding.features(rows), encoding.targets(rows), 1 if encoding.person is None else encoding.person.rows
    each = [[row] for row in range(len(y))]
    return stacked(x, each, most, 0.0), stacked(y, each, most, NO_ROW)


def _needed(encoding: Encoding) -> list[str]:
    return [name for name, one in zip(encoding.names, encoding.columns, strict=True) if one.absent is None]


def table_options(
    target: str, path: Paths | None = None, files: Any = None, groups: str | None = None, classes: Any = None,
    columns: Any = None, ranges: Any = None, ignore: Any = None, test: Any = None, public_test_fraction: Any = None,
    format: Any = None, person: Any = None,
) -> TableOptions:  # fmt: skip
    """Check the options of a table (see `table`) without opening a file."""
    if (path is None) == (files is None):
        found = "both path and files" if path is not None else "neither path nor files"
        fix = 'write path = "a.csv", or files = "sites/*.csv"'
        raise ConfigError(f"{found} of a table", "either path or files", fix)
    for key, given in (("target", target), ("groups", groups if groups is not None else "")):
        if not isinstance(given, str):
            raise ConfigError(f"{key} = {brief_repr(given)}", "the name of a column", f'write {key} = "NAME"')
    if files is not None and groups is not None:
        fix = "drop groups, or give one file as path"
        raise ConfigError("both files and groups", "either one file per silo or a column of silos", fix)
    if ignore is not None and not (isinstance(ignore, list | tuple) and all(isinstance(one, str) for one in ignore)):
        raise ConfigError(f"ignore = {brief_repr(ignore)}", "a list of columns", 'write ignore = ["id", "name"]')
    paths = (Path(str(path)),) if path is not None else _listed(files)
    names = tuple(path.stem for path in paths) if files is not None else ()
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        needed = "a different name for the file of every silo"
        raise ConfigError(f"two files named {twice!r}", needed, "rename one of the files")
    listed, words = isinstance(classes, list | tuple), tuple[str, ...]()
    if listed:
        words = tuple(str(word) for word in classes if type(word) in (str, int))
        if len(words) < 2 or len(set(words)) < len(classes):
            found = f"classes = {brief_repr(list(classes))}"
            raise ConfigError(found, "at least two words, each once", 'write, for example, classes = ["no", "yes"]')
    known = column_declarations(columns, ranges)
    own = known.get(target, Column())
    if own != Column(range=own.range, map=own.map) or (own.range is not None and classes is not None):
        fix = 'declare labels by classes = ["no", "yes"]'
        raise ConfigError(f"columns.{target} for the target", "only a range, if it is a number, or a map", fix)
    whose: Person | None = None if person is None else codec.read(Person, person, "task.options.person")
    if whose is not None and whose.rows > 1 and (classes is None or any(one.histogram for one in known.values())):
        what = "a number as the target" if classes is None else "a histogram of a column"
        needed = "classes, and columns without histograms, for several rows of a person"
        raise ConfigError(f"person.rows = {whose.rows} and {what}", needed, "set rows = 1")
    for one in paths or (Path(),):
        check_public_source(one, test, public_test_fraction=public_test_fraction)
    return TableOptions(
        paths=paths, names=names, target=target, groups=groups, words=words, columns=known, ignore=tuple(ignore or ()),
        classes=len(words) if listed else check_classes(classes), person=whose,
        format=codec.read(CsvFormat, format or {}, "task.options.format"),
    )  # fmt: skip


def _listed(files: Any) -> tuple[Path, ...]:
    if isinstance(files, list | tuple) and files and all(isinstance(one, str | Path) for one in files):
        return tuple(Path(one) for one in files)
    where = f"files = {brief_repr(str(files) if isinstance(files, Path) else files)}"
    if not isinstance(files, str | Path) or not str(files):
        raise ConfigError(where, "a list of files, a pattern, or a folder", 'write, for example, "sites/*.csv"')
    try:
        there = Path(files).expanduser()
        if there.is_dir():
            found = [one for one in there.iterdir() if one.suffix in (".csv", *PARQUET) and one.is_file()]
        else:
            matches = Path(there.anchor or ".").glob(str(there.relative_to(there.anchor)))
            found = [one for one in matches if one.is_file()]
    except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{where}, which cannot be read ({error})", "a pattern or a folder", "correct it") from None
    if len(found) > MOST_FILES:
        raise DataError(f"{len(found)} files for {where}", f"at most {MOST_FILES}", "join files, or narrow the pattern")
    return tuple(sorted(found))


# ---- checks of headers -----------------------------------------------------------------------------------------------


def _encoding(options: TableOptions, headers: list[tuple[Path, tuple[str, ...]]]) -> Encoding:
    first, header = headers[0]
    out, encoding = options.no_features, options.encoding(header)
    if not encoding.names:
        fix = "add a column, or drop one from ignore"
        raise DataError(f"no feature column in {first}", "at least one beside the target and the groups", fix)
    for path, other in headers:
        extra = sorted(set(other) - set(out) - set(encoding.names))
        if extra:
            found = f"column {extra[0][:40]!r} in {path}, which is not in {first}"
            fix = "declare the column, with absent = ..., or add it to ignore"
            raise DataError(found, "the same columns in all files", fix)
        wanted = out if path == first else out[: len(out) - len(options.ignore)]
        _check_columns([*wanted, *_needed(encoding)], path, other)
    return encoding


def _check_columns(names: list[str], path: Path, header: tuple[str, ...]) -> None:
    missing = next((name for name in names if name not in header), None)
    if missing is not None:
        listed = ", ".join(name[:40] for name in header[:20])
        close = codec.nearest(missing, list(header)) if missing else ""
        fix = close if "mean" in close else "correct the name of the column"
        raise ConfigError(f"no column {missing!r} in {path}", f"one of {listed}", fix)


def check_columns(encoding: Encoding, rows: TextTable, others: tuple[str, ...] = ()) -> None:
    """Refuse a table that lacks an input column of the encoding or one of `others`; the target may be missing."""
    _check_columns([*_needed(encoding), *others], rows.path, rows.header)


class TablePreview(NamedTuple):
    """Facts about a table that need no rows: silo names, one per file, and notes for the user."""

    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def preview(given: Mapping[str, Any]) -> TablePreview:
    """Return silo names and notes about a table; refuse invalid options and headers, without reading a row."""
    options, test = table_options(**given), given.get("test")
    absent = [path for path in options.paths if not path.expanduser().exists()]
    if absent or not options.paths:
        where = absent[0] if absent else given.get("files")
        return TablePreview(options.names, (f"{where} does not exist here: columns are not checked",))
    encoding = _encoding(options, [(path, table_header(path, options.format)) for path in options.paths])
    if isinstance(test, str | Path) and Path(test).expanduser().exists():
        header = table_header(Path(test), options.format)
        _check_columns([options.target, *_needed(encoding)], Path(test), header)
    columns = dict(zip(encoding.names, encoding.columns, strict=True))
    plain = [name for name, own in columns.items() if own.range is None and not own.histogram and not own.categories]
    if not plain:
        return TablePreview(options.names)
    some = ", ".join(name[:40] for name in plain[:8]) + (", ..." if len(plain) > 8 else "")
    note = (
        f"{len(plain)} column(s) without a declared range are not scaled: {some}; values of 500,000 beside values of 1 "
        "make clipping useless: declare [task.options.columns.NAME] range = [low, high]"
    )
    return TablePreview(options.names, (note,))


def preparations(options: Mapping[str, Any]) -> tuple[Histogram, ...]:
    """Return the noised histograms that the columns of a table need, sorted by column name."""
    known = column_declarations(options.get("columns"), options.get("ranges"))
    return tuple(known[name].release(name) for name in sorted(known) if known[name].histogram is not None)


def declared_encoding(options: Mapping[str, Any]) -> Encoding:
    """Return the encoding of the declared columns, which a server can compute since no file is opened."""
    own = {key: value for key, value in options.items() if key not in ("train", "validation")}
    return table_options(**own).encoding()
