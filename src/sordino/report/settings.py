"""Settings of runs beside each other: every key of plan.toml by its whole name, and those that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

ABSENT = "-"


def flat(table: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every value; a list of plain values is one value; what is empty says nothing."""
    if isinstance(table, dict):
        for key, value in table.items():
            yield from flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(table, list) and any(isinstance(item, dict) for item in table):
        for place, item in enumerate(table):
            yield from flat(item, f"{name}.{place}")
    elif table not in ([], None):
        yield name, table


def differing(tables: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keys whose values are not the same in all tables: {"setting", "values"}, one value for each table."""
    each = [dict(flat(table)) for table in tables]
    names = dict.fromkeys(name for one in each for name in one)
    rows = [{"setting": name, "values": [one.get(name) for one in each]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]


def short(value: Any) -> str:
    """A value as a cell of a table."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "[" + ", ".join(short(one) for one in value[:8]) + (", ...]" if len(value) > 8 else "]")
    return str(value)
