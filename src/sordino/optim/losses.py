"""The sure way to a loss that keeps records apart: one value per record, computed from that record's output alone.

    loss = 1 / b * sum_j f(output_j, target_j),     f run on every record by itself (vmap, or a loop where vmap cannot)

Whatever f does with a batch, it never sees one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino.data.named import is_causal
from sordino.errors import DataError, PlanError
from sordino.parts.losses import loss_of
from sordino.per_record.company import SAME, distance, has_records, taken
from sordino.per_record.still import still
from sordino.rng import global_coins, standing_at

_OWN = 'reduction="none", then a sum or a mean over the entries of each record'
PerRecord = Callable[..., Tensor]  # (output, *targets) -> one value per record [b]


def named_loss(kind: str, model: nn.Module) -> PerRecord:
    """A loss by its kind, of what a model answers or of its logits; a causal model's tokens have the next for label."""
    own = loss_of(kind)
    shift = own.targets == "token" and is_causal(model)

    def each(output: Any, labels: Tensor) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits
        return own(logits[:, :-1], labels[:, 1:]) if shift else own(logits, labels)

    return each


class RecordLoss:
    """A user's loss, record by record; `slopes` are those that a backward pass through it alone leaves at `outputs`."""

    def __init__(self, loss: PerRecord) -> None:
        self.loss = loss
        self.compared = False  # with what the loss says of a whole batch
        self.coins = global_coins()
        self.slopes: list[tuple[Tensor, Tensor]] = []  # (what arrived, what was due)

    def __call__(self, output: Any, targets: tuple[Any, ...], known: list[Tensor], size: int) -> Tensor:
        """The mean over the batch; `known` are the tensors that the model gave for this batch."""
        self._refuse_others(output, known)
        leaves = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
        if not size:
            return torch.stack([x.sum() for x in leaves]).sum() * 0
        one = taken(tree_map(_kept, (output, targets)), size, torch.zeros(1, dtype=torch.int64))
        before = self._said(*one)
        values = self._each(output, targets, size)
        self._refuse_memory(before, self._said(*one))
        self._compare(output, targets, values)
        mean = values.mean()
        due = torch.autograd.grad(mean, leaves, retain_graph=True, allow_unused=True)
        self.slopes = []
        for leaf, slope in zip(leaves, due, strict=True):
            self._expect(leaf, torch.zeros_like(leaf) if slope is None else slope.detach())
        return mean

    def _expect(self, leaf: Tensor, due: Tensor) -> None:
        arrived = torch.zeros_like(leaf, requires_grad=False)
        self.slopes.append((arrived, due))

        def add(slope: Tensor) -> None:
            arrived.add_(slope.detach())

        leaf.register_hook(add)  # type: ignore[no-untyped-call]

    def _refuse_others(self, output: Any, known: list[Tensor]) -> None:
        theirs = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
        if not theirs or any(all(x is not y for y in known) for x in theirs):
            found = "optimizer.loss of something else than what model(x) gave for this batch"
            raise PlanError("loop", found, "the output as it came", "change it inside the loss, record by record")

    def _each(self, output: Any, targets: tuple[Any, ...], size: int) -> Tensor:
        leaves, form = tree_flatten((output, targets))
        mapped = [has_records(x, size) for x in leaves]
        moving = [x for x, m in zip(leaves, mapped, strict=True) if m]

        def one(*items: Tensor) -> Tensor:
            supply = iter(items)
            own = [next(supply)[None] if m else x for x, m in zip(leaves, mapped, strict=True)]
            out, rest = tree_unflatten(own, form)
            return _single(self.loss(out, *rest))

        try:
            values: Tensor = vmap(one, randomness="different")(*moving)
        except (RuntimeError, NotImplementedError):
            values = torch.stack([one(*(x[j] for x in moving)) for j in range(size)])
        return values

    @torch.no_grad()
    def _compare(self, output: Any, targets: tuple[Any, ...], values: Tensor) -> None:
        """Once: a loss that says something else of the whole batch meant to compare records."""
        if self.compared or len(values) < 2:
            return
        with still():
            apart, together = self._each(output, targets, len(values)).detach(), self.loss(output, *targets).detach()
        if together.shape != apart.shape:
            found = f"a loss of shape {list(together.shape)} for {len(apart)} records"
            raise DataError(found, "one value per record", _OWN)
        if not torch.allclose(together, apart, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise PlanError(
                "reduction",
                "a loss whose value for one record depends on the other records of the batch",
                "a function of one record's output and target",
                "divide by a constant, or by what the record itself has, never by a count of the batch",
            )
        self.compared = True

    @torch.no_grad()
    def _said(self, output: Any, targets: tuple[Any, ...]) -> Tensor:
        """The loss of one record, with coins that stand still."""
        with still(), standing_at(self.coins):
            return self.loss(output, *targets).detach().clone()

    def _refuse_memory(self, before: Tensor, after: Tensor) -> None:
        """A batch may not change what the loss says of a record; its owner may, between batches, as a schedule does."""
        if not distance([before], [after]) <= SAME:
            raise PlanError(
                "reduction",
                "a loss that says something else of a record after a batch than before it",
                "a function of one record's output and target, which remembers nothing: no noise is added there",
                "keep what is counted or averaged out of the loss, and take random numbers from torch",
            )

    def verify(self) -> None:
        """Refuse a backward pass that came by another way than this loss alone."""
        slopes, self.slopes = self.slopes, []
        if not slopes or any(not torch.allclose(a, b, rtol=1e-3, atol=1e-12, equal_nan=True) for a, b in slopes):
            raise PlanError(
                "loop",
                "a backward pass that is not that of optimizer.loss(output, target) alone",
                "the loss that make_private was given",
                "call optimizer.loss(model(x), y).backward(), and put every term into that loss",
            )


def _kept(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else item


def _single(value: Tensor) -> Tensor:
    if value.shape != (1,):
        found = f"a loss of shape {list(value.shape)} for 1 record"
        raise DataError(found, "one value per record", _OWN)
    return value[0]
