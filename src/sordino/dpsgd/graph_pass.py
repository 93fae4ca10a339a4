"""A captured graph run with a tape: layers by their rules, other parameters by regions, or the whole by record.

A trained parameter that no layer with a rule holds belongs to some module's own forward. The nodes of one call of that
module are a region: they run under vmap, each record with its own copy of the region's parameters. Where even that is
not possible the whole graph is the region. Which of them it is follows from the graph and from where records lie in it
(`Layout`), never from values. Called by `ModelGraphs`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from sordino import codec
from sordino.dpsgd.layer_rules import third_party_rule
from sordino.dpsgd.rule_table import Site, VmapRule, run_by_rules, sites
from sordino.dpsgd.tape import Tape, UnrecordableError
from sordino.graph import Captured, Layout, Traced
from sordino.graph.captured import GraphSelf, compile_graph, flat, layer_call
from sordino.graph.rules import Rows


class Part(nn.Module):
    """Nodes of a graph as a module; its parameters are those of the user's model, `module.` before their names."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def owners(model: nn.Module) -> list[nn.Module]:
    """Modules whose own forward uses trained parameters."""
    return [site.module for site in sites(model) if site.by_vmap]


def rule_leaves(model: nn.Module) -> frozenset[int]:
    """Layers of other libraries that run by a rule of ours, whatever their own code says: by identity."""
    found = [part for part in model.modules() if any(p.requires_grad for p in part.parameters(recurse=False))]
    return frozenset(id(part) for part in found if third_party_rule(part) is not None)


@codec.hides_values
@dataclass(frozen=True)
class GraphPass:
    """How arguments of one kind are run: `sites` by their rules, and `function` between them.

    `whole`: the model record by record, each with its own copy of all parameters.
    """

    graph: Captured
    function: Callable[..., Any]
    sites: tuple[Site, ...]
    whole: bool
    channels_last: bool = False

    def __call__(
        self, tape: Tape, model: nn.Module, args: Any, kwargs: Any, leaves: Sequence[Any] | None = None
    ) -> Any:
        """The model's output, recorded; `leaves` are the arguments, where they are flattened already."""
        tape.channels_last = self.channels_last
        if self.graph.source == "layers" and not self.whole:
            return self._alone(tape, model, args, kwargs)
        inputs = self.graph.fed(flat(args, kwargs)[0] if leaves is None else leaves)
        with run_by_rules(tape, self.sites):
            return self.graph.answered(self.function(tape, model, *inputs))

    def _alone(self, tape: Tape, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """A model that is one layer of torch.nn."""
        for site in self.sites:
            if site.module is model:
                return site.rule(tape, model, site.axis, *args, **kwargs)
        with run_by_rules(tape, self.sites):
            return type(model).forward(model, *args, **kwargs)


def by_layers(traced: Traced, model: nn.Module) -> GraphPass:
    """Layers by their rules, other parameters by regions; `UnrecordableError` where records cannot be told apart."""
    found = [site for site in sites(model) if not site.by_vmap]
    for site in found:
        _check_place(site, traced.layout)
    if traced.graph.source == "layers":
        return GraphPass(traced.graph, type(model).forward, tuple(found), whole=False)
    names = {name: part for name, part in model.named_modules() if any(part is own for own in owners(model))}
    if names:
        return GraphPass(traced.graph, _with_regions(traced, model, names), tuple(found), whole=False)
    plain = traced.graph.function
    return GraphPass(
        traced.graph, lambda tape, module, *inputs: plain(GraphSelf(module), *inputs), tuple(found), whole=False
    )


def record_by_record(graph: Captured, model: nn.Module, args: Any, kwargs: Any, records: Sequence[bool]) -> GraphPass:
    """The whole graph for each record by itself: no operation of it sees two records."""
    tensors = [own for own, tensor in zip(records, graph.tensors, strict=True) if tensor]
    function = _of_layer(args, kwargs) if graph.source == "layers" else graph.function
    part = Part(model, function)
    rule = VmapRule(part, [*tensors, *(False for _ in graph.constants)]).rule

    def run(tape: Tape, module: nn.Module, *inputs: Tensor) -> Any:
        return rule(tape, part, 0, *inputs)

    return GraphPass(graph, run, (), whole=True)


def _of_layer(args: Any, kwargs: Any) -> Callable[..., Any]:
    """The forward of a model that is one layer of torch.nn, from flat tensors to flat tensors."""
    leaves, form = flat(args, kwargs)

    def function(part: Part, *inputs: Tensor) -> list[Tensor]:
        supply = iter(inputs)
        own_args, own_kwargs = tree_unflatten([next(supply) if isinstance(x, Tensor) else x for x in leaves], form)
        answer = type(part.module).forward(part.module, *own_args, **own_kwargs)
        return [y for y in tree_flatten(answer)[0] if isinstance(y, Tensor)]

    return function


def _check_place(site: Site, layout: Layout) -> None:
    """Records must lie where the rule of a layer looks for them, in every call and whatever the size of a batch."""
    calls = layout.layers.get(site.module, [])
    axis = site.axis
    if isinstance(site.module, nn.RNNBase | nn.MultiheadAttention):
        axis = 0 if site.module.batch_first else 1
    for given in calls:
        wanted = given[:3] if isinstance(site.module, nn.MultiheadAttention) else given[:1]
        if any(not _fits(rows, size, axis, site.module) for rows, size in wanted):
            raise UnrecordableError("a layer whose input has no slice for each record where its rule looks for it")


def _fits(rows: Rows | None, size: int, axis: int, module: nn.Module) -> bool:
    if rows is None:
        return isinstance(module, nn.Embedding) and axis == 0 and size == 1  # positions that all records share
    return (rows.dim, rows.outer) == (axis, 1) and (rows.inner == 1 or axis == 0) and not rows.position


def _with_regions(traced: Traced, model: nn.Module, names: dict[str, nn.Module]) -> Callable[..., Any]:
    """The graph with each call of an owner's forward as one region."""
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
    _refuse_loose(outer, model)
    function = compile_graph(outer, model)

    def run(tape: Tape, module: nn.Module, *inputs: Tensor) -> Any:
        bound = {name: partial(rule, tape) for name, rule in regions.items()}
        return function(GraphSelf(module, SimpleNamespace(**bound)), *inputs)

    return run


def _calls(nodes: Sequence[fx.Node], names: dict[str, nn.Module]) -> dict[Any, list[fx.Node]]:
    found: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.op == "call_module" and str(node.target).removeprefix("module.") in names:
            found[node.name] = [node]
            continue
        call = layer_call(node, names)
        if call is not None:
            found.setdefault(call, []).append(node)
    return found


def _cut_out(
    outer: fx.Graph, copied: dict[fx.Node, fx.Node], members: list[fx.Node], layout: Layout, model: nn.Module, name: str
) -> Callable[..., Any]:
    """Replace these nodes by one call; what runs them, each record with its own copy of the parameters."""
    inside = _closure(members, layout)
    taken = list(dict.fromkeys(a for n in inside for a in n.all_input_nodes if a not in inside))
    given = [n for n in members if any(user not in set(members) for user in n.users)]
    if any(n.name not in layout.nodes for n in (*taken, *given)):
        raise UnrecordableError("a module that takes or gives something else than tensors")
    places = [layout.nodes[n.name] for n in taken]
    if any(rows not in (None, Rows(0)) for rows in places) or any(layout.nodes[n.name] != Rows(0) for n in given):
        raise UnrecordableError("a module with parameters of its own, without one slice per record")
    rule = _region(inside, taken, given, [rows is not None for rows in places], model)
    order = {n: i for i, n in enumerate(members[0].graph.nodes)}
    last = max([*taken, members[0]], key=lambda n: order[n])
    users = {n: [user for user in n.users if user not in set(members)] for n in given}
    if any(order[user] < order[last] for found in users.values() for user in found):
        raise UnrecordableError("a module whose forward is left and entered again")
    with outer.inserting_after(copied[last]):
        call = outer.call_module(f"regions.{name}", tuple(copied[n] for n in taken))
    for place, node in enumerate(given):  # every result of the call is an entry
        with outer.inserting_after(call):
            entry = outer.call_function(operator.getitem, (call, place))
        for user in users[node]:
            copied[user].replace_input_with(copied[node], entry)
        copied[node] = entry
    return rule


def _closure(members: list[fx.Node], layout: Layout) -> list[fx.Node]:
    """Members with what else is computed from them alone: attributes, and numbers such as the size of the batch."""
    found = set(members)
    waiting = list(members)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            alone = node.op == "get_attr" or node.name not in layout.nodes
            if alone and node not in found and node.op != "placeholder":
                found.add(node)
                waiting.append(node)
    return [n for n in members[0].graph.nodes if n in found]


def _region(
    inside: list[fx.Node], taken: list[fx.Node], given: list[fx.Node], records: list[bool], model: nn.Module
) -> Callable[..., Any]:
    inner = fx.Graph()
    copies = {n: inner.placeholder(f"taken{i}") for i, n in enumerate(taken)}
    for node in inside:
        copies[node] = inner.node_copy(node, lambda n: copies[n])
    inner.output([copies[n] for n in given])
    part = Part(model, compile_graph(inner, model))
    rule = VmapRule(part, records, _parameters(inside, part)).rule
    return lambda tape, *inputs: rule(tape, part, 0, *inputs)


def _parameters(nodes: Sequence[fx.Node], part: Part) -> frozenset[str]:
    """The trained parameters that these nodes read, alone or in layers."""
    targets = [str(n.target) for n in nodes if n.op in ("get_attr", "call_module")]
    every = part.named_parameters(remove_duplicate=False)
    used = {id(p) for name, p in every if any(name == own or name.startswith(f"{own}.") for own in targets)}
    return frozenset(name for name, p in part.named_parameters() if id(p) in used)


def _refuse_loose(outer: fx.Graph, model: nn.Module) -> None:
    """A trained parameter that is read outside layers and regions would be one for all records."""
    for node in outer.nodes:
        if node.op != "get_attr" or not node.users:
            continue
        found = operator.attrgetter(str(node.target).removeprefix("module."))(model)
        if isinstance(found, nn.Parameter) and found.requires_grad:
            raise UnrecordableError("a parameter used outside the layer that owns it")
