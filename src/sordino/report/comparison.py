"""Runs beside each other: what they reached and what they cost, a row for every setting, and which settings differ.

Runs that differ in their seed only are one setting: its figures are means with 95% intervals, and differences from the
best setting are paired by seed. Called by `sordino compare` and by the report's page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from sordino import codec
from sordino.accounting.rounding import upto
from sordino.report.aggregate import Estimate, better
from sordino.report.subject import Subject
from sordino.report.text_table import Table, figure, flat, short

SEED = "run.seed"
PLAIN = ("delta", "unit", "noise", "rounds")
COLUMNS = 6  # settings that stand side by side; more stand under each other
CAPTION = "Runs certified by Sordino: epsilon to one who sees released models, also cohorts, every message."


def differing(tables: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keys whose values are not the same in all tables: {"setting", "values"}, one value for each table."""
    each = [dict(flat(table)) for table in tables]
    names = dict.fromkeys(name for one in each for name in one)
    rows = [{"setting": name, "values": [one.get(name) for one in each]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]


def compare(subjects: Sequence[Subject]) -> dict[str, Any]:
    """Everything as plain data: every run, the settings that differ, and the comparison by setting."""
    runs, differ = [_run(one) for one in subjects], settings(subjects)
    return {"runs": runs, "settings": differ, "comparison": comparison(subjects, runs, differ)}


def settings(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """What differs between those that have a plan.toml; a loop has its plan only."""
    return differing([one.settings or {"plan": codec.dump(one.plan)} for one in subjects])


def _run(subject: Subject) -> dict[str, Any]:
    made = subject.certificate
    return {
        "name": subject.name,
        "metrics": subject.evaluated,
        "rounds": made["counts"]["rounds_accounted"],
        "delta": made["delta"],
        "unit": made["unit"],
        "relation": made["relation"],
        "noise": made["noise"]["mode"],
        "epsilon": {line["adversary"]: line["epsilon"] for line in made["adversaries"]},
        "relations": {line["adversary"]: line["relation"] for line in made["adversaries"]},
        "sordino": made["sordino"],
    }


def comparison(
    subjects: Sequence[Subject], runs: Sequence[dict[str, Any]], differ: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A row for every setting; `metric` is the figure that all runs have and that they are compared by, if any."""
    names = {one.main_metric for one in subjects}
    metric = names.pop() if len(names) == 1 else None
    grouped: dict[str, list[int]] = {}  # places of runs that differ in their seed only; a loop stands alone
    for place, one in enumerate(subjects):
        asked = {name: value for name, value in flat(one.settings) if name != SEED}
        grouped.setdefault(json.dumps(asked, default=str) if asked else f"alone {place}", []).append(place)
    groups = list(grouped.values())
    labels = _labels(groups, runs, differ)
    values = [_by_seed(group, subjects, metric) for group in groups]
    known = [place for place, found in enumerate(values) if found]
    promised = [place for place in known if runs[groups[place][0]]["epsilon"]["models"] is not None]
    sign = 1.0 if metric is not None and better(metric) == "smaller" else -1.0
    best = min(promised or known, key=lambda place: sign * mean(values[place].values()), default=None)
    rows = [
        {
            "name": label,
            "runs": [runs[k]["name"] for k in group],
            "seeds": list(found),
            "metrics": {name: _estimate([runs[k]["metrics"].get(name) for k in group]) for name in _metrics(runs)},
            "minus_best": None if best is None or not found else _difference(found, values[best]),
            "best": place == best,
            **_worst(group, runs),
            "settings": {one["setting"]: one["values"][group[0]] for one in differ if one["setting"] != SEED},
        }
        for place, (group, label, found) in enumerate(zip(groups, labels, values, strict=True))
    ]
    return {"metric": metric, "better": None if metric is None else better(metric), "rows": rows}


def _labels(
    groups: Sequence[Sequence[int]], runs: Sequence[dict[str, Any]], differ: Sequence[dict[str, Any]]
) -> list[str]:
    """The name of a single run; of several, what their names begin with, or the settings in which they differ."""
    found = []
    for group in groups:
        names = [str(runs[place]["name"]) for place in group]
        own = [f"{one['setting'].rpartition('.')[2]} {short(one['values'][group[0]])}" for one in differ
               if one["setting"] != SEED and one["values"][group[0]] is not None]  # fmt: skip
        # what all names begin with, without what separates a seed from it
        start = os.path.commonprefix(names).rstrip("-_./ ").removesuffix("seed").rstrip("-_./ ")  # noqa: RUF071
        found.append(names[0] if len(names) == 1 else start or ", ".join(own[:3]) or names[0])
    return found if len(set(found)) == len(found) else [str(runs[group[0]]["name"]) for group in groups]


def _metrics(runs: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run["metrics"]))


def _by_seed(group: Sequence[int], subjects: Sequence[Subject], metric: str | None) -> dict[Any, float]:
    """The metric of every run of a setting, by its seed."""
    if metric is None:
        return {}
    found = {subjects[k].settings.get("run", {}).get("seed", 0): subjects[k].evaluated[metric] for k in group}
    return found if len(found) == len(group) else {k: subjects[k].evaluated[metric] for k in group}


def _estimate(values: Sequence[float | None]) -> dict[str, float | None] | None:
    """Mean and half width of the interval, where every run has the figure."""
    known = [value for value in values if value is not None]
    return vars(Estimate.of(known)) if known and len(known) == len(values) else None


def _difference(own: dict[Any, float], best: dict[Any, float]) -> dict[str, float | None] | None:
    """own - best over the seeds that both have."""
    shared = [own[seed] - best[seed] for seed in own if seed in best]
    return vars(Estimate.of(shared)) if shared else None


def _worst(group: Sequence[int], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the setting costs: of its runs the one with the largest epsilon, which may depend on who took part."""
    own = [runs[place] for place in group]
    run = max(own, key=lambda one: [float("inf") if e is None else e for e in one["epsilon"].values()])
    return {name: run[name] for name in ("epsilon", "relations", *PLAIN)}


def table(found: dict[str, Any]) -> Table:
    """The comparison as text: a row for every setting."""
    made = found["comparison"]
    rows, metric = made["rows"], made["metric"]
    names = sorted(_metrics(found["runs"]), key=lambda name: name != metric)
    seeds = any(len(row["runs"]) > 1 for row in rows)
    gaps = metric is not None and len(rows) > 1
    adversaries = list(dict.fromkeys(name for row in rows for name in row["epsilon"]))
    columns: dict[str, Callable[[dict[str, Any]], str]] = {"setting" if seeds else "run": lambda row: str(row["name"])}
    if seeds:
        columns["seeds"] = lambda row: str(len(row["runs"]))
    for name in names:
        columns[name] = lambda row, name=name: _figure(row["metrics"].get(name))  # type: ignore[misc]
        if name == metric and gaps:
            columns["minus best"] = lambda row: "best" if row["best"] else _figure(row["minus_best"], "+")
    for name in adversaries:
        columns[f"epsilon ({name})"] = lambda row, name=name: epsilon_cell(row, name, rows)  # type: ignore[misc]
    columns["relation"] = lambda row: str(row["relations"][adversaries[0]])
    for name in PLAIN:
        columns[name] = lambda row, name=name: upto(row[name]) if name == "delta" else figure(row[name], 3)  # type: ignore[misc]
    said = " Intervals are 95% over seeds; differences are paired by seed." if seeds else ""
    best = f" Best: {metric}, among settings with a guarantee." if gaps else ""
    cells = tuple(tuple(cell(row) for cell in columns.values()) for row in rows)
    return Table(tuple(columns), cells, CAPTION + best + said)


def settings_table(found: dict[str, Any]) -> Table:
    """The keys of plan.toml that differ: a column for every setting, or a row if they are many."""
    rows = found["comparison"]["rows"]
    cells = tuple((name, *(short(row["settings"][name]) for row in rows)) for name in rows[0]["settings"])
    head = ("setting", *(row["name"] for row in rows))
    whole = Table(head, cells, "Keys of plan.toml whose values are not the same")
    return whole.turned if cells and len(rows) > COLUMNS else whole


def _figure(found: dict[str, float | None] | None, sign: str = "") -> str:
    """A mean with its interval; `sign` = "+" for a difference."""
    if found is None or (found["half_width"] is None and not sign):
        return "-" if found is None else figure(found["mean"])
    return Estimate(found["mean"] or 0.0, found["half_width"]).text(sign)


def epsilon_cell(row: dict[str, Any], adversary: str, rows: Sequence[dict[str, Any]]) -> str:
    """epsilon, with its relation beside it where rows differ in that: such numbers are not of the same thing."""
    value, relation = row["epsilon"].get(adversary), row["relations"].get(adversary)
    differ = value is not None and len({one["relations"].get(adversary) for one in rows}) > 1
    return f"{upto(value, 4)} ({relation})" if differ else upto(value, 4)
