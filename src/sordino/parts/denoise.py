"""Denoisers of the noised mean beside smoothing: each knows the noise level exactly, because the plan sets it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from sordino.parts.postprocess import Noised, Postprocess
from sordino.parts.sparsify import check_keep, keep_largest, keep_largest_of_each


@dataclass(frozen=True)
class JamesStein(Postprocess, kind="james_stein"):
    """(1 - (d - 2) / sum_i (y_i / nu_i)^2) y, tensor by tensor; with `positive` the factor is never below 0.

    d counts the coordinates with noise, nu_i is theirs; those without stay as they are, and so does a tensor with one
    or two of them: nothing beats the raw estimate there.
    """

    positive: bool = True
    needs_noise: ClassVar[bool] = True

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        shrunk, each = mean.clone(), known.each()
        for slot in known.layout.slots:
            part, std = shrunk[slot.start : slot.stop], each[slot.start : slot.stop]
            noisy = std > 0
            power = float((part[noisy].double() / std[noisy]).square().sum())
            factor = 1 - max(0, int(noisy.sum()) - 2) / power if power > 0 else 1.0
            part[noisy] *= max(0.0, factor) if self.positive else factor
        return shrunk


@dataclass(frozen=True)
class SoftThreshold(Postprocess, kind="soft_threshold"):
    """sign(y) max(0, |y| - nu sqrt(2 ln d)), tensor by tensor, d noisy coordinates (Donoho & Johnstone 1994)."""

    needs_noise: ClassVar[bool] = True

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        shrunk, each = mean.clone(), known.each().to(mean.dtype)
        for slot in known.layout.slots:
            part, std = shrunk[slot.start : slot.stop], each[slot.start : slot.stop]
            level = std * math.sqrt(2 * math.log(max(int((std > 0).sum()), 2)))
            part.copy_(part.sign() * (part.abs() - level).clamp(min=0.0))
        return shrunk


@dataclass(frozen=True)
class SparsifyMean(Postprocess, kind="sparsify_mean"):
    """Keep the largest entries of the noised mean: top-k AFTER the sum, so post-processing (a sound top_k form).

    With per = "tensor" it keeps that share of every tensor of the model by itself.
    """

    keep: float
    per: Literal["tensor"] | None = None  # None: one share of the whole mean

    def __post_init__(self) -> None:
        check_keep(self.keep)

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        if self.per is None:
            return keep_largest(mean[None], mean.abs()[None], self.keep)[0]
        return keep_largest_of_each(mean, mean.abs(), self.keep, known.layout.sizes)
