"""Runs grouped by setting: mean over seeds, 95% interval, paired difference to the best. For `sweep` and `report`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from sordino import codec
from sordino.accounting.rounding import upto
from sordino.errors import ConfigError
from sordino.report.text_table import Table

FEWEST = 3  # seeds that give an interval
SMALLER = ("loss", "rmse", "error", "mae")  # metrics of which less is better; of any other, more is
Curve = tuple[tuple[int, float], ...]  # (round, value of the metric), one run


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half the width of its 95% interval (Student's t); None with fewer than three seeds.

    Two seeds would have an interval of t_1 = 12.7 standard errors to each side, which says nothing; three have 4.3.
    """

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        from scipy.special import stdtrit

        if len(values) < FEWEST:
            return cls(mean(values), None)
        wide = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))
        return cls(mean(values), wide)

    def text(self, sign: str = "") -> str:
        """As a cell of a table; `sign` = "+" for a difference."""
        return f"{self.mean:{sign}.4f}" + ("" if self.half_width is None else f" +- {self.half_width:.4f}")


@dataclass(frozen=True)
class Row:
    """One setting: the metric of every seed (NaN where a run diverged), and what one run of it costs."""

    number: int
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    epsilon: float | None
    relation: str | None = None
    curves: tuple[Curve, ...] = ()

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.values))

    @property
    def estimate(self) -> Estimate | None:
        return Estimate.of(self.values) if self.finite else None

    def minus(self, best: Row) -> Estimate | None:
        """Its difference from the best, seed by seed; None for the best itself, and where seeds differ."""
        if self is best or self.seeds != best.seeds or not (self.finite and best.finite):
            return None
        return Estimate.of([own - other for own, other in zip(self.values, best.values, strict=True)])

    def band(self) -> list[tuple[int, Estimate]]:
        """The curve of the metric: mean and interval over seeds, at the rounds that every run has."""
        each = [dict(curve) for curve in self.curves]
        rounds = sorted(set.intersection(*map(set, each))) if each else []
        return [(t, Estimate.of([curve[t] for curve in each])) for t in rounds]


def value_text(value: Any) -> str:
    """A setting as a cell of a table: short, and a part by its kind."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{name}={value_text(item)}" for name, item in value.items() if name != "kind")
        return f"{value.get('kind', '')}({inside})" if inside else str(value.get("kind", "{}"))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def seeds_text(seeds: Sequence[int]) -> str:
    """What a mean is over, and whether it has an interval."""
    text = f"mean of seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else "one seed"
    return f"{text}, +- 95% interval" if len(seeds) >= FEWEST else f"{text}: no interval, which takes {FEWEST} seeds"


def better(metric: str) -> str:
    """Which is better: smaller for a loss, larger for anything else."""
    return "smaller" if any(word in metric for word in SMALLER) else "larger"


def ordered(rows: Sequence[Row], metric: str) -> list[Row]:
    """The best mean over seeds first; the first of equals; what diverged last."""
    sign = 1.0 if better(metric) == "smaller" else -1.0
    return sorted(rows, key=lambda row: sign * mean(row.values) if row.finite else math.inf)


def best_of(rows: Sequence[Row], metric: str) -> Row:
    """The setting with the best mean over seeds."""
    best = ordered(rows, metric)[0]
    if not best.finite:
        fix = "lower the steps or the clip norm"
        raise ConfigError("a sweep in which every setting diverged", "one that trains", fix)
    return best


def choose_metric(asked: str, known: Sequence[str]) -> str:
    """The metric that chooses: the one that was asked for, else accuracy or rmse, else the loss."""
    if asked and asked not in known:
        raise ConfigError(f"metric = {asked!r}", "a metric of the history", codec.nearest(asked, list(known)))
    return asked or next(name for name in ("accuracy", "rmse", "loss") if name in known)


def varying(rows: Sequence[Row]) -> list[str]:
    """Keys that have more than one value among the rows that have them; all keys if there is one row."""
    keys = list(dict.fromkeys(key for row in rows for key in row.settings))
    return [key for key in keys if len(rows) == 1 or len({_cell(row, key) for row in rows} - {""}) > 1]


def label(row: Row, keys: Sequence[str]) -> str:
    """A setting in a legend: the values of these keys, a recipe by its name alone."""
    named = [(key.removeprefix("recipe."), _cell(row, key)) for key in keys if key in row.settings]
    return ", ".join(text if key == "name" else f"{key} {text}" for key, text in named) or f"setting {row.number}"


def _cell(row: Row, key: str) -> str:
    return value_text(row.settings[key]) if key in row.settings else ""


def entries(rows: Sequence[Row], metric: str) -> list[dict[str, Any]]:
    """The table as plain data, the best first."""
    best = best_of(rows, metric)
    return [_entry(row, best, metric) for row in ordered(rows, metric)]


def _entry(row: Row, best: Row, metric: str) -> dict[str, Any]:
    found, gap = row.estimate, row.minus(best)
    return {
        "setting": row.number,
        "values": dict(row.settings),
        metric: None if found is None else found.mean,
        "half_width": None if found is None else found.half_width,
        "minus_best": None if gap is None else gap.mean,
        "minus_best_half_width": None if gap is None else gap.half_width,
        "epsilon_of_one_run": row.epsilon,
        "relation": row.relation,
        "by_seed": {str(seed): value for seed, value in zip(row.seeds, row.values, strict=True)},
    }


def table(rows: Sequence[Row], metric: str, caption: str = "") -> Table:
    """The table for a terminal and for LaTeX, the best first; the relation of neighbours beside every epsilon."""
    best, keys = best_of(rows, metric), varying(rows)
    names = ("recipe" if key == "recipe.name" else key.removeprefix("recipe.") for key in keys)
    head = (*names, metric, "minus best", "epsilon of one run", "relation")
    lines = []
    for row in ordered(rows, metric):
        found, gap = row.estimate, row.minus(best)
        figures = found.text() if found else "diverged", gap.text("+") if gap else ""
        cost = "no guarantee" if row.epsilon is None else upto(row.epsilon, 4)
        lines.append((*(_cell(row, key) for key in keys), *figures, cost, row.relation or ""))
    return Table(head, tuple(lines), caption)


def to_csv(rows: Sequence[Row], metric: str) -> str:
    """One line per run."""
    text = io.StringIO()
    keys = list(dict.fromkeys(key for row in rows for key in row.settings))
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["setting", *keys, "seed", metric, "epsilon_of_one_run", "relation"])
    for row in rows:
        values = [_cell(row, key) for key in keys]
        for seed, value in zip(row.seeds, row.values, strict=True):
            cost = "" if row.epsilon is None else row.epsilon
            out.writerow([row.number, *values, seed, value, cost, row.relation or ""])
    return text.getvalue()
