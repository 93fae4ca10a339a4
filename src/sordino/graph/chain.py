"""Whether a model is a chain of layers, x -> layer -> layer -> scores: read off its graph, or off its Sequential."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812

from sordino.graph.capture import Captured

_CURVES: dict[Any, Callable[[], nn.Module]] = {
    **dict.fromkeys((torch.relu, F.relu, "relu"), nn.ReLU),
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), nn.Tanh),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), nn.Sigmoid),
}
_FLAT = (torch.flatten, "flatten")
_SHAPED = ("view", "reshape", torch.reshape)
_SIZES = ("size", operator.getitem, getattr, len)  # how Python asks for the number of records


def in_order(model: nn.Module) -> list[nn.Module]:
    """What runs, in order: a layer that is used twice stands twice, and a Sequential of another class for itself."""
    if type(model) is not nn.Sequential:
        return [model]
    return [part for child in model for part in in_order(child)]


def chained(captured: Captured, module: nn.Module) -> list[nn.Module]:
    """The layers of a graph in which every operation takes what the one before gave; empty for any other graph."""
    if captured.constants or captured.answer.num_leaves != 1:
        return []
    found: list[nn.Module] = []
    last: fx.Node | None = None
    for node in captured.graph.nodes:
        if node.op == "placeholder" and last is None:
            last = node
        elif node.op == "output":
            return found if node.all_input_nodes == [last] else []
        elif node.target not in _SIZES or node.op == "call_module":
            layer = _layer(node, module) if node.args and node.args[0] is last else None
            if layer is None:
                return []
            found, last = [*found, layer], node
    return []


def _layer(node: fx.Node, module: nn.Module) -> nn.Module | None:
    """The layer that a node is, or that does the same; None where no layer of a chain does."""
    given = node.args[1:]
    if node.op == "call_module":
        return None if given or node.kwargs else module.get_submodule(str(node.target).partition(".")[2])
    if node.target in _CURVES and not given and not any(node.kwargs.values()):
        return _CURVES[node.target]()
    if node.target in _FLAT and (*given, *node.kwargs.values()) in ((1,), (1, -1)):
        return nn.Flatten()
    rows = given[0] if len(given) == 2 else None  # view(len(x), -1)
    return nn.Flatten() if node.target in _SHAPED and isinstance(rows, fx.Node) and given[1] == -1 else None
