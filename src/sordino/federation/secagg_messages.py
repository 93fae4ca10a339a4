"""Messages and masks of secure aggregation (Bonawitz et al. 2017). Called by `secagg_client` and `secagg_server`.

A message is a JSON head, then bytes; nothing that is read can run code. A row in integer steps x_i of a public grid is
sent under masks that cancel in the sum:

    y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)   mod 2^64,      s_ij = HKDF(ECDH(i, j))

PRG is AES-256 in counter mode, so a mask is as hard to guess as its 256-bit key. Flower's own generator folds a key
into 28 effective bits (flwrlabs/flower#7522), which a search opens in seconds; it is not used, by client or server.
"""

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
from sordino.errors import DataError, EngineError, brief_repr
from sordino.parts.releases import NoiseShares
from sordino.plan import Plan

MARK = b"sordino sum 1\n"
HEAD = 1 << 20
STAGES = ("keys", "shares", "mask", "unmask")


@codec.hides_values
@dataclass(frozen=True)
class SecAggMessage:
    """One message of a session: the server's request for a stage, or a client's answer."""

    stage: str
    session: str
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def to_bytes(self) -> bytes:
        head = json.dumps({"stage": self.stage, "session": self.session, "fields": self.fields}).encode()
        return MARK + len(head).to_bytes(4, "little") + head + self.body

    @classmethod
    def of_bytes(cls, data: bytes) -> SecAggMessage:
        """Parse what `to_bytes` wrote; anything else is a `DataError`."""
        start = len(MARK) + 4
        length = int.from_bytes(data[len(MARK) : start], "little")
        if not data.startswith(MARK) or not 0 < length <= min(HEAD, len(data) - start):
            raise DataError("a message of a secure sum without a head", "one as this program writes it")
        try:
            table = json.loads(data[start : start + length])
            stage, session, fields = table["stage"], table["session"], table["fields"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError("a message of a secure sum that cannot be read", "one as this program writes it") from None
        if stage not in STAGES or not isinstance(session, str) or len(session) > 64 or not isinstance(fields, dict):
            raise DataError(f"stage {brief_repr(stage)} of a secure sum", "one of " + ", ".join(STAGES))
        return cls(stage, session, fields, data[start + length :])


def is_secagg(data: bytes) -> bool:
    """Whether bytes are a message of secure aggregation, not a job."""
    return data.startswith(MARK)


def shares_of(plan: Plan) -> NoiseShares:
    """The plan's release, which secure aggregation needs to be noise shares of at least two clients."""
    if not isinstance(plan.release, NoiseShares) or plan.release.at_least < 2:
        raise EngineError(f"release {plan.release.kind!r} in a secure sum", "noise_shares with at_least 2 or more")
    return plan.release


Words = NDArray[np.uint64]
FINE = 20  # bits of the grid below the deviation of one share


def mask_words(key: bytes, count: int) -> Words:
    """Mask of `count` 64-bit words: AES-256-CTR under a key that is used once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = Cipher(algorithms.AES(hashlib.sha256(key).digest()), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), dtype="<u8").astype(np.uint64)


def shared_key(own: Any, other: Any) -> bytes:
    """Key shared by two clients: HKDF of their ECDH secret, in the form that Flower's `encrypt` takes."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = own.exchange(ec.ECDH(), other)
    return base64.urlsafe_b64encode(HKDF(hashes.SHA256(), 32, None, None).derive(secret))


def pairwise_mask(member: int, keys: Mapping[int, bytes], count: int) -> Words:
    """Sum of a client's pairwise masks; of each pair, one adds what the other subtracts."""
    total = np.zeros(count, dtype=np.uint64)
    for other, key in keys.items():
        mask = mask_words(key, count)
        total = total + mask if other > member else total - mask
    return total


def grid_step(std: float) -> float:
    """Step of the public grid, 2^(floor(log2 std) - 20), for noise shares of this standard deviation."""
    return float(2.0 ** (math.floor(math.log2(std)) - FINE))


def to_grid(row: Tensor, grid: float, unit: Unit) -> NDArray[np.int64]:
    """A clean row [d'] in integer steps of the grid; its sensitivity of 1 is kept.

    Rounding towards zero enlarges no coordinate, so a client's message stays in the unit ball. With unit record, two
    rows within distance 1 may be rounded apart by less than one step per coordinate: shrunk by grid * sqrt(d) before,
    they stay within 1.
    """
    given = row.double()
    if unit == "record":
        given = given * (1.0 - grid * math.sqrt(len(given)))
    steps: NDArray[np.int64] = np.trunc((given / grid).numpy()).astype(np.int64)
    return steps


def round_noise(noise: Tensor, grid: float) -> NDArray[np.int64]:
    """Noise in integer steps of the grid, rounded apart from the row, so its distribution does not depend on it."""
    steps: NDArray[np.int64] = np.rint((noise.double() / grid).numpy()).astype(np.int64)
    return steps


def from_grid(words: Words, grid: float) -> Tensor:
    """A sum modulo 2^64 as real numbers."""
    return torch.from_numpy(words.astype(np.int64).astype(np.float64)) * grid
