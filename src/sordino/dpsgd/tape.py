"""Tape of one forward pass, from which the backward pass yields per-record gradients; filled by the layer rules.

Layers run on detached weights and pass their outputs to `Tape.watch`; the backward pass then computes no weight
gradient at all, only d loss / d output of every layer, from which the layer's rule makes its `Piece`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from sordino import codec
from sordino.dpsgd.pieces import Piece, merge_pieces, wide
from sordino.errors import PlanError

Pieces = Iterable[tuple[nn.Parameter | None, Piece]]
Use = Callable[[Tensor], Pieces]  # from d loss / d output to the pieces of the parameters


@codec.hides_values
@dataclass
class Call:
    """One use of a layer: its rule, and the gradient of its output once the backward pass has run."""

    use: Use
    shape: tuple[int, ...]
    axis: int = 0
    kept: Tensor | None = None
    version: int = 0
    slope: Tensor | None = None

    def add(self, slope: Tensor) -> None:
        """Add the gradient of one backward pass."""
        slope = slope.view(self.shape) if slope.shape != self.shape else slope
        self.slope = slope if self.slope is None else self.slope + slope

    def pieces(self) -> Pieces:
        """The rule's pieces; refused where its input was overwritten."""
        if self.slope is None:
            return ()
        if self.kept is not None and self.kept._version != self.version:
            raise RuntimeError("a layer's input was changed in place before the backward pass; use inplace=False there")
        return self.use(wide(self.slope))

    def leaks(self, batch: int, own: int = 0) -> bool:
        """Whether the gradient of one record's loss reaches other records here."""
        if self.slope is None:
            return False
        slices = self.slope.movedim(self.axis, 0)
        width = len(slices) // batch
        others = torch.cat([slices[: own * width], slices[(own + 1) * width :]])
        return bool(((others != 0) & others.isfinite()).any())


class UnrecordableError(PlanError):
    """Layers in which the rules cannot tell records apart: the whole model must run record by record."""

    def __init__(self, found: str) -> None:
        fix = "keep the batch as the first axis, or pass whole=True to run the model record by record"
        super().__init__("per-record", found, "layers with one slice per record", fix)


class Watch(torch.autograd.Function):
    """The identity; its backward keeps the gradient. `anchor` makes the output differentiable."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, call: Call) -> Tensor:
        ctx.call = call
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.add(slopes[0])
        return slopes[0], _ZERO, None


class Copies(torch.autograd.Function):
    """One copy of a parameter per record, as a view; the backward keeps their gradients."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, anchor: Tensor, call: Call, batch: int) -> Tensor:
        ctx.call = call
        return parameter.expand(batch, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.add(slopes[0])
        return None, _ZERO, None, None


_ZERO = torch.zeros(())


class Tape:
    """The calls of one batch."""

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self.batch = 0
        self.channels_last = False  # images in that order whatever the input's: fast, but `view` may not fit it
        self.calls: list[Call] = []

    def begin(self, batch: int) -> None:
        """The next forward pass has this many records."""
        self.batch = batch

    def clear(self) -> None:
        self.calls = []
        self.anchor.grad = None

    def check_slices(self, leaves: Sequence[Tensor], rows: Iterable[int], parameters: Sequence[Tensor] = ()) -> None:
        """Refuse layers in which the gradient of one record's output reaches other records' slices.

        `leaves` are outputs [b, ...]. Found is a rule that takes the wrong axis for the records, a layer that mixes
        them, and a use of `parameters` past the layers.
        """
        for row in rows:
            figure = torch.stack([y[row].float().sum() for y in leaves]).sum()
            wanted = [self.anchor, *parameters]
            slopes = torch.autograd.grad(figure, wanted, allow_unused=True, retain_graph=True)
            if any(slope is not None for slope in slopes[1:]):
                raise UnrecordableError("a parameter used outside the layer that owns it")
            leaks = any(call.leaks(self.batch, row) for call in self.calls)
            for call in self.calls:
                call.slope = None
            if leaks:
                raise UnrecordableError("layers whose gradient for one record touches other records")

    def records(self, x: Tensor, axis: int, tail: int) -> Tensor:
        """[b, T, ...] from a tensor with the records along `axis`; the last tail - 1 dimensions stay."""
        if axis == 0 and self.batch and x.dim() and len(x) != self.batch and len(x) % self.batch == 0:
            x = x.view(self.batch, -1, *x.shape[1:])  # records times positions, flattened: `leaks` verifies it
        self.check(x, axis, tail)
        x = x.detach().movedim(axis, 0)
        shape = (len(x), prod(x.shape[1 : x.dim() - tail + 1]), *x.shape[x.dim() - tail + 1 :])
        return x.reshape(shape)

    def check(self, x: Tensor, axis: int, least: int) -> None:
        """Refuse an input without one slice per record."""
        if x.dim() <= axis or x.dim() < least or x.shape[axis] != self.batch:
            found = f"an input of shape {list(x.shape)} where {self.batch} records lie along axis {axis}"
            raise UnrecordableError(found)

    def watch(
        self, output: Tensor, use: Use, kept: Tensor | None = None, axis: int = 0, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """`output` in the given shape, watched: a fresh tensor, no view, that no earlier operation keeps.

        `kept` is what the rule must find unchanged, `axis` where the records lie.
        """
        call = Call(use, shape or tuple(output.shape), axis, kept, 0 if kept is None else kept._version)
        self.calls.append(call)
        watched: Tensor = Watch.apply(output, self.anchor, call)  # type: ignore[no-untyped-call]
        return watched if shape is None else watched.view(shape)

    def copies(self, parameter: nn.Parameter, use: Use) -> Tensor:
        """[b, *shape]: each record's own copy of a parameter, watched."""
        self.calls.append(Call(use, (self.batch, *parameter.shape)))
        own: Tensor = Copies.apply(parameter.detach(), self.anchor, self.calls[-1], self.batch)  # type: ignore[no-untyped-call]
        return own

    def pieces(self) -> dict[nn.Parameter, Piece]:
        """Per-record gradients of every trainable parameter that took part."""
        uses: dict[nn.Parameter, list[Piece]] = {}
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for call in self.calls:
                for parameter, piece in call.pieces():
                    if parameter is not None and parameter.requires_grad:
                        uses.setdefault(parameter, []).append(piece)
            return {parameter: merge_pieces(pieces) for parameter, pieces in uses.items()}


def first_length(args: Any, kwargs: Any) -> int:
    """Length of the first tensor of the arguments: the records of a batch."""
    return next((len(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.dim()), 0)
