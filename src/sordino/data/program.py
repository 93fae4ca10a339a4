"""Model and loss in the form that runs: graphs captured on made-up records before any record is seen. Called by `task`.

    code                                      runs as      grade
    layers of torch.nn, losses of Sordino     it is        by construction: none of it is the user's own
    a module or a loss of the user's own      its graph    by construction, or per record (vmap)
    what no graph can be captured of          it is        own code, trusted: only with `own_code = "trusted"`

With one client as the unit, a graph is enough: the client's message is a function of the client's own data. With one
record as the unit, no record may influence another's loss: read off the operations (`sordino.graph.flow`), or the graph
runs for each record by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from sordino import codec
from sordino.certificate.facts import OwnCode
from sordino.errors import PlanError
from sordino.graph import BY_CONSTRUCTION, PER_RECORD, TRUSTED
from sordino.graph.capture import UNFIT, Function, Traced, Tracing, chained, differs
from sordino.graph.captured import UntraceableError, flat, synthetic_batch, torch_written
from sordino.graph.flow import Reason
from sordino.layout import copied
from sordino.parts.losses import Given, Loss, Targets, keeps_apart

Trust = Literal["trusted"]
Unit = Literal["client", "record"]
_FAILS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError)
PLAIN = "layers of torch.nn and a loss of Sordino: no code of the user's own"
OURS = ("torch.nn.modules.", "sordino.models.nets")  # whose forward is no code of the user's; tests hold their graphs
SIZES = (1, 11)  # records of further made-up batches: a graph answers for every number of them as the module does
_NEEDED = "code that is a graph of torch operations: no Python state, no branch on data"
_FIX = 'write it so, or vouch for it with own_code = "trusted" ([task] of the file, Task.of(..., own_code="trusted"))'


class GraphForward:
    """Forward of a module that runs the captured graph; a deep copy of the module gets its own."""

    def __init__(self, module: nn.Module, program: Program) -> None:
        self.module, self.program = module, program

    def __call__(self, x: Tensor) -> Any:
        return self.program.graph(self.module.training).graph(self.module, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphForward:
        return GraphForward(copy.deepcopy(self.module, memo), self.program)


@codec.hides_values
@dataclass(frozen=True)
class GraphLoss(Loss):
    """The user's loss as captured graphs; slope and envelope only where they work record by record."""

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
    """Run a graph on tensors whose records lie along several leading dimensions."""
    assert traced is not None
    lead = scores.shape[:-1]
    flattened = [part.reshape(lead.numel(), *part.shape[len(lead) :]) for part in (scores, *others)]
    found: Tensor = traced.graph(traced.graph.module, *flattened)
    return found.view_as(scores)


class Program:
    """Model and loss of a task in the form that runs; of `x` and `y` only shape and type are read."""

    def __init__(self, model: nn.Module, loss: Loss, x: Tensor, y: Tensor, word: Trust | None = None) -> None:
        self.model, self.loss, self.word = model, loss, word
        self.x, self.y = (side.new_empty(0, *side.shape[1:], device=_device(model)) for side in (x, y))
        self.known: dict[Any, Any] = {}

    def fits(self, model: nn.Module, loss: Loss, x: Tensor, y: Tensor, word: Trust | None) -> bool:
        """Whether this program was made for the same model, loss, shapes and trust."""
        shapes = (self.x.shape[1:], self.y.shape[1:], self.x.dtype, self.y.dtype)
        same = shapes == (x.shape[1:], y.shape[1:], x.dtype, y.dtype) and self.x.device == _device(model)
        return same and self.model is model and self.loss == loss and self.word == word

    def __repr__(self) -> str:
        return f"Program({type(self.model).__name__}, {type(self.loss).__name__})"

    # ---- execution ------------------------------------------------------------------------------------------------

    @property
    def trusted(self) -> bool:
        """Whether the user's Python code runs on the records as it is, because the user vouches for it."""
        return self.word is not None and not (self.plain and self.plain_loss)

    @property
    def plain(self) -> bool:
        """Whether the model consists of layers of torch and nets of Sordino alone."""
        return not _everywhere_hooked() and all(torch_written(part, OURS) for part in self.model.modules())

    @property
    def plain_loss(self) -> bool:
        """Whether the loss is one of Sordino's or a layer of torch."""
        given = self.loss.function if isinstance(self.loss, Given) else None
        return keeps_apart(self.loss) or (isinstance(given, nn.Module) and torch_written(given))

    def running(self) -> nn.Module:
        """A copy of the model that runs its graph; layers and tensors keep their names."""
        made = _copy(self.model)
        if self.trusted or self.plain:
            return made
        self.graph(True)
        for hooks in (made._forward_hooks, made._forward_pre_hooks, made._backward_hooks, made._backward_pre_hooks):
            hooks.clear()  # they are in the graph
        made.forward = GraphForward(made, self)
        return made

    def judging(self) -> nn.Module:
        """A copy in eval mode for public records; without a graph of that mode it runs as it is."""
        try:
            self.graph(False)
            return self.running().eval()
        except (PlanError, UntraceableError):
            return _copy(self.model).eval()

    @property
    def losses(self) -> Loss:
        """The loss that runs."""
        if self.trusted or self.plain_loss:
            return self.loss
        return self._once("losses", self._graph_loss)  # type: ignore[no-any-return]

    def refusal(self) -> PlanError | None:
        """Why model or loss cannot run, or None. Called before anything else runs them: a call may change state."""
        try:
            self.check("client")
        except PlanError as error:
            return error
        except _FAILS:  # of torch's own layers, on records that do not fit them
            return None
        return None

    def graph(self, training: bool = True) -> Traced:
        """The model's graph in this mode."""
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

    # ---- what is proved ---------------------------------------------------------------------------------------------

    def of(self, unit: Unit) -> OwnCode:
        """Grade of the proof that units stay separate, and its reason; refuses code without one."""
        if self.trusted:
            return OwnCode(TRUSTED, "Python code of the user's own ran on the records, and the user vouches for it")
        self.check(unit)
        if unit == "client":
            return OwnCode(BY_CONSTRUCTION, self._how)
        if self.apart:
            return OwnCode(BY_CONSTRUCTION, f"{self._how}; every operation keeps the records of a batch apart")
        return OwnCode(PER_RECORD, f"{self._how}; run for each record by itself, for it has {self.reason}")

    def check(self, unit: Unit) -> None:
        """Refuse code without a graph, and with unit record a model or loss that mixes records."""
        if self.trusted:
            return
        found = self.known.get(("model", True))
        if not self.plain and isinstance(found, Traced):
            leaves, form = flat(synthetic_batch([self.x], [True], 5), {})
            if differs(found.graph, _copy(self.model).train(), leaves, form) is not None:
                self.known.clear()  # the model was changed after the capture
        _ = None if self.plain else self.graph(), self.losses
        if unit == "record" and self.reason is not None and (self.reason.certain or not self._alone()):
            what = "a model or a loss whose output for one record depends on the other records of the batch"
            needed = "layers and losses that keep the records of a batch apart"
            raise PlanError("mixing", f"{what} ({self.reason})", needed, "compare no record with another in it")

    @property
    def apart(self) -> bool:
        """Whether it is proved that model and loss treat each record independently."""
        return not self.trusted and self.reason is None

    @property
    def reason(self) -> Reason | None:
        """Why a record may influence another's loss; None where it is proved that none does."""
        return self._once("reason", self._reason)  # type: ignore[no-any-return]

    @property
    def _how(self) -> str:
        own = [*([] if self.plain else ["the model"]), *([] if self.plain_loss else ["the loss"])]
        if not own:
            return PLAIN
        found = f"{' and '.join(own)} captured as a graph on made-up records: no Python state, no branch on data"
        frozen = 0 if self.plain else len(self.graph().graph.constants)
        return f"{found}; {frozen} constant tensors stand in it as they were before training" if frozen else found

    def _reason(self) -> Reason | None:
        try:
            model = self.graph().reason
        except UntraceableError as error:  # of torch's own layers no graph is needed to run them
            model = Reason(str(error))
        if model is not None or keeps_apart(self.loss):
            return model
        return self._loss_traced(self.loss.value, *self._scores()).reason

    def _alone(self) -> bool:
        """Whether model and loss run record by record under vmap, checked on made-up records."""
        x, y = self.sample(5)
        model, losses = self.running().train(), self.losses
        generator = torch.random.fork_rng(devices=[])

        def one(x: Tensor, y: Tensor) -> Tensor:
            return losses(model(x[None]), y[None])[0]

        try:
            with torch.no_grad(), generator:
                alone = torch.func.vmap(one, randomness="different")(x, y)
                traced = [self.graph()] + ([] if self.plain_loss else [self.losses.values])  # type: ignore[attr-defined]
                return alone.shape == (len(y),) and all(part.alone for part in traced)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, UntraceableError):
            return False

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Made-up records and targets."""
        x, y = synthetic_batch([self.x, self.y], [True, True], count)
        return x, y

    # ---- captures ---------------------------------------------------------------------------------------------------

    def _captured(self, training: bool) -> Traced:
        if _everywhere_hooked():
            raise capture_error("a model", "a hook that runs in every module")
        return self._sized(Tracing(_copy(self.model).train(training)), "a model", self.x)

    def _sized(self, tracing: Tracing, what: str, *inputs: Tensor) -> Traced:
        """A captured graph, checked against the module for other batch sizes."""
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
        """The user's loss as graphs: its value, and slope and envelope where they work record by record."""
        scores, y = self._scores()
        values = self._loss_traced(self.loss.value, scores, y)
        pace = scores.new_empty(0, 1)
        slopes = self._written(self.loss.has_slope, self.loss.slope, scores, y)
        envelopes = self._written(self.loss.has_envelope, self.loss.envelope, scores, y, pace)
        return GraphLoss(self.loss, values, slopes, envelopes)

    def _loss_traced(self, function: Callable[..., Tensor], *inputs: Tensor) -> Traced:
        given = function.__self__.function if isinstance(getattr(function, "__self__", None), Given) else function  # type: ignore[attr-defined]
        module = given if isinstance(given, nn.Module) else Function(given)
        found = self._sized(Tracing(module), "a loss", *inputs)
        if found.graph.writes and any(node.op == "get_attr" for node in found.graph.graph.nodes):
            raise capture_error("a loss", "it may write into a tensor of its own")
        return found

    def _written(self, there: bool, function: Callable[..., Tensor], *inputs: Tensor) -> Traced | None:
        if not there:
            return None
        found = self._loss_traced(function, *inputs)
        return found if found.reason is None else None

    def _scores(self) -> tuple[Tensor, Tensor]:
        model = self.running().eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = model(self.sample(2)[0])
        return outputs[:0], self.y

    def _once(self, name: Any, make: Callable[[], Any]) -> Any:
        """Cached result or error of the first call: the user's code may behave otherwise on a second one."""
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
    """The error for code that no graph can be captured of."""
    return PlanError("own code", f"{what} that no graph can be captured of ({why})", _NEEDED, _FIX)


def _everywhere_hooked() -> bool:
    names = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return any(getattr(torch_module, f"_global_{name}") for name in names)


def _copy(model: nn.Module) -> nn.Module:
    """A copy that shares the frozen parameters, which may be large."""
    return copied(model, [p for p in model.parameters() if not p.requires_grad])


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
