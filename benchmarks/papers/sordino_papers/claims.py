"""Claims about cells: rows of `verdicts`, made from results by the paper that each belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sordino_papers.cells import Results, Row
from sordino_papers.verdicts import verdict

Check = Callable[[Results], Iterable[Row]]


def every(*checks: Check) -> Check:
    """Several checks as one; a check whose cells have not all been run (KeyError) gives no row."""

    def judged(results: Results) -> list[Row]:
        return [row for check in checks for row in settled(check, results)]

    return judged


def settled(check: Callable[[Any], Iterable[Row]], found: Any) -> list[Row]:
    """The rows of a check, or none if what it needs has not been run yet."""
    try:
        return list(check(found))
    except KeyError:
        return []


def values(results: Results, name: str, figure: str | None = None) -> list[float]:
    """Seed by seed: accuracy in percent, or a figure that was kept beside it."""
    result = results[name]
    return [float(one) for one in (result["values"] if figure is None else result["figures"][figure])]


def ours(results: Results, name: str) -> float:
    """Mean accuracy of a cell."""
    return float(results[name]["ours"])


def shown(results: Results, name: str) -> str:
    """Mean and spread of a cell."""
    result = results[name]
    spread = "" if result["spread"] is None else f" +- {result['spread']:.2f}"
    return f"{result['ours']:.2f}{spread}"


def common(results: Results, *names: str, figure: str | None = None) -> list[list[float]]:
    """The same seeds of several cells: as many as all of them have."""
    found = [values(results, name, figure) for name in names]
    least = min(len(one) for one in found)
    return [one[:least] for one in found]


def beats(results: Results, text: str, better: str, worse: str, chosen: str, margin: float = 0.0) -> Row:
    """The verdict on one cell's accuracy above another's, by the seeds that both have."""
    up, down = common(results, better, worse)
    return verdict(text, up, down, chosen, margin)
