"""Truths for correlated noise by enumeration: every pattern of participations, and the noise of a model per unit."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np

from sordino.accounting.matrix import errors
from sordino.accounting.sensitivity import Floats, Patterns


def every_pattern(patterns: Patterns) -> list[tuple[int, ...]]:
    """All of them: for small sizes."""
    found: list[tuple[int, ...]] = []
    for count in range(patterns.reachable + 1):
        for chosen in combinations(range(patterns.rounds), count):
            if all(b - a >= patterns.min_separation for a, b in pairwise(chosen)):
                found.append(chosen)
    return found


def root_mean_square(column: Floats, rounds: int, sensitivity: float, work: Floats | None = None) -> float:
    """Mean noise of a model per unit of noise multiplier: sensitivity * sqrt(mean of `errors`)."""
    return float(sensitivity * np.sqrt(errors(column, rounds, work).mean()))
