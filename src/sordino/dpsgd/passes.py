"""How a training pass is run: the graph of the model for each kind of arguments, captured before it sees a record.

Which way a graph is run (layers by their rules, or record by record) is tried on made-up records, with public noise on
the parameters, so that nothing hides behind a weight of zero. Values of private records decide nothing here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from sordino.dpsgd.batch_independence import COARSE, distance, has_records, refused, shaken
from sordino.dpsgd.graph_pass import GraphPass, by_layers, record_by_record, rule_leaves
from sordino.dpsgd.rule_table import sites
from sordino.dpsgd.state_guard import still
from sordino.dpsgd.tape import Tape, UnrecordableError
from sordino.errors import PlanError
from sordino.graph import Captured, Grade, Traced, Tracing, UntraceableError, weakest
from sordino.graph.capture import RECORDS, differs, flat, made_up, torch_layer, unchanged
from sordino.graph.tracing import mode
from sordino.rng import Seeded

_LOG = logging.getLogger(__name__)
LOUD = 100.0  # times the usual size of an entry: what only an unusual record sets off shows on made-up ones


class Passes:
    """The graphs of a model, those of training passes with how they are run."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.own = model, vars(model).get("forward")
        known = rule_leaves(model)
        self.training = Tracing(
            model, lambda part: torch_layer(part) or id(part) in known, [site.module for site in sites(model)]
        )
        self.others = Tracing(model) if known else self.training  # without layers that a rule of ours stands for
        self.ways: dict[int, GraphPass] = {}
        self.traced: list[Traced] = []
        self.samples: list[tuple[Traced, list[Any], list[Any], Any]] = []  # made-up arguments of each, and its mode
        self.changed = ""  # what a trusted owner changed in the forward since its graph was captured
        self.last: tuple[Any, GraphPass] | None = None  # how the last pass was run, and by what it is known again

    @property
    def grade(self) -> Grade:
        """Of all training passes so far."""
        return weakest([one.grade for one in self.traced])

    @property
    def reasons(self) -> list[str]:
        """Why some graphs are run record by record."""
        return sorted({one.reason for one in self.traced if one.reason is not None})

    def close(self) -> None:
        """The model's own Python has seen data: no new graph can be trusted to be free of them."""
        self.training.closed = self.others.closed = True

    def evaluated(self, args: Any, kwargs: Any) -> Captured:
        """The graph of a pass that trains nothing; every tensor is made up for its capture."""
        with self._ungated():
            leaves, form = flat(args, kwargs)
            first = next((len(x) for x in leaves if isinstance(x, Tensor) and x.dim()), 0)
            records = [has_records(x, first) for x in leaves]
            blank = [x if own else _blank(x) for x, own in zip(leaves, records, strict=True)]
            blank_args, blank_kwargs = tree_unflatten(blank, form)
            return self.others.graph(blank_args, blank_kwargs, records)

    def prepare(self, tables: Sequence[Tensor]) -> None:
        """Capture the usual call, model(x), before the loader hands out a batch: no loop can have written into it.

        `tables` are all records and all targets, of which the shape is read. A model that is called in another way is
        captured at its first call.
        """
        if not tables or not len(tables[0]):
            return
        try:
            self._found((tables[0][:1],), {}, [True])
        except Exception:  # whatever this model says of such a call: nobody has asked for it yet
            _LOG.debug("model(x) is not captured beforehand", exc_info=True)
        self.traced = []  # it counts once it has run

    def trained(self, args: Any, kwargs: Any, records: Sequence[bool], flattened: Any = None) -> GraphPass:
        """How a training pass with these arguments is run; `records` are the leaves with a slice for each record."""
        quick = None if flattened is None else self._quick(flattened[0], flattened[1], records)
        if quick is not None and self.last is not None and quick == self.last[0] and not self._hooked():
            return self.last[1]
        found = self._found(args, kwargs, records)
        self.last = None if quick is None else (quick, found)
        return found

    def _modes(self) -> list[Any]:
        return [mode(part) for part in self.model.modules()]

    def is_stale(self) -> bool:
        """Whether the model's forward answers made-up records otherwise than its graphs: a number was set, for one."""
        with self._ungated(), unchanged(self.model):
            now = self._modes()
            return any(
                differs(traced.graph, self.model, sample, form) is not None
                for traced, modes, sample, form in self.samples
                if modes == now
            )

    def capture_again(self) -> None:
        """Forget all graphs of training passes: what its owner changed is taken in, and graded as the owner's."""
        self.changed = "its forward was changed while it trained"
        self.training.graphs.clear()
        self.training.known.clear()
        self.ways.clear()
        self.samples, self.last = [], None

    def _quick(self, leaves: Sequence[Any], form: Any, records: Sequence[bool]) -> Any:
        """By what the last pass is known again: all that `Tracing` asks for."""
        if any(not isinstance(x, Tensor | int | float | str | None) for x in leaves):
            return None
        kinds = [
            (x.shape[own:], x.dtype) if isinstance(x, Tensor) else x for x, own in zip(leaves, records, strict=True)
        ]
        return list(records), kinds, form, self._modes()

    def _hooked(self) -> bool:
        """Whether code of the user's runs beside the model's forward."""
        model = self.model
        return bool(model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or _global_hooks())

    def _found(self, args: Any, kwargs: Any, records: Sequence[bool]) -> GraphPass:
        with self._ungated():
            traced = self.training.of(args, kwargs, records)
            if id(traced) not in self.ways:
                with unchanged(self.model):
                    self.ways[id(traced)] = self._arranged(traced, args, kwargs, records)
                inputs, form = flat(args, kwargs)
                self.samples.append((traced, self._modes(), made_up(inputs, records, RECORDS), form))
            if all(one is not traced for one in self.traced):
                self.traced.append(traced)
            return self.ways[id(traced)]

    @contextmanager
    def _ungated(self) -> Iterator[None]:
        """The model as its owner wrote it."""
        if self._hooked():
            raise UntraceableError("hooks on the model itself, which run on records outside its forward")
        held = vars(self.model)
        gate = held.pop("forward", None)
        if self.own is not None:
            held["forward"] = self.own
        try:
            with torch.autocast("cpu", enabled=False):
                yield
        finally:
            held.pop("forward", None)
            if gate is not None:
                held["forward"] = gate

    def _arranged(self, traced: Traced, args: Any, kwargs: Any, records: Sequence[bool]) -> GraphPass:
        """The fastest way that keeps the made-up records' gradients apart."""
        inputs, form = flat(args, kwargs)
        made = tree_unflatten(made_up(inputs, records, RECORDS), form)
        self._refuse_writes(traced.graph, *made)
        if traced.reason is None:
            for channels_last in (True, False):
                try:
                    way = replace(by_layers(traced, self.model), channels_last=channels_last)
                    self._try(way, *made)
                    return way
                except UnrecordableError:
                    break
                except RuntimeError as error:
                    if not channels_last or "view" not in str(error):
                        raise
        return self._by_record(traced, args, kwargs, records)

    @torch.no_grad()
    def _refuse_writes(self, graph: Captured, args: Any, kwargs: Any) -> None:
        """A graph that writes into tensors of the model would remember records."""
        named = [("parameter", self.model.named_parameters()), ("buffer", self.model.named_buffers())]
        before = [(kind, name, tensor, tensor._version) for kind, found in named for name, tensor in found]
        with torch.random.fork_rng(devices=[]):
            graph(self.model, *args, **kwargs)
        for kind, name, tensor, version in before:
            if tensor._version != version:
                found = f"{kind} '{name}', which the model's forward writes into"
                needed = "a model that keeps nothing of the records it saw: no noise is added there"
                raise PlanError("state", found, needed, "remove it, or freeze it in eval mode")

    def _by_record(self, traced: Traced, args: Any, kwargs: Any, records: Sequence[bool]) -> GraphPass:
        graph = traced.graph
        if self.training is not self.others:
            graph = self.others.graph(args, kwargs, records)
        if traced.reason is not None:
            self._refuse_mixing(traced.alone, graph, args, kwargs, records)
        return record_by_record(graph, self.model, args, kwargs, records)

    def _try(self, way: GraphPass, args: Any, kwargs: Any) -> None:
        """A figure of one made-up record's output must reach that record's slices alone, and no parameter besides."""
        tape, coins = Tape(), Seeded(0).at(0, "mixing")
        tape.begin(RECORDS)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), shaken(self.model, coins):
            leaves = [y for y in tree_flatten(way(tape, self.model, args, kwargs))[0] if _trains(y, RECORDS)]
            if not leaves:
                raise no_output()
            for own in range(RECORDS):
                figure = torch.stack([y[own].float().sum() for y in leaves]).sum()
                slopes = torch.autograd.grad(figure, [tape.anchor, *parameters], allow_unused=True, retain_graph=True)
                if any(slope is not None for slope in slopes[1:]):
                    raise UnrecordableError("a parameter used outside the layer that owns it")
                if any(call.leaks(RECORDS, own) for call in tape.calls):
                    raise UnrecordableError("layers whose gradient for one record touches other records")
                for call in tape.calls:
                    call.slope = None

    @torch.no_grad()
    def _refuse_mixing(self, alike: bool, graph: Captured, args: Any, kwargs: Any, records: Sequence[bool]) -> None:
        """A graph that answers otherwise for a batch than for its records meant to mix: made-up records show it."""
        inputs, form = flat(args, kwargs)
        usual = made_up(inputs, records, RECORDS)
        loud = [_loud(x) if own else x for x, own in zip(usual, records, strict=True)]
        with torch.random.fork_rng(devices=[]), shaken(self.model, Seeded(0).at(0, "mixing")), still():
            for made in (usual, loud):
                own_args, own_kwargs = tree_unflatten(made, form)
                together = _tensors(graph(self.model, *own_args, **own_kwargs))
                if any(y.dim() == 0 or len(y) != RECORDS for y in together):
                    raise no_output()
                if not alike:
                    raise refused()
                alone = [_tensors(_one(graph, self.model, made, form, records, j)) for j in range(RECORDS)]
                if distance(together, [torch.cat(parts) for parts in zip(*alone, strict=True)]) > COARSE:
                    raise refused()


def _one(graph: Captured, model: nn.Module, made: Sequence[Any], form: Any, records: Sequence[bool], j: int) -> Any:
    own = [x[j : j + 1] if holds else x for x, holds in zip(made, records, strict=True)]
    args, kwargs = tree_unflatten(own, form)
    return graph(model, *args, **kwargs)


def _tensors(answer: Any) -> list[Tensor]:
    return [y.detach() for y in tree_flatten(answer)[0] if isinstance(y, Tensor) and y.is_floating_point()]


def _loud(x: Tensor) -> Tensor:
    """The first record far larger than the others."""
    if not x.is_floating_point():
        return x
    return torch.cat([x[:1] * LOUD, x[1:]])


def _blank(x: Any) -> Any:
    """A tensor of the same kind without its values."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        return x
    return made_up([x[None]], [True], 1)[0][0]


def _global_hooks() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def _trains(item: Any, size: int) -> bool:
    """Whether a tensor has a slice for each record, with a gradient."""
    return has_records(item, size) and item.requires_grad


def no_output() -> PlanError:
    found = "a model whose output has no slice per record"
    return PlanError("per-record", found, "outputs, of which the loop computes the loss")


def refuse_labels(kwargs: Mapping[str, Any]) -> None:
    """Models of transformers make a loss of labels: a mean over the batch, and over the tokens of all its records."""
    if kwargs.get("labels") is not None:
        raise PlanError(
            "reduction",
            "labels given to the model, which makes a mean over all records of the batch, or over all their tokens",
            "a loss in which each record has a term of its own",
            'make_private(..., loss="cross_entropy"), or "tokens" for a label per token, and '
            "optimizer.loss(model(**inputs), labels) with inputs that hold no labels",
        )
