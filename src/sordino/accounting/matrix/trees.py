"""The binary tree of sums: block (level, i) is the sum of rounds i 2^level .. (i+1) 2^level - 1."""

from __future__ import annotations

import numpy as np

from sordino.accounting.matrix.toeplitz import Floats


def variance(level: int) -> float:
    """Of a block's noise, own and halves weighed: v_0 = 1, v_l = 2 v_{l-1} / (1 + 2 v_{l-1})."""
    found = 1.0
    for _ in range(level):
        found = 2.0 * found / (1.0 + 2.0 * found)
    return found


def own_weight(level: int) -> float:
    """Of a block's own noise against the sum of its halves: inverse to the variances 1 and 2 v_{l-1}."""
    halves = 2.0 * variance(level - 1)
    return halves / (1.0 + halves)


def noise_std(t: int) -> float:
    """Standard deviation of round t's noise, for noise of variance 1 in every block. L one bits end t, so that

    n_t = sum_{l <= L} p_l w_l z_l + sum_{l < L} (p_l - 1) B_l,    p_l = prod_{l < i <= L} (1 - w_i),    w = own_weight,

    w_0 = 1: the noise of the new block of level L, less the noise B_l of the blocks that it takes the place of.
    """
    ones = (~t & (t + 1)).bit_length() - 1
    square, kept = 0.0, 1.0
    for level in range(ones, -1, -1):
        own = own_weight(level) if level else 1.0
        square += (kept * own) ** 2 + (0.0 if level == ones else (kept - 1.0) ** 2 * variance(level))
        kept *= 1.0 - own
    return float(np.sqrt(square))


def gram(rounds: int) -> Floats:
    """C^T C: in how many whole blocks two rounds lie together."""
    found, t = np.zeros((rounds, rounds)), np.arange(rounds)
    for level in range(rounds.bit_length()):
        block = t >> level
        whole = (block + 1) << level <= rounds
        found += (block[:, None] == block[None, :]) & whole[:, None]
    return found


def noise_matrix(rounds: int) -> Floats:
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
            own = own_weight(level + 1)
            carry = own * fresh() + (1 - own) * (carry + held.pop(level))
            level += 1
        held[level] = carry
        now = np.sum(list(held.values()), axis=0)
        made[t], before = now - before, now
    return made
