"""Tables of the user's own, .csv or .parquet: one file with a column of silos, a list of files, or a folder.

`datasets.load("csv", ...)` calls `table`; `sordino plan` calls `preview`, which opens files for their header alone.
Every row is private unless the user declares otherwise. What is public of a column is declared too:

    [task.options.columns.amount]
    range = [0, 500_000]                     # public: goes to [-1, 1], and what lies outside is clamped
    missing = 0                              # public: stands for no value
    [task.options.columns.state]
    categories = ["CA", "NY", "other"]       # public: one coordinate each; "other" takes whatever is not named

Nothing is computed from the rows without noise. A range or an imputation that is not public is computed from a noised
histogram, which costs epsilon (`quantiles`, `missing = "median"`); before its release the column is stored as its
position in a public range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from sordino import codec
from sordino.data.files import MISSING, PARQUET, TextTable, read_table, table_header
from sordino.data.records import Array, Dataset, check_classes, check_public_source, with_public_fraction, without_test
from sordino.errors import ConfigError, DataError, brief_repr

if TYPE_CHECKING:
    from sordino.parts.mechanisms import Histogram

Paths = str | Path
MOST_FILES = 100_000
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
    """Public declarations about one column of a table; by default it has numbers, none missing, not scaled."""

    range: tuple[float, float] | None = None
    categories: tuple[str, ...] = ()
    missing: Any = None  # a number or a category; "category"; "zeros"; "mean" or "median" of a histogram; None: refused
    quantiles: tuple[float, float] | None = None  # the range, read off a histogram
    histogram: HistogramSpec | None = None

    @property
    def flagged(self) -> bool:
        """Whether a missing value has its own coordinate."""
        return bool(self.missing == "category")

    @property
    def width(self) -> int:
        """Number of coordinates in x."""
        return (len(self.categories) or 1) + self.flagged

    def release(self, name: str) -> Histogram:
        """Return the private release that the column called `name` needs before the first round."""
        from sordino.parts.mechanisms import Histogram

        asked = self.histogram
        assert asked is not None
        return Histogram(name, asked.epsilon, *asked.within, asked.bins, asked.grid)


# ---- declarations of columns -----------------------------------------------------------------------------------------


def column_declarations(columns: Any, ranges: Mapping[str, Any] | None = None) -> dict[str, Column]:
    """Read the column declarations of `[task.options.columns]` and of `ranges`, the short form for public ranges."""
    place = "task.options.columns"
    if columns is not None and not isinstance(columns, Mapping):
        raise ConfigError(f"{place} = {brief_repr(columns)}", "a table by columns", f"write [{place}.NAME]")
    tables = {str(name): table for name, table in (columns or {}).items()}
    twice = next((name for name in ranges or {} if name in tables), None)
    if twice is not None:
        fix = "drop it from ranges"
        raise ConfigError(f"column {twice!r} both in ranges and in columns", "one declaration of each column", fix)
    tables |= {name: {"range": pair} for name, pair in dict(ranges or {}).items()}
    return {name: _column(name, table, f"{place}.{name}") for name, table in tables.items()}


def _column(name: str, table: Any, where: str) -> Column:
    """Read one column: categories or numbers, a public or a private range, a histogram only where it is needed."""
    if isinstance(table, Mapping) and isinstance(table.get("categories"), list | tuple):
        words = [str(value) if type(value) in (int, float) else value for value in table["categories"]]
        table = {**table, "categories": [_canonical(word) if isinstance(word, str) else word for word in words]}
    column: Column = codec.read(Column, table, where)
    if column.range is not None and not -1e300 <= column.range[0] < column.range[1] <= 1e300:
        raise ConfigError(f"{where}.range = {list(column.range)}", "two numbers, low < high")
    if column.quantiles is not None and not 0.0 <= column.quantiles[0] < column.quantiles[1] <= 1.0:
        raise ConfigError(f"{where}.quantiles = {list(column.quantiles)}", "two levels, 0 <= low < high <= 1")
    if column.histogram is not None:
        column.release(name)  # refuses wrong values
    given = [field.name for field in fields(column) if field.name != "missing" and getattr(column, field.name)]
    if column.categories and len(given) > 1:
        fix = "drop one of the two declarations"
        raise ConfigError(f"{where} with {' and '.join(given)}", "a column of categories, or one of numbers", fix)
    if len(set(column.categories)) < len(column.categories):
        raise ConfigError(f"{where}.categories = {brief_repr(list(column.categories))}", "every category once")
    if column.range is not None and column.quantiles is not None:
        fix = "drop range or quantiles"
        raise ConfigError(f"{where} with range and quantiles", "a public range, or private quantiles", fix)
    uses = column.quantiles is not None or column.missing in FROM_HISTOGRAM
    if uses and column.histogram is None:
        what = "quantiles" if column.quantiles is not None else f"missing = {column.missing!r}"
        fix = "add histogram = { epsilon = 0.1, within = [LOW, HIGH] }, or declare public values"
        found = f"{where} with {what}, which depends on private rows"
        raise ConfigError(found, "a noised histogram to read it off", fix)
    if column.histogram is not None and not uses:
        found = f"{where} with a histogram, and nothing that is read off it"
        raise ConfigError(found, 'quantiles = [0.01, 0.99], or missing = "median"', "or drop it: it costs epsilon")
    _check_missing(column, f"{where}.missing = {brief_repr(column.missing)}")
    return column


def _check_missing(column: Column, found: str) -> None:
    missing = column.missing
    if missing is None or missing == "category":
        return
    if column.categories:
        if str(missing) not in (*column.categories, ZEROS):
            known = ", ".join(column.categories)[:200]
            raise ConfigError(found, f'"category" (one of its own), "{ZEROS}", or one of {known}')
    elif missing in FROM_HISTOGRAM:
        return
    elif type(missing) not in (int, float) or not math.isfinite(missing):
        fix = "or leave it out: a missing value is refused"
        raise ConfigError(found, 'a number, "category", "mean" or "median"', fix)
    elif column.range is not None and not column.range[0] <= missing <= column.range[1]:
        raise ConfigError(found, f"a number inside the range {list(column.range)}", "else it would be clamped")


# ---- tokens into numbers ---------------------------------------------------------------------------------------------


def to_unit(values: Array, low: float | Array, high: float | Array) -> Array:
    """Scale a public range to [-1, 1] and clip there, so that a record's norm has a public bound."""
    return np.asarray(np.clip(2 * (values - low) / (high - low) - 1, -1, 1), dtype=np.float32)


def encode(rows: TextTable, name: str, column: Column) -> Array:
    """Return a column as the model reads it, [n, width]: one-hot categories, or scaled numbers."""
    if column.categories:
        return _one_hot(rows, name, column)
    values = rows.numbers(name, missing=column.missing is not None)
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
    """Return one coordinate per category; a missing value takes the place declared for it, or is refused."""
    code = {word: place for place, word in enumerate(column.categories)}
    absent = len(code) if column.flagged or column.missing == ZEROS else code.get(str(column.missing))
    places = []
    for row, token in enumerate(rows.column(name)):
        place = code.get(token, code.get(_canonical(token)))
        if place is None and token in MISSING:
            place, fix = absent, 'declare missing = "category", or one of the categories, for this column'
            if place is None:
                rows.refuse(name, row, "a missing value", "a category", fix)
        elif place is None:
            place, fix = code.get(OTHER), f'add it to categories, or "{OTHER}" for all that is not there'
            if place is None:
                rows.refuse(name, row, repr(token[:40]), "one of " + ", ".join(code)[:200], fix)
        places.append(place)
    return np.eye(len(code) + 1, column.width, dtype=np.float64)[places]


def _canonical(token: str) -> str:
    """Return 2 for 2.0, so that both are one category: a column with missing values is often stored as floats."""
    try:
        value = float(token)
    except ValueError:
        return token
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 2**53 else token


@dataclass(frozen=True)
class PendingColumn:
    """A coordinate of x that is held as a share of a public range (missing: -1) until its histogram is released."""

    place: int
    column: Column
    release: Histogram

    def read(self, total: Array) -> dict[str, Any]:
        """Return range and imputation that the noised histogram states, in the column's unit, to prepare new rows."""
        low, high, fill = self._estimate(total)
        span = [self.release.value(low), self.release.value(high)]
        return {"range": span, **({} if fill is None else {"missing": self.release.value(fill)})}

    def _estimate(self, total: Array) -> tuple[float, float, float | None]:
        """Return the ends of the range that goes to [-1, 1], and the imputation or None, all as shares."""
        release, missing = self.release, self.column.missing
        median = release.quantile(total, 0.5) if missing == "median" else None
        fill = release.mean(total) if missing == "mean" else median
        if self.column.quantiles is not None:
            return *release.span(total, self.column.quantiles), fill
        low, high = (release.low, release.high) if self.column.range is None else self.column.range
        width = release.high - release.low
        return (low - release.low) / width, (high - release.low) / width, fill

    def apply(self, shares: Array, total: Array) -> Array:
        """Scale the shares [n] of a column to [-1, 1]; missing values are imputed."""
        (low, high, fill), held = self._estimate(total), shares.astype(np.float64)
        scaled = np.clip(2 * (np.where(held < 0, fill or 0.0, held) - low) / (high - low) - 1, -1, 1)
        return scaled if fill is not None else np.where(held < 0, 0.0, scaled)


def scale_columns(x: Array, waiting: tuple[PendingColumn, ...], found: Mapping[str, Array]) -> Array:
    """Return the records with their pending columns scaled, once every histogram is released."""
    done = x.copy()
    for one in waiting:
        done[:, one.place] = one.apply(x[:, one.place], found[one.release.column])
    return done


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Checked options of a table; no file is opened for them."""

    paths: tuple[Path, ...]
    names: tuple[str, ...]  # of the files' silos; none if there is one file
    target: str
    groups: str | None
    classes: int | None
    words: tuple[str, ...]  # of the classes, where they have names
    columns: dict[str, Column]
    ignore: tuple[str, ...]

    def of(self, name: str) -> Column:
        return self.columns.get(name, Column())


def table(
    *, target: str, path: Paths | None = None, files: Paths | list[str] | None = None, groups: str | None = None,
    classes: int | list[str] | None = None, columns: Mapping[str, Any] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None, ignore: list[str] | None = None,
    test: Paths | None = None, public_test_fraction: float | None = None,
) -> Dataset:  # fmt: skip
    """Read tables with a header, .csv or .parquet: column `target` is predicted from all the others.

    `path` is one file; `groups` names its column of silos, whose values are their names. Or `files`: a list, a pattern
    ("sites/*.csv") or a folder, a silo each, named after its file. `classes` makes the target a label: how many, or
    their words. `columns` declares what is public of each column: range, categories, missing; `ranges` is short for
    their ranges, `ignore` names columns to leave out. Test records are declared public: another file `test`, or a fixed
    `public_test_fraction` of the rows. Without, there is no test.
    """
    options = table_options(target, path, files, groups, classes, columns, ranges, ignore, test, public_test_fraction)
    if not options.paths:
        raise DataError(f"no file for files = {brief_repr(str(files))}", "at least one .csv or .parquet")
    tables = [read_table(one) for one in options.paths]
    features = _features(options, [(rows.path, rows.header) for rows in tables])
    x, y = (np.concatenate(side) for side in zip(*(_xy(options, rows, features) for rows in tables), strict=True))
    names, owners = options.names, None
    if names:
        owners = np.repeat(np.arange(len(tables)), [len(rows.rows) for rows in tables])
    elif groups is not None:
        tokens = tables[0].column(groups)
        empty = next((row for row, token in enumerate(tokens) if token in MISSING), None)
        if empty is not None:
            tables[0].refuse(groups, empty, "a row without a silo", "the name of its silo")
        values, owners = np.unique(np.array(tokens, dtype=str), return_inverse=True)
        names, owners = tuple(str(name) for name in values), owners.astype(np.int64)
    low, high = options.of(target).range or (-1.0, 1.0)
    starts = np.cumsum([0, *(options.of(name).width for name in features)]).tolist()
    held = [(name, at, options.of(name)) for name, at in zip(features, starts, strict=False)]
    pending = tuple(PendingColumn(at, own, own.release(name)) for name, at, own in held if own.histogram)
    data = without_test(x, y, owners, options.classes, names)
    data = replace(data, target_unit=(high - low) / 2, waiting=pending)
    if test is None:
        return with_public_fraction(data, options.paths[0], public_test_fraction)
    public = read_table(Path(test))
    _check_columns([target, *features], public.path, public.header)
    test_x, test_y = _xy(options, public, features)
    return replace(data, test_x=test_x, test_y=test_y)


def _xy(options: TableOptions, rows: TextTable, features: list[str]) -> tuple[Array, Array]:
    """Return features, and targets: labels by their words or numbers, or numbers, scaled if the target has a range."""
    if not len(rows.rows):
        raise DataError(f"no row under the header of {rows.path}", "at least one")
    x = np.concatenate([encode(rows, name, options.of(name)) for name in features], axis=1)
    name, span = options.target, options.of(options.target).range
    if options.words:
        code, tokens = {word: place for place, word in enumerate(options.words)}, rows.column(name)
        wrong = next((row for row, token in enumerate(tokens) if token not in code), None)
        if wrong is not None:
            found = "a missing label" if tokens[wrong] in MISSING else f"label {tokens[wrong][:40]!r}"
            rows.refuse(name, wrong, found, "one of " + ", ".join(code)[:200], "add it to classes, or correct the row")
        return x, np.array([code[token] for token in tokens])
    if options.classes is not None:
        return x, rows.labels(name, options.classes)
    return x, rows.numbers(name) if span is None else to_unit(rows.numbers(name), *span)


def table_options(
    target: str, path: Paths | None = None, files: Any = None, groups: str | None = None, classes: Any = None,
    columns: Any = None, ranges: Any = None, ignore: Any = None, test: Any = None, public_test_fraction: Any = None,
) -> TableOptions:  # fmt: skip
    """Return the checked options of a table."""
    if (path is None) == (files is None):
        found = "both path and files" if path is not None else "neither path nor files"
        raise ConfigError(f"{found} of a table", "either path or files", 'path = "a.csv", or files = "sites/*.csv"')
    for key, given in (("target", target), ("groups", groups if groups is not None else "")):
        if not isinstance(given, str):
            raise ConfigError(f"{key} = {brief_repr(given)}", "the name of a column, in quotes")
    if files is not None and groups is not None:
        fix = "drop groups, or give one file as path"
        raise ConfigError("files, each a silo, and groups", "either one file per silo or a column of groups", fix)
    if ignore is not None and not (isinstance(ignore, list | tuple) and all(isinstance(one, str) for one in ignore)):
        raise ConfigError(f"ignore = {brief_repr(ignore)}", "a list of columns", 'ignore = ["id", "name"]')
    paths = (Path(str(path)),) if path is not None else _listed(files)
    names = tuple(path.stem for path in paths) if files is not None else ()
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two files named {twice!r}", "a different name for the file of every silo")
    listed, words = isinstance(classes, list | tuple), tuple[str, ...]()
    if listed:
        words = tuple(str(word) for word in classes if type(word) in (str, int))
        if len(words) < 2 or len(set(words)) < len(classes):
            found = f"classes = {brief_repr(list(classes))}"
            raise ConfigError(found, "at least two words, each once", 'classes = ["no", "yes"]')
    known = column_declarations(columns, ranges)
    own = known.get(target, Column())
    if own != Column(range=own.range) or (own.range is not None and classes is not None):
        fix = 'labels are declared as classes = ["no", "yes"]'
        raise ConfigError(f"columns.{target}, which is the target", "its range, if it is a number", fix)
    for one in paths or (Path(),):
        check_public_source(one, test, public_test_fraction=public_test_fraction)
    return TableOptions(
        paths=paths, names=names, target=target, groups=groups, words=words, columns=known, ignore=tuple(ignore or ()),
        classes=len(words) if listed else check_classes(classes),
    )  # fmt: skip


def _listed(files: Any) -> tuple[Path, ...]:
    """Return the files of a list, of a pattern, or of a folder; sorted unless listed. They need not exist."""
    if isinstance(files, list | tuple) and files and all(isinstance(one, str | Path) for one in files):
        return tuple(Path(one) for one in files)
    where = f"files = {brief_repr(str(files) if isinstance(files, Path) else files)}"
    if not isinstance(files, str | Path) or not str(files):
        raise ConfigError(where, 'a list of files, a pattern such as "sites/*.csv", or a folder')
    try:
        there = Path(files).expanduser()
        if there.is_dir():
            found = [one for one in there.iterdir() if one.suffix in (".csv", *PARQUET) and one.is_file()]
        else:
            matches = Path(there.anchor or ".").glob(str(there.relative_to(there.anchor)))
            found = [one for one in matches if one.is_file()]
    except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{where}, which cannot be read ({error})", "a pattern or a folder") from None
    if len(found) > MOST_FILES:
        raise DataError(f"{len(found)} files for {where}", f"at most {MOST_FILES}")
    return tuple(sorted(found))


# ---- headers, before a row is read -----------------------------------------------------------------------------------


def _features(options: TableOptions, headers: list[tuple[Path, tuple[str, ...]]]) -> list[str]:
    """Return the columns that the model reads, in the order of the first header; refuse files with other columns."""
    first, header = headers[0]
    left_out = [options.target, *([options.groups] if options.groups else []), *options.ignore]
    _check_columns([*left_out, *options.columns], first, header)
    features = [name for name in header if name not in left_out]
    if not features:
        raise DataError(f"no feature column in {first}", "at least one beside the target and the groups")
    for path, other in headers[1:]:
        extra = sorted(set(other) - set(left_out) - set(features))
        if extra:
            found = f"column {extra[0][:40]!r} in {path}, which {first} has not"
            raise DataError(found, "the same columns in all files")
        _check_columns([options.target, *features], path, other)
    return features


def _check_columns(names: list[str], path: Path, header: tuple[str, ...]) -> None:
    missing = next((name for name in names if name not in header), None)
    if missing is not None:
        listed = ", ".join(name[:40] for name in header[:20])
        close = codec.nearest(missing, list(header)) if missing else ""
        raise ConfigError(f"no column {missing!r} in {path}", f"one of {listed}", close if "mean" in close else "")


class TablePreview(NamedTuple):
    """Facts about a table that are known before a row is read: silo names, one per file, and notes for the user."""

    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def preview(given: Mapping[str, Any]) -> TablePreview:
    """Return silo names and notes for the user; refuse what a run would refuse by options and headers of files."""
    options, test = table_options(**given), given.get("test")
    absent = [path for path in options.paths if not path.expanduser().exists()]
    if absent or not options.paths:
        where = absent[0] if absent else given.get("files")
        return TablePreview(options.names, (f"{where} does not exist here: no column was looked at",))
    features = _features(options, [(path, table_header(path)) for path in options.paths])
    if isinstance(test, str | Path) and Path(test).expanduser().exists():
        _check_columns([options.target, *features], Path(test), table_header(Path(test)))
    columns = {name: options.of(name) for name in features}
    plain = [name for name, own in columns.items() if own.range is None and not own.histogram and not own.categories]
    if not plain:
        return TablePreview(options.names)
    some = ", ".join(name[:40] for name in plain[:8]) + (", ..." if len(plain) > 8 else "")
    note = (
        f"{len(plain)} column(s) without a declared range are not scaled: {some}; one of 500,000 beside one of 1 makes "
        "clipping useless: declare [task.options.columns.NAME] range = [low, high]"
    )
    return TablePreview(options.names, (note,))


def preparations(options: Mapping[str, Any]) -> tuple[Histogram, ...]:
    """Return the histograms that a table's columns ask for, in the order of their names."""
    known = column_declarations(options.get("columns"), options.get("ranges"))
    return tuple(known[name].release(name) for name in sorted(known) if known[name].histogram is not None)
