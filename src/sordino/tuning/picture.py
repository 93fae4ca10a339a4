"""A sweep as a picture: the figure against every key, one panel each, as SVG and as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sordino.tuning.spec import shown_value
from sordino.tuning.table import Row, best_of

MANY = 8  # lines of a panel


def draw(rows: Sequence[Row], metric: str, chosen_by: str, path: Path) -> None:
    """`path`.svg and `path`.png; of two keys each is drawn once per value of the other, if these are few."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    keys = [key for key in rows[0].changes if len({shown_value(row.changes[key]) for row in rows}) > 1] or ["cell"]
    figure, axes = plt.subplots(1, len(keys), figsize=(1.5 + 3.8 * len(keys), 3.6), sharey=True, squeeze=False)
    for axis, key in zip(axes[0], keys, strict=True):
        _panel(axis, rows, key, keys, metric)
    axes[0][0].set_ylabel(f"{metric}, rows that choose")
    bars = "; bars: 95% intervals over seeds" if len(rows[0].seeds) > 1 else ""
    figure.suptitle(f"chosen by {chosen_by}{bars}", fontsize="x-small", y=0.02, color="0.35")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    for ending in (".svg", ".png"):
        figure.savefig(path.with_suffix(ending), dpi=200, bbox_inches="tight")
    plt.close(figure)


def _panel(axis: Any, rows: Sequence[Row], key: str, keys: Sequence[str], metric: str) -> None:
    finite, best = [row for row in rows if row.finite], best_of(rows, metric)
    places = _places(rows, key)
    for label, line in _lines(finite, key, keys).items():
        line.sort(key=lambda row: places[_name(row, key)])
        found = [row.estimate for row in line]
        bars = [(one.spread or 0.0) if one else 0.0 for one in found]
        at = [places[_name(row, key)] for row in line]
        style = "-" if len(set(at)) == len(at) else ""
        axis.errorbar(
            at, [one.mean if one else 0.0 for one in found], bars, marker="o", ms=3, capsize=2, ls=style, label=label
        )
    top = best.estimate
    axis.plot([places[_name(best, key)]], [top.mean if top else 0.0], "*", ms=12, mfc="none", mec="black", label="best")
    axis.set_xlabel(key)
    axis.grid(alpha=0.3)
    _scale(axis, places)
    axis.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=2, frameon=False)


def _lines(rows: Sequence[Row], key: str, keys: Sequence[str]) -> dict[str, list[Row]]:
    """The rows by the value of the other key, where there are two and few values; else all as one."""
    others = [other for other in keys if other != key]
    values = list(dict.fromkeys(shown_value(row.changes[others[0]]) for row in rows)) if len(others) == 1 else []
    if not 1 < len(values) <= MANY:
        return {"settings": list(rows)}
    return {
        f"{others[0]} {value}": [row for row in rows if shown_value(row.changes[others[0]]) == value]
        for value in values
    }


def _name(row: Row, key: str) -> str:
    return str(row.number) if key == "cell" else shown_value(row.changes[key])


def _places(rows: Sequence[Row], key: str) -> dict[str, float]:
    """Where every value stands: a number where it is, anything else in its turn."""
    values = {_name(row, key): row.changes.get(key, row.number) for row in rows}
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())
    return {name: float(value) if numbers else float(k) for k, (name, value) in enumerate(values.items())}


def _scale(axis: Any, places: dict[str, float]) -> None:
    at = sorted(places.values())
    numbers = all(_is(name, place) for name, place in places.items())
    if numbers and at[0] > 0 and at[-1] >= 8 * at[0]:
        axis.set_xscale("log")
    if len(at) <= 10:
        axis.set_xticks(list(places.values()), list(places), fontsize="small")
        axis.minorticks_off()


def _is(name: str, place: float) -> bool:
    try:
        return abs(float(name) - place) <= 1e-5 * abs(place)
    except ValueError:
        return False
