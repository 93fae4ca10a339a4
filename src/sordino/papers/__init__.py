"""The papers' tables: what was published, and how to compute ours beside it."""

from __future__ import annotations

from sordino.papers.beyond import TABLES as BEYOND
from sordino.papers.cells import Cell, Job, Table
from sordino.papers.paper_000 import TABLES as PAPER_000
from sordino.papers.paper_003 import TABLES as PAPER_003

TABLES: tuple[Table, ...] = (*PAPER_000, *PAPER_003, *BEYOND)

__all__ = ["TABLES", "Cell", "Job", "Table"]
