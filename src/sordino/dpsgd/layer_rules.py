"""Rules of single layers and convolutions: how a layer runs while it is recorded, and the pieces its gradient gives.

A rule is `rule(tape, module, axis, *args, **kwargs) -> output`; `axis` is where the records lie. Layers of other
libraries are known by name and by what they compute, and nothing is imported from there: a rule is taken only if a
trial agrees.

    Conv1D (transformers)      x W + c, a Linear whose weight is transposed
    ...RMSNorm                 w * x / sqrt(mean x^2 + eps)

Convolutions in one, two or three dimensions are products with patches, channels last:

y_jt = W p_jt + c   with p_jt the patch of record j under position t, so   dW_j = sum_t g_jt (x) p_jt
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F  # noqa: N812

from sordino.dpsgd.pieces import Lookup, Outer, OutputGradients, Pieces, Rows, Tape, wide


def linear(tape: Tape, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, axis: int = 0) -> Tensor:
    """x W^T + c:  dW_j = sum_t g_jt (x) x_jt,  dc_j = sum_t g_jt."""
    inputs = tape.records(x, axis, 2)

    def use(slope: Tensor) -> Pieces:
        outputs = tape.records(slope, axis, 2)
        yield weight, Outer(inputs, OutputGradients(outputs))
        if bias is not None:
            yield bias, Rows(outputs.sum(1) if outputs.shape[1] > 1 else outputs[:, 0])

    output = F.linear(x.reshape(-1, x.shape[-1]), weight.detach(), fixed(bias))
    return tape.watch(output, use, inputs, axis, (*x.shape[:-1], len(weight)))


def fixed(parameter: Tensor | None) -> Tensor | None:
    """The parameter as a constant."""
    return None if parameter is None else parameter.detach()


def linear_layer(tape: Tape, module: nn.Linear, axis: int, input: Tensor) -> Tensor:
    return linear(tape, input, module.weight, module.bias, axis)  # type: ignore[arg-type]


def embedding(tape: Tape, module: nn.Embedding, axis: int, input: Tensor) -> Tensor:
    """W[index]:  dW_j[v] = sum_{t: index_jt = v} g_jt, without the padding index.

    Indices [1, ...] that all records share (positions) become every record's own, so that their gradients stay apart.
    """
    if axis == 0 and input.dim() > 1 and len(input) == 1 and tape.batch > 1:
        input = input.expand(tape.batch, *input.shape[1:])
    index = tape.records(input, axis, 1)

    def use(slope: Tensor) -> Pieces:
        outputs = tape.records(slope, axis, 2)
        if module.padding_idx is not None:
            outputs = outputs.masked_fill((index == module.padding_idx)[..., None], 0.0)
        yield module.weight, Lookup(index, outputs, module.num_embeddings)  # type: ignore[misc]

    return tape.watch(F.embedding(input, module.weight.detach(), module.padding_idx), use, index, axis)


def layer_norm(tape: Tape, module: nn.LayerNorm | nn.RMSNorm, axis: int, input: Tensor) -> Tensor:
    """w * n(x) + c:  dw_j = sum_t g_jt n_jt,  dc_j = sum_t g_jt."""
    shape = list(module.normalized_shape)
    if isinstance(module, nn.RMSNorm):
        normal = F.rms_norm(input, shape, None, module.eps)
    else:
        normal = F.layer_norm(input, shape, None, None, module.eps)
    kept, bias, tail = normal.detach(), getattr(module, "bias", None), len(shape) + 1

    def use(slope: Tensor) -> Pieces:
        yield module.weight, Rows(tape.records(slope * kept, axis, tail).sum(1))
        if bias is not None:
            yield bias, Rows(tape.records(slope, axis, tail).sum(1))

    return tape.watch(_affine(normal, module.weight, bias), use, axis=axis)


def group_norm(tape: Tape, module: Any, axis: int, input: Tensor) -> Tensor:
    """w_c n(x) + c_c per channel, for GroupNorm, and InstanceNorm without running statistics."""
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else module.num_features
    tape.check(input, axis, 2)
    normal = F.group_norm(input, groups, None, None, module.eps)
    kept, column = normal.detach(), (-1, *[1] * (input.dim() - 2))

    def use(slope: Tensor) -> Pieces:
        yield module.weight, Rows((slope * kept).flatten(2).sum(2) if input.dim() > 2 else slope * kept)
        yield module.bias, Rows(slope.flatten(2).sum(2) if input.dim() > 2 else slope)

    return tape.watch(_affine(normal, module.weight.view(column), module.bias.view(column)), use)


def _affine(normal: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return normal * weight.detach()
    return torch.addcmul(bias.detach(), normal, weight.detach())


Rule = Callable[..., Any]  # (tape, module, axis, *args, **kwargs) -> output


def third_party_rule(module: nn.Module) -> Rule | None:
    """The rule of a layer of another library."""
    kind, names = type(module).__name__, module._parameters.keys()
    if kind == "Conv1D" and names == {"weight", "bias"}:
        return transposed_linear if _agrees(module, lambda own, x: torch.addmm(own.bias, x, own.weight)) else None
    if kind.endswith("RMSNorm") and names == {"weight"} and (eps := _eps(module)):
        return rms_norm if _agrees(module, lambda own, x: F.rms_norm(x, x.shape[-1:], None, eps) * own.weight) else None
    return None


def transposed_linear(tape: Tape, module: Any, axis: int, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """x W + c:  dW_j = sum_t x_jt (x) g_jt,  dc_j = sum_t g_jt."""
    x = _only(args, kwargs)
    inputs = tape.records(x, axis, 2)

    def use(slope: Tensor) -> Pieces:
        outputs = tape.records(slope, axis, 2)
        yield module.weight, Outer(inputs, OutputGradients(outputs), torch.adjoint)
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


def _agrees(module: nn.Module, formula: Callable[[Any, Tensor], Tensor]) -> bool:
    """Whether the layer's own forward gives what the formula does, on synthetic inputs and whatever weights it has."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    x = torch.linspace(-1.0, 2.0, 3 * len(weight)).view(3, -1).to(weight.device, weight.dtype)
    try:
        with torch.no_grad():
            return torch.allclose(type(module).forward(module, x), formula(module, x), rtol=1e-3, atol=1e-5)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False


Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


_RUN = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolution(tape: Tape, module: Conv, axis: int, input: Tensor) -> Tensor:
    """Patches, where needed, are cut before the forward if no gradient flows below (they serve it too), else after."""
    tape.check(input, axis, len(module.kernel_size) + 2)
    last = len(module.kernel_size) == 2 and (
        tape.channels_last or any(suggest_memory_format(t) == torch.channels_last for t in (input, module.weight))
    )
    input = input.contiguous(memory_format=torch.channels_last) if last else input
    native = module.padding_mode == "zeros" and input.requires_grad  # padded by the convolution itself
    x = input if native else _padded(module, input)
    ready = None if x.requires_grad or module.groups > 1 else patches(module, x)

    def use(slope: Tensor) -> Pieces:
        cut = partial(_late, module, x.detach(), native) if ready is None else ready
        outputs = slope if ready is not None else slope.movedim(1, -1).reshape(len(slope), -1, module.out_channels)
        yield module.weight, _piece(module, cut, outputs)  # type: ignore[misc]
        if module.bias is not None:
            yield module.bias, Rows(outputs.sum(1))  # type: ignore[misc]

    weight, bias = module.weight.detach(), fixed(module.bias)
    if ready is None:
        run: Any = _RUN[len(module.kernel_size)]
        padding = module.padding if native else 0
        return tape.watch(run(x, weight, bias, module.stride, padding, module.dilation, module.groups), use, x)
    product = F.linear(ready.flatten(0, 1), weight.movedim(1, -1).flatten(1), bias)  # in the order of the patches
    output = tape.watch(product, use, shape=(*ready.shape[:2], module.out_channels))
    image = output.view(len(x), *_sides(module, x), module.out_channels).movedim(-1, 1)
    return image if last else image.contiguous()


def _late(module: Conv, x: Tensor, native: bool) -> Tensor:
    return patches(module, _padded(module, x) if native else x)


def _padded(module: Conv, x: Tensor) -> Tensor:
    """The input with its border, so that what follows needs no padding."""
    if not any(module._reversed_padding_repeated_twice):
        return x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, tuple(module._reversed_padding_repeated_twice), mode=mode)


def _sides(module: Conv, x: Tensor) -> list[int]:
    """Positions of the kernel along each dimension."""
    shape = zip(x.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True)
    return [(side - dilation * (kernel - 1) - 1) // stride + 1 for side, kernel, stride, dilation in shape]


def patches(module: Conv, x: Tensor) -> Tensor:
    """[b, C, *space] -> [b, T, *kernel * C], from a padded input."""
    last = x.movedim(1, -1).contiguous()
    steps = last.stride()[1:-1]
    strides = [step * stride for step, stride in zip(steps, module.stride, strict=True)]
    inside = [step * dilation for step, dilation in zip(steps, module.dilation, strict=True)]
    sides = _sides(module, x)
    size = (len(x), *sides, *module.kernel_size, x.shape[1])
    view = last.as_strided(size, (last.stride(0), *strides, *inside, 1))
    return view.reshape(len(x), prod(sides), prod(module.kernel_size) * x.shape[1])


class _KernelShape:
    """[..., O, *kernel * C] -> [..., O, C, *kernel]."""

    def __init__(self, module: Conv) -> None:
        self.shape = (*module.kernel_size, module.in_channels // module.groups)

    def __call__(self, flat: Tensor) -> Tensor:
        return flat.view(*flat.shape[:-1], *self.shape).movedim(-1, -1 - len(self.shape[:-1]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KernelShape) and other.shape == self.shape

    __hash__ = None  # type: ignore[assignment]


def _piece(module: Conv, cut: Tensor | Callable[[], Tensor], outputs: Tensor) -> Outer | Rows:
    reshape = _KernelShape(module)
    if module.groups == 1:
        return Outer(cut, OutputGradients(outputs), reshape)
    whole = wide(cut if isinstance(cut, Tensor) else cut())
    # [b, T, kernel, groups, C / groups]
    split = whole.view(*whole.shape[:2], prod(module.kernel_size), module.groups, -1)
    inputs = split.permute(0, 3, 1, 2, 4).flatten(3)
    slopes = outputs.reshape(*outputs.shape[:2], module.groups, -1).permute(0, 2, 3, 1)
    return Rows(reshape(torch.matmul(slopes, inputs).flatten(1, 2)))
