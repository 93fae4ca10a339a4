"""Table of the rules that record each layer's per-record gradients, chosen from the model alone; used by the recorders.

A layer with a rule of its own is one site. Any other module that owns parameters is one site together with all that
is inside it, run by `VmapRule`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sordino.dpsgd.convolution import convolution
from sordino.dpsgd.layer_rules import Rule, embedding, group_norm, layer_norm, linear_layer, third_party_rule
from sordino.dpsgd.sequence_layers import attention, recurrence
from sordino.dpsgd.tape import Tape
from sordino.dpsgd.vmap_fallback import VmapRule

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear_layer,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), convolution),
    nn.Embedding: embedding,
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), layer_norm),
    **dict.fromkeys((nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), group_norm),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), recurrence),
    nn.MultiheadAttention: attention,
}
_TRANSFORMERS = (
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)


@dataclass(frozen=True)
class Site:
    """A module, its rule, and the axis of its input along which records lie."""

    module: nn.Module
    rule: Rule
    axis: int

    @property
    def by_vmap(self) -> bool:
        return isinstance(getattr(self.rule, "__self__", None), VmapRule)


def sites(model: nn.Module, whole: bool = False) -> list[Site]:
    """The sites of a model; with `whole`, the model itself is the only one."""
    if whole:
        return [Site(model, VmapRule(model).rule, 0)]
    axes = _axes(model)
    return [Site(module, rule, axes.get(module, 0)) for module, rule in dict(_visit(model)).items()]


@contextmanager
def run_by_rules(tape: Tape, found: Sequence[Site]) -> Iterator[None]:
    """While it lasts, the forward of each site is its rule; without gradients, its own."""
    before = [vars(site.module).get("forward") for site in found]
    for site in found:
        vars(site.module)["forward"] = _recorded(tape, site)
    try:
        yield
    finally:
        for site, own in zip(found, before, strict=True):
            del vars(site.module)["forward"]
            if own is not None:
                vars(site.module)["forward"] = own


def _recorded(tape: Tape, site: Site) -> Any:
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
    """Whether the module uses parameters itself; a parametrized layer (weight norm and the like) does.

    One that a layer inside holds too (a bias under two names) is that layer's: any other use of it is found.
    """
    mine = [p for p in module._parameters.values() if p is not None and p.requires_grad]
    inside = {id(p) for child in module.children() for p in child.parameters()} if mine else set()
    return any(id(p) not in inside for p in mine) or hasattr(module, "parametrizations")


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of a layer that runs exactly as torch wrote it, with all its parameters in their usual place."""
    if hasattr(module, "parametrizations") or module._forward_pre_hooks:  # the latter: old-style weight norm
        return None
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return None
    if isinstance(module, nn.LSTM) and module.proj_size:
        return None
    if not isinstance(getattr(module, "weight", None), nn.Parameter | None):
        return None
    kinds = [kind for kind in RULES if isinstance(module, kind) and type(module).forward is kind.forward]
    return RULES[kinds[0]] if kinds else third_party_rule(module)


def _axes(model: nn.Module) -> dict[nn.Module, int]:
    """Inside torch's transformers records lie along axis 1, unless batch_first."""
    axes: dict[nn.Module, int] = {}
    for part in model.modules():
        if isinstance(part, _TRANSFORMERS):
            attend = next((m for m in part.modules() if isinstance(m, nn.MultiheadAttention)), None)
            if attend is not None and not attend.batch_first:
                axes.update(dict.fromkeys(part.modules(), 1))
    return axes
