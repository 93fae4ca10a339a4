"""Graphs by torch.export, for code that torch.fx cannot follow; called by `capture`.

What a layer of torch.nn computed becomes a call of that layer again.
"""

from __future__ import annotations

import io
import logging
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from sordino.graph.captured import UntraceableError, layer_call


def export_graph(
    module: nn.Module, tensors: Sequence[Tensor], records: Sequence[bool], layers: dict[str, nn.Module]
) -> fx.GraphModule:
    """The graph of module(*tensors) for any number of records; calls of `layers` are single nodes."""
    shapes = tuple(_dynamic(x, own) for x, own in zip(tensors, records, strict=True))
    with _quiet():
        program = torch.export.export(module, tuple(tensors), dynamic_shapes=shapes, strict=False)
        found = program.module(check_guards=False)
        assert isinstance(found, fx.GraphModule)
        _inline_no_grad(found)
        found.graph.owning_module = None
        _restore_layers(found.graph, layers)
        output = next(n for n in found.graph.nodes if n.op == "output")
        output.args = (tuple(tree_flatten(output.args[0])[0]),)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export warns of, and logs, what it cannot follow: the refusal says it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _inline_no_grad(flattened: fx.GraphModule) -> None:
    """Regions under torch.no_grad() stand in the graph itself, between two switches."""
    graph = flattened.graph
    for node in list(graph.nodes):
        if getattr(node.target, "__name__", "") != "wrap_with_set_grad_enabled":
            continue
        enabled, inner, *taken = node.args
        part = getattr(flattened, str(inner.target))
        names = dict(zip((n for n in part.graph.nodes if n.op == "placeholder"), taken, strict=True))
        with graph.inserting_before(node):
            graph.call_function(torch._C._set_grad_enabled, (enabled,))
            given = graph.graph_copy(part.graph, names)
            graph.call_function(torch._C._set_grad_enabled, (not enabled,))
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise UntraceableError("a region without gradients whose answer is read as a whole")
            user.replace_all_uses_with(given[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(node)
        graph.erase_node(inner)


def _dynamic(x: Tensor, own: bool) -> Any:
    if not own:
        return None
    dim = torch.export.Dim
    free = dict.fromkeys(range(1, x.dim()), dim.AUTO) if not x.is_floating_point() else {}
    return {0: dim.DYNAMIC, **free}


def _restore_layers(graph: fx.Graph, layers: dict[str, nn.Module]) -> None:
    """What one call of a layer computed is a call of that layer again, where it took and gave one tensor."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        key = layer_call(node, layers)
        if key is not None:
            groups.setdefault(key, []).append(node)
    for (_, name), nodes in groups.items():
        _replace_by_call(graph, name, nodes)


def _replace_by_call(graph: fx.Graph, name: str, nodes: list[fx.Node]) -> None:
    inside = set(nodes)
    _past_casts(nodes, inside)
    taken = {a for n in nodes for a in n.all_input_nodes if a not in inside and a.op != "get_attr" and not _number(a)}
    given = [n for n in nodes if any(user not in inside for user in n.users)]
    if len(taken) != 1 or len(given) != 1 or any(n.op != "call_function" for n in nodes):
        return
    with graph.inserting_before(given[0]):
        call = graph.call_module(f"module.{name}", (taken.pop(),))
    call.meta.update({name: given[0].meta.get(name) for name in ("val", "nn_module_stack")})
    given[0].replace_all_uses_with(call)
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)


def _past_casts(nodes: list[fx.Node], inside: set[fx.Node]) -> None:
    """A cast that changes nothing gives its input: what else reads that input reads it there."""
    for node in nodes:
        source = node.args[0] if node.args and str(node.target).startswith("aten.to.") else None
        if not isinstance(source, fx.Node) or source in inside or not _same_kind(node, source):
            continue
        for user in [user for user in node.users if user not in inside]:
            user.replace_input_with(node, source)


def _same_kind(first: fx.Node, second: fx.Node) -> bool:
    a, b = first.meta.get("val"), second.meta.get("val")
    return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.dtype, a.device) == (b.dtype, b.device)


def _number(node: fx.Node) -> bool:
    """A size, which a layer reads off its input itself."""
    return isinstance(node.meta.get("val"), int | torch.SymInt)
