"""Any module: each record gets its own copy of the parameters, and autograd hands over their gradients.

    y_j = f(x_j; w_j) with w_j = w      so   dw_j is the per-record gradient

One forward, so coins (dropout) are those of the backward; through vmap, or one record at a time where vmap cannot.
The copies are an expanded view: only their gradients take memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino.dpsgd.pieces import Rows
from sordino.dpsgd.tape import Pieces, Tape


class Anything(nn.Module):
    """A module as `rule(tape, module, axis, ...)`; remembers whether vmap can run it."""

    def __init__(
        self, unit: nn.Module, records: Sequence[bool] | None = None, names: Collection[str] | None = None
    ) -> None:
        """`records` says which leaves of the arguments hold records (None: by length); `names` the parameters in it."""
        super().__init__()
        self.unit, self.records, self.names = unit, records, names
        self.run: Callable[..., Any] = unit.forward  # past the hooks: they have run already
        self.batched = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def rule(self, tape: Tape, module: nn.Module, axis: int, *args: Any, **kwargs: Any) -> Any:
        """The module's output, one record's at a time in effect."""
        if tape.batch == 0:
            with torch.no_grad():
                empty = self.run(*args, **kwargs)
            return tree_map(tape.anchored, empty)
        own = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        copies = {f"unit.{name}": _copies(tape, p) for name, p in own if self.names is None or name in self.names}
        leaves, form = tree_flatten((args, kwargs))
        mapped = [isinstance(x, Tensor) and x.dim() > axis and x.shape[axis] == tape.batch for x in leaves]
        mapped = mapped if self.records is None else list(self.records)

        def one(own: dict[str, Tensor], *items: Any) -> Any:
            back = [x.unsqueeze(axis) if m else x for x, m in zip(items, mapped, strict=True)]
            one_args, one_kwargs = tree_unflatten(back, form)
            return functional_call(self, own, one_args, one_kwargs)

        return self._each(one, copies, leaves, mapped, axis)

    def _each(self, one: Any, copies: dict[str, Tensor], leaves: list[Any], mapped: list[bool], axis: int) -> Any:
        if self.batched:
            try:
                return _through_vmap(one, copies, leaves, mapped, axis)
            except (RuntimeError, ValueError, NotImplementedError, UserWarning):
                self.batched = False
        return _through_loop(one, copies, leaves, mapped, axis)


def _copies(tape: Tape, parameter: nn.Parameter) -> Tensor:
    def use(slope: Tensor) -> Pieces:
        yield parameter, Rows(slope)

    return tape.copies(parameter, use)


def _through_vmap(one: Any, copies: dict[str, Tensor], leaves: list[Any], mapped: list[bool], axis: int) -> Any:
    fixed = [None if m else x for x, m in zip(leaves, mapped, strict=True)]

    def inner(own: dict[str, Tensor], *moving: Tensor) -> Any:
        supply = iter(moving)
        return one(own, *[next(supply) if m else x for x, m in zip(fixed, mapped, strict=True)])

    forms: list[Any] = []

    def tensors(own: dict[str, Tensor], *moving: Tensor) -> list[Tensor]:
        found, form = _parted(inner(own, *moving))
        forms.append(form)
        return found

    moving = [x for x, m in zip(leaves, mapped, strict=True) if m]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # vmap warns where it would loop slowly
        run = vmap(tensors, in_dims=(0, *[axis] * len(moving)), out_dims=axis, randomness="different")
        return _whole([y.flatten(axis, axis + 1) for y in run(copies, *moving)], forms[0])


def _through_loop(one: Any, copies: dict[str, Tensor], leaves: list[Any], mapped: list[bool], axis: int) -> Any:
    outputs = []
    for j in range(len(next(iter(copies.values())))):
        items = [x.select(axis, j) if m else x for x, m in zip(leaves, mapped, strict=True)]
        outputs.append(_parted(one({name: rows[j] for name, rows in copies.items()}, *items)))
    joined = [torch.cat(parts, axis) for parts in zip(*[found for found, _ in outputs], strict=True)]
    return _whole(joined, outputs[0][1])


def _parted(answer: Any) -> tuple[list[Tensor], Any]:
    """The tensors of what a module answered, and its form; what else it holds (a cache of keys) stays behind."""
    leaves, form = tree_flatten(answer)
    return [x for x in leaves if isinstance(x, Tensor)], ([isinstance(x, Tensor) for x in leaves], form)


def _whole(tensors: list[Tensor], parted: tuple[list[bool], Any]) -> Any:
    """The inverse of `_parted`, with None where no tensor was."""
    there, form = parted
    supply = iter(tensors)
    return tree_unflatten([next(supply) if tensor else None for tensor in there], form)
