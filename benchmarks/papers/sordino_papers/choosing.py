"""Choosing on held-out data: every row keeps a figure of the test set and one of the validation set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sordino_papers.studies import Row, gathered
from sordino_papers.verdicts import paired


def judged(rows: Sequence[Row], keys: Sequence[str], figure: str) -> list[Row]:
    """`gathered` figures of the test set, each with the mean of the same runs on the validation set."""
    test, held = gathered(rows, keys, figure), gathered(rows, keys, "validation")
    return [{**row, "validation": other["validation"]} for row, other in zip(test, held, strict=True)]


def least(rows: Sequence[Row]) -> Row:
    """The row with the least validation figure: what may be chosen and then reported on the test set."""
    return min(_some(rows), key=lambda row: float(row["validation"]))


def most(rows: Sequence[Row]) -> Row:
    """The row with the largest validation figure."""
    return max(_some(rows), key=lambda row: float(row["validation"]))


def _some(rows: Sequence[Row]) -> Sequence[Row]:
    if not rows:
        raise KeyError("row of this kind")
    return rows


def turned(row: Row) -> list[float]:
    """Figures of every seed with the sign turned: errors and losses, for a verdict in which more is better."""
    return [-float(one) for one in row["values"]]


def only(rows: Sequence[Row]) -> Row:
    """The one row there is; a KeyError, as for a claim that has not been run, if there is none."""
    (row,) = _some(rows)
    return row


def within(text: str, differences: Sequence[float], margin: float, chosen: str, unit: str) -> dict[str, Any]:
    """A claim that two figures are the same: the 95% interval of their paired differences is inside +-margin."""
    found = paired(differences, [0.0] * len(differences))
    inside = -margin <= found.low and found.high <= margin
    outside = found.low > margin or found.high < -margin
    answer = "yes" if inside else "no" if outside else "undecided"
    measured = f"{found} {unit}, margin {margin:g}"
    return {"text": text, "measured": measured, "verdict": answer, "seeds": found.pairs, "chosen": chosen}
