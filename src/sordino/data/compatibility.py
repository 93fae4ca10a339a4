"""Checks before the first round that model, loss and records fit together. Called by `task`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sordino.errors import DataError, PlanError
from sordino.layout import copied
from sordino.parts.losses import Loss

_FAILS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError)


def refuse_statistics(model: nn.Module) -> None:
    """Refuse running statistics: averaged over clients and noised, a variance falls below zero and gives NaN."""
    for name, part in model.named_modules():
        if isinstance(part, _NormBase) and part.track_running_stats:
            width = part.num_features
            groups = next((g for g in (32, 16, 8, 4, 2) if width and width % g == 0), 1)
            raise PlanError(
                "mixing",
                f"layer '{name}', {type(part).__name__}({width}), whose running variance noise would drive below zero",
                "layers without running statistics",
                f"replace it by nn.GroupNorm({groups}, {width})",
            )


def refuse_compiled(model: nn.Module) -> None:
    """Refuse a compiled module: its layers cannot run record by record."""
    for name, part in model.named_modules():
        if type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None:
            where = f"layer '{name}'" if name else "a model"
            fix = "pass the module that torch.compile was given (compiled._orig_mod), and compile the result afterwards"
            raise PlanError("per-record", f"{where} that torch.compile has compiled", "the module itself", fix)


def trial_outputs(model: nn.Module, x: Tensor) -> Any:
    """Outputs of a copy of the model for a few records, in eval mode."""
    trial = copied(model).eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            return trial(x)
        except _FAILS as error:
            found = f"a model that fails on records of shape {list(x.shape[1:])} ({_first_line(error)})"
            needed = "a model and a loss that fit the data"
            raise DataError(found, needed, "fit the first layer to the records") from None


def check_losses(losses: Callable[[Any, Tensor], Any], outputs: Any, y: Tensor, name: str = "a loss") -> None:
    """Refuse a loss that does not return one value per record."""
    try:
        values = losses(outputs, y)
    except _FAILS as error:
        shapes = f"outputs {list(getattr(outputs, 'shape', []))} and targets {list(y.shape)}"
        raise DataError(f"{name} that fails on {shapes} ({_first_line(error)})", "one value per record") from None
    if not isinstance(values, Tensor) or values.shape != (len(y),):
        found = f"a loss of shape {list(getattr(values, 'shape', []))} for {len(y)} records"
        raise DataError(found, "one value per record", 'reduction="none" in the loss, as nn.CrossEntropyLoss takes it')


def check_slope(loss: Loss, outputs: Tensor, y: Tensor, name: str) -> None:
    """Refuse a declared slope or envelope that is not the derivative of the value: clipping would bound another."""
    point = (outputs + torch.linspace(0.1, 0.2, outputs.numel()).view_as(outputs)).requires_grad_()  # past a kink
    wanted = torch.autograd.grad(loss.value(point, y).sum(), point)[0]
    scores, steep = point.detach()[None], torch.full((1, len(y), 1), 1e9)
    found = {"slope": loss.slope(scores, y[None])[0]}
    if loss.has_envelope:
        found["envelope"] = loss.envelope(scores, y[None], steep)[0]  # of a huge beta: the slope itself
    for what, slope in found.items():
        if slope.shape != wanted.shape or not torch.allclose(slope, wanted, rtol=1e-3, atol=1e-6):
            needed = "d value / d scores of each record"
            raise DataError(f"{name} whose written {what} is not that of its value", needed)


def check_labels(y: Tensor, classes: int, where: str) -> None:
    """Refuse labels outside 0 .. classes - 1; torch would silently ignore -100."""
    if y.is_floating_point() or not y.numel():
        return
    wrong = (y < 0) | (y >= classes)
    if bool(wrong.any()):
        record = int(wrong.flatten(1).any(1).nonzero()[0]) if y.dim() > 1 else int(wrong.nonzero()[0])
        label = int(y[wrong][0])
        fix = "drop such records, or give the model one output per class"
        raise DataError(f"label {label} in record {record} of {where}", f"labels from 0 to {classes - 1}", fix)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
