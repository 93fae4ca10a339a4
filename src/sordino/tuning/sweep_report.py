"""Text and figure of a finished sweep, for `sordino sweep`, `certify`, `explain` and `compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sordino.accounting.rounding import upto
from sordino.certificate.explain import sentence
from sordino.report.charts import mean_line, metric_axis
from sordino.report.figures import LIGHT, MARKS, MAX_SERIES, SERIES, Axis, Chart, plot_chart, save_figure
from sordino.report.text_table import Row, sort_rows, varying_keys

LISTED = 24  # settings in the figure's list, the best first


def guarantee(made: dict[str, Any]) -> str:
    """Return one sentence on the privacy cost of reading a sweep's whole table; `made` is its certificate."""
    runs = f"{len(made['runs'])} runs"
    if not made["charged"]:
        return f"{runs} on {made['data']} data ({made['declared_by']}): reading the table costs no privacy"
    if made["epsilon"] is None:
        return f"{runs} on private data: no guarantee"
    return (
        f"reading the table of {runs} on private data costs epsilon {upto(made['epsilon'], 4)}, "
        f"delta {upto(made['delta'])}, unit {made['unit']}, relation {made['relation']}: all their events composed"
    )


def guarantee_and_diverged(made: dict[str, Any]) -> str:
    """Return one sentence on the privacy cost of reading a sweep's table, with the number of diverged runs."""
    lost = sum(run["diverged"] for run in made["runs"])
    return guarantee(made) + (f"; {lost} of them diverged and are not shown" if lost else "")


def explain(made: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a sweep's certificate as plain sentences, by topic and as one text."""
    against = []
    for line in made["adversaries"]:
        cost = f"all runs together, epsilon {upto(line['epsilon'])} at delta {upto(line['delta'])}"
        words = "nothing is guaranteed" if line["epsilon"] is None else cost
        against.append(sentence(f"{line['adversary']}: {words}"))
    rows = f"on {made['chosen_by']}, reported on {made['reported_on']}"
    found = {
        "cost": sentence(guarantee_and_diverged(made)),
        "against": against,
        "chosen": sentence(f"the best setting was chosen by {made['metric']} {rows}"),
        "assumed": [sentence(text) for text in made["assumptions"]],
        "not_covered": [sentence(text) for text in made["not_covered"]],
    }
    listed = {"Against one who sees": "against", "Assumed": "assumed", "Not covered": "not_covered"}
    lists = {title: "\n".join(f"- {text}" for text in found[key]) for title, key in listed.items()}
    blocks = [f"{title}:\n{lines}" for title, lines in lists.items() if lines]
    return found, "\n\n".join([str(found["cost"]), str(found["chosen"]), *blocks])


def draw(rows: Sequence[Row], metric: str, chosen_by: str, path: Path) -> None:
    """Draw the sweep to `path`.png and `path`.svg: curves by round, and each setting's metric with its interval."""
    from matplotlib.figure import Figure

    keys, finite = varying_keys(rows), [row for row in sort_rows(rows, metric) if row.finite]
    curves = any(len(row.band()) > 1 for row in finite)
    figure = Figure(figsize=(4.8 * (1 + curves), 0.22 * min(len(finite), LISTED) + 2.8), layout="constrained")
    panels = list(figure.subplots(1, 1 + curves, squeeze=False)[0])
    if curves:
        plot_chart(panels[0], _curves(finite[:MAX_SERIES], metric))
    _list(panels[-1], finite[:LISTED], keys, metric)
    interval = "; bands and bars are 95% intervals over seeds" if len(rows[0].seeds) > 2 else ""
    figure.supxlabel(f"{metric} on {chosen_by}{interval}", fontsize="x-small", color=LIGHT["quiet"])
    save_figure(figure, path.with_suffix(".png"))


def _list(axes: Any, rows: Sequence[Row], keys: Sequence[str], metric: str) -> None:
    colours = [LIGHT[SERIES[place]] if place < MAX_SERIES else LIGHT["quiet"] for place in range(len(rows))]
    for place, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        if (found := row.estimate) is not None:
            mark, wide = MARKS[place % len(MARKS)], found.half_width or 0.0
            axes.errorbar([found.mean], [place], xerr=[wide], fmt=mark, color=colour, capsize=3, lw=1.5)
    axes.set_yticks(range(len(rows)), [row.label(keys) for row in rows])
    for text, colour in zip(axes.get_yticklabels(), colours, strict=True):
        text.set_color(colour)
    axes.invert_yaxis()
    axes.set_xlabel(metric)
    axes.grid(axis="x", color=LIGHT["rule"], lw=0.8)


def _curves(rows: Sequence[Row], metric: str) -> Chart:
    found = tuple(series for tone, row in enumerate(rows) for series in mean_line("", row.band(), tone))
    return Chart("curves", metric, f"{metric} by round", Axis("round", whole=True), metric_axis(metric), found)
