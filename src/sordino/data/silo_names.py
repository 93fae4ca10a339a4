"""Per-silo values by name: `silos.NY = { epsilon = 1 }`, `sizes = { NY = 300, LA = 120 }`. Called by `config`.

Names are resolved here, once, into the order of `[task] silos`; the data are then cut in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sordino import codec
from sordino.errors import ConfigError

PER_SILO = {
    "recipe": ("sizes", "epsilons", "deltas", "noise_multipliers"),
    "privacy": ("silos", "deltas"),
}  # however deep inside


def resolve_silo_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with its tables by silo name as lists, in the order of `[task] silos`, or sorted."""
    data = dict(table)
    tables = {place: named for part, keys in PER_SILO.items() for place, named in _tables(data.get(part), part, keys)}
    if not tables:
        return data
    task = dict(data["task"]) if isinstance(data.get("task"), Mapping) else {}
    names = _names(task.get("silos"), tables)
    lists = {place: [named[name] for name in names] for place, named in tables.items()}
    return _listed(data, "", lists) | {"task": {**task, "silos": names}}


def _tables(part: Any, where: str, keys: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every table keyed by silo name, with its place: recipe.sizes, recipe.records.sizes."""
    for key, value in part.items() if isinstance(part, Mapping) else ():
        if isinstance(value, Mapping):
            place = f"{where}.{key}"
            yield from [(place, value)] if key in keys else _tables(value, place, keys)


def _listed(part: Mapping[str, Any], where: str, lists: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The configuration with lists at those places."""
    inside = {key: _listed(value, f"{where}{key}.", lists) for key, value in part.items() if isinstance(value, Mapping)}
    return {**part, **inside, **{key: lists[where + key] for key in part if where + key in lists}}


def _names(given: Any, tables: dict[str, Mapping[str, Any]]) -> list[str]:
    """The silos' names, after checking that every table has exactly them."""
    first = next(iter(tables.values()))
    names = [str(name) for name in given] if isinstance(given, list) else sorted(first)
    for where, table in tables.items():
        check_names(list(table), names, where, "[task] silos" if isinstance(given, list) else next(iter(tables)))
    return names


def check_names(found: list[str], known: list[str], where: str, of: str) -> None:
    """Refuse unknown, repeated and missing names."""
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"silo {twice!r} twice in {where}", "every silo once")
    unknown = next((name for name in found if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"silo {unknown!r} in {where}", f"a silo of {of}", codec.nearest(unknown, known))
    missing = next((name for name in known if name not in found), None)
    if missing is not None:
        raise ConfigError(f"no silo {missing!r} in {where}", f"every silo of {of}", f"add {where}.{missing}")
