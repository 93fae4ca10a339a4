"""Readers of untrusted files: .npz as arrays, .csv and .parquet as tables of text. Called by `arrays` and `tables`.

A file is read whole, or refused in one sentence that names the file and the place in it. Nothing is unpickled. A
.parquet file needs pyarrow (`pip install "sordino[parquet]"`); a null in it is a missing value.
"""

from __future__ import annotations

import csv
import io
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.lib import format as npy

from sordino.data.records import Array, Ints
from sordino.errors import ConfigError, DataError

# What zipfile, zlib, lzma, bz2 and numpy's own parser of headers raise on damaged or foreign bytes.
UNREADABLE = (
    OSError, ValueError, EOFError, TypeError, AttributeError, LookupError, RuntimeError, ArithmeticError, MemoryError,
    SyntaxError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip
MAY_BE_BOOL = ("y", "test_y")
MISSING = frozenset({"", "?", "NA"})  # tokens of a missing value
PARQUET = (".parquet", ".pq")


def regular_file(path: Path) -> Path:
    """The path of a regular file, its ~ expanded; a folder, a pipe or a device is refused."""
    try:
        there = path.expanduser()
        found = there.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{str(path)!r}, which cannot be read ({error})", "the path of a file") from None
    if not found:
        what = "is no file" if there.exists() else "does not exist"
        raise DataError(f"{path}, which {what} and cannot be read", "the path of a file")
    return there


def _unreadable(path: Path, error: Exception, needed: str) -> DataError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return DataError(f"{path}, which cannot be read ({reason})", needed)


# ---- npz -------------------------------------------------------------------------------------------------------------


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of an .npz by name; no more memory is allocated than the file's own size allows for."""
    there = regular_file(path)
    try:
        with zipfile.ZipFile(there) as archive:
            return {info.filename.removesuffix(".npy"): _member(archive, info) for info in archive.infolist()}
    except UNREADABLE as error:
        raise _unreadable(path, error, "an .npz of plain arrays x and y") from None


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as file:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in read:
            raise ValueError(f"an array of format {version}")
        shape, _, dtype = read[version](file)
        needed, held = math.prod(shape) * dtype.itemsize, info.file_size
        if min(shape, default=0) < 0 or needed > held:
            raise ValueError(f"{info.filename}: shape {shape} of {dtype} in {held} bytes")
    with archive.open(info) as file:
        values: Array = npy.read_array(file, allow_pickle=False)
    as_labels = info.filename.removesuffix(".npy") in MAY_BE_BOOL and values.dtype == np.bool_
    return values.astype(np.int64) if as_labels else values


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextTable:
    """A table of text tokens; `lines` are the file's line numbers of its rows, for error messages."""

    path: Path
    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    lines: Sequence[int] = ()  # empty where the file has no lines

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.header)}

    def column(self, name: str) -> list[str]:
        """The tokens of a column."""
        place = self._places[name]
        return [row[place].strip() for row in self.rows]

    def numbers(self, name: str, *, missing: bool = False) -> Array:
        """A column of finite numbers; NaN for a missing value where `missing` allows it."""
        return np.array([self._number(name, i, token, missing) for i, token in enumerate(self.column(name))])

    def labels(self, name: str, classes: int) -> Ints:
        """A column of whole numbers below `classes`."""
        values = self.numbers(name)
        wrong = np.flatnonzero((values != np.rint(values)) | (values < 0) | (values >= classes))
        if len(wrong):
            token = self.column(name)[wrong[0]]
            fix = 'labels that are words are declared: classes = ["no", "yes"]'
            self.refuse(name, int(wrong[0]), f"label {token[:40]!r}", f"0 to {classes - 1}", fix)
        return values.astype(np.int64)

    def _number(self, name: str, row: int, token: str, missing: bool) -> float:
        if token in MISSING:
            fix = "declare missing = ... for this column: a public constant"
            return math.nan if missing else self.refuse(name, row, "a missing value", "a number", fix)
        try:
            value = float(token)
        except ValueError:
            value = math.nan
        if not abs(value) <= float(np.finfo(np.float32).max):
            fix = f"declare categories = [...] for {name[:40]!r}, or add it to ignore"
            self.refuse(name, row, repr(token[:40]), "a finite number", fix)
        return value

    def refuse(self, name: str, row: int, found: str, needed: str, fix: str = "") -> NoReturn:
        """Raise a `DataError` about one cell of the table."""
        line = f" (line {self.lines[row]})" if self.lines else ""
        raise DataError(f"{found} in {self.path}, row {row + 1}{line}, column {name[:40]!r}", needed, fix)


def read_table(path: Path) -> TextTable:
    """All rows of a .csv or .parquet file whose columns have names."""
    if path.suffix in PARQUET:
        table, names = _open_parquet(path, "read_table")
        header = _unique_names(path, names)
        columns = [_tokens(path, name, table.column(place)) for place, name in enumerate(header)]
        return TextTable(path, header, list(zip(*columns, strict=True)))
    try:
        text = regular_file(path).read_text("utf-8-sig")
    except (OSError, ValueError, MemoryError) as error:
        raise _unreadable(path, error, "a comma-separated text file in UTF-8") from None
    return parse_csv(path, text)


def table_header(path: Path) -> tuple[str, ...]:
    """The names of the columns; no row is read."""
    if path.suffix in PARQUET:
        return _unique_names(path, _open_parquet(path, "read_schema")[1])
    try:
        with regular_file(path).open("rb") as file:
            lines = (line.decode("utf-8").removeprefix("\ufeff") for line in file)
            first = next((row for row in csv.reader(lines, skipinitialspace=True) if row), None)
    except (OSError, ValueError, csv.Error) as error:
        raise _unreadable(path, error, "a comma-separated text file in UTF-8") from None
    if first is None:
        raise DataError(f"an empty table in {path}", "a header and rows")
    return _unique_names(path, first)


def parse_csv(path: Path, text: str, header: tuple[str, ...] = ()) -> TextTable:
    """Comma-separated text; the first row is the header unless one is given. `path` is its name in errors."""
    reader = csv.reader(io.StringIO(text), skipinitialspace=True)
    try:
        rows = [(row, reader.line_num) for row in reader if row]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}", "short values between commas") from None
    if not rows:
        raise DataError(f"an empty table in {path}", "a header and rows")
    body = rows if header else rows[1:]
    header = header or _unique_names(path, rows[0][0])
    for number, (row, line) in enumerate(body, 1):
        if len(row) != len(header):
            found = f"{len(row)} values in {path}, row {number} (line {line})"
            raise DataError(found, f"{len(header)}, one per column")
    return TextTable(path, header, [row for row, _ in body], [line for _, line in body])


def _unique_names(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    header = tuple(name.strip() for name in names)
    twice = next((name for name in header if header.count(name) > 1), None) if len(set(header)) < len(header) else None
    if twice is not None:
        raise DataError(f"two columns named {twice[:40]!r} in {path}", "a name of its own for every column")
    return header


# ---- parquet ---------------------------------------------------------------------------------------------------------


def _open_parquet(path: Path, reader: str) -> tuple[Any, list[str]]:
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
        raise _unreadable(path, error, "a .parquet of plain columns") from None


def _tokens(path: Path, name: str, column: Any) -> list[str]:
    """None and NaN as missing, true as 1, a float as the shortest text that gives it back."""
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        raise DataError(f"column {name[:40]!r} of type {kind} in {path}", "numbers or text", "add it to ignore")
    try:
        values = [int(value) if isinstance(value, bool) else value for value in column.to_pylist()]
        return ["" if value is None or value != value else str(value) for value in values]
    except Exception as error:  # a text that is not UTF-8, a date beyond the calendar
        said = " ".join(str(error).split())[:200]
        raise DataError(f"column {name[:40]!r} of {path}, which cannot be read ({said})", "numbers or text") from None
