"""Verdicts: a claim "A beats B" is yes, no or undecided by the paired differences of the same seeds.

With differences d_1 .. d_n the interval is mean(d) +- t_{n-1, .975} sd(d) / sqrt(n) (Student). A claim that A beats B
by more than `margin` holds if the interval is above the margin, fails if it is below, and is undecided otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, Literal

Answer = Literal["yes", "no", "undecided"]


@dataclass(frozen=True)
class Interval:
    """A mean of paired differences with its 95% interval; infinitely wide where there is one pair only."""

    mean: float
    low: float
    high: float
    pairs: int

    def above(self, margin: float = 0.0) -> Answer:
        """Whether the difference is above the margin."""
        if self.low > margin:
            return "yes"
        return "no" if self.high < margin else "undecided"

    def __str__(self) -> str:
        if self.pairs < 2:
            return f"{self.mean:+.3g} (one seed, no interval)"
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


def paired(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Interval:
    """The interval of a - b; entry i of both comes from the same seed."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    middle, count = mean(differences), len(differences)
    if count < 2:
        return Interval(middle, -math.inf, math.inf, count)
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, count - 1)) * stdev(differences) / math.sqrt(count)
    return Interval(middle, middle - half, middle + half, count)


def verdict(
    text: str, better: Sequence[float], worse: Sequence[float], chosen: str, margin: float = 0.0, unit: str = "points"
) -> dict[str, Any]:
    """One row of the table of claims: `better` is above `worse` (turn the signs of errors and losses).

    `chosen` says which data chose the hyper-parameters of the two sides, or "nothing" where there was no choice.
    """
    found = paired(better, worse)
    return {
        "text": text,
        "measured": f"{found} {unit}",
        "verdict": found.above(margin),
        "seeds": found.pairs,
        "chosen": chosen,
    }


def strictly(comparisons: int) -> float:
    """The level at which one of several comparisons may refute them all (Bonferroni)."""
    return 1 - 0.05 / comparisons


def in_all(
    text: str,
    pairs: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    chosen: str,
    margin: float = 0.0,
    unit: str = "points",
) -> dict[str, Any]:
    """One row for a claim about several comparisons at once; the one that decides is shown, with its name.

    Yes: every 95% interval is above the margin (an intersection-union test keeps the level); the lowest end is shown.
    No: one of them is below it at level 1 - .05 / comparisons (Bonferroni); the least mean is shown. Undecided
    otherwise, by the lowest end.
    """
    found = {name: paired(*pair) for name, pair in pairs.items()}
    strict = [paired(*pair, level=strictly(len(pairs))).above(margin) for pair in pairs.values()]
    clear = all(one.above(margin) == "yes" for one in found.values())
    answer = "yes" if clear else "no" if "no" in strict else "undecided"
    least = min(found, key=lambda name: found[name].mean if answer == "no" else found[name].low)
    return {
        "text": text,
        "measured": f"least {found[least]} {unit} ({least}, of {len(found)})",
        "verdict": answer,
        "seeds": min(one.pairs for one in found.values()),
        "chosen": chosen,
    }


def fact(text: str, measured: str, holds: bool, seeds: int | None = None, chosen: str = "nothing") -> dict[str, Any]:
    """A claim about one number with no pair to compare (a shape, a closed form, an exponent)."""
    return {
        "text": text,
        "measured": measured,
        "verdict": "yes" if holds else "no",
        "seeds": seeds,
        "chosen": chosen,
    }
