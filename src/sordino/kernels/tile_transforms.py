"""The transforms of Winograd's convolutions, tile by tile while a tile is in the cache: L t L^T, all channels at once.

`inward` and `outward` are t -> B^T t B and t -> A^T t A; their transposes take the backward pass home. The products
between them, which are most of the work, are torch's. L has four or eight columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sordino.kernels import compiled


@compiled
def inward(images: Any, left: Any, grid: Any, step: int, out: Any) -> None:
    """out[p^2, tiles, C] = L t L^T of q x q tiles t, `step` apart in images [k, H, W, C]; grid: tiles down, across."""
    p, q = left.shape
    channels = images.shape[3]
    tile, half = np.empty((q, q, channels), np.float32), np.empty((p, q, channels), np.float32)
    full = np.empty((p, p, channels), np.float32)
    for t in range(images.shape[0] * grid[0] * grid[1]):
        k, i, j = t // (grid[0] * grid[1]), t // grid[1] % grid[0] * step, t % grid[1] * step
        for y in range(q):
            for x in range(q):
                for c in range(channels):
                    tile[y, x, c] = images[k, i + y, j + x, c]
        _down(left, tile, half)
        _across(left, half, full)
        for y in range(p):
            for x in range(p):
                for c in range(channels):
                    out[y * p + x, t, c] = full[y, x, c]


@compiled
def outward(tiles: Any, left: Any, grid: Any, step: int, images: Any) -> None:
    """Adds L t L^T of the q x q tiles t in tiles [q^2, tiles, C] to images [k, H, W, C], `step` apart."""
    p, q = left.shape
    channels = images.shape[3]
    tile, half = np.empty((q, q, channels), np.float32), np.empty((p, q, channels), np.float32)
    full = np.empty((p, p, channels), np.float32)
    for t in range(images.shape[0] * grid[0] * grid[1]):
        k, i, j = t // (grid[0] * grid[1]), t // grid[1] % grid[0] * step, t % grid[1] * step
        for y in range(q):
            for x in range(q):
                for c in range(channels):
                    tile[y, x, c] = tiles[y * q + x, t, c]
        _down(left, tile, half)
        _across(left, half, full)
        for y in range(p):
            for x in range(p):
                for c in range(channels):
                    images[k, i + y, j + x, c] += full[y, x, c]


@compiled
def _down(left: Any, t: Any, out: Any) -> None:
    """out[p, x] = sum over q of L[p, q] t[q, x]."""
    for p in range(left.shape[0]):
        a, b, c, d = left[p, 0], left[p, 1], left[p, 2], left[p, 3]
        if left.shape[1] == 8:
            e, f, g, h = left[p, 4], left[p, 5], left[p, 6], left[p, 7]
            for x in range(t.shape[1]):
                for k in range(t.shape[2]):
                    low = a * t[0, x, k] + b * t[1, x, k] + c * t[2, x, k] + d * t[3, x, k]
                    out[p, x, k] = low + e * t[4, x, k] + f * t[5, x, k] + g * t[6, x, k] + h * t[7, x, k]
        else:
            for x in range(t.shape[1]):
                for k in range(t.shape[2]):
                    out[p, x, k] = a * t[0, x, k] + b * t[1, x, k] + c * t[2, x, k] + d * t[3, x, k]


@compiled
def _across(left: Any, t: Any, out: Any) -> None:
    """out[x, p] = sum over q of L[p, q] t[x, q]."""
    for p in range(left.shape[0]):
        a, b, c, d = left[p, 0], left[p, 1], left[p, 2], left[p, 3]
        if left.shape[1] == 8:
            e, f, g, h = left[p, 4], left[p, 5], left[p, 6], left[p, 7]
            for x in range(t.shape[0]):
                for k in range(t.shape[2]):
                    low = a * t[x, 0, k] + b * t[x, 1, k] + c * t[x, 2, k] + d * t[x, 3, k]
                    out[x, p, k] = low + e * t[x, 4, k] + f * t[x, 5, k] + g * t[x, 6, k] + h * t[x, 7, k]
        else:
            for x in range(t.shape[0]):
                for k in range(t.shape[2]):
                    out[x, p, k] = a * t[x, 0, k] + b * t[x, 1, k] + c * t[x, 2, k] + d * t[x, 3, k]
