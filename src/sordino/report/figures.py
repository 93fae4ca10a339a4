"""All drawing, by matplotlib: charts and bars as SVG for the report's page, and the same or panels as picture files.

Called by the page, `sordino compare --plot`, `Result.plot`, `sordino tune` and the papers' figures. In the SVG of a
page text is text, and every colour is a variable of the page's two themes.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from sordino.accounting.rounding import atleast, upto

# Colours of a page in both themes. The seven of series were searched for: as readable as text on a card, and any two at
# least 25 apart in CIELAB as normal, protanopic, deuteranopic and tritanopic eyes see them (Machado et al. 2009).
SERIES = ("s0", "s1", "s2", "s3", "s4", "s5", "s6")
THEMES = {  # light, dark
    "ground": ("#f6f5f1", "#121417"),
    "card": ("#ffffff", "#1b1e23"),
    "ink": ("#1b1d21", "#eceae4"),
    "quiet": ("#565a61", "#aeb2b9"),
    "rule": ("#d8d6cf", "#3a3f47"),
    "link": ("#00549b", "#7cc0f5"),
    "warn": ("#7a2e00", "#ffc49b"),
    "warn-ground": ("#fdeee3", "#3b2213"),
    "bad": ("#9b0016", "#ffb0b5"),
    "bad-ground": ("#fde4e6", "#4a141a"),
    "good": ("#0b5c3d", "#8fdcb6"),
    "good-ground": ("#e6f3ec", "#12301f"),
    "s0": ("#005a9e", "#6fb9f2"),
    "s1": ("#ce2f65", "#fe5a14"),
    "s2": ("#966b00", "#ffff3f"),
    "s3": ("#8f42f8", "#b56cff"),
    "s4": ("#671400", "#da748a"),
    "s5": ("#000045", "#c9fafa"),
    "s6": ("#2c0017", "#00ff6d"),
}
LIGHT, DARK = ({name: pair[dark] for name, pair in THEMES.items()} for dark in (0, 1))
PAIRS = (
    *((text, ground) for text in ("ink", "quiet", "link") for ground in ("ground", "card")),
    ("warn", "warn-ground"),
    ("bad", "bad-ground"),
    ("good", "good-ground"),
    *((series, "card") for series in SERIES),
    ("card", "link"),
)

WIDTH, HEIGHT = 380.0, 230.0  # of a chart on the page, without its legend
LEGEND_ROW, BAR_ROW = 16.0, 40.0
LONGEST = 26  # letters of a name in a legend
DASHES: tuple[Any, ...] = ("-", (0, (7, 3)), (0, (2, 2)), (0, (9, 3, 2, 3)), (0, (5, 2)), (0, (1, 1.5)), (0, (12, 3)))
MARKS = "os^DvPX"  # shapes of dots: with the dashes, lines differ without colour
SERIES_MOST = len(SERIES)  # lines that can be told apart in one figure
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_PLAIN = {"Date": None, "Creator": None, "Format": None, "Type": None}
Kind = Literal["line", "dots", "band"]
Side = Literal["none", "upper", "lower"]
Row = dict[str, Any]
Panels = Mapping[str, Mapping[str, Sequence[Row]]]


@dataclass(frozen=True)
class Axis:
    """An axis, named in words; from `low` to `high` where they are given, else as far as the data goes.

    `least` and `most` are what a value along it can be: no axis goes beyond them.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    whole: bool = False  # only whole numbers are marked
    bound: Side = "none"  # numbers along it bound something: rounded to the safe side
    least: float | None = None
    most: float | None = None

    def number(self, value: float, digits: int = 4) -> str:
        """One number along it, as text."""
        side = {"upper": upto, "lower": atleast}.get(self.bound)
        return f"{value:.{digits}g}" if side is None else side(value, digits)

    def limits(self, values: Sequence[float]) -> tuple[float, float]:
        """Where the axis begins and ends for these values."""
        known = [v for v in values if math.isfinite(v) and (v > 0 or not self.log)] or [1.0]
        low = min(known) if self.low is None else self.low
        high = max(known) if self.high is None else self.high
        if self.log:
            return (low, high) if high > low * 1.01 else (low / 10, high * 10)
        if high - low < 1e-12 * max(abs(high), 1e-300):
            low, high = low - 0.5, high + 0.5
        else:
            pad = 0.04 * (high - low)
            low, high = low - pad * (self.low is None), high + pad * (self.high is None)
        low = low if self.least is None else max(low, self.least)
        return low, high if self.most is None else min(high, self.most)


@dataclass(frozen=True)
class Series:
    """Points of one thing; a band or the error bars of dots go from `ys` to `tops`; quiet: no data, a guide."""

    name: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    tone: int = 0  # its colour, dash and mark
    kind: Kind = "line"
    tops: tuple[float, ...] = ()
    quiet: bool = False

    @property
    def points(self) -> list[tuple[float, float]]:
        return list(zip(self.xs, self.ys, strict=True))


@dataclass(frozen=True)
class Chart:
    """A figure with axes: what it shows (title), what to read off it (says), and the data."""

    key: str
    title: str
    says: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Bars:
    """Lengths beside names, each with what it says; `marks` are other numbers on the same scale (a bound above)."""

    key: str
    title: str
    says: str
    axis: str
    rows: tuple[tuple[str, float, str], ...]  # name, length, and what is written at its end
    marks: tuple[float, ...] = ()


# ---- colours ---------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb: 0.2126 R + 0.7152 G + 0.0722 B of linear light."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """(L1 + 0.05) / (L2 + 0.05), from 1 (the same) to 21 (black on white): WCAG 2.2, success criterion 1.4.3."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def variables(theme: dict[str, str]) -> str:
    """A theme as CSS."""
    return " ".join(f"--{name}: {value};" for name, value in theme.items())


# ---- on axes of matplotlib ------------------------------------------------------------------------------------------


def plot_chart(axes: Any, chart: Chart) -> None:
    """The chart on axes of matplotlib, in the light theme, with its legend above."""
    x = chart.x.limits([x for one in chart.series for x in one.xs])
    y = chart.y.limits([y for one in chart.series for y in (*one.ys, *one.tops)])
    for axis, scale, (low, high), name in ((chart.x, axes.xaxis, x, "x"), (chart.y, axes.yaxis, y, "y")):
        axes.set(**{f"{name}scale": "log" if axis.log else "linear", f"{name}lim": (low, high)})
        _ticks(scale, axis)
    axes.set_xlabel(chart.x.label, color=LIGHT["ink"])
    axes.set_ylabel(chart.y.label, color=LIGHT["ink"])
    axes.grid(axis="y", color=LIGHT["rule"], lw=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    axes.tick_params(colors=LIGHT["quiet"], length=3)
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", color=LIGHT["rule"])
    shown = [(one, _plot_series(axes, one)) for one in chart.series]
    named = [(handle, _shortened(one.name)) for one, handle in shown if one.name and one.kind != "band"]
    if named:
        axes.legend(
            [handle for handle, _ in named], [name for _, name in named], loc="lower left", bbox_to_anchor=(-0.02, 1.0),
            ncols=2, frameon=False, borderaxespad=0.2, handlelength=2.6, columnspacing=1.2, labelcolor=LIGHT["ink"],
        )  # fmt: skip


def _plot_series(axes: Any, one: Series) -> Any:
    colour = LIGHT["quiet"] if one.quiet else LIGHT[SERIES[one.tone % SERIES_MOST]]
    if one.kind == "band":
        return axes.fill_between(one.xs, one.ys, one.tops, color=colour, alpha=0.18, linewidth=0)
    if one.kind == "dots":
        middle = [(low + high) / 2 for low, high in zip(one.ys, one.tops or one.ys, strict=True)]
        wide = [(high - low) / 2 for low, high in zip(one.ys, one.tops, strict=True)] if one.tops else None
        mark = MARKS[one.tone % len(MARKS)]
        return axes.errorbar(one.xs, middle, wide, fmt=mark, color=colour, ms=6, capsize=3, lw=1.5)
    dash = (0, (3, 3)) if one.quiet else DASHES[one.tone % len(DASHES)]
    (line,) = axes.plot(one.xs, one.ys, color=colour, ls=dash, lw=1.2 if one.quiet else 1.9)
    return line


def _ticks(scale: Any, axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    linear = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=axis.whole)
    scale.set_major_locator(LogLocator(numticks=6) if axis.log else linear)
    scale.set_minor_locator(NullLocator())
    scale.set_major_formatter(FuncFormatter(lambda value, _: tick_label(value)))


def tick_label(value: float) -> str:
    """A number on an axis, as plain text."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        whole = math.floor(math.log10(abs(value)) + 1e-9)
        times, raised = value / 10.0**whole, "10" + str(whole).translate(_RAISED)
        return raised if abs(times - 1) < 1e-9 else f"{times:.3g}·{raised}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _shortened(name: str) -> str:
    """A name that fits into a legend; matplotlib leaves out what begins with an underscore."""
    name = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    return f"\u200b{name}" if name.startswith("_") else name


# ---- as SVG on a page -----------------------------------------------------------------------------------------------


def draw(chart: Chart | Bars) -> Markup:
    """One <svg> with a title and a description for those who do not see it; points say their numbers (`data-tip`)."""
    from matplotlib.figure import Figure

    named = 0 if isinstance(chart, Bars) else sum(one.kind != "band" and bool(one.name) for one in chart.series)
    height = 26 + BAR_ROW * len(chart.rows) if isinstance(chart, Bars) else HEIGHT + LEGEND_ROW * -(-named // 2)
    with _settings(chart.key):
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, facecolor="none")
        if isinstance(chart, Bars):
            _plot_bars(figure.add_axes((0.01, 0, 0.98, 1)), chart, height)
            points = Markup("")
        else:
            top = LEGEND_ROW * -(-named // 2) + 10
            axes = figure.add_axes((58 / WIDTH, 44 / height, (WIDTH - 70) / WIDTH, (height - 44 - top) / height))
            plot_chart(axes, chart)
            points = _points(axes, chart, height)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata=_PLAIN)
    return Markup(
        '<svg viewBox="0 0 {w:g} {h:g}" role="img" {focus}class="chart" aria-labelledby="{k}-t {k}-d">'
        '<title id="{k}-t">{title}</title><desc id="{k}-d">{says}</desc>{body}{points}</svg>'
    ).format(
        w=WIDTH, h=height, k=chart.key, title=chart.title, says=chart.says, points=points,
        focus=Markup('tabindex="0" ') if points else "", body=_themed(written.getvalue()),
    )  # fmt: skip


@contextmanager
def _settings(key: str) -> Iterator[None]:
    """Text stays text, `$` is no mathematics, the same figure is the same SVG; the reader's fonts have all letters."""
    import matplotlib

    asked: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": key, "text.parse_math": False, "font.size": 11}
    with matplotlib.rc_context(asked), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _themed(written: str) -> Markup:
    """The inside of matplotlib's SVG: colours as variables of the page, no names but those that are referred to."""
    inner = written[written.index(">", written.index("<svg")) + 1 : written.rindex("</svg>")]
    inner = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", inner, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', inner))
    inner = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", inner)
    for name in ("ink", "quiet", "rule", "card", *SERIES):
        inner = inner.replace(LIGHT[name], f"var(--{name})")
    return Markup(re.sub(r"\n\s*", "\n", inner))


def _points(axes: Any, chart: Chart, height: float) -> Markup:
    """A circle for every point, with its numbers; it shows under the pointer or the arrow keys only."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    whole = '<circle class="spot {}" cx="{:.1f}" cy="{:.1f}" r="4" data-tip="{}"/>'
    found = []
    for one in (one for one in chart.series if not one.quiet and one.kind != "band"):
        middles = [(low + high) / 2 for low, high in zip(one.ys, one.tops or one.ys, strict=True)]
        for x, y in zip(one.xs, middles, strict=True):
            if left <= x <= right and bottom <= y <= top:
                across, up = axes.transData.transform((x, y))
                tip = f"{one.name or chart.y.label}: {chart.y.number(y)} at {chart.x.label} {chart.x.number(x)}"
                found.append(Markup(whole).format(SERIES[one.tone % SERIES_MOST], across, height - up, tip))
    return Markup("").join(found)


def _plot_bars(axes: Any, bars: Bars, height: float) -> None:
    """Bars, each under its name, with its number at the end and a mark where the other number lies."""
    longest = max([*(value for _, value, _ in bars.rows), *bars.marks, 1e-300])
    axes.set(xlim=(0, longest * WIDTH / (WIDTH - 20 - 6.4 * max(len(said) for _, _, said in bars.rows))))
    axes.set(ylim=(height, 0))
    axes.axis("off")
    axes.text(0, 14, bars.axis, color=LIGHT["ink"])
    for place, (name, value, said) in enumerate(bars.rows):
        y = 26 + BAR_ROW * place
        axes.text(0, y + 14, name, color=LIGHT["quiet"])
        axes.barh(y + 26, max(value, longest / 300), height=10, color=LIGHT["s0"])
        end = max(value, bars.marks[place]) if bars.marks else value
        if bars.marks:
            axes.plot([bars.marks[place]] * 2, [y + 18, y + 34], color=LIGHT["s1"], lw=3)
        axes.text(end + 0.02 * longest, y + 30, said, color=LIGHT["s0"], weight="bold")


# ---- as files -------------------------------------------------------------------------------------------------------


def chart_figure(*charts: Chart) -> Any:
    """A figure of matplotlib with the charts side by side, three in a row."""
    from matplotlib.figure import Figure

    with _settings("sordino"):
        abreast = min(3, len(charts))
        lines = -(-len(charts) // abreast)
        figure = Figure(figsize=(4.6 * abreast, 3.4 * lines), layout="constrained")
        axes = figure.subplots(lines, abreast, squeeze=False)
        for place in axes.flat[len(charts) :]:
            place.remove()
        for place, chart in zip(axes.flat, charts, strict=False):
            plot_chart(place, chart)
            place.set_xlabel(chart.x.label)
    return figure


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


def curves(
    panels: Panels, x: str, y: str, path: Path, *, xlabel: str | Mapping[str, str] = "", ylabel: str = "",
    log: bool = False, log_y: bool = False, own_y: bool = False,
) -> None:  # fmt: skip
    """One panel per entry, one line per label; a row without x (None) is a dashed level, a spread is an error bar.

    Axes are named in words: `xlabel` for all panels, or one by title of the panel. The legend stands outside the data:
    to the right where all panels have the same lines, else below each panel. Panels share the axis of y unless `own_y`.
    """
    from matplotlib.figure import Figure

    abreast = len(panels) if len(panels) <= 4 else 3
    lines = -(-len(panels) // abreast)
    figure = Figure(figsize=(1 + 3.4 * abreast, 3.6 * lines), layout="constrained")
    places = figure.subplots(lines, abreast, sharey=not own_y, squeeze=False)
    for place in places.flat[len(panels) :]:
        place.remove()
    axes = list(places.flat[: len(panels)])
    same_lines = len({tuple(lines) for lines in panels.values()}) == 1
    alike = isinstance(xlabel, str) and same_lines  # then one name serves all panels
    for axis, (title, named) in zip(axes, panels.items(), strict=True):
        for number, (label, rows) in enumerate(named.items()):
            _line(axis, label, rows, x, y, f"C{number}")
        axis.set_title(title, fontsize="medium")
        if not alike:
            axis.set_xlabel((xlabel if isinstance(xlabel, str) else xlabel[title]) or x)
        axis.grid(alpha=0.3)
        _scales(axis, [row[x] for rows in named.values() for row in rows if row[x] is not None], log, log_y)
    if alike:
        figure.supxlabel(str(xlabel) or x, fontsize="medium")
    figure.supylabel(ylabel or y, fontsize="medium")
    _legends(figure, axes, same_lines)
    keep(figure, path)


def _scales(axis: Any, places: Sequence[float], log: bool, log_y: bool) -> None:
    """Log scales where asked for, with marks where the points are if they are few."""
    if log and places:
        axis.set_xscale("log")
        values = sorted(set(places))
        if len(values) <= 10:
            axis.set_xticks(values, [f"{value:g}" for value in values], fontsize="small")
            axis.minorticks_off()
    if log_y and places:
        axis.set_yscale("log")


def _legends(figure: Any, axes: Sequence[Any], same_lines: bool) -> None:
    """One legend to the right of all panels where their lines are the same, else one below each."""
    handles, labels = axes[0].get_legend_handles_labels()
    if same_lines and len(labels) > 1:
        figure.legend(handles, labels, fontsize="small", loc="outside center right", frameon=False)
    for axis in () if same_lines else axes:
        columns = 2 if len(axis.get_legend_handles_labels()[1]) > 3 else 1
        axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, ncols=columns)


def _line(axis: Any, label: str, rows: Sequence[Row], x: str, y: str, color: str) -> None:
    placed = [row for row in rows if row[x] is not None]
    bars = [row.get("spread") or 0.0 for row in placed]
    xs, ys = [row[x] for row in placed], [row[y] for row in placed]
    axis.errorbar(xs, ys, bars, marker="o", ms=3, capsize=2, label=label, color=color)
    for row in rows:
        if row[x] is None:
            axis.axhline(row[y], color=color, ls="--", lw=1)
