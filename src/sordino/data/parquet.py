"""A .parquet file as a table of text, through pyarrow (`pip install "sordino[parquet]"`): a null is a missing value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sordino.data.files import Sheet, regular, unique
from sordino.errors import ConfigError, DataError

ENDINGS = (".parquet", ".pq")


def parquet_sheet(path: Path) -> Sheet:
    """All rows, every value as the text that says it exactly."""
    table, names = _opened(path, "read_table")
    header = unique(path, names)
    columns = [_tokens(path, name, table.column(place)) for place, name in enumerate(header)]
    return Sheet(path, header, list(zip(*columns, strict=True)))


def parquet_header(path: Path) -> tuple[str, ...]:
    """The names of the columns, from the end of the file: no row is read."""
    return unique(path, _opened(path, "read_schema")[1])


def _opened(path: Path, reader: str) -> tuple[Any, list[str]]:
    """A table, or its schema, and the names of its columns."""
    there = regular(path)
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
