"""Minibatches of several clients, one per client and local step. Used by engines/inprocess.py and dense_clients.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino import codec
from sordino.data.clients import Clients, Records
from sordino.parts.gradients import Batch
from sordino.parts.samplers import Cohort


@codec.hides_values
@dataclass
class Reader:
    """Reader of minibatches from the clients' records; it copies every minibatch into the same buffer."""

    clients: Clients
    device: torch.device
    buffer: Tensor | None = None

    def batches(self, cohort: Cohort, drawn: list[NDArray[np.int64]]) -> Batches:
        """Return the minibatches of the cohort's clients.

        `drawn[i]`, of shape [local steps, batch size], holds indices into the records of the cohort's i-th client.
        """
        steps = max((len(own) for own in drawn), default=0)
        width = max((own.shape[1] for own in drawn), default=1)
        picks = np.full((len(drawn), steps, width), -1, dtype=np.int64)  # -1 where a client has fewer steps or records
        for i, own in enumerate(drawn):
            picks[i, : len(own), : own.shape[1]] = own
        first = self.clients.offsets[cohort][:, None, None]
        places = np.minimum(first + np.maximum(picks, 0), len(self.clients.index) - 1)
        return Batches(self, self.clients.index[places], picks >= 0)

    def gathered(self, where: Tensor) -> Tensor:
        """Return the records (inputs only) at indices `where`, in a buffer that the next call overwrites."""
        x, count = self.clients.records.x, where.numel()
        if self.buffer is None or len(self.buffer) < count:
            self.buffer = x.new_empty(count, *x.shape[1:])
        torch.index_select(x, 0, where.reshape(-1), out=self.buffer[:count])
        return self.buffer[:count].view(*where.shape, *x.shape[1:]).to(self.device)


@codec.hides_values
@dataclass
class Batches:
    """Minibatches of m clients, one per local step; a minibatch is overwritten when the next one is read."""

    reader: Reader
    rows: NDArray[np.int64]  # [m, steps, batch size], row numbers in the table of all clients' records
    real: NDArray[np.bool_]  # [m, steps, batch size], False where a client has no record there

    @property
    def records(self) -> Records:
        return self.reader.clients.records

    def __iter__(self) -> Iterator[Batch]:
        gathered, device = self.reader.gathered, self.reader.device
        rows = torch.from_numpy(np.ascontiguousarray(self.rows.transpose(1, 0, 2))).to(self.records.x.device)
        real = self.real.transpose(1, 0, 2)  # [steps, m, b]
        whole, busy = np.all(real, axis=(1, 2)).tolist(), np.any(real, axis=2)
        idle, y = (~busy.all(1)).tolist(), gather(self.records.y, rows).to(device)
        for step in range(len(rows)):
            if whole[step]:
                yield Batch(gathered(rows[step]), y[step])
            elif real.shape[1] == 1 and busy[step, 0]:  # without a mask: no look-up on the device
                there = torch.from_numpy(np.flatnonzero(real[step, 0])).to(rows.device)
                yield Batch(gathered(rows[step].index_select(1, there)), y[step].index_select(1, there.to(device)))
            else:
                active = torch.from_numpy(busy[step]).to(device, torch.float32) if idle[step] else None
                yield Batch(gathered(rows[step]), y[step], torch.from_numpy(real[step]).to(device), active)


def gather(table: Tensor, where: Tensor) -> Tensor:
    """Return rows of `table` [n, ...] at the indices `where` [m, b], as a tensor [m, b, ...]."""
    return table.index_select(0, where.reshape(-1)).view(*where.shape, *table.shape[1:])
