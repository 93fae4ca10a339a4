"""Graphs of the user's `loss=` and `transform=` functions in make_private, and recognition of a loop's own loss.

    loss = 1 / b * sum_j f(output_j, target_j)            inputs_j = f(inputs_j) for each record of a batch

f is captured on synthetic records before it runs on a private one; b is the batch size. If the graph of f computes
records independently, it runs on the whole batch, else on each record separately. It may draw random numbers from
torch. The gradient that enters the model in the backward pass is that of the loss's graph; a loop that adds further
terms to the loss is refused.

Without `loss=` the loop computes its own loss, which is recognised from its gradient in every step as the mean or sum
of a loss in the table `KNOWN`. A mean is undone by multiplying with the secret batch size: if a mean were taken for a
sum, every record's gradient would depend on the number of other records, and the clip norm would not bound one record's
influence. The same holds for a mean over tokens of all records, or a loss that compares records; therefore a loss that
is not recognised is refused. Once a loss is recognised, as c times a loss of the table, the gradient that enters the
model is

    c / b * d loss_j / d output_j   (for a mean; for a sum without b),     for the labels in the batch

and not the loop's own gradient, which must agree with it: so each record's gradient depends on this record alone.
Called by dpsgd/recording.py, optimizer.py and loader.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sordino import codec
from sordino.data.clients import is_causal
from sordino.dpsgd.batch_independence import SAME, frozen_rng, has_records, relative_distance
from sordino.dpsgd.rule_table import each_record
from sordino.dpsgd.settings import Reduction
from sordino.dpsgd.state_guard import DeviceChecks
from sordino.errors import DataError, PlanError
from sordino.graph import TRUSTED, Grade, Traced, Tracing, UntraceableError, weakest
from sordino.graph.capture import RECORDS, Function
from sordino.graph.captured import flat, synthetic_batch
from sordino.parts.losses import (
    IGNORED,
    Absolute,
    CrossEntropy,
    Hinge,
    Logistic,
    LossFunction,
    Mse,
    is_record_wise,
    loss_of,
)
from sordino.rng import at_global_rng_state, global_rng_state

PerRecord = Callable[..., Tensor]  # (output, *targets) -> one value per record [b]
NEXT = "cross_entropy of the next token"
_SURE = "use make_private(..., loss=f) with f(output, target) -> one value per record, and optimizer.loss(model(x), y)"
_TERM = "a sum or mean of one term per record, each of that record alone"


def untraceable(what: str, reason: str, needed: str, *fixes: str) -> PlanError:
    trust = 'or set own_code="trusted" in make_private if you guarantee that no record influences another: the '
    found = f"a {what} of which no graph can be captured ({reason})"
    return PlanError("own code", found, needed, "; ".join((*fixes, f"{trust}certificate states it")))


def stale_code(what: str) -> PlanError:
    found = f"a {what} with other outputs for synthetic records than when its graph was captured"
    needed = "unchanged code: the graph ignores later changes, and values that a loop sets may depend on records"
    fix = 'schedule the optimizer, not the model or the loss; or set own_code="trusted" if you trust the code'
    return PlanError("own code", found, needed, fix)


class TracedFunction:
    """User's function of tensors, with its captured graphs; with `own_code` it is trusted if it has no graph."""

    name = "function"
    needed = "a function of tensors that stores no records: stored records would be released without noise"
    fixes: tuple[str, ...] = ()

    def __init__(self, function: Callable[..., Any], own_code: bool) -> None:
        self.function, self.own_code = Function(function), own_code
        self.tracing = Tracing(self.function)
        self.untraced = ""  # reason why the function itself, not a graph, runs on records
        self.used: list[Traced] = []

    @property
    def grade(self) -> tuple[Grade, str]:
        """Return the function's grade (`sordino.graph`), and the reason for it."""
        if self.untraced:
            return TRUSTED, f"the {self.name} itself runs on records ({self.untraced})"
        return weakest([one.grade for one in self.used]), "; ".join(one.reason for one in self.used if one.reason)

    def traced(self, args: tuple[Any, ...], records: Sequence[bool]) -> Traced | None:
        """Return the graph for these arguments; None for a trusted function without a graph."""
        try:
            return self.tracing.of(args, {}, records)
        except UntraceableError as error:
            if not self.own_code:
                raise untraceable(self.name, str(error), self.needed, *self.fixes) from None
            self.untraced, self.tracing.closed = str(error), True
            return None


def _for_each(function: Callable[..., Any], args: tuple[Any, ...], records: Sequence[bool]) -> Any:
    """Return function(*args) for each record separately, as a batch of one."""
    leaves, form = tree_flatten(args)

    def one(*items: Any) -> Any:
        own = [x[None] if holds else x for x, holds in zip(items, records, strict=True)]
        return function(*tree_unflatten(own, form))

    return each_record(one, leaves, [0 if holds else None for holds in records])


class RecordTransform(TracedFunction):
    """Function `transform=` of make_private, applied to the inputs of every batch: x of (x, y), or a whole dict."""

    name = "transform"
    fixes = (
        "write it without Python branches on data, and draw random numbers with torch",
        "or apply it in the data set, to each record separately",
    )

    def __call__(self, batch: Any, size: int) -> Any:
        """Return the batch with transformed inputs and unchanged labels."""
        if isinstance(batch, list | tuple):
            return [self._run(batch[0], size), *batch[1:]]
        return self._run(dict(batch) if isinstance(batch, Mapping) else batch, size)

    @torch.no_grad()
    def _run(self, inputs: Any, size: int) -> Any:
        records = [has_records(x, size) for x in flat((inputs,), {})[0]]
        traced = self.traced((inputs,), records)
        if traced is None:
            return self.function(inputs)
        self.used += [traced] if traced not in self.used else []
        if not size:
            one = tree_map(lambda x: x.new_zeros(1, *x.shape[1:]) if has_records(x, 0) else x, inputs)
            return tree_map(lambda y: y[:0] if has_records(y, 1) else y, traced.graph(self.function, one))
        if traced.reason is None:
            return traced.graph(self.function, inputs)
        return _for_each(lambda own: traced.graph(self.function, own), (inputs,), records)


def given_loss(loss: str | PerRecord, model: nn.Module) -> tuple[PerRecord, bool]:
    """Return the loss, a function or the name of a built-in one, and whether each value depends on one record alone.

    A built-in loss takes a model's output or its `logits`; for a causal language model the labels are the next tokens.
    """
    if not isinstance(loss, str):
        return loss, False
    own = loss_of(loss)
    shift = own.targets == "token" and is_causal(model)

    def each(output: Any, labels: Tensor) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits
        return own(logits[:, :-1], labels[:, 1:]) if shift else own(logits, labels)

    return each, is_record_wise(own)


class RecordLoss(TracedFunction):
    """Function `loss=` of make_private: (output, *targets) -> one value per record."""

    name = "loss"
    needed = "a function of one record's output and target, which stores no records"
    fixes = ("write it without Python branches on data and without state",)

    def __init__(self, loss: PerRecord, known: bool = False, own_code: bool = False) -> None:
        super().__init__(loss, own_code)
        self.loss, self.known = loss, known  # known: a loss of Sordino, which needs no graph
        self.compared = False  # whether a loss without a graph was compared with its value for a whole batch
        self.rng_state = global_rng_state()
        self.slopes: list[tuple[Tensor, Tensor]] = []  # at each output: the loop's gradient, and the loss's gradient

    def __call__(
        self, output: Any, targets: tuple[Any, ...], outputs: list[Tensor], size: int, records: list[bool]
    ) -> Tensor:
        """Return the mean loss of a batch of `size` records; `records` marks the targets with one slice per record."""
        leaves = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
        if not leaves or any(all(x is not y for y in outputs) for x in leaves):
            found = "optimizer.loss of a tensor that is not the output of model(x) for this batch"
            fix = "change the output inside the loss function"
            raise PlanError("loop", found, "the unchanged output of model(x)", fix)
        if not size:
            return torch.stack([x.sum() for x in leaves]).sum() * 0
        mean = self._values((output, *targets), size, records).mean()
        due = torch.autograd.grad(mean, leaves, retain_graph=True, allow_unused=True)
        self.slopes = []
        for leaf, slope in zip(leaves, due, strict=True):
            self._expect(leaf, torch.zeros_like(leaf) if slope is None else slope.detach())
        return mean

    def capture_again(self) -> None:
        """Discard all graphs; the next call captures the changed loss, which counts as trusted code."""
        self.untraced, self.used = "it was changed while it trained", []
        self.tracing.forget()

    def _values(self, args: tuple[Any, ...], size: int, own: list[bool]) -> Tensor:
        if self.known:
            return _checked_shape(self.loss(*args), size)
        records = [*(has_records(x, size) for x in tree_flatten(args[0])[0]), *own]
        traced = self.traced(args, records)
        if traced is None:
            return self._run_trusted(args, size)
        if traced not in self.used:
            self._check(traced, args, records)
            self.used.append(traced)
        found: Tensor = traced.graph(self.function, *args) if traced.reason is None else self._each(traced, args, size)
        return found

    def _each(self, traced: Traced | None, args: tuple[Any, ...], size: int) -> Tensor:
        def one(*single: Any) -> Tensor:
            return _checked_shape(self.loss(*single) if traced is None else traced.graph(self.function, *single), 1)

        found: Tensor = _for_each(one, args, [has_records(x, size) for x in tree_flatten(args)[0]])
        return found

    @torch.no_grad()
    def _check(self, traced: Traced, args: tuple[Any, ...], records: list[bool]) -> None:
        """Refuse a graph without one value per record, or with another value for a record in a batch than alone."""
        inputs, form = flat(args, {})
        (sample, _) = tree_unflatten(synthetic_batch(inputs, records, RECORDS), form)
        with frozen_rng():
            together = _checked_shape(traced.graph(self.function, *sample), RECORDS)
            if traced.reason is not None:
                _refuse_mixing(together, self._each(traced, sample, RECORDS), traced.alone)

    def _run_trusted(self, args: tuple[Any, ...], size: int) -> Tensor:
        """Run a trusted loss without a graph record by record; refuse one that stores or mixes records."""
        detached = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, args)
        first = tree_map(lambda x: x[:1] if has_records(x, size) else x, detached)
        before = self._value_of(first)
        values = self._each(None, args, size)
        if not relative_distance([before], [self._value_of(first)]) <= SAME:
            found = "a loss whose value for a record changes after a batch"
            fix = "remove counters and running averages from the loss, and take random numbers from torch"
            raise PlanError("reduction", found, self.needed, fix)
        if not self.compared and size > 1:
            with torch.no_grad(), frozen_rng():
                alone = self._each(None, args, size).detach()
                _refuse_mixing(_checked_shape(self.loss(*args), size).detach(), alone)
            self.compared = True
        return values

    @torch.no_grad()
    def _value_of(self, record: tuple[Any, ...]) -> Tensor:
        with frozen_rng(), at_global_rng_state(self.rng_state):
            return self.loss(*record).detach().clone()

    def _expect(self, leaf: Tensor, due: Tensor) -> None:
        """Replace the gradient at the model's output by that of this loss, and store both for `verify`."""
        arrived = torch.zeros_like(leaf, requires_grad=False)
        self.slopes.append((arrived, due))

        def add(slope: Tensor) -> Tensor:
            arrived.add_(slope.detach())
            return due

        leaf.register_hook(add)  # type: ignore[no-untyped-call]

    def verify(self, checks: DeviceChecks) -> None:
        """Check, by `checks`, that the gradient at the model's output is that of this loss alone."""
        slopes, self.slopes = self.slopes, []
        found = "a backward pass that is not that of optimizer.loss(output, target) alone"
        fix = "call optimizer.loss(model(x), y).backward(), and put every term into that loss"
        refusal = partial(PlanError, "loop", found, "the loss that make_private was given", fix)
        if not slopes:
            raise refusal()
        for arrived, due in slopes:
            checks.add(torch.isclose(arrived, due, rtol=1e-3, atol=1e-12, equal_nan=True).all(), refusal)


def _checked_shape(values: Any, size: int) -> Tensor:
    if isinstance(values, Tensor) and values.shape == (size,):
        return values
    shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
    fix = 'set reduction="none", then take the sum or mean over the entries of each record'
    raise DataError(f"a loss of shape {shape} for {size} record{'s' * (size > 1)}", "one value per record", fix)


def _refuse_mixing(together: Tensor, alone: Tensor, alike: bool = True) -> None:
    if not alike or not torch.allclose(together, alone, rtol=1e-3, atol=1e-5, equal_nan=True):
        found = "a loss whose value for one record depends on the other records of the batch"
        fix = "divide by a constant or by a count of the record itself, never by a count of the batch"
        raise PlanError("reduction", found, "a function of one record's output and target", fix)


def _classes(out: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(out, y, reduction="none", label_smoothing=smoothing)


def _tokens(out: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    if out.dim() != y.dim() + 1 or y.dim() < 2:
        raise ValueError("no tokens")
    return _classes(out.flatten(0, -2), y.flatten(), smoothing)


def _next_tokens(out: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    return _tokens(out[:, :-1], y[:, 1:], smoothing)


CROSS = CrossEntropy()
KNOWN: dict[str, LossFunction] = {
    **{loss.kind: loss for loss in (CROSS, Mse(), Absolute(), Logistic(), Hinge())},
    "cross_entropy of tokens": _tokens,
    NEXT: _next_tokens,
    "nll": lambda out, y: F.nll_loss(out, y, reduction="none"),
    "huber": lambda out, y: F.huber_loss(out, y.reshape(out.shape), reduction="none"),
}

SMOOTHED = " with label smoothing "
_SMOOTHED: dict[str, Callable[..., Tensor]] = {
    CROSS.kind: _classes,
    "cross_entropy of tokens": _tokens,
    NEXT: _next_tokens,
}


def known_loss(name: str) -> LossFunction:
    """Return a loss of the table `KNOWN` by name, with label smoothing if the name ends with its strength s.

    Label smoothing takes (1 - s) times the loss of the label plus s times the mean loss over classes.
    """
    base, _, smoothing = name.partition(SMOOTHED)
    return partial(_SMOOTHED[base], smoothing=float(smoothing)) if smoothing else KNOWN[base]


def has_ignored_targets(target: Tensor | None) -> bool:
    """Return whether some targets have the ignored label; a mean then divides by the number of other targets."""
    return target is not None and target.dtype == torch.int64 and bool((target == IGNORED).any())


MOST_LOSSES = 3  # largest number of losses recognised in turn, each of which fits all earlier batches


@codec.hides_values
@dataclass
class OutputGradient:
    """Gradient of the loss at a model's output [b, ...] after the backward pass, with output and targets."""

    output: Tensor
    target: Tensor | None = None
    slope: Tensor | None = None  # gradient of the loop's loss
    due: Tensor | None = None  # gradient of the recognised loss, which replaces `slope`
    size: int = 0  # number of records in the batch
    agrees: bool = False  # whether `slope` and `due` are the same up to rounding
    ignored: bool = False  # whether some targets are ignored

    @classmethod
    def of(cls, output: Any, live: Sequence[Tensor], target: Tensor | None, size: int, check: LossCheck) -> list[Any]:
        """Return one object per output tensor; the target belongs to the only tensor, or to `logits`."""
        main, found = getattr(output, "logits", output), []
        for one in live if size else ():
            own = target.to(one.device, non_blocking=True) if target is not None and one is main else None
            seen = cls(one.detach(), own, size=size, ignored=has_ignored_targets(target))
            one.register_hook(partial(seen._replace, check))  # type: ignore[no-untyped-call]
            found.append(seen)
        return found

    def _replace(self, check: LossCheck, slope: Tensor) -> Tensor | None:
        self.slope = slope.detach()
        self.due = check.due(self)
        return self.due

    def finite(self) -> OutputGradient:
        """Return a copy without records that have NaN or infinity in output or gradient and so count as zero."""
        assert self.slope is not None
        assert self.target is not None
        good = (self.output.isfinite() & self.slope.isfinite()).flatten(1).all(1)
        if bool(good.all()):
            return self
        return replace(self, output=self.output[good], target=self.target[good], slope=self.slope[good])

    def first_records(self) -> OutputGradient:
        """Return a copy of the first records, with at most a million entries; empty if one record has more."""
        assert self.slope is not None
        assert self.target is not None
        count = 2**20 // max(1, self.output[0].numel()) if len(self.output) else 0
        output, target, slope = (part[:count].clone() for part in (self.output, self.target, self.slope))
        return replace(self, output=output, target=target, slope=slope, due=None)

    def summed_slope(self, name: str) -> Tensor | None:
        """Return the gradient of the summed loss `name` at the output; None if that loss does not apply to it."""
        output, target = self.output, self.target
        assert target is not None
        plain = output.dim() == 2 and target.shape == output.shape[:1]
        with torch.enable_grad():
            point = output.clone().requires_grad_()
            try:
                if name == CROSS.kind and plain and not self.ignored:
                    return CROSS.slope(output, target)
                return torch.autograd.grad(known_loss(name)(point, target).sum(), point)[0]
            except (RuntimeError, ValueError, IndexError):
                return None

    def recognise(self) -> tuple[str, float] | None:
        """Return the loss in `KNOWN` whose summed gradient is proportional to the observed one, and the factor."""
        names = (*KNOWN, *(f"{base}{SMOOTHED}{found}" for base in _SMOOTHED if (found := self._smoothing(base))))
        return next(((name, factor) for name in names if (factor := self._factor(name))), None)

    def _factor(self, name: str) -> float | None:
        """Return the factor between the observed gradient and that of loss `name`; None if not proportional."""
        assert self.slope is not None
        expected = self.summed_slope(name)
        if expected is None or expected.shape != self.slope.shape or not bool(expected.any()):
            return None
        factor = float((self.slope * expected).sum() / expected.square().sum())
        return factor if factor and _proportional(self.slope, factor * expected) else None

    def _smoothing(self, base: str) -> float | None:
        """Return the label smoothing s, in hundredths, that best fits the observed gradient.

        The least-squares fit is f ((1 - s) plain + s uniform) with free f, where plain is the gradient without
        smoothing, and uniform that of full smoothing.
        """
        pair = [self.summed_slope(f"{base}{SMOOTHED}{share}") for share in (0.0, 1.0)]
        if self.slope is None or any(one is None or one.shape != self.slope.shape for one in pair):
            return None
        plain, uniform = (one.double().flatten() for one in pair if one is not None)
        a, b, c, slope = plain @ plain, plain @ uniform, uniform @ uniform, self.slope.double().flatten()
        plain_share, uniform_share = (
            c * (plain @ slope) - b * (uniform @ slope),
            a * (uniform @ slope) - b * (plain @ slope),
        )
        found = round(float(uniform_share / (plain_share + uniform_share)), 2) if a * c > b * b else 0.0
        return found if 0 < found < 1 else None


class LossCheck:
    """Recognition of the loop's own loss, whose gradient is then replaced by that of a loss in `KNOWN`.

    The factor of a batch of b records is its gradient over that of the summed loss. For a mean, factor * b is the same
    in all batches; for a sum, the factor is.
    """

    DECLARED = "declared"  # state before the first batch

    def __init__(self, declared: Reduction, expected: float) -> None:
        self.declared, self.expected = declared, expected
        self.found = self.DECLARED
        self.first: tuple[int, float] | None = None  # size and factor of the first batch
        self.known: tuple[str, float] | None = None  # the loss, and the constant c
        self.examples: list[OutputGradient] = []  # some records of the batches in which it was recognised

    def due(self, seen: OutputGradient) -> Tensor | None:
        """Return the gradient of the recognised loss; None if no loss in `KNOWN` fits."""
        if seen.target is None or seen.slope is None:
            return None
        seen.agrees = self._agrees(seen)
        if not seen.agrees:
            finite = seen.finite()
            if self.known is None:
                self.known, self.examples = self._recognise(finite), [finite.first_records()]
            elif not self._agrees(finite):
                self._reconsider(finite)
        return self._slope(seen)

    def _reconsider(self, seen: OutputGradient) -> None:
        """Replace the recognised loss by one that fits this batch and all earlier ones, if there is one."""
        before, self.known = self.known, self._recognise(seen)
        alike = self.known is not None and all(len(one.output) and self._agrees(one) for one in self.examples)
        if alike and len(self.examples) < MOST_LOSSES:
            self.examples.append(seen.first_records())
        else:
            self.known = before

    def _recognise(self, seen: OutputGradient) -> tuple[str, float] | None:
        assert seen.slope is not None
        found = seen.recognise() if bool(seen.slope.any()) else None
        if found is None:
            return None
        size, width = seen.size, seen.output[0].numel()
        constant = found[1] * size if self.declared == "mean" else found[1]
        usual = any(_near(constant, wanted) for wanted in (1.0, float(width)))
        return (found[0], float(f"{constant:.4g}")) if usual or size > 1 else None

    def _slope(self, seen: OutputGradient) -> Tensor | None:
        own = None if self.known is None else seen.summed_slope(self.known[0])
        if own is None or self.known is None:
            return None
        return own * (self.known[1] / seen.size if self.declared == "mean" else self.known[1])

    def _agrees(self, seen: OutputGradient) -> bool:
        """Return whether the observed gradient equals that of the recognised loss up to rounding."""
        due, slope = self._slope(seen), seen.slope
        if due is None or slope is None or slope.shape != due.shape:
            return False
        return bool((slope - due).norm() <= 2e-3 * due.norm())

    def check(self, outputs: Sequence[OutputGradient], size: int) -> None:
        """Refuse a loss that is not recognised, or whose reduction over the `size` records is not the declared one."""
        if not size:
            return
        reached = [one for one in outputs if one.slope is not None]
        others = [one.slope for one in reached if one.target is None]
        if len(others) == len(reached) or any(slope is not None and bool(slope.any()) for slope in others):
            raise _unknown("a loss that is not computed from one output tensor and the batch's last tensor")
        for one in reached:
            if one.target is not None:
                self._check(one)

    def _check(self, seen: OutputGradient) -> None:
        ignored = seen.ignored
        if seen.agrees and self.first is not None and not ignored:
            return
        due, seen = seen.due, seen.finite()
        assert seen.slope is not None
        if not len(seen.output) or (due is None and not bool(seen.slope.any())):
            return
        confirmed = self._agrees(seen)
        if seen.size == 1 and (self.known is None or confirmed):
            return  # for one record a mean is a sum
        if ignored or self.first is None or not confirmed:
            found = seen.recognise()
            if found is None:
                raise self._refusal(seen)
            self._check_reduction(*found, seen)
        if self.known is not None:
            if not self._agrees(seen):
                raise _unknown("a loss that differs, or is weighted differently, from earlier batches")
            self.found = f"recognised: {self.known[0]}"

    def _refusal(self, seen: OutputGradient) -> PlanError:
        """Return the error for a loss that is not recognised, with a text of its own for class weights.

        With class weights torch divides the mean by the sum of the batch's weights, so a record's term depends on the
        other records.
        """
        slope, expected = seen.slope, seen.summed_slope("cross_entropy")
        assert slope is not None
        if expected is not None and seen.output.dim() == 2 and expected.shape == slope.shape:
            shares = (slope * expected).sum(1) / expected.square().sum(1)  # w_j; of a mean w_j / sum of w
            if _proportional(slope, shares[:, None] * expected):
                return _unknown("a cross-entropy with class weights, whose mean divides by the weights of all records")
        return _unknown("a loss that is not recognised as a sum or mean of terms of one record each")

    def _check_reduction(self, name: str, factor: float, seen: OutputGradient) -> None:
        assert seen.target is not None
        target, size = seen.target[:, 1:] if name.startswith(NEXT) else seen.target, seen.size
        if has_ignored_targets(target) and _near(factor * float((target != IGNORED).sum()), 1.0):
            found = f"a mean over all targets of the batch that are not {IGNORED}, whose number depends on all records"
            raise PlanError("reduction", found, _TERM, _SURE)
        apparent = self._apparent(factor, size, seen.output[0].numel())
        if apparent is None and self.first is not None and not _near(size / self.first[0], 1.0, 0.01):
            raise _unknown(f"a loss ({name}) divided by a number that is neither constant nor the size of the batch")
        self.first = self.first or (size, factor)
        if apparent is not None and apparent != self.declared:
            self.first = self.known = None
            found = f"a loss ({name}) that is the {apparent} over a batch, and reduction = {self.declared!r}"
            fix = f'use make_private(..., reduction="{apparent}")'
            raise PlanError("reduction", found, "the reduction of the loss in reduction=", fix)

    def _apparent(self, factor: float, size: int, width: int) -> Reduction | None:
        """Return "mean" or "sum" from the loss's factor, which is 1 / b or 1, or from its values at two batch sizes."""
        if self.first is None:  # undecided if the factor may be a constant of the user
            if _near(factor * size, 1.0) and size != self.expected:
                return "mean"
            return "sum" if _near(factor, 1.0) or _near(factor, float(width)) else None
        before, other = self.first
        if _near(size / before, 1.0, 0.01):
            return None
        return "mean" if _near(factor * size, other * before) else "sum" if _near(factor, other) else None


def _near(value: float, wanted: float, tolerance: float = 1e-3) -> bool:
    return abs(value / wanted - 1) < tolerance


def _proportional(slope: Tensor, expected: Tensor) -> bool:
    return bool((slope - expected).norm() < 1e-3 * slope.norm())


def _unknown(found: str) -> PlanError:
    return PlanError("reduction", found, _TERM, _SURE)
