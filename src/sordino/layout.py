"""The model as one flat vector: positions of its tensors, and which entries are trained. Used by engines and parts.

Order: trainable parameters in the module's order, then floating-point buffers (they are uploaded too, so they are
clipped too). Integer buffers, non-persistent buffers (constants such as the frequencies of a rotary embedding) and
frozen parameters are not aggregated: a module that changes them while it trains is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from sordino.errors import DataError


@dataclass(frozen=True)
class Slot:
    """Name, shape and position of one model tensor in the model's flat vector."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    trainable: bool


@dataclass(frozen=True)
class Layout:
    """Positions of all named tensors of a model in its flat vector."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Return the layout of a module's trainable parameters and floating-point buffers."""
        found = cls.of_shapes((name, tensor.shape, trainable) for name, tensor, trainable in _named(model))
        if not any(slot.trainable for slot in found.slots):
            fix = "set requires_grad; for peft: inference_mode=False, or from_pretrained(..., is_trainable=True)"
            raise DataError("a model with no trainable parameter", "at least one parameter with requires_grad", fix)
        return found

    @classmethod
    def of_shapes(cls, tensors: Iterable[tuple[str, torch.Size, bool]]) -> Layout:
        """Return the layout of tensors that are given as (name, shape, whether it is trained), in this order."""
        slots: list[Slot] = []
        for name, shape, trainable in tensors:
            start = slots[-1].stop if slots else 0
            slots.append(Slot(name, shape, start, start + prod(shape), trainable))
        return cls(tuple(slots))

    @property
    def size(self) -> int:
        return self.slots[-1].stop

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(slot.stop - slot.start for slot in self.slots)

    @property
    def trainable(self) -> int:
        """Number of trained entries; they are at the front, and the rest are buffers."""
        return max(slot.stop for slot in self.slots if slot.trainable)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the model's tensors by name, as views [*shape] of a flat vector [d] or [m, *shape] of rows [m, d]."""
        return {s.name: rows[..., s.start : s.stop].view((*rows.shape[:-1], *s.shape)) for s in self.slots}

    def rows(self, named: Mapping[str, Tensor], count: int) -> Tensor:
        """Concatenate named tensors [count, *shape] into rows [count, d]: the inverse of `views`."""
        return torch.cat([named[slot.name].reshape(count, -1) for slot in self.slots], dim=1)

    def tensors(self, model: nn.Module) -> list[Tensor]:
        return [tensor for _, tensor, _ in _named(model)]

    def flatten(self, model: nn.Module) -> Tensor:
        """Return a new flat vector with the values of a module's tensors."""
        return torch.cat([tensor.detach().reshape(-1) for _, tensor, _ in _named(model)])

    def load(self, model: nn.Module, vector: Tensor) -> None:
        """Copy a flat vector into a module's tensors."""
        with torch.no_grad():
            for slot, (_, tensor, _) in zip(self.slots, _named(model), strict=True):
                tensor.copy_(vector[slot.start : slot.stop].view(slot.shape))

    def bind(self, model: nn.Module, vector: Tensor, gradient: Tensor, channels_last: bool = True) -> None:
        """Make the module's tensors views of the flat `vector`, and its gradients views of the flat `gradient`."""
        view = _channels_last if channels_last else Tensor.view
        for slot, (_, tensor, trainable) in zip(self.slots, _named(model), strict=True):
            tensor.data = view(vector[slot.start : slot.stop], slot.shape)
            if trainable:
                tensor.grad = view(gradient[slot.start : slot.stop], slot.shape)

    def channels_last(self, rows: Tensor) -> Tensor:
        """Return rows [m, d] with convolution kernels in the order O,H,W,I, in which CPU convolutions are fastest."""
        return self._reordered(rows, lambda part, s: part.view(-1, *s).permute(0, 1, 3, 4, 2))

    def channels_first(self, rows: Tensor) -> Tensor:
        """Return rows [m, d] with convolution kernels in the module's order O,I,H,W: the inverse of `channels_last`."""
        return self._reordered(rows, lambda part, s: part.view(-1, s[0], s[2], s[3], s[1]).permute(0, 1, 4, 2, 3))

    def _reordered(self, rows: Tensor, turn: Callable[[Tensor, torch.Size], Tensor]) -> Tensor:
        if not any(len(slot.shape) == 4 for slot in self.slots):
            return rows
        turned = rows.clone()
        for slot in self.slots:
            if len(slot.shape) == 4:
                turned[:, slot.start : slot.stop] = turn(rows[:, slot.start : slot.stop], slot.shape).flatten(1)
        return turned


def _channels_last(part: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) != 4:
        return part.view(shape)
    return part.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter, True
    parts = model.named_modules()
    constant = {f"{path}.{name}" if path else name for path, part in parts for name in part._non_persistent_buffers_set}
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and name not in constant:
            yield name, buffer, False


def copied(model: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Return a deep copy of a module that shares the tensors of `shared`; tensors set by hooks become constants."""
    held = [value for part in model.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    plain = {id(value): value.detach().clone() for value in held if not value.is_leaf}
    return copy.deepcopy(model, plain | {id(value): value for value in shared})
