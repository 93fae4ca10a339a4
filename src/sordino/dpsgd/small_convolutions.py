"""Small convolutions and max pools of float32 images by compiled loops (`sordino.kernels.windows`), channels last.

Only faster: the same outputs and gradients as torch's up to rounding, without patches. Where the loops are not
available, or a layer does not fit them, torch's own run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sordino import codec, kernels
from sordino.dpsgd.pieces import ROOM, Outer, gram_is_cheaper, weighted_rows
from sordino.dpsgd.tape import Tape

SMALL = 1 << 14  # weights that stay in the cache: above, torch's own products are as fast
LEAST, POSITIONS = 16, 4  # the fewest channels and entries of a kernel, and positions, that fill a tile of the loops


@cache
def _loops() -> Any:
    from sordino.kernels import windows

    return windows


def _in_parts(run: Callable[[slice], None], count: int) -> None:
    """run(part) over the parts of `count` records, one for each of torch's threads."""
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        return run(slice(0, count))
    edges = [count * k // threads for k in range(threads + 1)]
    list(_pool(os.getpid(), threads).map(run, map(slice, edges[:-1], edges[1:])))
    return None


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One for each process: threads do not survive a fork."""
    return ThreadPoolExecutor(threads)


@codec.hides_values
@dataclass(frozen=True)
class WindowOffsets:
    """What a convolution reads of a padded record [H, W, C]: entry place_t + inside_i, at position t for weight i."""

    place: NDArray[np.int64]
    inside: NDArray[np.int64]
    run: int  # entries of `inside` that lie side by side
    sides: tuple[int, int]


def window_offsets(module: nn.Conv2d, x: Tensor) -> WindowOffsets:
    """For a padded input [b, C, H, W]."""
    return _where(tuple(x.shape[1:]), tuple(module.kernel_size), tuple(module.stride), tuple(module.dilation))


@lru_cache(256)
def _where(
    shape: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> WindowOffsets:
    channels, _, width = shape
    sizes = zip(shape[1:], kernel, stride, dilation, strict=True)
    high, wide = (max(0, (n - d * (k - 1) - 1) // s + 1) for n, k, s, d in sizes)
    down, right = width * channels, channels
    place = np.add.outer(np.arange(high) * stride[0] * down, np.arange(wide) * stride[1] * right)
    rows = np.add.outer(np.arange(kernel[0]) * dilation[0] * down, np.arange(kernel[1]) * dilation[1] * right)
    inside = np.add.outer(rows, np.arange(channels))
    return WindowOffsets(
        place.ravel(), inside.ravel(), channels * kernel[1] if dilation[1] == 1 else channels, (high, wide)
    )


def small(module: Any) -> bool:
    """Whether the loops are the fastest way to run a convolution."""
    two = len(module.kernel_size) == 2 and module.groups == 1
    return kernels.available() and two and bool(module.weight.numel() <= SMALL)


def fits(module: Any, x: Tensor) -> bool:
    """Whether they can run it, from a padded input.

    They check no bounds: what is not exactly as it should be is left to torch, which says what is wrong.
    """
    if x.dim() != 4 or not _plain(x, module.weight, module.bias):
        return False
    channels, entries = module.out_channels, prod(module.kernel_size) * x.shape[1]
    right = tuple(module.weight.shape) == (channels, x.shape[1], *module.kernel_size)
    right = right and (module.bias is None or tuple(module.bias.shape) == (channels,))
    return right and channels >= LEAST and entries >= LEAST and prod(window_offsets(module, x).sides) >= POSITIONS


def _plain(*tensors: Tensor | None) -> bool:
    return all(t is None or (t.dtype == torch.float32 and t.device.type == "cpu") for t in tensors)


def flat(x: Tensor) -> Tensor:
    """[b, C, H, W] -> [b, H W C], without a copy where the channels are last already."""
    return x.detach().movedim(1, -1).flatten(1).contiguous()


def _empty(shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), memory_format=torch.channels_last)


class Convolution(torch.autograd.Function):
    """y [b, T, O] from a padded input x; the weight and the bias are constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: WindowOffsets) -> Tensor:
        ctx.shape, ctx.offsets, ctx.weight = x.shape, offsets, weight.permute(0, 2, 3, 1).flatten()
        entries, offset = flat(x).numpy(), weight.new_zeros(len(weight)) if bias is None else bias
        turned, out = weight.permute(2, 3, 1, 0).flatten().numpy(), x.new_empty(len(x), len(offsets.place), len(weight))
        rows = out.flatten(1).numpy()

        def run(part: slice) -> None:
            _loops().outputs(entries[part], turned, offset.numpy(), offsets.place, offsets.inside, rows[part])

        _in_parts(run, len(x))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        offsets, weight, slopes = ctx.offsets, ctx.weight.numpy(), slope.flatten(1).contiguous().numpy()
        out = _empty(ctx.shape)
        rows = flat(out).numpy()

        def run(part: slice) -> None:
            _loops().input_gradients(slopes[part], weight, offsets.place, offsets.inside, offsets.run, rows[part])

        _in_parts(run, len(slope))
        return out, None, None, None


@codec.hides_values
@dataclass
class Convolved(Outer):
    """`Outer` of a convolution: if materialised, straight from the padded images [b, C, H, W], no patches cut."""

    image: Tensor = field(kw_only=True)
    offsets: WindowOffsets = field(kw_only=True)

    def squares(self) -> Tensor:
        (b, t, o), i = self.outputs.value.shape, len(self.offsets.inside)
        if gram_is_cheaper(b, t, i, o) or b * i * o > ROOM:
            return super().squares()
        made, found = self.image.new_empty(b, i, o), torch.empty(b, dtype=torch.float64)
        _weight_gradients(self.image, self.outputs.value, self.offsets, made, found)
        self.kept = made.transpose(1, 2)
        return found

    def weighted(self, weights: Tensor) -> Tensor:
        if self.kept is None:
            return super().weighted(weights)
        made = self.kept.transpose(1, 2)
        return self.reshape(weighted_rows(weights, made.flatten(1)).view(made.shape[1:]).T)


def _weight_gradients(x: Tensor, slopes: Tensor, offsets: WindowOffsets, made: Tensor, found: Tensor) -> None:
    """made [b, I, O] and found [b], the squared norms."""
    arrays = flat(x), slopes.contiguous().flatten(1), made.flatten(1), found
    entries, outputs, rows, squares = (item.numpy() for item in arrays)

    def run(part: slice) -> None:
        place, inside = offsets.place, offsets.inside
        _loops().weight_gradients(entries[part], outputs[part], place, inside, rows[part], squares[part])

    _in_parts(run, len(x))


def max_pool(tape: Tape, module: nn.MaxPool2d, axis: int, input: Tensor) -> Any:
    """The largest of each window; its gradient goes to the first entry that was."""
    if _poolable(module, input):
        return MaxPool.apply(input, _pair(module.kernel_size), _pair(module.stride))  # type: ignore[no-untyped-call]
    return nn.MaxPool2d.forward(module, input)


def _poolable(module: nn.MaxPool2d, x: Tensor) -> bool:
    usual = (_pair(module.padding), _pair(module.dilation)) == ((0, 0), (1, 1))
    if not usual or module.ceil_mode or module.return_indices or not x.requires_grad or x.dim() != 4 or not _plain(x):
        return False
    window = _pair(module.kernel_size)
    last = x.shape[1] % 8 == 0 and x.is_contiguous(memory_format=torch.channels_last)
    return bool(last and window[0] <= x.shape[2] and window[1] <= x.shape[3])


def _pair(number: Any) -> tuple[int, int]:
    return (int(number[0]), int(number[1])) if isinstance(number, tuple | list) else (int(number), int(number))


class MaxPool(torch.autograd.Function):
    """[b, C, H, W] -> [b, C, h, w], both channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        (b, channels, height, width), (down, right) = x.shape, stride
        high, wide = (height - window[0]) // down + 1, (width - window[1]) // right + 1
        out = _empty((b, channels, high, wide))
        which, ctx.shape = torch.empty_like(out), x.shape
        ctx.save_for_backward(which)
        ctx.form = (width, channels, high, wide), window, stride, np.arange(prod(window), dtype=np.float32)
        entries, rows, found = (flat(item).numpy() for item in (x, out, which))
        _in_parts(lambda part: _loops().largest(entries[part], *ctx.form, rows[part], found[part]), b)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        out = _empty(ctx.shape)
        slopes, found, rows = (flat(item).numpy() for item in (slope, *ctx.saved_tensors, out))
        _in_parts(lambda part: _loops().largest_back(slopes[part], found[part], *ctx.form, rows[part]), len(slope))
        return out, None, None


def pools(module: nn.Module) -> list[nn.Module]:
    """The max pools of a module without trained parameters that run as torch wrote them, where the loops can help."""
    if not kernels.available():
        return []
    return [
        part for part in module.modules() if type(part).forward is nn.MaxPool2d.forward and "forward" not in vars(part)
    ]
