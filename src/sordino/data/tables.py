"""A .parquet file as a table of text, through pyarrow (`pip install "sordino[parquet]"`): a null is a missing value.

A user's own tables: one file with a column of silos, a list of files, or a folder of them; .csv or .parquet.

Every row is private unless the user says otherwise, and nothing is computed from rows: ranges, categories, constants
for missing values and classes are declared (`columns.py`), or bought (`histogram`). `plan` looks at the names of the
files and at their first lines; it reads no row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sordino.codec import nearest
from sordino.data import columns as declared_columns
from sordino.data.arrays import check_classes, check_one_public_source, check_test_file, with_public_fraction
from sordino.data.columns import Column, PendingColumn, encode, histogram_release
from sordino.data.files import TextTable, csv_header, read_csv, regular_file, unique_header
from sordino.data.records import Array, Dataset, to_unit, without_test
from sordino.data.tabular import MISSING
from sordino.errors import ConfigError, DataError, brief_repr

if TYPE_CHECKING:
    from sordino.parts.preparation import Histogram


ENDINGS = (".parquet", ".pq")


def parquet_sheet(path: Path) -> TextTable:
    """All rows, every value as the text that says it exactly."""
    table, names = _opened(path, "read_table")
    header = unique_header(path, names)
    columns = [_tokens(path, name, table.column(place)) for place, name in enumerate(header)]
    return TextTable(path, header, list(zip(*columns, strict=True)))


def parquet_header(path: Path) -> tuple[str, ...]:
    """The names of the columns, from the end of the file: no row is read."""
    return unique_header(path, _opened(path, "read_schema")[1])


def _opened(path: Path, reader: str) -> tuple[Any, list[str]]:
    """A table, or its schema, and the names of its columns."""
    there = regular_file(path)
    try:
        from pyarrow import parquet
    except ImportError:
        fix = 'pip install "sordino[parquet]", or store the table as .csv'
        raise ConfigError(f"{path}, and no pyarrow to read it with", "pyarrow", fix) from None
    read: Callable[[Path], Any] = getattr(parquet, reader)
    try:
        found = read(there)
        return found, [str(name) for name in (found.column_names if reader == "read_table" else found.names)]
    except Exception as error:  # whatever a damaged file makes its reader raise
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path}, which cannot be read ({said})", "a .parquet of plain columns") from None


def _tokens(path: Path, name: str, column: Any) -> list[str]:
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        raise DataError(f"column {name[:40]!r} of type {kind} in {path}", "numbers or text", "add it to ignore")
    try:
        return [_token(value) for value in column.to_pylist()]
    except Exception as error:  # a text that is not UTF-8, a date beyond the calendar
        said = " ".join(str(error).split())[:200]
        raise DataError(f"column {name[:40]!r} of {path}, which cannot be read ({said})", "numbers or text") from None


def _token(value: Any) -> str:
    """None and NaN are missing, true is 1; a float as the shortest text that gives it back."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


Paths = str | Path
MANY = 100_000  # files


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What the options say, checked; no file was opened for it."""

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

    def waiting(self, features: list[str]) -> tuple[PendingColumn, ...]:
        """The coordinates that wait for a histogram."""
        ends = np.cumsum([self.of(name).width for name in features])
        starts = [int(end) - self.of(name).width for name, end in zip(features, ends, strict=True)]
        asked = [(name, start) for name, start in zip(features, starts, strict=True) if self.of(name).histogram]
        return tuple(
            PendingColumn(start, self.of(name), histogram_release(name, self.of(name))) for name, start in asked
        )


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
    form = table_options(target, path, files, groups, classes, columns, ranges, ignore)
    _check_public(form, test, public_test_fraction)
    if not form.paths:
        raise DataError(f"no file for files = {brief_repr(str(files))}", "at least one .csv or .parquet")
    sheets = [_sheet(one) for one in form.paths]
    features = _features(form, [(rows.path, rows.header) for rows in sheets])
    data = _dataset(form, sheets, features)
    if test is None:
        return with_public_fraction(data, form.paths[0], public_test_fraction)
    other = _sheet(Path(test))
    _known([target, *features], other.path, other.header)
    test_x, test_y = _xy(form, other, features)
    return replace(data, test_x=test_x, test_y=test_y)


def _check_public(form: TableOptions, test: object, fraction: object) -> None:
    """One way to say which rows are public, and none of the silos' files among them."""
    check_one_public_source(
        [name for name, given in (("test", test), ("public_test_fraction", fraction)) if given is not None]
    )
    for one in form.paths if isinstance(test, str | Path) else ():
        check_test_file(one, str(test))


def _dataset(form: TableOptions, sheets: list[TextTable], features: list[str]) -> Dataset:
    pairs = [_xy(form, rows, features) for rows in sheets]
    x, y = (np.concatenate(side) for side in zip(*pairs, strict=True))
    names, who = _silos(form, sheets)
    unit = form.of(form.target).range
    data = without_test(x, y, who, form.classes, names)
    scaled = replace(data, target_unit=1.0 if unit is None else (unit[1] - unit[0]) / 2)
    return replace(scaled, waiting=form.waiting(features))


def _silos(form: TableOptions, sheets: list[TextTable]) -> tuple[tuple[str, ...], Array | None]:
    """Names of the natural clients, and whose every row is."""
    if form.names:
        return form.names, np.repeat(np.arange(len(sheets)), [len(rows.rows) for rows in sheets])
    if form.groups is None:
        return (), None
    tokens = sheets[0].column(form.groups)
    empty = next((row for row, token in enumerate(tokens) if token in MISSING), None)
    if empty is not None:
        sheets[0].refuse(form.groups, empty, "a row without a silo", "the name of its silo")
    names, who = np.unique(np.array(tokens, dtype=str), return_inverse=True)
    return tuple(str(name) for name in names), who.astype(np.int64)


def _xy(form: TableOptions, rows: TextTable, features: list[str]) -> tuple[Array, Array]:
    if not len(rows.rows):
        raise DataError(f"no row under the header of {rows.path}", "at least one")
    x = np.concatenate([encode(rows, name, form.of(name)) for name in features], axis=1)
    return x, _target(form, rows)


def _target(form: TableOptions, rows: TextTable) -> Array:
    """Labels by their words or numbers; or numbers, scaled if the target has a range."""
    name = form.target
    if form.words:
        code = {word: place for place, word in enumerate(form.words)}
        return np.array([_label(rows, name, i, token, code) for i, token in enumerate(rows.column(name))])
    if form.classes is not None:
        return rows.labels(name, form.classes)
    span = form.of(name).range
    return rows.numbers(name) if span is None else to_unit(rows.numbers(name), *span)


def _label(rows: TextTable, name: str, row: int, token: str, code: Mapping[str, int]) -> int:
    if token not in code:
        found = "a missing label" if token in MISSING else f"label {token[:40]!r}"
        rows.refuse(name, row, found, "one of " + ", ".join(code)[:200], "add it to classes, or mend the row")
    return code[token]


# ---- what the options say --------------------------------------------------------------------------------------------


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
    """The options of a table, or one sentence."""
    if (path is None) == (files is None):
        found = "both path and files" if path is not None else "neither path nor files"
        raise ConfigError(f"{found} of a table", "one of them", 'path = "a.csv", or files = "sites/*.csv"')
    for key, given in (("target", target), ("groups", groups if groups is not None else "")):
        if not isinstance(given, str):
            raise ConfigError(f"{key} = {brief_repr(given)}", "the name of a column, in quotes")
    if files is not None and groups is not None:
        raise ConfigError("files, a silo each, and groups", "one of them", "drop groups, or give one file as path")
    paths = (Path(str(path)),) if path is not None else _listed(files)
    words = _words(classes)
    known = declared_columns.column_declarations(columns, ranges)
    _check_target(target, known, classes)
    return TableOptions(
        paths=paths, names=_names(paths) if files is not None else (), target=target, groups=groups,
        classes=len(words) if words else check_classes(classes), words=words, columns=known, ignore=_ignored(ignore),
    )  # fmt: skip


def _listed(files: Any) -> tuple[Path, ...]:
    """The files of a list, of a pattern, or of a folder; sorted unless listed. None may be here."""
    if isinstance(files, list | tuple) and files and all(isinstance(one, str | Path) for one in files):
        return tuple(Path(one) for one in files)
    if not isinstance(files, str | Path) or not str(files):
        raise ConfigError(
            f"files = {brief_repr(files)}", 'a list of files, a pattern such as "sites/*.csv", or a folder'
        )
    try:
        there = Path(files).expanduser()
        found = [one for one in there.iterdir() if _is_table(one)] if there.is_dir() else _matching(there)
    except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
        raise DataError(
            f"files = {brief_repr(str(files))}, which cannot be read ({error})", "a pattern or a folder"
        ) from None
    if len(found) > MANY:
        raise DataError(f"{len(found)} files for files = {brief_repr(str(files))}", f"at most {MANY}")
    return tuple(sorted(found))


def _matching(pattern: Path) -> list[Path]:
    return [one for one in Path(pattern.anchor or ".").glob(str(pattern.relative_to(pattern.anchor))) if one.is_file()]


def _is_table(path: Path) -> bool:
    return path.suffix in (".csv", *ENDINGS) and path.is_file()


def _names(paths: tuple[Path, ...]) -> tuple[str, ...]:
    names = tuple(path.stem for path in paths)
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ConfigError(f"two files named {twice!r}", "a name of its own for every silo's file")
    return names


def _words(classes: Any) -> tuple[str, ...]:
    if not isinstance(classes, list | tuple):
        return ()
    words = tuple(str(word) for word in classes if type(word) in (str, int))
    if len(words) < 2 or len(set(words)) < len(classes):
        raise ConfigError(
            f"classes = {brief_repr(list(classes))}", "at least two words, each once", 'classes = ["no", "yes"]'
        )
    return words


def _check_target(target: str, columns: Mapping[str, Column], classes: Any) -> None:
    """Of the target only a range may be declared, and only of one that is a number."""
    own = columns.get(target, Column())
    if own != Column(range=own.range) or (own.range is not None and classes is not None):
        found = f"columns.{target}, which is the target"
        raise ConfigError(found, "its range, if it is a number", 'labels are declared as classes = ["no", "yes"]')


def _ignored(ignore: Any) -> tuple[str, ...]:
    if ignore is not None and not (isinstance(ignore, list | tuple) and all(isinstance(one, str) for one in ignore)):
        raise ConfigError(f"ignore = {brief_repr(ignore)}", "a list of columns", 'ignore = ["id", "name"]')
    return tuple(ignore or ())


# ---- what the headers say --------------------------------------------------------------------------------------------


def _sheet(path: Path) -> TextTable:
    return parquet_sheet(path) if path.suffix in ENDINGS else read_csv(path)


def _features(form: TableOptions, headers: list[tuple[Path, tuple[str, ...]]]) -> list[str]:
    """The columns that are read, the same in every file."""
    first, header = headers[0]
    _known([form.target, *([form.groups] if form.groups else []), *form.columns, *form.ignore], first, header)
    features = form.features(header)
    if not features:
        raise DataError(f"no feature column in {first}", "at least one beside the target and the groups")
    for path, other in headers[1:]:
        extra = sorted(set(form.features(other)) - set(features))
        if extra:
            raise DataError(
                f"column {extra[0][:40]!r} in {path}, which {first} has not", "the same columns in all files"
            )
        _known([form.target, *features], path, other)
    return features


def _known(names: list[str], path: Path, header: tuple[str, ...]) -> None:
    missing = next((name for name in names if name not in header), None)
    if missing is not None:
        listed = ", ".join(name[:40] for name in header[:20])
        close = nearest(missing, list(header)) if missing else ""
        raise ConfigError(f"no column {missing!r} in {path}", f"one of {listed}", close if "mean" in close else "")


@dataclass(frozen=True)
class TablePreview:
    """What is known of a table before a row is read."""

    names: tuple[str, ...]  # of the silos, one for each file
    notes: tuple[str, ...]


def preview(options: Mapping[str, Any]) -> TablePreview:
    """Everything that a run would refuse by the options, the files' names and their headers; a file that is not here
    is not looked at."""
    form = table_options(**options)
    test = options.get("test")
    _check_public(form, test, options.get("public_test_fraction"))
    absent = [path for path in form.paths if not path.expanduser().exists()]
    if absent or not form.paths:
        where = absent[0] if absent else options.get("files")
        return TablePreview(form.names, (f"{where} is not here: no column was looked at",))
    features = _features(form, [(path, _header(path)) for path in form.paths])
    if isinstance(test, str | Path) and Path(test).expanduser().exists():
        _known([form.target, *features], Path(test), _header(Path(test)))
    return TablePreview(form.names, unscaled(form, features))


def _header(path: Path) -> tuple[str, ...]:
    return parquet_header(path) if path.suffix in ENDINGS else csv_header(regular_file(path))


def unscaled(form: TableOptions, features: list[str]) -> tuple[str, ...]:
    """What to say of columns whose range nobody has declared."""
    plain = [name for name in features if not form.of(name).scaled]
    if not plain:
        return ()
    some = ", ".join(name[:40] for name in plain[:8]) + (", ..." if len(plain) > 8 else "")
    return (
        f"{len(plain)} column(s) without a declared range are not scaled: {some}; one of 500,000 beside one of 1 makes "
        "clipping useless: declare [task.options.columns.NAME] range = [low, high]",
    )


def preparations(options: Mapping[str, Any]) -> tuple[Histogram, ...]:
    """The histograms that a table's columns ask for, in the order of their names."""
    known = declared_columns.column_declarations(options.get("columns"), options.get("ranges"))
    return tuple(histogram_release(name, known[name]) for name in sorted(known) if known[name].histogram is not None)


def declared_values(options: Mapping[str, Any]) -> tuple[tuple[int, str, str], ...]:
    """How many columns have values that are public by the word of the file."""
    form = table_options(**options)
    said = sum(column != Column(histogram=column.histogram) for column in form.columns.values())
    by = "the configuration: [task.options.columns]"
    return ((said, "ranges, categories and constants of columns", by),) if said else ()
