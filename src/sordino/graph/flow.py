"""Proof that in a captured graph no record of a batch influences another, from its operations. Called by `capture`.

The graph runs on synthetic batches of two sizes, and every ATen operation is looked up in `rules`. The proved claim is

    graph(batch)[j] = h(record j)      for every batch, every size of batch and every record

under three conditions that are checked for each operation: (1) its rule states the record axis of the output; (2) in
both runs the output's shape agrees with this axis, and is otherwise the same; (3) its numbers (factors, divisors,
dimensions) are the same in both runs. The number of records is an integer that Python may compute with: it
may only be multiplied, added and used as a size, so a function of it that is equal for two sizes is constant (3).
Gradients follow: the loss of record j is a function of record j alone, and so is its derivative.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from sordino.graph.captured import Captured, pinned, replaced_forwards, synthetic_batch
from sordino.graph.rules import FIRST_ONLY, POSITIONS, RULES, SIZED, SIZES, UNIFORM, Call, MixesError, Rows, pointwise

BATCHES = (5, 7)  # records of the two synthetic batches

_PROPERTIES = {
    *("dim", "ndim", "ndimension", "dtype", "device", "layout", "is_floating_point", "is_complex", "requires_grad"),
    *("is_cuda", "is_sparse", "itemsize", "element_size", "type", "_assert_tensor_metadata", "_set_grad_enabled"),
}
_TURNED = {"transpose", "t"}  # in place: entries stay where they are, and dimensions have other names
_SILENT = {"detach", "alias"}  # torch makes them for itself, not always as many
_AFFINE = {operator.mul, operator.add, operator.sub, operator.neg, getattr(torch, "sym_sum", operator.add)}
_SIZED = {
    *("view", "reshape", "expand", "new_zeros", "new_ones", "new_full", "new_empty", "unflatten", "repeat"),
    *("zeros", "ones", "full", "empty", "rand", "randn", "_unsafe_view", "sym_size", "_assert", "_assert_scalar"),
    *("_assert_tensor_metadata", "eq", "sym_constrain_range_for_size", "arange"),
}


class Reason(str):
    """Reason, as a text, why one record may influence another record's output."""

    certain: bool  # whether an operation mixes records for sure

    def __new__(cls, why: str, certain: bool = False) -> Reason:
        reason = super().__new__(cls, why)
        reason.certain = certain
        return reason


@dataclass
class Layout:
    """Record axes of the results of a graph's nodes, by node name, and of the inputs of `watched` layers.

    For every call of a watched layer, `layers` holds the record axis and the first dimension's size of each input.
    """

    watched: Collection[nn.Module] = ()  # layers inside a layer of torch.nn, which no node calls
    nodes: dict[str, Rows | None] = field(default_factory=dict)
    layers: dict[nn.Module, list[list[tuple[Rows | None, int]]]] = field(default_factory=dict)


def dependence(
    graph: Captured, inputs: Sequence[Any], records: Sequence[bool], layout: Layout | None = None
) -> Reason | None:
    """Return the reason why one record's output may depend on other records; None if independence is proved.

    `inputs` are the flat arguments of the graph, and `records` says which of them hold one slice per record. Every
    output tensor must hold the records along its first dimension. Record axes are stored in `layout`.
    """
    runs = [synthetic_batch(inputs, records, count) for count in BATCHES]
    layout = Layout() if layout is None else layout
    try:
        first = _Run(BATCHES[0], None)
        _Reader(graph, first, records, Layout()).run(runs[0])
        second = _Run(BATCHES[1], first.steps)
        with replaced_forwards([(layer, second.watch(layer, layout)) for layer in layout.watched]):
            _Reader(graph, second, records, layout).run(runs[1])
    except MixesError as error:
        return Reason(str(error), error.certain)
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        return Reason(f"a graph that does not run for {BATCHES[0]} and for {BATCHES[1]} records ({line})")
    return None


@dataclass
class _Step:
    name: str
    numbers: list[Any]
    shapes: list[tuple[int, ...]]


class _Run(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One run of a graph; the second run compares each operation with that of the first, and applies its rule."""

    def __init__(self, records: int, known: list[_Step] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records, self.known, self.steps = records, known, list[_Step]()
        self.held: dict[int, tuple[Tensor, Rows | None]] = {}  # holds tensors, so that no id is used twice
        self.unknown: dict[int, Tensor] = {}  # outputs without a rule

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and True would import torch's compiler: two seconds

    def watch(self, layer: nn.Module, layout: Layout) -> Any:
        """Return the layer's forward, wrapped to store the record axes of its inputs in `layout`."""
        plain, found = layer.forward, layout.layers.setdefault(layer, [])

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            found.append([(self.rows(leaf), len(leaf) if leaf.dim() else 0) for leaf in inputs])
            return plain(*args, **kwargs)

        return forward

    def rows(self, tensor: Tensor) -> Rows | None:
        """Return the dimension along which records lie in a tensor, its record axis; None for public tensors."""
        if id(tensor) in self.unknown:
            raise MixesError("a second output of an operation of which only the first output is checked")
        found = self.held.get(id(tensor))
        return None if found is None else found[1]

    def place(self, tensor: Tensor, rows: Rows | None) -> None:
        self.held[id(tensor)] = (tensor, rows)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, name = func(*args, **(kwargs or {})), func._overloadpacket.__name__
        if name in _SILENT:
            self.place(output, self.rows(args[0]))
            return output
        arguments = _arguments_by_name(func, args, kwargs or {})
        outputs = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
        sizes = SIZES if name in SIZED else frozenset()
        leaves = tree_flatten([value for key, value in arguments.items() if key not in sizes])[0]
        numbers = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        step = _Step(str(func), numbers, [tuple(leaf.shape) for leaf in outputs])
        self.steps.append(step)
        if self.known is not None:
            self._apply_rule(func, name, arguments, outputs, self._first_step(name, outputs, step, self.known))
        elif self._holds(arguments):
            for leaf in outputs:
                self.place(leaf, Rows(0))  # the first run needs only whether there are records
        return output

    def _first_step(self, name: str, outputs: list[Tensor], step: _Step, known: list[_Step]) -> _Step:
        """Return the operation of the first run that corresponds to `step`; refuse it if its numbers differ."""
        at = len(self.steps) - 1
        before = known[at] if at < len(known) else None
        if before is None or before.name != step.name or len(before.shapes) != len(step.shapes):
            raise MixesError("operations that depend on the number of records", certain=True)
        counting = name == "arange" and outputs[0].tolist() == list(range(self.records))
        if before.numbers != step.numbers and not counting:
            raise MixesError(f"{name} with a number that depends on the number of records", certain=True)
        return before

    def _apply_rule(
        self, func: Any, name: str, arguments: dict[str, Any], outputs: list[Tensor], before: _Step
    ) -> None:
        in_place = name.endswith("_") and not name.endswith("__")
        base = name[:-1] if in_place else name
        holds = self._holds(arguments) and not base.startswith("new_")  # of which only the dtype is read
        rows = self._rule(func, base, arguments, outputs) if holds else None
        if in_place:
            if base in _TURNED and rows is not None:
                self.place(outputs[0], rows)
            elif rows is not None and self.rows(next(iter(arguments.values()))) != rows:
                raise MixesError(f"{name}, which writes records into a tensor without a record axis")
            return
        for number, (leaf, shape) in enumerate(zip(outputs, before.shapes, strict=True)):
            if number and base in FIRST_ONLY:
                self.unknown[id(leaf)] = leaf
                continue
            self.place(leaf, self._checked_axis(leaf, shape, rows, base))

    def _rule(self, func: Any, base: str, arguments: dict[str, Any], outputs: list[Tensor]) -> Rows:
        rule = RULES.get(base)
        if base not in POSITIONS and self._holds(arguments, position=True):
            raise MixesError(f"{base} applied to the indices of records in the batch")
        if torch.Tag.pointwise in func.tags and rule is None:
            rule = pointwise
        if rule is None or "out" in arguments or not outputs:
            raise MixesError(f"{base}, an operation without a rule, which may mix records")
        return rule(Call(base, arguments, self.rows, outputs[0], self.records))

    def _checked_axis(self, leaf: Tensor, before: tuple[int, ...], rows: Rows | None, base: str) -> Rows | None:
        """Return an output's record axis; refuse an output whose shapes in the two runs do not agree with the axis."""
        differing = [d for d in range(leaf.dim()) if leaf.shape[d] != before[d]] if leaf.dim() == len(before) else None
        if rows is None and differing and base in UNIFORM and len(differing) == 1:
            rows = Rows(differing[0], 1, leaf.shape[differing[0]] // self.records)
        if rows is None and differing == [0] and base == "arange":
            rows = Rows(0, position=True)
        if differing != ([] if rows is None else [rows.dim]):
            raise MixesError(f"{base}, whose shape depends on the number of records")
        if rows is not None and [before[rows.dim], leaf.shape[rows.dim]] != [rows.size(count) for count in BATCHES]:
            raise MixesError(f"{base}, whose output has no axis for the records")
        return rows

    def _holds(self, arguments: dict[str, Any], position: bool = False) -> bool:
        leaves = tree_flatten(list(arguments.values()))[0]
        found = [self.rows(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        return any(rows is not None and (rows.position or not position) for rows in found)


def _arguments_by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    schema = func._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value() and a.default_value is not None}
    found = {**defaults, **dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
    return {a.name: found[a.name] for a in schema if a.name in found}


class _Reader(fx.Interpreter):
    """Interpreter of a graph that also tracks Python integers computed from the number of records."""

    def __init__(self, graph: Captured, observer: _Run, records: Sequence[bool], layout: Layout) -> None:
        super().__init__(graph.as_module(), garbage_collect_values=False)
        self.extra_traceback, self.layout = False, layout
        self.captured, self.observer, self.holding = graph, observer, list(records)
        self.counts: dict[fx.Node, int | None] = {}  # nodes that count records; of a shape, at which entry
        self.compared: set[fx.Node] = set()  # those of them that only compare the number with another

    def run(self, inputs: Sequence[Any]) -> None:  # type: ignore[override]
        """Run every node once; refuse an output tensor whose first dimension is not that of the records."""
        for tensor, holds in zip(inputs, self.holding, strict=True):
            if holds:
                self.observer.place(tensor, Rows(0))
        with torch.no_grad(), pinned(), self.observer:
            outputs = super().run(*self.captured.fed(inputs))
        if self.observer.known is None:
            return
        places = [self.observer.rows(leaf) for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]
        if any(rows not in (None, Rows(0)) for rows in places):
            raise MixesError("an output whose first dimension is not that of the records")
        if Rows(0) not in places:
            raise MixesError("an output without a slice for each record")

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        layer = self.fetch_attr(target)  # "module" is the model itself: its forward alone, without its hooks
        return type(layer).forward(layer, *args, **kwargs) if target == "module" else layer(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self.observer.known is not None and n.op not in ("placeholder", "get_attr"):
            counted = [a for a in n.all_input_nodes if a in self.counts]
            if n.op == "output" and counted:
                raise MixesError("an output that contains the number of records")
            if counted:
                self._follow_arithmetic(n, _name(n), counted, result)
            elif n.op != "output" and not all(isinstance(leaf, Tensor) for leaf in _leaves(n, result)):
                self._follow_property(n, _name(n))
        if isinstance(result, Tensor) and id(result) not in self.observer.unknown:
            self.layout.nodes[n.name] = self.observer.rows(result)
        return result

    def _follow_property(self, n: fx.Node, name: str) -> None:
        """Track a tensor size that counts records; refuse any other value read out of a tensor."""
        values = [value for node in n.all_input_nodes for value in tree_flatten(self.env[node])[0]]
        held = [value for value in values if isinstance(value, Tensor) and self.observer.rows(value) is not None]
        if not held or name in _PROPERTIES:
            return
        tensor, rows = held[0], self.observer.rows(held[0])
        assert rows is not None
        if name == "shape" or (name == "size" and len(n.args) == 1 and not n.kwargs):
            self.counts[n] = rows.dim
        elif name in ("size", "sym_size"):
            at = n.args[1] if len(n.args) > 1 else n.kwargs["dim"]
            assert isinstance(at, int)
            if at % tensor.dim() == rows.dim:
                self.counts[n] = None
        elif name in ("numel", "nelement", "len", "__len__", "sym_numel"):
            self.counts[n] = None
        else:
            raise MixesError(f"{name}, which converts records to Python values")

    def _follow_arithmetic(self, n: fx.Node, name: str, counted: list[fx.Node], result: Any) -> None:
        """Track integers that are affine in the number of records; refuse any other arithmetic with that number.

        Comparisons with the number of records are allowed only in assertions: two batch sizes may compare alike.
        """
        dim = self.counts[counted[0]]
        if any(node in self.compared for node in counted) and not name.startswith("_assert"):
            raise MixesError(f"{name} of a comparison with the number of records, which may differ between batches")
        if name == "eq" and not isinstance(result, Tensor):
            self.counts[n] = None
            self.compared.add(n)
        elif n.target is operator.getitem and dim is not None and len(counted) == 1:
            at, places = n.args[1], list(range(len(self.env[n.args[0]])))  # type: ignore[index]
            if not isinstance(at, int | slice):
                raise MixesError("a tensor's shape read at an index that is not a constant")
            if isinstance(at, slice) and dim in places[at]:
                self.counts[n] = places[at].index(dim)
            elif isinstance(at, int) and places[at] == dim:
                self.counts[n] = None
        elif n.op == "call_function" and n.target in _AFFINE and not isinstance(result, Tensor):
            if n.target is operator.mul and len(counted) > 1:
                raise MixesError("a product of the number of records with itself")
            self.counts[n] = None
        elif n.op == "call_module" or name not in _SIZED:
            raise MixesError(f"{name} of the number of records")


def _leaves(n: fx.Node, result: Any) -> list[Any]:
    # A layer's None is omitted: attention returns it in place of weights
    return [leaf for leaf in tree_flatten(result)[0] if n.op != "call_module" or leaf is not None]


def _name(n: fx.Node) -> str:
    target = n.target
    if n.op == "call_function" and target is getattr:
        return str(n.args[1])
    if isinstance(target, str):
        return target
    packet = getattr(target, "_overloadpacket", None)
    return str(getattr(packet or target, "__name__", target)).rpartition(".")[2]
