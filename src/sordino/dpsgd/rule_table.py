"""Rule table: which rule records the gradients of each layer of a model, chosen from the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from sordino.dpsgd.attention import attention
from sordino.dpsgd.convolution import convolution
from sordino.dpsgd.layer_rules import Rule, embedding, foreign_rule, group_norm, layer_norm, linear_layer
from sordino.dpsgd.recurrent import recurrence
from sordino.dpsgd.small_convolutions import max_pool, pools
from sordino.dpsgd.vmap_fallback import Anything

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear_layer,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm1d: group_norm,
    nn.InstanceNorm2d: group_norm,
    nn.InstanceNorm3d: group_norm,
    nn.LSTM: recurrence,
    nn.GRU: recurrence,
    nn.RNN: recurrence,
    nn.MultiheadAttention: attention,
}


_SEQUENCES = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class Site:
    """A module, its rule, and where the records lie in its input."""

    module: nn.Module
    rule: Rule
    axis: int


def sites(model: nn.Module, whole: bool = False) -> list[Site]:
    """The sites of a model; with `whole`, the model itself is the only one."""
    if whole:
        return [Site(model, Anything(model).rule, 0)]
    axes = _axes(model)
    return [Site(module, rule, axes.get(module, 0)) for module, rule in dict(_visit(model)).items()]


def _visit(module: nn.Module) -> Iterator[tuple[nn.Module, Rule]]:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        yield from ((pool, max_pool) for pool in pools(module))
        return
    rule = rule_of(module)
    if rule is not None:
        yield module, rule
    elif _owns(module):
        yield module, Anything(module).rule
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
    for kind, rule in RULES.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return rule if _usual(module) else None
    return foreign_rule(module) if _usual(module) else None


def _usual(module: nn.Module) -> bool:
    """No parametrization, no old-style weight norm, no projection, no renormalised embedding."""
    if hasattr(module, "parametrizations") or module._forward_pre_hooks:
        return False
    if isinstance(module, nn.Embedding):
        return module.max_norm is None
    if isinstance(module, nn.LSTM):
        return not module.proj_size
    weight = getattr(module, "weight", None)
    return weight is None or isinstance(weight, nn.Parameter)


def _axes(model: nn.Module) -> dict[nn.Module, int]:
    """Inside torch's transformers the records lie along axis 1, unless batch_first."""
    axes: dict[nn.Module, int] = {}
    for part in model.modules():
        if isinstance(part, _SEQUENCES + _BLOCKS):
            attend = next((m for m in part.modules() if isinstance(m, nn.MultiheadAttention)), None)
            if attend is not None and not attend.batch_first:
                axes.update(dict.fromkeys(part.modules(), 1))
    return axes
