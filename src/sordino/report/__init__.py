"""Reports of runs: page, comparison, figures and trackers. Subclass `ReportSection` or `TrackerBackend` to extend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino import lazy

if TYPE_CHECKING:
    from sordino.report.figures import Axis as Axis
    from sordino.report.figures import Bars as Bars
    from sordino.report.figures import Chart as Chart
    from sordino.report.figures import Series as Series
    from sordino.report.page import ReportSection as ReportSection
    from sordino.report.text_table import Table as Table
    from sordino.report.trackers import Tracker as Tracker
    from sordino.report.trackers import TrackerBackend as TrackerBackend

__all__, __getattr__ = lazy.exports(__name__, __file__)
