"""Charts as SVG, drawn here: axes named in words, every line labelled where it ends, nothing that needs the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from sordino.accounting.rounding import atleast, upto

WIDTH, HEIGHT = 380.0, 262.0
TOP, BOTTOM, GAP = 30.0, 46.0, 15.0  # above and below the data; between two labels
LETTER = 6.7  # the width of a letter of 12 px, near enough
LONGEST = 20  # letters of a label
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2", "1 2")  # so that lines differ without colour
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SERIES_MOST = len(DASHES)  # lines that can be told apart in one figure
Kind = Literal["line", "dots", "band"]
Side = Literal["none", "upper", "lower"]


@dataclass(frozen=True)
class Axis:
    """Named in words; from `low` to `high` where they are given, else as far as the data goes.

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
        """One number along it, in words."""
        side = {"upper": upto, "lower": atleast}.get(self.bound)
        return f"{value:.{digits}g}" if side is None else side(value, digits)


@dataclass(frozen=True)
class Series:
    """Points of one thing. A band goes from `ys` to `tops`; `tone` is its colour and dash; quiet: no data, a guide."""

    name: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    tone: int = 0
    kind: Kind = "line"
    tops: tuple[float, ...] = ()
    quiet: bool = False

    @property
    def points(self) -> list[tuple[float, float]]:
        return list(zip(self.xs, self.ys, strict=True))


@dataclass(frozen=True)
class Chart:
    """A figure: what it shows (title), what to read off it (says), and the data."""

    key: str
    title: str
    says: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Scale:
    """From data to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """A few round numbers."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, math.ceil((last - first) / 5))
            steps = (1, 2, 5) if last - first < 2 else (1,)
            tens = [m * 10.0**k for k in range(last, first - 2, -every) for m in steps][::-1]
            return [v for v in tens if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]
        from matplotlib.ticker import MaxNLocator

        found = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=self.whole).tick_values(self.low, self.high)
        slack = 1e-9 * (self.high - self.low)
        return [float(v) for v in found if self.low - slack <= v <= self.high + slack]


def figure(value: float) -> str:
    """A number on an axis."""
    if value == 0:
        return "0"
    power = math.log10(abs(value))
    if abs(value) < 1e-3:
        whole = math.floor(power + 1e-9)
        times, raised = value / 10.0**whole, "10" + str(whole).translate(_RAISED)
        return raised if abs(times - 1) < 1e-9 else f"{times:.3g}·{raised}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _span(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    known = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log)] or [1.0]
    low = min(known) if axis.low is None else axis.low
    high = max(known) if axis.high is None else axis.high
    if axis.log:
        return (low, high) if high > low * 1.01 else (low / 10, high * 10)
    if high - low < 1e-12 * max(abs(high), 1e-300):
        return _possible(axis, low - 0.5, high + 0.5)
    pad = 0.04 * (high - low)
    return _possible(axis, low - pad * (axis.low is None), high + pad * (axis.high is None))


def _possible(axis: Axis, low: float, high: float) -> tuple[float, float]:
    """Cut to the values that there can be."""
    return (low if axis.least is None else max(low, axis.least)), (high if axis.most is None else min(high, axis.most))


def shortened(name: str) -> str:
    """A name that fits beside a line."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


@dataclass(frozen=True)
class Frame:
    """A chart with its scales."""

    chart: Chart
    x: Scale
    y: Scale

    @classmethod
    def of(cls, chart: Chart) -> Frame:
        xs = [x for one in chart.series for x in one.xs]
        ys = [y for one in chart.series for y in (*one.ys, *one.tops)]
        bottom = HEIGHT - BOTTOM
        y = Scale(*_span(chart.y, ys), bottom, TOP, chart.y.log)
        left = 12 + LETTER * max(len(figure(tick)) for tick in y.ticks() or [0.0])
        names = [shortened(one.name) for one in chart.series if one.name]
        right = WIDTH - 10 - (LETTER * max(map(len, names)) + 8 if names else 0)
        return cls(chart, Scale(*_span(chart.x, xs), left, right, chart.x.log, chart.x.whole), y)

    def inside(self, one: Series) -> list[tuple[float, float]]:
        """Pixels of the points that are on both axes."""
        kept = [(x, y) for x, y in one.points if self._on(self.x, x) and self._on(self.y, y)]
        return [(self.x(x), self.y(y)) for x, y in kept]

    @staticmethod
    def _on(scale: Scale, value: float) -> bool:
        if not math.isfinite(value) or (scale.log and value <= 0):
            return False
        slack = 1e-9 * (abs(scale.low) + abs(scale.high))
        return scale.low - slack <= value <= scale.high + slack


def draw(chart: Chart) -> Markup:
    """The chart as one <svg>, with its title and what it says for those who do not see it."""
    frame = Frame.of(chart)
    parts = [*_axes(frame), *(_shape(frame, one) for one in chart.series), *_labels(frame)]
    return Markup(
        '<svg viewBox="0 0 {w:g} {h:g}" role="img" tabindex="0" class="chart" aria-labelledby="{k}-t {k}-d">'
        '<title id="{k}-t">{title}</title><desc id="{k}-d">{says}</desc>{body}</svg>'
    ).format(w=WIDTH, h=HEIGHT, k=chart.key, title=chart.title, says=chart.says, body=Markup("").join(parts))


def text(x: float, y: float, said: str, kind: str, anchor: str = "start") -> Markup:
    """A line of text of the class `kind`."""
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}">{}</text>').format(x, y, kind, anchor, said)


def _axes(frame: Frame) -> list[Markup]:
    x, y, bottom = frame.x, frame.y, HEIGHT - BOTTOM
    lines = [text(4, 14, frame.chart.y.label, "axis")]
    for tick in y.ticks():
        rule = '<line x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}" class="grid"/>'
        lines.append(Markup(rule).format(x.start, x.end, y(tick), y(tick)))
        lines.append(text(x.start - 6, y(tick) + 4, figure(tick), "tick", "end"))
    for tick in x.ticks():
        mark = '<line x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}" class="grid"/>'
        lines.append(Markup(mark).format(x(tick), bottom, bottom + 4))
        lines.append(text(x(tick), bottom + 17, figure(tick), "tick", "middle"))
    return [*lines, text(x.end, HEIGHT - 9, frame.chart.x.label, "axis", "end")]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _shape(frame: Frame, one: Series) -> Markup:
    points = frame.inside(one)
    if not points:
        return Markup("")
    tone = "quiet" if one.quiet else f"s{one.tone}"
    if one.kind == "band":
        back = [(frame.x(x), frame.y(top)) for x, top in zip(one.xs, one.tops, strict=True)][::-1]
        return Markup('<path d="{}Z" class="band {}"/>').format(_path([*points, *back]), tone)
    if one.kind == "dots":
        return Markup('<g class="{}">{}</g>').format(tone, Markup("").join(_dots(frame, one, "dot", 5)))
    line = Markup('<path d="{}" class="line" stroke-dasharray="{}"/>').format(_path(points), _dash(one))
    return Markup('<g class="{}">{}{}</g>').format(tone, line, Markup("").join(_dots(frame, one, "spot", 4)))


def _dash(one: Series) -> str:
    return "3 3" if one.quiet else DASHES[one.tone % len(DASHES)]


def _dots(frame: Frame, one: Series, kind: str, clip_norm: float) -> list[Markup]:
    """A circle for every point, with what it says; on lines they show only under the pointer or the arrow keys."""
    if one.quiet:
        return []
    said = [(x, y) for x, y in one.points if frame._on(frame.x, x) and frame._on(frame.y, y)]
    whole = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:g}" data-tip="{}"/>'
    across, up = frame.chart.x, frame.chart.y
    what = one.name or up.label
    tips = [f"{what}: {up.number(y)} at {across.label} {across.number(x)}" for x, y in said]
    places = [(frame.x(x), frame.y(y)) for x, y in said]
    return [Markup(whole).format(kind, x, y, clip_norm, tip) for (x, y), tip in zip(places, tips, strict=True)]


def _labels(frame: Frame) -> list[Markup]:
    """The name of every line where it ends: beside the data, moved apart where they would overlap; or right there."""
    named = [(one, frame.inside(one)) for one in frame.chart.series if one.name]
    ends = sorted(((points[-1], one) for one, points in named if points), key=lambda end: end[0][1])
    early = [end for end in ends if end[1].kind == "line" and end[0][0] < frame.x.end - 45]
    late = [end for end in ends if end not in early]
    places = apart([end[0][1] for end in late], HEIGHT - BOTTOM)
    found = _early(frame, [one for _, one in sorted(early, key=lambda end: -end[0][0])])
    for ((x, y), one), place in zip(late, places, strict=True):
        if abs(place - y) > 4 or x < frame.x.end - 6:
            found.append(_thread(x, y, frame.x.end + 6, place, _tone(one)))
        found.append(text(frame.x.end + 8, place + 4, shortened(one.name), _tone(one)))
    return found


def _early(frame: Frame, lines: Sequence[Series]) -> list[Markup]:
    """Names of lines that end inside the data, beside the line, each higher than the one to its right."""
    found = []
    for place, one in enumerate(lines):
        level = HEIGHT - BOTTOM - 8 - GAP * place
        points = frame.inside(one)
        x, y = next((point for point in reversed(points) if point[1] <= level), points[-1])
        found.append(text(x + 7, y + 2, shortened(one.name), _tone(one)))
    return found


def _tone(one: Series) -> str:
    return "label quiet" if one.quiet else f"label s{one.tone}"


def _thread(x: float, y: float, to: float, place: float, tone: str) -> Markup:
    line = '<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="thread {}"/>'
    return Markup(line).format(x + 4, y, to, place, tone)


def apart(places: Sequence[float], lowest: float) -> list[float]:
    """Sorted heights, at least GAP from each other and none below `lowest`, moved as little as need be."""
    found = list(places)
    for i in range(1, len(found)):
        found[i] = max(found[i], found[i - 1] + GAP)
    for i in reversed(range(len(found))):
        found[i] = min(found[i], lowest if i == len(found) - 1 else found[i + 1] - GAP)
    return found
