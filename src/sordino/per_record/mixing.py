"""Layers whose output for one record depends on the others: no per-record gradient exists there."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from sordino.errors import PlanError


def refuse_mixing(model: nn.Module) -> None:
    """Raise where a layer mixes the records of a batch: clipping a record would not bound what it moves."""
    for name, module in model.named_modules():
        why = _mixes(module)
        if why is not None:
            found, fix = why
            where = f"layer '{name}'" if name else "the model"
            raise PlanError("mixing", f"{where}, {found}", "layers that keep the records of a batch apart", fix)


def mixes(model: nn.Module) -> bool:
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
