"""Postprocessing of the noised mean on the server: smoothing, shrinkage, sparsification. It costs no privacy.

The loop calls `apply` after decoding. Denoisers know the noise level exactly, because the plan sets it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sordino.codec import Part
from sordino.codec.boundary import returns, tensor
from sordino.errors import PlanError
from sordino.layout import Layout
from sordino.parts.encoding import NoiseStd
from sordino.parts.schedules import natural
from sordino.parts.sparsify import check_keep, keep_largest, keep_largest_of_each


@dataclass(frozen=True)
class Noised:
    """What is publicly known of a noised mean beside its value."""

    layout: Layout
    std: NoiseStd  # exact standard deviation of the noise in every coordinate of the mean
    t: int
    clip_norm: float = math.inf  # of a client's update, or of a record's gradient: the mean is no longer than that

    @property
    def noise_to_signal(self) -> float:
        """The norm of the noise over the largest norm of the mean: z sqrt(d) / S for S clients, or records."""
        return float(self.each().square().sum().sqrt()) / self.clip_norm

    def each(self) -> Tensor:
        """The deviation of every coordinate [d], float64."""
        if isinstance(self.std, Tensor):
            return self.std.double()
        return torch.full((self.layout.size,), self.std, dtype=torch.float64)


class Postprocess(Part):
    """A public map of the noised mean. `linear`: the noise after it is known, by `spread`; else nobody can say."""

    needs_noise: ClassVar[bool] = False  # True: `apply` reads known.std, so what comes before must be linear
    linear: ClassVar[bool] = False

    @abstractmethod
    @returns(lambda found, part, mean, *_: tensor(found, tuple(mean.shape), mean))
    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        """The mean [d], changed."""

    def decoded_noise_std(self, known: Noised) -> NoiseStd:
        """The noise's standard deviation after `apply`; asked of linear maps only."""
        raise NotImplementedError(f"{self.kind} does not say what noise is left")


@dataclass(frozen=True)
class LaplacianSmoothing(Postprocess, kind="laplacian_smoothing"):
    """u = (I + strength * L)^-1 mean, L the Laplacian of a cycle, tensor by tensor (papers 000 and 004).

    A tensor is flattened in parameter order; `order` permutes the axes of 4-dimensional ones first, such as
    (0, 2, 3, 1) for O,H,W,I (paper 000, Table 5). The inverse factors into two one-sided recursive filters,
    c / ((1 - r z^-1)(1 - r z)), applied by doubling.
    Guarantee: a public invertible linear map; the certificate is the same with and without it.
    """

    strength: float
    order: tuple[int, ...] = ()
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not natural(self.strength):
            raise PlanError("smoothing", f"strength {self.strength}", "a finite number of at least 0")
        if self.order and sorted(self.order) != [0, 1, 2, 3]:
            raise PlanError("smoothing", f"order {list(self.order)}", "a permutation of 0, 1, 2, 3")

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        return self._tensors(mean, known.layout, smooth_cycle)

    def decoded_noise_std(self, known: Noised) -> NoiseStd:
        """sqrt(h^2 * nu^2), h the response to a single one, * round the cycle of each tensor."""
        return self._tensors(known.each().square(), known.layout, _variances).sqrt()

    def _tensors(self, vector: Tensor, layout: Layout, of_cycle: Callable[[Tensor, float], Tensor]) -> Tensor:
        """`of_cycle` of every trained tensor, flattened in its order."""
        if self.strength == 0:
            return vector
        made = torch.empty_like(vector)
        for slot in layout.slots:
            part = vector[slot.start : slot.stop]
            made[slot.start : slot.stop] = self._tensor(part, slot.shape, of_cycle) if slot.trainable else part
        return made

    def _tensor(self, part: Tensor, shape: torch.Size, of_cycle: Callable[[Tensor, float], Tensor]) -> Tensor:
        if not self.order or len(shape) != 4:
            return of_cycle(part, self.strength)
        back = sorted(range(4), key=self.order.__getitem__)
        turned = part.view(shape).permute(self.order)
        return of_cycle(turned.reshape(-1), self.strength).view(turned.shape).permute(back).reshape(-1)


def _variances(variances: Tensor, strength: float) -> Tensor:
    """Of independent noise after smoothing: h^2 * nu^2 round the cycle."""
    impulse = torch.zeros_like(variances)
    impulse[0] = 1.0
    weights = smooth_cycle(impulse, strength).square()
    if bool((variances == variances[0]).all()):
        return variances * weights.sum()
    product = torch.fft.rfft(weights) * torch.fft.rfft(variances)
    round_the_cycle: Tensor = torch.fft.irfft(product, len(variances))
    return round_the_cycle.clamp(min=0.0)


def smooth_cycle(signal: Tensor, strength: float) -> Tensor:
    """(I + s L)^-1 v on a cycle of any length, exact to rounding, in O(d).

    With S the cyclic shift, r = 2s / (1 + 2s + sqrt(1 + 4s)) (no digits lost for small s) and c = r / s:
    (I + s L)^-1 = c (1 - r S)^-1 (1 - r S^-1)^-1.
    """
    half = 1 + 2 * strength + math.sqrt(1 + 4 * strength)
    r = 2 * strength / half
    return _geometric(_geometric(signal, r, 1), r, -1) * (2 / half)


def _geometric(signal: Tensor, r: float, way: int) -> Tensor:
    """sum_k r^k S^k v = prod_j (1 + r^(2^j) S^(2^j)) v, cut where r^(2^j) is below rounding."""
    floor = 1e-9 if signal.dtype == torch.float32 else 1e-18
    y, power, shift = signal, r, way
    while power > floor:
        y = torch.roll(y, shift).mul_(power).add_(y)
        power, shift = power * power, shift * 2
    return y


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
class WhenNoisy(Postprocess, kind="when_noisy"):
    """`denoiser` in a round whose noise-to-signal ratio z sqrt(d) / S is above `above`; else the mean as it is.

    z is the noise multiplier, d the number of parameters, S the expected cohort (or batch). Laplacian smoothing wins
    above a ratio of about 15 and loses below it. The ratio is public: it depends on the plan and the model alone.
    """

    denoiser: Postprocess
    above: float = 15.0
    needs_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not natural(self.above):
            raise PlanError("denoising", f"above = {self.above}", "a finite number of at least 0")

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        return self.denoiser.apply(mean, known) if known.noise_to_signal > self.above else mean


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
