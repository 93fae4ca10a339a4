"""The graphs of one module, one for each kind of arguments, and what each proves; used by dpsgd, engines and data.

`Traced.grade` says what is proved of a module (grades: `sordino.graph`); `chained` reads off a graph whether a model is
a chain of layers, x -> layer -> layer -> scores.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import TreeSpec

from sordino import codec
from sordino.graph import BY_CONSTRUCTION, PER_RECORD, Grade, weakest
from sordino.graph.capture import RECORDS, answers, capture, close, differs, restored_state
from sordino.graph.captured import Captured, Leaf, UntraceableError, flat, synthetic_batch, torch_layer
from sordino.graph.flow import Layout, Reason, dependence

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


@codec.hides_values
@dataclass(frozen=True)
class Traced:
    """A graph, and the reason why an output for one record may depend on others (None: proved that it does not)."""

    graph: Captured
    reason: Reason | None
    alone: bool = True  # whether synthetic records get the same answer in a batch and by themselves
    layout: Layout = field(default_factory=Layout)

    @property
    def grade(self) -> Grade:
        return BY_CONSTRUCTION if self.reason is None else PER_RECORD


class Tracing:
    """All graphs of a module; `of` finds or captures the one for some arguments, and reads no value of a record.

    `watched` are layers of the module: where records lie in what they are given is noted in `Traced.layout`.
    """

    def __init__(self, module: nn.Module, leaf: Leaf = torch_layer, watched: Collection[nn.Module] = ()) -> None:
        self.module, self.leaf, self.watched = module, leaf, watched
        self.graphs: dict[Any, Captured] = {}
        self.known: dict[Any, Traced] = {}
        self.samples: list[tuple[Captured, Any, list[Any], TreeSpec]] = []  # synthetic arguments of each, and its modes
        self.closed = False  # whether the module's own Python has run on data: then no new graph is captured

    def graph(self, args: Sequence[Any], kwargs: dict[str, Any], records: Sequence[bool]) -> Captured:
        """The graph for arguments of this kind, whatever it does with records; `UntraceableError` if there is none."""
        key = self._key(args, kwargs, records)
        if key not in self.graphs:
            known = self._reused(args, kwargs, records)
            if known is None and self.closed:
                raise UntraceableError("records of a new shape after the module's own code has run on data")
            self.graphs[key] = known or capture(self.module, args, kwargs, records, self.leaf)
        return self.graphs[key]

    def of(self, args: Sequence[Any], kwargs: dict[str, Any], records: Sequence[bool]) -> Traced:
        """The same, and what is proved of it."""
        key = self._key(args, kwargs, records)
        if key not in self.known:
            graph, layout = self.graph(args, kwargs, records), Layout(self.watched)
            reason = dependence(graph, flat(args, kwargs)[0], records, layout)
            alone = reason is None or self._alone(graph, args, kwargs, records)
            self.known[key] = Traced(graph, reason, alone, layout)
            inputs, form = flat(args, kwargs)
            self.samples.append((graph, self._modes(), synthetic_batch(inputs, records, RECORDS), form))
        return self.known[key]

    def is_stale(self) -> bool:
        """Whether the module answers synthetic records otherwise than its graphs: a number was set, for one."""
        with restored_state(self.module):
            now = self._modes()
            samples = [(graph, sample, form) for graph, modes, sample, form in self.samples if modes == now]
            return any(differs(graph, self.module, sample, form) is not None for graph, sample, form in samples)

    def forget(self) -> None:
        """Forget all graphs: the module is captured again at its next call."""
        self.graphs, self.known, self.samples = {}, {}, []

    @property
    def grade(self) -> Grade:
        """The weakest of all graphs so far."""
        return weakest([traced.grade for traced in self.known.values()])

    def _reused(self, args: Sequence[Any], kwargs: dict[str, Any], records: Sequence[bool]) -> Captured | None:
        """A graph for other shapes that answers as the module does for these too."""
        inputs, form = flat(args, kwargs)
        modes, sample = self._modes(), synthetic_batch(inputs, records, RECORDS)
        alike = [] if self.closed else [one for key, one in self.graphs.items() if key[:2] == (modes, form)]
        return next((graph for graph in alike if differs(graph, self.module, sample, form) is None), None)

    def _alone(self, graph: Captured, args: Sequence[Any], kwargs: dict[str, Any], records: Sequence[bool]) -> bool:
        """Whether a record by itself gets the answer that it gets among others; True where coins decide."""
        inputs, form = flat(args, kwargs)
        sample = synthetic_batch(inputs, records, RECORDS)
        singles = [[x[j : j + 1] if own else x for x, own in zip(sample, records, strict=True)] for j in range(RECORDS)]
        whole, again = (answers(graph, self.module, sample, form, seed) for seed in (0, 1))
        if not close(whole, again):
            return True
        try:
            parts = [answers(graph, self.module, single, form) for single in singles]
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        joined = [torch.cat(rows) if rows[0].dim() else rows[0] for rows in zip(*parts, strict=True)]
        return close(whole, joined)

    def _modes(self) -> tuple[Any, ...]:
        """Of every part: training or evaluation, and the code of the user's that is hooked to it."""
        return tuple(mode(part) for part in self.module.modules())

    def _key(self, args: Sequence[Any], kwargs: dict[str, Any], records: Sequence[bool]) -> Any:
        inputs, form = flat(args, kwargs)
        kinds = tuple(_kind(x, own) for x, own in zip(inputs, records, strict=True))
        return self._modes(), form if _HASHES else str(form), kinds


def _hashes(form: TreeSpec) -> bool:
    """Whether this torch can hash the form of arguments; that of 2.6 cannot."""
    try:
        hash(form)
    except TypeError:
        return False
    return True


_HASHES = _hashes(flat((0,), {})[1])


def mode(part: nn.Module) -> Any:
    """Training or evaluation, and the code of the user's that is hooked to a part."""
    hooks = part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks
    if not any(hooks) and "forward" not in vars(part):
        return part.training
    return part.training, id(vars(part).get("forward")), *(tuple(found) for found in hooks)


def _kind(x: Any, own: bool) -> Any:
    """What a graph depends on: shape and dtype, for records without how many there are; other values themselves."""
    if isinstance(x, Tensor):
        return own, tuple(x.shape[1:] if own else x.shape), x.dtype, x.device.type
    try:
        hash(x)
    except TypeError:
        return repr(x)
    return type(x), x


class Function(nn.Module):
    """A function of tensors, a loss for one, as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)
