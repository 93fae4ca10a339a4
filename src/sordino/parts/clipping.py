"""Norms, clip factors and sums of clipped rows, on which the norm bound of a message rests. All engines call them.

float32 sums over millions of entries err by 0.2%; blocks of 4096 in float32, added in float64, err by 3e-6.
Norms of rows whose squares overflow or vanish are computed again in float64, scaled by their largest entry.
kernels/linear.py has the same clip factor for one record at a time; a test compares both, also on extreme norms.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sordino.accounting.bounds import Norm

BLOCK = 4096
SLACK = 1e-5  # the clip aims this much inside the ball: more than all rounding together
_TINY, _HUGE = 1e-12, 1e15  # outside, squares of float32 lose digits


def row_norms(rows: Tensor, norm: Norm = 2) -> Tensor:
    """Return the norm of each row [m, d] in float64; it is infinite or NaN if an entry of the row is."""
    if rows.device.type != "cpu":
        norms64: Tensor = torch.linalg.vector_norm(rows, ord=norm, dim=-1, dtype=torch.float64)
        return norms64  # squares of float32 neither overflow nor vanish in float64
    m, d = rows.shape
    whole, power = d - d % BLOCK, torch.square if norm == 2 else torch.abs
    total = power(rows[:, whole:]).sum(-1, dtype=torch.float64)
    if whole:
        blocks = rows[:, :whole].reshape(m, -1, BLOCK)
        total = total + power(blocks).sum(-1).sum(-1, dtype=torch.float64)
    norms = total.sqrt() if norm == 2 else total
    doubtful = ~((norms > _TINY) & (norms < _HUGE))
    if bool(doubtful.any()):
        norms[doubtful] = _scaled_norms(rows[doubtful], norm)
    return norms


def lengths(rows: Tensor, norm: Norm = 2) -> Tensor:
    """Return the norms over the last axis, in the rows' dtype; tiny norms, whose squares vanish, use float64.

    L2 norms of at most `BLOCK` entries are summed in float32 (error 3e-6). All others are summed in float64, a few
    rows at a time, so that the float64 copy stays in the cache; L1 sums in float32 would err by 4e-5.
    """
    found: Tensor
    if rows.device.type != "cpu":
        found = torch.linalg.vector_norm(rows, ord=norm, dim=-1, dtype=torch.float64)
        return found.to(rows.dtype)
    if norm == 2 and rows.shape[-1] <= BLOCK:
        found = torch.linalg.vector_norm(rows, ord=norm, dim=-1)
    else:
        parts = torch.split(rows.reshape(-1, rows.shape[-1]), max(1, 16 * BLOCK // max(1, rows.shape[-1])))
        sums = [torch.linalg.vector_norm(part, ord=norm, dim=-1, dtype=torch.float64) for part in parts]
        found = torch.cat(sums).to(rows.dtype).view(rows.shape[:-1])
    vanished = found < _TINY
    if norm == 2 and bool(vanished.any()):
        found[vanished] = _scaled_norms(rows[vanished], norm).to(found.dtype)
    return found


def _scaled_norms(rows: Tensor, norm: Norm) -> Tensor:
    largest = rows.abs().amax(-1).double() if rows.shape[-1] else rows.new_zeros(len(rows)).double()
    scale = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    scaled = rows.double() / scale[:, None]
    norms: Tensor = torch.linalg.vector_norm(scaled, ord=norm, dim=-1)
    return norms * scale


FEW, MANY = 128, 4096  # records: up to FEW are added in float32, products of more than MANY in float64
Cast = Callable[[Tensor], Tensor]
Product = Callable[[slice, Cast, Tensor | None], Tensor]
FEW_DIGITS = 1e-35  # below about 1e-38 a float32 loses digits one by one


def factors(norms: Tensor, clip_norm: float, mask: Tensor | None = None, unit: bool = False) -> Tensor:
    """Return clip factors min(1, clip_norm (1 - SLACK) / norm), which scale a vector of each norm into the clip ball.

    A factor is 1 for norm 0, and 0 where the norm is not finite, where `mask` is 0, or where float32 has too few digits
    for the factor to guarantee the bound. With `unit` the factors also divide by the clip norm, and small factors
    remain, since `scaled` multiplies in float64 where necessary.
    """
    aim, most = (1.0, 1.0 / clip_norm) if unit else (clip_norm, 1.0)
    scale = (aim * (1 - SLACK) / norms).clamp(max=most)
    kept = norms.isfinite() if unit else norms.isfinite() & (scale >= FEW_DIGITS)
    return scale.masked_fill_(~(kept if mask is None else kept & mask.bool()), 0.0)


def pull(rows: Tensor, scale: Tensor) -> Tensor:
    """Return rows * scale, where a scale of 0 gives 0 even if the row is not finite.

    Rows below float32's normal range become 0 too: a row is one factor of a record's gradient (an outer product), and
    its rounding error times a very large other factor could make the gradient longer than the clip norm.
    """
    pulled = torch.where(scale[..., None] > 0, rows * scale[..., None], torch.zeros_like(rows))
    return torch.where(pulled.abs().amax(-1, keepdim=True) >= FEW_DIGITS, pulled, torch.zeros_like(pulled))


def scaled(rows: Tensor, scale: Tensor) -> Tensor:
    """Return rows * scale for finite rows [m, d]; a factor beyond the range of float32 is applied in float64."""
    if rows.device.type != "cpu":  # every product in float64, rounded once as it is written
        return torch.mul(rows, scale[:, None], out=torch.empty_like(rows))
    ordinary = (scale > 1e-30) & (scale < 1e30)
    if bool(ordinary.all()):
        return rows * scale.to(rows.dtype)[:, None]
    return (rows.double() * scale[:, None]).to(rows.dtype)


def summed(records: int, product: Product) -> Tensor:
    """Return the sum of `product(block, cast, out)` over blocks of records; in float64 for more than `FEW` records.

    Rounding in the sum must not increase the influence of one record. Measured with all records in one direction, one
    record changed a float32 sum by 1 + 1e-5 clip norms among 100 records (slack included), by 1 + 6e-5 among 1,000 and
    by 1.004 among 200,000. So products of `FEW` records are added in float64; for more than `MANY` records, `cast`
    converts the factors of every product to float64. No worst case is proved for the float32 part. `out` is a buffer
    for the result of `product`.
    """
    if records <= FEW:
        return product(slice(0, records), _same, None)
    width, cast = (FEW, _same) if records <= MANY else (MANY, Tensor.double)
    part = product(slice(0, width), cast, None)
    total = part.to(torch.float64, copy=True)
    for first in range(width, records, width):
        total += product(slice(first, first + width), cast, part)
    return total


def _same(factor: Tensor) -> Tensor:
    return factor
