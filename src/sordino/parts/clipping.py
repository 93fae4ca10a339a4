"""Norms, clip factors and sums of clipped rows, for every engine path: the bound of a message rests on them.

float32 sums over millions of entries err by 0.2%; blocks of 4096 in float32, added in float64, err by 3e-6.
Rows whose squares overflow or vanish are measured again, scaled by their largest entry, in float64.
kernels/linear.py has the same clip factor for one record at a time; a test holds them equal on odd norms.
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


FEW, MANY = 128, 4096  # records: up to FEW are added in float32, products of more than MANY in float64
Cast = Callable[[Tensor], Tensor]
Product = Callable[[slice, Cast, Tensor | None], Tensor]
FEW_DIGITS = 1e-35  # below about 1e-38 a float32 loses digits one by one


def factors(norms: Tensor, clip_norm: float, mask: Tensor | None = None, unit: bool = False) -> Tensor:
    """min(1, clip norm / norm), aimed the slack inside: what pulls a vector of each norm into the ball.

    1 where the norm is 0; 0 where it is not finite and where `mask` is; 0 where the factor is so small that float32
    holds it with few digits: the product could leave the ball. `unit` divides by the clip norm besides, and keeps small
    factors: for `scaled`, which multiplies in float64 where it must.
    """
    aim, most = (1.0, 1.0 / clip_norm) if unit else (clip_norm, 1.0)
    scale = (aim * (1 - SLACK) / norms).clamp(max=most)
    kept = norms.isfinite() if unit else norms.isfinite() & (scale >= FEW_DIGITS)
    return scale.masked_fill_(~(kept if mask is None else kept & mask.bool()), 0.0)


def pull(rows: Tensor, scale: Tensor) -> Tensor:
    """rows * scale, and 0 where the scale is, whatever the row (0 times infinity is not a number).

    A product too small to have all its digits is 0 too: a factor of a record's gradient, times a huge other factor it
    could leave the ball.
    """
    pulled = torch.where(scale[..., None] > 0, rows * scale[..., None], torch.zeros_like(rows))
    return torch.where(pulled.abs().amax(-1, keepdim=True) >= FEW_DIGITS, pulled, torch.zeros_like(pulled))


def scaled(rows: Tensor, scale: Tensor) -> Tensor:
    """rows * scale of finite rows [m, d]; a factor beyond float32's range is applied in float64."""
    ordinary = (scale > 1e-30) & (scale < 1e30)
    if bool(ordinary.all()):
        return rows * scale.to(rows.dtype)[:, None]
    return (rows.double() * scale[:, None]).to(rows.dtype)


def summed(records: int, product: Product) -> Tensor:
    """The sum of `product(block, cast, out)` over blocks of records; in float64 if there are more than `FEW`.

    What one record adds must not drown in what others sum to. Measured where all records point one way, a float32 sum
    let one of them move it by 1 + 1e-5 among 100 (slack included), by 1 + 6e-5 among 1,000 and by 1.004 among 200,000.
    So products of `FEW` records are added in float64; of more than `MANY` records, every product is of factors that
    `cast` has made float64. No worst case is proved for the float32 part. `out` is memory to write a product into.
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
