"""Is the loss a mean or a sum over the records? Read off its gradient, in every step.

The number that undoes a mean is the size of the batch, which is secret: taken for a sum, every record's gradient
would depend on how many others came, and the clip would bound nothing that the bill speaks of. Just so where a mean
divides by the tokens that count, or where records are compared: a loss that is not recognised is refused, and
make_private(..., loss=...) is the way for any other.

Once a loss is recognised, with the constant c before it, what enters the model in the backward pass is

    c / b * d loss_j / d output_j   (a mean; without b a sum),     of the known loss, and of the labels that were given

and not what the loop computed: the latter is compared with it and must agree. So whatever else the loop's own loss
does, a record's gradient is that of a known loss of this record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from sordino import codec
from sordino.dpsgd.loader import Handed
from sordino.dpsgd.settings import Reduction
from sordino.errors import PlanError
from sordino.graph import BY_CONSTRUCTION, TRUSTED, Grade
from sordino.parts.losses import IGNORED, Absolute, CrossEntropy, Hinge, Logistic, LossFunction, Mse

NEXT = "cross_entropy of the next token"
COMPANY_ROUNDING = 2.0**-22  # clips that a record's clipped gradient may change by when a mean over b is one over b + 1
_SURE = "make_private(..., loss=f) with f(output, target) -> one value per record, and optimizer.loss(model(x), y)"


def _tokens(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of [b, T, V] at [b, T], as language models flatten it."""
    if out.dim() != y.dim() + 1 or y.dim() < 2:
        raise ValueError("no tokens")
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="none")


CROSS = CrossEntropy()
KNOWN: dict[str, LossFunction] = {
    **{loss.kind: loss for loss in (CROSS, Mse(), Absolute(), Logistic(), Hinge())},
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
    target: Tensor | None = None
    slope: Tensor | None = None
    due: Tensor | None = None  # of the known loss, in place of `slope`
    size: int = 0  # of the batch
    agrees: bool = False  # whether the two are the same

    @classmethod
    def of(cls, output: Any, live: Sequence[Tensor], handed: Handed, check: Check) -> list[Seen]:
        """One for each tensor of the answer; the targets belong to the only one, or to its logits."""
        main = getattr(output, "logits", output)
        found = []
        for one in live if handed.size else ():
            seen = cls(one.detach(), handed.target if one is main else None, size=handed.size)
            one.register_hook(partial(seen._keep, check))  # type: ignore[no-untyped-call]
            found.append(seen)
        return found

    def _keep(self, check: Check, slope: Tensor) -> Tensor | None:
        self.slope = slope.detach()
        self.due = check.due(self)
        return self.due

    def finite(self) -> Seen:
        """Without the records whose output or slope is not finite: they count as zero anyway."""
        assert self.slope is not None
        assert self.target is not None
        good = (self.output.isfinite() & self.slope.isfinite()).flatten(1).all(1)
        return (
            self
            if bool(good.all())
            else replace(self, output=self.output[good], target=self.target[good], slope=self.slope[good])
        )


class Check:
    """Compares what was declared with what is seen, and puts the gradient of the known loss in its place.

    factor = slope / slope of the summed loss: in every batch factor * b is the same for a mean, factor for a sum.
    """

    def __init__(self, declared: Reduction, expected: float, trusted: bool = False) -> None:
        self.declared, self.expected, self.trusted = declared, expected, trusted
        self.found = "declared"
        self.first: tuple[int, float] | None = None
        self.known: tuple[str, float] | None = None  # the loss, and the constant c
        self.own = ""  # what the loop's own loss was, where none is known and its owner vouches for it

    @property
    def grade(self) -> tuple[Grade, str]:
        """What is proved of the loop's own loss: that of a known one is put in its place, where one is known."""
        return (TRUSTED, self.own) if self.own else (BY_CONSTRUCTION, "")

    def due(self, seen: Seen) -> Tensor | None:
        """The slope of the known loss; None where none is recognised."""
        if seen.target is None or seen.slope is None:
            return None
        due = None if self.known is None else self._slope(seen, self.known)
        seen.agrees = due is not None and _alike(seen.slope, due)
        if seen.agrees:
            return due
        kept = seen.finite()
        if self.known is None:
            self.known = self._recognised(kept)
        elif not self._agrees(kept, self.known):
            other = self._recognised(kept)  # of two losses that looked alike so far, it is the other one
            if other is not None and _near(other[1], self.known[1]):
                self.known = other
        return None if self.known is None else self._slope(seen, self.known)

    def _recognised(self, seen: Seen) -> tuple[str, float] | None:
        assert seen.target is not None
        assert seen.slope is not None
        known = recognised(seen.output, seen.target, seen.slope) if bool(seen.slope.any()) else None
        if known is None:
            return None
        size, width = seen.size, seen.output[0].numel()
        constant = known[1] * size if self.declared == "mean" else known[1]
        usual = any(_near(constant, wanted) for wanted in (1.0, float(width)))
        return (known[0], float(f"{constant:.4g}")) if usual or size > 1 else None

    def _slope(self, seen: Seen, known: tuple[str, float]) -> Tensor | None:
        name, constant = known
        assert seen.target is not None
        own = _own_slope(name, seen.output, seen.target)
        return None if own is None else own * (constant / seen.size if self.declared == "mean" else constant)

    def _agrees(self, seen: Seen, known: tuple[str, float]) -> bool:
        due = self._slope(seen, known)
        return due is not None and seen.slope is not None and _alike(seen.slope, due)

    def look(self, seen: Sequence[Seen], handed: Handed | None) -> None:
        """Refuse a loss that is not reduced as declared, or not known."""
        reached = [one for one in seen if one.slope is not None]
        if handed is None or not handed.size:
            return
        if not any(one.target is not None for one in reached) or any(
            one.target is None and bool(one.slope.any()) for one in reached if one.slope is not None
        ):
            raise _unknown("a loss of something else than one output tensor and the batch's last tensor")
        for one in reached:
            if one.target is not None:
                self._look(one)

    def _look(self, seen: Seen) -> None:
        if seen.agrees and self.first is not None and not counts(seen.target):
            return
        size, due, seen = seen.size, seen.due, seen.finite()
        assert seen.slope is not None
        assert seen.target is not None
        if not len(seen.output) or (due is None and not bool(seen.slope.any())):
            return
        if size == 1 and (self.known is None or self._confirmed(seen)):
            return  # of one record, a mean is a sum
        if counts(seen.target) or self.first is None or not self._confirmed(seen):
            known = recognised(seen.output, seen.target, seen.slope)
            if known is None:
                return self._weighted(seen)
            self._judge(*known, size, seen)
        if self.known is not None and not self._confirmed(seen):
            raise _unknown("a loss that is another one, or has another weight, than in earlier batches")
        if self.known is not None:
            self.found = f"recognised: {self.known[0]}"

    def _confirmed(self, seen: Seen) -> bool:
        return self.known is not None and self._agrees(seen, self.known)

    def _weighted(self, seen: Seen) -> None:
        """Not proportional to a known loss: a sum with a weight for each class is one too, if its owner says so."""
        assert seen.slope is not None
        assert seen.target is not None
        _refuse_weighted_mean(seen.output, seen.target, seen.slope)
        by_class = self.declared == "sum" and _by_class(seen.output, seen.target, seen.slope)
        if not by_class or self.known is not None:
            raise _unknown("a loss that is not one of those whose terms are known to be a record's own")
        self.own = "a cross-entropy with a weight for each class, computed by the loop"
        if not self.trusted:
            raise _unknown(f"{self.own}: the weights are not known")

    def _judge(self, name: str, factor: float, size: int, seen: Seen) -> None:
        assert seen.target is not None
        _refuse_counted(seen.target[:, 1:] if name == NEXT else seen.target, factor)
        said = self._alone(factor, size, seen.output[0].numel()) if self.first is None else self._beside(factor, size)
        if said is None and self.first is not None and not _near(size / self.first[0], 1.0, 0.01):
            raise _unknown(f"a loss ({name}) over a number that is neither constant nor the size of the batch")
        self.first = self.first or (size, factor)
        if said is not None and said != self.declared:
            self.first = self.known = None
            raise PlanError(
                "reduction",
                f"a loss ({name}) that is the {said} over a batch, and reduction = {self.declared!r}",
                "the reduction that the loss has",
                f'make_private(..., reduction="{said}")',
            )

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


def _alike(slope: Tensor, due: Tensor) -> bool:
    """Within what the constant was rounded to."""
    return slope.shape == due.shape and float((slope - due).norm()) <= 2e-3 * float(due.norm())


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
            if name == CROSS.kind and output.dim() == 2 and target.shape == output.shape[:1] and not counts(target):
                return CROSS.slope(output, target)
            return torch.autograd.grad(KNOWN[name](point, target).sum(), point)[0]
        except (RuntimeError, ValueError, IndexError):
            return None
