"""Values of silos by the silos' names: `silos.NY = { epsilon = 1 }`, `sizes = { NY = 300, LA = 120 }`.

A name is resolved once, here, into a place in `[task] silos`; the data are then cut in that order, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sordino import codec
from sordino.errors import ConfigError

PER_SILO = ("sizes", "epsilons", "deltas", "multipliers")  # arguments of recipes with an entry for every silo


def resolved(table: Mapping[str, Any]) -> dict[str, Any]:
    """The same file with its tables by name as lists, in the order of `[task] silos`, or of the alphabet."""
    data = dict(table)
    recipe, privacy, task = (data.get(part) for part in ("recipe", "privacy", "task"))
    tables = {f"recipe.{key}": recipe[key] for key in PER_SILO if _by_name(recipe, key)} if recipe else {}
    if _by_name(privacy, "silos"):
        tables["privacy.silos"] = privacy["silos"]  # type: ignore[index]
    if not tables:
        return data
    task = dict(task) if isinstance(task, Mapping) else {}
    names = _names(task.get("silos"), tables)
    for where, given in tables.items():
        part, key = where.split(".")
        data[part] = {**data[part], key: [given[name] for name in names]}
    return {**data, "task": {**task, "silos": names}}


def _by_name(part: Any, key: str) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get(key), Mapping)


def _names(given: Any, tables: dict[str, Mapping[str, Any]]) -> list[str]:
    """The silos' names; every table has all of them and no other."""
    first = next(iter(tables.values()))
    names = [str(name) for name in given] if isinstance(given, list) else sorted(first)
    for where, table in tables.items():
        check_names(list(table), names, where, "[task] silos" if isinstance(given, list) else next(iter(tables)))
    return names


def check_names(found: list[str], known: list[str], where: str, of: str) -> None:
    """Refuse a name that is not there, and one that is left out."""
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"silo {twice!r} twice in {where}", "every silo once")
    unknown = next((name for name in found if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"silo {unknown!r} in {where}", f"a silo of {of}", codec.nearest(unknown, known))
    missing = next((name for name in known if name not in found), None)
    if missing is not None:
        raise ConfigError(f"no silo {missing!r} in {where}", f"every silo of {of}", f"add {where}.{missing}")
