"""A record's clip."""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.parts.norms import SLACK

FEW_DIGITS = 1e-35  # below about 1e-38 a float32 loses digits one by one


def factors(norms: Tensor, radius: float, mask: Tensor | None) -> Tensor:
    """min(1, radius / norm) per record, a little inside; 0 for a masked record and for a norm that is not finite.

    Also 0 where the factor is so small that float32 holds it with few digits: the product could leave the ball.
    """
    scale = torch.where(norms.isfinite(), (radius * (1 - SLACK) / norms).clamp(max=1.0), torch.zeros_like(norms))
    scale = torch.where(scale >= FEW_DIGITS, scale, torch.zeros_like(scale))
    return scale if mask is None else scale * mask
