"""Strategies that make the models' noise small: bands and buffers, found by L-BFGS with the gradient written out.

Minimised is  log sens(c)^2 + log mean_t ||row t of A C^-1||^2  over the first column c of C, c_0 = 1. Scaling C changes
neither the noise of the models nor the privacy, so c_0 is free to be 1. With m = A r, r = 1/c (as power series),

    d r = - r r d c,    so    grad_c = - correlate(r r, grad_r),   grad_r = correlate(A, grad_m).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sordino.matrix.patterns import Patterns
from sordino.matrix.toeplitz import Floats, correlate, inverse, padded, product, square_root

_STEPS = 2000  # of L-BFGS, at most
_ENOUGH = 1e-12
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
        value, slope = self._toeplitz(r) if self.work.ndim == 1 else self._dense(r)
        return value, -correlate(product(r, r, self.rounds), slope)

    def _toeplitz(self, r: Floats) -> tuple[float, Floats]:
        made = product(self.work, r, self.rounds)
        weight = np.arange(self.rounds, 0, -1) / self.rounds
        return float(weight @ made**2), correlate(self.work, 2.0 * weight * made)

    def _dense(self, r: Floats) -> tuple[float, Floats]:
        from scipy.linalg import toeplitz

        made = self.work @ toeplitz(r, np.zeros(self.rounds))
        slope = self.work.T @ made * (2.0 / self.rounds)
        along = np.array([np.trace(slope, -j) for j in range(self.rounds)])
        return float(np.sum(made**2) / self.rounds), along

    def squared(self, column: Floats) -> tuple[float, Floats]:
        """sens^2 for the earliest pattern, which is the worst where c falls or its bands do not meet; gradient in c."""
        column = padded(column, self.rounds)
        if np.count_nonzero(column) <= self.patterns.apart and not column[self.patterns.apart :].any():
            return self._apart(column)
        starts, total, slope = self.patterns.earliest, np.zeros(self.rounds), np.zeros(self.rounds)
        for start in starts:
            total[start:] += column[: self.rounds - start]
        for start in starts:
            slope[: self.rounds - start] += 2.0 * total[start:]
        return float(total @ total), slope

    def _apart(self, column: Floats) -> tuple[float, Floats]:
        """Entry j counts once for every start that leaves it room before the end."""
        times = np.array([np.count_nonzero(self.patterns.earliest + j < self.rounds) for j in range(self.rounds)])
        return float(times @ column**2), 2.0 * times * column

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

    options = {"maxiter": _STEPS, "maxfun": 4 * _STEPS, "ftol": _ENOUGH, "gtol": 1e-10}
    return np.asarray(minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x)


def banded(goal: Goal, bands: int) -> Floats:
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


def buffered(goal: Goal, buffers: int) -> Buffers:
    """The best sum of so many falling powers. Nonnegative weights keep c falling, where they add up to at most 1."""
    search = _Search(goal, buffers)
    bounds = [(-30.0, 0.0)] * buffers + [(-10.0, 15.0)] * buffers
    weights, decays = search.read(_least(search.loss, search.start, bounds))
    order = np.argsort(decays)
    return Buffers(tuple(float(w) for w in weights[order]), tuple(float(d) for d in decays[order]))
