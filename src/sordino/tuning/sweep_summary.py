"""Summary of a sweep for `compare`, `report` and `explain`: its runs, and the privacy cost of reading all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sordino.accounting.rounding import upto
from sordino.certificate.explain import sentence
from sordino.tuning import sweep


def is_sweep(target: Path) -> bool:
    """Whether a folder is that of a sweep."""
    return (target / sweep.HEADER).is_file()


def with_runs(targets: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Every sweep replaced by the runs in it; and of each, certified, what reading the whole of it costs."""
    runs, notes = [], []
    for target in targets:
        if not is_sweep(target):
            runs.append(target)
            continue
        made, stored = sweep.certify(target), sweep.open_folder(target).stored
        runs += [one.folder for one in stored if not one.diverged]
        notes.append(f"{target.name}: {_cost(made)}")
    return runs, notes


def _cost(made: dict[str, Any]) -> str:
    """The whole sweep in one sentence; the epsilon of a run is not that of the table it was read in."""
    lost = sum(run["diverged"] for run in made["runs"])
    left = "" if not lost else f"; {lost} of them diverged and are not shown"
    return sweep.guarantee(made) + left


def explain(target: Path) -> dict[str, Any]:
    """A sweep's certificate in sentences."""
    made = sweep.certify(target)
    chosen = (
        f"the best setting was chosen by {made['metric']} on {made['chosen_by']}, reported on {made['reported_on']}"
    )
    return {
        "cost": sentence(_cost(made)),
        "against": [_against(line) for line in made["adversaries"]],
        "chosen": sentence(chosen),
        "assumed": [sentence(text) for text in made["assumptions"]],
        "not_covered": [sentence(text) for text in made["not_covered"]],
    }


def _against(line: dict[str, Any]) -> str:
    if line["epsilon"] is None:
        return sentence(f"{line['adversary']}: nothing is guaranteed")
    found = f"epsilon {upto(line['epsilon'])} at delta {upto(line['delta'])}"
    return sentence(f"{line['adversary']}: all runs together, {found}")


def text(found: dict[str, Any]) -> str:
    """The same as text."""
    listed = {"Against one who sees": "against", "Assumed": "assumed", "Not covered": "not_covered"}
    blocks = [
        f"{title}:\n" + "\n".join(f"- {text}" for text in found[key]) for title, key in listed.items() if found[key]
    ]
    return "\n\n".join([found["cost"], found["chosen"], *blocks])
