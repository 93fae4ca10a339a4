"""How the loop's loss adds up records: mean or sum, recognised from its gradient in every step, and undone.

The number that undoes a mean is the size of the batch, which is secret: taken for a sum, every record's gradient
would depend on how many others there are, and the clip norm would bound nothing that the cost speaks of. Just so where
a mean divides by the tokens that count, or where records are compared: a loss that is not recognised is refused, and
make_private(..., loss=...) is the way for any other.

Once a loss is recognised, with the constant c before it, what enters the model in the backward pass is

    c / b * d loss_j / d output_j   (a mean; without b a sum),     of the known loss, and of the labels that were given

and not what the loop computed: the latter is compared with it and must agree. So whatever else the loop's own loss
does, a record's gradient is that of a known loss of this record.

In half precision 1 / b would be rounded to eight bits on its way into the model, another number for every b: one record
more would change what all the others add, by up to b / 512 clip norms. So the model's output is widened to float32, and
its gradient multiplied by b there.
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
from torch.utils._pytree import tree_flatten, tree_unflatten

from sordino import codec
from sordino.dpsgd.loader import BatchPiece
from sordino.dpsgd.pieces import HALF
from sordino.dpsgd.settings import Reduction
from sordino.errors import PlanError
from sordino.graph import BY_CONSTRUCTION, TRUSTED, Grade
from sordino.parts.losses import IGNORED, Absolute, CrossEntropy, Hinge, Logistic, LossFunction, Mse

NEXT = "cross_entropy of the next token"
MEAN_ROUNDING = 2.0**-22  # clip norms that a record's clipped gradient may change by, from a mean over b to b + 1
_SURE = "make_private(..., loss=f) with f(output, target) -> one value per record, and optimizer.loss(model(x), y)"
_TERM = "a loss in which each record has a term of its own"


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
    """How far inside the clip norm C every record's gradient is pulled, in units of C; `expected` records at once.

    A mean hands each record 1 / b, which float32 rounds: with one record more, each of the others adds another number.
    Measured 1.0e-7 C each, all the same way where records are equal: the sum of 100,000 moved by 1.010 C. The public
    expected number and eight deviations more, times 2^-22, is kept free for that. A sum has no such factor.
    """
    if declared == "sum" or double:
        return 0.0
    margin = MEAN_ROUNDING * (expected + 8.0 * math.sqrt(expected))
    if margin > 0.5:
        found = f"a mean over about {expected:,.0f} records at once, whose gradients float32 rounds by their number"
        fix = 'reduction = "sum", or max_physical_batch_size = 100_000'
        raise PlanError("reduction", found, "at most 2,000,000", fix)
    return margin


class _WidenedOutputs(torch.autograd.Function):
    """Float32 copies of the outputs, whose backward runs the model's own with gradients times `scale`.

    The two autograd graphs are apart, so a loss that reaches into the model past the copies is a second backward pass,
    which is refused.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, scale: float, inner: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.inner, ctx.scale = inner, scale
        ctx.set_materialize_grads(False)
        return tuple(y.detach().float() if y.dtype in HALF else y.detach().clone() for y in inner)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor, None, None]:
        pairs = [(y, (s * ctx.scale).to(y.dtype)) for y, s in zip(ctx.inner, slopes, strict=True) if s is not None]
        torch.autograd.backward([y for y, _ in pairs], [s for _, s in pairs], retain_graph=True)
        return torch.zeros(()), None, None


def is_half_precision(output: Any) -> bool:
    """Whether an output that is trained on is in half precision."""
    return any(y.dtype in HALF for y in tree_flatten(output)[0] if _live(y))


def widen_outputs(output: Any, scale: float) -> Any:
    """The output in float32; its gradients come back times `scale`."""
    leaves, form = tree_flatten(output)
    inner = [y for y in leaves if _live(y)]
    anchor = torch.zeros((), requires_grad=True)
    supply = iter(_WidenedOutputs.apply(anchor, scale, inner))  # type: ignore[no-untyped-call]
    return tree_unflatten([next(supply) if _live(y) else y for y in leaves], form)


def _live(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad


def has_ignored_targets(target: Tensor | None) -> bool:
    """Whether some targets are left out, so that a mean would divide by how many are not."""
    return target is not None and target.dtype == torch.int64 and bool((target == IGNORED).any())


@codec.hides_values
@dataclass
class OutputGradient:
    """A model's output [b, ...] with its targets, and d loss / d output once the backward pass has reached it."""

    output: Tensor
    target: Tensor | None = None
    slope: Tensor | None = None
    due: Tensor | None = None  # of the known loss, in place of `slope`
    size: int = 0  # of the batch
    agrees: bool = False  # whether the two are the same

    @classmethod
    def of(cls, output: Any, live: Sequence[Tensor], piece: BatchPiece, check: LossCheck) -> list[OutputGradient]:
        """One for each tensor of the output; the targets belong to the only one, or to its logits."""
        main = getattr(output, "logits", output)
        found = []
        for one in live if piece.size else ():
            seen = cls(one.detach(), piece.target if one is main else None, size=piece.size)
            one.register_hook(partial(seen._replace, check))  # type: ignore[no-untyped-call]
            found.append(seen)
        return found

    def _replace(self, check: LossCheck, slope: Tensor) -> Tensor | None:
        self.slope = slope.detach()
        self.due = check.due(self)
        return self.due

    def finite(self) -> OutputGradient:
        """Without the records whose output or gradient is not finite: they count as zero anyway."""
        assert self.slope is not None
        assert self.target is not None
        good = (self.output.isfinite() & self.slope.isfinite()).flatten(1).all(1)
        if bool(good.all()):
            return self
        return replace(self, output=self.output[good], target=self.target[good], slope=self.slope[good])


class LossCheck:
    """Recognises the loop's loss, compares it with what was declared, and replaces its gradient by the known loss's.

    factor = slope / slope of the summed loss: in every batch factor * b is the same for a mean, factor for a sum.
    """

    def __init__(self, declared: Reduction, expected: float, trusted: bool = False) -> None:
        self.declared, self.expected, self.trusted = declared, expected, trusted
        self.found = "declared"
        self.first: tuple[int, float] | None = None  # size and factor of the first batch
        self.known: tuple[str, float] | None = None  # the loss, and the constant c
        self.own = ""  # the loop's own loss, where none is known and its owner vouches for it

    @property
    def grade(self) -> tuple[Grade, str]:
        """What is proved of the loop's own loss: it is replaced by a known one, where one is known."""
        return (TRUSTED, self.own) if self.own else (BY_CONSTRUCTION, "")

    def due(self, seen: OutputGradient) -> Tensor | None:
        """The gradient of the known loss; None where none is recognised."""
        if seen.target is None or seen.slope is None:
            return None
        seen.agrees = self._agrees(seen)
        if not seen.agrees:
            kept = seen.finite()
            if self.known is None:
                self.known = self._recognise(kept)
            elif not self._agrees(kept):
                other = self._recognise(kept)  # of two losses that looked alike so far, it is the other one
                if other is not None and _near(other[1], self.known[1]):
                    self.known = other
        return self._slope(seen)

    def _recognise(self, seen: OutputGradient) -> tuple[str, float] | None:
        assert seen.slope is not None
        found = recognise_loss(seen) if bool(seen.slope.any()) else None
        if found is None:
            return None
        size, width = seen.size, seen.output[0].numel()
        constant = found[1] * size if self.declared == "mean" else found[1]
        usual = any(_near(constant, wanted) for wanted in (1.0, float(width)))
        return (found[0], float(f"{constant:.4g}")) if usual or size > 1 else None

    def _slope(self, seen: OutputGradient) -> Tensor | None:
        own = None if self.known is None else _summed_slope(self.known[0], seen)
        if own is None or self.known is None:
            return None
        return own * (self.known[1] / seen.size if self.declared == "mean" else self.known[1])

    def _agrees(self, seen: OutputGradient) -> bool:
        """Whether the gradient is that of the known loss, within what its constant was rounded to."""
        due, slope = self._slope(seen), seen.slope
        if due is None or slope is None or slope.shape != due.shape:
            return False
        return float((slope - due).norm()) <= 2e-3 * float(due.norm())

    def check(self, outputs: Sequence[OutputGradient], piece: BatchPiece | None) -> None:
        """Refuse a loss that is not reduced as declared, or not known."""
        if piece is None or not piece.size:
            return
        reached = [one for one in outputs if one.slope is not None]
        others = [one.slope for one in reached if one.target is None]
        if len(others) == len(reached) or any(slope is not None and bool(slope.any()) for slope in others):
            raise _unknown("a loss of something else than one output tensor and the batch's last tensor")
        for one in reached:
            if one.target is not None:
                self._check(one)

    def _check(self, seen: OutputGradient) -> None:
        ignored = has_ignored_targets(seen.target)
        if seen.agrees and self.first is not None and not ignored:
            return
        due, seen = seen.due, seen.finite()
        assert seen.slope is not None
        if not len(seen.output) or (due is None and not bool(seen.slope.any())):
            return
        confirmed = self._agrees(seen)
        if seen.size == 1 and (self.known is None or confirmed):
            return  # of one record, a mean is a sum
        if ignored or self.first is None or not confirmed:
            found = recognise_loss(seen)
            if found is None:
                return self._refuse_weighted(seen)
            self._check_reduction(*found, seen)
        if self.known is not None:
            if not self._agrees(seen):
                raise _unknown("a loss that is another one, or has another weight, than in earlier batches")
            self.found = f"recognised: {self.known[0]}"

    def _refuse_weighted(self, seen: OutputGradient) -> None:
        """Not proportional to a known loss: a sum with a weight for each class is allowed, if its owner vouches.

        With class weights torch divides the mean by the weights of the batch: a record's share depends on the others.
        """
        target, slope, expected = seen.target, seen.slope, _summed_slope("cross_entropy", seen)
        assert target is not None
        assert slope is not None
        by_class = False
        if expected is not None and seen.output.dim() == 2 and expected.shape == slope.shape and target.dim() == 1:
            shares = (slope * expected).sum(1) / expected.square().sum(1)  # w_j; of a mean w_j / sum of w
            total, alike = float(shares.sum()), _proportional(slope, shares[:, None] * expected)
            if alike and _near(total, 1.0) and float(shares.std()) > 1e-3 * float(shares.mean()):
                found = "a cross-entropy with class weights, whose mean divides by the weights of the batch"
                raise PlanError("reduction", found, _TERM, 'reduction="sum" in the loss and in make_private')
            means = torch.stack([shares[target == c].mean() for c in target])
            by_class = self.declared == "sum" and _proportional(slope, means[:, None] * expected)
        if not by_class or self.known is not None:
            raise _unknown("a loss that is not one of those whose terms are known to be a record's own")
        self.own = "a cross-entropy with a weight for each class, computed by the loop"
        if not self.trusted:
            raise _unknown(f"{self.own}: the weights are not known")

    def _check_reduction(self, name: str, factor: float, seen: OutputGradient) -> None:
        assert seen.target is not None
        target, size = seen.target[:, 1:] if name == NEXT else seen.target, seen.size
        if has_ignored_targets(target) and _near(factor * float((target != IGNORED).sum()), 1.0):
            found = f"a mean over the targets that are not {IGNORED}: their number is that of all records together"
            raise PlanError("reduction", found, _TERM, _SURE)
        apparent = self._apparent(factor, size, seen.output[0].numel())
        if apparent is None and self.first is not None and not _near(size / self.first[0], 1.0, 0.01):
            raise _unknown(f"a loss ({name}) over a number that is neither constant nor the size of the batch")
        self.first = self.first or (size, factor)
        if apparent is not None and apparent != self.declared:
            self.first = self.known = None
            raise PlanError(
                "reduction",
                f"a loss ({name}) that is the {apparent} over a batch, and reduction = {self.declared!r}",
                "the reduction that the loss has",
                f'make_private(..., reduction="{apparent}")',
            )

    def _apparent(self, factor: float, size: int, width: int) -> Reduction | None:
        """Mean or sum by the usual factors, 1 / b or 1 (of mean squares, the width); or by two sizes of batches."""
        if self.first is None:  # says nothing where a constant may be meant
            if _near(factor * size, 1.0) and size != self.expected:
                return "mean"
            return "sum" if _near(factor, 1.0) or _near(factor, float(width)) else None
        before, other = self.first
        if _near(size / before, 1.0, 0.01):
            return None
        return "mean" if _near(factor * size, other * before) else "sum" if _near(factor, other) else None


def _near(value: float, wanted: float, tolerance: float = 1e-3) -> bool:
    return abs(value / wanted - 1) < tolerance


def _unknown(found: str) -> PlanError:
    return PlanError("reduction", found, f"{_TERM}, for sure", _SURE)


def recognise_loss(seen: OutputGradient) -> tuple[str, float] | None:
    """The known loss whose summed gradient is proportional to the slope, and the factor."""
    slope = seen.slope
    assert slope is not None
    for name in KNOWN:
        expected = _summed_slope(name, seen)
        if expected is None or expected.shape != slope.shape or not bool(expected.any()):
            continue
        factor = float((slope * expected).sum() / expected.square().sum())
        if factor and _proportional(slope, factor * expected):
            return name, factor
    return None


def _proportional(slope: Tensor, expected: Tensor) -> bool:
    return float((slope - expected).norm()) < 1e-3 * float(slope.norm())


def _summed_slope(name: str, seen: OutputGradient) -> Tensor | None:
    """d sum of the losses / d output; None where the loss does not fit."""
    output, target = seen.output, seen.target
    assert target is not None
    plain = output.dim() == 2 and target.shape == output.shape[:1]
    with torch.enable_grad():
        point = output.clone().requires_grad_()
        try:
            if name == CROSS.kind and plain and not has_ignored_targets(target):
                return CROSS.slope(output, target)
            return torch.autograd.grad(KNOWN[name](point, target).sum(), point)[0]
        except (RuntimeError, ValueError, IndexError):
            return None
