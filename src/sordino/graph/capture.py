"""Capture of a module's forward as graphs, on synthetic records, and the check of each graph for independent records.

torch.fx is tried first: layers of torch.nn stay the user's own objects, and calls of them are nodes. If fx cannot
capture the code (loops over shapes, branches on them), torch.export is tried. Both refuse branches on data, and both
treat values of Python objects outside the module as constants. A capture is used only if its outputs and gradients
equal the module's. `Tracing`, called by dpsgd and data, holds the graphs of one module with the proof of each (`flow`).
"""

from __future__ import annotations

import builtins
import inspect
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sordino import codec
from sordino.graph import BY_CONSTRUCTION, PER_RECORD, Grade, captured
from sordino.graph.captured import Captured, Leaf, UntraceableError, flat, synthetic_batch, torch_layer
from sordino.graph.flow import Layout, Reason, dependence
from sordino.rng import forked_rng

SAME = 1e-4  # relative: a graph and its module, values and gradients
UNFIT = "synthetic records do not fit"
RECORDS = 5  # of the synthetic batch on which a module is captured
_NOT_WRITTEN = ("torch", "builtins", "abc", "typing")  # by the user: classes of torch and of Python


def capture(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], records: Sequence[bool], leaf: Leaf = torch_layer
) -> Captured:
    """Return the graph of `module(*args, **kwargs)`, checked to give the module's outputs and gradients.

    Only shapes and dtypes of records are read. `records` marks the arguments with one slice per record, and `leaf` says
    which modules stay single nodes. With torch.fx, which is fast, the module is captured twice, and the two captures
    must be equal.
    """
    inputs, form = flat(args, kwargs)
    sample = synthetic_batch(inputs, records, RECORDS)
    reasons: list[str] = []
    for method in (_by_fx, _by_export):
        try:
            with restored_state(module):
                found = method(module, sample, form, records, leaf)
                if method is _by_fx and not _equal(found, method(module, sample, form, records, leaf)):
                    raise UntraceableError(_CHANGES)
                wrong = differs(found, module, sample, form)
                if wrong is None:
                    return found
                reasons.append(wrong)
        except UntraceableError as error:
            reasons.append(str(error))
        except Exception as error:  # whatever the user's forward raises when its tensors are symbols
            reasons.append(_line(error))
    raise UntraceableError("; ".join(dict.fromkeys(reasons)))


_CHANGES = "two captures of forward differ, because it depends on Python state or on Python's random numbers"


def _equal(first: Captured, second: Captured) -> bool:
    if first.graph.python_code("self").src != second.graph.python_code("self").src:
        return False
    pairs = zip(first.constants, second.constants, strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs) and repr(first.fixed) == repr(second.fixed)


@contextmanager
def restored_state(module: nn.Module) -> Iterator[None]:
    """Context that restores attributes and buffers of the module, its submodules and their classes at its end."""
    parts = list(module.modules())
    tables = [vars(part) for part in parts]
    tables += [vars(part)[name] for part in parts for name in ("_buffers", "_parameters", "_modules")]
    before = [(table, dict(table)) for table in tables]
    kinds = {kind for part in parts for kind in type(part).__mro__}
    classes = [(kind, dict(vars(kind))) for kind in kinds if kind.__module__.partition(".")[0] not in _NOT_WRITTEN]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for table, values in before:
            table.clear()
            table.update(values)
        for kind, own in classes:
            now = dict(vars(kind))
            for name in now.keys() - own.keys():
                delattr(kind, name)
            for name in [name for name, value in own.items() if now.get(name) is not value]:
                setattr(kind, name, own[name])
        with torch.no_grad():
            for buffer, content in buffers:
                if not torch.equal(buffer, content):
                    buffer.copy_(content)


class _FlatModule(nn.Module):
    """Wrapper of a module whose forward maps flat tensors to flat tensors; other arguments are constants."""

    def __init__(self, module: nn.Module, sample: Sequence[Any], form: TreeSpec) -> None:
        super().__init__()
        self.module, self.sample, self.arguments = module, list(sample), form
        self.last = SimpleNamespace(form=None, fixed=())  # of the last outputs: torch.export restores attributes

    def flat_outputs(self, *tensors: Any) -> list[Any]:
        supply = iter(tensors)
        leaves = [next(supply) if isinstance(x, Tensor) else x for x in self.sample]
        args, kwargs = tree_unflatten(leaves, self.arguments)
        outputs, self.last.form = tree_flatten(self.module(*args, **kwargs))
        moving = [isinstance(y, Tensor | fx.Proxy) for y in outputs]
        self.last.fixed = tuple(None if moves else captured.Fixed(y) for y, moves in zip(outputs, moving, strict=True))
        return [y for y, moves in zip(outputs, moving, strict=True) if moves]

    @staticmethod
    def of(module: nn.Module, sample: Sequence[Any], form: TreeSpec) -> _FlatModule:
        names = ", ".join(f"x{i}" for i in range(sum(isinstance(x, Tensor) for x in sample)))
        space: dict[str, Any] = {}
        exec(f"def forward(self, {names}):\n    return self.flat_outputs({names})", space)  # fx refuses *tensors
        kind: Any = type("_FlatModule", (_FlatModule,), {"forward": space["forward"]})
        return kind(module, sample, form)  # type: ignore[no-any-return]


class _Tracer(fx.Tracer):
    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.leaf = leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.leaf(m)


def _by_fx(module: nn.Module, sample: Sequence[Any], form: TreeSpec, records: Any, leaf: Leaf) -> Captured:
    whole = _FlatModule.of(module, sample, form)
    with warnings.catch_warnings(), _len_of_proxies(module):
        warnings.simplefilter("ignore")
        return _captured(_Tracer(leaf).trace(whole), whole, whole, sample, "fx")


def _by_export(module: nn.Module, sample: Sequence[Any], form: TreeSpec, records: Any, leaf: Leaf) -> Captured:
    whole = _FlatModule.of(module, sample, form)
    pairs = [(x, own) for x, own in zip(sample, records, strict=True) if isinstance(x, Tensor)]
    layers = {name: part for name, part in module.named_modules() if leaf(part)}
    exported = captured.export_graph(whole, [x for x, _ in pairs], [own for _, own in pairs], layers)
    return _captured(exported.graph, exported, whole, sample, "export")


@contextmanager
def _len_of_proxies(module: nn.Module) -> Iterator[None]:
    """Context in which `len(x)` in the user's code becomes a node of the graph."""
    kinds = [kind for part in module.modules() for kind in type(part).__mro__ if hasattr(kind, "forward")]
    code = [kind.forward for kind in dict.fromkeys(kinds)]
    held = [value for part in module.modules() for value in vars(part).values()]
    code += [value for value in held if callable(value) and not isinstance(value, fx.Proxy)]  # of a capture before
    spaces = [getattr(inspect.unwrap(function), "__globals__", None) for function in code]
    new = {id(space): space for space in spaces if space is not None and "len" not in space}
    new = {key: space for key, space in new.items() if not str(space.get("__name__", "")).startswith("torch.")}
    for space in new.values():
        space["len"] = _len
    try:
        yield
    finally:
        for space in new.values():
            del space["len"]


def _len(item: Any) -> Any:
    if isinstance(item, fx.Proxy):  # builtins.len: this module's own `len` is replaced too
        return item.tracer.create_proxy("call_function", builtins.len, (item,), {})
    return builtins.len(item)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:160]}"


def _captured(graph: fx.Graph, owner: nn.Module, whole: _FlatModule, sample: Sequence[Any], source: str) -> Captured:
    """Return the graph with constants turned into inputs; only tensors of the user's module remain attributes."""
    constants: list[Tensor] = []
    last = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)
    for node in [n for n in graph.nodes if n.op in ("call_module", "get_attr")]:
        name = str(node.target)
        own: Any = whole
        for part in name.split("."):
            own = getattr(own, part, None)
        if own is not None and name.partition(".")[0] == "module":
            continue  # of the user's module: anything else is a constant of the graph
        value = operator.attrgetter(name)(owner)
        if not isinstance(value, Tensor):
            raise UntraceableError(f"a constant of type {type(value).__name__}")
        with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
            last = graph.placeholder(f"constant{len(constants)}")
        constants.append(value.detach())
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    graph.owning_module = None
    graph.eliminate_dead_code(is_impure_node=captured.has_effect)
    graph.lint()
    for node in graph.nodes:
        _refuse_foreign(node)
    if any(n.op == "call_module" and n.target == "module" for n in graph.nodes):
        source = "layers"
    function, tensors = captured.compile_graph(graph, whole.module), tuple(isinstance(x, Tensor) for x in sample)
    assert whole.last.form is not None
    return Captured(graph, function, tuple(constants), whole.last.form, whole.last.fixed, tensors, whole.module, source)


_BUILTINS = {getattr, len, abs, min, max, sum, round, pow, divmod}
_HOOKS = {
    *("register_hook", "register_post_accumulate_grad_hook", "apply_", "map_", "map2_", "backward", "set_", "resize_")
}


def _refuse_foreign(node: fx.Node) -> None:
    if node.op == "call_method" and node.target in _HOOKS:
        raise UntraceableError(f"{node.target}, which runs Python code outside the graph")
    if node.op == "call_function" and node.target not in _BUILTINS and not captured.torch_function(node.target):
        name = getattr(node.target, "__name__", node.target)
        raise UntraceableError(f"a call of {name}, which is not a function of torch")


def differs(found: Captured, module: nn.Module, sample: list[Any], form: TreeSpec) -> str | None:
    """Return how the graph's values differ from the module's on synthetic records, as a text; None if they agree."""
    try:
        own = _with_gradients(module, module, sample, form)
    except Exception as error:  # whatever the user's forward raises
        return f"{UNFIT} ({_line(error)})"
    try:
        graph = _with_gradients(lambda *args, **kwargs: found(module, *args, **kwargs), module, sample, form)
    except Exception as error:
        return f"a graph that fails where the module runs ({_line(error)})"
    return None if close(own, graph) else "a graph whose values or gradients differ from the module's own"


def _with_gradients(
    run: Callable[..., Any], module: nn.Module, sample: list[Any], form: TreeSpec
) -> list[Tensor | None]:
    args, kwargs = tree_unflatten(sample, form)
    parameters = [p for p in module.parameters() if p.requires_grad]
    with forked_rng(), torch.enable_grad(), restored_state(module):
        torch.manual_seed(0)
        outputs = [y for y in tree_flatten(run(*args, **kwargs))[0] if isinstance(y, Tensor)]
        moving = [y.float().square().sum() for y in outputs if y.requires_grad]
        trains = bool(moving and parameters)
        slopes = torch.autograd.grad(torch.stack(moving).sum(), parameters, allow_unused=True) if trains else ()
        buffers = [buffer.detach().clone() for buffer in module.buffers()]
    return [*(y.detach() for y in outputs), *slopes, *buffers]


@torch.no_grad()
def _seeded_outputs(graph: Captured, module: nn.Module, sample: list[Any], form: TreeSpec, seed: int) -> list[Tensor]:
    args, kwargs = tree_unflatten(sample, form)
    with forked_rng():
        torch.manual_seed(seed)
        return [y.detach() for y in tree_flatten(graph(module, *args, **kwargs))[0] if isinstance(y, Tensor)]


def close(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> bool:
    """Return whether all tensors agree up to rounding; None counts as zero, meta tensors compare by shape."""
    return len(first) == len(second) and all(_close(a, b) for a, b in zip(first, second, strict=True))


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return all(side is None or side.is_meta or not bool(side.any()) for side in (a, b))
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta:
        return a.is_meta and b.is_meta and a.shape == b.shape
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = float(a.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=SAME, atol=SAME * scale + 1e-12, equal_nan=True)


_CURVES: dict[Any, Callable[[], nn.Module]] = {
    **dict.fromkeys((torch.relu, F.relu, "relu"), nn.ReLU),
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), nn.Tanh),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), nn.Sigmoid),
}
_FLAT = (torch.flatten, "flatten")
_SHAPED = ("view", "reshape", torch.reshape)
_SIZES = ("size", operator.getitem, getattr, len)  # how Python asks for the number of records


def chained(graph: Captured, module: nn.Module) -> list[nn.Module]:
    """Return the layers of a graph that is a plain chain of layers; an empty list for any other graph."""
    if graph.constants or graph.output_form.num_leaves != 1:
        return []
    found: list[nn.Module] = []
    last: fx.Node | None = None
    for node in graph.graph.nodes:
        if node.op == "placeholder" and last is None:
            last = node
        elif node.op == "output":
            return found if node.all_input_nodes == [last] else []
        elif node.target not in _SIZES or node.op == "call_module":
            layer = _equivalent_layer(node, module) if node.args and node.args[0] is last else None
            if layer is None:
                return []
            found, last = [*found, layer], node
    return []


def _equivalent_layer(node: fx.Node, module: nn.Module) -> nn.Module | None:
    others = node.args[1:]
    if node.op == "call_module":
        return None if others or node.kwargs else module.get_submodule(str(node.target).partition(".")[2])
    if node.target in _CURVES and not others and not any(node.kwargs.values()):
        return _CURVES[node.target]()
    if node.target in _FLAT and (*others, *node.kwargs.values()) in ((1,), (1, -1)):
        return nn.Flatten()
    rows = others[0] if len(others) == 2 else None  # view(len(x), -1)
    return nn.Flatten() if node.target in _SHAPED and isinstance(rows, fx.Node) and others[1] == -1 else None


@codec.hides_values
@dataclass(frozen=True)
class Traced:
    """Captured graph with the result of its proof of independent records: `reason` is None if it is proved."""

    graph: Captured
    reason: Reason | None
    alone: bool = True  # whether synthetic records have the same outputs in a batch and in batches of one
    layout: Layout = field(default_factory=Layout)

    @property
    def grade(self) -> Grade:
        return BY_CONSTRUCTION if self.reason is None else PER_RECORD


class Tracing:
    """All captured graphs of a module, one per kind of arguments; capturing reads no value of a record.

    `watched` are layers of the module whose record axes are stored in `Traced.layout`.
    """

    def __init__(self, module: nn.Module, leaf: Leaf = torch_layer, watched: Collection[nn.Module] = ()) -> None:
        self.module, self.leaf, self.watched = module, leaf, watched
        self.graphs: dict[Any, Captured] = {}
        self.known: dict[Any, Traced] = {}
        self.samples: list[tuple[Captured, Any, list[Any], TreeSpec]] = []  # synthetic arguments of each, and its modes
        self.closed = False  # whether the module's own Python has run on data: then no new graph is captured

    def graph(self, args: Sequence[Any], kwargs: dict[str, Any], records: Sequence[bool]) -> Captured:
        """Return the captured graph for arguments of this kind, or raise `UntraceableError`; nothing is proved."""
        key = self._key(args, kwargs, records)
        if key not in self.graphs:
            if self.closed:
                raise UntraceableError("records of a new shape, after the module's Python code has run on private data")
            inputs, form = flat(args, kwargs)  # a graph for other shapes may equal the module for these too
            sample = synthetic_batch(inputs, records, RECORDS)
            alike = [one for other, one in self.graphs.items() if other[:2] == key[:2]]
            known = next((one for one in alike if differs(one, self.module, sample, form) is None), None)
            self.graphs[key] = known or capture(self.module, args, kwargs, records, self.leaf)
        return self.graphs[key]

    def of(self, args: Sequence[Any], kwargs: dict[str, Any], records: Sequence[bool]) -> Traced:
        """Return the captured graph for arguments of this kind, with its proof of independent records."""
        key = self._key(args, kwargs, records)
        if key not in self.known:
            graph, layout = self.graph(args, kwargs, records), Layout(self.watched)
            inputs, form = flat(args, kwargs)
            reason, sample = dependence(graph, inputs, records, layout), synthetic_batch(inputs, records, RECORDS)
            alone = reason is None or self._alone(graph, sample, form, records)
            self.known[key] = Traced(graph, reason, alone, layout)
            self.samples.append((graph, self.modes(), sample, form))
        return self.known[key]

    def is_stale(self) -> bool:
        """Return whether the module was changed, so that its outputs differ from those of its graphs."""
        with restored_state(self.module):
            now = self.modes()
            samples = [(graph, sample, form) for graph, modes, sample, form in self.samples if modes == now]
            return any(differs(graph, self.module, sample, form) is not None for graph, sample, form in samples)

    def forget(self) -> None:
        """Discard all graphs; the module is captured again at its next call."""
        self.graphs, self.known, self.samples = {}, {}, []

    def _alone(self, graph: Captured, sample: list[Any], form: TreeSpec, records: Sequence[bool]) -> bool:
        """Return whether a record has the same output alone as in a larger batch; True for random outputs."""
        singles = [[x[j : j + 1] if own else x for x, own in zip(sample, records, strict=True)] for j in range(RECORDS)]
        whole, again = (_seeded_outputs(graph, self.module, sample, form, seed) for seed in (0, 1))
        if not close(whole, again):
            return True
        try:
            parts = [_seeded_outputs(graph, self.module, single, form, 0) for single in singles]
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        joined = [torch.cat(rows) if rows[0].dim() else rows[0] for rows in zip(*parts, strict=True)]
        return close(whole, joined)

    def modes(self) -> tuple[Any, ...]:
        """Return the training mode and the user's hooks of every submodule."""
        return tuple(_mode(part) for part in self.module.modules())

    def _key(self, args: Sequence[Any], kwargs: dict[str, Any], records: Sequence[bool]) -> Any:
        inputs, form = flat(args, kwargs)  # torch 2.6 cannot hash the form of arguments: its text is hashed
        return self.modes(), str(form), tuple(_argument_key(x, own) for x, own in zip(inputs, records, strict=True))


def _mode(part: nn.Module) -> Any:
    hooks = part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks
    if not any(hooks) and "forward" not in vars(part):
        return part.training
    return part.training, id(vars(part).get("forward")), *(tuple(found) for found in hooks)


def _argument_key(x: Any, own: bool) -> Any:
    if isinstance(x, Tensor):
        return own, tuple(x.shape[1:] if own else x.shape), x.dtype, x.device.type
    try:
        hash(x)
    except TypeError:
        return repr(x)
    return type(x), x


class Function(nn.Module):
    """Module without parameters whose forward is a given function of tensors, such as a loss."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)
