"""One data set in one order: where steps share noise, a record comes once an epoch, by its number in the data set.

Rows that change their places between epochs, or between a checkpoint and its resume (another random_split), bring a
record back too early, and the bill does not hold. Tensors are known again by a keyed hash, which tells nothing without
its key; of a data set that makes its records anew (files, random crops), that it keeps its order is its owner's word.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from sordino.errors import ConfigError, PlanError

_FIX = "keep the data set as it was; split and shuffle it once, by a fixed seed, before make_private"


class Order:
    """The rows of a data set as they were when its loop was made private."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.key = dataset, os.urandom(16).hex()
        self.mark = self._mark(self.key)

    def check(self) -> None:
        """Refuse an epoch over other rows, or in another order."""
        if self._mark(self.key) != self.mark:
            found = "a data set whose rows are not what and where they were when the loop began"
            raise PlanError("correlated noise", found, "the same records in the same order in every epoch", _FIX)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: secret, as what the noise remembers is."""
        return {"order": {"key": self.key, "mark": self.mark}} if self.mark else {}

    def check_state(self, kept: Mapping[str, str]) -> None:
        """Refuse a checkpoint of a loop over other rows."""
        if kept and self.mark and self._mark(kept["key"]) != kept["mark"]:
            found = "a checkpoint of a loop over other rows, or over these in another order"
            raise ConfigError(found, "the data set that it was saved with", _FIX)

    def _mark(self, key: str) -> str:
        """Of all tensors, and of the rows that are taken of them; nothing where records are made anew."""
        found, dataset = hashlib.blake2b(key=bytes.fromhex(key), digest_size=16), self.dataset
        while type(dataset) is Subset:
            found.update(torch.as_tensor(list(dataset.indices), dtype=torch.int64).numpy().data)
            dataset = dataset.dataset
        if type(dataset) is not TensorDataset:
            return ""
        for tensor in dataset.tensors:
            found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()
