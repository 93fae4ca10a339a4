"""The picture of a sweep: curves with 95% bands, and the metric of every setting, or against every key of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sordino.report.aggregate import Row, best_of, label, ordered, value_text, varying

MANY = 7  # lines that can be told apart in one panel
MOST = 24  # settings listed


def draw(rows: Sequence[Row], metric: str, chosen_by: str, path: Path) -> None:
    """`path`.svg and `path`.png: curves of the best settings; then one panel per key of a grid, or one of settings."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    keys = varying(rows)
    grid = 0 < len(keys) <= 3 and all(key in row.settings for key in keys for row in rows) and "recipe.name" not in keys
    panels = len(keys) if grid else 1
    figure, axes = plt.subplots(1, 1 + panels, figsize=(5.2 + 4.2 * panels, 4.2), squeeze=False)
    _curves(axes[0][0], rows, metric)
    for axis, key in zip(axes[0][1:], keys if grid else [""], strict=True):
        if grid:
            _against(axis, rows, key, keys, metric)
        else:
            _listed(axis, rows, metric)
    interval = "; bars and bands: 95% intervals over seeds" if len(rows[0].seeds) > 2 else ""
    figure.suptitle(f"{metric} on {chosen_by}{interval}", fontsize="x-small", y=0.01, color="0.35")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    for ending in (".svg", ".png"):
        figure.savefig(path.with_suffix(ending), dpi=160, bbox_inches="tight")
    plt.close(figure)


def _curves(axis: Any, rows: Sequence[Row], metric: str) -> None:
    """The metric by round: mean and band over seeds, of the best settings."""
    for row in [row for row in ordered(rows, metric) if row.finite][:MANY]:
        band = row.band()
        rounds, means = [t for t, _ in band], [one.mean for _, one in band]
        (line,) = axis.plot(rounds, means, marker="o", ms=2.5, lw=1.3, label=label(row, varying(rows)))
        widths = [one.half_width or 0.0 for _, one in band]
        low, high = ([m + sign * w for m, w in zip(means, widths, strict=True)] for sign in (-1, 1))
        axis.fill_between(rounds, low, high, color=line.get_color(), alpha=0.15, lw=0)
    axis.set(xlabel="round", ylabel=metric)
    _finish(axis)


def _listed(axis: Any, rows: Sequence[Row], metric: str) -> None:
    """Every setting on a line of its own, the best on top."""
    shown = [row for row in ordered(rows, metric) if row.finite][:MOST]
    for place, row in enumerate(shown):
        found = row.estimate
        if found is not None:
            axis.errorbar([found.mean], [place], xerr=[found.half_width or 0.0], fmt="o", ms=4, capsize=3, color="C0")
    axis.set_yticks(range(len(shown)), [label(row, varying(rows)) for row in shown], fontsize="small")
    axis.invert_yaxis()
    axis.set(xlabel=metric)
    axis.grid(alpha=0.3)


def _against(axis: Any, rows: Sequence[Row], key: str, keys: Sequence[str], metric: str) -> None:
    """The metric against one key; a line for every value of the other key where there are two."""
    values = list(dict.fromkeys(value_text(row.settings[key]) for row in rows))
    numbers = all(isinstance(row.settings[key], int | float) for row in rows)
    at = {text: float(text) if numbers else float(place) for place, text in enumerate(values)}
    others = [other for other in keys if other != key]
    lines: dict[str, list[Row]] = {}
    for row in (row for row in rows if row.finite):
        lines.setdefault(label(row, others) if len(others) == 1 else "settings", []).append(row)
    for name, line in lines.items():
        line.sort(key=lambda row: at[value_text(row.settings[key])])
        x, found = [at[value_text(row.settings[key])] for row in line], [row.estimate for row in line if row.estimate]
        style = "-" if len(set(x)) == len(x) else ""
        bars = [one.half_width or 0.0 for one in found]
        axis.errorbar(x, [one.mean for one in found], bars, marker="o", ms=3, capsize=2, ls=style, label=name)
    best = best_of(rows, metric)
    top = best.estimate
    axis.plot(at[value_text(best.settings[key])], top.mean if top else 0.0, "*", ms=12, mfc="none", mec="black")
    if numbers and min(at.values()) > 0 and max(at.values()) >= 8 * min(at.values()):
        axis.set_xscale("log")
    if len(at) <= 10:
        axis.set_xticks(list(at.values()), list(at), fontsize="small")
        axis.minorticks_off()
    axis.set(xlabel=key, ylabel=metric)
    _finish(axis)


def _finish(axis: Any) -> None:
    axis.grid(alpha=0.3)
    axis.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2, frameon=False)
