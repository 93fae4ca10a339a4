"""d loss / d scores of the losses of a linear model, their Moreau envelopes in closed form, a record's clip."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sordino.data.task import quantile_of
from sordino.parts.norms import SLACK

FEW_DIGITS = 1e-35  # below about 1e-38 a float32 loses digits one by one
Slope = Callable[[Tensor, Tensor], Tensor]  # (scores [..., o], targets) -> d loss / d scores [..., o]


def _like(y: Tensor, scores: Tensor) -> Tensor:
    return y.to(scores.dtype).reshape(scores.shape)


def _cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    residual = torch.softmax(scores, -1)
    return residual.scatter_add_(-1, y[..., None], residual.new_full((*y.shape, 1), -1.0))


def _mse(scores: Tensor, y: Tensor) -> Tensor:
    return (scores - _like(y, scores)) * (2 / scores.shape[-1])


def _logistic(scores: Tensor, y: Tensor) -> Tensor:
    return (torch.sigmoid(scores) - _like(y, scores)) / scores.shape[-1]


def _absolute(scores: Tensor, y: Tensor) -> Tensor:
    return torch.sign(scores - _like(y, scores)) / scores.shape[-1]


def _hinge(scores: Tensor, y: Tensor) -> Tensor:
    side = 2 * _like(y, scores) - 1
    return torch.where(side * scores < 1, -side, torch.zeros_like(side)) / scores.shape[-1]


def _quantile(tau: float) -> Slope:
    def slope(scores: Tensor, y: Tensor) -> Tensor:
        over = scores - _like(y, scores)
        return torch.where(over > 0, 1 - tau, torch.where(over < 0, -tau, 0.0)).to(scores.dtype) / scores.shape[-1]

    return slope


SLOPES: dict[str, Slope] = {
    "cross_entropy": _cross_entropy,
    "mse": _mse,
    "logistic": _logistic,
    "absolute": _absolute,
    "hinge": _hinge,
}


def slope_of(loss: str) -> Slope:
    """The slope of a named loss."""
    tau = quantile_of(loss)
    return SLOPES[loss] if tau is None else _quantile(tau)


def known_slope(loss: str) -> bool:
    """Whether the slope of this loss is written here."""
    return loss in SLOPES or quantile_of(loss) is not None


def has_prox(loss: str) -> bool:
    """Whether the envelope of this loss of a linear model has a closed form here."""
    return loss in ("absolute", "hinge") or quantile_of(loss) is not None


def proximal(loss: str, scores: Tensor, y: Tensor, pace: Tensor) -> Tensor:
    """d f_beta / d scores of every score z, where pace = beta / ||(x, 1)||^2: the slope, but linear around the kink.

    prox(w) = w - t x, so  beta (w - prox) = beta t x  with  beta t = clamp(pace * (distance to the kink), lowest slope,
    highest slope): for |z - y| Huber's slope. A record of several scores has the mean of their losses.
    """
    share = 1 / scores.shape[-1]
    if loss == "hinge":
        side = 2 * _like(y, scores) - 1
        return -side * (pace * (1 - side * scores)).clamp(0.0, share)
    tau = quantile_of(loss)
    low, high = (-1.0, 1.0) if tau is None else (-tau, 1 - tau)
    return (pace * (scores - _like(y, scores))).clamp(low * share, high * share)


def factors(norms: Tensor, radius: float, mask: Tensor | None) -> Tensor:
    """min(1, radius / norm) per record, a little inside; 0 for a masked record and for a norm that is not finite.

    Also 0 where the factor is so small that float32 holds it with few digits: the product could leave the ball.
    """
    scale = torch.where(norms.isfinite(), (radius * (1 - SLACK) / norms).clamp(max=1.0), torch.zeros_like(norms))
    scale = torch.where(scale >= FEW_DIGITS, scale, torch.zeros_like(scale))
    return scale if mask is None else scale * mask
