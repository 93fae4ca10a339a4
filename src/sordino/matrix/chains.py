"""The most that the pairs of rounds of one pattern add up to, by dynamic programming over the pattern's last rounds.

    max over t_1 < t_2 < ...  of  sum_i G_ii + 2 sum_{i < j} G_ij,    G nonnegative and symmetric

A pattern's rounds are at least `apart` from each other. `earlier[t, u]` is the most that row t of G gathers from rounds
up to u of any pattern: each row chooses for itself, so it is never below what one common pattern gives.

Guarantee: `pairs_of_pattern` is never below the maximum, and equal to it where G_st = 0 for |s - t| >= 3 apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sordino.matrix.toeplitz import Floats

_ENTRIES = 4_000_000  # of a table of all pairs of gaps; above it only the last gap is kept


def pairs_of_pattern(size: Floats, apart: int, most: int) -> float:
    """Of patterns with at most `most` rounds, at least one."""
    gaps = np.arange(apart, max(_width(size), apart + 1))
    if len(size) * len(gaps) ** 2 <= _ENTRIES:
        return _by_two_gaps(size, gaps, most)
    return _by_one_gap(size, apart, most)


def is_exact(size: Floats, apart: int) -> bool:
    """Whether no round sees one before the last two of its pattern, and all pairs of gaps fit."""
    width = _width(size)
    return width <= 3 * apart and len(size) * max(width - apart, 1) ** 2 <= _ENTRIES


def _width(size: Floats) -> int:
    """Rounds so far from each other, or farther, do not see each other."""
    return max((k + 1 for k in range(len(size)) if size.diagonal(k).any()), default=1)


def _earlier(size: Floats, apart: int) -> Floats:
    """[t, u]: the most that row t gathers from rounds up to u."""
    found = np.zeros_like(size)
    for u in range(len(size)):
        before = found[:, u - apart] if u >= apart else 0.0
        found[:, u] = np.maximum(size[:, u] + before, found[:, u - 1] if u else 0.0)
    return found


def _at(table: Floats, t: NDArray[np.int64], u: NDArray[np.int64]) -> Floats:
    """table[t, u], 0 before the first round."""
    return np.where(u >= 0, table[t, np.maximum(u, 0)], 0.0)


def _by_two_gaps(size: Floats, gaps: NDArray[np.int64], most: int) -> float:
    """F[t, d]: the most of patterns that end with rounds t - d and t; the last d stands for gaps in which t sees none.

    F[t, d] = G_tt + 2 G_{t, t-d} + max_e (F[t-d, e] + 2 G_{t, t-d-e} + 2 earlier[t, t-d-e-apart])
    """
    rounds, diagonal, pad = len(size), size.diagonal(), int(gaps[-1])
    t, d, e = np.ix_(np.arange(rounds), gaps, gaps)
    behind = t - d - e
    seen = _at(size, t, behind) + _at(_earlier(size, int(gaps[0])), t, behind - gaps[0])
    gains = np.concatenate([seen, np.zeros((rounds, len(gaps), 1))], axis=2) + _at(size, t, t - d)
    found = np.full((rounds + pad, len(gaps) + 1), -np.inf)  # `pad` rounds before the first hold no pattern
    found[pad:, -1] = diagonal
    best = float(diagonal.max())
    before = np.arange(rounds)[:, None] + pad - gaps
    for _ in range(most - 1):
        near = (found[before] + 2 * gains).max(axis=2)
        far = np.concatenate([np.full(pad + 1, -np.inf), np.maximum.accumulate(found[pad:].max(axis=1))])[:rounds]
        found[pad:] = diagonal[:, None] + np.column_stack([near, far])
        best = max(best, float(found.max()))
    return best


def _by_one_gap(size: Floats, apart: int, most: int) -> float:
    """F[t]: the most of patterns that end with t:  G_tt + max_s (F[s] + 2 G_ts + 2 earlier[t, s - apart])."""
    rounds, diagonal = len(size), size.diagonal()
    t, s = np.ix_(np.arange(rounds), np.arange(rounds))
    gains = 2 * (size + _at(_earlier(size, apart), t, s - apart))
    gains[t - s < apart] = -np.inf
    found, best = diagonal.copy(), float(diagonal.max())
    for _ in range(most - 1):
        found = diagonal + (found + gains).max(axis=1)
        best = max(best, float(found.max()))
    return best
