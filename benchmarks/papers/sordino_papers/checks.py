"""Kept results computed again: one cheap row of everything (quick), or cells to the digits that are kept (check)."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from sordino_papers import kept, runner
from sordino_papers.cells import Cell, Results, Table
from sordino_papers.studies import Row, Study, as_they_come, instructions

ROUNDING = 0.03  # of the figure: what another instruction set may change (the cells of 000-small moved by 2.6%)
Answer = Literal["same", "ok", "differs", "failed", "nothing kept"]


@dataclass(frozen=True)
class Outcome:
    """One figure computed again: what is kept and to which grain, what was found, and how far apart they may be."""

    id: str
    kept: float | None
    found: float | None
    tolerance: float = 0.0
    of: str = ""
    grain: float = 1e-6  # the last digit that was kept
    seconds: float = 0.0  # of one core
    error: str = ""

    @property
    def answer(self) -> Answer:
        """`same` to the digits kept; `ok` within the tolerance; `failed` where there is no figure to compare."""
        if self.error:
            return "failed"
        if self.kept is None or self.found is None:
            return "nothing kept"
        if abs(self.kept - self.found) <= 0.51 * self.grain:
            return "same"
        return "ok" if abs(self.kept - self.found) <= self.tolerance else "differs"

    def __str__(self) -> str:
        if self.error:
            return f"{self.id}: {self.answer} ({self.error})"
        if self.kept is None or self.found is None:
            return f"{self.id}: {self.answer}"
        figures = f"{self.found:.6g}, kept {self.kept:.6g}, tolerance {self.tolerance:.2g}; {self.seconds:.0f} s"
        return f"{self.id}: {self.answer} ({self.of}: {figures})"


def tolerance(value: float, made: str) -> float:
    """0 where the kept run names the instruction set of today: same seed, same digits. Else the stated rounding."""
    return 0.0 if made.endswith(f", {instructions()}") else ROUNDING * abs(value)


# ---- quick -----------------------------------------------------------------------------------------------------------


def stand_in(table: Table, results: Results) -> Cell | None:
    """The cell that stands for a table: the one it names, or the kept one that takes least."""
    there = [cell for cell in table.cells if cell.id in results and table.quick in (None, cell.id)]
    return min(there, key=lambda cell: kept.middle(results[cell.id], "seconds") or 0.0, default=None)


def quick(tables: Iterable[Table], studies: Iterable[Study], results: Results, workers: int) -> Iterator[Outcome]:
    """One cell of every table and one row of every study, computed again and compared; nothing is kept."""
    stand_ins = {table.id: stand_in(table, results) for table in tables}
    jobs = [(name, cell.id) for name, cell in stand_ins.items() if cell is not None]
    jobs += [(study.id, "") for study in studies if study.quick is not None and study.id in results]
    rest = [name for name in (*stand_ins, *(study.id for study in studies)) if name not in dict(jobs)]
    for (name, cell), found in zip(jobs, as_they_come(_again, jobs, workers), strict=True):
        yield _compared(name, cell, results, found)
    yield from (Outcome(name, None, None) for name in rest)


def _again(name: str, cell: str) -> Row:
    """Seed 0 of a cell, or the quick row of a study, with the seconds of one core; what fails is said, not raised."""
    began, study = time.process_time(), None if cell else runner.study(name)
    try:
        found = runner.one_seed(cell, 0) if study is None else (study.quick or dict)()
    except Exception as error:  # one figure that fails shall not hide the others
        return {"error": f"{type(error).__name__}: {error}"}
    return {"row": found, "seconds": time.process_time() - began}


def _compared(name: str, cell: str, results: Results, found: Row) -> Outcome:
    """What was found beside what is kept."""
    if "error" in found:
        return Outcome(name, None, None, error=found["error"])
    study = None if cell else runner.study(name)
    if study is None:
        return replace(_cell(results[cell], found["row"]), seconds=found["seconds"])
    return replace(_study(study, results[name], found["row"]), seconds=found["seconds"])


def _cell(old: dict[str, Any], found: Row) -> Outcome:
    value = float(old["values"][0])
    near = tolerance(value, str(old["code"][0]) if "code" in old else "")
    return Outcome(old["id"], value, 100 * found["accuracy"], near, "accuracy of seed 0", grain(old))


def grain(old: dict[str, Any], seed: int = 0) -> float:
    """The last digit of a kept accuracy; seeds that were kept before results named their code have two digits."""
    earlier = "figures" not in old or str(old["code"][seed]).startswith("earlier")
    return 0.01 if earlier else 10.0**-runner.DIGITS


def _study(study: Study, old: dict[str, Any], found: Row) -> Outcome:
    """The kept row with the keys of the found one: its first seed if the found row is one run, else its mean."""
    keys = {name: one for name, one in found.items() if name not in (study.measure, "spread", "repeats", "values")}
    row = next((row for row in old["rows"] if all(row.get(name) == one for name, one in keys.items())), None)
    if row is None:
        return Outcome(study.id, None, None, error=f"no kept row has the keys {keys}: run the study anew")
    one_run = "values" not in found and row.get("values")
    value = float(row["values"][0] if one_run else row[study.measure])
    of = ", ".join([study.measure, *(f"{name} {one}" for name, one in keys.items())])
    near, last = tolerance(value, str(old.get("code", ""))), 1e-5 * abs(value)  # six digits are kept
    return Outcome(study.id, value, float(found[study.measure]), near, of, last)


# ---- to the digits ---------------------------------------------------------------------------------------------------


def check(cells: Iterable[Cell], results: Results, seeds: int, workers: int) -> Iterator[Outcome]:
    """The first seeds of every cell that is kept, computed again; equal means equal in every digit that is kept."""
    jobs = [(cell.id, seed) for cell in cells if cell.id in results for seed in range(seeds)]
    jobs = [(name, seed) for name, seed in jobs if seed < results[name]["seeds"]]
    for (name, seed), found in zip(jobs, as_they_come(runner.one_seed, jobs, workers), strict=True):
        old = results[name]
        yield Outcome(
            name, float(old["values"][seed]), 100 * found["accuracy"], of=f"seed {seed}", grain=grain(old, seed)
        )


def machine() -> dict[str, str]:
    """What a figure's last digits hang on beside the code: torch, and what it compiled for."""
    return {
        "code": kept.code(),
        "torch": torch.__version__,
        "cpu": instructions(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def remember(found: list[Outcome], folder: Path) -> Path:
    """Keep the outcomes beside the results, the newest of every cell and seed."""
    path = folder / "checks" / "reproduced.json"
    rows = {(row["id"], row["of"]): row for row in recalled(folder)}
    rows |= {(one.id, one.of): {**asdict(one), "answer": one.answer, **machine()} for one in found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")
    return path


def recalled(folder: Path) -> list[Row]:
    """All outcomes kept."""
    path = folder / "checks" / "reproduced.json"
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return rows
