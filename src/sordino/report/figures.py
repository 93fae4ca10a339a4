"""Plots of studies: small panels with the same axes, as dots and as vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Panels = Mapping[str, Mapping[str, Sequence[Row]]]
WIDE, ABREAST = 4, 3  # up to four panels stand in one line; more stand in lines of three


def curves(
    panels: Panels,
    x: str,
    y: str,
    path: Path,
    *,
    xlabel: str | Mapping[str, str] = "",
    ylabel: str = "",
    log: bool = False,
    log_y: bool = False,
    own_y: bool = False,
) -> None:
    """One panel per entry, one line per label; a row without x (None) is a dashed level, a spread is an error bar.

    Axes are named in words: `xlabel` for all panels, or one by title of the panel. The legend stands outside the data:
    to the right where all panels have the same lines, else below each panel. Panels share the axis of y unless `own_y`.
    """
    figure, axes = _grid(len(panels), not own_y)
    alike = isinstance(xlabel, str) and _same_lines(panels)  # then one name serves all panels
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for number, (label, rows) in enumerate(lines.items()):
            _line(axis, label, rows, x, y, f"C{number}")
        axis.set_title(title, fontsize="medium")
        if not alike:
            axis.set_xlabel((xlabel if isinstance(xlabel, str) else xlabel[title]) or x)
        axis.grid(alpha=0.3)
        _scales(axis, [row[x] for rows in lines.values() for row in rows if row[x] is not None], log, log_y)
    if alike:
        figure.supxlabel(str(xlabel) or x, fontsize="medium")
    figure.supylabel(ylabel or y, fontsize="medium")
    _legends(figure, axes, panels)
    keep(figure, path)
    _close(figure)


def _close(figure: Any) -> None:
    from matplotlib import pyplot as plt

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


def _grid(count: int, share: bool) -> tuple[Any, list[Any]]:
    """A figure with `count` panels; places left over are taken away."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    abreast = count if count <= WIDE else ABREAST
    lines = -(-count // abreast)
    size = (1 + 3.4 * abreast, 3.6 * lines)
    figure, axes = plt.subplots(lines, abreast, figsize=size, sharey=share, squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.remove()
    return figure, list(axes.flat[:count])


def _scales(axis: Any, places: Sequence[float], log: bool, log_y: bool) -> None:
    if log and places:
        axis.set_xscale("log")
        _ticks(axis, sorted(set(places)))
    if log_y and places:
        axis.set_yscale("log")


def _ticks(axis: Any, values: Sequence[float]) -> None:
    """Marks where the points are, if they are few."""
    if len(values) <= 10:
        axis.set_xticks(values, [f"{value:g}" for value in values], fontsize="small")
        axis.minorticks_off()


def _same_lines(panels: Panels) -> bool:
    return len({tuple(lines) for lines in panels.values()}) == 1


def _legends(figure: Any, axes: Sequence[Any], panels: Panels) -> None:
    """One legend to the right of all panels where their lines are the same, else one below each."""
    if _same_lines(panels):
        if len(next(iter(panels.values()))) > 1:
            handles, labels = axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, fontsize="small", loc="outside center right", frameon=False)
        return
    for axis in axes:
        columns = 2 if len(axis.get_legend_handles_labels()[1]) > 3 else 1
        axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, ncols=columns)


def _line(axis: Any, label: str, rows: Sequence[Row], x: str, y: str, color: str) -> None:
    placed = [row for row in rows if row[x] is not None]
    bars = [row.get("spread") or 0.0 for row in placed]
    axis.errorbar(
        [r[x] for r in placed], [r[y] for r in placed], bars, marker="o", ms=3, capsize=2, label=label, color=color
    )
    for row in rows:
        if row[x] is None:
            axis.axhline(row[y], color=color, ls="--", lw=1)
