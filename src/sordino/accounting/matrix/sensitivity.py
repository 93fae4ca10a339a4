"""The most that the pairs of rounds of one pattern add up to, by dynamic programming over the pattern's last rounds.

    max over t_1 < t_2 < ...  of  sum_i G_ii + 2 sum_{i < j} G_ij,    G nonnegative and symmetric

A pattern's rounds are at least `apart` from each other. `earlier[t, u]` is the most that row t of G gathers from rounds
up to u of any pattern: each row chooses for itself, so it is never below what one common pattern gives.

Guarantee: `pairs_of_pattern` is never below the maximum, and equal to it where G_st = 0 for |s - t| >= 3 apart.

Sensitivity: how far one client moves C X, over all patterns of rounds that it may be in.

A pattern has at most `most` rounds of T, any two of them at least `apart` rounds from each other. A client adds u_t,
||u_t|| <= 1, in each of its rounds, so it moves C X by at most

    max_pattern sqrt(sum_{s, t in pattern} |<C[:, s], C[:, t]>|)

with equality where no inner product is negative. `toeplitz_sensitivity` is exact for entries that are nonnegative and
never rise, and for columns of one pattern that do not meet; `sensitivity_bound` is for any matrix, and exact for bands
of at most three times the separation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.matrix.toeplitz import Floats, padded
from sordino.errors import PlanError

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


@dataclass(frozen=True)
class Patterns:
    """`rounds` of a run; one client is in at most `max_participations` of them, any two at least `min_separation` from each other.

    `periodic`: any two are a multiple of `min_separation` from each other, as where clients come in turn.
    """

    rounds: int
    max_participations: int
    min_separation: int = 1
    periodic: bool = False

    def __post_init__(self) -> None:
        if min(self.rounds, self.min_separation) < 1 or self.max_participations < 0:
            found = f"rounds {self.rounds}, most {self.max_participations}, apart {self.min_separation}"
            raise PlanError("correlated noise", found, "rounds and apart of at least 1, most of at least 0")

    @property
    def reachable(self) -> int:
        """The most rounds that fit: never more than 1 + (T - 1) // apart."""
        return min(self.max_participations, 1 + (self.rounds - 1) // self.min_separation)

    @property
    def whole_periods(self) -> bool:
        """Whether a pattern may have every round of its period: more rounds never move C X by less."""
        return self.periodic and self.max_participations >= 1 + (self.rounds - 1) // self.min_separation

    @property
    def earliest(self) -> NDArray[np.int64]:
        """0, apart, 2 apart, ...: the pattern that begins at once and never waits."""
        return np.arange(self.reachable, dtype=np.int64) * self.min_separation


def is_decreasing(column: Floats) -> bool:
    """Whether entries are nonnegative and never rise."""
    return bool(np.all(column >= 0.0) and np.all(np.diff(column) <= 0.0))


def toeplitz_sensitivity(column: Floats, patterns: Patterns) -> float:
    """Of a lower triangular Toeplitz matrix; exact where its first column is nonnegative and never rises.

    Then the worst pattern is the earliest (Kalinin and Lampert 2024, Theorem 2): ||sum_j C[:, j apart]||. Columns that
    do not meet (bands <= apart) need no order: sqrt(sum_j ||C[:, j apart]||^2). All else gets the bound for any matrix.
    """
    if patterns.reachable == 0:
        return 0.0
    column = np.trim_zeros(column[: patterns.rounds], "b")
    if len(column) <= patterns.min_separation:
        return _apart(column, patterns)
    if is_decreasing(column):
        return float(np.linalg.norm(_together(padded(column, patterns.rounds), patterns)))
    return sensitivity_bound(_gram(column, patterns.rounds), patterns)


def _apart(column: Floats, patterns: Patterns) -> float:
    """Columns that do not meet; later ones are cut off at the end of the run and count for no more."""
    energy = np.cumsum(column**2)
    left = np.minimum(patterns.rounds - patterns.earliest, len(column))
    return math.sqrt(float(energy[left - 1].sum()))


def _together(column: Floats, patterns: Patterns) -> Floats:
    total = np.zeros(patterns.rounds)
    for start in patterns.earliest:
        total[start:] += column[: patterns.rounds - start]
    return total


def _gram(column: Floats, rounds: int) -> Floats:
    """C^T C of a Toeplitz matrix."""
    from scipy.linalg import toeplitz

    matrix = toeplitz(padded(column, rounds), np.zeros(rounds))
    return np.asarray(matrix.T @ matrix)


def sensitivity_bound(gram: Floats, patterns: Patterns) -> float:
    """For any C, from C^T C: never below the truth; exact where bands are at most three times the separation.

    The most that sum_{s, t} |G_st| is over patterns (accounting/matrix/sensitivity.py); of a whole period, over its `apart` beginnings.
    """
    if patterns.reachable == 0:
        return 0.0
    size = np.abs(gram)
    if patterns.whole_periods:
        every = patterns.min_separation
        return _root(max(float(size[first::every, first::every].sum()) for first in range(every)))
    found = pairs_of_pattern(size, patterns.min_separation, patterns.reachable)
    return _root(found if is_exact(size, patterns.min_separation) else min(found, _best_rows(size, patterns)))


def _root(squared: float) -> float:
    """The root, above what adding up has rounded off."""
    return math.sqrt(squared) * (1 + 1e-12)


def _best_rows(size: Floats, patterns: Patterns) -> float:
    """At most the best sum, over patterns, of each row's own best pattern: another bound, for wide bands."""
    rows = np.array([_best(np.where(_allowed(i, patterns), row, 0.0), patterns, i) for i, row in enumerate(size)])
    return _best(rows, patterns)


def _allowed(i: int, patterns: Patterns) -> NDArray[np.bool_]:
    """Rounds that may stand beside round i in one pattern, and i itself."""
    away = np.abs(np.arange(patterns.rounds) - i)
    return np.asarray((away >= patterns.min_separation) | (away == 0))


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


def every_pattern(patterns: Patterns) -> list[tuple[int, ...]]:
    """All of them: for small sizes."""
    found: list[tuple[int, ...]] = []
    for count in range(patterns.reachable + 1):
        for chosen in combinations(range(patterns.rounds), count):
            if all(b - a >= patterns.min_separation for a, b in pairwise(chosen)):
                found.append(chosen)
    return found
