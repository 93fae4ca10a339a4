"""Lower triangular Toeplitz matrices as their first columns: products, inverses, and the error of sums of rounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def padded(column: Floats, rounds: int) -> Floats:
    """The first column at full length."""
    return np.concatenate([column[:rounds], np.zeros(max(rounds - len(column), 0))])


def product(a: Floats, b: Floats, rounds: int) -> Floats:
    """First column of the product of two: a product of polynomials, cut off. By FFT, to 1e-16 of the largest."""
    size = 1 << max(2 * rounds - 1, 1).bit_length()
    both = np.fft.rfft(a[:rounds], size) * np.fft.rfft(b[:rounds], size)
    return np.asarray(np.fft.irfft(both, size)[:rounds])


def correlate(a: Floats, b: Floats) -> Floats:
    """x_s = sum_{u >= s} a_{u-s} b_u."""
    return product(a, b[::-1], len(b))[::-1]


def inverse(column: Floats, rounds: int) -> Floats:
    """First column of C^-1: r_0 = 1/c_0, r_t = -sum_{j=1} c_j r_{t-j} / c_0. Exact recursion, O(rounds * bands)."""
    bands = min(len(column), rounds)
    if bands == 1:
        return padded(np.array([1.0 / column[0]]), rounds)
    from scipy.signal import lfilter

    start = np.zeros(rounds)
    start[0] = 1.0
    return np.asarray(lfilter([1.0], column[:bands], start), dtype=np.float64)


def square_root(rounds: int) -> Floats:
    """c of the C with C C = A, A the matrix of sums: c_0 = 1, c_t = c_{t-1} (2t - 1)/(2t)  (Fichtenberger 2023)."""
    steps = np.arange(1, rounds, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])


def workload(rounds: int, momentum: float = 0.0, decay: float = 0.0) -> Floats:
    """First column of A, where w_t = sum_{s <= t} A_{t-s} (sum of round s): what the server makes of a round's noise.

    a_t = a_{t-1} + v_t,  v_t = momentum v_{t-1} + [t = 0] - decay a_{t-1};  decay is weight decay times the step. Sums
    of equal steps are ones; heavy-ball momentum m alone gives 1, 1 + m, 1 + m + m^2, ...
    """
    from scipy.signal import lfilter

    start = np.zeros(rounds)
    start[0] = 1.0
    return np.asarray(lfilter([1.0], [1.0, decay - 1.0 - momentum, momentum], start), dtype=np.float64)


def errors(column: Floats, rounds: int, work: Floats | None = None) -> Floats:
    """Variance of every model's noise, row t of A C^-1, for noise Z of variance 1."""
    work = np.ones(rounds) if work is None else work
    made = product(work, inverse(column, rounds), rounds)
    return np.asarray(np.cumsum(made**2))


def dense(column: Floats, rounds: int) -> Floats:
    """The matrix itself: for tests, small sizes and other workloads."""
    from scipy.linalg import toeplitz

    return np.asarray(toeplitz(padded(column, rounds), np.zeros(rounds)))
