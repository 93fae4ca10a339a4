"""Record by record: any module, loss or transform by vmap, or one record at a time where vmap cannot.

As the rule of a module without another one, each record gets its own copy of the parameters:

    y_j = f(x_j; w_j) with w_j = w      so   dw_j is the per-record gradient

One forward, so random numbers (dropout) are those of the backward. The copies are an expanded view: only their
gradients take memory.
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

Dims = Sequence[int | None]  # of each leaf: where records lie; None for what all records share
_FAILS = (RuntimeError, ValueError, NotImplementedError, UserWarning)  # vmap warns where it would loop slowly


def each_record(function: Callable[..., Any], leaves: Sequence[Any], dims: Dims, axis: int = 0) -> Any:
    """function(*leaves) for each record by itself; its tensors, batches of one along `axis`, are joined along it."""
    try:
        return by_vmap(function, leaves, dims, axis)
    except _FAILS:
        return one_by_one(function, leaves, dims, axis)


def by_vmap(function: Callable[..., Any], leaves: Sequence[Any], dims: Dims, axis: int) -> Any:
    """`each_record` by vmap alone."""
    one, forms = _flat(function, leaves, dims)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        in_dims = tuple(d for d in dims if d is not None)
        run = vmap(one, in_dims=in_dims, out_dims=axis, randomness="different")
        joined = [y.flatten(axis, axis + 1) for y in run(*_moving(leaves, dims))]
    return _nested(joined, forms[0])


def one_by_one(function: Callable[..., Any], leaves: Sequence[Any], dims: Dims, axis: int) -> Any:
    """`each_record` by a loop."""
    one, forms = _flat(function, leaves, dims)
    moving, places = _moving(leaves, dims), [d for d in dims if d is not None]
    rows = [
        one(*(x.select(d, j) for x, d in zip(moving, places, strict=True))) for j in range(moving[0].shape[places[0]])
    ]
    return _nested([torch.cat(parts, axis) for parts in zip(*rows, strict=True)], forms[0])


def _moving(leaves: Sequence[Any], dims: Dims) -> list[Tensor]:
    return [x for x, d in zip(leaves, dims, strict=True) if d is not None]


def _flat(
    function: Callable[..., Any], leaves: Sequence[Any], dims: Dims
) -> tuple[Callable[..., list[Tensor]], list[Any]]:
    """The function from the leaves of one record to its tensors, and how its answers were nested."""
    forms: list[Any] = []

    def one(*items: Tensor) -> list[Tensor]:
        supply = iter(items)
        answer = function(*[x if d is None else next(supply) for x, d in zip(leaves, dims, strict=True)])
        found, form = tree_flatten(answer)
        forms.append(([isinstance(x, Tensor) for x in found], form))
        return [x for x in found if isinstance(x, Tensor)]

    return one, forms


def _nested(tensors: list[Tensor], nesting: tuple[list[bool], Any]) -> Any:
    """Tensors as the answer had them; None in place of what is no tensor (a cache of keys)."""
    is_tensor, form = nesting
    supply = iter(tensors)
    return tree_unflatten([next(supply) if tensor else None for tensor in is_tensor], form)


class VmapRule(nn.Module):
    """Rule of any module: `rule(tape, module, axis, ...)`; remembers whether vmap can run it."""

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
        """The module's output, computed for each record by itself."""
        if tape.batch == 0:
            with torch.no_grad():
                empty = self.run(*args, **kwargs)
            return tree_map(lambda y: y + tape.anchor if _real(y) else y, empty)
        own = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        copies = {f"unit.{name}": _copies(tape, p) for name, p in own if self.names is None or name in self.names}
        leaves, form = tree_flatten((args, kwargs))
        holds = [isinstance(x, Tensor) and x.dim() > axis and x.shape[axis] == tape.batch for x in leaves]
        holds = holds if self.records is None else list(self.records)

        def one(*items: Any) -> Any:
            weights = dict(zip(copies, items[: len(copies)], strict=True))
            inputs = [x.unsqueeze(axis) if own else x for x, own in zip(items[len(copies) :], holds, strict=True)]
            one_args, one_kwargs = tree_unflatten(inputs, form)
            return functional_call(self, weights, one_args, one_kwargs)

        dims = [*[0] * len(copies), *(axis if own else None for own in holds)]
        if self.batched:
            try:
                return by_vmap(one, [*copies.values(), *leaves], dims, axis)
            except _FAILS:
                self.batched = False
        return one_by_one(one, [*copies.values(), *leaves], dims, axis)


def _real(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point()


def _copies(tape: Tape, parameter: nn.Parameter) -> Tensor:
    def use(slope: Tensor) -> Pieces:
        yield parameter, Rows(slope)

    return tape.copies(parameter, use)
