"""One data set in one order: where steps share noise, a record comes once an epoch, by its number in the data set.

Rows that change their places between epochs, or between a checkpoint and its resume (another random_split), bring a
record back too early, and the bill does not hold. Tensors are known again by a keyed hash, which tells nothing without
its key; of a data set that makes its records anew (files, random crops), that it keeps its order is its owner's word.

Private batches out of an ordinary DataLoader, in physical pieces that fit in memory."""

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
from sordino.dpsgd.batch_checks import Given, given
from sordino.dpsgd.transform import RecordTransform
from sordino.errors import ConfigError, PlanError
from sordino.rng import Streams

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


KEPT = (  # what the private loader takes over from the given one
    *("num_workers", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
)


@codec.hides_values
@dataclass(frozen=True)
class Handed:
    """A piece of a batch that waits for its step: how many records, which piece, and whether it is the last."""

    size: int
    piece: int
    last: bool
    target: Tensor | None = None
    given: tuple[Given, ...] = ()  # its tensors, as the loader gave them


class Turn:
    """What the loader handed out and the optimizer has not taken: the bill holds for these records and no others.

    A loop steps on every batch in the order of the draw. One that leaves a batch out, for whatever reason, lets the
    number of steps tell what was in it: it is stopped. Whoever leaves the loop gets the same batch again in the next.
    """

    def __init__(self) -> None:
        self.handed: Handed | None = None
        self.pieces = 0  # of this batch, summed already
        self.loops = 0  # begun so far: only the newest goes on
        self.order: Order | None = None  # of the data set, where steps share noise

    def begin(self) -> int:
        """A loop over the loader begins; its number."""
        self.reset()
        return self.loops

    def give(self, handed: Handed, loop: int) -> None:
        """The next piece; the one before must have been stepped on."""
        self.finish(loop)
        self.handed = handed

    def finish(self, loop: int) -> None:
        """Refuse to go on past a batch that had no step."""
        if loop != self.loops:
            raise PlanError(
                "loop",
                "a loop over the private loader that goes on after another began, or after a checkpoint was loaded",
                "one loop at a time, and one optimizer.step() for each batch",
                "leave the loop before you begin another or load a checkpoint",
            )
        if self.handed is not None:
            raise PlanError(
                "loop",
                "a batch that was left out" + (", an empty one" if not self.handed.size else ""),
                "one optimizer.step() for each batch, the empty ones too: which are left out tells what was in them",
                "step on every batch; to look at records read loader.dataset, and to step on more raise batch_size, "
                "with physical_batch for the memory",
            )

    def take(self) -> Handed:
        """The piece is summed."""
        assert self.handed is not None
        done, self.handed = self.handed, None
        self.pieces = 0 if done.last else done.piece + 1
        return done

    def reset(self) -> None:
        """Forget a batch that was begun: nothing of it was released, and the next loop gets it again."""
        self.handed, self.pieces = None, 0
        self.loops += 1


class DrawnBatches(Sampler[list[int]]):
    """The records of every step, as the plan draws them: by secret coins, or in one fixed order. Long ones in pieces.

    In a fixed order a record comes again after an epoch and not before: noise that steps share is billed by that.
    """

    def __init__(self, account: Account, streams: Streams, physical: int | None) -> None:
        self.account, self.streams, self.physical = account, streams, physical
        self.drawn: deque[Handed] = deque()  # in the order in which the pieces will come back
        self.kept: dict[int, list[int]] = {}  # batches whose step is still to come
        self.rested, self.last = -1, np.zeros(0, dtype=np.int64)  # the next step; in which one a record was read

    def __len__(self) -> int:
        return self.account.settings.per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self.account.steps
        for t in range(first, first + len(self)):
            rows = self.rows(t)
            width = self.physical or max(len(rows), 1)
            pieces = [rows[i : i + width] for i in range(0, max(len(rows), 1), width)]
            for k, piece in enumerate(pieces):
                self.drawn.append(Handed(len(piece), k, k + 1 == len(pieces)))
                yield piece

    def rows(self, t: int) -> list[int]:
        """The batch of step t: drawn once and the same until its step, so that nobody can draw until it pleases."""
        if t not in self.kept:
            self.kept = {other: rows for other, rows in self.kept.items() if other >= self.account.steps}
            self.kept[t] = self._drawn(t).tolist()
            self._check_rest(t)
        return self.kept[t]

    def _drawn(self, t: int) -> NDArray[np.int64]:
        records = self.account.settings.records
        return records.draw(t, 0, records.size(0), self.streams.at(t, "batches"))

    def _check_rest(self, t: int) -> None:
        """Refuse a batch with a record that an earlier step of the last epoch has read."""
        records, rows = self.account.settings.records, self.kept[t]
        apart = records.min_separation(0)
        if apart is None:
            return
        if self.rested != t:  # the first batch here, or after a checkpoint: those before it are drawn again
            self.last = np.full(records.size(0), -apart, dtype=np.int64)
            for before in range(max(0, t - apart + 1), t):
                self.last[self._drawn(before)] = before
        if (t - self.last[rows] < apart).any() or len(set(rows)) < len(rows):
            found = f"a record in two of {apart} steps in a row, or twice in one"
            raise PlanError("correlated noise", found, "batches in one fixed order, the same in every epoch")
        self.last[rows], self.rested = t, t + 1


class Collate:
    """The user's collate_fn; a batch without records has the shape of one with a record, and length 0."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Dataset[Any]) -> None:
        self.collate, self.dataset = collate, dataset

    def __call__(self, records: list[Any]) -> Any:
        if records:
            return self.collate(records)
        return tree_map(_emptied, self.collate([self.dataset[0]]))


def _emptied(item: Any) -> Any:
    if isinstance(item, Mapping):  # a dict of transformers' own, which torch's trees do not look into
        return {name: _emptied(part) for name, part in item.items()}
    return item[:0] if isinstance(item, Tensor) and item.dim() else item


class PrivateLoader(DataLoader[Any]):
    """The data set of a DataLoader in Poisson batches, or in one fixed order; `len` is the steps of an epoch.

    A batch may be empty: it still makes a step, of noise alone. With `physical` a batch comes in pieces of at most so
    many records, and only the last one's step moves the model.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        account: Account,
        turn: Turn,
        streams: Streams,
        physical: int | None,
        transform: RecordTransform | None = None,
    ) -> None:
        self.transform = transform
        self.turn, self.pieces = turn, DrawnBatches(account, streams, physical)
        turn.order = Order(loader.dataset) if account.settings.plan.release.correlated else None
        plain = loader.collate_fn is default_collate and not loader.num_workers and not loader.pin_memory
        self.tensors = loader.dataset.tensors if plain and type(loader.dataset) is TensorDataset else None
        super().__init__(
            loader.dataset,
            batch_sampler=self.pieces,
            collate_fn=Collate(loader.collate_fn, loader.dataset),
            **{name: getattr(loader, name) for name in KEPT},
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.turn.order is not None:
            self.turn.order.check()
        loop = self.turn.begin()
        self.pieces.drawn.clear()
        for batch in self._rows() if self.tensors is not None else super().__iter__():
            piece = self.pieces.drawn.popleft()
            batch = batch if self.transform is None else self.transform(batch, piece.size)
            self.turn.give(_as_given(piece, batch), loop)
            yield batch
        self.turn.finish(loop)

    def _rows(self) -> Iterator[list[Tensor]]:
        """Rows of tensors at once: what the data set and default_collate give, without a visit to each record."""
        for rows in self.pieces:
            index = torch.tensor(rows, dtype=torch.int64)
            yield [tensor.index_select(0, index) for tensor in self.tensors or ()]


def _as_given(piece: Handed, batch: Any) -> Handed:
    """The piece with copies of its tensors, so that what the loop does to them is found."""
    found, target = given(batch), _target(batch)
    return replace(piece, given=found, target=next((one.kept for one in found if one.tensor is target), target))


def _target(batch: Any) -> Tensor | None:
    """The labels, or the last tensor of a batch: where targets usually are."""
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        return batch["labels"]  # type: ignore[no-any-return]
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    return leaves[-1] if len(leaves) > 1 else None
