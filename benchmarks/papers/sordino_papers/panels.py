"""Figures of the papers: one panel per entry, one line per label, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sordino.report.figures import panel_axes, save_figure

Panels = Mapping[str, Mapping[str, Sequence[dict[str, Any]]]]


def curves(
    panels: Panels, x: str, y: str, path: Path, *, xlabel: str | Mapping[str, str] = "", ylabel: str = "",
    log: bool = False, log_y: bool = False, own_y: bool = False,
) -> None:  # fmt: skip
    """Write one panel per entry with one line per label; a row whose x is None is a dashed level, `spread` a bar.

    `xlabel` names the x axis of all panels, or of each panel by its title. One legend is to the right where all panels
    have the same lines, else one is below each panel. Panels share the y axis unless `own_y`.
    """
    abreast = len(panels) if len(panels) <= 4 else 3
    figure, axes = panel_axes(len(panels), abreast, 1 + 3.4 * abreast, 3.6, sharey=not own_y)
    same_lines = len({tuple(lines) for lines in panels.values()}) == 1
    shared_label = isinstance(xlabel, str) and same_lines
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for number, (label, rows) in enumerate(lines.items()):
            placed, colour = [row for row in rows if row[x] is not None], f"C{number}"
            bars = [row.get("spread") or 0.0 for row in placed]
            points = [row[x] for row in placed], [row[y] for row in placed]
            axis.errorbar(*points, bars, marker="o", ms=3, capsize=2, label=label, color=colour)
            for row in (row for row in rows if row[x] is None):
                axis.axhline(row[y], color=colour, ls="--", lw=1)
        axis.set_title(title, fontsize="medium")
        if not shared_label:
            axis.set_xlabel((xlabel if isinstance(xlabel, str) else xlabel[title]) or x)
        axis.grid(alpha=0.3)
        _set_scales(axis, sorted({row[x] for rows in lines.values() for row in rows} - {None}), log, log_y)
        if not same_lines:
            axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False,
                        ncols=2 if len(axis.get_legend_handles_labels()[1]) > 3 else 1)  # fmt: skip
    if shared_label:
        figure.supxlabel(str(xlabel) or x, fontsize="medium")
    figure.supylabel(ylabel or y, fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    if same_lines and len(labels) > 1:
        figure.legend(handles, labels, fontsize="small", loc="outside center right", frameon=False)
    save_figure(figure, path)


def _set_scales(axis: Any, values: Sequence[float], log: bool, log_y: bool) -> None:
    """Set log scales where asked for, with x ticks at the values if there are at most ten."""
    if log and values:
        axis.set_xscale("log")
        if len(values) <= 10:
            axis.set_xticks(values, [f"{value:g}" for value in values], fontsize="small")
            axis.minorticks_off()
    if log_y and values:
        axis.set_yscale("log")
