"""Recording of a model's training passes inside an ordinary PyTorch loop; used by `PrivateOptimizer`.

What runs is the graph of the model (`model_graphs`), captured on synthetic records: the user's own forward sees no
record that is trained on, unless it has no graph and its owner vouches for it (`trusted_forward`). Only `model.forward`
is replaced, and the layers only while it runs: copies and pickles of the model are ordinary.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.hooks import RemovableHandle

from sordino.dpsgd.batch_checks import InputCheck
from sordino.dpsgd.batch_independence import has_records
from sordino.dpsgd.clipped_sum import Recorder, note_gradient
from sordino.dpsgd.graph_pass import GraphPass
from sordino.dpsgd.loader import BatchPiece, PendingBatch
from sordino.dpsgd.model_graphs import ModelGraphs, refuse_labels, trained_outputs
from sordino.dpsgd.own_code import stale_code, untraceable
from sordino.dpsgd.reduction import LossCheck, OutputGradient, is_half_precision, widen_outputs
from sordino.dpsgd.state_guard import GradientChangeWarning, ModelGuard
from sordino.dpsgd.tape import UnrecordableError, first_length
from sordino.dpsgd.trusted_forward import TrustedForward
from sordino.errors import DataError, PlanError
from sordino.graph import TRUSTED, Grade, UntraceableError
from sordino.graph.captured import flat

EVIDENCE: dict[Grade, str] = {
    "by construction": "by the operations of the model's graph, whatever the records hold",
    "per record (vmap)": "the model's graph is run for each record by itself",
}


class RecordedForward:
    """The model's `forward` in a private loop; in a copy of the model, and in its pickle, the model's own again."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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


class Recording(Recorder):
    """Recorder whose model stays usable: evaluation, copies and passes over other data run as they always did.

    `own_code` says that its owner vouches for code without a graph; `rng` chooses the passes in which such code is
    checked, and `expected` is the public size of what is computed at once.
    """

    def __init__(
        self,
        model: nn.Module,
        pending: PendingBatch,
        rng: np.random.Generator | None = None,
        expected: float = 64.0,
        own_code: bool = False,
    ) -> None:
        super().__init__(model)
        self.pending, self.expected, self.own_code = pending, expected, own_code
        self.graphs, self.inputs = ModelGraphs(model), InputCheck(own_code)
        self.graph_pass: GraphPass | None = None  # how the graph of the last training pass is run
        self.leaves: list[Any] = []  # the flat arguments of the last training pass
        self.untraced = ""  # why the model's own forward ran on the records of a training pass
        self.error: PlanError | None = None  # of the capture before the first batch
        self.modules = list(model.modules())
        self.own = vars(model).get("forward")
        self.plain: Callable[..., Any] = model.forward
        self.trusted_forward = TrustedForward(self, self.plain, rng, expected)
        self.handles: list[RemovableHandle] = []
        self.current: BatchPiece | None = None
        self.backwards = 0
        self.other_records: int | None = None  # of a training pass over something else than the loader's batch
        self.mean = True  # whether the loss is a mean over the records
        self.mean_undone: bool | None = None  # before the loss already, where the output is in half precision
        self.loss_check: LossCheck | None = None  # recognises the loss of the loop, where make_private was given none
        self.gradients: list[OutputGradient] = []  # at the outputs of the passes over this batch
        self.outputs: list[Tensor] = []  # of the passes over this batch
        self.tape.anchor.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
        model.forward = RecordedForward(self)
        self.guard = ModelGuard(model, self.named.values())
        self.warning = GradientChangeWarning(self.named.values())

    def restore(self) -> None:
        """Leave the model as it was."""
        self.forget()
        self.guard.remove()
        del self.model.forward
        if self.own is not None:
            self.model.forward = self.own

    def _count(self, anchor: Tensor) -> None:
        anchor.grad = None
        self.backwards += 1
        self.warning.begin()

    def stepped(self) -> None:
        """Forget the batch, which is summed."""
        self.trusted_forward.stepped()
        self.forget()

    def forget(self) -> None:
        """Forget all that was recorded."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.backwards, self.other_records, self.current = [], 0, None, None
        self.mean_undone, self.gradients, self.outputs = None, [], []
        self.clear()

    def zero(self) -> None:
        """Forget what backward passes left; a forward pass whose backward is still to come stays."""
        self.tape.calls = [call for call in self.tape.calls if call.slope is None]
        self.outside.clear()
        self.backwards, self.other_records = 0, None

    def run(self, args: Any, kwargs: Any) -> Any:
        """The model's output; recorded if it is a training pass over what the loader gave out."""
        if self.trusted_forward.probe is not None:
            return self.trusted_forward.probe(args, kwargs)
        piece = self.pending.piece
        if not torch.is_grad_enabled():
            return self._evaluate(args, kwargs)
        self._check_device(args, kwargs)
        size = first_length(args, kwargs)
        if piece is None or size != piece.size:
            self.other_records = size
            return self._evaluate(args, kwargs)
        self._refuse_new_modules()
        refuse_labels(kwargs)
        if self.guard.state.note_values():
            self.refuse_stale()
        if piece is not self.current:
            self.forget()
            trained = [(name, p) for name, p in self.named.items() if p.requires_grad]  # some may be frozen since
            self.current, self.handles = piece, [note_gradient(p, self.outside, name) for name, p in trained]
        self._prepare(args, kwargs, piece)
        self.tape.begin(size)
        output = self._widened(self._pass(args, kwargs) if size else self._empty_pass(args, kwargs), size)
        live = trained_outputs(output, size, needed=False)
        self.outputs += live
        if self.loss_check is not None:
            self.gradients += OutputGradient.of(output, live, piece, self.loss_check)
        return output

    def _evaluate(self, args: Any, kwargs: Any) -> Any:
        """A pass that trains nothing: by its graph too, or by the model's own forward, after which none is captured."""
        try:
            with self._not_noted():
                graph = self.graphs.evaluated(args, kwargs)
        except UntraceableError:
            self.graphs.close()
            return self.plain(*args, **kwargs)
        return graph(self.model, *args, **kwargs)

    @contextmanager
    def _not_noted(self) -> Iterator[None]:
        """Gradients of synthetic records are no use of a parameter."""
        kept = set(self.outside)
        try:
            yield
        finally:
            self.outside.clear()
            self.outside.update(kept)

    def prepare(self, tables: Sequence[Tensor]) -> None:
        """Capture model(x) for records of this shape, before a loop gets its first batch."""
        self.graphs.prepare(tables)
        try:
            self.guard.check()
        except PlanError as error:  # forward writes: said at the first pass, as of every other kind of arguments
            self.error = error
            self.guard.accept()

    def refuse_stale(self) -> None:
        """Refuse a forward that its owner changed since its graph was captured: the graph would go on as it was."""
        if self.untraced or not self.graphs.training.samples:
            return
        with self._not_noted():
            if not self.graphs.is_stale():
                return
        if not self.own_code:
            raise stale_code("forward of the model")
        self.graphs.capture_again()

    def _prepare(self, args: Any, kwargs: Any, piece: BatchPiece) -> None:
        """Find how this pass is run, before it sees its records."""
        if self.error is not None:
            raise self.error
        self.leaves, form = flat(args, kwargs)
        records = self.inputs.records(self.leaves, piece.tensors, piece.size)
        try:
            with self._not_noted():
                self.graph_pass = self.graphs.trained(args, kwargs, records, self.leaves, form)
        except UntraceableError as error:
            if not self.own_code:
                needed = "code whose steps do not depend on records, or on anything that it remembers"
                way = "write it without Python branches on data and without state outside the module"
                raise untraceable("forward", str(error), needed, way) from None
            self.graph_pass, self.untraced = None, str(error)
            self.graphs.close()
            if piece.size:
                self.trusted_forward.prepare(args, kwargs, piece.size)

    def _widened(self, output: Any, size: int) -> Any:
        """Half precision is widened for the loss, and the mean undone before it is rounded again."""
        half = is_half_precision(output)
        if self.mean_undone not in (None, half):
            found = "passes over one batch in half and in full precision"
            raise PlanError("loop", found, "one of them", "keep all passes of a step inside autocast, or none")
        self.mean_undone = half
        return widen_outputs(output, float(size or 1) if self.mean else 1.0) if half else output

    def _refuse_new_modules(self) -> None:
        """A layer that came later was not captured: it may mix records."""
        now = list(self.model.modules())
        if len(now) != len(self.modules) or any(a is not b for a, b in zip(now, self.modules, strict=True)):
            found = "a model whose layers were changed after make_private"
            raise PlanError("loop", found, "the layers it began with", "call make_private again, for a new certificate")

    def _check_device(self, args: Any, kwargs: Any) -> None:
        first = next((x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.dim()), None)
        device = next(iter(self.named.values())).device
        if first is not None and first.device != device:
            found = f"a batch on {first.device} and a model on {device}"
            raise DataError(found, "both on one device", f"move the batch: x.to('{device}')")

    def _pass(self, args: Any, kwargs: Any) -> Any:
        """One forward pass: the graph, or the model's own forward."""
        if self.graph_pass is not None:
            return self.graph_pass(self.tape, self.model, args, kwargs, self.leaves or None)
        return self.trusted_forward.run(args, kwargs)

    def _empty_pass(self, args: Any, kwargs: Any) -> Any:
        """An empty batch; where the model fails on it, its output for a synthetic record without that record."""
        self.leaves = []
        try:
            return self._pass(args, kwargs)
        except (RuntimeError, ValueError, IndexError, UnrecordableError):
            self.tape.clear()
        trusted = self.trusted_forward
        kept, trusted.sites = trusted.sites, trusted.whole
        self.tape.begin(1)
        try:
            made = tree_map(lambda x: x.new_zeros(1, *x.shape[1:]) if has_records(x, 0) else x, (args, kwargs))
            return tree_map(lambda y: y[:0] if has_records(y, 1) else y, self._pass(*made))
        finally:
            trusted.sites = kept
            self.tape.begin(0)  # what is recorded is nobody's, and summed up nowhere

    def evidence(self) -> tuple[str, int]:
        """How the records were kept apart, up to the last pass, and the number of checks of trusted code."""
        if not self.untraced:
            return EVIDENCE[self.graphs.grade], 0
        return self.trusted_forward.evidence(isinstance(vars(self.model).get("forward"), RecordedForward))

    def grade(self) -> tuple[Grade, str]:
        """What is proved of the model and of what reached it, and why it is no more."""
        if self.untraced:
            return TRUSTED, f"the model's own forward runs on records ({self.untraced})"
        if self.graphs.changed:
            return TRUSTED, self.graphs.changed
        if self.inputs.changed:
            return TRUSTED, f"the loop changes batches itself ({self.inputs.changed})"
        return self.graphs.grade, "; ".join(self.graphs.reasons)
