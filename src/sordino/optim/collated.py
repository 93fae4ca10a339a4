"""A collate_fn makes a batch of records before any model sees it: one that mixes them (mixup, CutMix) is refused.

    collate([r_1, ..., r_k])[i] = collate([r_i])[0]    in every tensor with a row for each record, coins standing still

Rows whose length depends on the longest of the batch are padded ones; of these the model's looks have to tell.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, default_collate

from sordino.errors import PlanError
from sordino.graph import BY_CONSTRUCTION, TRUSTED, Grade
from sordino.per_record.company import SAME, distance, has_records
from sordino.per_record.still import still
from sordino.rng import global_coins, standing_at

TRIED = 4  # records
_FAILS = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError)

Collates = Callable[[list[Any]], Any]


def check_collate(loader: DataLoader[Any]) -> None:
    """Refuse a collate_fn whose row for one record depends on the others; what is no row of each is looked at later."""
    dataset: Any = loader.dataset
    if loader.collate_fn is default_collate or len(dataset) < 2:
        return
    rows = partial(_rows, loader.collate_fn, global_coins())
    with torch.random.fork_rng(devices=[]), standing_at(global_coins()):
        records = [dataset[i] for i in range(min(TRIED, len(dataset)))]
    try:
        together = rows(records)
    except _FAILS:
        return  # the loop will show it
    try:
        alone = [rows([record]) for record in records]
    except _FAILS:
        raise _refused() from None  # it runs in company only
    if _same(alone[0], rows(records[:1])):  # else it has coins that are not torch's
        _check_rows(together, alone)


def collate_grade(loader: DataLoader[Any], refuse: bool) -> tuple[Grade, str]:
    """What is proved of a collate_fn: torch's own and those of transformers are known, any other is code of its owner.

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


def _rows(collate: Collates, coins: Any, some: list[Any]) -> list[Any]:
    """The parts of a batch; the records themselves stay as they are."""
    with still(), standing_at(coins):
        batch = collate(copy.deepcopy(some))
    return tree_flatten(dict(batch) if hasattr(batch, "keys") else batch)[0]


def _check_rows(together: list[Any], alone: list[list[Any]]) -> None:
    """Row i of a batch is the row of record i alone, where they are of one shape."""
    for parts in zip(together, *alone, strict=False):
        whole, *own = parts
        if not has_records(whole, len(own)) or not all(has_records(item, 1) for item in own):
            continue
        pairs = [(row, item[0]) for row, item in zip(whole, own, strict=True) if row.shape == item[0].shape]
        if any(distance([row.double()], [item.double()]) > SAME for row, item in pairs):
            raise _refused()


def _same(one: list[Any], other: list[Any]) -> bool:
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return all(distance([a.double()], [b.double()]) <= SAME for a, b in pairs)


def _refused() -> PlanError:
    return PlanError(
        "mixing",
        "a collate_fn whose row for one record depends on the other records of the batch",
        "rows of one record each: a record that is in two rows moves a step by two clips",
        "leave mixup and its kin out; turn, crop and mask each record by itself",
    )
