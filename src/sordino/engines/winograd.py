"""Convolutions with fewer multiplications (Winograd 1980; Lavin and Gray 2016), forward and backward.

An output tile of m x m under an r x r kernel, n = m + r - 1, is, for every pair of channels,

    y = A^T [(G w G^T) * (B^T x B)] A             n^2 products where the definition takes m^2 r^2

so over channels it is n^2 products of matrices, one for each entry of a tile; the backward pass takes the transpose of
each step. The result is the convolution's up to rounding: errors are a few times those of the direct sum in float32.
Tiles are 8 x 8, so outputs of a 5 x 5 kernel 4 x 4: 6.25 times fewer products. For 3 x 3 kernels it was not faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TILE = 8  # n
KERNELS = (5,)
CHANNELS = 32  # fewer, in or out, and the transforms cost more than the products save
AT_ONCE = 3 << 12  # tiles times channels (in and out) in one go: what lies between two steps stays in the cache
POINTS = tuple(Fraction(p) for p in ("0", "1", "-1", "2", "-2", "1/2", "-1/2"))  # and infinity


@cache
def transforms(r: int) -> tuple[Tensor, Tensor, Tensor]:
    """A^T, G and B^T of both axes at once: [m^2, n^2], [n^2, r^2], [n^2, n^2] (Cook 1966, Toom 1963).

    A tile's product is that of two polynomials: evaluate both at the points, multiply, interpolate.
    """
    m = TILE + 1 - r
    out = [[p**i for p in POINTS] + [Fraction(i == m - 1)] for i in range(m)]
    kernel, image = [], []
    for p in POINTS:
        others = [q for q in POINTS if q != p]
        weights, poly = [p**j / _product(p - q for q in others) for j in range(r)], [*_expanded(others), Fraction(0)]
        shift = _even(weights, poly)
        kernel.append([shift * a for a in weights])
        image.append([b / shift for b in poly])
    kernel.append([Fraction(j == r - 1) for j in range(r)])
    image.append(_expanded(POINTS))
    a, g, b = (torch.tensor([[float(v) for v in row] for row in rows]) for rows in (out, kernel, image))
    return torch.kron(a, a), torch.kron(g, g), torch.kron(b, b)


def _product(numbers: Iterator[Fraction]) -> Fraction:
    result = Fraction(1)
    for number in numbers:
        result *= number
    return result


def _expanded(roots: Any) -> list[Fraction]:
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
    """Images [N, H, W, C] under an r x r kernel with zero padding, cut in th x tw tiles that overlap by r - 1."""

    shape: tuple[int, int, int, int]
    outputs: int
    r: int
    pad: tuple[int, int]

    @property
    def m(self) -> int:
        return TILE + 1 - self.r

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the output."""
        _, h, w, _ = self.shape
        return h + 2 * self.pad[0] - self.r + 1, w + 2 * self.pad[1] - self.r + 1

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.size[0] // self.m), -(-self.size[1] // self.m)

    def padded(self, x: Tensor) -> Tensor:
        """The images [N, H, W, C] with their margins, and enough behind that the tiles cover all."""
        (n, h, w, c), (th, tw), (top, left) = self.shape, self.tiles, self.pad
        room = x.new_zeros(n, th * self.m + self.r - 1, tw * self.m + self.r - 1, c)
        room[:, top : top + h, left : left + w] = x
        return room

    def groups(self) -> Iterator[slice]:
        """Images that are transformed together."""
        width = max(1, AT_ONCE // ((self.shape[3] + self.outputs) * self.tiles[0] * self.tiles[1]))
        return (slice(i, min(i + width, self.shape[0])) for i in range(0, self.shape[0], width))

    def cut(self, images: Tensor) -> Tensor:
        """The tiles of padded images: a view [n, n, k, th, tw, C]."""
        (th, tw), (first, row, column, _) = self.tiles, images.stride()
        sizes = (TILE, TILE, len(images), th, tw, images.shape[3])
        strides = (row, column, first, row * self.m, column * self.m, 1)
        return images.as_strided(sizes, strides, images.storage_offset())

    def blocks(self, y: Tensor) -> Tensor:
        """Outputs in whole tiles [k, th m, tw m, O] by tile: a view [m, m, k, th, tw, O]."""
        (th, tw), m = self.tiles, self.m
        return y.view(len(y), th, m, tw, m, -1).permute(2, 4, 0, 1, 3, 5)

    def spread(self, tiles: Tensor, images: Tensor) -> None:
        """Adds tiles [n, n, k, th, tw, C] where `cut` took them from; `images` have m more rows and columns."""
        (th, tw), m = self.tiles, self.m
        for i in range(0, TILE, m):
            for j in range(0, TILE, m):
                part = tiles[i : i + m, j : j + m]
                there = images[:, i : i + th * m, j : j + tw * m].unflatten(1, (th, m)).unflatten(3, (tw, m))  # type: ignore[no-untyped-call]
                there[:, :, : part.shape[0], :, : part.shape[1]].add_(part.permute(2, 3, 0, 4, 1, 5))


class _Scratch:
    """One piece of memory for a step's result, used again for every group of images."""

    def __init__(self, like: Tensor) -> None:
        self.flat = like.new_empty(0)

    def of(self, *sizes: int) -> Tensor:
        count = 1
        for size in sizes:
            count *= size
        if len(self.flat) < count:
            self.flat = self.flat.new_empty(count)
        return self.flat[:count].view(sizes)


class _Convolution(torch.autograd.Function):
    """y = conv(x, w) + bias on channels-last images; x and y as torch has them, [N, C, H, W]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pad: tuple[int, int]) -> Tensor:
        images, (outputs, _, r, _) = x.permute(0, 2, 3, 1), weight.shape
        t = Tiling(tuple(images.shape), outputs, r, pad)  # type: ignore[arg-type]
        (th, tw), channels, room = t.tiles, t.shape[3], t.padded(images)
        a, g, b = transforms(r)
        kernels = (g @ weight.permute(2, 3, 1, 0).reshape(r * r, -1)).view(TILE**2, channels, outputs)
        y = x.new_empty(t.shape[0], th * t.m, tw * t.m, outputs)
        spaces, seen = [_Scratch(x) for _ in range(3)], []
        for group in t.groups():
            tiles = t.cut(room[group])
            flat = spaces[0].of(*tiles.shape).copy_(tiles).view(TILE**2, -1)
            seen.append((b @ flat).view(TILE**2, -1, channels))
            products = torch.bmm(seen[-1], kernels, out=spaces[1].of(TILE**2, seen[-1].shape[1], outputs))
            made = torch.mm(a, products.view(TILE**2, -1), out=spaces[2].of(t.m**2, products[0].numel()))
            blocks = t.blocks(y[group])
            blocks.copy_(made.view(blocks.shape))
        y = y[:, : t.size[0], : t.size[1]]
        if bias is not None:
            y += bias
        ctx.save_for_backward(kernels, *seen)
        ctx.tiling = t
        return y.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (kernels, *seen), t = ctx.saved_tensors, ctx.tiling
        for_x, for_w, for_bias, _ = ctx.needs_input_grad
        (n, h, w, channels), (th, tw), (top, left) = t.shape, t.tiles, t.pad
        a, g, b = transforms(t.r)
        slopes = slope.permute(0, 2, 3, 1)
        bias = slopes.sum((0, 1, 2)) if for_bias else None
        if t.size != (th * t.m, tw * t.m):
            slopes = nn.functional.pad(slopes, (0, 0, 0, tw * t.m - t.size[1], 0, th * t.m - t.size[0]))
        slopes = slopes.contiguous()
        total, back = torch.zeros_like(kernels), kernels.transpose(1, 2)
        room = slope.new_zeros(n, th * t.m + TILE, tw * t.m + TILE, channels) if for_x else None
        spaces = [_Scratch(slope) for _ in range(4)]
        for group, images in zip(t.groups(), seen, strict=True):
            blocks = t.blocks(slopes[group])
            flat = spaces[0].of(*blocks.shape).copy_(blocks).view(t.m**2, -1)
            products = torch.mm(a.T, flat, out=spaces[1].of(TILE**2, flat.shape[1])).view(TILE**2, -1, t.outputs)
            if for_w:
                total.baddbmm_(images.transpose(1, 2), products)
            if room is not None:
                tiles = torch.bmm(products, back, out=spaces[2].of(*images.shape)).view(TILE**2, -1)
                tiles = torch.mm(b.T, tiles, out=spaces[3].of(*tiles.shape))
                t.spread(tiles.view(TILE, TILE, -1, th, tw, channels), room[group])
        weight = (g.T @ total.view(TILE**2, -1)).view(t.r, t.r, channels, -1).permute(3, 2, 0, 1) if for_w else None
        x = None if room is None else room[:, top : top + h, left : left + w].permute(0, 3, 1, 2)
        return x, weight, bias, None


def accelerate(model: nn.Module) -> int:
    """Let the convolutions of a model that is ours run so where it pays, by a rule of the layer; says how many."""
    layers = [part for part in model.modules() if type(part) is nn.Conv2d and _pays(part)]
    for part in layers:
        part.forward = _forward(part, part.forward)  # type: ignore[assignment,method-assign]
    return len(layers)


def _pays(layer: nn.Conv2d) -> bool:
    square = layer.kernel_size[0] == layer.kernel_size[1] and layer.kernel_size[0] in KERNELS
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"
    wide = min(layer.in_channels, layer.out_channels) >= CHANNELS
    return square and plain and wide and not isinstance(layer.padding, str) and layer.weight.dtype == torch.float32


def _forward(layer: nn.Conv2d, plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    assert not isinstance(layer.padding, str)
    top, left = layer.padding

    def forward(x: Tensor) -> Tensor:
        here = x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == 4
        if not here or min(x.shape[2] + 2 * top, x.shape[3] + 2 * left) < TILE:
            return plain(x)
        return _Convolution.apply(x, layer.weight, layer.bias, (top, left))  # type: ignore[no-any-return,no-untyped-call]

    return forward
