"""Plots of studies: small panels with the same axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def curves(
    panels: Mapping[str, Mapping[str, Sequence[Row]]],
    x: str,
    y: str,
    path: Path,
    *,
    xlabel: str | Mapping[str, str] = "",
    ylabel: str = "",
    log: bool = False,
    log_y: bool = False,
) -> None:
    """One panel per entry, one line per label; a row without x (None) is a dashed level, a spread is an error bar.

    Axes are named in words: `xlabel` for all panels, or one by title of the panel. The legend stands outside the data:
    to the right where all panels have the same lines, else below each panel.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(1 + 3.6 * len(panels), 3.4), sharey=True, squeeze=False)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for number, (label, rows) in enumerate(lines.items()):
            _line(axis, label, rows, x, y, f"C{number}")
        axis.set_title(title)
        axis.set_xlabel((xlabel if isinstance(xlabel, str) else xlabel[title]) or x)
        axis.grid(alpha=0.3)
        places = sorted({row[x] for rows in lines.values() for row in rows if row[x] is not None})
        if log and places:
            axis.set_xscale("log")
            _ticks(axis, places)
        if log_y and any(lines.values()):
            axis.set_yscale("log")
    axes[0][0].set_ylabel(ylabel or y)
    figure.tight_layout()
    if len({tuple(lines) for lines in panels.values()}) == 1:
        axes[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    else:
        for axis in axes[0]:
            axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    keep(figure, path)
    plt.close(figure)


def keep(figure: Any, path: Path) -> list[Path]:
    """The figure as asked for, a picture of dots at 200 to the inch; beside it, unless it is one, as SVG for print."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    vector = path.with_suffix(".svg")
    figure.savefig(path, dpi=200, bbox_inches="tight")
    if path.suffix.lower() not in (".svg", ".pdf", ".eps", ".ps"):
        with matplotlib.rc_context({"svg.hashsalt": "sordino"}):  # the same figure is the same file
            figure.savefig(vector, bbox_inches="tight", metadata={"Date": None})
        return [path, vector]
    return [path]


def _ticks(axis: Any, values: Sequence[float]) -> None:
    """Marks where the points are, if they are few."""
    if len(values) <= 10:
        axis.set_xticks(values, [f"{value:g}" for value in values], fontsize="small")
        axis.minorticks_off()


def _line(axis: Any, label: str, rows: Sequence[Row], x: str, y: str, color: str) -> None:
    placed = [row for row in rows if row[x] is not None]
    bars = [row.get("spread") or 0.0 for row in placed]
    axis.errorbar(
        [r[x] for r in placed], [r[y] for r in placed], bars, marker="o", ms=3, capsize=2, label=label, color=color
    )
    for row in rows:
        if row[x] is None:
            axis.axhline(row[y], color=color, ls="--", lw=1)
