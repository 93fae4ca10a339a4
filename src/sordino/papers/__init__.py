"""The papers' tables: what was published, and how to compute ours beside it."""

from __future__ import annotations

from sordino.papers.beyond import TABLES as BEYOND
from sordino.papers.cells import Cell, Job, Table
from sordino.papers.paper_000 import TABLES as PAPER_000
from sordino.papers.paper_000_attack import STUDIES as PAPER_000_ATTACK
from sordino.papers.paper_001 import STUDIES as PAPER_001
from sordino.papers.paper_001_charges import STUDIES as PAPER_001_CHARGES
from sordino.papers.paper_001_scaling import STUDIES as PAPER_001_SCALING
from sordino.papers.paper_002 import STUDIES as PAPER_002
from sordino.papers.paper_003 import TABLES as PAPER_003
from sordino.papers.paper_004 import STUDIES as PAPER_004_STUDIES
from sordino.papers.paper_004 import TABLES as PAPER_004
from sordino.papers.studies import Study

TABLES: tuple[Table, ...] = (*PAPER_000, *PAPER_003, *PAPER_004, *BEYOND)

STUDIES: tuple[Study, ...] = (
    *PAPER_000_ATTACK,
    *PAPER_001,
    *PAPER_001_CHARGES,
    *PAPER_001_SCALING,
    *PAPER_002,
    *PAPER_004_STUDIES,
)

__all__ = ["STUDIES", "TABLES", "Cell", "Job", "Study", "Table"]
