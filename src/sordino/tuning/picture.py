"""The picture of a sweep: curves with 95% bands, and the metric against every numeric key, or of every setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sordino.report.aggregate import Row, label, ordered, varying
from sordino.report.charts import axis_of
from sordino.report.figures import SERIES_MOST, Axis, Chart, Series, chart_figure, keep


def draw(rows: Sequence[Row], metric: str, chosen_by: str, path: Path) -> None:
    """`path`.png and `path`.svg."""
    keys, finite = varying(rows), [row for row in ordered(rows, metric) if row.finite]
    numeric = len(keys) <= 2 and all(isinstance(row.settings.get(key), int | float) for key in keys for row in rows)
    charts = [_curves(finite[:SERIES_MOST], keys, metric, chosen_by)]
    charts += [_against(finite, key, keys, metric) for key in keys] if numeric else [_ranks(finite, keys, metric)]
    keep(chart_figure(*charts), path.with_suffix(".png"))


def _curves(rows: Sequence[Row], keys: Sequence[str], metric: str, chosen_by: str) -> Chart:
    """The metric by round: mean and band over seeds, of the best settings."""
    found: list[Series] = []
    for tone, row in enumerate(rows):
        band = row.band()
        rounds, means = tuple(float(t) for t, _ in band), tuple(one.mean for _, one in band)
        widths = [one.half_width or 0.0 for _, one in band]
        low, high = (tuple(m + sign * w for m, w in zip(means, widths, strict=True)) for sign in (-1, 1))
        found += [Series("", rounds, low, tone, "band", high), Series(label(row, keys), rounds, means, tone)]
    says = f"{metric} on {chosen_by}; bands are 95% intervals over seeds"
    return Chart("curves", metric, says, Axis("round", whole=True), axis_of(metric), tuple(found))


def _against(rows: Sequence[Row], key: str, keys: Sequence[str], metric: str) -> Chart:
    """The metric against one key, with intervals; a line for every value of the other key."""
    others, lines = [other for other in keys if other != key], dict[str, list[Row]]()
    for row in sorted(rows, key=lambda row: float(row.settings[key])):
        lines.setdefault(label(row, others) if others else "", []).append(row)
    series = [
        _dots(name, line, [float(row.settings[key]) for row in line], k) for k, (name, line) in enumerate(lines.items())
    ]
    values = [float(row.settings[key]) for row in rows]
    log = min(values) > 0 and max(values) >= 8 * min(values)
    return Chart(f"by-{key}", key, f"{metric} by {key}", Axis(key, log=log), axis_of(metric), tuple(series))


def _ranks(rows: Sequence[Row], keys: Sequence[str], metric: str) -> Chart:
    """The metric of every setting with its interval, the best first; colours are those of the curves."""
    series = [_dots(label(row, keys), [row], [place + 1.0], place) for place, row in enumerate(rows)]
    x = Axis("rank of the setting", whole=True, low=0.5, high=len(rows) + 0.5)
    return Chart("ranks", metric, f"{metric} of every setting", x, axis_of(metric), tuple(series))


def _dots(name: str, rows: Sequence[Row], at: Sequence[float], tone: int) -> Series:
    """Means with error bars."""
    found = [row.estimate for row in rows if row.estimate is not None]
    low, high = (tuple(one.mean + sign * (one.half_width or 0.0) for one in found) for sign in (-1, 1))
    return Series(name, tuple(at), low, tone, "dots", high)
