"""Does a gradient reach what is to be trained? Asked before the first round, of a made-up record: it tells of nobody.

Noise moves every weight that is sent, so an adapter that is not part of the forward pass looks trained from outside.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from sordino.data.named import ByName
from sordino.data.task import Task
from sordino.errors import DataError
from sordino.layout import copied

_LOG = logging.getLogger("sordino")
_FIX = "check the names of the adapters' target modules, and that nothing on the way is detached or under no_grad"


def check_reach(task: Task) -> None:
    """Refuse a partly frozen model whose loss depends on nothing that is trained; say which tensors it leaves out."""
    fixed = any(not parameter.requires_grad for parameter in task.model.parameters())
    lost, count = _unreached(task) if fixed or isinstance(task.model, ByName) else ([], 1)
    if len(lost) == count:
        found = f"a model whose loss depends on none of its {count} tensors with requires_grad (first: {lost[0]!r})"
        raise DataError(found, "trained parameters that are part of the forward pass", _FIX)
    if lost:
        _LOG.warning(
            "The loss depends on %d of %d trained tensors only; the others (first: %s) would get noise and nothing "
            "else: freeze them with requires_grad_(False).", count - len(lost), count, lost[0],
        )  # fmt: skip


def _unreached(task: Task) -> tuple[list[str], int]:
    """Names of the trained tensors that the loss of a made-up record does not depend on, and how many are trained."""
    model = copied(task.model).eval()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    x, y = (_ones(side).to(task.device) for side in (task.clients.records.x, task.clients.records.y))
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            total: Any = task.losses(model(x), y * 0).sum()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return [], len(named)  # it cannot be asked with made-up records
    if not total.requires_grad:
        return list(named), len(named)
    slopes = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return [name for name, slope in zip(named, slopes, strict=True) if slope is None], len(named)


def _ones(table: Tensor) -> Tensor:
    return torch.ones((2, *table.shape[1:]), dtype=table.dtype)
