"""HMAC-SHA256 of records under a key that stays with their owner: without the key it reveals nothing about them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ROWS = 4096  # of long tables so many rows are read, evenly spaced from one that the key chooses


def keyed_hash(key: str, *tensors: Tensor) -> str:
    """HMAC of types, shapes and all bytes of tensors."""
    found = hmac.new(bytes.fromhex(key), digestmod=hashlib.sha256)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        blocks = torch.split(tensor.detach().cpu(), 65536) if tensor.dim() else (tensor,)
        for block in blocks if tensor.numel() else ():
            found.update(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def sampled_hash(key: str, x: Tensor, y: Tensor) -> str:
    """HMAC of a short table, or of the length and evenly spaced rows of a long one."""
    if len(x) <= _ROWS:
        return keyed_hash(key, x, y)
    start = int.from_bytes(hmac.digest(bytes.fromhex(key), b"rows", "sha256"), "little") % len(x)
    rows = torch.from_numpy((start + np.arange(_ROWS) * len(x) // _ROWS) % len(x))
    return keyed_hash(key, torch.tensor(len(x)), x[rows], y[rows])


@dataclass(frozen=True)
class DataMark:
    """Keyed hash that identifies the records of a run; `sampled`: of some rows of a long table."""

    key: str
    digest: str
    sampled: bool = True

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> DataMark:
        key = secrets.token_hex(32)
        return cls(key, sampled_hash(key, x, y))

    def matches(self, records: Sequence[Tensor]) -> bool:
        """Whether x and y are the hashed records."""
        if len(records) != 2:
            return False
        x, y = records
        return self.digest == (sampled_hash if self.sampled else keyed_hash)(self.key, x, y)
