"""Tables of text for a terminal, LaTeX and the page, and how to cite what ran. Used by report, compare and sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
