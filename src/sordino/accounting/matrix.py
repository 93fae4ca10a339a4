"""Matrix mechanisms: strategy matrices C of correlated noise C^-1 Z, and their optimisation. Called by `parts`.

A run releases C X + Z, row by row, where row t of X is the sum of round t's messages and Z is white noise; the models
are post-processing of it. Equivalently, X + C^-1 Z is each round's sum with noise that later rounds partly cancel. One
client changes C X by at most  ||sum_{t in its rounds} C[:, t] u_t||,  ||u_t|| <= 1, the sensitivity (`sensitivity`).
C is lower triangular and, except for the binary tree, Toeplitz, given by its first column c. The server's workload A
maps the sums of T rounds to the models.

Bands and buffers are found by L-BFGS with an explicit gradient. The objective is

    log sens(c)^2 + log mean_t ||row t of A C^-1||^2,    c_0 = 1,

as scaling C changes neither the noise of the models nor the privacy. With m = A r, r = 1/c (as power series),

    d r = - r r d c,    so    grad_c = - correlate(r r, grad_r),   grad_r = correlate(A, grad_m).

Bands that drift over a run: column s of P is c + sqrt(s / T) d, cut off at the last round, and C = P N^-1, where N has
the lengths of P's columns. So all columns of C have length 1 and, if bands do not overlap, no choice of c and d changes
the sensitivity. The objective is  log mean_t ||row t of A N P^-1||^2.  With R = P^-1, M = A N R, L = P^-T N A^T M,

    grad P_{s+j, s} = -2 sum_u L_{s+j, u} R_{s, u} + 2 (sum_u (A^T M)_{s, u} R_{s, u}) P_{s+j, s} / N_s.

The terms of the sums over u are smooth in u, so each block of rounds is approximated by its middle round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy  # its submodules load when first used

from sordino.accounting.sensitivity import Floats, Patterns, dense, padded

_STEPS = 2000  # of L-BFGS, at most
_TOLERANCE = 1e-12
BAD = 1e3  # above the logarithm of any float
LONGEST = 4096  # rounds up to which a drift is searched: the noise of all models takes time by rounds^2 bands
_BLOCKS = 32
_DRIFT_STEPS, _DRIFT_TOLERANCE = 100, 1e-7


def product(a: Floats, b: Floats, rounds: int) -> Floats:
    """Return the first column of the product of two lower triangular Toeplitz matrices, by FFT."""
    size = 1 << max(2 * rounds - 1, 1).bit_length()
    both = np.fft.rfft(a[:rounds], size) * np.fft.rfft(b[:rounds], size)
    return np.asarray(np.fft.irfft(both, size)[:rounds])


def correlate(a: Floats, b: Floats) -> Floats:
    """Return the correlation x of two vectors: x_s = sum_{u >= s} a_{u-s} b_u."""
    return product(a, b[::-1], len(b))[::-1]


def inverse(column: Floats, rounds: int) -> Floats:
    """Return the first column r of C^-1 from that of C, c: r_0 = 1/c_0, r_t = -sum_{j >= 1} c_j r_{t-j} / c_0."""
    bands = min(len(column), rounds)
    if bands == 1:
        return padded(np.array([1.0 / column[0]]), rounds)
    start = np.zeros(rounds)
    start[0] = 1.0
    return np.asarray(scipy.signal.lfilter([1.0], column[:bands], start), dtype=np.float64)


def square_root(rounds: int) -> Floats:
    """Return the first column c of the square root of the prefix-sum matrix (Fichtenberger et al. 2023).

    c_0 = 1,   c_t = c_{t-1} (2t - 1)/(2t)
    """
    steps = np.arange(1, rounds, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])


def workload(rounds: int, momentum: float = 0.0, decay: float = 0.0) -> Floats:
    """Return the first column a of the server's workload A: the model after round t is sum_{s <= t} a_{t-s} x_s.

    x_s is the sum of round s. With a_{-1} = v_{-1} = 0,

    a_t = a_{t-1} + v_t,   v_t = momentum v_{t-1} + [t = 0] - decay a_{t-1},   decay = weight decay times step size.

    Plain SGD gives 1, 1, 1, ...; heavy-ball momentum m alone gives 1, 1 + m, 1 + m + m^2, ...
    """
    start = np.zeros(rounds)
    start[0] = 1.0
    return np.asarray(scipy.signal.lfilter([1.0], [1.0, decay - 1.0 - momentum, momentum], start), dtype=np.float64)


def errors(column: Floats, rounds: int, work: Floats | None = None) -> Floats:
    """Return the noise variance of each model, ||row t of A C^-1||^2, for noise Z of variance 1.

    `column` is the first column of C, `work` that of the workload A, by default prefix sums.
    """
    work = np.ones(rounds) if work is None else work
    made = product(work, inverse(column, rounds), rounds)
    return np.asarray(np.cumsum(made**2))


# ---- optimised strategies --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """Objective of the strategy optimisation: participation patterns, and the workload A (its first column or all)."""

    patterns: Patterns
    work: Floats

    @property
    def rounds(self) -> int:
        return self.patterns.rounds

    def forgetting(self, share: float | None) -> Goal:
        """Return the objective with workload A_ts (1 - share)^(t - s), by default with share 2 / rounds.

        It models that each round of training removes this share of earlier noise: gradient steps reduce noise in
        directions in which the loss is curved (Koloskova et al. 2023), and noise in flat directions does no harm.
        """
        remaining = 1.0 - (2.0 / max(self.rounds, 2) if share is None else share)
        age = np.arange(self.rounds)
        if self.work.ndim == 2:
            age = np.maximum(np.subtract.outer(age, age), 0)
        return replace(self, work=self.work * remaining**age)

    def error(self, column: Floats) -> tuple[float, Floats]:
        """Return mean_t ||row t of A C^-1||^2 and its gradient in c, the first column of C (`column`)."""
        r = inverse(column, self.rounds)
        if self.work.ndim == 1:
            made, weight = product(self.work, r, self.rounds), np.arange(self.rounds, 0, -1) / self.rounds
            value, slope = float(weight @ made**2), correlate(self.work, 2.0 * weight * made)
        else:
            made = self.work @ dense(r, self.rounds)
            by_entry = self.work.T @ made * (2.0 / self.rounds)
            slope = np.array([np.trace(by_entry, -j) for j in range(self.rounds)])
            value = float(np.sum(made**2) / self.rounds)
        return value, -correlate(product(r, r, self.rounds), slope)

    def squared(self, column: Floats) -> tuple[float, Floats]:
        """Return the squared sensitivity of the earliest (worst) pattern, and its gradient in c (`column`)."""
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
        """Return the objective log sens^2 + log error and its gradient in c; its value is `BAD` if C^-1 overflows."""
        with np.errstate(over="ignore", invalid="ignore"):
            (error, by_error), (size, by_size) = self.error(column), self.squared(column)
        if not (np.isfinite(error) and np.isfinite(by_error).all()):
            return BAD, np.zeros(self.rounds)
        return float(np.log(error) + np.log(size)), by_error / error + by_size / size


def _least(
    loss: Callable[[Floats], tuple[float, Floats]], start: Floats, bounds: list[tuple[float, float]] | None = None
) -> Floats:
    options = {"maxiter": _STEPS, "maxfun": 4 * _STEPS, "ftol": _TOLERANCE, "gtol": 1e-10}
    found = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return np.asarray(found.x)


def best_bands(goal: Goal, bands: int) -> Floats:
    """Return the optimal first column c of C with `bands` entries; the search begins at `square_root`."""
    bands = min(bands, goal.rounds)

    def loss(rest: Floats) -> tuple[float, Floats]:
        value, slope = goal.loss(np.concatenate([[1.0], rest]))
        return value, slope[1:bands]

    return np.concatenate([[1.0], _least(loss, square_root(bands)[1:])])


@dataclass(frozen=True)
class Buffers:
    """Strategy with c_0 = 1, c_t = sum_j weights_j decays_j^(t-1), whose noise needs one state vector per term."""

    weights: tuple[float, ...]
    decays: tuple[float, ...]

    def column(self, rounds: int) -> Floats:
        powers = np.asarray(self.decays) ** np.arange(max(rounds - 1, 0))[:, None]
        return np.concatenate([[1.0], powers @ np.asarray(self.weights)])[:rounds]


def best_buffers(goal: Goal, buffers: int) -> Buffers:
    """Return the optimal strategy with this number of `buffers`; positive weights with sum at most 1 make c decrease.

    The search is over numbers x, y with weights = exp(x), decays = 1 / (1 + exp(-y)). It begins with decays spread
    evenly in log(1 - decay), and with weights that add up to 1/2, as c_1 of `square_root`.
    """

    def read(x: Floats) -> tuple[Floats, Floats]:
        return np.exp(x[:buffers]), 1.0 / (1.0 + np.exp(-x[buffers:]))

    def loss(x: Floats) -> tuple[float, Floats]:
        weights, decays = read(x)
        age = np.arange(goal.rounds - 1)[:, None]
        powers = decays**age
        value, slope = goal.loss(np.concatenate([[1.0], powers @ weights]))
        by_weight = slope[1:] @ powers
        grown = np.where(age > 0, age * decays ** np.maximum(age - 1, 0), 0.0)
        by_decay = (slope[1:] @ grown) * weights
        return value, np.concatenate([by_weight * weights, by_decay * decays * (1.0 - decays)])

    left = np.geomspace(0.5, min(max(10.0 / goal.rounds, 1e-4), 0.3), buffers)
    start = np.concatenate([np.full(buffers, np.log(0.5 / buffers)), np.log((1 - left) / left)])
    weights, decays = read(_least(loss, start, [(-30.0, 0.0)] * buffers + [(-10.0, 15.0)] * buffers))
    order = np.argsort(decays)
    return Buffers(tuple(float(w) for w in weights[order]), tuple(float(d) for d in decays[order]))


def drift_shares(rounds: int, ends: int) -> Floats:
    """Return sqrt(s / T) for each column s, the weight of d in that column of P, with T = `ends` rounds."""
    return np.sqrt(np.arange(rounds) / ends)


def columns(first: Floats, drift: Floats, rounds: int, ends: int) -> Floats:
    """Return the bands of P as [rounds, bands]: row s has column s from the diagonal down, also past the last round."""
    return (first + drift_shares(rounds, ends)[:, None] * drift)[:, :rounds]


def lengths(made: Floats, ends: int) -> Floats:
    """Return N, the 2-norms of the columns of P (bands `made`), cut off after `ends` rounds."""
    left = np.minimum(ends - np.arange(len(made)), made.shape[1])
    return np.asarray(np.sqrt(np.cumsum(made**2, axis=1)[np.arange(len(made)), left - 1]))


def solve_columns(made: Floats, right: Floats, back: bool = False) -> Floats:
    """Return P^-1 right or, with `back`, P^-T right; `made` has the bands of P, whose diagonal is 1."""
    found, wrong = scipy.linalg.lapack.dtbtrs(made.T, right, uplo="L", trans="T" if back else "N", diag="U")
    assert wrong == 0
    return np.asarray(found)


def banded_matrix(made: Floats) -> Floats:
    """Return P as a dense matrix from its bands."""
    rounds, found = len(made), np.zeros((len(made), len(made)))
    for j in range(made.shape[1]):
        found[np.arange(j, rounds), np.arange(rounds - j)] = made[: rounds - j, j]
    return found


def apply_workload(work: Floats, right: Floats, back: bool = False) -> Floats:
    """Multiply by the workload A or, with `back`, by its transpose; `work` is A or its first column."""
    if work.ndim == 2:
        return np.asarray((work.T if back else work) @ right)
    size = 2 * len(right)
    whole = np.fft.rfft(work[: len(right)], size)[:, None]
    made = np.fft.rfft(right, size, axis=0) * (whole.conj() if back else whole)
    return np.asarray(np.fft.irfft(made, size, axis=0)[: len(right)])


def drifting_errors(made: Floats, scales: Floats, work: Floats) -> Floats:
    """Return the noise variance of each model, ||row t of A N P^-1||^2, by blocks of 256 columns.

    `made` has the bands of P, `scales` the entries of N, and `work` is A.
    """
    found, every = np.zeros(len(made)), np.arange(len(made))
    for some in np.array_split(every, -(-len(made) // 256)):
        unit = (every[:, None] == some).astype(np.float64)
        found += np.sum(apply_workload(work, scales[:, None] * solve_columns(made, unit)) ** 2, axis=1)
    return found


@dataclass(frozen=True)
class DriftSearch:
    """Search for the best drifting bands, over the entries of c and d after their first ones, which are 1 and 0."""

    goal: Goal
    bands: int

    @cached_property
    def read(self) -> tuple[Floats, Floats]:
        """Unit vector of the middle round of each block of rounds, [T, blocks], and the number of rounds per block."""
        blocks = np.array_split(np.arange(self.goal.rounds), min(_BLOCKS, self.goal.rounds))
        unit = np.zeros((self.goal.rounds, len(blocks)), order="F")
        unit[[block[len(block) // 2] for block in blocks], np.arange(len(blocks))] = 1.0
        return unit, np.array([float(len(block)) for block in blocks])

    def split(self, x: Floats) -> tuple[Floats, Floats]:
        first, drift = x.reshape(2, -1)
        return np.concatenate([[1.0], first]), np.concatenate([[0.0], drift])

    def loss(self, x: Floats) -> tuple[float, Floats]:
        """Return log mean_t ||row t of A N P^-1||^2, and its gradient in the entries of c and d after the first."""
        rounds, (unit, stands) = self.goal.rounds, self.read
        with np.errstate(over="ignore", invalid="ignore"):
            made = columns(*self.split(x), rounds, rounds)
            size = lengths(made, rounds)
            r = solve_columns(made, unit)
            models = apply_workload(self.goal.work, size[:, None] * r)
            back = apply_workload(self.goal.work, models * stands, back=True)
            adjoint = solve_columns(made, size[:, None] * back, back=True)
            slopes = 2.0 * self._slopes(made, r, adjoint, np.sum(back * r, axis=1) / size)
            value = float(np.sum(models**2 * stands))
        if not (np.isfinite(value) and np.isfinite(slopes).all()):
            return BAD, np.zeros(len(x))
        return float(np.log(value / rounds)), slopes.ravel() / value

    def _slopes(self, made: Floats, r: Floats, adjoint: Floats, by: Floats) -> Floats:
        """Return half the gradient in c_j (i = 0) and d_j (i = 1), with P = `made`, R = `r`, L = `adjoint`:

        sum_s x_s^i (by_s P_{s+j,s} - sum_u L_{s+j,u} R_{s,u}),   x_s = sqrt(s / T)
        """
        rounds = self.goal.rounds
        size, pace = 2 * rounds, drift_shares(rounds, rounds)
        theirs = np.fft.rfft(adjoint, size, axis=0)
        spectra = [np.sum(theirs * np.fft.rfft(one, size, axis=0).conj(), axis=1) for one in (r, pace[:, None] * r)]
        slopes = np.stack([-np.fft.irfft(one, size)[1 : self.bands] for one in spectra])
        inside = np.add.outer(np.arange(rounds), np.arange(made.shape[1])) < rounds
        pulled = by[:, None] * made * inside  # longer columns have more noise
        return np.asarray(slopes + np.stack([pulled.sum(0), pace @ pulled])[:, 1 : self.bands])

    def found(self, start: Floats) -> tuple[Floats, Floats]:
        """Return the best c and d; the search begins at c = `start` and d = 0."""
        begin = np.concatenate([start[1:], np.zeros(self.bands - 1)])
        options = {"maxiter": _DRIFT_STEPS, "ftol": _DRIFT_TOLERANCE}
        return self.split(scipy.optimize.minimize(self.loss, begin, jac=True, method="L-BFGS-B", options=options).x)


# ---- the binary tree of sums: node (level, i) is the sum of rounds i 2^level .. (i+1) 2^level - 1 --------------------


def tree_variance(level: int) -> float:
    """Return the variance v_l of the best estimate of a tree node of level l, for nodes with noise of variance 1.

    v_0 = 1,   v_l = 2 v_{l-1} / (1 + 2 v_{l-1})
    """
    found = 1.0
    for _ in range(level):
        found = 2.0 * found / (1.0 + 2.0 * found)
    return found


def tree_own_weight(level: int) -> float:
    """Return the weight of a tree node's own noised sum in the best estimate, 2 v_{l-1} / (1 + 2 v_{l-1}).

    Its variance is 1; the other estimate, the sum of the node's two children, has variance 2 v_{l-1} (`tree_variance`).
    """
    halves = 2.0 * tree_variance(level - 1)
    return halves / (1.0 + halves)


def tree_noise_std(t: int) -> float:
    """Return the standard deviation of round t's noise n_t, for tree nodes with noise z_l of variance 1.

    If t has L trailing one bits, a new node of level L replaces nodes of levels l < L, whose estimates have noise B_l:

    n_t = sum_{l <= L} p_l w_l z_l + sum_{l < L} (p_l - 1) B_l,   p_l = prod_{l < i <= L} (1 - w_i),

    with w_l = tree_own_weight(l) and w_0 = 1.
    """
    ones = (~t & (t + 1)).bit_length() - 1
    square, rest = 0.0, 1.0
    for level in range(ones, -1, -1):
        own = tree_own_weight(level) if level else 1.0
        square += (rest * own) ** 2 + (0.0 if level == ones else (rest - 1.0) ** 2 * tree_variance(level))
        rest *= 1.0 - own
    return float(np.sqrt(square))


def tree_gram(rounds: int) -> Floats:
    """Return C^T C of the binary tree: for each two rounds, the number of complete nodes that contain both."""
    found, t = np.zeros((rounds, rounds)), np.arange(rounds)
    for level in range(rounds.bit_length()):
        block = t >> level
        whole = (block + 1) << level <= rounds
        found += (block[:, None] == block[None, :]) & whole[:, None]
    return found


def tree_noise_matrix(rounds: int) -> Floats:
    """Return each round's noise as weights of the tree nodes' noise, [T, nodes], as it is computed round by round."""
    fresh = iter(np.eye(sum(rounds >> level for level in range(rounds.bit_length()))))
    held: dict[int, Floats] = {}
    made: list[Floats] = []
    for t in range(rounds):
        carry, level = next(fresh), 0
        while t >> level & 1:
            own = tree_own_weight(level + 1)
            carry = own * next(fresh) + (1 - own) * (carry + held.pop(level))
            level += 1
        held[level] = carry
        made.append(np.sum(list(held.values()), axis=0))
    return np.diff(np.stack(made), axis=0, prepend=0.0)
