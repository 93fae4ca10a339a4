"""Tables of text for a terminal, LaTeX and the page, the history of a run as one, and how to cite what ran.

Used by report, compare, sweep, and `train`, which returns `Result.history`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sordino.errors import ConfigError
from sordino.outcome import DIAGNOSTIC
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


def is_number(value: Any) -> bool:
    """Whether a figure is a quantity; a flag is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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


def figure(value: Any, digits: int = 4) -> str:
    """A number as a cell; nothing where there is none."""
    return "-" if value is None else f"{value:.{digits}g}" if isinstance(value, float | int) else str(value)


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
        columns = ([row[place] for row in self.rows] for place in range(1, len(self.head)))
        sides = "l" + "".join("r" if all(map(_number, cells)) else "l" for cells in columns)
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
    found = []
    for version in sorted(set(versions)):
        fields = {"author": f"{{{AUTHOR}}}", "title": f"{{{TITLE}}}", "version": version, "note": "Apache-2.0"}
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
        found.append("\n".join([f"@software{{sordino-{version},", *lines, "}"]))
    return "\n\n".join(found)


NOT_PRIVATE = "not_private/"  # before the names of figures of unreleased data


ROWS = 5  # that a repr shows, from the beginning and from the end


class History(list[dict[str, Any]]):
    """Rows of a run: `round`, metrics on public rows, and figures of unreleased data as `not_private/...`."""

    @classmethod
    def of(cls, lines: Iterable[dict[str, Any]]) -> History:
        """From lines as a run's folder has them, with the diagnostics in a table of their own."""
        return cls(
            {name: value for name, value in line.items() if name != DIAGNOSTIC}
            | {f"{NOT_PRIVATE}{name}": value for name, value in line.get(DIAGNOSTIC, {}).items()}
            for line in lines
        )

    @property
    def columns(self) -> list[str]:
        """Every name that a row has, in order of appearance."""
        return list(dict.fromkeys(name for row in self for name in row))

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with one row per round."""
        try:
            from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise ConfigError("no package pandas", "pandas for to_pandas()", "pip install pandas") from None
        return DataFrame(self, columns=self.columns)

    def __repr__(self) -> str:
        public = [name for name in self.columns if not name.startswith(NOT_PRIVATE)]
        hidden = len(self.columns) - len(public)
        rows = [*self] if len(self) <= 2 * ROWS else [*self[:ROWS], {}, *self[-ROWS:]]
        cells = tuple(tuple(short(row.get(name)) if row else "..." for name in public) for row in rows)
        more = f"; {hidden} columns of figures that are not private: history[-1], to_pandas()" if hidden else ""
        return f"{Table(tuple(public), cells).text()}\n{len(self)} rounds{more}"
