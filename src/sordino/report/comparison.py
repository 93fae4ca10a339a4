"""Settings of runs beside each other: every key of plan.toml by its whole name, and those that differ.

One table, for a terminal, for LaTeX, for machines; and how to cite what made it.

Runs beside each other: what they cost, what they reached, and in which settings they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sordino import codec
from sordino.accounting.rounding import upto
from sordino.report.subject import Subject
from sordino.version import __version__

ABSENT = "-"


def flat(table: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every value; a list of plain values is one value; what is empty says nothing."""
    if isinstance(table, dict):
        for key, value in table.items():
            yield from flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(table, list) and any(isinstance(item, dict) for item in table):
        for place, item in enumerate(table):
            yield from flat(item, f"{name}.{place}")
    elif table not in ([], None):
        yield name, table


def differing(tables: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keys whose values are not the same in all tables: {"setting", "values"}, one value for each table."""
    each = [dict(flat(table)) for table in tables]
    names = dict.fromkeys(name for one in each for name in one)
    rows = [{"setting": name, "values": [one.get(name) for one in each]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]


def short(value: Any) -> str:
    """A value as a cell of a table."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "[" + ", ".join(short(one) for one in value[:8]) + (", ...]" if len(value) > 8 else "]")
    return str(value)


TITLE = "Sordino: differentially private federated learning with a certificate that is true of what ran"
AUTHOR = "The Sordino developers"
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


@dataclass(frozen=True)
class Table:
    """Cells as text, a row each; the first column names the row."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    @property
    def turned(self) -> Table:
        """Rows for columns."""
        head, *rows = zip(self.head, *self.rows, strict=True)
        return Table(head, tuple(rows), self.caption)

    def text(self) -> str:
        """Columns under each other, two spaces apart."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.head))]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def latex(self, label: str = "tab:sordino") -> str:
        """A table of the package booktabs; numbers stand to the right."""
        sides = "l" + "".join(self._side(place) for place in range(1, len(self.head)))
        body = [" & ".join(map(escaped, row)) + r" \\" for row in self.rows]
        return "\n".join([
            r"\begin{table}  % \usepackage{booktabs}",
            r"\centering",
            rf"\caption{{{escaped(self.caption)}}}",
            rf"\label{{{label}}}",
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            " & ".join(map(escaped, self.head)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ])  # fmt: skip

    def _side(self, place: int) -> str:
        return "r" if all(_number(row[place]) for row in self.rows) else "l"


def _number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell in ("-", "")
    return True


def escaped(text: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def bibtex(versions: Sequence[str] = (__version__,)) -> str:
    """An entry for each version that ran."""
    return "\n\n".join(_entry(version) for version in sorted(set(versions)))


def _entry(version: str) -> str:
    fields = {"author": f"{{{AUTHOR}}}", "title": f"{{{TITLE}}}", "version": version, "note": "Apache-2.0"}
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
    return "\n".join([f"@software{{sordino-{version},", *lines, "}"])


def figure(value: Any, digits: int = 4) -> str:
    """A number as a cell; nothing where there is none."""
    return "-" if value is None else f"{value:.{digits}g}" if isinstance(value, float | int) else str(value)


PLAIN = ("delta", "unit", "relation", "noise", "rounds")
COLUMNS = 6  # runs that stand side by side; more stand under each other
CAPTION = "Runs certified by Sordino: epsilon to one who sees released models, also cohorts, every message."


def compared(subjects: Sequence[Subject]) -> dict[str, Any]:
    """Everything as plain data."""
    return {"runs": [_run(one) for one in subjects], "settings": settings(subjects)}


def settings(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """What differs between those that have a plan.toml; a loop has its plan only."""
    return differing([one.settings or {"plan": codec.dump(one.plan)} for one in subjects])


def _run(subject: Subject) -> dict[str, Any]:
    made = subject.certificate
    return {
        "name": subject.name,
        "metrics": subject.evaluated,
        "rounds": made["counts"]["rounds_accounted"],
        "delta": made["delta"],
        "unit": made["unit"],
        "relation": made["relation"],
        "noise": made["noise"]["mode"],
        "epsilon": {line["adversary"]: line["epsilon"] for line in made["adversaries"]},
        "sordino": made["sordino"],
    }


def table(found: dict[str, Any]) -> Table:
    """A column for every run, or a row if they are many: metrics, epsilons, and the settings that differ."""
    runs, differ = found["runs"], found["settings"]
    metrics = list(dict.fromkeys(name for run in runs for name in run["metrics"]))
    adversaries = list(dict.fromkeys(name for run in runs for name in run["epsilon"]))
    head = (
        "run",
        *metrics,
        *(f"epsilon ({name})" for name in adversaries),
        *PLAIN,
        *(one["setting"] for one in differ),
    )
    rows = [
        (
            run["name"],
            *(figure(run["metrics"].get(name)) for name in metrics),
            *(upto(run["epsilon"].get(name), 4) for name in adversaries),
            *(upto(run[key]) if key == "delta" else figure(run[key], 3) for key in PLAIN),
            *(short(one["values"][place]) for one in differ),
        )
        for place, run in enumerate(runs)
    ]
    whole = Table(head, tuple(rows), CAPTION)
    return whole.turned if len(runs) <= COLUMNS else whole
