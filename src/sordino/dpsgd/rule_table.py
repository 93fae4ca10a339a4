"""Table of per-record gradient rules by layer type, and a rule for all other modules. Used by dpsgd/model_graphs.py.

A layer with a rule is one site. Any other module that owns parameters is one site together with all modules inside it,
and runs by `VmapRule`: by vmap, or one record at a time where vmap fails. Every record j then gets its own copy w_j of
the parameters w, with output y_j and input x_j:

    y_j = f(x_j; w_j) with w_j = w      so   dw_j is the per-record gradient

There is one forward pass, so the backward pass sees the same random numbers (dropout). The copies are an expanded view:
only their gradients use memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino.dpsgd import layer_rules as rules
from sordino.dpsgd.layer_rules import Rule
from sordino.dpsgd.pieces import Pieces, Rows, Tape
from sordino.graph.captured import replaced_forwards

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: lambda tape, module, axis, input: rules.linear(tape, input, module.weight, module.bias, axis),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), rules.convolution),
    nn.Embedding: rules.embedding,
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), rules.layer_norm),
    **dict.fromkeys((nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), rules.group_norm),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), rules.recurrence),
    nn.MultiheadAttention: rules.attention,
}
_TRANSFORMERS = (
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)


@dataclass(frozen=True)
class Site:
    """Module that runs by a per-record gradient rule; records lie along `axis` of its input."""

    module: nn.Module
    rule: Rule
    axis: int

    @property
    def by_vmap(self) -> bool:
        return isinstance(getattr(self.rule, "__self__", None), VmapRule)


def sites(model: nn.Module, whole: bool = False) -> list[Site]:
    """Return the modules of a model that run by a per-record gradient rule; with `whole`, the model alone."""
    if whole:
        return [Site(model, VmapRule(model).rule, 0)]
    axes: dict[nn.Module, int] = {}
    for part in model.modules():
        if isinstance(part, _TRANSFORMERS):  # inside torch's transformers records lie along axis 1 by default
            attend = next((m for m in part.modules() if isinstance(m, nn.MultiheadAttention)), None)
            if attend is not None and not attend.batch_first:
                axes.update(dict.fromkeys(part.modules(), 1))
    return [Site(module, rule, axes.get(module, 0)) for module, rule in dict(_visit(model)).items()]


def run_by_rules(tape: Tape, found: Sequence[Site]) -> AbstractContextManager[None]:
    """Context in which the found modules run by their per-record gradient rules instead of forward (not in no_grad)."""
    return replaced_forwards([(site.module, _forward_by_rule(tape, site)) for site in found])


def _forward_by_rule(tape: Tape, site: Site) -> Any:
    plain = site.module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return site.rule(tape, site.module, site.axis, *args, **kwargs)

    return forward


def _visit(module: nn.Module) -> Iterator[tuple[nn.Module, Rule]]:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    rule = rule_of(module)
    if rule is not None:
        yield module, rule
    elif _owns(module):
        yield module, VmapRule(module).rule
    else:
        for child in module.children():
            yield from _visit(child)


def _owns(module: nn.Module) -> bool:
    """Return whether the module has parameters that no module inside it has, or is parametrized (weight norm)."""
    mine = [p for p in module._parameters.values() if p is not None and p.requires_grad]
    inside = {id(p) for child in module.children() for p in child.parameters()} if mine else set()
    return any(id(p) not in inside for p in mine) or hasattr(module, "parametrizations")


def rule_of(module: nn.Module) -> Rule | None:
    """Return the per-record gradient rule of an unmodified torch layer; None for any other module."""
    if hasattr(module, "parametrizations") or module._forward_pre_hooks:  # the latter: old-style weight norm
        return None
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return None
    if isinstance(module, nn.LSTM) and module.proj_size:
        return None
    if not isinstance(getattr(module, "weight", None), nn.Parameter | None):
        return None
    kinds = [kind for kind in RULES if isinstance(module, kind) and type(module).forward is kind.forward]
    return RULES[kinds[0]] if kinds else rules.third_party_rule(module)


Dims = Sequence[int | None]  # axis of the records in every argument; None for an argument that all records share
_FAILS = (RuntimeError, ValueError, NotImplementedError, UserWarning)  # vmap warns where it would loop slowly


def each_record(function: Callable[..., Any], leaves: Sequence[Any], dims: Dims, axis: int = 0) -> Any:
    """Apply `function` to each record separately, as a batch of one, and concatenate the outputs along `axis`."""
    try:
        return by_vmap(function, leaves, dims, axis)
    except _FAILS:
        return one_by_one(function, leaves, dims, axis)


def by_vmap(function: Callable[..., Any], leaves: Sequence[Any], dims: Dims, axis: int) -> Any:
    """Apply `function` to each record separately by torch.func.vmap, and concatenate the outputs along `axis`."""
    one, forms, moving, places = _flat(function, leaves, dims)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run = vmap(one, in_dims=tuple(places), out_dims=axis, randomness="different")
        joined = [y.flatten(axis, axis + 1) for y in run(*moving)]
    return _nested(joined, *forms[0])


def one_by_one(function: Callable[..., Any], leaves: Sequence[Any], dims: Dims, axis: int) -> Any:
    """Apply `function` to each record separately in a Python loop, and concatenate the outputs along `axis`."""
    one, forms, moving, places = _flat(function, leaves, dims)
    count = moving[0].shape[places[0]]
    rows = [one(*(x.select(d, j) for x, d in zip(moving, places, strict=True))) for j in range(count)]
    return _nested([torch.cat(parts, axis) for parts in zip(*rows, strict=True)], *forms[0])


def _flat(
    function: Callable[..., Any], leaves: Sequence[Any], dims: Dims
) -> tuple[Callable[..., list[Tensor]], list[Any], list[Tensor], list[int]]:
    """Return `function` for the tensors of one record, a list that receives its output's structure, tensors, axes."""
    forms: list[Any] = []

    def one(*items: Tensor) -> list[Tensor]:
        supply = iter(items)
        result = function(*[x if d is None else next(supply) for x, d in zip(leaves, dims, strict=True)])
        found, form = tree_flatten(result)
        forms.append(([isinstance(x, Tensor) for x in found], form))
        return [x for x in found if isinstance(x, Tensor)]

    moving = [x for x, d in zip(leaves, dims, strict=True) if d is not None]
    return one, forms, moving, [d for d in dims if d is not None]


def _nested(tensors: list[Tensor], is_tensor: list[bool], form: Any) -> Any:
    """Return tensors in the structure `form`, with None for entries that were no tensors."""
    supply = iter(tensors)
    return tree_unflatten([next(supply) if tensor else None for tensor in is_tensor], form)


class VmapRule(nn.Module):
    """Per-record gradient rule for any module: each record runs separately, by vmap or, if vmap fails once, in a loop.

    `records` marks the arguments that hold records; without it these are the tensors as long as the batch. `names` are
    the parameters to copy per record, by default all.
    """

    def __init__(
        self, unit: nn.Module, records: Sequence[bool] | None = None, names: Collection[str] | None = None
    ) -> None:
        super().__init__()
        self.unit, self.records, self.names = unit, records, names
        self.run: Callable[..., Any] = unit.forward  # without the hooks, which have run already
        self.batched = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def rule(self, tape: Tape, module: nn.Module, axis: int, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, computed for each record separately."""
        if tape.batch == 0:
            with torch.no_grad():
                empty = self.run(*args, **kwargs)
            return tree_map(lambda y: y + tape.anchor if isinstance(y, Tensor) and y.is_floating_point() else y, empty)
        own = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        chosen = [(name, p) for name, p in own if self.names is None or name in self.names]
        copies = {f"unit.{name}": tape.copies(p, partial(_rows, p)) for name, p in chosen}
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


def _rows(parameter: nn.Parameter, slope: Tensor) -> Pieces:
    yield parameter, Rows(slope)
