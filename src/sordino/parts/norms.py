"""Norms that are never too small: the bound of a message rests on them.

float32 sums over millions of entries err by 0.2%; blocks of 4096 in float32, added in float64, err by 3e-6.
Rows whose squares overflow or vanish are measured again, scaled by their largest entry, in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.parts.bounds import Norm

BLOCK = 4096
SLACK = 1e-5  # the clip aims this much inside the ball: more than all rounding together
_TINY, _HUGE = 1e-12, 1e15  # outside, squares of float32 lose digits


def row_norms(rows: Tensor, norm: Norm = 2) -> Tensor:
    """Norm of each row of [m, d] in float64; inf or nan where an entry is."""
    powers = _block_sums(rows, norm)
    fast = powers.sqrt() if norm == 2 else powers
    doubtful = ~((fast > _TINY) & (fast < _HUGE))
    if not bool(doubtful.any()):
        return fast
    fast[doubtful] = _careful(rows[doubtful], norm)
    return fast


def lengths(rows: Tensor, norm: Norm = 2) -> Tensor:
    """Norms over the last axis, in the rows' own type; measured again where float32 squares vanish.

    Added in float64 but for squares of at most `BLOCK` entries (error 3e-6): sums of magnitudes err by 4e-5 there.
    """
    short = norm == 2 and rows.shape[-1] <= BLOCK
    found: Tensor = torch.linalg.vector_norm(rows, ord=norm, dim=-1) if short else _added(rows, norm)
    vanished = found < _TINY
    if norm == 2 and bool(vanished.any()):
        found[vanished] = _careful(rows[vanished], norm).to(found.dtype)
    return found


def _added(rows: Tensor, norm: Norm) -> Tensor:
    """The same, added in float64, a few rows at a time: their copy in float64 stays in the cache."""
    flat = rows.reshape(-1, rows.shape[-1])
    parts = torch.split(flat, max(1, 16 * BLOCK // max(1, rows.shape[-1])))
    sums = [torch.linalg.vector_norm(part, ord=norm, dim=-1, dtype=torch.float64) for part in parts]
    return torch.cat(sums).to(rows.dtype).view(rows.shape[:-1])


def _block_sums(rows: Tensor, norm: Norm) -> Tensor:
    m, d = rows.shape
    whole = d - d % BLOCK
    power = torch.square if norm == 2 else torch.abs
    total = power(rows[:, whole:]).sum(-1, dtype=torch.float64)
    if whole:
        blocks = rows[:, :whole].reshape(m, -1, BLOCK)
        total = total + power(blocks).sum(-1).sum(-1, dtype=torch.float64)
    return total


def _careful(rows: Tensor, norm: Norm) -> Tensor:
    largest = rows.abs().amax(-1).double() if rows.shape[-1] else rows.new_zeros(len(rows)).double()
    scale = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    scaled = rows.double() / scale[:, None]
    norms: Tensor = torch.linalg.vector_norm(scaled, ord=norm, dim=-1)
    return norms * scale
