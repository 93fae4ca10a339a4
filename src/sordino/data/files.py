"""Bytes of a stranger into arrays: whatever is in the file, it is read whole, or one sentence says what and where.

A table is text here, from a .csv or a .parquet (`parquet.py`): one way leads from its tokens to numbers.
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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, NoReturn

import numpy as np
from numpy.lib import format as npy

from sordino.data.records import Array, Ints
from sordino.data.tabular import MISSING
from sordino.errors import DataError

# What zipfile, zlib, lzma, bz2 and numpy's own parser of headers raise on bytes that are not what they seem.
UNREADABLE = (
    OSError, ValueError, EOFError, TypeError, AttributeError, LookupError, RuntimeError, ArithmeticError, MemoryError,
    SyntaxError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip
MAY_BE_BOOL = ("y", "test_y")


def regular_file(path: Path) -> Path:
    """A file that ends: no folder, no pipe, no device."""
    try:
        there = path.expanduser()
        found = there.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{str(path)!r}, which cannot be read ({error})", "the path of a file") from None
    if not found:
        what = "is no file" if there.exists() else "does not exist"
        raise DataError(f"{path}, which {what} and cannot be read", "the path of a file")
    return there


# ---- npz -------------------------------------------------------------------------------------------------------------


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of an .npz; nothing is unpickled, and nothing is allocated that the file does not hold."""
    there = regular_file(path)
    try:
        with zipfile.ZipFile(there) as archive:
            return {_key(info): _member(archive, info) for info in archive.infolist()}
    except UNREADABLE as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path}, which cannot be read ({said})", "an .npz of plain arrays x and y") from None


def _key(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(".npy")


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as file:
        shape, _, dtype = _header(file)
        needed, held = math.prod(shape) * dtype.itemsize, info.file_size
        if min(shape, default=0) < 0 or needed > held:
            raise ValueError(f"{info.filename}: shape {shape} of {dtype} in {held} bytes")
    with archive.open(info) as file:
        values: Array = npy.read_array(file, allow_pickle=False)
    return values.astype(np.int64) if _key(info) in MAY_BE_BOOL and values.dtype == np.bool_ else values


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"an array of format {version}")
    found: tuple[tuple[int, ...], bool, np.dtype[np.generic]] = read[version](file)
    return found


# ---- csv -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextTable:
    """A table as text; `lines` are the lines of the file that its rows end on, so that a mistake can be found."""

    path: Path
    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    lines: Sequence[int] = ()  # none where the file has no lines

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.header)}

    def column(self, name: str) -> list[str]:
        """The tokens of a column."""
        place = self._places[name]
        return [row[place].strip() for row in self.rows]

    def numbers(self, name: str, *, missing: bool = False) -> Array:
        """A column of finite numbers; NaN where there is none, if that is allowed."""
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
        """A mistake in one place of the file."""
        line = f" (line {self.lines[row]})" if self.lines else ""
        raise DataError(f"{found} in {self.path}, row {row + 1}{line}, column {name[:40]!r}", needed, fix)


def read_csv(path: Path) -> TextTable:
    """A comma-separated file whose first row is the header."""
    try:
        text = regular_file(path).read_text("utf-8-sig")
    except (OSError, ValueError, MemoryError) as error:
        raise DataError(f"{path}, which cannot be read ({error})", "a comma-separated text file in UTF-8") from None
    rows, lines = _parsed(path, text)
    if not rows:
        raise DataError(f"an empty table in {path}", "a header and rows")
    header = unique_header(path, rows[0])
    wrong = next((i for i, row in enumerate(rows) if len(row) != len(header)), None)
    if wrong is not None:
        found = f"{len(rows[wrong])} values in {path}, row {wrong} (line {lines[wrong]})"
        raise DataError(found, f"{len(header)}, one per column")
    return TextTable(path, header, rows[1:], lines[1:])


def csv_header(path: Path) -> tuple[str, ...]:
    """The names of the columns: the first row of the file, and no other."""
    try:
        with regular_file(path).open("rb") as file:
            lines = (line.decode("utf-8").removeprefix("\ufeff") for line in file)
            first = next((row for row in csv.reader(lines, skipinitialspace=True) if row), None)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path}, which cannot be read ({error})", "a comma-separated text file in UTF-8") from None
    if first is None:
        raise DataError(f"an empty table in {path}", "a header and rows")
    return unique_header(path, first)


def unique_header(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    """The header, every name once."""
    header = tuple(name.strip() for name in names)
    twice = next((name for name in header if header.count(name) > 1), None) if len(set(header)) < len(header) else None
    if twice is not None:
        raise DataError(f"two columns named {twice[:40]!r} in {path}", "a name of its own for every column")
    return header


def _parsed(path: Path, text: str) -> tuple[list[list[str]], list[int]]:
    reader = csv.reader(io.StringIO(text), skipinitialspace=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}", "short values between commas") from None
    return rows, lines
