"""Strategy matrices: lower triangular Toeplitz ones as first columns (products, inverses, errors), and the tree's."""

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


# ---- the binary tree of sums: block (level, i) is the sum of rounds i 2^level .. (i+1) 2^level - 1 -------------------


def tree_variance(level: int) -> float:
    """Of a block's noise, own and halves weighed: v_0 = 1, v_l = 2 v_{l-1} / (1 + 2 v_{l-1})."""
    found = 1.0
    for _ in range(level):
        found = 2.0 * found / (1.0 + 2.0 * found)
    return found


def tree_own_weight(level: int) -> float:
    """Of a block's own noise against the sum of its halves: inverse to the variances 1 and 2 v_{l-1}."""
    halves = 2.0 * tree_variance(level - 1)
    return halves / (1.0 + halves)


def tree_noise_std(t: int) -> float:
    """Standard deviation of round t's noise, for noise of variance 1 in every block. L one bits end t, so that

    n_t = sum_{l <= L} p_l w_l z_l + sum_{l < L} (p_l - 1) B_l, p_l = prod_{l < i <= L} (1 - w_i), w = tree_own_weight,

    w_0 = 1: the noise of the new block of level L, less the noise B_l of the blocks that it takes the place of.
    """
    ones = (~t & (t + 1)).bit_length() - 1
    square, kept = 0.0, 1.0
    for level in range(ones, -1, -1):
        own = tree_own_weight(level) if level else 1.0
        square += (kept * own) ** 2 + (0.0 if level == ones else (kept - 1.0) ** 2 * tree_variance(level))
        kept *= 1.0 - own
    return float(np.sqrt(square))


def tree_gram(rounds: int) -> Floats:
    """C^T C: in how many whole blocks two rounds lie together."""
    found, t = np.zeros((rounds, rounds)), np.arange(rounds)
    for level in range(rounds.bit_length()):
        block = t >> level
        whole = (block + 1) << level <= rounds
        found += (block[:, None] == block[None, :]) & whole[:, None]
    return found


def tree_noise_matrix(rounds: int) -> Floats:
    """[T, blocks]: the noise of every round as weights of the blocks' own noise, by the streaming rule."""
    total = sum(rounds >> level for level in range(rounds.bit_length()))
    held: dict[int, Floats] = {}
    made, drawn = np.zeros((rounds, total)), 0
    before = np.zeros(total)

    def fresh() -> Floats:
        nonlocal drawn
        unit = np.zeros(total)
        unit[drawn] = 1.0
        drawn += 1
        return unit

    for t in range(rounds):
        carry, level = fresh(), 0
        while t >> level & 1:
            own = tree_own_weight(level + 1)
            carry = own * fresh() + (1 - own) * (carry + held.pop(level))
            level += 1
        held[level] = carry
        now = np.sum(list(held.values()), axis=0)
        made[t], before = now - before, now
    return made
