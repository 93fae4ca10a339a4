"""The page: one HTML file from the report's data, with its style, its script and its figures inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sordino.accounting.rounding import atleast, upto
from sordino.errors import ConfigError
from sordino.report import charts, colours, workings
from sordino.report.bars import Bars, draw_bars
from sordino.report.comparison import Table, figure, short
from sordino.report.svg import Axis, Chart, draw

ROWS = 24  # of the numbers beside a figure; `--json` has all of them
Run = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A drawing, and the same in numbers."""

    title: str
    says: str
    svg: Markup
    numbers: Table
    left_out: bool = False


def rendered(found: dict[str, Any]) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("sordino.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"upto": upto, "figure": figure, "short": short}
    runs = found["runs"]
    return environment.get_template("page.html.jinja").render(
        data=found,
        runs=runs,
        light=colours.variables(colours.LIGHT),
        dark=colours.variables(colours.DARK),
        utility=_drawn([charts.utility(runs), *charts.metrics(runs), *_each(runs, charts.groups)]),
        privacy=_drawn([*charts.curves(runs), *_each(runs, charts.silos)]),
        adversaries=adversaries(runs),
        settings=settings(found),
        audits=_drawn(_each(runs, workings.audits)),
        memberships=memberships(runs),
        inside=_drawn([*_each(runs, workings.norms), workings.clipped(runs)]),
        ran=_drawn(_each(runs, workings.spectra, workings.turns)),
        smooths=any(run["spectrum"] is not None for run in runs),
    )


def write(file: Path, found: dict[str, Any]) -> None:
    """The page as a file; one that is there is replaced."""
    try:
        file.write_text(rendered(found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{file}, which cannot be written ({error.strerror})",
            "a file in a folder that exists",
            "choose another --out",
        ) from None


# ---- figures --------------------------------------------------------------------------------------------------------

Maker = Callable[[Run, int], Chart | Bars | None]


def _each(runs: Sequence[Run], *makers: Maker) -> list[Chart | Bars | None]:
    """Every kind of figure, run by run, so that the same stand side by side."""
    return [make(run, place) for make in makers for place, run in enumerate(runs)]


def _drawn(made: Sequence[Chart | Bars | None]) -> list[Figure]:
    return [_bars(one) if isinstance(one, Bars) else _chart(one) for one in made if one is not None]


def _chart(chart: Chart) -> Figure:
    named = [one for one in chart.series if not one.quiet]
    places = sorted({x for one in named for x in one.xs})
    every = -(-len(places) // ROWS)
    kept = places[::-1][::every][::-1]  # the last is always among them
    columns = [dict(zip(one.xs, one.ys, strict=True)) for one in named]
    tops = [(f"{one.name} to", dict(zip(one.xs, one.tops, strict=True))) for one in named if one.tops]
    head = (chart.x.label, *(one.name or "from" for one in named), *(name.strip() for name, _ in tops))
    values = [*columns, *(column for _, column in tops)]
    rows = tuple((chart.x.number(x), *(_cell(chart.y, column.get(x)) for column in values)) for x in kept)
    return Figure(chart.title, chart.says, draw(chart), Table(head, rows, f"{chart.title}: numbers"), every > 1)


def _cell(axis: Axis, value: float | None) -> str:
    return "-" if value is None else axis.number(value)


def _bars(bars: Bars) -> Figure:
    bounds = [(atleast(value), upto(mark)) for (_, value, _), mark in zip(bars.rows, bars.marks, strict=False)]
    cells: Sequence[tuple[str, ...]] = bounds or [(said,) for _, _, said in bars.rows]
    rows = tuple((name, *own) for (name, _, _), own in zip(bars.rows, cells, strict=True))
    head = ("", "at least", "certified at most") if bars.marks else ("", bars.axis)
    return Figure(bars.title, bars.says, draw_bars(bars), Table(head, rows, f"{bars.title}: numbers"))


# ---- tables ---------------------------------------------------------------------------------------------------------


def adversaries(runs: Sequence[Run]) -> Table:
    """Who sees what, and what each run promises against that."""
    lines = [(run["name"], line) for run in runs for line in run["certificate"]["adversaries"]]
    others = sorted({one["delta"] for _, line in lines for one in line["other_deltas"]}, reverse=True)
    at = tuple(f"epsilon at {upto(delta)}" for delta in others)
    head = ("run", "one who sees", "epsilon", "delta", *at, "mu (regret)", "neighbours differ by", "proved by")
    rows = tuple((name, *_promised(line, others)) for name, line in lines)
    return Table(head, rows, "What each run promises, against whom; every bound is rounded up")


def _promised(line: dict[str, Any], others: Sequence[float]) -> tuple[str, ...]:
    known, gdp = {one["delta"]: one["epsilon"] for one in line["other_deltas"]}, line["gdp"]
    return (
        charts.WORDS.get(line["adversary"], line["adversary"]),
        upto(line["epsilon"]),
        upto(line["delta"]),
        *(upto(known[delta]) if delta in known else "-" for delta in others),
        "-" if gdp is None else f"{upto(gdp['mu'])} ({upto(gdp['regret'])})",
        line["relation"].replace("_", " "),
        line["method"].upper() if line["epsilon"] is not None else "-",
    )


def settings(found: dict[str, Any]) -> Table:
    """What differs between the runs."""
    names = tuple(run["name"] for run in found["runs"])
    rows = tuple((row["setting"], *map(short, row["values"])) for row in found["settings"])
    return Table(("setting", *names), rows, "Keys of plan.toml whose values are not the same")


def memberships(runs: Sequence[Run]) -> Table | None:
    """What a loss threshold tells of who was trained on, beside what the certificate allows."""
    rows = []
    for run in runs:
        m = run["audit"].get("membership", {}).get("membership")
        if m is not None:
            found, most = m["true_positives"]["0.01"], m["true_positive_rate_at_1_percent_at_most"]
            rows.append(
                (
                    run["name"],
                    f"{m['auc']:.4f}",
                    upto(m["auc_at_most"], 4),
                    f"{100 * found:.2f} %",
                    f"{upto(100 * most)} %",
                )
            )
    head = ("run", "AUC", "AUC at most", "found at 1 % false alarms", "found at most")
    return Table(head, tuple(rows), "Membership by a loss threshold (guessing has AUC 0.5)") if rows else None
