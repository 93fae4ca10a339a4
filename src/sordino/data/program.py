"""Model and loss of a task in executable form: graphs captured on synthetic records. Called by `task`.

    code                                      runs as      independence of records
    layers of torch.nn, losses of Sordino     itself       by construction: there is no code of the user
    a module or a loss of the user            its graph    by construction, or by running per record (vmap)
    code that cannot be captured as a graph   itself       trusted: only with `own_code = "trusted"`

If the privacy unit is a client, a graph is enough: the client's message is a function of the client's own data. If it
is a record, no record may influence another's loss: this is proved from the operations (`sordino.graph.flow`), or the
graph runs once for each record. Other functions check that model, loss and records fit together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _NormBase

from sordino import codec
from sordino.certificate.facts import OwnCode
from sordino.errors import DataError, PlanError
from sordino.graph import BY_CONSTRUCTION, PER_RECORD, TRUSTED
from sordino.graph.capture import UNFIT, Function, Traced, Tracing, chained, differs
from sordino.graph.captured import UntraceableError, flat, synthetic_batch, torch_written
from sordino.graph.flow import Reason
from sordino.layout import copied
from sordino.parts.losses import FunctionLoss, Loss, Targets, is_record_wise
from sordino.rng import forked_rng

Trust = Literal["trusted"]
Unit = Literal["client", "record"]
# of torch.nn.modules.module
_GLOBAL_HOOKS = tuple(f"_global_{name}_hooks" for name in ("forward", "forward_pre", "backward", "backward_pre"))
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError)
PLAIN = "layers of torch.nn and a loss of Sordino: no code of the user's own"
OURS = ("torch.nn.modules.", "sordino.models.nets")  # modules whose forward is no code of the user's
SIZES = (1, 11)  # batch sizes for which a captured graph is compared with the module
_NEEDED = "code that is a graph of torch operations: no Python state, no branch on data"
_FIX = 'rewrite it so, or vouch for it: own_code = "trusted" in [task], or Task.of(..., own_code="trusted")'


class GraphForward:
    """Forward method of a module that runs the module's captured graph; a deep copy runs it with the copy's weights."""

    def __init__(self, module: nn.Module, program: Program) -> None:
        self.module, self.program = module, program

    def __call__(self, x: Tensor) -> Any:
        return self.program.graph(self.module.training).graph(self.module, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphForward:
        return GraphForward(copy.deepcopy(self.module, memo), self.program)


@codec.hides_values
@dataclass(frozen=True)
class GraphLoss(Loss):
    """User's loss as captured graphs of its value, its slope and its envelope.

    Slope and envelope are None unless their graphs treat each record independently.
    """

    own: Loss
    values: Traced
    slopes: Traced | None = None
    envelopes: Traced | None = None

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = self.values.graph(self.values.graph.module, outputs, targets)
        return found

    def slope(self, scores: Tensor, targets: Tensor) -> Tensor:
        return _by_record(self.slopes, scores, targets)

    def envelope(self, scores: Tensor, targets: Tensor, pace: Tensor) -> Tensor:
        return _by_record(self.envelopes, scores, targets, pace.expand(*scores.shape[:-1], 1))

    @property
    def targets(self) -> Targets:  # type: ignore[override]
        return self.own.targets

    @property
    def has_slope(self) -> bool:
        return self.slopes is not None

    @property
    def has_envelope(self) -> bool:
        return self.envelopes is not None


def _by_record(traced: Traced | None, scores: Tensor, *others: Tensor) -> Tensor:
    """Run a graph, which takes one batch dimension, on tensors with several leading dimensions."""
    assert traced is not None
    lead = scores.shape[:-1]
    flattened = [part.reshape(lead.numel(), *part.shape[len(lead) :]) for part in (scores, *others)]
    found: Tensor = traced.graph(traced.graph.module, *flattened)
    return found.view_as(scores)


class Program:
    """Model and loss of a task as they are executed; only shape and type of `x` and `y` are used, never values."""

    def __init__(self, model: nn.Module, loss: Loss, x: Tensor, y: Tensor, trust: Trust | None = None) -> None:
        self.model, self.loss, self.trust = model, loss, trust
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.x, self.y = (side.new_empty(0, *side.shape[1:], device=device) for side in (x, y))
        self.known: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"Program({type(self.model).__name__}, {type(self.loss).__name__})"

    @property
    def trusted(self) -> bool:
        """Whether Python code of the user runs on the records instead of a graph, since the user vouches for it."""
        return self.trust is not None and not (self.plain and self.plain_loss)

    @property
    def plain(self) -> bool:
        """Whether the model has only layers of torch and nets of Sordino, and no global hook of torch is set."""
        hooked = any(getattr(torch_module, name) for name in _GLOBAL_HOOKS)
        return not hooked and all(torch_written(part, OURS) for part in self.model.modules())

    @property
    def plain_loss(self) -> bool:
        """Whether the loss is one of Sordino's or a layer of torch."""
        given = self.loss.function if isinstance(self.loss, FunctionLoss) else None
        return is_record_wise(self.loss) or (isinstance(given, nn.Module) and torch_written(given))

    def training_model(self) -> nn.Module:
        """Return a copy of the model whose forward runs its graph; names of layers and tensors are unchanged."""
        made = _copy(self.model)
        if self.trusted or self.plain:
            return made
        self.graph(True)
        for hooks in (made._forward_hooks, made._forward_pre_hooks, made._backward_hooks, made._backward_pre_hooks):
            hooks.clear()  # they are in the graph
        made.forward = GraphForward(made, self)
        return made

    def evaluation_model(self) -> nn.Module:
        """Return a copy in eval mode, for public records; if that mode has no graph, the module itself runs."""
        try:
            self.graph(False)
            return self.training_model().eval()
        except (PlanError, UntraceableError):
            return _copy(self.model).eval()

    @property
    def losses(self) -> Loss:
        """Loss that is executed: for a loss of the user its graphs, else the loss itself."""
        if self.trusted or self.plain_loss:
            return self.loss
        return self._once("losses", self._graph_loss)  # type: ignore[no-any-return]

    def graph(self, training: bool = True) -> Traced:
        """Return the model's captured graph in training mode, or in eval mode if `training` is False."""
        return self._once(("model", training), lambda: self._captured(training))  # type: ignore[no-any-return]

    @property
    def chain(self) -> list[nn.Module]:
        """Layers of a sequential model, in order; empty for any other model."""
        if self.trusted:
            return []
        if not self.plain:
            return self._once("chain", lambda: chained(self.graph().graph, self.model))  # type: ignore[no-any-return]
        found = [self.model]
        while any(type(layer) is nn.Sequential for layer in found):
            nested = [layer if type(layer) is nn.Sequential else [layer] for layer in found]
            found = [layer for layers in nested for layer in layers]
        return found

    def of(self, unit: Unit) -> OwnCode:
        """Return the certificate's entry on the user's code for this privacy unit; refuse code that fails `check`."""
        if self.trusted:
            return OwnCode(TRUSTED, "Python code of the user's own ran on the records, and the user vouches for it")
        self.check(unit)
        own = [*([] if self.plain else ["the model"]), *([] if self.plain_loss else ["the loss"])]
        how, frozen = PLAIN, 0 if self.plain else len(self.graph().graph.constants)
        if own:
            how = f"{' and '.join(own)} captured as a graph on made-up records: no Python state, no branch on data"
            how += f"; {frozen} constant tensors stand in it as they were before training" if frozen else ""
        if unit == "client":
            return OwnCode(BY_CONSTRUCTION, how)
        if self.records_independent:
            return OwnCode(BY_CONSTRUCTION, f"{how}; every operation keeps the records of a batch apart")
        return OwnCode(PER_RECORD, f"{how}; run for each record by itself, for it has {self.reason}")

    def check(self, unit: Unit) -> None:
        """Refuse code without a graph; if the privacy unit is a record, also a model or loss that mixes records."""
        if self.trusted:
            return
        found = self.known.get(("model", True))
        if not self.plain and isinstance(found, Traced):
            leaves, form = flat(synthetic_batch([self.x], [True], 5), {})
            if differs(found.graph, _copy(self.model).train(), leaves, form) is not None:
                self.known.clear()  # the model was changed after the capture
        _ = None if self.plain else self.graph(), self.losses
        if unit == "record" and self.reason is not None and (self.reason.certain or not self._runs_under_vmap()):
            what = "a model or a loss whose output for one record depends on the other records of the batch"
            needed = "layers and losses that compute each record independently of the others"
            raise PlanError("mixing", f"{what} ({self.reason})", needed, "remove operations across the batch")

    @property
    def records_independent(self) -> bool:
        """Whether it is proved that model and loss treat each record independently."""
        return not self.trusted and self.reason is None

    @property
    def reason(self) -> Reason | None:
        """Reason why one record may influence another's loss; None if it is proved that none does."""
        return self._once("reason", self._reason)  # type: ignore[no-any-return]

    def _reason(self) -> Reason | None:
        try:
            model = self.graph().reason
        except UntraceableError as error:  # of torch's own layers no graph is needed to run them
            model = Reason(str(error))
        if model is not None or is_record_wise(self.loss):
            return model
        return self._loss_traced(self.loss.value, *self._scores()).reason

    def _runs_under_vmap(self) -> bool:
        x, y = self.sample(5)
        model, losses = self.training_model().train(), self.losses

        def one(x: Tensor, y: Tensor) -> Tensor:
            return losses(model(x[None]), y[None])[0]

        try:
            with torch.no_grad(), forked_rng():
                alone = torch.func.vmap(one, randomness="different")(x, y)
                traced = [self.graph()] + ([] if self.plain_loss else [self.losses.values])  # type: ignore[attr-defined]
                return alone.shape == (len(y),) and all(part.alone for part in traced)
        except (*FAILURES, UntraceableError):
            return False

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` synthetic records and targets."""
        return tuple(synthetic_batch([self.x, self.y], [True, True], count))

    def _captured(self, training: bool) -> Traced:
        if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
            raise capture_error("a model", "a hook that runs in every module")
        return self._sized(Tracing(_copy(self.model).train(training)), "a model", self.x)

    def _sized(self, tracing: Tracing, what: str, *inputs: Tensor) -> Traced:
        """Capture a graph, and compare it with the module on other batch sizes."""
        own = [True] * len(inputs)
        try:
            traced = tracing.of(inputs, {}, own)
            for count in SIZES:
                leaves, form = flat(synthetic_batch(inputs, own, count), {})
                wrong = differs(traced.graph, tracing.module, leaves, form)
                if wrong is not None and not wrong.startswith(UNFIT):  # some layers take no batch of one record
                    raise UntraceableError(f"for {count} records {wrong}")
        except UntraceableError as error:
            if what == "a model" and self.plain:
                raise
            raise capture_error(what, str(error)) from None
        return traced

    def _graph_loss(self) -> Loss:
        scores, y = self._scores()
        values = self._loss_traced(self.loss.value, scores, y)
        slopes = self._loss_traced(self.loss.slope, scores, y) if self.loss.has_slope else None
        pace = scores.new_empty(0, 1)
        envelopes = self._loss_traced(self.loss.envelope, scores, y, pace) if self.loss.has_envelope else None
        slopes, envelopes = (one if one is None or one.reason is None else None for one in (slopes, envelopes))
        return GraphLoss(self.loss, values, slopes, envelopes)

    def _loss_traced(self, function: Callable[..., Tensor], *inputs: Tensor) -> Traced:
        loss = getattr(function, "__self__", None)
        own = loss.function if isinstance(loss, FunctionLoss) else function
        module = own if isinstance(own, nn.Module) else Function(own)
        found = self._sized(Tracing(module), "a loss", *inputs)
        if found.graph.writes and any(node.op == "get_attr" for node in found.graph.graph.nodes):
            raise capture_error("a loss", "it may write into one of its tensors")
        return found

    def _scores(self) -> tuple[Tensor, Tensor]:
        model = self.training_model().eval()
        with torch.no_grad(), forked_rng():
            outputs = model(self.sample(2)[0])
        return outputs[:0], self.y

    def _once(self, name: Any, make: Callable[[], Any]) -> Any:
        """Return the cached result of the first call, or raise its error: user code may differ on a second call."""
        if name not in self.known:
            try:
                self.known[name] = make()
            except (PlanError, UntraceableError) as error:
                self.known[name] = error
        found = self.known[name]
        if isinstance(found, Exception):
            raise found
        return found


def capture_error(what: str, why: str) -> PlanError:
    """Return the error for code that cannot be captured as a graph; `what` is the code, `why` the reason."""
    return PlanError("own code", f"{what} of which no graph can be captured ({why})", _NEEDED, _FIX)


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy that shares the frozen parameters, which may be large."""
    return copied(model, [p for p in model.parameters() if not p.requires_grad])


def refuse_layers(model: nn.Module, statistics: bool = True) -> None:
    """Refuse compiled modules, which cannot run record by record, and layers with running statistics.

    A running variance that is averaged over clients and noised can fall below zero and give NaN. `statistics` = False
    allows running statistics.
    """
    for name, part in model.named_modules():
        if type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None:
            where = f"layer '{name}'" if name else "a model"
            fix = "pass the module before torch.compile (compiled._orig_mod), and compile the result afterwards"
            needed = "a module that is not compiled"
            raise PlanError("per-record", f"{where} that torch.compile has compiled", needed, fix)
        if statistics and isinstance(part, _NormBase) and part.track_running_stats:
            width, kind = part.num_features, type(part).__name__
            groups = next((g for g in (32, 16, 8, 4, 2) if width and width % g == 0), 1)
            found = f"layer '{name}', {kind}({width}), whose running variance noise would drive below zero"
            fix = f"replace it by nn.GroupNorm({groups}, {width})"
            raise PlanError("mixing", found, "layers without running statistics", fix)


def trial_outputs(model: nn.Module, x: Tensor) -> Any:
    """Return the outputs of a copy of the model for a few records, in eval mode."""
    trial = copied(model).eval()
    with torch.no_grad(), forked_rng():
        try:
            return trial(x)
        except FAILURES as error:
            found = f"a model that fails on records of shape {list(x.shape[1:])} ({_first_line(error)})"
            needed = "a model and a loss that fit the data"
            raise DataError(found, needed, "give the first layer the shape of a record") from None


def check_loss(loss: Loss, outputs: Any, y: Tensor, name: str = "a loss") -> None:
    """Refuse a loss that does not return one value per record, or whose method `slope` is not its derivative.

    With a wrong slope, clipping would bound another gradient than the one that is sent. The slope of the Moreau
    envelope is checked at a huge smoothness beta, where it equals the slope of the loss.
    """
    try:
        values = loss.value(outputs, y)
    except FAILURES as error:
        shapes = f"outputs {list(getattr(outputs, 'shape', []))} and targets {list(y.shape)}"
        found = f"{name} that fails on {shapes} ({_first_line(error)})"
        raise DataError(found, "one value per record", "choose a loss that fits outputs and targets") from None
    if not isinstance(values, Tensor) or values.shape != (len(y),):
        found = f"a loss of shape {list(getattr(values, 'shape', []))} for {len(y)} records"
        raise DataError(found, "one value per record", 'pass reduction="none" to the loss, as to nn.CrossEntropyLoss')
    if not loss.has_slope or is_record_wise(loss):
        return
    point = (outputs + torch.linspace(0.1, 0.2, outputs.numel()).view_as(outputs)).requires_grad_()  # past a kink
    wanted = torch.autograd.grad(loss.value(point, y).sum(), point)[0]
    scores, steep = point.detach()[None], torch.full((1, len(y), 1), 1e9)
    slopes = {"slope": loss.slope(scores, y[None])[0]}
    if loss.has_envelope:
        slopes["envelope"] = loss.envelope(scores, y[None], steep)[0]
    for what, slope in slopes.items():
        if slope.shape != wanted.shape or not torch.allclose(slope, wanted, rtol=1e-3, atol=1e-6):
            found = f"{name} whose method {what} does not agree with its values"
            raise DataError(found, "the derivative of value with respect to the scores", f"correct the method {what}")


def check_labels(y: Tensor, classes: int, where: str) -> None:
    """Refuse labels outside 0 .. classes - 1; torch would silently ignore a label of -100."""
    if y.is_floating_point() or not y.numel():
        return
    wrong = (y < 0) | (y >= classes)
    if bool(wrong.any()):
        record = int(wrong.flatten(1).any(1).nonzero()[0]) if y.dim() > 1 else int(wrong.nonzero()[0])
        label = int(y[wrong][0])
        fix = "drop such records, or give the model one output per class"
        raise DataError(f"label {label} in record {record} of {where}", f"labels from 0 to {classes - 1}", fix)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
