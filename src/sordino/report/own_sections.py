"""Sections that other packages add to the report's page, after Sordino's own. `ReportSection` is the base of yours.

    [project.entry-points."sordino.report_sections"]
    my_pkg = "my_pkg.report"        # a module: importing it registers the sections that it defines

A file that `sordino report --with` names may define sections too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from sordino.codec import plugins
from sordino.errors import ConfigError, shorten
from sordino.report.figures import Bars, Chart
from sordino.report.text_table import Table

GROUP = "sordino.report_sections"
Run = dict[str, Any]  # one run as `sordino report --json` prints it


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
    plugins.load(GROUP)
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
