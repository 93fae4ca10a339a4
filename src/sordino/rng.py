"""Random streams of a run: one generator per (round, purpose, client), never a global seed. Used everywhere.

`Seeded` is for simulation: a counter-based generator (Philox) whose 128-bit key is a hash of
(seed, round, purpose, client), so any stream can be opened again without the others.
`Secure` is for release: AES in counter mode, keyed by the operating system, never repeatable.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

Mode = Literal["simulation", "secure"]


class Streams(Protocol):
    """Source of all random numbers of a run: one generator per (round, purpose, client)."""

    @property
    def mode(self) -> Mode: ...
    def at(self, t: int, purpose: str, client: int = -1) -> np.random.Generator: ...


class _Key(ISeedSequence):
    # A seed sequence of one given 128-bit key. `Philox(key=...)` is slower: it reads system entropy.
    words: NDArray[np.uint64]

    def generate_state(self, n_words: int, dtype: object = None) -> NDArray[np.uint64]:
        return self.words[:n_words]


@dataclass(frozen=True)
class Seeded:
    """Reproducible random streams from a seed; the certificate of their run says "not for release"."""

    seed: int

    @property
    def mode(self) -> Mode:
        return "simulation"

    def at(self, t: int, purpose: str, client: int = -1) -> np.random.Generator:
        name = struct.pack("<qqq", self.seed, t, client) + purpose.encode()
        key = _Key()
        key.words = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype="<u8")
        return np.random.Generator(np.random.Philox(key))  # type: ignore[arg-type]  # any ISeedSequence will do


class SecureGenerator(np.random.Generator):
    """Random generator for release, by whose type mechanisms choose gap-free sampling and float64 noise state."""


def is_secure(rng: np.random.Generator) -> bool:
    return isinstance(rng, SecureGenerator)


@dataclass(frozen=True)
class Secure:
    """Cryptographic random streams keyed by the operating system, so that no seed can leak.

    `share` sends the key drawn by one process to all processes of a distributed run, and returns it.
    """

    share: Callable[[int], int] = lambda key: key

    @property
    def mode(self) -> Mode:
        return "secure"

    def at(self, t: int, purpose: str, client: int = -1) -> np.random.Generator:
        """Return a new unpredictable stream; the arguments are ignored."""
        return secure_generator(self.share(secrets.randbits(128)))


def secure_generator(key: int) -> SecureGenerator:
    """Return a new AES counter generator for a secret 128-bit key."""
    from randomgen import AESCounter

    return SecureGenerator(AESCounter(key=key))


def streams(mode: Mode, seed: int) -> Streams:
    return Seeded(seed) if mode == "simulation" else Secure()


@contextmanager
def forked_rng() -> Iterator[None]:
    """Context that restores torch's generators (CPU and current accelerator) at its end."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    own = [] if accelerator is None else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(own, device_type="cuda" if accelerator is None else accelerator.type):
        yield


def torch_rng_states() -> list[Any]:
    """Return the states of torch's generators, of the CPU and of the current accelerator if there is one."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    own = [] if accelerator is None else [torch.get_device_module(accelerator).get_rng_state()]
    return [torch.get_rng_state(), *own]


def global_rng_state() -> tuple[Any, Any]:
    """Return the state of the global generators of numpy and Python, which only user code draws from."""
    return np.random.get_state(), random.getstate()


@contextmanager
def at_global_rng_state(state: tuple[Any, Any]) -> Iterator[None]:
    """Context that sets the global generators of numpy and Python to `state`, and restores them at its end."""
    before = global_rng_state()
    try:
        np.random.set_state(state[0])
        random.setstate(state[1])
        yield
    finally:
        np.random.set_state(before[0])
        random.setstate(before[1])
