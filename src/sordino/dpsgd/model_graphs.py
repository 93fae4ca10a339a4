"""Captured graphs of a model in a private loop, one per kind of arguments, and how they run. Used by recording.py.

A graph is captured on synthetic records. It runs with a tape, which records per-record gradients. Layers with a rule
run by that rule. A trained parameter outside such layers belongs to some module's own forward; the nodes of one call of
that module are a region, which runs under vmap, where each record has its own copy of the region's parameters. If that
is impossible, the whole graph runs record by record. The choice depends on the graph, on the record axes of its tensors
(`Layout`), and on a trial on synthetic records with perturbed parameters (so that a weight of zero cannot hide a
dependence), never on values of private records.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from sordino import codec
from sordino.dpsgd import batch_independence as checks
from sordino.dpsgd.clipped_sum import ClipGroup, clipped_sum
from sordino.dpsgd.layer_rules import third_party_rule
from sordino.dpsgd.memory import LiveTensors
from sordino.dpsgd.pieces import Tape, UnrecordableError, ieee_products
from sordino.dpsgd.rule_table import Site, VmapRule, run_by_rules, sites
from sordino.dpsgd.users import Owners
from sordino.errors import PlanError
from sordino.graph import Captured, Grade, Layout, Traced, Tracing, UntraceableError, captured, weakest
from sordino.graph.capture import RECORDS, restored_state
from sordino.graph.captured import flat, synthetic_batch
from sordino.graph.rules import Rows
from sordino.rng import Seeded, forked_rng

_LOG = logging.getLogger(__name__)
OUTLIER = 100.0  # factor on a synthetic record, to find mixing that only an unusual record triggers


class Part(nn.Module):
    """Module that runs some nodes of a graph; its parameters are the user's model's, with the prefix `module.`."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


@codec.hides_values
@dataclass(frozen=True)
class GraphPass:
    """Captured graph that can be run: layers in `sites` by their rules, all other operations by `function`.

    If `whole`, the model runs record by record, each with its own copy of all parameters.
    """

    graph: Captured
    function: Callable[..., Any]
    sites: tuple[Site, ...]
    whole: bool
    channels_last: bool = False

    def __call__(self, tape: Tape, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the graph, record its layers on the tape, and return the model's output."""
        tape.channels_last = self.channels_last
        if self.graph.source == "layers" and not self.whole:  # the model is one layer of torch.nn
            own = next((site for site in self.sites if site.module is model), None)
            if own is not None:
                return own.rule(tape, model, own.axis, *args, **kwargs)
        with run_by_rules(tape, self.sites):
            if self.graph.source == "layers" and not self.whole:
                return type(model).forward(model, *args, **kwargs)
            return self.graph.answered(self.function(tape, model, *self.graph.fed(flat(args, kwargs)[0])))


def by_layers(traced: Traced, model: nn.Module) -> GraphPass:
    """Return a pass over the graph with per-record gradients by layer rules, and by vmap for other parameters.

    Raise `UnrecordableError` if these do not apply.
    """
    every = sites(model)
    found, owners = [site for site in every if not site.by_vmap], [site.module for site in every if site.by_vmap]
    for site in found:
        _check_place(site, traced.layout)
    names = {name: part for name, part in model.named_modules() if any(part is own for own in owners)}
    plain, function = traced.graph.function, type(model).forward
    if traced.graph.source != "layers" and names:
        function = _with_regions(traced, model, names)
    elif traced.graph.source != "layers":
        function = lambda tape, module, *inputs: plain(captured.GraphSelf(module), *inputs)  # noqa: E731
    return GraphPass(traced.graph, function, tuple(found), whole=False)


def record_by_record(graph: Captured, model: nn.Module, args: Any, kwargs: Any, records: Sequence[bool]) -> GraphPass:
    """Return a pass that runs the whole graph for each record separately, so that no operation reads two records."""
    leaves, form = flat(args, kwargs)

    def layer(part: Part, *inputs: Tensor) -> list[Tensor]:  # a model that is one layer of torch.nn
        supply = iter(inputs)
        own_args, own_kwargs = tree_unflatten([next(supply) if isinstance(x, Tensor) else x for x in leaves], form)
        output = type(part.module).forward(part.module, *own_args, **own_kwargs)
        return [y for y in tree_flatten(output)[0] if isinstance(y, Tensor)]

    tensors = [own for own, tensor in zip(records, graph.tensors, strict=True) if tensor]
    part = Part(model, layer if graph.source == "layers" else graph.function)
    rule = VmapRule(part, [*tensors, *(False for _ in graph.constants)]).rule
    return GraphPass(graph, lambda tape, module, *inputs: rule(tape, part, 0, *inputs), (), whole=True)


def _check_place(site: Site, layout: Layout) -> None:
    """Refuse a layer if, in any call, its input has no records along the axis that its rule expects."""
    module, axis = site.module, site.axis
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        axis = 0 if module.batch_first else 1
    count = 3 if isinstance(module, nn.MultiheadAttention) else 1
    for rows, size in [entry for call in layout.layers.get(module, []) for entry in call[:count]]:
        if rows is None:  # the same indices (positions) for all records
            fits = isinstance(module, nn.Embedding) and axis == 0 and size == 1
        else:
            fits = (rows.dim, rows.outer) == (axis, 1) and (rows.inner == 1 or axis == 0) and not rows.position
        if not fits:
            raise UnrecordableError(f"a {type(module).__name__} layer whose input has no records along axis {axis}")


def _with_regions(traced: Traced, model: nn.Module, names: dict[str, nn.Module]) -> Callable[..., Any]:
    """Return the graph as a function in which every call of these modules runs record by record."""
    outer = fx.Graph()
    nodes = list(traced.graph.graph.nodes)
    copied: dict[fx.Node, fx.Node] = {}
    outer.graph_copy(traced.graph.graph, copied)
    result = next(n for n in reversed(nodes) if n.op == "output")
    copied[result] = outer.output(fx.node.map_arg(result.args[0], lambda n: copied[n]))
    regions: dict[str, Callable[..., Any]] = {}
    gone: list[fx.Node] = []
    for members in _calls(nodes, names).values():
        name = f"region{len(regions)}"
        gone += [copied[n] for n in members]
        regions[name] = _cut_out(outer, copied, members, traced.layout, model, name)
    for node in reversed(gone):
        outer.erase_node(node)
    outer.lint()
    for node in [n for n in outer.nodes if n.op == "get_attr" and n.users]:
        found = operator.attrgetter(str(node.target).removeprefix("module."))(model)
        if isinstance(found, nn.Parameter) and found.requires_grad:  # one for all records
            raise UnrecordableError("a parameter used outside the layer that owns it")
    function = captured.compile_graph(outer, model)

    def run(tape: Tape, module: nn.Module, *inputs: Tensor) -> Any:
        bound = {name: partial(rule, tape) for name, rule in regions.items()}
        return function(captured.GraphSelf(module, SimpleNamespace(**bound)), *inputs)

    return run


def _calls(nodes: Sequence[fx.Node], names: dict[str, nn.Module]) -> dict[Any, list[fx.Node]]:
    found: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.op == "call_module" and str(node.target).removeprefix("module.") in names:
            found[node.name] = [node]
            continue
        call = captured.layer_call(node, names)
        if call is not None:
            found.setdefault(call, []).append(node)
    return found


def _cut_out(
    outer: fx.Graph, copied: dict[fx.Node, fx.Node], members: list[fx.Node], layout: Layout, model: nn.Module, name: str
) -> Callable[..., Any]:
    """Replace these nodes by one call, and return its rule: vmap with one copy of the parameters per record."""
    inside = _closure(members, layout)
    taken = list(dict.fromkeys(a for n in inside for a in n.all_input_nodes if a not in inside))
    results = [n for n in members if any(user not in set(members) for user in n.users)]
    if any(n.name not in layout.nodes for n in (*taken, *results)):
        raise UnrecordableError("a module whose inputs or outputs are not all tensors")
    places = [layout.nodes[n.name] for n in taken]
    if any(rows not in (None, Rows(0)) for rows in places) or any(layout.nodes[n.name] != Rows(0) for n in results):
        raise UnrecordableError("a module with direct parameters and inputs without one slice per record")
    order = {n: i for i, n in enumerate(members[0].graph.nodes)}
    last = max([*taken, members[0]], key=lambda n: order[n])
    users = {n: [user for user in n.users if user not in set(members)] for n in results}
    if any(order[user] < order[last] for found in users.values() for user in found):
        raise UnrecordableError("a module whose operations are interleaved with those of other modules")
    with outer.inserting_after(copied[last]):
        call = outer.call_module(f"regions.{name}", tuple(copied[n] for n in taken))
    for place, node in enumerate(results):  # every result of the call is an entry
        with outer.inserting_after(call):
            entry = outer.call_function(operator.getitem, (call, place))
        for user in users[node]:
            copied[user].replace_input_with(copied[node], entry)
        copied[node] = entry
    return _region_rule(inside, taken, results, [rows is not None for rows in places], model)


def _closure(members: list[fx.Node], layout: Layout) -> list[fx.Node]:
    """Return these nodes, and the attribute and size nodes (such as the batch size) that they use."""
    found = set(members)
    waiting = list(members)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            alone = node.op == "get_attr" or node.name not in layout.nodes
            if alone and node not in found and node.op != "placeholder":
                found.add(node)
                waiting.append(node)
    return [n for n in members[0].graph.nodes if n in found]


def _region_rule(
    inside: list[fx.Node], taken: list[fx.Node], results: list[fx.Node], records: list[bool], model: nn.Module
) -> Callable[..., Any]:
    inner = fx.Graph()
    copies = {n: inner.placeholder(f"taken{i}") for i, n in enumerate(taken)}
    for node in inside:
        copies[node] = inner.node_copy(node, lambda n: copies[n])
    inner.output([copies[n] for n in results])
    part = Part(model, captured.compile_graph(inner, model))
    targets = [str(n.target) for n in inside if n.op in ("get_attr", "call_module")]
    every = part.named_parameters(remove_duplicate=False)
    used = {id(p) for name, p in every if any(name == own or name.startswith(f"{own}.") for own in targets)}
    rule = VmapRule(part, records, frozenset(name for name, p in part.named_parameters() if id(p) in used)).rule
    return lambda tape, *inputs: rule(tape, part, 0, *inputs)


class ModelGraphs:
    """Captured graphs of a model, for training passes and for evaluation."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.own = model, vars(model).get("forward")
        trained = [part for part in model.modules() if any(p.requires_grad for p in part.parameters(recurse=False))]
        known = {id(part) for part in trained if third_party_rule(part) is not None}
        watched = [site.module for site in sites(model)]
        self.training = Tracing(model, lambda part: captured.torch_layer(part) or id(part) in known, watched)
        self.others = Tracing(model) if known else self.training  # graphs that open layers of other libraries
        self.passes: dict[int, GraphPass] = {}  # by id() of the graph
        self.traced: list[Traced] = []  # graphs that have run
        self.changed = ""  # sentence for the certificate if a trusted forward was changed after its graph was captured

    @property
    def grade(self) -> Grade:
        """Weakest evidence that records are independent (a grade of `sordino.graph`), of all training passes so far."""
        return weakest([one.grade for one in self.traced])

    @property
    def reasons(self) -> list[str]:
        return sorted({one.reason for one in self.traced if one.reason is not None})

    def close(self) -> None:
        """Refuse further captures, because the user's Python code has run on private data and may have stored some."""
        self.training.closed = self.others.closed = True

    def evaluated(self, args: Any, kwargs: Any) -> Captured:
        """Return the graph of an evaluation pass, captured on synthetic tensors."""
        leaves, form = flat(args, kwargs)
        first = next((len(x) for x in leaves if isinstance(x, Tensor) and x.dim()), 0)
        records = [checks.has_records(x, first) for x in leaves]
        blank = list(leaves)
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor) and x.layout == torch.strided and not records[i]:
                blank[i] = synthetic_batch([x[None]], [True], 1)[0][0]
        blank_args, blank_kwargs = tree_unflatten(blank, form)
        with self._plain_forward():
            return self.others.graph(blank_args, blank_kwargs, records)

    def prepare(self, tables: Sequence[Tensor]) -> None:
        """Capture the call model(x) before the loader returns a batch.

        `tables` are all records and all targets; only their shape is read. If the loop calls the model with other
        arguments, that call is captured when it is made.
        """
        if not tables or not len(tables[0]):
            return
        try:
            self.trained((tables[0][:1],), {}, [True])
        except Exception:  # the loop may never make this call
            _LOG.debug("model(x) is not captured beforehand", exc_info=True)
        self.traced = []  # the graph has not run on records yet

    def trained(self, args: Any, kwargs: Any, records: Sequence[bool]) -> GraphPass:
        """Return the graph pass of a training call; `records` marks the arguments with one slice per record."""
        with self._plain_forward():
            traced = self.training.of(args, kwargs, records)
            if id(traced) not in self.passes:
                with restored_state(self.model):
                    self.passes[id(traced)] = self._arrange(traced, args, kwargs, records)
            if all(one is not traced for one in self.traced):
                self.traced.append(traced)
            return self.passes[id(traced)]

    def live_bytes(
        self, args: Any, kwargs: Any, records: Sequence[bool], size: int, kept: int, owners: Owners | None = None
    ) -> int:
        """Return the peak memory in bytes of a training pass (forward, backward, clipped sum) over synthetic records.

        Of `args` and `kwargs` only the shapes are used; `size` is the number of records, `kept` the number of gradient
        entries that are stored for speed (`pieces.KEPT`), and `owners` are the records' users if a user is the unit.
        """
        found = self.trained(args, kwargs, records)
        inputs, form = flat(args, kwargs)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        tape = Tape(next(iter(named.values())).device)
        tape.batch, tape.room = size, kept
        tape.merge, units = (None, size) if owners is None else (owners.merge, owners.units)
        live = LiveTensors(self.model)
        with (
            self._plain_forward(),
            restored_state(self.model),
            forked_rng(),
            torch.enable_grad(),
            live,
            ieee_products(),
        ):
            own_args, own_kwargs = tree_unflatten(synthetic_batch(inputs, records, size), form)
            leaves = checks.trained_outputs(found(tape, self.model, own_args, own_kwargs), size)
            torch.autograd.grad([y.double().sum() for y in leaves], [tape.anchor], allow_unused=True)
            clipped_sum(tape.pieces(), named, units, [ClipGroup(1.0, tuple(named))])
            tape.clear()
        return live.most

    def is_stale(self) -> bool:
        """Return whether the model's forward now gives other outputs for synthetic records than its graphs do."""
        with self._plain_forward():
            return self.training.is_stale()

    def capture_again(self) -> None:
        """Discard the training graphs; the next pass captures the changed forward, which counts as trusted code."""
        self.changed = "its forward was changed while it trained"
        self.training.forget()
        self.passes.clear()

    @contextmanager
    def _plain_forward(self) -> Iterator[None]:
        """Context in which the model has the user's own forward again; a model with hooks is refused."""
        model, everywhere = self.model, torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        if model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or everywhere:
            raise UntraceableError("hooks on the model itself, which run on records outside its forward")
        held = vars(model)
        recorded = held.pop("forward", None)
        if self.own is not None:
            held["forward"] = self.own
        try:
            with torch.autocast(next((p.device.type for p in model.parameters()), "cpu"), enabled=False):
                yield
        finally:
            held.pop("forward", None)
            if recorded is not None:
                held["forward"] = recorded

    def _arrange(self, traced: Traced, args: Any, kwargs: Any, records: Sequence[bool]) -> GraphPass:
        """Return the fastest pass in which each synthetic record's gradient is nonzero in its own slices only."""
        inputs, form = flat(args, kwargs)
        sample = tree_unflatten(synthetic_batch(inputs, records, RECORDS), form)
        self._refuse_writes(traced.graph, *sample)
        for channels_last in (True, False) if traced.reason is None else ():
            try:
                found = replace(by_layers(traced, self.model), channels_last=channels_last)
                self._check_slices(found, *sample)
                return found
            except UnrecordableError:
                break
            except RuntimeError as error:
                if not channels_last or "view" not in str(error):
                    raise
        graph = traced.graph if self.training is self.others else self.others.graph(args, kwargs, records)
        if traced.reason is not None:
            self._refuse_mixing(traced, graph, inputs, form, records)
        return record_by_record(graph, self.model, args, kwargs, records)

    @torch.no_grad()
    def _refuse_writes(self, graph: Captured, args: Any, kwargs: Any) -> None:
        named = [("parameter", self.model.named_parameters()), ("buffer", self.model.named_buffers())]
        before = [(kind, name, tensor, tensor._version) for kind, found in named for name, tensor in found]
        with forked_rng():
            graph(self.model, *args, **kwargs)
        for kind, name, tensor, version in before:
            if tensor._version != version:
                found = f"{kind} '{name}', which the model's forward writes into"
                needed = "a model that stores no records: stored records would be released without noise"
                raise PlanError("state", found, needed, "remove it, or freeze it in eval mode")

    def _check_slices(self, found: GraphPass, args: Any, kwargs: Any) -> None:
        """Refuse a pass in which a synthetic record's gradient reaches other records' slices, or a parameter itself."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        tape = Tape(parameters[0].device if parameters else None)
        tape.batch = RECORDS
        rng = Seeded(0).at(0, "mixing")
        with forked_rng(), torch.enable_grad(), checks.perturbed_parameters(self.model, rng):
            leaves = checks.trained_outputs(found(tape, self.model, args, kwargs), RECORDS)
            tape.check_slices(leaves, range(RECORDS), parameters)

    @torch.no_grad()
    def _refuse_mixing(
        self, traced: Traced, graph: Captured, inputs: Sequence[Any], form: Any, records: Sequence[bool]
    ) -> None:
        """Refuse a graph whose outputs for synthetic records in a batch differ from those for each record alone."""

        def tensors(some: Sequence[Any]) -> list[Tensor]:
            args, kwargs = tree_unflatten(list(some), form)
            outputs = tree_flatten(graph(self.model, *args, **kwargs))[0]
            return [y.detach() for y in outputs if isinstance(y, Tensor) and y.is_floating_point()]

        usual = synthetic_batch(inputs, records, RECORDS)
        real = [own and x.is_floating_point() for x, own in zip(usual, records, strict=True)]
        outlier = [torch.cat([x[:1] * OUTLIER, x[1:]]) if own else x for x, own in zip(usual, real, strict=True)]
        rng = Seeded(0).at(0, "mixing")
        with forked_rng(), checks.perturbed_parameters(self.model, rng), checks.frozen_rng():
            for batch in (usual, outlier):
                together = tensors(batch)
                if any(y.dim() == 0 or len(y) != RECORDS for y in together):
                    raise checks.no_output()
                if not traced.alone:
                    raise checks.mixing_error()
                alone = [
                    tensors([x[j : j + 1] if own else x for x, own in zip(batch, records, strict=True)])
                    for j in range(RECORDS)
                ]
                joined = [torch.cat(parts) for parts in zip(*alone, strict=True)]
                if checks.relative_distance(together, joined) > checks.COARSE:
                    raise checks.mixing_error()
