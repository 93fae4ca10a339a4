"""Tables of the user's own: one file with a column of silos, a list of files, or a folder; .csv or .parquet.

`datasets.load("csv", ...)` calls `table`; `sordino plan` calls `preview`, which opens files for their header alone.
Every row is private unless the user says otherwise, and nothing is computed from rows: ranges, categories, constants
for missing values and classes are declared (`columns.py`), or read off a noised histogram that costs epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sordino.codec import nearest
from sordino.data.arrays import check_classes, check_one_public_source, check_test_file, with_public_fraction
from sordino.data.columns import Column, PendingColumn, column_declarations, encode, histogram_release
from sordino.data.files import MISSING, PARQUET, TextTable, read_table, table_header
from sordino.data.records import Array, Dataset, to_unit, without_test
from sordino.errors import ConfigError, DataError, brief_repr

if TYPE_CHECKING:
    from sordino.parts.mechanisms import Histogram

Paths = str | Path
MANY = 100_000  # files


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

    def features(self, header: tuple[str, ...]) -> list[str]:
        """The columns that the model reads, in the order of the header."""
        return [name for name in header if name not in (self.target, self.groups, *self.ignore)]

    def of(self, name: str) -> Column:
        return self.columns.get(name, Column())

    def pending(self, features: list[str]) -> tuple[PendingColumn, ...]:
        """The coordinates that are scaled once a histogram is released."""
        starts = np.cumsum([0, *(self.of(name).width for name in features)]).tolist()
        held = [(name, at, self.of(name)) for name, at in zip(features, starts, strict=False)]
        return tuple(PendingColumn(at, own, histogram_release(name, own)) for name, at, own in held if own.histogram)


def table(
    *,
    target: str,
    path: Paths | None = None,
    files: Paths | list[str] | None = None,
    groups: str | None = None,
    classes: int | list[str] | None = None,
    columns: Mapping[str, Any] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    ignore: list[str] | None = None,
    test: Paths | None = None,
    public_test_fraction: float | None = None,
) -> Dataset:
    """Tables with a header, .csv or .parquet: column `target` from all the others.

    `path` is one file; `groups` names its column of silos, whose values are their names. Or `files`: a list, a pattern
    ("sites/*.csv") or a folder, a silo each, named after its file. `classes` makes the target a label: how many, or
    their words. `columns` declares what is public of each column: range, categories, missing; `ranges` is short for
    their ranges, `ignore` names columns to leave out. Test records are declared public: another file `test`, or a fixed
    `public_test_fraction` of the rows. Without, there is no test.
    """
    options = table_options(target, path, files, groups, classes, columns, ranges, ignore)
    _check_public(options, test, public_test_fraction)
    if not options.paths:
        raise DataError(f"no file for files = {brief_repr(str(files))}", "at least one .csv or .parquet")
    tables = [read_table(one) for one in options.paths]
    features = _features(options, [(rows.path, rows.header) for rows in tables])
    x, y = (np.concatenate(side) for side in zip(*(_xy(options, rows, features) for rows in tables), strict=True))
    names, owners = _silos(options, tables)
    low, high = options.of(target).range or (-1.0, 1.0)
    data = without_test(x, y, owners, options.classes, names)
    data = replace(data, target_unit=(high - low) / 2, waiting=options.pending(features))
    if test is None:
        return with_public_fraction(data, options.paths[0], public_test_fraction)
    public = read_table(Path(test))
    _check_columns([target, *features], public.path, public.header)
    test_x, test_y = _xy(options, public, features)
    return replace(data, test_x=test_x, test_y=test_y)


def _check_public(options: TableOptions, test: object, fraction: object) -> None:
    """At most one declaration of public rows, and none of the silos' files among them."""
    given = {"test": test, "public_test_fraction": fraction}
    check_one_public_source([name for name, value in given.items() if value is not None])
    for one in options.paths if isinstance(test, str | Path) else ():
        check_test_file(one, str(test))


def _silos(options: TableOptions, tables: list[TextTable]) -> tuple[tuple[str, ...], Array | None]:
    """Names of the natural clients, and the number of the client that holds each row."""
    if options.names:
        return options.names, np.repeat(np.arange(len(tables)), [len(rows.rows) for rows in tables])
    if options.groups is None:
        return (), None
    tokens = tables[0].column(options.groups)
    empty = next((row for row, token in enumerate(tokens) if token in MISSING), None)
    if empty is not None:
        tables[0].refuse(options.groups, empty, "a row without a silo", "the name of its silo")
    names, owners = np.unique(np.array(tokens, dtype=str), return_inverse=True)
    return tuple(str(name) for name in names), owners.astype(np.int64)


def _xy(options: TableOptions, rows: TextTable, features: list[str]) -> tuple[Array, Array]:
    """Features, and the target: labels by their words or numbers, or numbers, scaled if the target has a range."""
    if not len(rows.rows):
        raise DataError(f"no row under the header of {rows.path}", "at least one")
    x = np.concatenate([encode(rows, name, options.of(name)) for name in features], axis=1)
    name, span = options.target, options.of(options.target).range
    if options.words:
        code = {word: place for place, word in enumerate(options.words)}
        return x, np.array([_label(rows, name, i, token, code) for i, token in enumerate(rows.column(name))])
    if options.classes is not None:
        return x, rows.labels(name, options.classes)
    return x, rows.numbers(name) if span is None else to_unit(rows.numbers(name), *span)


def _label(rows: TextTable, name: str, row: int, token: str, code: Mapping[str, int]) -> int:
    if token not in code:
        found = "a missing label" if token in MISSING else f"label {token[:40]!r}"
        rows.refuse(name, row, found, "one of " + ", ".join(code)[:200], "add it to classes, or correct the row")
    return code[token]


# ---- options -------------------------------------------------------------------------------------------------------


def table_options(
    target: str,
    path: Paths | None = None,
    files: Any = None,
    groups: str | None = None,
    classes: Any = None,
    columns: Any = None,
    ranges: Any = None,
    ignore: Any = None,
    **_: Any,
) -> TableOptions:
    """The checked options of a table."""
    if (path is None) == (files is None):
        found = "both path and files" if path is not None else "neither path nor files"
        raise ConfigError(f"{found} of a table", "one of them", 'path = "a.csv", or files = "sites/*.csv"')
    for key, given in (("target", target), ("groups", groups if groups is not None else "")):
        if not isinstance(given, str):
            raise ConfigError(f"{key} = {brief_repr(given)}", "the name of a column, in quotes")
    if files is not None and groups is not None:
        raise ConfigError("files, a silo each, and groups", "one of them", "drop groups, or give one file as path")
    if ignore is not None and not (isinstance(ignore, list | tuple) and all(isinstance(one, str) for one in ignore)):
        raise ConfigError(f"ignore = {brief_repr(ignore)}", "a list of columns", 'ignore = ["id", "name"]')
    paths = (Path(str(path)),) if path is not None else _listed(files)
    names = tuple(path.stem for path in paths) if files is not None else ()
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ConfigError(f"two files named {twice!r}", "a name of its own for every silo's file")
    words, known = _words(classes), column_declarations(columns, ranges)
    own = known.get(target, Column())
    if own != Column(range=own.range) or (own.range is not None and classes is not None):
        fix = 'labels are declared as classes = ["no", "yes"]'
        raise ConfigError(f"columns.{target}, which is the target", "its range, if it is a number", fix)
    return TableOptions(
        paths=paths, names=names, target=target, groups=groups, words=words, columns=known, ignore=tuple(ignore or ()),
        classes=len(words) if words else check_classes(classes),
    )  # fmt: skip


def _listed(files: Any) -> tuple[Path, ...]:
    """The files of a list, of a pattern, or of a folder; sorted unless listed. They need not exist."""
    if isinstance(files, list | tuple) and files and all(isinstance(one, str | Path) for one in files):
        return tuple(Path(one) for one in files)
    where = f"files = {brief_repr(files if isinstance(files, str) else str(files))}"
    if not isinstance(files, str | Path) or not str(files):
        needed = 'a list of files, a pattern such as "sites/*.csv", or a folder'
        raise ConfigError(f"files = {brief_repr(files)}", needed)
    try:
        there = Path(files).expanduser()
        if there.is_dir():
            found = [one for one in there.iterdir() if one.suffix in (".csv", *PARQUET) and one.is_file()]
        else:
            matches = Path(there.anchor or ".").glob(str(there.relative_to(there.anchor)))
            found = [one for one in matches if one.is_file()]
    except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{where}, which cannot be read ({error})", "a pattern or a folder") from None
    if len(found) > MANY:
        raise DataError(f"{len(found)} files for {where}", f"at most {MANY}")
    return tuple(sorted(found))


def _words(classes: Any) -> tuple[str, ...]:
    if not isinstance(classes, list | tuple):
        return ()
    words = tuple(str(word) for word in classes if type(word) in (str, int))
    if len(words) < 2 or len(set(words)) < len(classes):
        found = f"classes = {brief_repr(list(classes))}"
        raise ConfigError(found, "at least two words, each once", 'classes = ["no", "yes"]')
    return words


# ---- headers -------------------------------------------------------------------------------------------------------


def _features(options: TableOptions, headers: list[tuple[Path, tuple[str, ...]]]) -> list[str]:
    first, header = headers[0]
    groups = [options.groups] if options.groups else []
    _check_columns([options.target, *groups, *options.columns, *options.ignore], first, header)
    features = options.features(header)
    if not features:
        raise DataError(f"no feature column in {first}", "at least one beside the target and the groups")
    for path, other in headers[1:]:
        extra = sorted(set(options.features(other)) - set(features))
        if extra:
            found = f"column {extra[0][:40]!r} in {path}, which {first} has not"
            raise DataError(found, "the same columns in all files")
        _check_columns([options.target, *features], path, other)
    return features


def _check_columns(names: list[str], path: Path, header: tuple[str, ...]) -> None:
    missing = next((name for name in names if name not in header), None)
    if missing is not None:
        listed = ", ".join(name[:40] for name in header[:20])
        close = nearest(missing, list(header)) if missing else ""
        raise ConfigError(f"no column {missing!r} in {path}", f"one of {listed}", close if "mean" in close else "")


@dataclass(frozen=True)
class TablePreview:
    """Facts about a table that are known before a row is read."""

    names: tuple[str, ...]  # of the silos, one for each file
    notes: tuple[str, ...]


def preview(given: Mapping[str, Any]) -> TablePreview:
    """Silo names and notes for the user; refuses what a run would refuse by options and headers of existing files."""
    options, test = table_options(**given), given.get("test")
    _check_public(options, test, given.get("public_test_fraction"))
    absent = [path for path in options.paths if not path.expanduser().exists()]
    if absent or not options.paths:
        where = absent[0] if absent else given.get("files")
        return TablePreview(options.names, (f"{where} does not exist here: no column was looked at",))
    features = _features(options, [(path, table_header(path)) for path in options.paths])
    if isinstance(test, str | Path) and Path(test).expanduser().exists():
        _check_columns([options.target, *features], Path(test), table_header(Path(test)))
    return TablePreview(options.names, _unscaled_note(options, features))


def _unscaled_note(options: TableOptions, features: list[str]) -> tuple[str, ...]:
    """A note on columns without a declared range."""
    plain = [name for name in features if not options.of(name).scaled]
    if not plain:
        return ()
    some = ", ".join(name[:40] for name in plain[:8]) + (", ..." if len(plain) > 8 else "")
    return (
        f"{len(plain)} column(s) without a declared range are not scaled: {some}; one of 500,000 beside one of 1 makes "
        "clipping useless: declare [task.options.columns.NAME] range = [low, high]",
    )


def preparations(options: Mapping[str, Any]) -> tuple[Histogram, ...]:
    """The histograms that a table's columns ask for, in the order of their names."""
    known = column_declarations(options.get("columns"), options.get("ranges"))
    return tuple(histogram_release(name, known[name]) for name in sorted(known) if known[name].histogram is not None)


def declared_values(given: Mapping[str, Any]) -> tuple[tuple[int, str, str], ...]:
    """How many columns have values that the configuration declares public."""
    columns = table_options(**given).columns.values()
    count = sum(column != Column(histogram=column.histogram) for column in columns)
    by = "the configuration: [task.options.columns]"
    return ((count, "ranges, categories and constants of columns", by),) if count else ()
