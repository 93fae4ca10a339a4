"""Promises of the streams: a name opens one stream, another name opens another, secure streams never come back."""

from __future__ import annotations

import hashlib
import itertools
import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from sordino.rng import Secure, Seeded, Streams, streams

NAMES = list(itertools.product((0, 1, 2**40), ("cohort", "batches", "client noise", "server noise"), (-1, 0, 1, 10**6)))


def head(source: Streams, t: int = 0, purpose: str = "cohort", client: int = -1) -> NDArray[np.float64]:
    return source.at(t, purpose, client).standard_normal(8)


def test_the_same_name_opens_the_same_stream() -> None:
    for t, purpose, client in NAMES:
        assert np.array_equal(head(Seeded(5), t, purpose, client), head(Seeded(5), t, purpose, client))


def test_any_other_round_purpose_client_or_seed_opens_another_stream() -> None:
    seen = {head(Seeded(seed), t, purpose, client).tobytes() for seed in (0, 1, -1) for t, purpose, client in NAMES}
    assert len(seen) == 3 * len(NAMES)


def test_a_stream_does_not_depend_on_what_was_opened_before() -> None:
    source = Seeded(5)
    alone = head(source, 3, "cohort")
    head(source, 2, "cohort")
    assert np.array_equal(head(source, 3, "cohort"), alone)


def test_neighbouring_streams_are_uncorrelated() -> None:
    draws = np.stack([Seeded(0).at(t, "server noise").standard_normal(4000) for t in range(20)])
    correlations = np.asarray(np.corrcoef(draws))[np.triu_indices(20, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(4000)


def test_the_whole_seed_counts() -> None:
    """A torch generator reads 32 bits of its seed; ours reads them all."""
    assert not np.array_equal(head(Seeded(7)), head(Seeded(7 + 2**32)))
    assert not np.array_equal(head(Seeded(7)), head(Seeded(7 + 2**62)))


def test_secure_streams_never_repeat() -> None:
    seen = {head(Secure(), 0, "cohort").tobytes() for _ in range(200)}
    assert len(seen) == 200


def test_secure_streams_ignore_every_global_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    np.random.seed(0)
    first = head(Secure())
    np.random.seed(0)
    assert not np.array_equal(head(Secure()), first)
    asked: list[int] = []

    def fixed(bits: int) -> int:
        asked.append(bits)
        return 12345

    monkeypatch.setattr("sordino.rng.secrets.randbits", fixed)
    assert np.array_equal(head(Secure()), head(Secure()))  # the operating system is the only source
    assert asked == [128, 128]


def test_secure_normals_are_normal() -> None:
    draws = Secure().at(0, "server noise").standard_normal(40_000)
    assert abs(draws.mean()) < 6 / 200
    assert abs(draws.std() - 1) < 6 / np.sqrt(2 * 40_000)


def test_the_mode_names_the_streams() -> None:
    assert streams("simulation", 3) == Seeded(3)
    assert isinstance(streams("secure", 3), Secure)
    assert [Seeded(0).mode, Secure().mode] == ["simulation", "secure"]


def test_a_stream_is_philox_under_the_hash_of_its_name() -> None:
    name = struct.pack("<qqq", 5, 3, 9) + b"batches"
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    by_key = np.random.Generator(np.random.Philox(key=key))
    assert np.array_equal(head(Seeded(5), 3, "batches", 9), by_key.standard_normal(8))
