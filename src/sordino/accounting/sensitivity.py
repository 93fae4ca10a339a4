"""Sensitivity of matrix mechanisms: the largest change of C X by one client, over all its participation patterns.

A pattern has at most `max_participations` rounds of T, any two at least `min_separation` apart. A client adds u_t,
||u_t|| <= 1, in each of its rounds, so it changes C X by at most

    max over patterns of sqrt(sum_{s, t in pattern} |G_st|),    G = C^T C

with equality if no inner product of two columns is negative. `toeplitz_sensitivity` is exact for columns that are
nonnegative and never rise, and for columns of one pattern that do not overlap. `sensitivity_bound` is for any matrix:
it maximises over patterns by dynamic programming over their last rounds, is never below the maximum, and equals it
if G_st = 0 for |s - t| >= 3 min_separation. Called by the strategies of `parts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from sordino.errors import PlanError

Floats = NDArray[np.float64]
_ENTRIES = 4_000_000  # of a table of all pairs of gaps; above it only the last gap is stored


def padded(column: Floats, rounds: int) -> Floats:
    """Return the first column of a Toeplitz matrix, padded with zeros to `rounds` entries."""
    return np.concatenate([column[:rounds], np.zeros(max(rounds - len(column), 0))])


def dense(column: Floats, rounds: int) -> Floats:
    """Return the dense lower triangular Toeplitz matrix with this first column."""
    return np.asarray(scipy.linalg.toeplitz(padded(column, rounds), np.zeros(rounds)))


def _earlier(size: Floats, apart: int) -> Floats:
    """Return the table [t, u] of the largest sums of row t over sets of rounds up to u that are `apart` or more."""
    found = np.zeros_like(size)
    for u in range(len(size)):
        before = found[:, u - apart] if u >= apart else 0.0
        found[:, u] = np.maximum(size[:, u] + before, found[:, u - 1] if u else 0.0)
    return found


def _at(table: Floats, t: NDArray[np.int64], u: NDArray[np.int64]) -> Floats:
    return np.where(u >= 0, table[t, np.maximum(u, 0)], 0.0)


def _by_two_gaps(size: Floats, gaps: NDArray[np.int64], most: int) -> float:
    """Return the largest sum of |G| (`size`) over patterns, by dynamic programming.

    F[t, d] is the largest sum over patterns that end with rounds t - d and t; the last d means any gap wider than the
    bands:

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
    """Return the largest sum of |G| (`size`) over patterns, by dynamic programming over their last round t:

    F[t] = G_tt + max_s (F[s] + 2 G_ts + 2 earlier[t, s - apart])
    """
    rounds, diagonal = len(size), size.diagonal()
    t, s = np.ix_(np.arange(rounds), np.arange(rounds))
    gains = 2 * (size + _at(_earlier(size, apart), t, s - apart))
    gains[t - s < apart] = -np.inf
    found, best = diagonal.copy(), float(diagonal.max())
    for _ in range(most - 1):
        found = diagonal + (found + gains).max(axis=1)
        best = max(best, float(found.max()))
    return best


@dataclass(frozen=True)
class Patterns:
    """Participation patterns of one client: at most `max_participations` of `rounds`, `min_separation` apart or more.

    If `periodic`, any two rounds of a pattern differ by a multiple of `min_separation`, as in round robin.
    """

    rounds: int
    max_participations: int
    min_separation: int = 1
    periodic: bool = False

    def __post_init__(self) -> None:
        if min(self.rounds, self.min_separation) < 1 or self.max_participations < 0:
            most, apart = self.max_participations, self.min_separation
            found = f"{self.rounds} rounds, max_participations {most}, separation {apart}"
            needed = "rounds and min_separation of at least 1, max_participations of at least 0"
            raise PlanError("correlated noise", found, needed, "correct the sampler's numbers")

    @property
    def reachable(self) -> int:
        """Largest number of rounds in a pattern, at most 1 + (rounds - 1) // min_separation."""
        return min(self.max_participations, 1 + (self.rounds - 1) // self.min_separation)

    @property
    def earliest(self) -> NDArray[np.int64]:
        """Rounds of the earliest pattern: 0, s, 2 s, ... with s = min_separation."""
        return np.arange(self.reachable, dtype=np.int64) * self.min_separation


def toeplitz_sensitivity(column: Floats, patterns: Patterns) -> float:
    """Return the sensitivity of a lower triangular Toeplitz matrix C, given by its first column; s is min_separation.

    If columns do not overlap (bands <= s), it is sqrt(sum_j ||C[:, j s]||^2) for any entries. If the column is
    nonnegative and falling, the worst pattern is the earliest (Kalinin and Lampert 2024, Theorem 2), and the
    sensitivity is ||sum_j C[:, j s]||. Otherwise the result is `sensitivity_bound`.
    """
    if patterns.reachable == 0:
        return 0.0
    column = np.trim_zeros(column[: patterns.rounds], "b")
    if len(column) <= patterns.min_separation:  # no two overlap; later ones are cut off and count for no more
        left = np.minimum(patterns.rounds - patterns.earliest, len(column))
        return math.sqrt(float(np.cumsum(column**2)[left - 1].sum()))
    if not (np.all(column >= 0.0) and np.all(np.diff(column) <= 0.0)):
        return sensitivity_bound(_gram(column, patterns.rounds), patterns)
    whole, total = padded(column, patterns.rounds), np.zeros(patterns.rounds)
    for start in patterns.earliest:
        total[start:] += whole[: patterns.rounds - start]
    return float(np.linalg.norm(total))


def _gram(column: Floats, rounds: int) -> Floats:
    matrix = dense(column, rounds)
    return np.asarray(matrix.T @ matrix)


def sensitivity_bound(gram: Floats, patterns: Patterns) -> float:
    """Return an upper bound on the sensitivity of any matrix C from `gram` = C^T C.

    It is exact if bands are at most three separations wide. Periodic patterns are enumerated by their first rounds,
    others by dynamic programming. The result is raised by a relative 1e-12 to cover rounding errors.
    """
    if patterns.reachable == 0:
        return 0.0
    size, apart = np.abs(gram), patterns.min_separation
    if patterns.periodic and patterns.max_participations >= 1 + (patterns.rounds - 1) // apart:
        # a pattern may have every round of its period, and more rounds never change C X by less
        found = max(float(size[first::apart, first::apart].sum()) for first in range(apart))
        return math.sqrt(found) * (1 + 1e-12)
    # columns that are `width` apart do not overlap
    width = max((k + 1 for k in range(len(size)) if size.diagonal(k).any()), default=1)
    gaps = np.arange(apart, max(width, apart + 1))
    if len(size) * len(gaps) ** 2 <= _ENTRIES:
        found, exact = _by_two_gaps(size, gaps, patterns.reachable), width <= 3 * apart
    else:
        found, exact = _by_one_gap(size, apart, patterns.reachable), False
    return math.sqrt(found if exact else min(found, _best_rows(size, patterns))) * (1 + 1e-12)


def _best_rows(size: Floats, patterns: Patterns) -> float:
    """Bound the maximum over patterns by letting each row choose its own pattern, which is tighter for wide bands."""
    away = np.abs(np.subtract.outer(np.arange(len(size)), np.arange(len(size))))
    together = np.where((away >= patterns.min_separation) | (away == 0), size, 0.0)  # rounds that one pattern may hold
    most, apart = patterns.reachable, patterns.min_separation
    best = np.zeros(len(size))
    for i, row in enumerate(together):  # the best pattern that includes round i
        before, after = row[: max(i - apart + 1, 0)], row[i + apart :][::-1]
        ends = [_table(side, apart, most - 1)[:, -1] if len(side) else np.zeros(most) for side in (before, after)]
        best[i] = row[i] + max(ends[0][j] + ends[1][most - 1 - j] for j in range(most))
    return float(_table(best, apart, most)[-1].max())


def _table(gains: Floats, apart: int, most: int) -> Floats:
    """Return the table [j, t] of the largest sums of `gains` over at most j rounds up to t, `apart` or more."""
    found = np.zeros((most + 1, len(gains)))
    for j in range(1, most + 1):
        taken = gains.copy()
        if len(gains) > apart:
            taken[apart:] += found[j - 1, :-apart]
        found[j] = np.maximum(np.maximum.accumulate(taken), found[j - 1])
    return found
