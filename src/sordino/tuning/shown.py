"""A sweep as a report, a comparison and a reader see it: its runs, and what a look at all of them costs."""

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


def with_cells(targets: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Every sweep replaced by the runs in it; and of each, certified, what a look at the whole of it costs."""
    runs, notes = [], []
    for target in targets:
        if not is_sweep(target):
            runs.append(target)
            continue
        made, places = sweep.certify(target), sweep.opened(target).places
        runs += [place.folder for place in places if not place.diverged]
        notes.append(f"{target.name}: {_looked_at(made)}")
    return runs, notes


def _looked_at(made: dict[str, Any]) -> str:
    """The whole sweep in one sentence; the epsilon of a run is not that of the table it was read in."""
    lost = sum(cell["diverged"] for cell in made["cells"])
    left = "" if not lost else f"; {lost} of them diverged and are not shown"
    return sweep.guarantee(made) + left


def explained(target: Path) -> dict[str, Any]:
    """A sweep's certificate in sentences."""
    made = sweep.certify(target)
    judged = f"the winner was chosen by {made['metric']} on {made['chosen_by']}, reported on {made['reported_on']}"
    return {
        "looked_at": sentence(_looked_at(made)),
        "against": [_against(line) for line in made["adversaries"]],
        "judged": sentence(judged),
        "assumed": [sentence(text) for text in made["assumptions"]],
        "not_covered": [sentence(text) for text in made["not_covered"]],
    }


def _against(line: dict[str, Any]) -> str:
    if line["epsilon"] is None:
        return sentence(f"{line['adversary']}: nothing is guaranteed")
    found = f"epsilon {upto(line['epsilon'])} at delta {upto(line['delta'])}"
    return sentence(f"{line['adversary']}: all runs together, {found}")


def page(said: dict[str, Any]) -> str:
    """The same as text."""
    listed = {"Against one who sees": "against", "Assumed": "assumed", "Not covered": "not_covered"}
    blocks = [
        f"{title}:\n" + "\n".join(f"- {text}" for text in said[key]) for title, key in listed.items() if said[key]
    ]
    return "\n\n".join([said["looked_at"], said["judged"], *blocks])
