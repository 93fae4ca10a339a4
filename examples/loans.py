"""Loans of four sites, made up: what an extract of the US Small Business Administration's file looks like.

    python examples/loans.py            writes sites/CA.csv, FL.csv, NY.csv, TX.csv (private) and test.csv (public)
    sordino run examples/loans.toml --out runs/loans

Every site has its own number of loans and its own share of defaults; amounts go from 1,000 to some millions, and some
values are missing, as in the real file. Nothing here is anybody's loan.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

SIZES = {"CA": 3000, "FL": 1500, "NY": 2000, "TX": 1000}
TEST = 2000
HEADER = (
    *("LoanNr", "State", "NAICS", "Term", "NoEmp", "NewExist", "UrbanRural", "DisbursementGross", "SBA_Appv"),
    "MIS_Status",
)
SECTORS = ("11", "23", "31", "42", "44", "48", "54", "62", "72", "81")
RISK = dict(zip(SECTORS, (-0.9, 0.3, -0.2, 0.0, 0.3, 0.5, -0.1, -0.9, 0.4, 0.1), strict=True))


def loans(state: str, count: int, rng: np.random.Generator) -> list[list[str]]:
    """Rows of one site: a short term and a small share of guarantee are what default looks like."""
    term = np.where(rng.random(count) < 0.3, rng.integers(120, 301, count), rng.integers(6, 100, count))
    staff = np.minimum(rng.lognormal(1.6, 1.1, count).astype(int), 900)
    new, urban = rng.choice([1, 2], count, p=[0.72, 0.28]), rng.choice([0, 1, 2], count, p=[0.3, 0.55, 0.15])
    gross = np.round(np.exp(rng.normal(11.2, 1.2, count)) + 1000)
    share, sector = rng.choice([0.5, 0.75, 0.85], count, p=[0.45, 0.35, 0.2]), rng.choice(SECTORS, count)
    score = 2.2 - 0.055 * term + 0.6 * (new == 2) + 0.5 * (urban == 1) - 0.01 * staff - 1.5 * (share - 0.5)
    score += np.array([RISK[one] for one in sector]) + {"CA": 0.3, "FL": 0.7, "NY": -0.1, "TX": 0.0}[state]
    default = rng.random(count) < 1 / (1 + np.exp(-1.6 * score))
    absent = rng.random((2, count)) < 0.02
    return [
        [
            f"{state}{i:06d}", state, str(sector[i]), str(term[i]), "" if absent[0, i] else str(staff[i]),
            "" if absent[1, i] else str(new[i]), str(urban[i]), f"{gross[i]:.0f}", f"{gross[i] * share[i]:.0f}",
            "CHGOFF" if default[i] else "P I F",
        ]
        for i in range(count)
    ]  # fmt: skip


def write(folder: Path, seed: int = 1) -> None:
    """Four private files and a public one."""
    rng, sites = np.random.default_rng(seed), folder / "sites"
    sites.mkdir(parents=True, exist_ok=True)
    for state, count in SIZES.items():
        _write(sites / f"{state}.csv", loans(state, count, rng))
    _write(folder / "test.csv", [row for state in SIZES for row in loans(state, TEST // len(SIZES), rng)])


def _write(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
