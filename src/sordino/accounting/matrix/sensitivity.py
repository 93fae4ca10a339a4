"""Sensitivity of a matrix mechanism: how far one client moves C X, over all patterns of rounds it may be in.

A pattern has at most `max_participations` rounds of T, any two at least `min_separation` apart. A client adds u_t,
||u_t|| <= 1, in each of its rounds, so it moves C X by at most

    max over patterns of sqrt(sum_{s, t in pattern} |G_st|),    G = C^T C

with equality where no inner product of two columns is negative. `toeplitz_sensitivity` is exact for entries that are
nonnegative and never rise, and for columns of one pattern that do not overlap. `sensitivity_bound` is for any matrix:
it maximises over patterns by dynamic programming over their last rounds, is never below the maximum, and equals it
where G_st = 0 for |s - t| >= 3 min_separation. Called by the strategies of `parts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.matrix.toeplitz import Floats, padded
from sordino.errors import PlanError

_ENTRIES = 4_000_000  # of a table of all pairs of gaps; above it only the last gap is kept


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


@dataclass(frozen=True)
class Patterns:
    """Participation patterns of one client: at most `max_participations` of `rounds`, `min_separation` apart or more.

    `periodic`: any two are a multiple of `min_separation` from each other, as where clients come in turn.
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
            raise PlanError("correlated noise", found, needed)

    @property
    def reachable(self) -> int:
        """The most rounds that fit: never more than 1 + (T - 1) // min_separation."""
        return min(self.max_participations, 1 + (self.rounds - 1) // self.min_separation)

    @property
    def earliest(self) -> NDArray[np.int64]:
        """0, s, 2 s, ..., s = min_separation: the pattern that begins at once and never waits."""
        return np.arange(self.reachable, dtype=np.int64) * self.min_separation


def toeplitz_sensitivity(column: Floats, patterns: Patterns) -> float:
    """Of a lower triangular Toeplitz matrix; exact where its first column is nonnegative and never rises.

    Then the worst pattern is the earliest (Kalinin and Lampert 2024, Theorem 2): ||sum_j C[:, j s]||, s the
    min_separation. Columns that do not overlap (bands <= s) need no order: sqrt(sum_j ||C[:, j s]||^2). All else gets
    the bound for any matrix.
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
    """C^T C of a Toeplitz matrix."""
    from scipy.linalg import toeplitz

    matrix = toeplitz(padded(column, rounds), np.zeros(rounds))
    return np.asarray(matrix.T @ matrix)


def sensitivity_bound(gram: Floats, patterns: Patterns) -> float:
    """Sensitivity of any C, from C^T C: never below the truth; exact where bands are at most three separations wide.

    Of patterns that hold every round of their period, the most over the first rounds; of others by dynamic programming.
    The root is raised by 1e-12, above what adding up has rounded off.
    """
    if patterns.reachable == 0:
        return 0.0
    size, apart = np.abs(gram), patterns.min_separation
    if patterns.periodic and patterns.max_participations >= 1 + (patterns.rounds - 1) // apart:
        # a pattern may have every round of its period, and more rounds never move C X by less
        found = max(float(size[first::apart, first::apart].sum()) for first in range(apart))
        return math.sqrt(found) * (1 + 1e-12)
    # rounds so far apart never meet
    width = max((k + 1 for k in range(len(size)) if size.diagonal(k).any()), default=1)
    gaps = np.arange(apart, max(width, apart + 1))
    if len(size) * len(gaps) ** 2 <= _ENTRIES:
        found, exact = _by_two_gaps(size, gaps, patterns.reachable), width <= 3 * apart
    else:
        found, exact = _by_one_gap(size, apart, patterns.reachable), False
    return math.sqrt(found if exact else min(found, _best_rows(size, patterns))) * (1 + 1e-12)


def _best_rows(size: Floats, patterns: Patterns) -> float:
    """At most the best sum, over patterns, of each row's own best pattern: another bound, for wide bands."""
    away = np.abs(np.subtract.outer(np.arange(len(size)), np.arange(len(size))))
    together = np.where((away >= patterns.min_separation) | (away == 0), size, 0.0)  # rounds that one pattern may hold
    return _best(np.array([_best(row, patterns, i) for i, row in enumerate(together)]), patterns)


def _best(gains: Floats, patterns: Patterns, through: int | None = None) -> float:
    """The most that one pattern gathers, of gains per round; with `through`, of patterns with that round in them."""
    if through is None:
        return float(_table(gains, patterns, patterns.reachable)[-1].max())
    before = _table(gains[: max(through - patterns.min_separation + 1, 0)], patterns, patterns.reachable - 1)
    after = _table(gains[through + patterns.min_separation :][::-1], patterns, patterns.reachable - 1)
    ends = [table[:, -1] if table.shape[1] else np.zeros(len(table)) for table in (before, after)]
    return float(gains[through] + max(ends[0][j] + ends[1][len(ends[1]) - 1 - j] for j in range(len(ends[0]))))


def _table(gains: Floats, patterns: Patterns, most: int) -> Floats:
    """[j, t]: the most that at most j rounds up to t gather."""
    found = np.zeros((most + 1, len(gains)))
    for j in range(1, most + 1):
        taken = gains.copy()
        if len(gains) > patterns.min_separation:
            taken[patterns.min_separation :] += found[j - 1, : -patterns.min_separation]
        found[j] = np.maximum.accumulate(taken)
        found[j] = np.maximum(found[j], found[j - 1])
    return found
