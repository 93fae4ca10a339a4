"""The papers' tables: what was published, and how to compute ours beside it."""

from __future__ import annotations

from sordino_papers.beyond import TABLES as BEYOND
from sordino_papers.beyond_users import STUDIES as BEYOND_USERS
from sordino_papers.bounds import STUDIES as BOUNDS
from sordino_papers.cells import Cell, Job, Table
from sordino_papers.correlated import STUDIES as CORRELATED
from sordino_papers.crossing import STUDIES as CROSSING
from sordino_papers.full import TABLES as FULL
from sordino_papers.paper_000 import TABLES as PAPER_000
from sordino_papers.paper_000_attack import STUDIES as PAPER_000_ATTACK
from sordino_papers.paper_000_closed import STUDIES as CLOSED
from sordino_papers.paper_000_curves import STUDIES as PAPER_000_CURVES
from sordino_papers.paper_000_lstm import STUDIES as PAPER_000_LSTM
from sordino_papers.paper_000_nets import TABLES as PAPER_000_NETS
from sordino_papers.paper_000_orders import STUDIES as PAPER_000_ORDERS
from sordino_papers.paper_000_regime import TABLES as PAPER_000_REGIME
from sordino_papers.paper_000_regime_lstm import STUDIES as PAPER_000_REGIME_LSTM
from sordino_papers.paper_000_small import TABLES as PAPER_000_SMALL
from sordino_papers.paper_000_spectra import STUDIES as PAPER_000_SPECTRA
from sordino_papers.paper_000_tuning import STUDIES as PAPER_000_TUNING
from sordino_papers.paper_001_charges import STUDIES as PAPER_001_CHARGES
from sordino_papers.paper_001_claims import STUDIES as PAPER_001
from sordino_papers.paper_001_lower import STUDIES as PAPER_001_LOWER
from sordino_papers.paper_001_published import STUDIES as PAPER_001_PUBLISHED
from sordino_papers.paper_001_scaling import STUDIES as PAPER_001_SCALING
from sordino_papers.paper_002_claims import STUDIES as PAPER_002
from sordino_papers.paper_002_theory import STUDIES as PAPER_002_THEORY
from sordino_papers.paper_002_writers import STUDIES as PAPER_002_WRITERS
from sordino_papers.paper_003_ablations import STUDIES as PAPER_003_ABLATIONS
from sordino_papers.paper_003_claimed import STUDIES as PAPER_003_CLAIMED
from sordino_papers.paper_003_fair import STUDIES as PAPER_003
from sordino_papers.paper_003_landscape import STUDIES as PAPER_003_LANDSCAPE
from sordino_papers.paper_003_protocol import STUDIES as PAPER_003_PROTOCOL
from sordino_papers.paper_003_regime import STUDIES as PAPER_003_REGIME
from sordino_papers.paper_003_tuning import STUDIES as PAPER_003_TUNING
from sordino_papers.paper_004 import TABLES as PAPER_004
from sordino_papers.paper_004_cnn import STUDIES as PAPER_004_CNN
from sordino_papers.paper_004_protocol import STUDIES as PAPER_004_PROTOCOL
from sordino_papers.paper_004_regime import STUDIES as PAPER_004_REGIME
from sordino_papers.rounding import STUDIES as ROUNDING
from sordino_papers.studies import Study

TABLES: tuple[Table, ...] = (
    *PAPER_000,
    *PAPER_000_NETS,
    *PAPER_000_SMALL,
    *PAPER_000_REGIME,
    *PAPER_004,
    *BEYOND,
    *FULL,
)

STUDIES: tuple[Study, ...] = (
    *PAPER_000_ATTACK,
    *PAPER_000_CURVES,
    *PAPER_000_LSTM,
    *PAPER_000_REGIME_LSTM,
    *PAPER_000_TUNING,
    *PAPER_000_SPECTRA,
    *PAPER_000_ORDERS,
    *CLOSED,
    *ROUNDING,
    *PAPER_001,
    *PAPER_001_PUBLISHED,
    *PAPER_001_CHARGES,
    *PAPER_001_SCALING,
    *PAPER_001_LOWER,
    *PAPER_002,
    *PAPER_002_WRITERS,
    *PAPER_002_THEORY,
    *PAPER_003,
    *PAPER_003_REGIME,
    *PAPER_003_TUNING,
    *PAPER_003_LANDSCAPE,
    *PAPER_003_ABLATIONS,
    *PAPER_003_CLAIMED,
    *PAPER_003_PROTOCOL,
    *PAPER_004_CNN,
    *PAPER_004_REGIME,
    *PAPER_004_PROTOCOL,
    *BOUNDS,
    *CORRELATED,
    *CROSSING,
    *BEYOND_USERS,
)

__all__ = ["STUDIES", "TABLES", "Cell", "Job", "Study", "Table"]
