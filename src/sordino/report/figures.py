"""Drawing with matplotlib: charts as SVG for the report's page, and figures as image files.

Called by report/page.py, `compare --plot`, `sweep`, `tune`, `Result.plot` and benchmarks/papers. In the SVG of a page
text is not converted to paths, and every colour is a CSS variable of the page's two themes.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from sordino.accounting.rounding import atleast, upto

# Page colours in both themes. The seven series colours are as readable as text on a card, and any two are at least 25
# apart in CIELAB for normal, protanopic, deuteranopic and tritanopic vision (Machado et al. 2009).
SERIES = ("s0", "s1", "s2", "s3", "s4", "s5", "s6")
THEMES = {  # light, dark
    "ground": ("#f6f5f1", "#121417"), "card": ("#ffffff", "#1b1e23"), "ink": ("#1b1d21", "#eceae4"),
    "quiet": ("#565a61", "#aeb2b9"), "rule": ("#d8d6cf", "#3a3f47"), "link": ("#00549b", "#7cc0f5"),
    "warn": ("#7a2e00", "#ffc49b"), "warn-ground": ("#fdeee3", "#3b2213"), "bad": ("#9b0016", "#ffb0b5"),
    "bad-ground": ("#fde4e6", "#4a141a"), "good": ("#0b5c3d", "#8fdcb6"), "good-ground": ("#e6f3ec", "#12301f"),
    "s0": ("#005a9e", "#6fb9f2"), "s1": ("#ce2f65", "#fe5a14"), "s2": ("#966b00", "#ffff3f"),
    "s3": ("#8f42f8", "#b56cff"), "s4": ("#671400", "#da748a"), "s5": ("#000045", "#c9fafa"),
    "s6": ("#2c0017", "#00ff6d"),
}  # fmt: skip
LIGHT, DARK = ({name: pair[dark] for name, pair in THEMES.items()} for dark in (0, 1))

WIDTH, HEIGHT = 380.0, 230.0  # of a chart on the page, without its legend, in points
LEGEND_ROW, BAR_ROW = 16.0, 40.0
MAX_LEGEND = 26  # characters of a name in a legend
DASHES: tuple[Any, ...] = ("-", (0, (7, 3)), (0, (2, 2)), (0, (9, 3, 2, 3)), (0, (5, 2)), (0, (1, 1.5)), (0, (12, 3)))
MARKS = "os^DvPX"  # marker shapes; with the dashes, series differ without colour
MAX_SERIES = len(SERIES)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Axis:
    """Axis of a chart, from `low` to `high` or over the range of the data; never beyond [`least`, `most`]."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    whole: bool = False  # ticks at integers only
    bound: Literal["none", "upper", "lower"] = "none"  # numbers are upper or lower bounds and rounded to the safe side
    least: float | None = None  # smallest and largest possible value of the quantity
    most: float | None = None

    def number(self, value: float, digits: int = 4) -> str:
        """Return a value of this axis as text; a bound is rounded to its safe side."""
        side = {"upper": upto, "lower": atleast}.get(self.bound)
        return f"{value:.{digits}g}" if side is None else side(value, digits)

    def limits(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the lowest and highest number of the axis of a chart with these values."""
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not self.log)] or [1.0]
        low = min(finite) if self.low is None else self.low
        high = max(finite) if self.high is None else self.high
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
    """Line, band or set of dots in a chart; a band, and the error bars of dots, reach from `ys` to `tops`."""

    name: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    tone: int = 0  # number of its colour, dash and marker
    kind: Literal["line", "dots", "band"] = "line"
    tops: tuple[float, ...] = ()
    quiet: bool = False  # a reference line, not data

    @property
    def middles(self) -> list[float]:
        return [(low + high) / 2 for low, high in zip(self.ys, self.tops or self.ys, strict=True)]


@dataclass(frozen=True)
class Chart:
    """Chart with axes: its title, a sentence on its meaning (`says`), and its series."""

    key: str
    title: str
    says: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Bars:
    """Bar chart: rows of (name, length, text at the bar's end), and optional marks on the same scale."""

    key: str
    title: str
    says: str
    axis: str
    rows: tuple[tuple[str, float, str], ...]
    marks: tuple[float, ...] = ()


# ---- on axes of matplotlib
def plot_chart(axes: Any, chart: Chart) -> None:
    """Draw a chart on matplotlib axes, in the light theme, with the legend above."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    xs = [x for one in chart.series for x in one.xs]
    ys = [y for one in chart.series for y in (*one.ys, *one.tops)]
    for axis, scale, values, name in ((chart.x, axes.xaxis, xs, "x"), (chart.y, axes.yaxis, ys, "y")):
        axes.set(**{f"{name}scale": "log" if axis.log else "linear", f"{name}lim": axis.limits(values)})
        linear = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=axis.whole)
        scale.set_major_locator(LogLocator(numticks=6) if axis.log else linear)
        scale.set_minor_locator(NullLocator())
        scale.set_major_formatter(FuncFormatter(lambda value, _: tick_label(value)))
        scale.set_label_text(axis.label, color=LIGHT["ink"])
    axes.grid(axis="y", color=LIGHT["rule"], lw=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    axes.tick_params(colors=LIGHT["quiet"], length=3)
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", color=LIGHT["rule"])
    handles, names = [], []
    for one in chart.series:
        handle = _plot_series(axes, one)
        if one.name and one.kind != "band":
            name = one.name if len(one.name) <= MAX_LEGEND else f"{one.name[: MAX_LEGEND - 1]}…"
            handles.append(handle)  # matplotlib omits names that begin with an underscore
            names.append(f"\u200b{name}" if name.startswith("_") else name)
    if names:
        axes.legend(
            handles, names, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, frameon=False, borderaxespad=0.2,
            handlelength=2.6, columnspacing=1.2, labelcolor=LIGHT["ink"],
        )  # fmt: skip


def _plot_series(axes: Any, one: Series) -> Any:
    colour = LIGHT["quiet"] if one.quiet else LIGHT[SERIES[one.tone % MAX_SERIES]]
    if one.kind == "band":
        return axes.fill_between(one.xs, one.ys, one.tops, color=colour, alpha=0.18, linewidth=0)
    if one.kind == "dots":
        wide = [(high - low) / 2 for low, high in zip(one.ys, one.tops, strict=True)] if one.tops else None
        mark = MARKS[one.tone % len(MARKS)]
        return axes.errorbar(one.xs, one.middles, wide, fmt=mark, color=colour, ms=6, capsize=3, lw=1.5)
    dash = (0, (3, 3)) if one.quiet else DASHES[one.tone % len(DASHES)]
    (line,) = axes.plot(one.xs, one.ys, color=colour, ls=dash, lw=1.2 if one.quiet else 1.9)
    return line


def tick_label(value: float) -> str:
    """Return the text of a tick on an axis; numbers below 0.001 are powers of ten with superscripts."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        exponent = math.floor(math.log10(abs(value)) + 1e-9)
        factor, power = value / 10.0**exponent, "10" + str(exponent).translate(_SUPERSCRIPTS)
        return power if abs(factor - 1) < 1e-9 else f"{factor:.3g}·{power}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# ---- as SVG on a page
def draw(chart: Chart | Bars) -> Markup:
    """Draw a chart as one <svg> element, with title and description for screen readers, and numbers as tooltips."""
    from matplotlib.figure import Figure

    names = 0 if isinstance(chart, Bars) else sum(one.kind != "band" and bool(one.name) for one in chart.series)
    top = LEGEND_ROW * -(-names // 2)
    height = 26 + BAR_ROW * len(chart.rows) if isinstance(chart, Bars) else HEIGHT + top
    with _settings(chart.key):
        figure, points = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, facecolor="none"), Markup("")
        if isinstance(chart, Bars):
            _plot_bars(figure.add_axes((0.01, 0, 0.98, 1)), chart, height)
        else:
            axes = figure.add_axes((58 / WIDTH, 44 / height, (WIDTH - 70) / WIDTH, (height - 54 - top) / height))
            plot_chart(axes, chart)
            points = _points(axes, chart, height)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=_NO_METADATA)
    return Markup(
        '<svg viewBox="0 0 {w:g} {h:g}" role="img" {focus}class="chart" aria-labelledby="{k}-t {k}-d">'
        '<title id="{k}-t">{title}</title><desc id="{k}-d">{says}</desc>{body}{points}</svg>'
    ).format(
        w=WIDTH, h=height, k=chart.key, title=chart.title, says=chart.says, points=points,
        focus=Markup('tabindex="0" ') if points else "", body=_with_css_colours(svg.getvalue()),
    )  # fmt: skip


@contextmanager
def _settings(key: str) -> Iterator[None]:
    """Set matplotlib to write text as text, to treat `$` as a plain character, and to write the same SVG each time."""
    import matplotlib

    asked: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": key, "text.parse_math": False, "font.size": 11}
    with matplotlib.rc_context(asked), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that only the reader's fonts have
        yield


def _with_css_colours(svg: str) -> Markup:
    """Return the content of matplotlib's <svg> with CSS variables as colours, and only the ids that are used."""
    inner = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    inner = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", inner, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', inner))
    inner = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", inner)
    for name in ("ink", "quiet", "rule", "card", *SERIES):
        inner = inner.replace(LIGHT[name], f"var(--{name})")
    return Markup(re.sub(r"\n\s*", "\n", inner))


def _points(axes: Any, chart: Chart, height: float) -> Markup:
    """Return an invisible circle for every data point, with the numbers that the page's script shows."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    circle = Markup('<circle class="spot {}" cx="{:.1f}" cy="{:.1f}" r="4" data-tip="{}"/>')
    found = []
    for one in (one for one in chart.series if not one.quiet and one.kind != "band"):
        for x, y in zip(one.xs, one.middles, strict=True):
            if left <= x <= right and bottom <= y <= top:
                across, up = axes.transData.transform((x, y))
                tip = f"{one.name or chart.y.label}: {chart.y.number(y)} at {chart.x.label} {chart.x.number(x)}"
                found.append(circle.format(SERIES[one.tone % MAX_SERIES], across, height - up, tip))
    return Markup("").join(found)


def _plot_bars(axes: Any, bars: Bars, height: float) -> None:
    longest = max([*(value for _, value, _ in bars.rows), *bars.marks, 1e-300])
    room = WIDTH - 20 - 6.4 * max(len(text) for _, _, text in bars.rows)
    axes.set(xlim=(0, longest * WIDTH / room), ylim=(height, 0))
    axes.axis("off")
    axes.text(0, 14, bars.axis, color=LIGHT["ink"])
    for place, (name, value, text) in enumerate(bars.rows):
        y, end = 26 + BAR_ROW * place, value
        axes.text(0, y + 14, name, color=LIGHT["quiet"])
        axes.barh(y + 26, max(value, longest / 300), height=10, color=LIGHT["s0"])
        if bars.marks:
            end = max(value, bars.marks[place])
            axes.plot([bars.marks[place]] * 2, [y + 18, y + 34], color=LIGHT["s1"], lw=3)
        axes.text(end + 0.02 * longest, y + 30, text, color=LIGHT["s0"], weight="bold")


# ---- as files
def panel_axes(count: int, abreast: int, width: float, height: float, **subplots: Any) -> tuple[Any, list[Any]]:
    """Return a matplotlib figure with `count` axes, `abreast` in a line; width and height of a line are in inches."""
    from matplotlib.figure import Figure

    lines = -(-count // abreast)
    figure = Figure(figsize=(width, height * lines), layout="constrained")
    axes = figure.subplots(lines, abreast, squeeze=False, **subplots)
    for place in axes.flat[count:]:
        place.remove()
    return figure, list(axes.flat[:count])


def chart_figure(*charts: Chart) -> Any:
    """Return a matplotlib figure with the charts side by side, three in a line."""
    with _settings("sordino"):
        abreast = min(3, len(charts))
        figure, axes = panel_axes(len(charts), abreast, 4.6 * abreast, 3.4)
        for place, chart in zip(axes, charts, strict=True):
            plot_chart(place, chart)
    return figure


def save_figure(figure: Any, path: Path) -> list[Path]:
    """Write a matplotlib figure to `path`, and beside a raster image also as SVG; return the files."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200, bbox_inches="tight")
    if path.suffix.lower() in (".svg", ".pdf", ".eps", ".ps"):
        return [path]
    with matplotlib.rc_context({"svg.hashsalt": "sordino"}):  # the same figure is the same file
        figure.savefig(path.with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
    return [path, path.with_suffix(".svg")]
