"""Named streams of randomness: one generator per (round, purpose, client), never a global seed.

`Seeded` is for simulation: a counter-based generator (Philox) whose 128-bit key is a hash of
(seed, round, purpose, client), so any stream can be opened again without the others.
`Secure` is for release: AES in counter mode, keyed by the operating system, never repeatable.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

Mode = Literal["simulation", "secure"]


class Streams(Protocol):
    """Where every coin comes from."""

    @property
    def mode(self) -> Mode: ...
    def at(self, t: int, purpose: str, client: int = -1) -> np.random.Generator: ...


class _Key(ISeedSequence):
    """Philox's 128-bit key as given. `Philox(key=...)` is the same stream, but asks the system for entropy first."""

    def __init__(self, key: bytes) -> None:
        self.words = np.frombuffer(key, dtype="<u8")

    def generate_state(self, n_words: int, dtype: object = None) -> NDArray[np.uint64]:
        return self.words[:n_words]


@dataclass(frozen=True)
class Seeded:
    """Reproducible streams; a certificate made with them says "not for release"."""

    seed: int

    @property
    def mode(self) -> Mode:
        return "simulation"

    def at(self, t: int, purpose: str, client: int = -1) -> np.random.Generator:
        """The stream of (seed, t, purpose, client)."""
        name = struct.pack("<qqq", self.seed, t, client) + purpose.encode()
        key = _Key(hashlib.blake2b(name, digest_size=16).digest())
        return np.random.Generator(np.random.Philox(key))  # type: ignore[arg-type]  # any ISeedSequence will do


class SecureGenerator(np.random.Generator):
    """A generator whose draws are for release: samplers leave no value out, memory of noise is kept in float64."""


def is_secure(rng: np.random.Generator) -> bool:
    """Whether what this generator draws may be released."""
    return isinstance(rng, SecureGenerator)


@dataclass(frozen=True)
class Secure:
    """Streams keyed by the operating system: no seed exists, so none can leak."""

    @property
    def mode(self) -> Mode:
        return "secure"

    def at(self, t: int, purpose: str, client: int = -1) -> np.random.Generator:
        """A fresh stream; the arguments name it for the reader only."""
        from randomgen import AESCounter

        return SecureGenerator(AESCounter(key=secrets.randbits(128)))


def streams(mode: Mode, seed: int) -> Streams:
    """The streams of a noise mode."""
    return Seeded(seed) if mode == "simulation" else Secure()


@contextmanager
def forked_rng() -> Iterator[None]:
    """Restore torch's generators afterwards: the CPU's, and that of the current accelerator where there is one."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng([torch.accelerator.current_device_index()], device_type=accelerator.type):
            yield


def global_coins() -> tuple[Any, Any]:
    """Where the global generators of numpy and Python stand: nothing of ours draws from them, a model of others may."""
    return np.random.get_state(), random.getstate()


@contextmanager
def standing_at(place: tuple[Any, Any]) -> Iterator[None]:
    """The global generators put there, and afterwards back to where they stood."""
    before = global_coins()
    _put(place)
    try:
        yield
    finally:
        _put(before)


def _put(place: tuple[Any, Any]) -> None:
    np.random.set_state(place[0])
    random.setstate(place[1])
