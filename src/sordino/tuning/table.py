"""The table of a sweep: a row per setting, its seeds paired with those of the best, with 95% intervals."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from sordino.accounting.rounding import upto
from sordino.errors import ConfigError
from sordino.tuning.spec import SMALLER, Changes, shown_value

FEWEST = 3  # seeds that have an interval


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half the width of its 95% interval (Student's t); None: too few seeds to speak of one.

    Two seeds would have one: t_1 = 12.7 standard errors to each side, which says nothing; three have 4.3.
    """

    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        from scipy.special import stdtrit

        if len(values) < FEWEST:
            return cls(mean(values), None)
        wide = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))
        return cls(mean(values), wide)

    @property
    def words(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.spread is None else f" +- {self.spread:.4f}")


@dataclass(frozen=True)
class Row:
    """One setting: a figure for every seed, NaN where the run diverged; epsilon of one run of it."""

    number: int
    changes: Changes
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    epsilon: float | None

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.values))

    @property
    def estimate(self) -> Estimate | None:
        return Estimate.of(self.values) if self.finite else None

    def beside(self, best: Row) -> Estimate | None:
        """Its difference from the best, seed by seed."""
        if not (self.finite and best.finite):
            return None
        return Estimate.of([own - other for own, other in zip(self.values, best.values, strict=True)])


def seeds_words(seeds: Sequence[int]) -> str:
    """What a mean is over, and whether it has an interval."""
    said = f"mean of seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else "one seed"
    return said if len(seeds) >= FEWEST else f"{said}: no interval, which takes {FEWEST} seeds"


def better(metric: str) -> str:
    """Which is better: smaller for a loss, larger for anything else."""
    return "smaller" if any(word in metric for word in SMALLER) else "larger"


def best_of(rows: Sequence[Row], metric: str) -> Row:
    """The best mean over seeds; the first of equals."""
    finite = [row for row in rows if row.finite]
    if not finite:
        raise ConfigError(
            "a sweep in which every setting diverged", "one that trains", "lower the steps or the clip norm"
        )
    sign = 1.0 if better(metric) == "smaller" else -1.0
    return min(finite, key=lambda row: sign * mean(row.values))


def chosen_metric(asked: str, known: Sequence[str]) -> str:
    """The figure that chooses: the one that was asked for, else accuracy or rmse, else the loss."""
    from sordino import codec

    if asked and asked not in known:
        raise ConfigError(f"metric = {asked!r}", "a figure of the history", codec.nearest(asked, list(known)))
    return asked or next(name for name in ("accuracy", "rmse", "loss") if name in known)


def entries(rows: Sequence[Row], metric: str) -> list[dict[str, Any]]:
    """The table as plain data, the best first."""
    best = best_of(rows, metric)
    return [_entry(row, best, metric) for row in _ordered(rows, metric)]


def _ordered(rows: Sequence[Row], metric: str) -> list[Row]:
    sign = 1.0 if better(metric) == "smaller" else -1.0
    return sorted(rows, key=lambda row: sign * mean(row.values) if row.finite else math.inf)


def _entry(row: Row, best: Row, metric: str) -> dict[str, Any]:
    found, gap = row.estimate, row.beside(best)
    return {
        "cell": row.number,
        "settings": row.changes,
        metric: None if found is None else found.mean,
        "spread": None if found is None else found.spread,
        "minus_best": None if gap is None else gap.mean,
        "minus_best_spread": None if gap is None else gap.spread,
        "epsilon_of_one_run": row.epsilon,
        "by_seed": {str(seed): value for seed, value in zip(row.seeds, row.values, strict=True)},
    }


def to_csv(rows: Sequence[Row], metric: str) -> str:
    """One line per run."""
    text = io.StringIO()
    keys = list(dict.fromkeys(key for row in rows for key in row.changes))
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["cell", *keys, "seed", metric, "epsilon_of_one_run"])
    for row in rows:
        values = [shown_value(row.changes[key]) if key in row.changes else "" for key in keys]
        for seed, value in zip(row.seeds, row.values, strict=True):
            out.writerow([row.number, *values, seed, value, "" if row.epsilon is None else row.epsilon])
    return text.getvalue()


def to_text(rows: Sequence[Row], metric: str) -> list[str]:
    """The table for a terminal, the best first."""
    best = best_of(rows, metric)
    keys = list(dict.fromkeys(key for row in rows for key in row.changes))
    lines = [[*keys, metric, "minus best", "epsilon of one run"]]
    for row in _ordered(rows, metric):
        found, gap = row.estimate, row.beside(best)
        figures = [found.words if found else "diverged", "" if gap is None or row is best else f"{_signed(gap)}"]
        cost = "no guarantee" if row.epsilon is None else upto(row.epsilon, 4)
        lines.append([*(shown_value(row.changes.get(key, "")) for key in keys), *figures, cost])
    wide = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, wide, strict=True)).rstrip() for line in lines]


def _signed(gap: Estimate) -> str:
    return f"{gap.mean:+.4f}" + ("" if gap.spread is None else f" +- {gap.spread:.4f}")
