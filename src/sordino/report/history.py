"""The history of a run as a flat table: a row for every round. `train` returns it as `Result.history`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sordino.errors import ConfigError
from sordino.outcome import DIAGNOSTIC
from sordino.report.text_table import Table, short

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
