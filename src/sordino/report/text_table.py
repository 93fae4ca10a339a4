"""Tables of results: text and LaTeX tables, a run's history, and settings with means and intervals over seeds.

Called by `sordino compare`, `sordino report`, `sordino sweep`, and by `train`, which returns `Result.history`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from sordino import codec
from sordino.accounting.rounding import upto
from sordino.errors import ConfigError
from sordino.outcome import DIAGNOSTIC
from sordino.version import __version__

TITLE = "Sordino: differentially private federated learning with a certificate that is true of what ran"
AUTHOR = "The Sordino developers"
NOT_PRIVATE = "not_private/"  # prefix of history columns that come from unreleased data
REPR_ROWS = 5  # rows at each end of a history that its repr prints
MIN_SEEDS = 3  # fewest seeds for which a confidence interval is computed
LOWER_IS_BETTER = ("loss", "rmse", "error", "mae")  # words in a metric's name; for all other metrics higher is better
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", **{character: f"\\{character}" for character in "&%$#_{}"},
}  # fmt: skip


# ---- cells
def flatten(table: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for every leaf of nested dicts and lists of dicts, except None and empty lists."""
    if isinstance(table, dict):
        for key, value in table.items():
            yield from flatten(value, f"{name}.{key}" if name else str(key))
    elif isinstance(table, list) and any(isinstance(item, dict) for item in table):
        for place, item in enumerate(table):
            yield from flatten(item, f"{name}.{place}")
    elif table not in ([], None):
        yield name, table


def is_number(value: Any) -> bool:
    """Return whether a value is an int or float; a bool is not a number here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def cell_text(value: Any) -> str:
    """Return any value as the text of one table cell; lists longer than 8 are cut."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return "[" + ", ".join(map(cell_text, value[:8])) + (", ...]" if len(value) > 8 else "]")
    return f"{value:.6g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def number_text(value: Any, digits: int = 4) -> str:
    """Return a number as text with this many significant digits, "-" for None, and any other value as it is."""
    return "-" if value is None else f"{value:.{digits}g}" if isinstance(value, float | int) else str(value)


def value_text(value: Any) -> str:
    """Return a setting of a sweep as text; a table with a `kind` becomes kind(key=value, ...)."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{name}={value_text(item)}" for name, item in value.items() if name != "kind")
        return f"{value.get('kind', '')}({inside})" if inside else str(value.get("kind", "{}"))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def escape_latex(text: str) -> str:
    """Escape the characters that LaTeX treats as commands."""
    return "".join(_LATEX.get(character, character) for character in text)


@dataclass(frozen=True)
class Table:
    """Table of text cells with a caption; the first column names the rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    @property
    def transposed(self) -> Table:
        head, *rows = zip(self.head, *self.rows, strict=True)
        return Table(head, tuple(rows), self.caption)

    def text(self) -> str:
        """Return the table as text for a terminal, with aligned columns two spaces apart."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.head))]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def latex(self, label: str = "tab:sordino") -> str:
        """Return a LaTeX table for the package booktabs; columns of numbers are aligned to the right."""

        def is_numeric(cell: str) -> bool:
            try:
                float(cell)
            except ValueError:
                return cell in ("-", "")
            return True

        columns = ([row[place] for row in self.rows] for place in range(1, len(self.head)))
        sides = "l" + "".join("r" if all(map(is_numeric, cells)) else "l" for cells in columns)
        head, *body = (" & ".join(map(escape_latex, row)) + r" \\" for row in (self.head, *self.rows))
        return "\n".join([
            r"\begin{table}  % \usepackage{booktabs}", r"\centering", rf"\caption{{{escape_latex(self.caption)}}}",
            rf"\label{{{label}}}", rf"\begin{{tabular}}{{{sides}}}", r"\toprule", head, r"\midrule", *body,
            r"\bottomrule", r"\end{tabular}", r"\end{table}",
        ])  # fmt: skip


def bibtex(versions: Sequence[str] = (__version__,)) -> str:
    """Return one BibTeX entry for each Sordino version that ran."""
    found = []
    for version in sorted(set(versions)):
        fields = {"author": f"{{{AUTHOR}}}", "title": f"{{{TITLE}}}", "version": version, "note": "Apache-2.0"}
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
        found.append("\n".join([f"@software{{sordino-{version},", *lines, "}"]))
    return "\n\n".join(found)


class History(list[dict[str, Any]]):
    """History of a run, one dict per round: `round`, metrics on public rows, and diagnostics as `not_private/...`."""

    @classmethod
    def of(cls, lines: Iterable[dict[str, Any]]) -> History:
        """Build a history from the lines of history.jsonl, in which diagnostics are a nested table."""
        return cls(
            {name: value for name, value in line.items() if name != DIAGNOSTIC}
            | {f"{NOT_PRIVATE}{name}": value for name, value in line.get(DIAGNOSTIC, {}).items()}
            for line in lines
        )

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self for name in row))

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with one row per round."""
        try:
            from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise ConfigError("no package pandas", "pandas for to_pandas()", "pip install pandas") from None
        return DataFrame(self, columns=self.columns)

    def __repr__(self) -> str:
        public = [name for name in self.columns if not name.startswith(NOT_PRIVATE)]
        hidden = len(self.columns) - len(public)
        rows = [*self] if len(self) <= 2 * REPR_ROWS else [*self[:REPR_ROWS], {}, *self[-REPR_ROWS:]]
        cells = tuple(tuple(cell_text(row.get(name)) if row else "..." for name in public) for row in rows)
        more = f"; {hidden} columns of figures that are not private: history[-1], to_pandas()" if hidden else ""
        return f"{Table(tuple(public), cells).text()}\n{len(self)} rounds{more}"


# ---- settings, with means over seeds
@dataclass(frozen=True)
class Estimate:
    """Mean over seeds with half the width of its 95% interval (Student's t).

    The half width is None for fewer than three seeds: two seeds would give 12.7 standard errors, three give 4.3.
    """

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        from scipy.special import stdtrit

        if len(values) < MIN_SEEDS:
            return cls(mean(values), None)
        return cls(mean(values), float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values)))

    def text(self, sign: str = "") -> str:
        """Return "mean +- half width" as text; with `sign` = "+" a positive mean has its sign."""
        return f"{self.mean:{sign}.4f}" + ("" if self.half_width is None else f" +- {self.half_width:.4f}")


@dataclass(frozen=True)
class Row:
    """Setting of a sweep: its metric for every seed (NaN if the run diverged), and the privacy cost of one run."""

    number: int
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    epsilon: float | None
    relation: str | None = None
    curves: tuple[tuple[tuple[int, float], ...], ...] = ()  # for every run: (round, value of the metric)

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.values))

    @property
    def estimate(self) -> Estimate | None:
        return Estimate.of(self.values) if self.finite else None

    def minus(self, best: Row) -> Estimate | None:
        """Return the difference to the best setting, paired by seed; None for the best one or if seeds differ."""
        if self is best or self.seeds != best.seeds or not (self.finite and best.finite):
            return None
        return Estimate.of([own - other for own, other in zip(self.values, best.values, strict=True)])

    def band(self) -> list[tuple[int, Estimate]]:
        """Return round, mean and interval over seeds of the metric, for rounds that every run evaluated."""
        return mean_curve([dict(curve) for curve in self.curves])

    def cell(self, key: str) -> str:
        return value_text(self.settings[key]) if key in self.settings else ""

    def label(self, keys: Sequence[str]) -> str:
        """Return the name of the setting in a legend, made of the values of these keys."""
        cells = [(key.removeprefix("recipe."), self.cell(key)) for key in keys if key in self.settings]
        return ", ".join(text if key == "name" else f"{key} {text}" for key, text in cells) or f"setting {self.number}"


def mean_curve(curves: Sequence[Mapping[Any, float]]) -> list[tuple[Any, Estimate]]:
    """Return (round, mean over the curves) for every round that all curves have; a curve maps rounds to values."""
    rounds = sorted(set.intersection(*map(set, curves))) if curves else []
    return [(t, Estimate.of([curve[t] for curve in curves])) for t in rounds]


def seeds_text(seeds: Sequence[int]) -> str:
    """Return a phrase that names the seeds of a mean, and whether the mean has an interval."""
    text = f"mean of seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else "one seed"
    if len(seeds) >= MIN_SEEDS:
        return f"{text}, +- 95% interval"
    return f"{text}: no interval, which needs {MIN_SEEDS} seeds"


def better(metric: str) -> str:
    """Return "smaller" for a metric of which lower values are better, such as a loss, else "larger"."""
    return "smaller" if any(word in metric for word in LOWER_IS_BETTER) else "larger"


def sort_rows(rows: Sequence[Row], metric: str) -> list[Row]:
    """Return the settings by mean over seeds, the best first and diverged settings last."""
    sign = 1.0 if better(metric) == "smaller" else -1.0
    return sorted(rows, key=lambda row: sign * mean(row.values) if row.finite else math.inf)


def best_of(rows: Sequence[Row], metric: str) -> Row:
    """Return the setting with the best mean over seeds; refuse a sweep in which every setting diverged."""
    best = sort_rows(rows, metric)[0]
    if not best.finite:
        fix = "lower the learning rate or the clip norm"
        raise ConfigError("a sweep in which every setting diverged", "a setting that does not diverge", fix)
    return best


def choose_metric(asked: str, known: Sequence[str]) -> str:
    """Return the metric that ranks settings: the one asked for, else accuracy, rmse or loss."""
    if asked and asked not in known:
        raise ConfigError(f"metric = {asked!r}", "a metric of the history", codec.nearest(asked, list(known)))
    return asked or next(name for name in ("accuracy", "rmse", "loss") if name in known)


def varying_keys(rows: Sequence[Row]) -> list[str]:
    """Return the setting keys with more than one value among the rows that have them; all keys of a single row."""
    keys = list(dict.fromkeys(key for row in rows for key in row.settings))
    return [key for key in keys if len(rows) == 1 or len({row.cell(key) for row in rows} - {""}) > 1]


def entries(rows: Sequence[Row], metric: str) -> list[dict[str, Any]]:
    """Return the settings of a sweep as JSON data, the best first."""
    best, found = best_of(rows, metric), []
    for row in sort_rows(rows, metric):
        own, gap = row.estimate, row.minus(best)
        found.append({
            "setting": row.number, "values": dict(row.settings), metric: own and own.mean,
            "half_width": own and own.half_width, "minus_best": gap and gap.mean,
            "minus_best_half_width": gap and gap.half_width, "epsilon_of_one_run": row.epsilon,
            "relation": row.relation,
            "by_seed": {str(seed): value for seed, value in zip(row.seeds, row.values, strict=True)},
        })  # fmt: skip
    return found


def settings_table(rows: Sequence[Row], metric: str, caption: str = "") -> Table:
    """Return the table of a sweep's settings, the best first, with the epsilon of one run and its relation."""
    best, keys = best_of(rows, metric), varying_keys(rows)
    names = ("recipe" if key == "recipe.name" else key.removeprefix("recipe.") for key in keys)
    lines = []
    for row in sort_rows(rows, metric):
        own, gap = row.estimate, row.minus(best)
        cost = "no guarantee" if row.epsilon is None else upto(row.epsilon, 4)
        figures = own.text() if own else "diverged", gap.text("+") if gap else "", cost, row.relation or ""
        lines.append((*map(row.cell, keys), *figures))
    return Table((*names, metric, "minus best", "epsilon of one run", "relation"), tuple(lines), caption)


def to_csv(rows: Sequence[Row], metric: str) -> str:
    """Return a sweep's runs as CSV, one line for every setting and seed."""
    text, keys = io.StringIO(), list(dict.fromkeys(key for row in rows for key in row.settings))
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["setting", *keys, "seed", metric, "epsilon_of_one_run", "relation"])
    for row in rows:
        for seed, value in zip(row.seeds, row.values, strict=True):
            cost = "" if row.epsilon is None else row.epsilon
            out.writerow([row.number, *map(row.cell, keys), seed, value, cost, row.relation or ""])
    return text.getvalue()
