"""What the members of a secure sum and their server say: a JSON head, then bytes. Nothing that is read can run code.

Integers under masks that cancel in a sum (Bonawitz et al. 2017), and the public grid that makes rows integers.

    y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)   mod 2^64,      s_ij = HKDF(ECDH(i, j))

PRG is AES-256 in counter mode, so a mask is as hard to guess as its 256-bit key. Flower's own generator folds a key
into 28 effective bits (flwrlabs/flower#7522), which a search opens in seconds; it is not used here, on either side."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino import codec
from sordino.accounting.bounds import Unit
from sordino.errors import DataError, brief_repr

MARK = b"sordino sum 1\n"
HEAD = 1 << 20
STAGES = ("keys", "shares", "mask", "unmask")


@codec.hides_values
@dataclass(frozen=True)
class SecAggMessage:
    """One stage of one session: what is asked or answered."""

    stage: str
    session: str
    said: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def to_bytes(self) -> bytes:
        head = json.dumps({"stage": self.stage, "session": self.session, "said": self.said}).encode()
        return MARK + len(head).to_bytes(4, "little") + head + self.body

    @classmethod
    def of_bytes(cls, data: bytes) -> SecAggMessage:
        """What `to_bytes` wrote; else a `DataError` in one sentence."""
        start = len(MARK) + 4
        length = int.from_bytes(data[len(MARK) : start], "little")
        if not data.startswith(MARK) or not 0 < length <= min(HEAD, len(data) - start):
            raise DataError("a letter of a secure sum without a head", "one as this program writes it")
        try:
            table = json.loads(data[start : start + length])
            stage, session, said = table["stage"], table["session"], table["said"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError("a letter of a secure sum that cannot be read", "one as this program writes it") from None
        if stage not in STAGES or not isinstance(session, str) or len(session) > 64 or not isinstance(said, dict):
            raise DataError(f"stage {brief_repr(stage)} of a secure sum", "one of " + ", ".join(STAGES))
        return cls(stage, session, said, data[start + length :])


def is_secagg(data: bytes) -> bool:
    """Whether bytes are of a secure sum, and no job."""
    return data.startswith(MARK)


Words = NDArray[np.uint64]
FINE = 20  # bits of the grid below the deviation of one share


def mask_words(key: bytes, count: int) -> Words:
    """`count` words of AES-256-CTR under a key that is used once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = Cipher(algorithms.AES(hashlib.sha256(key).digest()), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), dtype="<u8").astype(np.uint64)


def shared_key(own: Any, other: Any) -> bytes:
    """The key that two members share: HKDF of their ECDH secret, as Flower's `encrypt` wants it."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = own.exchange(ec.ECDH(), other)
    return base64.urlsafe_b64encode(HKDF(hashes.SHA256(), 32, None, None).derive(secret))


def pairwise_mask(member: int, keys: Mapping[int, bytes], count: int) -> Words:
    """The sum of a member's masks with others: what it adds, the other subtracts."""
    total = np.zeros(count, dtype=np.uint64)
    for other, key in keys.items():
        mask = mask_words(key, count)
        total = total + mask if other > member else total - mask
    return total


def grid_step(std: float) -> float:
    """The public grid 2^(floor(log2 std) - 20) for shares of noise with this deviation."""
    return float(2.0 ** (math.floor(math.log2(std)) - FINE))


def to_grid(row: Tensor, grid: float, unit: Unit) -> NDArray[np.int64]:
    """A clean row [d'] in steps of the grid; its bound of 1 still holds.

    Towards zero no coordinate grows, so the unit ball of a client's message keeps it. For a record two rows that are
    within 1 may be cut differently, by less than one step per coordinate: shrunk by grid * sqrt(d) they stay within 1.
    """
    given = row.double()
    if unit == "record":
        given = given * (1.0 - grid * math.sqrt(len(given)))
    steps: NDArray[np.int64] = np.trunc((given / grid).numpy()).astype(np.int64)
    return steps


def round_noise(noise: Tensor, grid: float) -> NDArray[np.int64]:
    """Noise in steps of the grid; it is rounded by itself, so its law does not depend on the row."""
    steps: NDArray[np.int64] = np.rint((noise.double() / grid).numpy()).astype(np.int64)
    return steps


def from_grid(words: Words, grid: float) -> Tensor:
    """A sum modulo 2^64 as numbers again."""
    return torch.from_numpy(words.astype(np.int64).astype(np.float64)) * grid
