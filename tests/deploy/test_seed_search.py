"""Promise: the search that opens the masks of Flower's SecAgg+ does not open ours.

Flower folds a pair's key into the 32-bit seed of a Mersenne Twister; the key is base64 text, so 28 bits of it vary
(flwrlabs/flower#7522). Who has one masked row whose entries are small tries all of them: the first word of a generator
needs 397 steps of its seeding. `HYPOTHESIS_PROFILE=nightly` tries all 2^28 (22 CPU seconds each way); else the high
bits are given, and 2^20 are tried.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import numba
import numpy as np

from sordino.federation import secagg
from sordino.federation.flower_api import flower

BITS = 28 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 20
SMALL, LANES, MOST = 1000, 64, 10_000
Words = np.ndarray[Any, Any]


@numba.njit(inline="always")
def spread(number):  # type: ignore[no-untyped-def]
    """The seed of a number of 28 bits: seven in every byte."""
    low = (number & np.uint32(0x7F)) | ((number & np.uint32(0x7F << 7)) << np.uint32(1))
    return low | ((number & np.uint32(0x7F << 14)) << np.uint32(2)) | ((number & np.uint32(0x7F << 21)) << np.uint32(3))


@numba.njit(inline="always")
def tempered(zeroth, first, far):  # type: ignore[no-untyped-def]
    """The first word that a Mersenne Twister gives out, from its states 0, 1 and 397."""
    mixed = (zeroth & np.uint32(0x80000000)) | (first & np.uint32(0x7FFFFFFF))
    word = far ^ (mixed >> np.uint32(1)) ^ (np.uint32(0x9908B0DF) if mixed & np.uint32(1) else np.uint32(0))
    word ^= word >> np.uint32(11)
    word ^= (word << np.uint32(7)) & np.uint32(0x9D2C5680)
    word ^= (word << np.uint32(15)) & np.uint32(0xEFC60000)
    return word ^ (word >> np.uint32(18))


@numba.njit
def candidates(masked, begin, end, found):  # type: ignore[no-untyped-def]
    """Seeds under whose first word a masked number is small: how many, and which."""
    count, seeds, second, state = 0, np.empty(LANES, np.uint32), np.empty(LANES, np.uint32), np.empty(LANES, np.uint32)
    for base in range(begin, end, LANES):
        for lane in range(LANES):
            seeds[lane] = spread(np.uint32(base + lane))
            state[lane] = seeds[lane]
        for step in range(1, 398):
            for lane in range(LANES):
                before = state[lane]
                state[lane] = np.uint32(1812433253) * (before ^ (before >> np.uint32(30))) + np.uint32(step)
            if step == 1:
                second[:] = state
        for lane in range(LANES):
            word = tempered(seeds[lane], second[lane], state[lane])
            if np.uint32(masked - word + np.uint32(SMALL)) < np.uint32(2 * SMALL) and count < MOST:
                found[count] = seeds[lane]
                count += 1
    return count


def unmasked(masked: Words, seed: int) -> Words:
    """What Flower's mask of a seed leaves, between -2^31 and 2^31."""
    mask = np.random.RandomState(seed).randint(0, (1 << 32) - 1, len(masked), dtype=np.int64)
    left: Words = (masked - mask + (1 << 31)) % (1 << 32) - (1 << 31)
    return left


def search(masked: Words, high: int) -> list[int]:
    """Every seed with these high bits whose mask leaves only small numbers."""
    found = np.zeros(MOST, np.uint32)
    count = candidates(np.uint32(masked[0]), high << BITS, (high + 1) << BITS, found)
    return [int(seed) for seed in found[:count] if (np.abs(unmasked(masked, int(seed))) < SMALL).all()]


def folded(key: bytes) -> int:
    """Flower's seed of a key."""
    seed = 0
    for place in range(0, len(key), 4):
        seed ^= int.from_bytes(key[place : place + 4], "little")
    return seed


def number_of(seed: int) -> int:
    """The 28 bits of a seed."""
    return sum(((seed >> (8 * byte)) & 0x7F) << (7 * byte) for byte in range(4))


def test_the_search_that_opens_flowers_masks_does_not_open_ours() -> None:
    """One pair key, as ECDH gives it; a small row under its mask."""
    f = flower()
    (one, _), (_, other) = f.generate_key_pairs(), f.generate_key_pairs()
    key, row = secagg.shared_key(one, other), np.array([3, -7, 11, 0])
    high = number_of(folded(key)) >> BITS
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    theirs = (row + pseudo_rand_gen(key, 1 << 32, [(4,)])[0]) % (1 << 32)
    assert search(theirs, high) == [folded(key)]
    assert (unmasked(theirs, folded(key)) == row).all()
    ours = (row.astype(np.uint64) + secagg.mask_words(key, 4)) % np.uint64(1 << 32)
    assert search(ours.astype(np.int64), high) == []


def test_flowers_seed_has_28_bits_and_our_key_256() -> None:
    """A url-safe base64 key is ASCII: the top bit of each byte is 0, and so of each byte of the folded seed."""
    f = flower()
    seeds = [folded(secagg.shared_key(f.generate_key_pairs()[0], f.generate_key_pairs()[1])) for _ in range(200)]
    varied = 0
    for seed in seeds:
        varied |= seed ^ seeds[0]
    assert bin(varied).count("1") <= 28
    assert len(secagg.mask_words(secrets.token_bytes(32), 3)) == 3
    first, second = secagg.mask_words(b"a" * 44, 1000), secagg.mask_words(b"a" * 43 + b"b", 1000)
    assert not (first == second).any()
