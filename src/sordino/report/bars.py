"""Bars under their names, with what each says at its end, and a mark where a bound on it lies."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from sordino.report.svg import LETTER, WIDTH, Scale, text


@dataclass(frozen=True)
class Bars:
    """Lengths beside names, each with what it says; `marks` are other numbers on the same scale (a bound above)."""

    key: str
    title: str
    says: str
    axis: str
    rows: tuple[tuple[str, float, str], ...]  # name, length, and what is written at its end
    marks: tuple[float, ...] = ()


def draw_bars(bars: Bars) -> Markup:
    """Bars, each under its name, with its number at the end and a mark where the other number lies."""
    every, top, longest = 40.0, 24.0, max(len(said) for _, _, said in bars.rows)
    scale = Scale(
        0.0, max([*(value for _, value, _ in bars.rows), *bars.marks, 1e-300]), 4.0, WIDTH - 14 - LETTER * longest
    )
    parts = [text(4, 14, bars.axis, "axis")]
    for place, (name, value, said) in enumerate(bars.rows):
        y = top + every * place
        mark = bars.marks[place] if bars.marks else None
        parts += [text(4, y + 14, name, "tick"), _bar(scale, y + 21, value, said, mark)]
    return Markup(
        '<svg viewBox="0 0 {w:g} {h:g}" role="img" class="chart bars" aria-labelledby="{k}-t {k}-d">'
        '<title id="{k}-t">{title}</title><desc id="{k}-d">{says}</desc>{body}</svg>'
    ).format(
        w=WIDTH,
        h=top + every * len(bars.rows) + 4,
        k=bars.key,
        title=bars.title,
        says=bars.says,
        body=Markup("").join(parts),
    )


def _bar(scale: Scale, y: float, value: float, said: str, mark: float | None) -> Markup:
    end = scale(value)
    bar = Markup('<rect x="4" y="{:.1f}" width="{:.1f}" height="10" class="bar s0"/>').format(y, max(end - 4, 1))
    line = '<line x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}" class="mark s1"/>'
    drawn = Markup("") if mark is None else Markup(line).format(scale(mark), y - 3, y + 13)
    return bar + drawn + text(max(end, 0.0 if mark is None else scale(mark)) + 7, y + 9, said, "label s0")
