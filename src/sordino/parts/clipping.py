"""The clip: from norms to factors, once for every path. The bound of a message, or of a record, rests on it.

kernels/linear.py has the same rule for one record at a time (`factor`); a test holds them equal on odd norms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.parts.norms import SLACK

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
