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


@dataclass(frozen=True)
class Wiener(Postprocess, kind="wiener"):
    """Shrink each frequency band of a tensor by max(floor, 1 - nu^2 / power of the band): what smoothing guesses.

    Bands are octaves of the tensor's Fourier spectrum (flattened in parameter order), so the shrinkage is learnt from
    the noised data itself; the noise power in every band is known exactly.
    """

    floor: float = 0.1

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        filtered = mean.clone()
        for slot in known.layout.slots:
            if slot.trainable and slot.stop - slot.start >= 8:
                filtered[slot.start : slot.stop] = self._filter(mean[slot.start : slot.stop], known.std)
        return filtered

    def _filter(self, signal: Tensor, std: float) -> Tensor:
        spectrum = torch.fft.rfft(signal.double(), norm="ortho")
        power = spectrum.abs().square()
        octave = torch.arange(len(power), dtype=torch.float64).clamp(min=1).log2().floor().long()
        mean_power = torch.zeros(int(octave.max()) + 1, dtype=torch.float64).index_add_(0, octave, power)
        mean_power /= torch.bincount(octave)
        gain = (1 - std**2 / mean_power.clamp(min=1e-300)).clamp(min=self.floor, max=1.0)
        filtered: Tensor = torch.fft.irfft(spectrum * gain[octave], n=len(signal), norm="ortho")
        return filtered.to(signal.dtype)
