"""Recording of a model's training passes inside an ordinary PyTorch loop. Used by dpsgd/optimizer.py.

The loop runs the graph of the model (dpsgd/model_graphs.py), captured on synthetic records. The user's own forward gets
no training record, unless it has no graph and the user declares it trusted (`CheckedForward`). Only `model.forward` is
replaced, and the forwards of layers only while it runs: copies and pickles of the model have none of this.

In half precision the factor 1 / b of a mean over b records would be rounded to eight bits, differently for every b: one
more record would change the sum of the others by up to b / 512 clip norms. Therefore the model's output is converted to
float32, where its gradient is multiplied by b.
"""

from __future__ import annotations

import math
import types
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from sordino.dpsgd.batch_independence import has_records, refuse_mixing, trained_outputs
from sordino.dpsgd.clipped_sum import CheckedForward, ClipGroup, clipped_sum
from sordino.dpsgd.loader import BatchPiece, InputCheck, PendingBatch
from sordino.dpsgd.model_graphs import GraphPass, ModelGraphs
from sordino.dpsgd.own_code import LossCheck, OutputGradient, stale_code, untraceable
from sordino.dpsgd.pieces import HALF, Piece, Rows, UnrecordableError, first_length, ieee_products, sums_in
from sordino.dpsgd.processes import refuse_active_wrapper
from sordino.dpsgd.settings import Reduction
from sordino.dpsgd.state_guard import GradientChangeWarning, ModelGuard
from sordino.dpsgd.users import Owners
from sordino.errors import DataError, PlanError
from sordino.graph import TRUSTED, Grade, UntraceableError
from sordino.graph.captured import flat
from sordino.version import tune_allocator

EVIDENCE: dict[Grade, str] = {
    "by construction": "by the operations of the model's graph, whatever the records hold",
    "per record (vmap)": "the model's graph is run for each record by itself",
}
MEAN_ROUNDING = 2.0**-22  # clip norms that a record's clipped gradient may change by, from a mean over b to b + 1


def clip_margin(declared: Reduction, expected: float, *, double: bool, rounding: float = 1.0) -> float:
    """Return the fraction of the clip norm C that is reserved for float32 rounding, with `expected` records at once.

    In a mean over b records each has the factor 1 / b, rounded in float32, so one more record changes the contribution
    of every other. Measured: by 1.0e-7 C each, in one direction if records are equal, so that the sum of 100,000
    records changed by 1.010 C. Reserved is the public expected number plus eight standard deviations, times 2^-22. A
    loss that is a sum needs no margin. `rounding` is a factor by which a message changes more than the gradient in it
    (`Adaptive.rounding`).
    """
    if declared == "sum" or double:
        return 0.0
    margin = MEAN_ROUNDING * rounding * (expected + 8.0 * math.sqrt(expected))
    if margin > 0.5:
        found = f"a mean over about {expected:,.0f} records at once, too many for float32 rounding"
        fix = 'set reduction="sum", or max_physical_batch_size=100_000'
        raise PlanError("reduction", found, "at most 2,000,000 records at once", fix)
    return margin


class _WidenedOutputs(torch.autograd.Function):
    """Float32 copies of a model's outputs, whose backward runs the model's backward on gradients times `scale`.

    The two autograd graphs are separate, so a loss that uses the model's outputs directly is a second backward pass,
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
        return torch.zeros((), device=ctx.inner[0].device), None, None


def widen_outputs(output: Any, scale: float) -> Any:
    """Return a model's output in float32; the backward pass multiplies gradients by `scale`."""
    leaves, form = tree_flatten(output)
    inner = [y for y in leaves if _live(y)]
    anchor = torch.zeros((), requires_grad=True, device=inner[0].device)
    supply = iter(_WidenedOutputs.apply(anchor, scale, inner))  # type: ignore[no-untyped-call]
    return tree_unflatten([next(supply) if _live(y) else y for y in leaves], form)


def _live(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad


class RecordedForward:
    """Replacement of the model's `forward` during a private loop; copies and pickles have the user's forward.

    It is not compiled by torch.compile, which cannot capture the per-record passes.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.run = recording, torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.recording.guard.inside += 1
        try:
            return self.recording.run(args, kwargs)
        finally:
            self.recording.guard.inside -= 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model, own = self.recording.model, self.recording.own
        if own is not None:
            return own
        return types.MethodType(type(model).forward, memo.get(id(model), model))

    def __reduce__(self) -> Any:
        return getattr, (self.recording.model, "forward")


class Recording:
    """Recorder of a model's per-record gradients in training passes; evaluation passes run as usual.

    While it is attached, backward passes write no `.grad` of the model's parameters. With `own_code` the user declares
    code without a graph as trusted; `rng` chooses the passes in which such code is checked. `expected` is the public
    expected number of records in a pass.
    """

    def __init__(
        self,
        model: nn.Module,
        pending: PendingBatch,
        rng: np.random.Generator | None = None,
        expected: float = 64.0,
        own_code: bool = False,
    ) -> None:
        refuse_mixing(model)
        tune_allocator()
        self.model, self.pending, self.expected, self.own_code = model, pending, expected, own_code
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.outside: set[str] = set()  # parameters with a gradient that no layer recorded
        self.idle: list[str] = []  # trained parameters that the last batch's loss did not depend on
        self.graphs, self.inputs = ModelGraphs(model), InputCheck(own_code)
        self.graph_pass: GraphPass | None = None  # how the graph of the last training pass is run
        self.untraced = ""  # why the model's own forward ran on the records of a training pass
        self.error: PlanError | None = None  # of the capture before the first batch
        self.modules = list(model.modules())
        self.own, self.plain = vars(model).get("forward"), model.forward
        self.trusted_forward = CheckedForward(
            model, self._plain, lambda copy: lambda inputs: copy(*inputs[0], **inputs[1]), rng, expected
        )
        self.trusted_forward.call = lambda inputs: model(*inputs[0], **inputs[1])
        self.tape = self.trusted_forward.tape
        self.handles: list[RemovableHandle] = []
        self.current: BatchPiece | None = None
        self.backwards = 0
        self.other_records: int | None = None  # length of a training pass that is not over the loader's batch
        self.mean = True  # whether the loss is a mean over the records
        self.mean_undone: bool | None = None  # whether outputs in half precision have undone the mean already
        self.loss_check: LossCheck | None = None  # recognises the loss of the loop if make_private got none
        self.gradients: list[OutputGradient] = []  # at the outputs of the passes over this batch
        self.outputs: list[Tensor] = []  # of the passes over this batch
        self.begun: dict[nn.Parameter, Tensor] = {}  # gradient of a user, some of whose records are still to come
        self.tape.anchor.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
        model.forward = RecordedForward(self)
        self.guard = ModelGuard(model, self.named.values())
        self.warning = GradientChangeWarning(self.named.values())

    def names(self) -> dict[str, list[str]]:
        """Return all names of each trained parameter, by its first one; a parameter that layers share has several."""
        return parameter_names(self.model, set(self.named.values()))

    def restore(self) -> None:
        """Stop recording: the model gets its own forward back."""
        self.forget()
        self.guard.remove()
        del self.model.forward
        if self.own is not None:
            self.model.forward = self.own

    def _plain(self, inputs: Any) -> Any:
        now = vars(self.model).get("forward")
        return (self.plain if isinstance(now, RecordedForward) else now)(*inputs[0], **inputs[1])  # type: ignore[misc]

    def _count(self, anchor: Tensor) -> None:
        anchor.grad = None
        self.backwards += 1
        self.warning.begin()

    def clipped_sum(self, groups: Sequence[ClipGroup], scale: float) -> tuple[dict[str, Tensor], Tensor, int]:
        """Return the batch's clipped gradient sum by parameter name, all norms, and how many norms are not finite."""
        owners = None if self.current is None else self.current.owners
        with ieee_products():
            pieces, units = self.tape.pieces() if self.tape.batch else {}, self.tape.batch
            self.idle = [name for name, p in self.named.items() if p not in pieces and p.requires_grad]
            if owners is not None:
                units = owners.units if owners.last else 0
                if not (owners.first and owners.last):
                    pieces, scale = self._add_part(pieces, owners, scale), 1.0
            total, norms, finite = clipped_sum(pieces, self.named, units, groups, scale)
        self.forget()
        return total, norms, 0 if finite else int((~norms.isfinite().all(0)).sum())

    def _add_part(self, pieces: dict[nn.Parameter, Piece], owners: Owners, scale: float) -> dict[nn.Parameter, Piece]:
        """Add a part of a user's gradient to its earlier parts; return the whole gradient after the last part."""
        held = {} if owners.first else self.begun
        with torch.no_grad():
            for parameter, piece in pieces.items():
                part = piece.rows()[0].double() * scale
                held[parameter] = held[parameter] + part if parameter in held else part
        self.begun = {} if owners.last else held
        return {p: Rows(whole[None].to(sums_in(p))) for p, whole in held.items()} if owners.last else {}

    def forget(self) -> None:
        """Discard all recorded passes."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.backwards, self.other_records, self.current = [], 0, None, None
        self.mean_undone, self.gradients, self.outputs = None, [], []
        self.tape.clear()
        self.outside.clear()

    def zero(self) -> None:
        """Discard recorded backward passes, but not a forward pass without a backward so far."""
        self.tape.drop_finished()
        self.outside.clear()
        self.backwards, self.other_records = 0, None

    def run(self, args: Any, kwargs: Any) -> Any:
        """Return the model's output; record the pass if it trains on the loader's last batch."""
        if self.trusted_forward.probe is not None:
            return self.trusted_forward.probe((args, kwargs))
        piece = self.pending.piece
        if not torch.is_grad_enabled():
            return self._evaluate(args, kwargs)
        refuse_active_wrapper(self.model)
        self._check_device(args, kwargs)
        size = first_length(args, kwargs)
        if piece is None or size != piece.size:
            self.other_records = size
            return self._evaluate(args, kwargs)
        self._refuse_changes(kwargs)
        if piece is not self.current:
            self.forget()
            trained = [(name, p) for name, p in self.named.items() if p.requires_grad]  # some may be frozen since
            self.current, self.handles = piece, [_note_gradient(p, self.outside, name) for name, p in trained]
        self._prepare(args, kwargs, piece)
        self.tape.batch, self.tape.merge = size, None if piece.owners is None else piece.owners.merge
        output = self._widened(self._pass(args, kwargs) if size else self._empty_pass(args, kwargs), size)
        live = trained_outputs(output, size, needed=False)
        self.outputs += live
        if self.loss_check is not None:
            self.gradients += OutputGradient.of(output, live, piece.target, size, self.loss_check)
        return output

    def _evaluate(self, args: Any, kwargs: Any) -> Any:
        """Run an evaluation pass by its graph, or by the user's forward; then no graph is captured any more."""
        try:
            with self._without_notes():
                graph = self.graphs.evaluated(args, kwargs)
        except UntraceableError:
            self.graphs.close()
            return self.plain(*args, **kwargs)
        return graph(self.model, *args, **kwargs)

    @contextmanager
    def _without_notes(self) -> Iterator[None]:
        """Context in which gradients outside layer rules are not noted, for passes over synthetic records."""
        before = set(self.outside)
        try:
            yield
        finally:
            self.outside.clear()
            self.outside.update(before)

    def prepare(self, tables: Sequence[Tensor]) -> None:
        """Capture the graph of the model for records like those in `tables`, before the first batch."""
        self.graphs.prepare(tables)
        try:
            self.guard.check()
        except PlanError as error:  # raised at the first pass, as for arguments that are captured there
            self.error = error
            self.guard.accept()

    def refuse_stale(self) -> None:
        """Refuse a model whose forward was changed after its graph was captured: the old graph would run."""
        if self.untraced or not self.graphs.training.samples:
            return
        with self._without_notes():
            if not self.graphs.is_stale():
                return
        if not self.own_code:
            raise stale_code("forward of the model")
        self.graphs.capture_again()

    def _prepare(self, args: Any, kwargs: Any, piece: BatchPiece) -> None:
        """Select the graph for these arguments, before anything is computed on records."""
        if self.error is not None:
            raise self.error
        records = self.inputs.records(flat(args, kwargs)[0], piece.tensors, piece.size)
        try:
            with self._without_notes():
                self.graph_pass = self.graphs.trained(args, kwargs, records)
        except UntraceableError as error:
            if not self.own_code:
                needed = "code whose operations depend neither on records nor on stored values"
                fix = "write it without Python branches on data and without state outside the module"
                raise untraceable("forward", str(error), needed, fix) from None
            self.graph_pass, self.untraced = None, str(error)
            self.graphs.close()
            if piece.size:
                with self._without_notes():
                    self.trusted_forward.prepare((args, dict(sorted(kwargs.items()))), piece.size, records)

    def _widened(self, output: Any, size: int) -> Any:
        """Return half-precision outputs in float32, so that the factor 1 / b of a mean is not rounded."""
        half = any(y.dtype in HALF for y in tree_flatten(output)[0] if _live(y))
        if self.mean_undone not in (None, half):
            found = "passes over one batch in half and in full precision"
            fix = "put all passes inside autocast, or none"
            raise PlanError("loop", found, "one precision for all passes of a step", fix)
        self.mean_undone = half
        return widen_outputs(output, float(size or 1) if self.mean else 1.0) if half else output

    def _refuse_changes(self, kwargs: dict[str, Any]) -> None:
        """Refuse layers added after make_private, labels among the inputs, and a changed forward."""
        now = list(self.model.modules())
        if len(now) != len(self.modules) or any(a is not b for a, b in zip(now, self.modules, strict=True)):
            found = "a model whose layers were changed after make_private"
            fix = "call make_private again (a new certificate)"
            raise PlanError("loop", found, "the layers that make_private was called with", fix)
        if kwargs.get("labels") is not None:
            found = "labels given to the model, which computes a mean over all records of the batch, or their tokens"
            needed = "a loss that is a sum or mean of one term per record"
            fix = 'use make_private(..., loss="cross_entropy"), or "tokens" for a label per token, and '
            fix += "optimizer.loss(model(**inputs), labels) with inputs that hold no labels"
            raise PlanError("reduction", found, needed, fix)
        if self.guard.state.note_values():
            self.refuse_stale()

    def _check_device(self, args: Any, kwargs: Any) -> None:
        first = next((x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.dim()), None)
        device = next(iter(self.named.values())).device
        if first is not None and first.device != device:
            found = f"a batch on {first.device} and a model on {device}"
            raise DataError(found, "both on one device", f"move the batch: x.to('{device}')")

    def _pass(self, args: Any, kwargs: Any) -> Any:
        if self.graph_pass is not None:
            return self.graph_pass(self.tape, self.model, args, kwargs)
        return self.trusted_forward.run((args, kwargs))

    def _empty_pass(self, args: Any, kwargs: Any) -> Any:
        """Run an empty batch; if the model fails on it, return a synthetic record's output, sliced to length 0."""
        try:
            return self._pass(args, kwargs)
        except (RuntimeError, ValueError, IndexError, UnrecordableError):
            self.tape.clear()
        trusted = self.trusted_forward
        whole, trusted.whole, self.tape.batch = trusted.whole, True, 1
        try:
            one = tree_map(lambda x: x.new_zeros(1, *x.shape[1:]) if has_records(x, 0) else x, (args, kwargs))
            return tree_map(lambda y: y[:0] if has_records(y, 1) else y, self._pass(*one))
        finally:
            trusted.whole, self.tape.batch = whole, 0  # gradients of the synthetic record are never summed

    def evidence(self) -> tuple[str, int]:
        """Return how the independence of records was ensured, as text, and the number of independence tests."""
        if not self.untraced:
            return EVIDENCE[self.graphs.grade], 0
        trusted = self.trusted_forward
        if trusted.error is None and not trusted.whole and isinstance(vars(self.model).get("forward"), RecordedForward):
            with self._without_notes():
                trusted.check_last()
        if trusted.error is not None:
            raise trusted.error
        how = "run one by one" if trusted.whole else "checked in passes chosen at random"
        return how, trusted.checks.count

    def grade(self) -> tuple[Grade, str]:
        """Return the weaker of the checks of model and inputs, as a grade of `sordino.graph`, and the reason."""
        if self.untraced:
            return TRUSTED, f"the model's own forward runs on records ({self.untraced})"
        if self.graphs.changed:
            return TRUSTED, self.graphs.changed
        if self.inputs.changed:
            return TRUSTED, f"the loop changes batches itself ({self.inputs.changed})"
        return self.graphs.grade, "; ".join(self.graphs.reasons)


def parameter_names(model: nn.Module, trained: Collection[Tensor]) -> dict[str, list[str]]:
    """Return all names of each of these parameters, by its first one."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in trained:
            found.setdefault(parameter, []).append(name)
    return {names[0]: names for names in found.values()}


def _note_gradient(parameter: nn.Parameter, outside: set[str], name: str) -> RemovableHandle:
    """Register a hook that adds `name` to `outside` if autograd computes a gradient of the parameter itself."""

    def note(slope: Tensor) -> None:
        outside.add(name)

    handle: RemovableHandle = parameter.register_hook(note)  # type: ignore[no-untyped-call]
    return handle
