"""Choosing on held-out data: every row keeps a figure of the test set and one of the validation set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sordino_papers.studies import Row, gathered
from sordino_papers.verdicts import Answer, Interval, paired, strictly


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
    found = _apart(differences)
    measured = f"{found} {unit}, margin {margin:g}"
    return {"text": text, "measured": measured, "verdict": _same(found, margin), "seeds": found.pairs, "chosen": chosen}


def within_all(
    text: str, differences: Mapping[str, Sequence[float]], margin: float, chosen: str, unit: str
) -> dict[str, Any]:
    """`within` for several figures at once, decided as `verdicts.in_all` does; the one that decides is shown."""
    found = {name: _apart(one) for name, one in differences.items()}
    strict = [_same(_apart(one, strictly(len(differences))), margin) for one in differences.values()]
    clear = all(_same(one, margin) == "yes" for one in found.values())
    answer = "yes" if clear else "no" if "no" in strict else "undecided"
    most = max(found, key=lambda name: _reach(found[name], answer))
    return {
        "text": text,
        "measured": f"most {found[most]} {unit} ({most}, of {len(found)}), margin {margin:g}",
        "verdict": answer,
        "seeds": min(one.pairs for one in found.values()),
        "chosen": chosen,
    }


def _reach(found: Interval, answer: str) -> float:
    """How far off: the mean where that refutes, the further end where it confirms or leaves open."""
    return abs(found.mean) if answer == "no" else max(-found.low, found.high)


def _apart(differences: Sequence[float], level: float = 0.95) -> Interval:
    return paired(differences, [0.0] * len(differences), level)


def _same(found: Interval, margin: float) -> Answer:
    """Yes where the interval is inside +-margin, no where it is outside."""
    if -margin <= found.low and found.high <= margin:
        return "yes"
    return "no" if found.low > margin or found.high < -margin else "undecided"
