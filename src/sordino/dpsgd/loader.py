"""Private DataLoader of `make_private`, and checks that the records of its batches reach the model unmixed.

Batches are Poisson samples, or follow one fixed order, in pieces that fit in memory. Under correlated noise a record is
read once per epoch, by its row number. If rows moved between epochs, or between a checkpoint and its resume (another
random_split), a record would be read again too early; therefore a keyed hash of the rows is compared. For a data set
that computes its records (files, random crops) the fixed order is the user's responsibility.

A collate_fn that mixes records (mixup, CutMix) is refused before the loop begins. For records r_1, ..., r_k and fixed
random numbers, every tensor with a row for each record must satisfy

    collate([r_1, ..., r_k])[i] = collate([r_i])[0]

In the loop an input x of the model is accepted if x[j] holds entries of record j alone: if x is the loader's tensor, a
cast or reshape of it that preserves its rows, or a view into each row of it. This is found by comparison with a copy
that the loader made, or by strides. Any other input of the model must be the same in every pass: a public constant.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset, default_collate

from sordino import codec
from sordino.dpsgd.account import Account
from sordino.dpsgd.batch_independence import SAME, frozen_rng, has_records, relative_distance
from sordino.dpsgd.own_code import RecordTransform
from sordino.dpsgd.standardise import Standardiser
from sordino.dpsgd.users import Batch, Owners, Users
from sordino.errors import ConfigError, PlanError
from sordino.graph import BY_CONSTRUCTION, TRUSTED, Grade
from sordino.rng import Streams, at_global_rng_state, forked_rng, global_rng_state, secure_generator

TRIED = 4  # records that a collate_fn is tried on
_FAILS = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError)
_FIX = "leave the data set unchanged; split and shuffle it once, with a fixed seed, before make_private"
_OPTIONS = (  # taken over from the DataLoader that make_private is given
    *("num_workers", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
)


def check_collate(loader: DataLoader[Any]) -> None:
    """Refuse a collate_fn whose row for one record depends on the other records (padding excepted)."""
    dataset: Any = loader.dataset
    if loader.collate_fn is default_collate or len(dataset) < 2:
        return
    rng_state = global_rng_state()

    def rows(some: list[Any]) -> list[Any]:
        with frozen_rng(), at_global_rng_state(rng_state):
            batch = loader.collate_fn(copy.deepcopy(some))
        return tree_flatten(dict(batch) if hasattr(batch, "keys") else batch)[0]

    with forked_rng(), at_global_rng_state(rng_state):
        records = [dataset[i] for i in range(min(TRIED, len(dataset)))]
    try:
        together = rows(records)
    except _FAILS:
        return  # the loop will raise the same error
    try:
        alone = [rows([record]) for record in records]
    except _FAILS:
        raise _mixing_collate() from None  # it runs on several records only
    again = zip(alone[0], rows(records[:1]), strict=False)
    if not all(_close(a, b) for a, b in again if isinstance(a, Tensor) and isinstance(b, Tensor)):
        return  # it has random numbers that are not torch's
    for whole, *own in zip(together, *alone, strict=False):
        if has_records(whole, len(own)) and all(has_records(item, 1) for item in own):
            pairs = [(row, item[0]) for row, item in zip(whole, own, strict=True) if row.shape == item[0].shape]
            if not all(_close(row, item) for row, item in pairs):
                raise _mixing_collate()


def _close(a: Tensor, b: Tensor) -> bool:
    return relative_distance([a.double()], [b.double()]) <= SAME


def _mixing_collate() -> PlanError:
    found = "a collate_fn whose row for one record depends on the other records of the batch"
    needed = "rows that depend on one record each: a record in two rows would change a step by two clip norms"
    return PlanError("mixing", found, needed, "remove mixup and CutMix; augment each record separately")


def grade_collate(loader: DataLoader[Any], refuse: bool) -> tuple[Grade, str]:
    """Return whether a collate_fn is torch's or transformers' own, or trusted user code, and a sentence on it.

    No graph can be captured of a collate_fn; with `refuse`, a collate_fn of the user is refused.
    """
    collate: Any = loader.collate_fn
    if type(collate).__module__.startswith("transformers."):  # the Trainer's RemoveColumnsCollator holds the user's
        collate = getattr(collate, "data_collator", collate)
    module = str(getattr(collate, "__module__", None) or type(collate).__module__)
    if module.partition(".")[0] in ("torch", "transformers"):
        return BY_CONSTRUCTION, ""
    name = getattr(collate, "__qualname__", type(collate).__qualname__)
    if refuse:
        found = f"the user's collate_fn {name}, which runs on all records of a batch, for a model to be released"
        needed = 'torch\'s default_collate, or own_code="trusted"'
        fix = 'process each record in the data set, or by transform=; or set own_code="trusted" if you guarantee '
        raise PlanError("own code", found, needed, f"{fix}that it mixes no records: the certificate states it")
    return TRUSTED, f"the collate_fn {name} runs on records"


@codec.hides_values
@dataclass(frozen=True)
class BatchTensor:
    """Tensor of a batch, with a copy made when the loader returned it."""

    tensor: Tensor
    copy: Tensor

    def is_source(self, x: Tensor, size: int) -> bool:
        """Return whether x[j] holds entries of the j-th record of this tensor and nothing else."""
        if not has_records(self.copy, size) or not has_records(x, size):
            return False
        same = x.numel() == self.copy.numel()
        if same and _equal(x.reshape(size, -1), self.copy.reshape(size, -1).to(x.dtype)):
            return True
        return self._is_view(x, size) and _equal(self.tensor, self.copy)

    def _is_view(self, x: Tensor, size: int) -> bool:
        """Return whether x is a view whose row j reads the memory of record j alone."""
        whole = self.tensor
        if whole.dtype != x.dtype or not whole.is_contiguous() or not whole.numel():
            return False
        if x.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return False
        width, first = whole.numel() // size, x.storage_offset() - whole.storage_offset()
        last = first + sum((n - 1) * step for n, step in zip(x.shape[1:], x.stride()[1:], strict=True))
        return 0 <= first <= last < width and (size == 1 or x.stride(0) == width)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    b = b.to(a.device, non_blocking=True)
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True))


def batch_tensors(batch: Any) -> tuple[BatchTensor, ...]:
    """Return the tensors of a batch, each with a copy to compare with later."""
    if isinstance(batch, Mapping):  # transformers' BatchEncoding, which torch's pytrees do not open
        return tuple(found for part in batch.values() for found in batch_tensors(part))
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim()]
    return tuple(BatchTensor(leaf, leaf.detach().clone()) for leaf in leaves)


class InputCheck:
    """Check that inputs of model or loss are unmixed tensors of the loader, or constant; `public` has the latter."""

    def __init__(self, trusted: bool = False) -> None:
        self.trusted = trusted
        self.public: dict[int, Any] = {}
        self.changed = ""  # the input that a trusted loop computed itself

    def records(self, leaves: Sequence[Any], source: Sequence[BatchTensor], size: int) -> list[bool]:
        """Return which inputs have one slice per record; refuse inputs that are neither the loader's nor constant."""
        found = [has_records(x, 0) if not size else any(one.is_source(x, size) for one in source) for x in leaves]
        for place, (x, own) in enumerate(zip(leaves, found, strict=True)):
            if not own and not self._constant(place, x, size):
                kind = f"tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else f"value of {type(x).__name__}"
                self._refuse(f"input {place + 1} of the model, a {kind}")
                found[place] = has_records(x, size)
        if size and not any(found):
            self._refuse("a training pass without a tensor of the loader's batch")
            return [has_records(x, size) for x in leaves]
        return found

    def _constant(self, place: int, x: Any, size: int) -> bool:
        if place not in self.public:
            if has_records(x, size):
                return False  # as long as the batch, when nothing is known of it yet
            self.public[place] = x.detach().clone() if isinstance(x, Tensor) else x
        before = self.public[place]
        if isinstance(x, Tensor) or isinstance(before, Tensor):
            both = isinstance(x, Tensor) and isinstance(before, Tensor)
            return both and x.dtype == before.dtype and _equal(x, before)
        return type(x) is type(before) and bool(x == before)

    def _refuse(self, found: str) -> None:
        self.changed = found
        if not self.trusted:
            wrong = f"{found}, which is neither an unchanged tensor of the loader's batch nor the same in every step"
            needed = "unchanged batches of the loader: a loop that changes a batch may mix its records"
            fix = "pass a function of one record's inputs as make_private(..., transform=f); or set "
            fix += 'own_code="trusted" if you guarantee that the loop mixes no records: the certificate states it'
            raise PlanError("mixing", wrong, needed, fix)


class RowOrder:
    """Keyed hash of a data set's rows in their order, and of the rows' users, computed by make_private."""

    def __init__(self, dataset: Any, users: Users | None = None) -> None:
        self.dataset, self.users, self.key = dataset, users, os.urandom(16).hex()
        self.mark = self._hash(self.key)

    def check(self) -> None:
        """Refuse a data set whose rows or order have changed since make_private."""
        if self._hash(self.key) != self.mark:
            found = "a data set whose rows or their order changed after make_private"
            raise PlanError("correlated noise", found, "the same records in the same order in every epoch", _FIX)

    def state(self) -> dict[str, Any]:
        """Return key and hash of the rows for a checkpoint; both must stay secret."""
        return {"order": {"key": self.key, "mark": self.mark}} if self.mark else {}

    def check_state(self, stored: Mapping[str, str]) -> None:
        """Refuse a checkpoint of a loop whose data set had other rows or another order."""
        if stored and self.mark and self._hash(stored["key"]) != stored["mark"]:
            found = "a checkpoint of a loop over other rows, or over the same rows in another order"
            raise ConfigError(found, "the data set of the saved run, in the same order", _FIX)

    def _hash(self, key: str) -> str:
        users = "" if self.users is None else self.users.digest(bytes.fromhex(key)).hex()
        return rows_hash(self.dataset, key) + users


def rows_hash(dataset: Any, key: str = "") -> str:
    """Return the hash of a data set's tensors and Subset indices; empty for a data set that computes its records."""
    found = hashlib.blake2b(key=bytes.fromhex(key), digest_size=16)
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
    """Physical piece of a batch: its number of records, its index in the batch, and whether it is the last one."""

    size: int
    index: int
    last: bool
    target: Tensor | None = None
    tensors: tuple[BatchTensor, ...] = ()
    owners: Owners | None = None  # the users of its records, where the user is the unit


class PendingBatch:
    """Piece of a batch that the loader has returned and the optimizer has not summed yet; both share this object.

    A loop must step on every batch in the order drawn: skipping a batch is refused, since the choice could depend on
    its records. After a `break`, the next loop starts with the same batch.
    """

    def __init__(self) -> None:
        self.piece: BatchPiece | None = None
        self.summed = 0  # pieces of this batch
        self.loops = 0  # iterations over the loader begun so far: only the newest goes on
        self.order: RowOrder | None = None  # under correlated noise

    def give(self, piece: BatchPiece, loop: int) -> None:
        """Store the next piece; refuse a loop that made no optimizer step on the previous piece."""
        self.finish(loop)
        self.piece = piece

    def finish(self, loop: int) -> None:
        """Refuse a loop that made no optimizer step on its batch, or that is not the newest loop."""
        if loop != self.loops:
            found = "a loop over the private loader that continues after another began, or a checkpoint was loaded"
            fix = "end the loop before you begin another one or load a checkpoint"
            raise PlanError("loop", found, "one loop at a time, and one optimizer.step() for each batch", fix)
        if self.piece is not None:
            found = "a batch without a step (left out, or its gradients accumulated)"
            found += ", an empty one" if not self.piece.size else ""
            needed = "one optimizer.step() for each batch, empty or not: a choice of batches would reveal their content"
            fix = "step on every batch; to inspect records read loader.dataset; to accumulate gradients give the "
            fix += "DataLoader the batch_size of all accumulated batches and make_private the small one as "
            fix += "max_physical_batch_size, and call step() after each piece: the last one updates the model"
            raise PlanError("loop", found, needed, fix)

    def take(self) -> BatchPiece:
        """Return the pending piece, and count it as summed."""
        assert self.piece is not None
        piece, self.piece = self.piece, None
        self.summed = 0 if piece.last else piece.index + 1
        return piece

    def reset(self) -> None:
        """Discard a batch that has had no step; the next loop gets the same batch again."""
        self.piece, self.summed = None, 0
        self.loops += 1


class BatchSampler(Sampler[list[int]]):
    """Batch sampler that draws the row numbers of every step by the plan's record sampler, in pieces of `max_size`.

    With `users` the sampler draws users, and a step has all records of its users. In a fixed order a record (or user)
    is read at most once in `min_separation` steps, as the cost of correlated noise requires.
    """

    def __init__(self, account: Account, streams: Streams, max_size: int | None, users: Users | None = None) -> None:
        self.account, self.streams, self.max_size, self.users = account, streams, max_size, users
        self.drawn: deque[BatchPiece] = deque()  # in the order in which the pieces come back
        self.batches: dict[int, list[int]] = {}  # whose step is still to come
        self.next_step, self.last_read = -1, np.zeros(0, dtype=np.int64)  # the step that last read each record
        self.keys, self.owner = dict[int, int](), ("", 0)  # secret keys of passes, and the loop and process that drew

    def __len__(self) -> int:
        return self.account.settings.per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        self._drop_copied_keys()
        bins = self.account.settings.records.pass_rounds
        number, place = divmod(self.account.steps, bins)
        if (
            place and number not in self.keys
        ):  # resumed, or copied: this pass has other batches than its first steps had
            self.account.forfeit(bins - place)
        first = self.account.steps
        for t in range(first, first + len(self)):
            pieces = self._pieces(self.rows(t))
            for k, (piece, owners) in enumerate(pieces):
                self.drawn.append(BatchPiece(len(piece), k, k + 1 == len(pieces), owners=owners))
                yield piece

    def _pieces(self, drawn: list[int]) -> Sequence[Batch | tuple[list[int], None]]:
        if self.users is not None:
            return self.users.batches(drawn, self.max_size, self.account.ranks)
        return [(piece, None) for piece in self.account.ranks.own_pieces(drawn, self.max_size)]

    def rows(self, t: int) -> list[int]:
        """Return the row numbers (or users) of step t, drawn only once, so that a loop cannot redraw a batch."""
        self._drop_copied_keys()
        if t not in self.batches:
            self.batches = {other: rows for other, rows in self.batches.items() if other >= self.account.steps}
            self.batches[t] = self._draw(t).tolist()
            self._check_separation(t)
        return self.batches[t]

    def _draw(self, t: int) -> NDArray[np.int64]:
        records = self.account.settings.records
        rng = self.streams.at(t, "batches") if records.pass_rounds == 1 else self._pass_generator(t)
        return records.draw(t, 0, records.size(0), rng)

    def _drop_copied_keys(self) -> None:
        """Forget the allocation of a loop that this one is a copy of: two loops in one pass would release it twice."""
        owner = (self.account.own, os.getpid())
        if self.account.settings.records.pass_rounds > 1 and self.owner != owner:
            self.keys, self.batches, self.owner = {}, {}, owner

    def _pass_generator(self, t: int) -> np.random.Generator:
        """Return the generator of the pass of step t, at its beginning; its key is drawn once, and never saved."""
        number, place = divmod(t, self.account.settings.records.pass_rounds)
        if number not in self.keys:
            if place:
                found, fix = "a copy of a loop that goes on in the middle of a pass", "begin a new loop over the loader"
                raise PlanError("loop", found, "each pass begun and finished by the same `for` loop", fix)
            done = self.account.steps // self.account.settings.records.pass_rounds
            self.keys = {own: key for own, key in self.keys.items() if own >= done}
            self.keys[number] = int.from_bytes(self.streams.at(t, "batches").bytes(16), "little")
        return secure_generator(self.keys[number])

    def _check_separation(self, t: int) -> None:
        records, rows = self.account.settings.records, self.batches[t]
        separation = records.min_separation(0)
        if separation is None:
            return
        if self.next_step != t:  # the first batch here, or after a checkpoint: those before it are drawn again
            self.last_read = np.full(records.size(0), -separation, dtype=np.int64)
            for before in range(max(0, t - separation + 1), t):
                self.last_read[self._draw(before)] = before
        if (t - self.last_read[rows] < separation).any() or len(set(rows)) < len(rows):
            found = f"a record that is read twice within {separation} steps"
            raise PlanError("correlated noise", found, "batches in one fixed order, the same in every epoch", _FIX)
        self.last_read[rows], self.next_step = t, t + 1


class EmptyBatchCollate:
    """Wrapper of a collate_fn for empty batches, which become a batch of one record, sliced to length 0."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.collate, self.dataset = loader.collate_fn, loader.dataset

    def __call__(self, records: list[Any]) -> Any:
        return self.collate(records) if records else tree_map(_empty, self.collate([self.dataset[0]]))


def _empty(item: Any) -> Any:
    if isinstance(item, Mapping):  # transformers' BatchEncoding, which torch's pytrees do not open
        return {name: _empty(part) for name, part in item.items()}
    return item[:0] if isinstance(item, Tensor) and item.dim() else item


class PrivateLoader(DataLoader[Any]):
    """DataLoader of Poisson batches, or of batches in one fixed order; `len` is the number of steps of an epoch.

    The step on an empty batch adds noise alone. With `max_size` a batch is returned in pieces of at most that many
    records, and only the step after the last piece updates the model.
    """

    _is_accelerate_prepared = True  # accelerate's prepare must not replace this loader, which draws other batches

    def __init__(
        self,
        loader: DataLoader[Any],
        account: Account,
        pending: PendingBatch,
        streams: Streams,
        max_size: int | None,
        transform: RecordTransform | None = None,
        scaler: Standardiser | None = None,
        users: Users | None = None,
    ) -> None:
        self.transform, self.scaler = transform, scaler
        self.pending, self.pieces = pending, BatchSampler(account, streams, max_size, users)
        pending.order = RowOrder(loader.dataset, users) if account.settings.plan.release.correlated else None
        plain = loader.collate_fn is default_collate and not loader.num_workers and not loader.pin_memory
        self.tensors = loader.dataset.tensors if plain and type(loader.dataset) is TensorDataset else None
        super().__init__(
            loader.dataset,
            batch_sampler=self.pieces,
            collate_fn=EmptyBatchCollate(loader),
            **{name: getattr(loader, name) for name in _OPTIONS},
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.pending.order is not None:
            self.pending.order.check()
        self.pending.reset()
        loop = self.pending.loops
        if self.pieces.account.ranks.size > 1:
            self.pieces.account.ranks.seed_torch(self.pieces.streams, loop)
        self.pieces.drawn.clear()
        for batch in self._rows() if self.tensors is not None else super().__iter__():
            piece = self.pieces.drawn.popleft()
            batch = batch if self.transform is None else self.transform(batch, piece.size)
            batch = batch if self.scaler is None else self.scaler(batch)
            tensors, target = batch_tensors(batch), _target(batch)
            target = next((one.copy for one in tensors if one.tensor is target), target)
            self.pending.give(replace(piece, tensors=tensors, target=target), loop)
            yield batch
        self.pending.finish(loop)

    def _rows(self) -> Iterator[list[Tensor]]:
        """Yield the batches of a TensorDataset by index_select, which equals default_collate and is faster."""
        for rows in self.pieces:
            index = torch.tensor(rows, dtype=torch.int64)
            yield [tensor.index_select(0, index) for tensor in self.tensors or ()]


def _target(batch: Any) -> Tensor | None:
    """Return a batch's targets: the entry `labels` of a dict, or the last tensor."""
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        return batch["labels"]  # type: ignore[no-any-return]
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    return leaves[-1] if len(leaves) > 1 else None
