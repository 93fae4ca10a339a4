"""Runs beside each other: what they cost, what they reached, and in which settings they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sordino import codec
from sordino.privacy.rounding import upto
from sordino.report.settings import differing, short
from sordino.report.subject import Subject
from sordino.report.tables import Table, figure

PLAIN = ("delta", "unit", "relation", "noise", "rounds")
COLUMNS = 6  # runs that stand side by side; more stand under each other
CAPTION = "Runs certified by Sordino: epsilon to one who sees released models, also cohorts, every message."


def compared(subjects: Sequence[Subject]) -> dict[str, Any]:
    """Everything as plain data."""
    return {"runs": [_run(one) for one in subjects], "settings": settings(subjects)}


def settings(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """What differs between those that have a plan.toml; a loop has its plan only."""
    return differing([one.settings or {"plan": codec.dump(one.plan)} for one in subjects])


def _run(subject: Subject) -> dict[str, Any]:
    made = subject.certificate
    return {
        "name": subject.name,
        "metrics": subject.evaluated,
        "rounds": made["counts"]["rounds_billed"],
        "delta": made["delta"],
        "unit": made["unit"],
        "relation": made["relation"],
        "noise": made["noise"]["mode"],
        "epsilon": {line["adversary"]: line["epsilon"] for line in made["adversaries"]},
        "sordino": made["sordino"],
    }


def table(found: dict[str, Any]) -> Table:
    """A column for every run, or a row if they are many: metrics, epsilons, and the settings that differ."""
    runs, differ = found["runs"], found["settings"]
    metrics = list(dict.fromkeys(name for run in runs for name in run["metrics"]))
    adversaries = list(dict.fromkeys(name for run in runs for name in run["epsilon"]))
    head = (
        "run",
        *metrics,
        *(f"epsilon ({name})" for name in adversaries),
        *PLAIN,
        *(one["setting"] for one in differ),
    )
    rows = [
        (
            run["name"],
            *(figure(run["metrics"].get(name)) for name in metrics),
            *(upto(run["epsilon"].get(name), 4) for name in adversaries),
            *(upto(run[key]) if key == "delta" else figure(run[key], 3) for key in PLAIN),
            *(short(one["values"][place]) for one in differ),
        )
        for place, run in enumerate(runs)
    ]
    whole = Table(head, tuple(rows), CAPTION)
    return whole.turned if len(runs) <= COLUMNS else whole
