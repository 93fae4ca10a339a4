"""Tiles of images, all channels at once: taken out and transformed, t -> L t L^T, or transformed and added back.

By kernels where they are compiled, and else by torch, where the transform of both axes is one product with L (x) L.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

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


def taken(images: Tensor, lift: Lift, grid: Grid, space: Space, out: Tensor) -> Tensor:
    """L t L^T of the q x q tiles of images [k, H, W, C]: out [p^2, k tiles, C]."""
    if kernels.available():
        from sordino.kernels import winograd as kernel

        where = (grid.down, grid.across)
        kernel.inward(images.numpy(), lift.left.numpy(), where, grid.step, out.numpy())
        return out
    (first, row, column, _), (q, step) = images.stride(), (lift.q, grid.step)
    sizes = (q, q, len(images), grid.down, grid.across, images.shape[3])
    tiles = images.as_strided(sizes, (row, column, first, row * step, column * step, 1), images.storage_offset())
    flat = space.of(*sizes).copy_(tiles).view(q * q, -1)
    torch.mm(lift.both, flat, out=out.view(lift.p**2, -1))
    return out


def added(tiles: Tensor, lift: Lift, grid: Grid, space: Space, images: Tensor) -> None:
    """Adds L t L^T of the tiles t in tiles [q^2, k tiles, C] to images [k, H, W, C], H a whole number of steps."""
    if kernels.available():
        from sordino.kernels import winograd as kernel

        where = (grid.down, grid.across)
        kernel.outward(tiles.numpy(), lift.left.numpy(), where, grid.step, images.numpy())
        return
    k, p, step = len(images), lift.p, grid.step
    made = torch.mm(lift.both, tiles.view(lift.q**2, -1), out=space.of(p * p, tiles[0].numel()))
    blocks = made.view(p, p, k, grid.down, grid.across, -1)
    for i in range(0, p, step):
        for j in range(0, p, step):
            part = images[:, i : i + grid.down * step, j : j + grid.across * step]
            there = part.unflatten(1, (grid.down, step)).unflatten(3, (grid.across, step))  # type: ignore[no-untyped-call]
            there.add_(blocks[i : i + step, j : j + step].permute(2, 3, 0, 4, 1, 5))
