"""The graphs of a model in a private loop, one for each kind of arguments, and how each is run; used by `Recording`.

A graph is captured before the model sees such a record. Whether it runs by layer rules or record by record is tried on
synthetic records, with public noise on the parameters, so that nothing hides behind a weight of zero. Values of private
records decide nothing here.
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

from sordino.dpsgd.batch_independence import (
    COARSE,
    frozen_rng,
    has_records,
    mixing_error,
    perturbed_parameters,
    relative_distance,
)
from sordino.dpsgd.graph_pass import GraphPass, by_layers, record_by_record, rule_leaves
from sordino.dpsgd.rule_table import sites
from sordino.dpsgd.tape import Tape, UnrecordableError
from sordino.errors import PlanError
from sordino.graph import Captured, Grade, Traced, Tracing, UntraceableError, weakest
from sordino.graph.capture import RECORDS, restored_state
from sordino.graph.capture import _mode as mode
from sordino.graph.captured import flat, synthetic_batch, torch_layer
from sordino.rng import Seeded

_LOG = logging.getLogger(__name__)
OUTLIER = 100.0  # times the usual size of an entry: mixing that only an unusual record sets off shows


class ModelGraphs:
    """The graphs of a model; those of training passes with how they are run."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.own = model, vars(model).get("forward")
        known = rule_leaves(model)
        self.training = Tracing(
            model, lambda part: torch_layer(part) or id(part) in known, [site.module for site in sites(model)]
        )
        self.others = Tracing(model) if known else self.training  # without layers that a rule of ours stands for
        self.passes: dict[int, GraphPass] = {}  # by identity of the graph
        self.traced: list[Traced] = []  # that have run
        self.changed = ""  # what a trusted owner changed in the forward since its graph was captured
        self.last: tuple[Any, GraphPass] | None = None  # key of the last arguments, and how they were run

    @property
    def grade(self) -> Grade:
        """Of all training passes so far."""
        return weakest([one.grade for one in self.traced])

    @property
    def reasons(self) -> list[str]:
        """Why some graphs are run record by record."""
        return sorted({one.reason for one in self.traced if one.reason is not None})

    def close(self) -> None:
        """Capture no new graph: the model's own Python has run on data, and may hold some."""
        self.training.closed = self.others.closed = True

    def evaluated(self, args: Any, kwargs: Any) -> Captured:
        """The graph of a pass that trains nothing; every tensor is synthetic for its capture."""
        with self._plain_forward():
            leaves, form = flat(args, kwargs)
            first = next((len(x) for x in leaves if isinstance(x, Tensor) and x.dim()), 0)
            records = [has_records(x, first) for x in leaves]
            blank = [x if own else _blank(x) for x, own in zip(leaves, records, strict=True)]
            blank_args, blank_kwargs = tree_unflatten(blank, form)
            return self.others.graph(blank_args, blank_kwargs, records)

    def prepare(self, tables: Sequence[Tensor]) -> None:
        """Capture the usual call, model(x), before the loader gives out a batch: no loop can have written into it.

        `tables` are all records and all targets, of which the shape is read. A model that is called in another way is
        captured at its first call.
        """
        if not tables or not len(tables[0]):
            return
        try:
            self._find((tables[0][:1],), {}, [True])
        except Exception:  # whatever this model says of such a call: no loop has made it yet
            _LOG.debug("model(x) is not captured beforehand", exc_info=True)
        self.traced = []  # it counts once it has run

    def trained(self, args: Any, kwargs: Any, records: Sequence[bool], leaves: Sequence[Any], form: Any) -> GraphPass:
        """How a training pass with these arguments is run; `records` are the leaves with a slice for each record."""
        key = self._key(leaves, form, records)
        if key is not None and self.last is not None and key == self.last[0] and not self._hooked():
            return self.last[1]
        found = self._find(args, kwargs, records)
        self.last = None if key is None else (key, found)
        return found

    def is_stale(self) -> bool:
        """Whether the model's forward answers synthetic records otherwise than its graphs."""
        with self._plain_forward():
            return self.training.is_stale()

    def capture_again(self) -> None:
        """Forget all graphs of training passes: what its owner changed is taken in, and graded as the owner's."""
        self.changed, self.last = "its forward was changed while it trained", None
        self.training.forget()
        self.passes.clear()

    def _key(self, leaves: Sequence[Any], form: Any, records: Sequence[bool]) -> Any:
        """All that `Tracing` distinguishes arguments by; None where they cannot be compared."""
        if any(not isinstance(x, Tensor | int | float | str | None) for x in leaves):
            return None
        kinds = [
            (x.shape[own:], x.dtype) if isinstance(x, Tensor) else x for x, own in zip(leaves, records, strict=True)
        ]
        return list(records), kinds, form, [mode(part) for part in self.model.modules()]

    def _hooked(self) -> bool:
        """Whether code of the user's runs beside the model's forward."""
        model = self.model
        everywhere = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        return bool(model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or everywhere)

    def _find(self, args: Any, kwargs: Any, records: Sequence[bool]) -> GraphPass:
        with self._plain_forward():
            traced = self.training.of(args, kwargs, records)
            if id(traced) not in self.passes:
                with restored_state(self.model):
                    self.passes[id(traced)] = self._arrange(traced, args, kwargs, records)
            if all(one is not traced for one in self.traced):
                self.traced.append(traced)
            return self.passes[id(traced)]

    @contextmanager
    def _plain_forward(self) -> Iterator[None]:
        """The model with the forward that its owner wrote."""
        if self._hooked():
            raise UntraceableError("hooks on the model itself, which run on records outside its forward")
        held = vars(self.model)
        recorded = held.pop("forward", None)
        if self.own is not None:
            held["forward"] = self.own
        try:
            with torch.autocast("cpu", enabled=False):
                yield
        finally:
            held.pop("forward", None)
            if recorded is not None:
                held["forward"] = recorded

    def _arrange(self, traced: Traced, args: Any, kwargs: Any, records: Sequence[bool]) -> GraphPass:
        """The fastest way that keeps the synthetic records' gradients apart."""
        inputs, form = flat(args, kwargs)
        made = tree_unflatten(synthetic_batch(inputs, records, RECORDS), form)
        self._refuse_writes(traced.graph, *made)
        if traced.reason is None:
            for channels_last in (True, False):
                try:
                    found = replace(by_layers(traced, self.model), channels_last=channels_last)
                    self._check_slices(found, *made)
                    return found
                except UnrecordableError:
                    break
                except RuntimeError as error:
                    if not channels_last or "view" not in str(error):
                        raise
        graph = traced.graph
        if self.training is not self.others:
            graph = self.others.graph(args, kwargs, records)
        if traced.reason is not None:
            self._refuse_mixing(traced, graph, inputs, form, records)
        return record_by_record(graph, self.model, args, kwargs, records)

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

    def _check_slices(self, found: GraphPass, args: Any, kwargs: Any) -> None:
        """The output of one synthetic record must reach that record's slices alone, and no parameter besides."""
        tape = Tape()
        tape.begin(RECORDS)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        rng = Seeded(0).at(0, "mixing")
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), perturbed_parameters(self.model, rng):
            leaves = trained_outputs(found(tape, self.model, args, kwargs), RECORDS)
            tape.check_slices(leaves, range(RECORDS), parameters)

    @torch.no_grad()
    def _refuse_mixing(
        self, traced: Traced, graph: Captured, inputs: Sequence[Any], form: Any, records: Sequence[bool]
    ) -> None:
        """A graph that answers otherwise for a batch than for its records meant to mix: synthetic records show it."""

        def tensors(some: Sequence[Any]) -> list[Tensor]:
            args, kwargs = tree_unflatten(list(some), form)
            answer = tree_flatten(graph(self.model, *args, **kwargs))[0]
            return [y.detach() for y in answer if isinstance(y, Tensor) and y.is_floating_point()]

        usual = synthetic_batch(inputs, records, RECORDS)
        real = [own and x.is_floating_point() for x, own in zip(usual, records, strict=True)]
        outlier = [torch.cat([x[:1] * OUTLIER, x[1:]]) if own else x for x, own in zip(usual, real, strict=True)]
        rng = Seeded(0).at(0, "mixing")
        with torch.random.fork_rng(devices=[]), perturbed_parameters(self.model, rng), frozen_rng():
            for made in (usual, outlier):
                together = tensors(made)
                if any(y.dim() == 0 or len(y) != RECORDS for y in together):
                    raise no_output()
                if not traced.alone:
                    raise mixing_error()
                alone = [
                    tensors([x[j : j + 1] if own else x for x, own in zip(made, records, strict=True)])
                    for j in range(RECORDS)
                ]
                joined = [torch.cat(parts) for parts in zip(*alone, strict=True)]
                if relative_distance(together, joined) > COARSE:
                    raise mixing_error()


def _blank(x: Any) -> Any:
    """A tensor of the same kind without its values."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        return x
    return synthetic_batch([x[None]], [True], 1)[0][0]


def trained_outputs(output: Any, size: int, needed: bool = True) -> list[Tensor]:
    """The tensors of an output that have a slice for each record, with a gradient."""
    found = [y for y in tree_flatten(output)[0] if has_records(y, size) and y.requires_grad]
    if needed and not found:
        raise no_output()
    return found


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
