"""Results on disk: one JSON file per cell or study. A longer result wins, and one of other settings is noticed."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import sordino
from sordino.version import __version__
from sordino_papers.cells import FIRST_NAMES, Result

TODAY = {first: today for today, first in FIRST_NAMES.items()}


@cache
def code() -> str:
    """The code that computed a result: the version, and a hash over the package's source."""
    found, home = hashlib.sha256(), Path(sordino.__file__).parent
    for path in sorted(home.rglob("*.py")):
        found.update(f"{path.relative_to(home).as_posix()}\n".encode() + path.read_bytes())
    return f"{__version__}+{found.hexdigest()[:12]}"


def read(path: Path) -> Result:
    """A result from its file, with the names of today for those that it was written with."""
    found: Result = json.loads(path.read_text(encoding="utf-8"), object_hook=_named_today)
    return found


def _named_today(table: dict[str, Any]) -> dict[str, Any]:
    return {TODAY.get(key, key): value for key, value in table.items()}


def stored(folder: Path) -> dict[str, Result]:
    """All results kept so far, by id."""
    return {path.stem: read(path) for path in sorted(folder.glob("*.json"))}


def recalled(folder: Path, name: str) -> Result | None:
    """The result of this id, if one is kept."""
    path = folder / f"{name}.json"
    return read(path) if path.is_file() else None


def length(result: Result) -> int:
    """How many seeds a result stands on (of a study: the rows with most)."""
    count = result.get("seeds") or result.get("repeats")
    return int(count or max((row.get("repeats") or 1 for row in result.get("rows", [])), default=1))


def keep(result: Result, folder: Path) -> str | None:
    """Write a result, unless a longer one is kept: then one sentence says so."""
    old = recalled(folder, result["id"])
    if old is not None and length(old) > length(result):
        found = f"{result['id']}: a result of {length(old)} seeds is kept and this one has {length(result)}"
        return f"{found}: the longer stays; replace it with --seeds {length(old)}, or try in another folder (--results)"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['id']}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return None


def stale(old: Result, settings: str, device: str = "cpu") -> str | None:
    """One line if a kept result was made with other settings than those of today, or on another device."""
    made, where = old.get("settings"), old.get("device", "cpu")
    if (made, where) == (settings, device):
        return None
    if made is None:
        return f"{old['id']}: the kept result does not say its settings: run anew"
    how = f"on {where}, now {device}" if made == settings else f"with other settings ({made}, now {settings})"
    return f"{old['id']}: the kept result was made {how}: run anew"


def seed_by_seed(old: Result) -> list[Result]:
    """A kept result as the runs it came from."""
    columns = old["figures"]
    return [
        {
            "seed": i,
            "accuracy": value / 100,
            "figures": {name: column[i] for name, column in columns.items()},
            "code": made,
        }
        for i, (value, made) in enumerate(zip(old["values"], old["code"], strict=True))
    ]


def middle(result: Result, figure: str) -> float | None:
    """The mean of a figure over the seeds that have it; old results keep no more than their mean."""
    if "figures" not in result:
        old = result.get("paper_protocol" if figure == "protocol" else figure)
        return None if old is None else float(old) / (result["seeds"] if figure == "seconds" else 1)
    found = [one for one in result["figures"].get(figure, []) if one is not None]
    return mean(found) if found else None
