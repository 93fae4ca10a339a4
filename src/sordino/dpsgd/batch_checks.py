"""Checks that what reaches the model are the records that the loader gave: of the collate_fn, and of the loop.

A collate_fn that mixes records (mixup, CutMix) is refused before the loop begins:

    collate([r_1, ..., r_k])[i] = collate([r_i])[0]    in every tensor with a row for each record, random numbers fixed

In the loop, x[j] holds entries of record j alone if x is the loader's tensor, a cast or a reshape of it that keeps its
rows, or a view into each row of it: found by comparing with a copy from when the batch was given out, or by strides.
Anything else that the model is given must be the same in every pass: a public constant.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, default_collate

from sordino import codec
from sordino.dpsgd.batch_independence import SAME, frozen_rng, has_records, relative_distance
from sordino.errors import PlanError
from sordino.graph import BY_CONSTRUCTION, TRUSTED, Grade
from sordino.rng import at_global_rng_state, global_rng_state

TRIED = 4  # records
_FAILS = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError)


def check_collate(loader: DataLoader[Any]) -> None:
    """Refuse a collate_fn whose row for one record depends on the others; padded rows are left to the model's graph."""
    dataset: Any = loader.dataset
    if loader.collate_fn is default_collate or len(dataset) < 2:
        return
    rng_state = global_rng_state()

    def rows(some: list[Any]) -> list[Any]:
        with frozen_rng(), at_global_rng_state(rng_state):
            batch = loader.collate_fn(copy.deepcopy(some))
        return tree_flatten(dict(batch) if hasattr(batch, "keys") else batch)[0]

    with torch.random.fork_rng(devices=[]), at_global_rng_state(rng_state):
        records = [dataset[i] for i in range(min(TRIED, len(dataset)))]
    try:
        together = rows(records)
    except _FAILS:
        return  # the loop will show it
    try:
        alone = [rows([record]) for record in records]
    except _FAILS:
        raise _mixing_collate() from None  # it runs on several records only
    again = zip(alone[0], rows(records[:1]), strict=False)
    if all(_close(a, b) for a, b in again if isinstance(a, Tensor) and isinstance(b, Tensor)):
        _check_rows(together, alone)  # else it has random numbers that are not torch's


def _check_rows(together: list[Any], alone: list[list[Any]]) -> None:
    """Row i of a batch is the row of record i alone, where they are of one shape."""
    for whole, *own in zip(together, *alone, strict=False):
        if not has_records(whole, len(own)) or not all(has_records(item, 1) for item in own):
            continue
        pairs = [(row, item[0]) for row, item in zip(whole, own, strict=True) if row.shape == item[0].shape]
        if not all(_close(row, item) for row, item in pairs):
            raise _mixing_collate()


def _close(a: Tensor, b: Tensor) -> bool:
    return relative_distance([a.double()], [b.double()]) <= SAME


def _mixing_collate() -> PlanError:
    found = "a collate_fn whose row for one record depends on the other records of the batch"
    needed = "rows of one record each: a record that is in two rows moves a step by two clips"
    return PlanError("mixing", found, needed, "leave mixup and its kin out; turn, crop and mask each record by itself")


def grade_collate(loader: DataLoader[Any], refuse: bool) -> tuple[Grade, str]:
    """What is proved of a collate_fn: torch's own and those of transformers are known, any other is the owner's code.

    It works on lists of records, so it has no graph; with `refuse` it needs its owner's word.
    """
    collate: Any = loader.collate_fn
    module = str(getattr(collate, "__module__", None) or type(collate).__module__)
    if module.partition(".")[0] in ("torch", "transformers"):
        return BY_CONSTRUCTION, ""
    name = getattr(collate, "__qualname__", type(collate).__qualname__)
    if refuse:
        raise PlanError(
            "own code",
            f"a collate_fn of its owner's, {name}, which runs on all records of a batch, for a model to be released",
            "torch's default_collate, or its owner's word",
            'do it in the data set for each record by itself, or as transform=; or own_code="trusted", if you vouch '
            "for it: the certificate will say so",
        )
    return TRUSTED, f"the collate_fn {name} runs on records"


@codec.hides_values
@dataclass(frozen=True)
class BatchTensor:
    """A tensor that the loader gave out, and a copy of it as it was then."""

    tensor: Tensor
    copy: Tensor

    def is_source(self, x: Tensor, size: int) -> bool:
        """Whether x[j] holds entries of the j-th record of this tensor and nothing else."""
        if not has_records(self.copy, size) or not has_records(x, size):
            return False
        same = x.numel() == self.copy.numel()
        if same and _equal(x.reshape(size, -1), self.copy.reshape(size, -1).to(x.dtype)):
            return True
        return self._is_view(x, size) and _equal(self.tensor, self.copy)

    def _is_view(self, x: Tensor, size: int) -> bool:
        """Whether x reads, for each record, the memory of that record alone."""
        whole = self.tensor
        if whole.dtype != x.dtype or not whole.is_contiguous() or not whole.numel():
            return False
        if x.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return False
        width, first = whole.numel() // size, x.storage_offset() - whole.storage_offset()
        last = first + sum((n - 1) * step for n, step in zip(x.shape[1:], x.stride()[1:], strict=True))
        return 0 <= first <= last < width and (size == 1 or x.stride(0) == width)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Entry by entry; nan equals nan."""
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True))


def batch_tensors(batch: Any) -> tuple[BatchTensor, ...]:
    """The tensors of a batch, with copies."""
    if isinstance(batch, Mapping):  # transformers' BatchEncoding, which torch's pytrees do not open
        return tuple(found for part in batch.values() for found in batch_tensors(part))
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim()]
    return tuple(BatchTensor(leaf, leaf.detach().clone()) for leaf in leaves)


class InputCheck:
    """Check of what reaches the model, or the loss, in training passes; `public` holds the constants by place."""

    def __init__(self, trusted: bool = False) -> None:
        self.trusted = trusted
        self.public: dict[int, Any] = {}
        self.changed = ""  # what a loop that is trusted made of the batches itself

    def records(self, leaves: Sequence[Any], source: Sequence[BatchTensor], size: int) -> list[bool]:
        """Which leaves hold one slice per record; refuses what is neither the loader's nor a constant."""
        found = [isinstance(x, Tensor) and self._of_records(x, source, size) for x in leaves]
        for place, (x, own) in enumerate(zip(leaves, found, strict=True)):
            if not own and not self._constant(place, x, size):
                kind = f"tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else f"value of {type(x).__name__}"
                self._change(f"input {place + 1} of the model, a {kind}")
                found[place] = has_records(x, size)
        if size and not any(found):
            self._change("a training pass without a tensor of the loader's batch")
            return [has_records(x, size) for x in leaves]
        return found

    def _of_records(self, x: Tensor, source: Sequence[BatchTensor], size: int) -> bool:
        return (not size and has_records(x, 0)) or any(one.is_source(x, size) for one in source)

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

    def _change(self, found: str) -> None:
        self.changed = found
        if not self.trusted:
            raise PlanError(
                "mixing",
                f"{found}, which is neither a tensor of the batch as the loader gave it nor the same in every step",
                "the records as the loader gives them: a loop that changes a batch may mix its records",
                "give what is done to each record as make_private(..., transform=f), which is traced; or "
                'own_code="trusted", if you vouch for the loop: the certificate will say so',
            )
