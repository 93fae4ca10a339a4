"""Models in half precision, and autocast: the loop's loss in float32, and the mean undone before anything is rounded.

A mean over b records hands each of them 1 / b. Rounded to eight bits on its way into the model, that is another number
for every b: one record more would change what all the others add, by up to b / 512 clips. So the model's answer is
handed over in float32, and what comes back is multiplied by b there; past the door nothing knows how many came.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from sordino.per_record.pieces import HALF


class _Door(torch.autograd.Function):
    """(float32 copies of the outputs), whose backward runs the model's own with slopes times `scale`.

    The two graphs are apart, so a loss that reaches into the model past the door is a second backward pass: refused.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, scale: float, inner: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.inner, ctx.scale = inner, scale
        ctx.set_materialize_grads(False)
        return tuple(y.detach().float() if y.dtype in HALF else y.detach().clone() for y in inner)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor, None, None]:
        pairs = [(y, (s * ctx.scale).to(y.dtype)) for y, s in zip(ctx.inner, slopes, strict=True) if s is not None]
        torch.autograd.backward([y for y, _ in pairs], [s for _, s in pairs], retain_graph=True)
        return torch.zeros(()), None, None


def is_half(output: Any) -> bool:
    """Whether a part of what a model answers, that is trained on, is in half precision."""
    return any(y.dtype in HALF for y in tree_flatten(output)[0] if _live(y))


def in_float(output: Any, scale: float) -> Any:
    """The same in float32; its gradients come back times `scale`."""
    leaves, form = tree_flatten(output)
    inner = [y for y in leaves if _live(y)]
    anchor = torch.zeros((), requires_grad=True)
    supply = iter(_Door.apply(anchor, scale, inner))  # type: ignore[no-untyped-call]
    return tree_unflatten([next(supply) if _live(y) else y for y in leaves], form)


def _live(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad
