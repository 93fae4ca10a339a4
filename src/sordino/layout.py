"""The model as one flat vector: where each named tensor lies, and which entries are trained.

Order: trainable parameters in the module's order, then floating-point buffers (they are uploaded too, so they are
clipped too). Integer buffers, buffers that no checkpoint keeps (persistent=False: constants, as the frequencies of a
rotary embedding) and frozen parameters are not aggregated: whoever changes one of them while it trains is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from sordino.errors import DataError


@dataclass(frozen=True)
class Slot:
    """One named tensor's place in the vector."""

    name: str
    shape: torch.Size
    start: int
    trainable: bool

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Flat vector <-> named tensors."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """The layout of a module's trainable parameters and floating-point buffers."""
        slots: list[Slot] = []
        for name, tensor, trainable in _named(model):
            start = slots[-1].stop if slots else 0
            slots.append(Slot(name, tensor.shape, start, trainable))
        if not any(slot.trainable for slot in slots):
            fix = "adapters of peft: inference_mode=False, or PeftModel.from_pretrained(..., is_trainable=True)"
            raise DataError("a model with no trainable parameter", "at least one parameter with requires_grad", fix)
        return cls(tuple(slots))

    @property
    def size(self) -> int:
        """Length of the vector."""
        return self.slots[-1].stop

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries of every tensor, in order."""
        return tuple(slot.stop - slot.start for slot in self.slots)

    @property
    def trainable(self) -> int:
        """How many entries, from the front, are trained (the rest are buffers)."""
        return max(slot.stop for slot in self.slots if slot.trainable)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Named views of [d] or [m, d]: [*shape] or [m, *shape]."""
        return {s.name: rows[..., s.start : s.stop].view((*rows.shape[:-1], *s.shape)) for s in self.slots}

    def tensors(self, model: nn.Module) -> list[Tensor]:
        """A module's tensors that lie in the vector, in its order."""
        return [tensor for _, tensor, _ in _named(model)]

    def flatten(self, model: nn.Module) -> Tensor:
        """A module's vector, as a copy."""
        return torch.cat([tensor.detach().reshape(-1) for _, tensor, _ in _named(model)])

    def load(self, model: nn.Module, vector: Tensor) -> None:
        """Copy a vector into a module."""
        views = self.views(vector)
        with torch.no_grad():
            for name, tensor, _ in _named(model):
                tensor.copy_(views[name])

    def bind(self, model: nn.Module, vector: Tensor, gradient: Tensor, channels_last: bool = True) -> None:
        """Make the module's tensors views of `vector`, and its gradients views of `gradient`."""
        view = _channels_last if channels_last else Tensor.view
        for slot, (_, tensor, trainable) in zip(self.slots, _named(model), strict=True):
            tensor.data = view(vector[slot.start : slot.stop], slot.shape)
            if trainable:
                tensor.grad = view(gradient[slot.start : slot.stop], slot.shape)

    def channels_last(self, rows: Tensor) -> Tensor:
        """Rows [m, d] with every 4-dimensional tensor in the order O,H,W,I: how a CPU convolves fastest."""
        return self._reordered(rows, lambda part, s: part.view(-1, *s).permute(0, 1, 3, 4, 2))

    def channels_first(self, rows: Tensor) -> Tensor:
        """The inverse of `channels_last`."""
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
    """A view of logical `shape` on entries that lie in the order O,H,W,I (4-dimensional), or as they are."""
    if len(shape) != 4:
        return part.view(shape)
    return part.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter, True
    constant = constants(model)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and name not in constant:
            yield name, buffer, False


def constants(model: nn.Module) -> set[str]:
    """Names of the buffers that no checkpoint keeps."""
    parts = model.named_modules()
    return {f"{path}.{name}" if path else name for path, part in parts for name in part._non_persistent_buffers_set}


def copied(model: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """A deep copy, but for what is `shared`; what hooks compute from parameters (old weight norm) comes as numbers."""
    held = [value for part in model.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    plain = {id(value): value.detach().clone() for value in held if not value.is_leaf}
    return copy.deepcopy(model, plain | {id(value): value for value in shared})
