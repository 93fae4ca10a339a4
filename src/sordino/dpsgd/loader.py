"""The private DataLoader of `make_private`: Poisson batches, or one fixed order, in pieces that fit in memory.

Under correlated noise a record is read once an epoch, by its row number. Rows that change places between epochs, or
between a checkpoint and its resume (another random_split), bring a record back too early, so tensors are recognised by
a keyed hash. Of a data set that computes its records (files, random crops) the fixed order is its owner's word.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset, default_collate

from sordino import codec
from sordino.dpsgd.account import Account
from sordino.dpsgd.batch_checks import BatchTensor, batch_tensors
from sordino.dpsgd.own_code import RecordTransform
from sordino.errors import ConfigError, PlanError
from sordino.rng import Streams

_FIX = "keep the data set as it was; split and shuffle it once, by a fixed seed, before make_private"
_OPTIONS = (  # taken over from the DataLoader that make_private is given
    *("num_workers", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
)


class RowOrder:
    """Keyed hash of a data set's rows in their order, at the time of make_private."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.key = dataset, os.urandom(16).hex()
        self.mark = self._hash(self.key)

    def check(self) -> None:
        """Refuse an epoch over other rows, or in another order."""
        if self._hash(self.key) != self.mark:
            found = "a data set whose rows are not what and where they were when the loop began"
            raise PlanError("correlated noise", found, "the same records in the same order in every epoch", _FIX)

    def state(self) -> dict[str, Any]:
        """Key and hash for a checkpoint: as secret as the state of the noise."""
        return {"order": {"key": self.key, "mark": self.mark}} if self.mark else {}

    def check_state(self, stored: Mapping[str, str]) -> None:
        """Refuse a checkpoint of a loop over other rows."""
        if stored and self.mark and self._hash(stored["key"]) != stored["mark"]:
            found = "a checkpoint of a loop over other rows, or over these in another order"
            raise ConfigError(found, "the data set that it was saved with", _FIX)

    def _hash(self, key: str) -> str:
        """Of all tensors and of the Subset indices; empty where the data set computes its records."""
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


@codec.hides_values
@dataclass(frozen=True)
class BatchPiece:
    """A physical piece of a batch: its number of records, its index in the batch, and whether it is the last."""

    size: int
    index: int
    last: bool
    target: Tensor | None = None
    tensors: tuple[BatchTensor, ...] = ()  # as the loader made them, with copies


class PendingBatch:
    """The piece that the loader gave out and the optimizer has not yet summed: shared by both.

    A loop steps on every batch in the order of the draw: which batches it leaves out would tell what was in them, so
    leaving one out is refused. A loop that is left early gets the same batch again at its next start.
    """

    def __init__(self) -> None:
        self.piece: BatchPiece | None = None
        self.summed = 0  # pieces of this batch
        self.loops = 0  # iterations over the loader begun so far: only the newest goes on
        self.order: RowOrder | None = None  # under correlated noise

    def give(self, piece: BatchPiece, loop: int) -> None:
        """Give out the next piece; the one before must have had its step."""
        self.finish(loop)
        self.piece = piece

    def finish(self, loop: int) -> None:
        """Refuse to go on past a batch that had no step."""
        if loop != self.loops:
            found = "a loop over the private loader that goes on after another began, or after a checkpoint was loaded"
            fix = "leave the loop before you begin another or load a checkpoint"
            raise PlanError("loop", found, "one loop at a time, and one optimizer.step() for each batch", fix)
        if self.piece is not None:
            raise PlanError(
                "loop",
                "a batch that was left out" + (", an empty one" if not self.piece.size else ""),
                "one optimizer.step() for each batch, the empty ones too: which are left out tells what was in them",
                "step on every batch; to look at records read loader.dataset, and to step on more raise batch_size, "
                "with max_physical_batch_size for the memory",
            )

    def take(self) -> BatchPiece:
        """The piece, which is now summed."""
        assert self.piece is not None
        piece, self.piece = self.piece, None
        self.summed = 0 if piece.last else piece.index + 1
        return piece

    def reset(self) -> None:
        """Forget an unfinished batch: nothing of it was released, and the next loop gets it again."""
        self.piece, self.summed = None, 0
        self.loops += 1


class BatchSampler(Sampler[list[int]]):
    """Row numbers of every step, as the plan's record sampler draws them, long batches in pieces.

    In a fixed order a record is read at most once in `min_separation` steps, which the cost of correlated noise needs.
    """

    def __init__(self, account: Account, streams: Streams, max_size: int | None) -> None:
        self.account, self.streams, self.max_size = account, streams, max_size
        self.drawn: deque[BatchPiece] = deque()  # in the order in which the pieces come back
        self.batches: dict[int, list[int]] = {}  # whose step is still to come
        self.next_step, self.last_read = -1, np.zeros(0, dtype=np.int64)  # the step that last read each record

    def __len__(self) -> int:
        return self.account.settings.per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self.account.steps
        for t in range(first, first + len(self)):
            rows = self.rows(t)
            width = self.max_size or max(len(rows), 1)
            pieces = [rows[i : i + width] for i in range(0, max(len(rows), 1), width)]
            for k, piece in enumerate(pieces):
                self.drawn.append(BatchPiece(len(piece), k, k + 1 == len(pieces)))
                yield piece

    def rows(self, t: int) -> list[int]:
        """The batch of step t: drawn once and the same until its step, so nobody can draw until it pleases."""
        if t not in self.batches:
            self.batches = {other: rows for other, rows in self.batches.items() if other >= self.account.steps}
            self.batches[t] = self._draw(t).tolist()
            self._check_separation(t)
        return self.batches[t]

    def _draw(self, t: int) -> NDArray[np.int64]:
        records = self.account.settings.records
        return records.draw(t, 0, records.size(0), self.streams.at(t, "batches"))

    def _check_separation(self, t: int) -> None:
        """Refuse a batch with a record that an earlier step of the last epoch has read."""
        records, rows = self.account.settings.records, self.batches[t]
        separation = records.min_separation(0)
        if separation is None:
            return
        if self.next_step != t:  # the first batch here, or after a checkpoint: those before it are drawn again
            self.last_read = np.full(records.size(0), -separation, dtype=np.int64)
            for before in range(max(0, t - separation + 1), t):
                self.last_read[self._draw(before)] = before
        if (t - self.last_read[rows] < separation).any() or len(set(rows)) < len(rows):
            found = f"a record in two of {separation} steps in a row, or twice in one"
            raise PlanError("correlated noise", found, "batches in one fixed order, the same in every epoch")
        self.last_read[rows], self.next_step = t, t + 1


class EmptyBatchCollate:
    """The user's collate_fn, which also makes empty batches: the shape of a batch of one record, with length 0."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Dataset[Any]) -> None:
        self.collate, self.dataset = collate, dataset

    def __call__(self, records: list[Any]) -> Any:
        if records:
            return self.collate(records)
        return tree_map(_empty, self.collate([self.dataset[0]]))


def _empty(item: Any) -> Any:
    if isinstance(item, Mapping):  # transformers' BatchEncoding, which torch's pytrees do not open
        return {name: _empty(part) for name, part in item.items()}
    return item[:0] if isinstance(item, Tensor) and item.dim() else item


class PrivateLoader(DataLoader[Any]):
    """DataLoader of Poisson batches, or of one fixed order; `len` is the number of steps of an epoch.

    A batch may be empty: its step is one of noise alone. With `max_size` a batch comes in pieces of at most so many
    records, and only the step after the last piece moves the model.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        account: Account,
        pending: PendingBatch,
        streams: Streams,
        max_size: int | None,
        transform: RecordTransform | None = None,
    ) -> None:
        self.transform = transform
        self.pending, self.pieces = pending, BatchSampler(account, streams, max_size)
        pending.order = RowOrder(loader.dataset) if account.settings.plan.release.correlated else None
        plain = loader.collate_fn is default_collate and not loader.num_workers and not loader.pin_memory
        self.tensors = loader.dataset.tensors if plain and type(loader.dataset) is TensorDataset else None
        super().__init__(
            loader.dataset,
            batch_sampler=self.pieces,
            collate_fn=EmptyBatchCollate(loader.collate_fn, loader.dataset),
            **{name: getattr(loader, name) for name in _OPTIONS},
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.pending.order is not None:
            self.pending.order.check()
        self.pending.reset()
        loop = self.pending.loops
        self.pieces.drawn.clear()
        for batch in self._rows() if self.tensors is not None else super().__iter__():
            piece = self.pieces.drawn.popleft()
            batch = batch if self.transform is None else self.transform(batch, piece.size)
            tensors, target = batch_tensors(batch), _target(batch)
            target = next((one.copy for one in tensors if one.tensor is target), target)
            self.pending.give(replace(piece, tensors=tensors, target=target), loop)
            yield batch
        self.pending.finish(loop)

    def _rows(self) -> Iterator[list[Tensor]]:
        """Rows of tensors by one index_select: what default_collate gives, without a visit to each record."""
        for rows in self.pieces:
            index = torch.tensor(rows, dtype=torch.int64)
            yield [tensor.index_select(0, index) for tensor in self.tensors or ()]


def _target(batch: Any) -> Tensor | None:
    """The labels, or the last tensor of a batch: where targets usually are."""
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        return batch["labels"]  # type: ignore[no-any-return]
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    return leaves[-1] if len(leaves) > 1 else None
