"""Convolutions in one, two or three dimensions as products with patches, channels last.

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

from sordino.dpsgd.layer_rules import fixed
from sordino.dpsgd.pieces import Outer, OutputGradients, Rows, wide
from sordino.dpsgd.tape import Pieces, Tape

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
_RUN = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolution(tape: Tape, module: Conv, axis: int, input: Tensor) -> Tensor:
    """Patches, where needed, are cut before the forward if no gradient flows below (they serve it too), else after."""
    tape.check(input, axis, len(module.kernel_size) + 2)
    last = len(module.kernel_size) == 2 and (tape.channels_last or _prefers_last(input, module.weight))
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

    if ready is None:
        return tape.watch(_plain(module, x, native), use, x)
    product = F.linear(ready.flatten(0, 1), _flat(module), fixed(module.bias))
    output = tape.watch(product, use, shape=(*ready.shape[:2], module.out_channels))
    image = output.view(len(x), *_sides(module, x), module.out_channels).movedim(-1, 1)
    return image if last else image.contiguous()


def _prefers_last(*tensors: Tensor) -> bool:
    """Whether torch itself would answer channels last."""
    return any(suggest_memory_format(tensor) == torch.channels_last for tensor in tensors)


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


def _flat(module: Conv) -> Tensor:
    """The weight as [O, *kernel * C], in the order of the patches."""
    return module.weight.detach().movedim(1, -1).flatten(1)


def _plain(module: Conv, x: Tensor, native: bool) -> Tensor:
    run: Any = _RUN[len(module.kernel_size)]
    weight, bias = module.weight.detach(), fixed(module.bias)
    output: Tensor = run(
        x, weight, bias, module.stride, module.padding if native else 0, module.dilation, module.groups
    )
    return output


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
    split = whole.view(
        *whole.shape[:2], prod(module.kernel_size), module.groups, -1
    )  # [b, T, kernel, groups, C / groups]
    inputs = split.permute(0, 3, 1, 2, 4).flatten(3)
    slopes = outputs.reshape(*outputs.shape[:2], module.groups, -1).permute(0, 2, 3, 1)
    return Rows(reshape(torch.matmul(slopes, inputs).flatten(1, 2)))
