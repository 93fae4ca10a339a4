"""Minibatches of a chunk of clients, gathered as they are read, and the shares of a cohort among ranks.

Called by engines/inprocess.py and engines/distributed.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapreplace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.data.clients import Clients, Records
from sordino.parts.gradients import Batch
from sordino.parts.local_solvers import LocalSolver
from sordino.parts.samplers import Cohort


class Reader:
    """Reads the clients' table; what a batch is gathered into is used again for the next."""

    def __init__(self, held: Clients, device: torch.device) -> None:
        self.held, self.device = held, device
        self.buffer: Tensor | None = None

    def batches(self, clients: Cohort, drawn: list[NDArray[np.int64]]) -> Batches:
        """The steps of a chunk of clients, where drawn[i] [steps, b] are those of client i among its own records."""
        steps = max((len(own) for own in drawn), default=0)
        width = max((own.shape[1] for own in drawn), default=1)
        picks = np.full((len(drawn), steps, width), -1, dtype=np.int64)  # -1 where a client has fewer steps or records
        for i, own in enumerate(drawn):
            picks[i, : len(own), : own.shape[1]] = own
        first = self.held.offsets[clients][:, None, None]
        places = np.minimum(first + np.maximum(picks, 0), len(self.held.index) - 1)
        return Batches(self, self.held.index[places], picks >= 0)

    def gathered(self, where: Tensor) -> Tensor:
        """Rows of x, gathered where it lies into a buffer that the next batch overwrites, on the model's device."""
        x, count = self.held.records.x, where.numel()
        if self.buffer is None or len(self.buffer) < count:
            self.buffer = x.new_empty(count, *x.shape[1:])
        torch.index_select(x, 0, where.reshape(-1), out=self.buffer[:count])
        return self.buffer[:count].view(*where.shape, *x.shape[1:]).to(self.device)


class Batches:
    """A minibatch of each of m clients per step; one is good until the next is asked for.

    `rows` [m, steps, b] are rows of the table, `real` [m, steps, b] says which of them are some.
    """

    def __init__(self, reader: Reader, rows: NDArray[np.int64], real: NDArray[np.bool_]) -> None:
        self.reader, self.rows, self.real = reader, rows, real

    @property
    def records(self) -> Records:
        return self.reader.held.records

    def __iter__(self) -> Iterator[Batch]:
        gathered, device = self.reader.gathered, self.reader.device
        rows = torch.from_numpy(np.ascontiguousarray(self.rows.transpose(1, 0, 2))).to(self.records.x.device)
        real = self.real.transpose(1, 0, 2)  # [steps, m, b]
        whole, busy = np.all(real, axis=(1, 2)).tolist(), np.any(real, axis=2)
        idle, y = (~busy.all(1)).tolist(), gather(self.records.y, rows).to(device)
        for step in range(len(rows)):
            if whole[step]:
                yield Batch(gathered(rows[step]), y[step])
            elif real.shape[1] == 1 and busy[step, 0]:  # without a mask: there is nothing to look up on the device
                there = torch.from_numpy(np.flatnonzero(real[step, 0]))
                yield Batch(gathered(rows[step][:, there]), y[step][:, there])
            else:
                active = torch.from_numpy(busy[step]).to(device, torch.float32) if idle[step] else None
                yield Batch(gathered(rows[step]), y[step], torch.from_numpy(real[step]).to(device), active)


def gather(table: Tensor, where: Tensor) -> Tensor:
    """Rows of a table: [n, ...] at [m, b] -> [m, b, ...]."""
    return table.index_select(0, where.reshape(-1)).view(*where.shape, *table.shape[1:])


def records_read(local: LocalSolver, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Records that each client reads in one round, and one for its own sake: public sizes, whole numbers."""
    return np.asarray([1 + local.records_read(int(size)) for size in sizes], dtype=np.int64)


def equal_shares(loads: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """Positions in a cohort by rank: longest first, each to the rank with the least to do.

    Within 4/3 of the best cut (Graham 1969). Ties go to the earlier client and the lower rank: one cut on all ranks.
    """
    owner, busy = np.empty(len(loads), dtype=np.int64), [(0, rank) for rank in range(ranks)]
    for place in np.argsort(-loads, kind="stable"):
        load, rank = busy[0]
        heapreplace(busy, (load + int(loads[place]), rank))
        owner[place] = rank
    return [np.flatnonzero(owner == rank) for rank in range(ranks)]


def chunks(cohort: Cohort, size: int) -> Iterator[Cohort]:
    """The cohort in pieces of at most `size`."""
    for first in range(0, len(cohort), size):
        yield cohort[first : first + size]
