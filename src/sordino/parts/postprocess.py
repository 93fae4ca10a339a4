"""What the server does to the noised mean: free of privacy cost, because it sees nothing else."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.codec import Part
from sordino.errors import PlanError
from sordino.layout import Layout


@dataclass(frozen=True)
class Noised:
    """What is publicly known of a noised mean beside its value."""

    layout: Layout
    std: float  # exact standard deviation of the noise in one coordinate of the mean
    t: int


class Postprocess(Part):
    """A public map of the noised mean."""

    @abstractmethod
    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        """The mean [d], changed."""


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

    def __post_init__(self) -> None:
        if not (math.isfinite(self.strength) and self.strength >= 0):
            raise PlanError("smoothing", f"strength {self.strength}", "a finite number of at least 0")
        if self.order and sorted(self.order) != [0, 1, 2, 3]:
            raise PlanError("smoothing", f"order {list(self.order)}", "a permutation of 0, 1, 2, 3")

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        if self.strength == 0:
            return mean
        smooth = torch.empty_like(mean)
        for slot in known.layout.slots:
            part = mean[slot.start : slot.stop]
            smooth[slot.start : slot.stop] = self._tensor(part, slot.shape) if slot.trainable else part
        return smooth

    def _tensor(self, part: Tensor, shape: torch.Size) -> Tensor:
        if not self.order or len(shape) != 4:
            return smooth_cycle(part, self.strength)
        back = sorted(range(4), key=self.order.__getitem__)
        turned = part.view(shape).permute(self.order)
        return smooth_cycle(turned.reshape(-1), self.strength).view(turned.shape).permute(back).reshape(-1)


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
