"""Winograd's convolution (Winograd 1980; Lavin and Gray 2016), forward and backward; used by engines/objectives.py.

An output tile of m x m under an r x r kernel, n = m + r - 1, is, for every pair of channels,

    y = A^T [(G w G^T) * (B^T x B)] A             n^2 products where the definition takes m^2 r^2

so over channels it is n^2 products of matrices, one for each entry of a tile; the backward pass takes the transpose of
each step. The result is the convolution's up to rounding: errors are a few times those of the direct sum in float32.
Here r = 5, m = 4, n = 8: 6.25 times fewer products. The tiles are transformed by compiled loops: without numba, and
for 3 x 3 kernels, torch's own convolution is faster and runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sordino import kernels


@dataclass(frozen=True)
class Grid:
    """Where tiles lie: so many down and across, the first rows and columns of neighbours `step` apart."""

    down: int
    across: int
    step: int

    @property
    def count(self) -> int:
        """Tiles of one image."""
        return self.down * self.across


class Lift:
    """t -> L t L^T for L [p, q]."""

    def __init__(self, left: Tensor) -> None:
        self.left = left.contiguous()
        self.p, self.q = left.shape

    @cached_property
    def both(self) -> Tensor:
        """The same of a flattened tile: [p^2, q^2]."""
        return torch.kron(self.left, self.left)

    @cached_property
    def back(self) -> Lift:
        """Its transpose."""
        return Lift(self.left.T)


class Space:
    """A piece of memory for a result that is soon used up, the same for every call."""

    def __init__(self, like: Tensor) -> None:
        self.flat = like.new_empty(0)

    def of(self, *sizes: int) -> Tensor:
        count = prod(sizes)
        if len(self.flat) < count:
            self.flat = self.flat.new_empty(count)
        return self.flat[:count].view(sizes)


def take_tiles(images: Tensor, lift: Lift, grid: Grid, out: Tensor) -> Tensor:
    """L t L^T of the q x q tiles of images [k, H, W, C]: out [p^2, k tiles, C]."""
    from sordino.kernels import tile_transforms as kernel

    kernel.inward(images.numpy(), lift.left.numpy(), (grid.down, grid.across), grid.step, out.numpy())
    return out


def add_tiles(tiles: Tensor, lift: Lift, grid: Grid, images: Tensor) -> None:
    """Adds L t L^T of the tiles t in tiles [q^2, k tiles, C] to images [k, H, W, C], H a whole number of steps."""
    from sordino.kernels import tile_transforms as kernel

    kernel.outward(tiles.numpy(), lift.left.numpy(), (grid.down, grid.across), grid.step, images.numpy())


R, M, N = 5, 4, 8
CHANNELS = 32  # fewer, in or out, and the transforms cost more than the products save
AT_ONCE = 3 << 12  # tiles times channels (in and out) in one go: what lies between two steps stays in the cache
POINTS = tuple(Fraction(p) for p in ("0", "1", "-1", "2", "-2", "1/2", "-1/2"))  # and infinity


@cache
def transforms() -> tuple[Lift, Lift, Lift]:
    """A^T [m, n], G [n, r] and B^T [n, n] (Cook 1966, Toom 1963).

    A tile's product is that of two polynomials: evaluate both at the points, multiply, interpolate.
    """
    out = [[p**i for p in POINTS] + [Fraction(i == M - 1)] for i in range(M)]
    kernel, image = [], []
    for p in POINTS:
        others = [q for q in POINTS if q != p]
        weights, poly = [p**j / prod(p - q for q in others) for j in range(R)], [*_expanded(others), Fraction(0)]
        shift = _even(weights, poly)
        kernel.append([shift * a for a in weights])
        image.append([b / shift for b in poly])
    kernel.append([Fraction(j == R - 1) for j in range(R)])
    image.append(_expanded(POINTS))
    a, g, b = (Lift(torch.tensor([[float(v) for v in row] for row in rows])) for rows in (out, kernel, image))
    return a, g, b


def _expanded(roots: Iterable[Fraction]) -> list[Fraction]:
    """Coefficients of the product of (x - q), lowest power first."""
    poly = [Fraction(1)]
    for q in roots:
        poly = [high - q * low for high, low in zip([Fraction(0), *poly], [*poly, Fraction(0)], strict=True)]
    return poly


def _even(first: list[Fraction], second: list[Fraction]) -> Fraction:
    """A power of two that brings the largest entries of first * it and second / it near each other."""
    ratio, power = max(map(abs, second)) / max(map(abs, first)), Fraction(1)
    while power * power * 2 < ratio:
        power *= 2
    while power * power > ratio * 2:
        power /= 2
    return power


@dataclass(frozen=True)
class Tiling:
    """Images [N, H, W, C] under the kernel with zero padding: the tiles of the input overlap by r - 1."""

    shape: tuple[int, int, int, int]
    outputs: int
    pad: tuple[int, int]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the output."""
        _, h, w, _ = self.shape
        return h + 2 * self.pad[0] - R + 1, w + 2 * self.pad[1] - R + 1

    @property
    def grid(self) -> Grid:
        return Grid(-(-self.size[0] // M), -(-self.size[1] // M), M)

    @property
    def whole(self) -> tuple[int, int]:
        """Height and width of whole output tiles."""
        return self.grid.down * M, self.grid.across * M

    def room(self, like: Tensor) -> Tensor:
        """Zeros for the images, their margins, and enough behind that the tiles cover all."""
        return like.new_zeros(self.shape[0], self.whole[0] + R - 1, self.whole[1] + R - 1, self.shape[3])

    def inside(self, room: Tensor) -> Tensor:
        """The images themselves in their room."""
        (_, h, w, _), (top, left) = self.shape, self.pad
        return room[:, top : top + h, left : left + w]

    def groups(self) -> Iterator[slice]:
        """Images that are transformed together."""
        width = max(1, AT_ONCE // ((self.shape[3] + self.outputs) * self.grid.count))
        return (slice(i, min(i + width, self.shape[0])) for i in range(0, self.shape[0], width))


class _Convolution(torch.autograd.Function):
    """y = conv(x, w) + bias on channels-last images; x and y as torch has them, [N, C, H, W]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pad: tuple[int, int]) -> Tensor:
        images, outputs = x.detach().permute(0, 2, 3, 1), len(weight)
        t = Tiling(tuple(images.shape), outputs, pad)  # type: ignore[arg-type]
        (a, g, b), room, grid, channels = transforms(), t.room(x), t.grid, t.shape[3]
        t.inside(room).copy_(images)
        weights = (g.both @ weight.detach().permute(2, 3, 1, 0).reshape(R * R, -1)).view(N * N, channels, outputs)
        y = x.new_zeros(t.shape[0], *t.whole, outputs)
        if bias is not None:
            y += bias.detach()
        first, between = Space(x), Space(x)
        for group in t.groups():
            tiles = grid.count * len(room[group])
            seen = take_tiles(room[group], b, grid, first.of(N * N, tiles, channels))
            products = torch.bmm(seen, weights, out=between.of(N * N, tiles, outputs))
            add_tiles(products, a, grid, y[group])
        ctx.save_for_backward(weights, room)
        ctx.tiling = t
        return y[:, : t.size[0], : t.size[1]].permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (weights, seen), t = ctx.saved_tensors, ctx.tiling
        for_x, for_w, for_bias, _ = ctx.needs_input_grad
        (a, g, b), grid = transforms(), t.grid
        slopes = slope.permute(0, 2, 3, 1)
        bias = slopes.sum((0, 1, 2)) if for_bias else None
        missing = t.whole[0] - slopes.shape[1], t.whole[1] - slopes.shape[2]  # zeros behind make whole tiles
        padded = nn.functional.pad(slopes, (0, 0, 0, missing[1], 0, missing[0])) if any(missing) else slopes
        slopes = padded.contiguous()
        total, back, room = torch.zeros_like(weights), weights.transpose(1, 2), t.room(slope) if for_x else None
        first, second = Space(slope), Space(slope)
        for group in t.groups():
            tiles = grid.count * len(seen[group])
            products = take_tiles(slopes[group], a.back, grid, first.of(N * N, tiles, t.outputs))
            images = second.of(N * N, tiles, t.shape[3])
            if for_w:
                total.baddbmm_(take_tiles(seen[group], b, grid, images).transpose(1, 2), products)
            if room is not None:
                add_tiles(torch.bmm(products, back, out=images), b.back, grid, room[group])
        weight = (g.back.both @ total.view(N * N, -1)).view(R, R, t.shape[3], -1).permute(3, 2, 0, 1) if for_w else None
        return None if room is None else t.inside(room).permute(0, 3, 1, 2), weight, bias, None


def accelerate(model: nn.Module) -> int:
    """Let the convolutions of a model that is ours run so where it pays, by a rule of the layer; says how many."""
    layers = [part for part in model.modules() if type(part) is nn.Conv2d and _pays(part)]
    for part in layers:
        part.forward = _forward(part, part.forward)  # type: ignore[assignment,method-assign]
    return len(layers)


def _pays(layer: nn.Conv2d) -> bool:
    square = layer.kernel_size == (R, R) and not isinstance(layer.padding, str)
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"
    wide = min(layer.in_channels, layer.out_channels) >= CHANNELS
    return kernels.available() and square and plain and wide and layer.weight.dtype == torch.float32


def _forward(layer: nn.Conv2d, plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    assert not isinstance(layer.padding, str)
    top, left = layer.padding

    def forward(x: Tensor) -> Tensor:
        here = x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == 4
        if not here or min(x.shape[2] + 2 * top, x.shape[3] + 2 * left) < N:
            return plain(x)
        return _Convolution.apply(x, layer.weight, layer.bias, (top, left))  # type: ignore[no-any-return,no-untyped-call]

    return forward
