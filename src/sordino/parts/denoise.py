"""Denoisers of the noised mean beside smoothing: each knows the noise level exactly, because the plan sets it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.parts.postprocess import Noised, Postprocess
from sordino.parts.sparsify import check_keep, keep_largest


@dataclass(frozen=True)
class JamesStein(Postprocess, kind="james_stein"):
    """(1 - (d - 2) nu^2 / ||y||^2) y, tensor by tensor; with `positive` the factor is never below 0.

    A tensor of one or two entries stays as it is: nothing beats the raw estimate there.
    """

    positive: bool = True

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        shrunk = mean.clone()
        for slot in known.layout.slots:
            part = mean[slot.start : slot.stop]
            power = float(part.double().square().sum())
            factor = 1 - max(0, len(part) - 2) * known.std**2 / power if power > 0 else 1.0
            shrunk[slot.start : slot.stop] = part * (max(0.0, factor) if self.positive else factor)
        return shrunk


@dataclass(frozen=True)
class SoftThreshold(Postprocess, kind="soft_threshold"):
    """sign(y) max(0, |y| - nu sqrt(2 ln d)), tensor by tensor (Donoho & Johnstone 1994)."""

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        shrunk = mean.clone()
        for slot in known.layout.slots:
            part = mean[slot.start : slot.stop]
            level = known.std * math.sqrt(2 * math.log(max(len(part), 2)))
            shrunk[slot.start : slot.stop] = torch.nn.functional.softshrink(part, level) if level else part
        return shrunk


@dataclass(frozen=True)
class SparsifyMean(Postprocess, kind="sparsify_mean"):
    """Keep the largest entries of the noised mean: top-k AFTER the sum, so post-processing (a sound top_k form)."""

    keep: float

    def __post_init__(self) -> None:
        check_keep(self.keep)

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        return keep_largest(mean[None], mean.abs()[None], self.keep)[0]
