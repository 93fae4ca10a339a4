"""Is the loss a mean or a sum over the records? Read off its gradient, in the first batches and in some later ones.

The number that undoes a mean is the size of the batch, which is secret: taken for a sum, every record's gradient
would depend on how many others came, and the clip would bound nothing that the bill speaks of. Just so where a mean
divides by the tokens that count, or where records are compared: a loss that is not recognised is refused, and
make_private(..., loss=...) is the way for any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from sordino import codec
from sordino.errors import PlanError
from sordino.optim.loader import Handed
from sordino.optim.settings import Reduction
from sordino.parts.losses import IGNORED, Absolute, CrossEntropy, Hinge, Logistic, LossFunction, Mse

NEXT = "cross_entropy of the next token"
COMPANY_ROUNDING = 2.0**-22  # clips that a record's clipped gradient may change by when a mean over b is one over b + 1
_SURE = "make_private(..., loss=f) with f(output, target) -> one value per record, and optimizer.loss(model(x), y)"


def _tokens(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of [b, T, V] at [b, T], as language models flatten it."""
    if out.dim() != y.dim() + 1 or y.dim() < 2:
        raise ValueError("no tokens")
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="none")


KNOWN: dict[str, LossFunction] = {
    **{loss.kind: loss for loss in (CrossEntropy(), Mse(), Absolute(), Logistic(), Hinge())},
    "cross_entropy of tokens": _tokens,
    NEXT: lambda out, y: _tokens(out[:, :-1], y[:, 1:]),
    "nll": lambda out, y: F.nll_loss(out, y, reduction="none"),
    "huber": lambda out, y: F.huber_loss(out, y.reshape(out.shape), reduction="none"),
}


def clip_margin(declared: Reduction, expected: float, *, double: bool) -> float:
    """How far inside the clip every record's gradient is pulled, in clips; `expected` records are computed at once.

    A mean hands each record 1 / b, which float32 rounds: with one record more, each of the others adds another number.
    Measured 1.0e-7 clips each, all the same way where records are equal: the sum of 100,000 moved by 1.010. The public
    expected number and eight deviations more, times 2^-22, is kept free for that. A sum has no such factor.
    """
    if declared == "sum" or double:
        return 0.0
    margin = COMPANY_ROUNDING * (expected + 8.0 * math.sqrt(expected))
    if margin > 0.5:
        found = f"a mean over about {expected:,.0f} records at once, whose gradients float32 rounds by their number"
        raise PlanError("reduction", found, "at most 2,000,000", 'reduction = "sum", or physical_batch = 100_000')
    return margin


def counts(target: Tensor | None) -> bool:
    """Whether some targets are left out, so that a mean would divide by how many are not."""
    return target is not None and target.dtype == torch.int64 and bool((target == IGNORED).any())


@codec.hides_values
@dataclass
class Seen:
    """A model's output [b, ...], the targets the loader gave with it, and d loss / d output once it is known."""

    output: Tensor
    target: Tensor
    slope: Tensor | None = None

    @classmethod
    def of(cls, output: Any, handed: Handed) -> Seen | None:
        """What can be looked at: one tensor of two records or more, or the logits of a larger answer."""
        output = getattr(output, "logits", output)
        fits = isinstance(output, Tensor) and output.requires_grad and output.dim() and len(output) == handed.size > 1
        if not fits or handed.target is None:
            return None
        seen = cls(output.detach(), handed.target)
        output.register_hook(seen._keep)
        return seen

    def _keep(self, slope: Tensor) -> None:
        self.slope = slope.detach()

    def finite(self) -> Seen:
        """Without the records whose output or slope is not finite: they count as zero anyway."""
        assert self.slope is not None
        good = (self.output.isfinite() & self.slope.isfinite()).flatten(1).all(1)
        return self if bool(good.all()) else Seen(self.output[good], self.target[good], self.slope[good])


class Check:
    """Compares what was declared with what is seen: in the first batches, until the loss is known, then now and then.

    factor = slope / slope of the summed loss: in every batch factor * b is the same for a mean, factor for a sum.
    """

    def __init__(self, declared: Reduction, expected: float) -> None:
        self.declared, self.expected = declared, expected
        self.left, self.found = 8, "declared"  # batches to look at
        self.first: tuple[int, float] | None = None

    def look(self, seen: Seen | None, handed: Handed | None) -> None:
        """Refuse a loss that is not reduced as declared, or not known."""
        if seen is None or seen.slope is None:
            if self.left and handed is not None and handed.size > 1:
                raise _unknown("a loss of something else than one output tensor and the batch's last tensor")
            return
        size, seen = len(seen.output), seen.finite()
        if seen.slope is None or not bool(seen.slope.any()):
            return
        self.left = max(0, self.left - 1)
        known = recognised(seen.output, seen.target, seen.slope)
        if known is None:
            return self._weighted(seen)
        self._judge(*known, size, seen)

    def _weighted(self, seen: Seen) -> None:
        """Not proportional to a known loss: a sum with a weight for each class is one too, no other is."""
        assert seen.slope is not None
        _refuse_weighted_mean(seen.output, seen.target, seen.slope)
        if self.declared != "sum" or not _by_class(seen.output, seen.target, seen.slope):
            raise _unknown("a loss that is not one of those whose terms are known to be a record's own")

    def _judge(self, name: str, factor: float, size: int, seen: Seen) -> None:
        _refuse_counted(seen.target[:, 1:] if name == NEXT else seen.target, factor)
        said = self._alone(factor, size, seen.output[0].numel()) if self.first is None else self._beside(factor, size)
        if said is None and self.first is not None and not _near(size / self.first[0], 1.0, 0.01):
            raise _unknown(f"a loss ({name}) over a number that is neither constant nor the size of the batch")
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


def _unknown(found: str) -> PlanError:
    return PlanError("reduction", found, "a loss in which each record has a term of its own, for sure", _SURE)


def _refuse_counted(target: Tensor, factor: float) -> None:
    """With targets left out torch divides the mean by how many are not: a record's share depends on the others."""
    if counts(target) and _near(factor * float((target != IGNORED).sum()), 1.0):
        found = f"a mean over the targets that are not {IGNORED}: their number is that of all records together"
        raise PlanError("reduction", found, "a loss in which each record has a term of its own", _SURE)


def _by_class(output: Tensor, target: Tensor, slope: Tensor) -> bool:
    """Whether the slope is that of a cross-entropy with one weight for each class."""
    expected = _own_slope("cross_entropy", output, target)
    if expected is None or output.dim() != 2 or expected.shape != slope.shape or target.dim() != 1:
        return False
    shares = (slope * expected).sum(1) / expected.square().sum(1)
    means = torch.stack([shares[target == c].mean() for c in target])
    return float((slope - means[:, None] * expected).norm()) < 1e-3 * float(slope.norm())


def recognised(output: Tensor, target: Tensor, slope: Tensor) -> tuple[str, float] | None:
    """The known loss whose summed gradient is proportional to `slope`, and the factor."""
    for name in KNOWN:
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
            return torch.autograd.grad(KNOWN[name](point, target).sum(), point)[0]
        except (RuntimeError, ValueError, IndexError):
            return None
