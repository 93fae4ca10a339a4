"""The clip: from norms to factors, and sums of what was clipped, once for every path. The bound of a message, or of a
record, rests on both.

kernels/linear.py has the same rule for one record at a time (`factor`); a test holds them equal on odd norms.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sordino.parts.norms import SLACK

FEW, MANY = 128, 4096  # records: up to FEW are added in float32, products of more than MANY in float64
Cast = Callable[[Tensor], Tensor]
Product = Callable[[slice, Cast, Tensor | None], Tensor]
FEW_DIGITS = 1e-35  # below about 1e-38 a float32 loses digits one by one


def factors(norms: Tensor, radius: float, mask: Tensor | None = None, unit: bool = False) -> Tensor:
    """min(1, radius / norm), aimed the slack inside: what pulls a vector of each norm into the ball.

    1 where the norm is 0; 0 where it is not finite and where `mask` is; 0 where the factor is so small that float32
    holds it with few digits: the product could leave the ball. `unit` divides by the radius besides, and keeps small
    factors: for `scaled`, which multiplies in float64 where it must.
    """
    aim, most = (1.0, 1.0 / radius) if unit else (radius, 1.0)
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
