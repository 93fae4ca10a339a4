"""The page: one HTML file from the report's data, with its style, its script and its figures inside.

`ReportSection` is the base of sections that other packages add after Sordino's own; so may a file that
`sordino report --with` names.

    [project.entry-points."sordino.report_sections"]
    my_pkg = "my_pkg.report"        # a module: importing it registers the sections that it defines
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sordino import codec
from sordino.accounting.rounding import atleast, upto
from sordino.errors import ConfigError, shorten
from sordino.report import charts, comparison, workings
from sordino.report.figures import DARK, LIGHT, Bars, Chart, draw, variables
from sordino.report.text_table import Table, figure, short

ROWS = 24  # of the numbers beside a figure; `--json` has all of them
Run = dict[str, Any]  # one run as `sordino report --json` prints it


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
        loader=PackageLoader("sordino.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"upto": upto, "figure": figure, "short": short}
    runs, each = found["runs"], charts.one_of_each(found)
    return environment.get_template("page.html.jinja").render(
        data=found,
        runs=runs,
        light=variables(LIGHT),
        dark=variables(DARK),
        comparison=comparison.table(found),
        utility=_drawn([charts.utility(found), *charts.metrics(found), *_each(each, charts.groups)]),
        privacy=_drawn([*charts.curves(each), *_each(each, charts.silos)]),
        adversaries=adversaries(each),
        settings=comparison.settings_table(found),
        audits=_drawn(_each(runs, workings.audits)),
        memberships=memberships(runs),
        inside=_drawn([*_each(each, workings.norms), workings.clipped(each)]),
        ran=_drawn(_each(each, workings.spectra, workings.turns)),
        smooths=any(run["spectrum"] is not None for run in runs),
        sections=[_section(place, *one) for place, one in enumerate(contents_of(runs))],
    )


def write(file: Path, found: dict[str, Any]) -> None:
    """The page as a file; one that is there is replaced."""
    try:
        file.write_text(rendered(found), encoding="utf-8")
    except OSError as error:
        wrong = f"{file}, which cannot be written ({error.strerror})"
        raise ConfigError(wrong, "a file in a folder that exists", "choose another --out") from None


# ---- figures --------------------------------------------------------------------------------------------------------

Maker = Callable[[Run, int], Chart | Bars | None]


def _each(runs: Sequence[Run], *makers: Maker) -> list[Chart | Bars | None]:
    """Every kind of figure, run by run, so that the same stand side by side."""
    return [make(run, place) for make in makers for place, run in enumerate(runs)]


def _drawn(made: Sequence[Chart | Bars | None]) -> list[Figure]:
    return [drawn(one) for one in made if one is not None]


def drawn(made: Chart | Bars) -> Figure:
    """A figure of the page with its numbers."""
    numbers, left_out = (_bars(made), False) if isinstance(made, Bars) else _chart(made)
    return Figure(made.title, made.says, draw(made), numbers, left_out)


def _section(place: int, section: ReportSection, text: str, made: Sequence[Chart | Bars | Table]) -> dict[str, Any]:
    """A section that another package adds."""
    return {
        "id": f"section-{place}",
        "title": section.title,
        "not_private": section.not_private,
        "text": text,
        "figures": _drawn(
            [replace(one, key=f"section-{place}-{one.key}") for one in made if not isinstance(one, Table)]
        ),
        "tables": [one for one in made if isinstance(one, Table)],
    }


def _chart(chart: Chart) -> tuple[Table, bool]:
    """The numbers of a chart, and whether some rows are left out."""
    named = [one for one in chart.series if not one.quiet]
    places = sorted({x for one in named for x in one.xs})
    every = -(-len(places) // ROWS)
    kept = places[::-1][::every][::-1]  # the last is always among them
    columns = []
    for one in named:
        name = one.name or chart.y.label
        columns.append((f"{name} from" if one.tops else name, dict(zip(one.xs, one.ys, strict=True))))
        columns += [(f"{name} to", dict(zip(one.xs, one.tops, strict=True)))] if one.tops else []
    head = (chart.x.label, *(name for name, _ in columns))
    cells = [["-" if (y := column.get(x)) is None else chart.y.number(y) for _, column in columns] for x in kept]
    rows = tuple((chart.x.number(x), *row) for x, row in zip(kept, cells, strict=True))
    return Table(head, rows, f"{chart.title}: numbers"), every > 1


def _bars(bars: Bars) -> Table:
    bounds = [(atleast(value), upto(mark)) for (_, value, _), mark in zip(bars.rows, bars.marks, strict=False)]
    cells: Sequence[tuple[str, ...]] = bounds or [(said,) for _, _, said in bars.rows]
    rows = tuple((name, *own) for (name, _, _), own in zip(bars.rows, cells, strict=True))
    head = ("", "at least", "certified at most") if bars.marks else ("", bars.axis)
    return Table(head, rows, f"{bars.title}: numbers")


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


def memberships(runs: Sequence[Run]) -> Table | None:
    """What a loss threshold tells of who was trained on, beside what the certificate allows."""
    rows = []
    for run in runs:
        m = run["audit"].get("membership", {}).get("membership")
        if m is not None:
            found, most = m["true_positives"]["0.01"], m["true_positive_rate_at_1_percent_at_most"]
            areas = f"{m['auc']:.4f}", upto(m["auc_at_most"], 4)
            rows.append((run["name"], *areas, f"{100 * found:.2f} %", f"{upto(100 * most)} %"))
    head = ("run", "AUC", "AUC at most", "found at 1 % false alarms", "found at most")
    return Table(head, tuple(rows), "Membership by a loss threshold (guessing has AUC 0.5)") if rows else None


GROUP = "sordino.report_sections"


class ReportSection(ABC):
    """A section of the page: a heading, a text, and charts, bars and tables made of the runs' data.

    `not_private` puts the banner of unreleased data above it. A subclass is registered under its title.
    """

    title: ClassVar[str]
    not_private: ClassVar[bool] = False
    members: ClassVar[dict[str, type[ReportSection]]] = {}

    def __init_subclass__(cls, title: str = "") -> None:
        if title:
            cls.title = title
            ReportSection.members[title] = cls

    def text(self, runs: Sequence[Run]) -> str:
        """What stands under the heading."""
        return ""

    @abstractmethod
    def contents(self, runs: Sequence[Run]) -> Sequence[Chart | Bars | Table]:
        """Figures and tables; nothing: the section is left out."""


def contents_of(runs: Sequence[Run]) -> list[tuple[ReportSection, str, Sequence[Chart | Bars | Table]]]:
    """Every installed section that has something to show of these runs."""
    codec.load_plugins(GROUP)
    found = []
    for title, kind in ReportSection.members.items():
        try:
            section = kind()
            made = section.contents(runs)
            found += [(section, section.text(runs), made)] if made else []
        except Exception as error:
            why = shorten(f"{type(error).__name__}: {error}")
            raise ConfigError(f"report section {title!r}, which fails ({why})", "one that can be drawn") from None
    return found
