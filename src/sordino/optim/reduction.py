"""Is the loss a mean or a sum over the records? Read off the gradient of the first batches, where the loss is known.

The number that undoes a mean is the size of the batch, which is secret: taken for a sum, every record's gradient
would depend on how many others came, and the clip would bound nothing that the bill speaks of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sordino.data.task import LOSSES
from sordino.errors import PlanError
from sordino.optim.loader import Handed
from sordino.optim.settings import Reduction


@dataclass
class Seen:
    """A model's output [b, ...], the targets the loader gave with it, and d loss / d output once it is known."""

    output: Tensor
    target: Tensor
    slope: Tensor | None = None

    @classmethod
    def of(cls, output: Any, handed: Handed) -> Seen | None:
        """What can be looked at: one tensor of three records or more."""
        fits = isinstance(output, Tensor) and output.requires_grad and output.dim() and len(output) == handed.size > 2
        if not fits or handed.target is None:
            return None
        seen = cls(output.detach(), handed.target)
        output.register_hook(seen._keep)
        return seen

    def _keep(self, slope: Tensor) -> None:
        self.slope = slope.detach()


class Check:
    """Compares what was declared with what is seen, until the loss is recognised in batches of two sizes.

    factor = slope / slope of the summed loss: in every batch factor * b is the same for a mean, factor for a sum.
    """

    def __init__(self, declared: Reduction, expected: float) -> None:
        self.declared, self.expected = declared, expected
        self.left, self.found = 8, "declared"  # batches to look at
        self.first: tuple[int, float] | None = None

    def look(self, seen: Seen | None) -> None:
        """Refuse a loss that is not reduced as declared."""
        if not self.left or seen is None or seen.slope is None:
            return
        self.left -= 1
        known = recognised(seen.output, seen.target, seen.slope)
        if known is None:
            _refuse_weighted_mean(seen.output, seen.target, seen.slope)
            return
        name, factor, size = known[0], known[1], len(seen.output)
        said = self._alone(factor, size, seen.output[0].numel()) if self.first is None else self._beside(factor, size)
        self.first = self.first or (size, factor)
        if said is not None and said != self.declared:
            self.left, self.first = 8, None
            raise PlanError(
                "reduction",
                f"a loss ({name}) that is the {said} over a batch, and reduction = {self.declared!r}",
                "the reduction that the loss has",
                f'make_private(..., reduction="{said}")',
            )
        if said is not None and size != self.first[0]:
            self.left, self.found = 0, f"recognised: {name}"

    def _alone(self, factor: float, size: int, width: int) -> Reduction | None:
        """What the usual factors say: 1 / b, or 1 (of mean squares, the width); not where a constant may be meant."""
        if _near(factor * size, 1.0) and size != self.expected:
            return "mean"
        return "sum" if _near(factor, 1.0) or _near(factor, float(width)) else None

    def _beside(self, factor: float, size: int) -> Reduction | None:
        """What two batches of different sizes say, whatever constant the loss was multiplied by."""
        assert self.first is not None
        before, other = self.first
        if _near(size / before, 1.0, 0.01):
            return None
        return "mean" if _near(factor * size, other * before) else "sum" if _near(factor, other) else None


def _near(value: float, wanted: float, tolerance: float = 1e-3) -> bool:
    return abs(value / wanted - 1) < tolerance


def recognised(output: Tensor, target: Tensor, slope: Tensor) -> tuple[str, float] | None:
    """The known loss whose summed gradient is proportional to `slope`, and the factor."""
    for name in LOSSES:
        expected = _own_slope(name, output, target)
        if expected is None or expected.shape != slope.shape or not bool(expected.any()):
            continue
        factor = float((slope * expected).sum() / expected.square().sum())
        if factor and float((slope - factor * expected).norm()) < 1e-3 * float(slope.norm()):
            return name, factor
    return None


def _refuse_weighted_mean(output: Tensor, target: Tensor, slope: Tensor) -> None:
    """With class weights torch divides the mean by the weights that came: a record's share depends on the others."""
    expected = _own_slope("cross_entropy", output, target)
    if expected is None or output.dim() != 2 or expected.shape != slope.shape:
        return
    shares = (slope * expected).sum(1) / expected.square().sum(1)  # w_j / sum of w, which add up to 1
    alike = float((slope - shares[:, None] * expected).norm()) < 1e-3 * float(slope.norm())
    if alike and _near(float(shares.sum()), 1.0) and float(shares.std()) > 1e-3 * float(shares.mean()):
        raise PlanError(
            "reduction",
            "a cross-entropy with class weights, whose mean divides by the weights of the batch",
            "a loss in which each record has a term of its own",
            'reduction="sum" in the loss and in make_private',
        )


def _own_slope(name: str, output: Tensor, target: Tensor) -> Tensor | None:
    """d sum of the losses / d output; None where the loss does not fit."""
    with torch.enable_grad():
        point = output.clone().requires_grad_()
        try:
            return torch.autograd.grad(LOSSES[name](point, target).sum(), point)[0]
        except (RuntimeError, ValueError, IndexError):
            return None
