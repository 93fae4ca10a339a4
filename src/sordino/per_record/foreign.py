"""Layers of other libraries, known by their name and by what they compute: a rule is taken only if a trial agrees.

    Conv1D (transformers)      x W + c, a Linear whose weight lies the other way round
    ...RMSNorm                 w * x / sqrt(mean x^2 + eps)

Nothing is imported from there; a layer that computes anything else is run by `Anything`, as are all that have no rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sordino.per_record.layers import fixed
from sordino.per_record.pieces import Outer, Rows, Slopes, transposed
from sordino.per_record.tape import Pieces, Tape

Rule = Callable[..., Any]


def foreign_rule(module: nn.Module) -> Rule | None:
    """The rule of a layer of another library."""
    kind, names = type(module).__name__, module._parameters.keys()
    if kind == "Conv1D" and names == {"weight", "bias"} and _agrees(module, _product):
        return turned_linear
    if kind.endswith("RMSNorm") and names == {"weight"} and _eps(module) and _agrees(module, _normal):
        return rms_norm
    return None


def turned_linear(tape: Tape, module: Any, axis: int, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """x W + c:  dW_j = sum_t x_jt (x) g_jt,  dc_j = sum_t g_jt."""
    x = _only(args, kwargs)
    inputs = tape.records(x, axis, 2)

    def use(slope: Tensor) -> Pieces:
        outputs = tape.records(slope, axis, 2)
        yield module.weight, Outer(inputs, Slopes(outputs), transposed)
        yield module.bias, Rows(outputs.sum(1))

    output = torch.addmm(fixed(module.bias), x.reshape(-1, x.shape[-1]), fixed(module.weight))  # type: ignore[arg-type]
    return tape.watch(output, use, inputs, axis, (*x.shape[:-1], module.weight.shape[1]))


def rms_norm(tape: Tape, module: Any, axis: int, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """w * n(x):  dw_j = sum_t g_jt n_jt."""
    x = _only(args, kwargs)
    normal = F.rms_norm(x.float() if x.dtype.itemsize < 4 else x, x.shape[-1:], None, _eps(module)).to(x.dtype)
    kept = normal.detach()

    def use(slope: Tensor) -> Pieces:
        yield module.weight, Rows(tape.records(slope * kept, axis, 2).sum(1))

    return tape.watch(normal * module.weight.detach(), use, axis=axis)


def _only(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Tensor:
    (x,) = (*args, *kwargs.values())
    return x


def _eps(module: Any) -> float:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
    return found if isinstance(found, float) else 0.0


def _product(module: Any, x: Tensor) -> Tensor:
    return torch.addmm(module.bias, x, module.weight)


def _normal(module: Any, x: Tensor) -> Tensor:
    weight: Tensor = module.weight
    return F.rms_norm(x, x.shape[-1:], None, _eps(module)) * weight


def _agrees(module: nn.Module, formula: Callable[[Any, Tensor], Tensor]) -> bool:
    """Whether the layer's own forward gives what the formula does, on made-up inputs and whatever weights it has."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    x = torch.linspace(-1.0, 2.0, 3 * len(weight)).view(3, -1).to(weight.device, weight.dtype)
    try:
        with torch.no_grad():
            return torch.allclose(type(module).forward(module, x), formula(module, x), rtol=1e-3, atol=1e-5)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
