"""Data of certified runs, and comparisons of runs: metrics, privacy cost and differing settings.

Runs that differ only in their seed form one setting, whose metrics are means with 95% intervals; differences to the
best setting are paired by seed. Called by `sordino compare`, by the report's page and by `runs.folder`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from sordino import codec
from sordino.accounting.rounding import upto
from sordino.certificate.facts import Facts
from sordino.data.metrics import ONLY_CLASS
from sordino.outcome import DIAGNOSTIC, last_figures
from sordino.parts.samplers import Cohort
from sordino.plan import Plan, State
from sordino.report.text_table import Estimate, Table, better, cell_text, flatten, is_number, number_text

MAIN_METRICS = ("accuracy", "balanced_accuracy", "rmse", "loss")  # the first of these leads if no metric was asked for
DEFAULT_METRICS = (*MAIN_METRICS, ONLY_CLASS)  # metrics of every evaluation, asked for or not
SEED = "run.seed"
COST_FIELDS = ("delta", "unit", "noise", "rounds")
MAX_COLUMNS = 6  # more settings than this are listed as rows
CAPTION = "Runs certified by Sordino: epsilon to one who sees released models, also cohorts, every message."


@codec.hides_values
@dataclass(frozen=True)
class Last:
    """Server states before and after a run's last round, and the tensors of the saved model by name."""

    before: State
    after: State
    model: dict[str, Tensor]

    def shapes(self, vector: Tensor) -> list[torch.Size] | None:
        """Return the shapes of the model's tensors in the order in which `vector` concatenates them.

        A safetensors file does not store this order, so every tensor is located by its values; None if that fails.
        """
        found: list[torch.Size] = []
        left, start = dict(self.model), 0
        while start < len(vector):
            for name, tensor in left.items():  # noqa: B007
                flat, part = tensor.reshape(-1), vector[start : start + tensor.numel()]
                if tensor.is_floating_point() and len(flat) and torch.equal(part.to(flat.dtype), flat):
                    break
            else:
                return None
            found.append(left.pop(name).shape)
            start += len(flat)
        return found


@codec.hides_values
@dataclass(frozen=True)
class Subject:
    """Data of a certified run for a report; a DP-SGD loop (`make_private`) has certificate, plan and facts only."""

    name: str
    certificate: dict[str, Any]
    plan: Plan
    facts: Facts
    history: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)  # charged rounds, from 0; a repeated round is listed twice
    cohorts: list[Cohort] = field(default_factory=list)  # of each charged round, where cohorts are public or seen
    settings: dict[str, Any] = field(default_factory=dict)  # plan.toml
    audit: dict[str, Any] = field(default_factory=dict)  # audit.json, by layer
    last: Last | None = None

    @property
    def is_loop(self) -> bool:
        return self.certificate["loop"] is not None

    @property
    def evaluated(self) -> dict[str, float]:
        """Metrics of the last evaluated round; empty if no round was evaluated."""
        return last_figures(self.history) or {}

    @property
    def evaluated_after(self) -> int | None:
        """Number of the last evaluated round."""
        return next((line["round"] for line in reversed(self.history) if last_figures([line])), None)

    @property
    def main_metric(self) -> str | None:
        """Name of the report's main metric: the first one that the user configured, else accuracy, rmse or loss."""
        asked = self.settings.get("run", {}).get("metrics", [])
        kinds = [one.get("name", one["kind"]) if isinstance(one, dict) else str(one) for one in asked]
        names = ["worst_group" if kind == "group_accuracy" else kind for kind in kinds]
        added = [name for name in self.evaluated if name not in DEFAULT_METRICS and "/" not in name]
        return next((name for name in (*names, *added, *MAIN_METRICS, *self.evaluated) if name in self.evaluated), None)

    @property
    def metrics(self) -> dict[str, dict[str, list[float]]]:
        """Values of every public metric by round, from the run's history."""
        found: dict[str, dict[str, list[float]]] = {}
        for line in self.history:
            for name, value in line.items():
                if name not in ("round", "void", ONLY_CLASS, DIAGNOSTIC) and is_number(value):
                    series = found.setdefault(name, {"round": [], "value": []})
                    series["round"].append(line["round"])
                    series["value"].append(float(value))
        return found

    def diagnostic(self, name: str) -> dict[str, list[float]]:
        """Return the values of a diagnostic by round; diagnostics are NOT private and recorded by simulations only."""
        lines = [(line["round"], line.get(DIAGNOSTIC, {}).get(name)) for line in self.history]
        recorded = [(t, float(value)) for t, value in lines if is_number(value)]
        return {"round": [t for t, _ in recorded], "value": [value for _, value in recorded]}


# ---- as data
def differing_settings(tables: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the dotted keys whose values are not the same in all tables, each with its values."""
    each = [dict(flatten(table)) for table in tables]
    names = dict.fromkeys(name for one in each for name in one)
    rows = [{"setting": name, "values": [one.get(name) for one in each]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]


def compare(subjects: Sequence[Subject]) -> dict[str, Any]:
    """Compare runs; return all runs, the settings that differ, and the metrics of every setting, as JSON data."""
    runs = [
        {
            "name": one.name,
            "metrics": one.evaluated,
            "rounds": one.certificate["counts"]["rounds_accounted"],
            "noise": one.certificate["noise"]["mode"],
            **{key: one.certificate[key] for key in ("delta", "unit", "relation", "sordino")},
            "epsilon": {line["adversary"]: line["epsilon"] for line in one.certificate["adversaries"]},
            "relations": {line["adversary"]: line["relation"] for line in one.certificate["adversaries"]},
        }
        for one in subjects
    ]
    differ = differing_settings([one.settings or {"plan": codec.dump(one.plan)} for one in subjects])
    return {"runs": runs, "settings": differ, "comparison": _by_setting(subjects, runs, differ)}


def _by_setting(
    subjects: Sequence[Subject], runs: Sequence[dict[str, Any]], differ: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Compare settings by the main metric that all runs share; the best one is chosen among those with a guarantee."""
    names = {one.main_metric for one in subjects}
    metric = names.pop() if len(names) == 1 else None
    grouped: dict[str, list[int]] = {}  # places of runs that differ in their seed only; a loop is alone
    for place, one in enumerate(subjects):
        asked = {name: value for name, value in flatten(one.settings) if name != SEED}
        grouped.setdefault(json.dumps(asked, default=str) if asked else f"alone {place}", []).append(place)
    groups = list(grouped.values())
    values = [_by_seed(group, subjects, metric) for group in groups]
    evaluated = [place for place, found in enumerate(values) if found]
    guaranteed = [place for place in evaluated if runs[groups[place][0]]["epsilon"]["models"] is not None]
    sign = 1.0 if metric is not None and better(metric) == "smaller" else -1.0
    best = min(guaranteed or evaluated, key=lambda place: sign * mean(values[place].values()), default=None)
    rows = []
    for place, (group, label, found) in enumerate(zip(groups, _labels(groups, runs, differ), values, strict=True)):
        own = [runs[k] for k in group]
        gaps = [found[seed] - values[best][seed] for seed in found if seed in values[best]] if best is not None else []
        worst = max(own, key=lambda run: [float("inf") if e is None else e for e in run["epsilon"].values()])
        rows.append({
            "name": label, "runs": [run["name"] for run in own], "seeds": list(found),
            "metrics": {name: _estimate([run["metrics"].get(name) for run in own]) for name in _metrics(runs)},
            "minus_best": _estimate(gaps), "best": place == best,
            **{name: worst[name] for name in ("epsilon", "relations", *COST_FIELDS)},
            "settings": {one["setting"]: one["values"][group[0]] for one in differ if one["setting"] != SEED},
        })  # fmt: skip
    return {"metric": metric, "better": None if metric is None else better(metric), "rows": rows}


def _labels(
    groups: Sequence[Sequence[int]], runs: Sequence[dict[str, Any]], differ: Sequence[dict[str, Any]]
) -> list[str]:
    """Return a name for every setting: its only run's, else the common prefix of its runs' names, or its values."""
    found = []
    for group in groups:
        names = [str(runs[place]["name"]) for place in group]
        own = [f"{one['setting'].rpartition('.')[2]} {cell_text(one['values'][group[0]])}" for one in differ
               if one["setting"] != SEED and one["values"][group[0]] is not None]  # fmt: skip
        prefix = os.path.commonprefix(names).rstrip("-_./ ").removesuffix("seed").rstrip("-_./ ")  # noqa: RUF071
        found.append(names[0] if len(names) == 1 else prefix or ", ".join(own[:3]) or names[0])
    return found if len(set(found)) == len(found) else [str(runs[group[0]]["name"]) for group in groups]


def _metrics(runs: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run["metrics"]))


def _by_seed(group: Sequence[int], subjects: Sequence[Subject], metric: str | None) -> dict[Any, float]:
    """Return the metric of a setting's runs by seed, or by the run's index if two runs have the same seed."""
    if metric is None:
        return {}
    found = {subjects[k].settings.get("run", {}).get("seed", 0): subjects[k].evaluated[metric] for k in group}
    return found if len(found) == len(group) else {k: subjects[k].evaluated[metric] for k in group}


def _estimate(values: Sequence[float | None]) -> dict[str, float | None] | None:
    numbers = [value for value in values if value is not None]
    return vars(Estimate.of(numbers)) if numbers and len(numbers) == len(values) else None


# ---- as tables
def comparison_table(found: dict[str, Any]) -> Table:
    """Return the table of `sordino compare`: one row for each setting."""
    rows, metric = found["comparison"]["rows"], found["comparison"]["metric"]
    seeds = any(len(row["runs"]) > 1 for row in rows)
    gaps = metric is not None and len(rows) > 1
    adversaries = list(dict.fromkeys(name for row in rows for name in row["epsilon"]))
    columns: dict[str, Callable[[dict[str, Any]], str]] = {"setting" if seeds else "run": lambda row: str(row["name"])}
    if seeds:
        columns["seeds"] = lambda row: str(len(row["runs"]))
    for name in sorted(_metrics(found["runs"]), key=lambda name: name != metric):
        columns[name] = lambda row, name=name: _estimate_cell(row["metrics"].get(name))  # type: ignore[misc]
        if name == metric and gaps:
            columns["minus best"] = lambda row: "best" if row["best"] else _estimate_cell(row["minus_best"], "+")
    for name in adversaries:
        differ = len({one["relations"].get(name) for one in rows}) > 1  # such epsilons cannot be compared
        columns[f"epsilon ({name})"] = lambda row, name=name, differ=differ: _epsilon_cell(row, name, differ)  # type: ignore[misc]
    columns["relation"] = lambda row: str(row["relations"][adversaries[0]])
    columns["delta"] = lambda row: upto(row["delta"])
    for name in COST_FIELDS[1:]:
        columns[name] = lambda row, name=name: number_text(row[name], 3)  # type: ignore[misc]
    intervals = " Intervals are 95% over seeds; differences are paired by seed." if seeds else ""
    best = f" Best: {metric}, among settings with a guarantee." if gaps else ""
    cells = tuple(tuple(cell(row) for cell in columns.values()) for row in rows)
    return Table(tuple(columns), cells, CAPTION + best + intervals)


def differences_table(found: dict[str, Any]) -> Table:
    """Return the table of plan.toml keys that differ, with one column per setting, or one row if there are many."""
    rows = found["comparison"]["rows"]
    cells = tuple((name, *(cell_text(row["settings"][name]) for row in rows)) for name in rows[0]["settings"])
    head = ("setting", *(row["name"] for row in rows))
    table = Table(head, cells, "Keys of plan.toml whose values are not the same")
    return table.transposed if cells and len(rows) > MAX_COLUMNS else table


def _estimate_cell(found: dict[str, float | None] | None, sign: str = "") -> str:
    if found is None or (found["half_width"] is None and not sign):
        return "-" if found is None else number_text(found["mean"])
    return Estimate(found["mean"] or 0.0, found["half_width"]).text(sign)


def _epsilon_cell(row: dict[str, Any], adversary: str, with_relation: bool) -> str:
    value = row["epsilon"].get(adversary)
    return upto(value, 4) + (f" ({row['relations'].get(adversary)})" if with_relation and value is not None else "")
