"""Bands that drift over a run: column s of P is c + sqrt(s / T) d, cut off at the last round, and C = P N^-1.

N has the lengths of P's columns, so all columns of C have length 1 and, where bands do not meet, no choice of c and d
moves the sensitivity. Minimised is  log mean_t ||row t of A N P^-1||^2.  With R = P^-1, M = A N R, L = P^-T N A^T M,

    grad P_{s+j, s} = -2 sum_u L_{s+j, u} R_{s, u} + 2 (sum_u (A^T M)_{s, u} R_{s, u}) P_{s+j, s} / N_s.

The sums over u, fresh noise Z_u, are smooth in u: every block of rounds is read off its middle one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sordino.matrix import optimise
from sordino.matrix.toeplitz import Floats

LONGEST = 4096  # rounds up to which a drift is looked for: the noise of all models takes time by rounds^2 bands
_BLOCKS = 32
_STEPS, _ENOUGH = 100, 1e-7


def paces(rounds: int, ends: int) -> Floats:
    """sqrt(s / T): how far the bands of column s have drifted from c to c + d, in a run of T = `ends` rounds."""
    return np.sqrt(np.arange(rounds) / ends)


def columns(first: Floats, drift: Floats, rounds: int, ends: int) -> Floats:
    """[rounds, bands]: the entries of each column of P from the diagonal down, those below the last round too."""
    return (first + paces(rounds, ends)[:, None] * drift)[:, :rounds]


def lengths(made: Floats, ends: int) -> Floats:
    """N: the length of every column, of which the run ends after `ends` rounds."""
    left = np.minimum(ends - np.arange(len(made)), made.shape[1])
    return np.asarray(np.sqrt(np.cumsum(made**2, axis=1)[np.arange(len(made)), left - 1]))


def solved(made: Floats, right: Floats, back: bool = False) -> Floats:
    """P^-1 right, or with `back` P^-T right; the diagonal is 1."""
    from scipy.linalg.lapack import dtbtrs

    found, wrong = dtbtrs(made.T, right, uplo="L", trans="T" if back else "N", diag="U")
    assert wrong == 0
    return np.asarray(found)


def matrix(made: Floats) -> Floats:
    """P itself: for small sizes."""
    rounds, found = len(made), np.zeros((len(made), len(made)))
    for j in range(made.shape[1]):
        found[np.arange(j, rounds), np.arange(rounds - j)] = made[: rounds - j, j]
    return found


def worked(work: Floats, right: Floats, back: bool = False) -> Floats:
    """A right, or with `back` A^T right; `work` is A, or its first column."""
    if work.ndim == 2:
        return np.asarray((work.T if back else work) @ right)
    size = 2 * len(right)
    whole = np.fft.rfft(work[: len(right)], size)[:, None]
    made = np.fft.rfft(right, size, axis=0) * (whole.conj() if back else whole)
    return np.asarray(np.fft.irfft(made, size, axis=0)[: len(right)])


def errors(made: Floats, scales: Floats, work: Floats) -> Floats:
    """The variance of every model's noise, row t of A N P^-1, for Z of variance 1; so many Z at a time."""
    found, every = np.zeros(len(made)), np.arange(len(made))
    for some in np.array_split(every, -(-len(made) // 256)):
        unit = (every[:, None] == some).astype(np.float64)
        found += np.sum(worked(work, scales[:, None] * solved(made, unit)) ** 2, axis=1)
    return found


@dataclass(frozen=True)
class Search:
    """Over the entries of c and d after the first, which are 1 and 0."""

    goal: optimise.Goal
    bands: int

    @cached_property
    def read(self) -> tuple[Floats, Floats]:
        """[T, blocks]: the fresh noise of each block's middle round; [blocks]: the rounds it stands for."""
        blocks = np.array_split(np.arange(self.goal.rounds), min(_BLOCKS, self.goal.rounds))
        unit = np.zeros((self.goal.rounds, len(blocks)), order="F")
        unit[[block[len(block) // 2] for block in blocks], np.arange(len(blocks))] = 1.0
        return unit, np.array([float(len(block)) for block in blocks])

    def split(self, x: Floats) -> tuple[Floats, Floats]:
        first, drift = x.reshape(2, -1)
        return np.concatenate([[1.0], first]), np.concatenate([[0.0], drift])

    def loss(self, x: Floats) -> tuple[float, Floats]:
        """log of the mean square, and its gradient in the entries of c and d after the first."""
        with np.errstate(over="ignore", invalid="ignore"):
            value, slopes = self._square(x)
        if not (np.isfinite(value) and np.isfinite(slopes).all()):
            return optimise.BAD, np.zeros(len(x))
        return float(np.log(value / self.goal.rounds)), slopes.ravel() / value

    def _square(self, x: Floats) -> tuple[float, Floats]:
        """The sum of squares, and its gradient."""
        rounds, (unit, stands) = self.goal.rounds, self.read
        made = columns(*self.split(x), rounds, rounds)
        size = lengths(made, rounds)
        r = solved(made, unit)
        models = worked(self.goal.work, size[:, None] * r)
        back = worked(self.goal.work, models * stands, back=True)
        slopes = self._along(r, solved(made, size[:, None] * back, back=True))
        slopes += self._lengthened(made, np.sum(back * r, axis=1) / size)
        return float(np.sum(models**2 * stands)), 2.0 * slopes

    def _along(self, r: Floats, adjoint: Floats) -> Floats:
        """-sum_s x_s^i sum_u L_{s+j, u} R_{s, u}  for i = 0, 1 and every band j after the first."""
        size, pace = 2 * self.goal.rounds, paces(self.goal.rounds, self.goal.rounds)[:, None]
        theirs = np.fft.rfft(adjoint, size, axis=0)
        spectra = [np.sum(theirs * np.fft.rfft(one, size, axis=0).conj(), axis=1) for one in (r, pace * r)]
        return np.stack([-np.fft.irfft(one, size)[1 : self.bands] for one in spectra])

    def _lengthened(self, made: Floats, by: Floats) -> Floats:
        """sum_s x_s^i by_s P_{s+j, s}: longer columns have more noise."""
        inside = np.add.outer(np.arange(len(made)), np.arange(made.shape[1])) < len(made)
        pulled = by[:, None] * made * inside
        pace = paces(len(made), len(made))
        return np.stack([pulled.sum(0), pace @ pulled])[:, 1 : self.bands]

    def found(self, start: Floats) -> tuple[Floats, Floats]:
        """c and d, from bands that do not drift."""
        from scipy.optimize import minimize

        begin = np.concatenate([start[1:], np.zeros(self.bands - 1)])
        options = {"maxiter": _STEPS, "ftol": _ENOUGH}
        return self.split(minimize(self.loss, begin, jac=True, method="L-BFGS-B", options=options).x)
