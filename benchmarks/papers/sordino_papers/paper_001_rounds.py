"""Paper 001, acceleration: error against rounds at one epsilon."""

from __future__ import annotations

from collections.abc import Sequence

from sordino_papers.paper_001 import best_of, plans
from sordino_papers.paper_001_silos import SILOS, odd_even
from sordino_papers.studies import Row, gathered, side_by_side

SHORT = (5, 8, 12, 20, 35)
ALGORITHMS = ("minibatch", "accelerated")


def part(algorithm: str, split: int) -> list[Row]:
    """One algorithm at epsilon 12 with fewer rounds, each number of rounds calibrated anew."""
    (task, held), rows = odd_even(split), list[Row]()
    for rounds in SHORT:
        error, _ = best_of(plans(algorithm, SILOS, 12.0, rounds), task, held, split)
        rows.append({"algorithm": algorithm, "rounds": rounds, "error": error})
    return rows


def assembled(parts: Sequence[list[Row]]) -> list[Row]:
    """What the page shows."""
    return gathered([row for some in parts for row in some], ("algorithm", "rounds"), "error")


def race(repeats: int, workers: int) -> list[Row]:
    """Test error against rounds."""
    jobs = [(algorithm, split) for algorithm in ALGORITHMS for split in range(repeats)]
    return assembled(side_by_side(part, jobs, workers))
