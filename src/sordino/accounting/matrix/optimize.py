"""Strategies that make the models' noise small: bands and buffers, found by L-BFGS with the gradient written out.

Minimised is  log sens(c)^2 + log mean_t ||row t of A C^-1||^2  over the first column c of C, c_0 = 1. Scaling C changes
neither the noise of the models nor the privacy, so c_0 is free to be 1. With m = A r, r = 1/c (as power series),

    d r = - r r d c,    so    grad_c = - correlate(r r, grad_r),   grad_r = correlate(A, grad_m).

Bands that drift over a run: column s of P is c + sqrt(s / T) d, cut off at the last round, and C = P N^-1.

N has the lengths of P's columns, so all columns of C have length 1 and, where bands do not meet, no choice of c and d
moves the sensitivity. Minimised is  log mean_t ||row t of A N P^-1||^2.  With R = P^-1, M = A N R, L = P^-T N A^T M,

    grad P_{s+j, s} = -2 sum_u L_{s+j, u} R_{s, u} + 2 (sum_u (A^T M)_{s, u} R_{s, u}) P_{s+j, s} / N_s.

The sums over u, fresh noise Z_u, are smooth in u: every block of rounds is read off its middle one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sordino.accounting.matrix.sensitivity import Patterns
from sordino.accounting.matrix.toeplitz import Floats, correlate, inverse, padded, product, square_root

_STEPS = 2000  # of L-BFGS, at most
_TOLERANCE = 1e-12
BAD = 1e3  # above the logarithm of any float


@dataclass(frozen=True)
class Goal:
    """What a strategy is for: patterns of rounds, and what the server makes of a round."""

    patterns: Patterns
    work: Floats  # [T]: Toeplitz; [T, T]: any

    @property
    def rounds(self) -> int:
        return self.patterns.rounds

    def forgetting(self, share: float | None) -> Goal:
        """A_ts (1 - share)^(t - s): training takes back that share of a model's noise in a round; None: 2 / rounds.

        Gradient steps pull noise back where the loss is curved (Koloskova 2023), and where it is flat noise costs
        nothing; in a run that is long enough to learn, little of the first round's is left at the end.
        """
        kept = 1.0 - (2.0 / max(self.rounds, 2) if share is None else share)
        age = np.arange(self.rounds)
        if self.work.ndim == 2:
            age = np.maximum(np.subtract.outer(age, age), 0)
        return replace(self, work=self.work * kept**age)

    def error(self, column: Floats) -> tuple[float, Floats]:
        """mean_t ||row t of A C^-1||^2 and its gradient in c."""
        r = inverse(column, self.rounds)
        if self.work.ndim == 1:
            made, weight = product(self.work, r, self.rounds), np.arange(self.rounds, 0, -1) / self.rounds
            value, slope = float(weight @ made**2), correlate(self.work, 2.0 * weight * made)
        else:
            value, slope = self._dense(r)
        return value, -correlate(product(r, r, self.rounds), slope)

    def _dense(self, r: Floats) -> tuple[float, Floats]:
        from scipy.linalg import toeplitz

        made = self.work @ toeplitz(r, np.zeros(self.rounds))
        slope = self.work.T @ made * (2.0 / self.rounds)
        along = np.array([np.trace(slope, -j) for j in range(self.rounds)])
        return float(np.sum(made**2) / self.rounds), along

    def squared(self, column: Floats) -> tuple[float, Floats]:
        """sens^2 for the earliest pattern, which is the worst where c falls or its bands do not meet; gradient in c."""
        column = padded(column, self.rounds)
        apart = self.patterns.min_separation
        if np.count_nonzero(column) <= apart and not column[apart:].any():
            # entry j counts once for every start that leaves it room before the end
            times = np.array([np.count_nonzero(self.patterns.earliest + j < self.rounds) for j in range(self.rounds)])
            return float(times @ column**2), 2.0 * times * column
        starts, total, slope = self.patterns.earliest, np.zeros(self.rounds), np.zeros(self.rounds)
        for start in starts:
            total[start:] += column[: self.rounds - start]
        for start in starts:
            slope[: self.rounds - start] += 2.0 * total[start:]
        return float(total @ total), slope

    def loss(self, column: Floats) -> tuple[float, Floats]:
        """log sens^2 + log error, and its gradient in c; `BAD` where a step is so bold that C^-1 overflows."""
        with np.errstate(over="ignore", invalid="ignore"):
            (error, by_error), (size, by_size) = self.error(column), self.squared(column)
        if not (np.isfinite(error) and np.isfinite(by_error).all()):
            return BAD, np.zeros(self.rounds)
        return float(np.log(error) + np.log(size)), by_error / error + by_size / size


def _least(
    loss: Callable[[Floats], tuple[float, Floats]], start: Floats, bounds: list[tuple[float, float]] | None = None
) -> Floats:
    from scipy.optimize import minimize

    options = {"maxiter": _STEPS, "maxfun": 4 * _STEPS, "ftol": _TOLERANCE, "gtol": 1e-10}
    return np.asarray(minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x)


def best_bands(goal: Goal, bands: int) -> Floats:
    """The first `bands` entries of the best c; begins at the square root."""
    bands = min(bands, goal.rounds)

    def loss(rest: Floats) -> tuple[float, Floats]:
        value, slope = goal.loss(np.concatenate([[1.0], rest]))
        return value, slope[1:bands]

    return np.concatenate([[1.0], _least(loss, square_root(bands)[1:])])


@dataclass(frozen=True)
class Buffers:
    """c_0 = 1, c_t = sum_j weights_j decays_j^(t-1): a sum of falling powers, so noise needs one vector per buffer."""

    weights: tuple[float, ...]
    decays: tuple[float, ...]

    def column(self, rounds: int) -> Floats:
        powers = np.asarray(self.decays) ** np.arange(max(rounds - 1, 0))[:, None]
        return np.concatenate([[1.0], powers @ np.asarray(self.weights)])[:rounds]


@dataclass(frozen=True)
class _Search:
    """Buffers by unbounded numbers: weights = exp(x), decays = 1 / (1 + exp(-y))."""

    goal: Goal
    buffers: int

    @cached_property
    def start(self) -> Floats:
        """Decays spread evenly in log(1 - decay); weights that begin like the square root, at 1/2 in all."""
        left = np.geomspace(0.5, min(max(10.0 / self.goal.rounds, 1e-4), 0.3), self.buffers)
        return np.concatenate([np.full(self.buffers, np.log(0.5 / self.buffers)), np.log((1 - left) / left)])

    def read(self, x: Floats) -> tuple[Floats, Floats]:
        return np.exp(x[: self.buffers]), 1.0 / (1.0 + np.exp(-x[self.buffers :]))

    def loss(self, x: Floats) -> tuple[float, Floats]:
        weights, decays = self.read(x)
        age = np.arange(self.goal.rounds - 1)[:, None]
        powers = decays**age
        value, slope = self.goal.loss(np.concatenate([[1.0], powers @ weights]))
        by_weight = slope[1:] @ powers
        grown = np.where(age > 0, age * decays ** np.maximum(age - 1, 0), 0.0)
        by_decay = (slope[1:] @ grown) * weights
        return value, np.concatenate([by_weight * weights, by_decay * decays * (1.0 - decays)])


def best_buffers(goal: Goal, buffers: int) -> Buffers:
    """The best sum of so many falling powers. Nonnegative weights keep c falling, where they add up to at most 1."""
    search = _Search(goal, buffers)
    bounds = [(-30.0, 0.0)] * buffers + [(-10.0, 15.0)] * buffers
    weights, decays = search.read(_least(search.loss, search.start, bounds))
    order = np.argsort(decays)
    return Buffers(tuple(float(w) for w in weights[order]), tuple(float(d) for d in decays[order]))


LONGEST = 4096  # rounds up to which a drift is looked for: the noise of all models takes time by rounds^2 bands
_BLOCKS = 32
_DRIFT_STEPS, _DRIFT_TOLERANCE = 100, 1e-7


def drift_shares(rounds: int, ends: int) -> Floats:
    """sqrt(s / T): how far the bands of column s have drifted from c to c + d, in a run of T = `ends` rounds."""
    return np.sqrt(np.arange(rounds) / ends)


def columns(first: Floats, drift: Floats, rounds: int, ends: int) -> Floats:
    """[rounds, bands]: the entries of each column of P from the diagonal down, those below the last round too."""
    return (first + drift_shares(rounds, ends)[:, None] * drift)[:, :rounds]


def lengths(made: Floats, ends: int) -> Floats:
    """N: the length of every column, of which the run ends after `ends` rounds."""
    left = np.minimum(ends - np.arange(len(made)), made.shape[1])
    return np.asarray(np.sqrt(np.cumsum(made**2, axis=1)[np.arange(len(made)), left - 1]))


def solve_columns(made: Floats, right: Floats, back: bool = False) -> Floats:
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


def apply_workload(work: Floats, right: Floats, back: bool = False) -> Floats:
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
        found += np.sum(apply_workload(work, scales[:, None] * solve_columns(made, unit)) ** 2, axis=1)
    return found


@dataclass(frozen=True)
class Search:
    """Over the entries of c and d after the first, which are 1 and 0."""

    goal: Goal
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
            return BAD, np.zeros(len(x))
        return float(np.log(value / self.goal.rounds)), slopes.ravel() / value

    def _square(self, x: Floats) -> tuple[float, Floats]:
        """The sum of squares, and its gradient."""
        rounds, (unit, stands) = self.goal.rounds, self.read
        made = columns(*self.split(x), rounds, rounds)
        size = lengths(made, rounds)
        r = solve_columns(made, unit)
        models = apply_workload(self.goal.work, size[:, None] * r)
        back = apply_workload(self.goal.work, models * stands, back=True)
        slopes = self._along(r, solve_columns(made, size[:, None] * back, back=True))
        slopes += self._lengthened(made, np.sum(back * r, axis=1) / size)
        return float(np.sum(models**2 * stands)), 2.0 * slopes

    def _along(self, r: Floats, adjoint: Floats) -> Floats:
        """-sum_s x_s^i sum_u L_{s+j, u} R_{s, u}  for i = 0, 1 and every band j after the first."""
        size, pace = 2 * self.goal.rounds, drift_shares(self.goal.rounds, self.goal.rounds)[:, None]
        theirs = np.fft.rfft(adjoint, size, axis=0)
        spectra = [np.sum(theirs * np.fft.rfft(one, size, axis=0).conj(), axis=1) for one in (r, pace * r)]
        return np.stack([-np.fft.irfft(one, size)[1 : self.bands] for one in spectra])

    def _lengthened(self, made: Floats, by: Floats) -> Floats:
        """sum_s x_s^i by_s P_{s+j, s}: longer columns have more noise."""
        inside = np.add.outer(np.arange(len(made)), np.arange(made.shape[1])) < len(made)
        pulled = by[:, None] * made * inside
        pace = drift_shares(len(made), len(made))
        return np.stack([pulled.sum(0), pace @ pulled])[:, 1 : self.bands]

    def found(self, start: Floats) -> tuple[Floats, Floats]:
        """c and d, from bands that do not drift."""
        from scipy.optimize import minimize

        begin = np.concatenate([start[1:], np.zeros(self.bands - 1)])
        options = {"maxiter": _DRIFT_STEPS, "ftol": _DRIFT_TOLERANCE}
        return self.split(minimize(self.loss, begin, jac=True, method="L-BFGS-B", options=options).x)
