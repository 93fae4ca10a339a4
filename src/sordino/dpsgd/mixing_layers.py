"""Layers that mix the records of a batch, which are refused, and layers of torch that never do.

Each layer of `_WHEN` maps every slice of the first axis by itself, whatever its parameters are. A chain of them does
too, so nothing has to be checked again while it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from sordino.errors import PlanError

_ENTRIES: tuple[type[nn.Module], ...] = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh),
    *(nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink, nn.LogSigmoid),
    *(nn.Softshrink, nn.Hardshrink, nn.Threshold, nn.Dropout, nn.AlphaDropout, nn.PReLU),
)
_IMAGES: tuple[type[nn.Module], ...] = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d),
    *(nn.GroupNorm, nn.Dropout2d, nn.ZeroPad2d),
)


def _always(layer: Any) -> bool:
    return True


_WHEN: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.Linear: _always,
    nn.Flatten: lambda layer: layer.start_dim >= 1,
    nn.LayerNorm: lambda layer: len(layer.normalized_shape) == 1,
    nn.RMSNorm: lambda layer: len(layer.normalized_shape) == 1,
    nn.Softmax: lambda layer: layer.dim in (1, -1),
    nn.LogSoftmax: lambda layer: layer.dim in (1, -1),
    nn.Embedding: lambda layer: layer.max_norm is None and not layer.scale_grad_by_freq,
    **dict.fromkeys(_ENTRIES + _IMAGES, _always),
}


def keeps_records_apart(model: nn.Module) -> bool:
    """Whether no record can reach another in this model, by what it is made of."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    return not _hooked(model) and _in_order(model)


def _in_order(model: nn.Module) -> bool:
    if type(model) is nn.Sequential:
        return all(not _hooked(part) and "forward" not in vars(part) and _in_order(part) for part in model)
    known = _WHEN.get(type(model))
    return known is not None and known(model)


def _hooked(module: nn.Module) -> bool:
    """Whether other code runs beside the layer's (hooks), or computes its weights."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return bool(hooks) or hasattr(module, "parametrizations")


def refuse_mixing(model: nn.Module) -> None:
    """Raise where a layer mixes the records of a batch: clipping a record would not bound what it moves."""
    for name, module in model.named_modules():
        why = _mixes(module)
        if why is not None:
            found, fix = why
            where = f"layer '{name}'" if name else "the model"
            raise PlanError("mixing", f"{where}, {found}", "layers that keep the records of a batch apart", fix)


def has_mixing_layer(model: nn.Module) -> bool:
    """Whether a layer is known to mix the records of a batch."""
    return any(_mixes(module) is not None for module in model.modules())


def _mixes(module: nn.Module) -> tuple[str, str] | None:
    kind = type(module).__name__
    if isinstance(module, _InstanceNorm):
        if module.track_running_stats:
            return f"{kind} with running statistics", "set track_running_stats=False, or use nn.GroupNorm"
        return None
    if isinstance(module, _BatchNorm):
        width = module.num_features
        groups = next((g for g in (32, 16, 8, 4, 2) if width and width % g == 0), 1)
        return f"{kind}({width})", f"replace it by nn.GroupNorm({groups}, {width})"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        return f"{kind} with scale_grad_by_freq", "set scale_grad_by_freq=False"
    return None
