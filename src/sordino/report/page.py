"""HTML page of the report, one file with style, script and figures; called by `sordino report` and `Result.report`.

`ReportSection` is the base class of sections that other packages, or a file of `sordino report --with`, add:

    [project.entry-points."sordino.report_sections"]
    my_pkg = "my_pkg.report"        # a module: importing it registers the sections that it defines
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from sordino import codec
from sordino.accounting.rounding import atleast, upto
from sordino.errors import ConfigError, shorten
from sordino.report import charts
from sordino.report.charts import Run
from sordino.report.comparison import comparison_table, differences_table
from sordino.report.figures import DARK, LIGHT, Bars, Chart, draw
from sordino.report.text_table import Table, cell_text, number_text

MAX_ROWS = 24  # rows in the table of numbers beside a chart; `--json` prints all rows
GROUP = "sordino.report_sections"
Figure = Chart | Bars


def render_page(found: dict[str, Any]) -> str:
    """Return the HTML page for the data that `report_data` returns."""
    environment = Environment(
        loader=PackageLoader("sordino.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"upto": upto, "figure": number_text, "short": cell_text}
    runs, each = found["runs"], charts.one_of_each(found)
    light, dark = (" ".join(f"--{name}: {value};" for name, value in theme.items()) for theme in (LIGHT, DARK))
    return environment.get_template("page.html.jinja").render(
        data=found, runs=runs, light=light, dark=dark,
        comparison=comparison_table(found),
        utility=_drawn([charts.utility(found), *charts.metrics(found), *_for_each(each, charts.groups)]),
        privacy=_drawn([*charts.privacy(each), *_for_each(each, charts.silos)]),
        adversaries=_adversaries(each),
        settings=differences_table(found),
        audits=_drawn(_for_each(runs, charts.audits)),
        memberships=_memberships(runs),
        inside=_drawn([*_for_each(each, charts.norms), charts.clipped(each)]),
        ran=_drawn([*_for_each(each, charts.spectra), *_for_each(each, charts.participations)]),
        smooths=any(run["spectrum"] is not None for run in runs),
        sections=_added_sections(runs),
    )  # fmt: skip


def write_page(file: Path, found: dict[str, Any]) -> None:
    """Write the report's HTML page to a file, which is replaced if it exists."""
    try:
        file.write_text(render_page(found), encoding="utf-8")
    except OSError as error:
        wrong = f"{file}, which cannot be written ({error.strerror})"
        raise ConfigError(wrong, "a file in a folder that exists", "choose another --out") from None


# ---- figures
def _for_each(runs: Sequence[Run], make: Callable[[Run, int], Figure | None]) -> list[Figure | None]:
    return [make(run, place) for place, run in enumerate(runs)]


def _drawn(figures: Sequence[Figure | None]) -> list[dict[str, Any]]:
    found = []
    for one in (figure for figure in figures if figure is not None):
        numbers, left_out = (_bar_numbers(one), False) if isinstance(one, Bars) else _chart_numbers(one)
        drawn = {"title": one.title, "says": one.says, "svg": draw(one)}
        found.append({**drawn, "numbers": numbers, "left_out": left_out})
    return found


def _chart_numbers(chart: Chart) -> tuple[Table, bool]:
    """Return the numbers of a chart as a table, and whether rows are left out; the last row is always there."""
    series = [one for one in chart.series if not one.quiet]
    places = sorted({x for one in series for x in one.xs})
    every = -(-len(places) // MAX_ROWS)
    columns = []
    for one in series:
        name = one.name or chart.y.label
        columns.append((f"{name} from" if one.tops else name, dict(zip(one.xs, one.ys, strict=True))))
        columns += [(f"{name} to", dict(zip(one.xs, one.tops, strict=True)))] if one.tops else []
    rows = []
    for x in places[::-1][::every][::-1]:
        cells = ("-" if (y := column.get(x)) is None else chart.y.number(y) for _, column in columns)
        rows.append((chart.x.number(x), *cells))
    return Table((chart.x.label, *(name for name, _ in columns)), tuple(rows), f"{chart.title}: numbers"), every > 1


def _bar_numbers(bars: Bars) -> Table:
    head: tuple[str, ...] = ("", bars.axis)
    rows: list[tuple[str, ...]] = [(name, text) for name, _, text in bars.rows]
    if bars.marks:
        head = ("", "at least", "certified at most")
        pairs = zip(bars.rows, bars.marks, strict=True)
        rows = [(name, atleast(value), upto(mark)) for (name, value, _), mark in pairs]
    return Table(head, tuple(rows), f"{bars.title}: numbers")


# ---- tables
def _adversaries(runs: Sequence[Run]) -> Table:
    lines = [(run["name"], line) for run in runs for line in run["certificate"]["adversaries"]]
    others = sorted({one["delta"] for _, line in lines for one in line["other_deltas"]}, reverse=True)
    rows = []
    for name, line in lines:
        known, gdp = {one["delta"]: one["epsilon"] for one in line["other_deltas"]}, line["gdp"]
        rows.append((
            name,
            charts.ADVERSARY_WORDS.get(line["adversary"], line["adversary"]),
            upto(line["epsilon"]),
            upto(line["delta"]),
            *(upto(known[delta]) if delta in known else "-" for delta in others),
            "-" if gdp is None else f"{upto(gdp['mu'])} ({upto(gdp['regret'])})",
            line["relation"].replace("_", " "),
            line["method"].upper() if line["epsilon"] is not None else "-",
        ))  # fmt: skip
    at = tuple(f"epsilon at {upto(delta)}" for delta in others)
    head = ("run", "one who sees", "epsilon", "delta", *at, "mu (regret)", "neighbours differ by", "proved by")
    return Table(head, tuple(rows), "Guarantee of each run against each adversary; every bound is rounded up")


def _memberships(runs: Sequence[Run]) -> Table | None:
    rows = []
    for run in runs:
        m = run["audit"].get("membership", {}).get("membership")
        if m is not None:
            found, most = m["true_positives"]["0.01"], m["true_positive_rate_at_1_percent_at_most"]
            areas = f"{m['auc']:.4f}", upto(m["auc_at_most"], 4)
            rows.append((run["name"], *areas, f"{100 * found:.2f} %", f"{upto(100 * most)} %"))
    head = ("run", "AUC", "AUC at most", "found at 1 % false alarms", "found at most")
    return Table(head, tuple(rows), "Membership by a loss threshold (guessing has AUC 0.5)") if rows else None


# ---- sections of other packages
class ReportSection(ABC):
    """Base class of sections of the report: a heading, a text, charts and tables, all made from the runs' data.

    If `not_private` is set, the section is marked as unreleased data. A subclass is registered under its title.
    """

    title: ClassVar[str]
    not_private: ClassVar[bool] = False
    members: ClassVar[dict[str, type[ReportSection]]] = {}

    def __init_subclass__(cls, title: str = "") -> None:
        if title:
            cls.title = title
            ReportSection.members[title] = cls

    def text(self, runs: Sequence[Run]) -> str:
        """Return the text under the section's heading."""
        return ""

    @abstractmethod
    def contents(self, runs: Sequence[Run]) -> Sequence[Chart | Bars | Table]:
        """Return the section's figures and tables; a section without any is omitted."""


def _added_sections(runs: Sequence[Run]) -> list[dict[str, Any]]:
    codec.load_plugins(GROUP)
    found: list[dict[str, Any]] = []
    for title, kind in ReportSection.members.items():
        key = f"section-{len(found)}"
        try:
            section = kind()
            contents, text = section.contents(runs), section.text(runs)
        except Exception as error:
            why = shorten(f"{type(error).__name__}: {error}")
            found_error = f"report section {title!r}, which fails ({why})"
            fix = "correct its class, or do not load it with --with"
            raise ConfigError(found_error, "a section that returns figures and tables", fix) from None
        if contents:
            figures = [replace(one, key=f"{key}-{one.key}") for one in contents if not isinstance(one, Table)]
            tables = [one for one in contents if isinstance(one, Table)]
            named = {"id": key, "title": section.title, "not_private": section.not_private, "text": text}
            found.append({**named, "figures": _drawn(figures), "tables": tables})
    return found
