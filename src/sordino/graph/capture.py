"""Capture of a module's forward as a graph, on synthetic records before it sees a private one; called by `tracing`.

torch.fx is tried first: layers of torch.nn stay the user's own objects, calls of them are nodes. Where fx cannot
follow (loops over shapes, branches on them), torch.export is tried. Both refuse branches on data, and both freeze what
Python objects outside the module hold. A capture is used only if it answers as the module does afterwards, with the
same gradients.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sordino.graph.captured import (
    Captured,
    Leaf,
    UntraceableError,
    _acts,
    _Fixed,
    _torch_function,
    compile_graph,
    export_graph,
    flat,
    synthetic_batch,
    torch_layer,
)

SAME = 1e-4  # relative: a graph and its module, values and gradients
UNFIT = "synthetic records do not fit"
RECORDS = 5  # of the synthetic batch on which a module is captured
_NOT_WRITTEN = ("torch", "builtins", "abc", "typing")  # by the user: classes of torch and of Python


def capture(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], records: Sequence[bool], leaf: Leaf = torch_layer
) -> Captured:
    """The graph of `module(*args, **kwargs)`; of the arguments, only shapes and dtypes of records are looked at.

    `records` says which leaves of the arguments hold one slice per record. `leaf` names the modules that stay whole.
    """
    inputs, form = flat(args, kwargs)
    sample = synthetic_batch(inputs, records, RECORDS)
    reasons: list[str] = []
    for way in (_by_fx, _by_export):
        try:
            with restored_state(module):
                return _verified(way, module, sample, form, records, leaf)
        except UntraceableError as error:
            reasons.append(str(error))
    raise UntraceableError("; ".join(dict.fromkeys(reasons)))


def _verified(
    way: Callable[..., Captured], module: nn.Module, sample: list[Any], form: TreeSpec, records: Any, leaf: Leaf
) -> Captured:
    """With the module's own answers and gradients; by fx, which is fast, captured twice and the same both times."""
    first = way(module, sample, form, records, leaf)
    if way is _by_fx and not _repeats(first, way, module, sample, form, records, leaf):
        raise UntraceableError("two captures of forward differ: Python state or Python's random numbers decide in it")
    wrong = differs(first, module, sample, form)
    if wrong is not None:
        raise UntraceableError(wrong)
    return first


def _repeats(first: Captured, way: Callable[..., Captured], *given: Any) -> bool:
    try:
        second = way(*given)
    except UntraceableError:
        return False
    if first.graph.python_code("self").src != second.graph.python_code("self").src:
        return False
    pairs = zip(first.constants, second.constants, strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs) and repr(first.fixed) == repr(second.fixed)


@contextmanager
def restored_state(module: nn.Module) -> Iterator[None]:
    """Attributes of the module, its parts and their classes that forward writes while it is captured are put back."""
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
        for table, kept in before:
            table.clear()
            table.update(kept)
        for kind, own in classes:
            now = dict(vars(kind))
            for name in now.keys() - own.keys():
                delattr(kind, name)
            for name in [name for name, value in own.items() if now.get(name) is not value]:
                setattr(kind, name, own[name])
        with torch.no_grad():
            for buffer, values in buffers:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


@dataclass
class _Answer:
    """How the last answer was nested, and what in it was no tensor: torch.export puts attributes back, not these."""

    form: TreeSpec | None = None
    fixed: tuple[Any, ...] = ()


class _Whole(nn.Module):
    """A module whose forward takes flat tensors: the rest of the arguments is part of it."""

    def __init__(self, module: nn.Module, sample: Sequence[Any], form: TreeSpec) -> None:
        super().__init__()
        self.module, self.sample, self.arguments = module, list(sample), form
        self.last = _Answer()

    def answer(self, *tensors: Any) -> list[Any]:
        supply = iter(tensors)
        leaves = [next(supply) if isinstance(x, Tensor) else x for x in self.sample]
        args, kwargs = tree_unflatten(leaves, self.arguments)
        outputs, self.last.form = tree_flatten(self.module(*args, **kwargs))
        moving = [isinstance(y, Tensor | fx.Proxy) for y in outputs]
        self.last.fixed = tuple(None if moves else _Fixed(y) for y, moves in zip(outputs, moving, strict=True))
        return [y for y, moves in zip(outputs, moving, strict=True) if moves]


def _whole(module: nn.Module, sample: Sequence[Any], form: TreeSpec) -> tuple[_Whole, list[Tensor]]:
    """The flat form of a module, with a forward of as many named arguments as it takes tensors."""
    tensors = [x for x in sample if isinstance(x, Tensor)]
    names = ", ".join(f"x{i}" for i in range(len(tensors)))
    space: dict[str, Any] = {}
    exec(f"def forward(self, {names}):\n    return self.answer({names})", space)  # fx wants names, not *tensors
    kind = type("_Whole", (_Whole,), {"forward": space["forward"]})
    return kind(module, sample, form), tensors


class _Tracer(fx.Tracer):
    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.leaf = leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.leaf(m)


def _by_fx(module: nn.Module, sample: Sequence[Any], form: TreeSpec, records: Any, leaf: Leaf) -> Captured:
    whole, _ = _whole(module, sample, form)
    try:
        with warnings.catch_warnings(), _len_of_proxies(module):
            warnings.simplefilter("ignore")
            return _finished(_Tracer(leaf).trace(whole), whole, whole, sample, "fx")
    except UntraceableError:
        raise
    except Exception as error:  # whatever a stranger's forward raises when its tensors are symbols
        raise UntraceableError(_line(error)) from None


@contextmanager
def _len_of_proxies(module: nn.Module) -> Iterator[None]:
    """`len(x)` in the user's code becomes a node of the graph: Python's own would ask a symbol for an integer."""
    kinds = [kind for part in module.modules() for kind in type(part).__mro__ if hasattr(kind, "forward")]
    code = [kind.forward for kind in dict.fromkeys(kinds)]
    held = [value for part in module.modules() for value in vars(part).values()]
    code += [value for value in held if callable(value) and not isinstance(value, fx.Proxy)]  # of a capture before
    spaces = [getattr(inspect.unwrap(given), "__globals__", None) for given in code]
    python = [
        space for space in spaces if space is not None and not str(space.get("__name__", "")).startswith("torch.")
    ]
    new = {id(space): space for space in python if "len" not in space}
    for space in new.values():
        space["len"] = _len
    try:
        yield
    finally:
        for space in new.values():
            del space["len"]


def _len(item: Any) -> Any:
    return item.tracer.create_proxy("call_function", len, (item,), {}) if isinstance(item, fx.Proxy) else len(item)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no word').splitlines()[0][:160]}"


def _finished(graph: fx.Graph, owner: nn.Module, whole: _Whole, sample: Sequence[Any], source: str) -> Captured:
    """Names as the user's module has them; constants as further inputs."""
    constants: list[Tensor] = []
    last = max((n for n in graph.nodes if n.op == "placeholder"), key=list(graph.nodes).index, default=None)
    for node in list(graph.nodes):
        if node.op in ("call_module", "get_attr"):
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
    graph.eliminate_dead_code(is_impure_node=_acts)
    graph.lint()
    for node in graph.nodes:
        _refuse_foreign(node)
    if any(n.op == "call_module" and n.target == "module" for n in graph.nodes):
        source = "layers"
    function, tensors = compile_graph(graph, whole.module), tuple(isinstance(x, Tensor) for x in sample)
    assert whole.last.form is not None
    return Captured(graph, function, tuple(constants), whole.last.form, whole.last.fixed, tensors, whole.module, source)


_BUILTINS = {getattr, len, abs, min, max, sum, round, pow, divmod}
_HOOKS = {
    *("register_hook", "register_post_accumulate_grad_hook", "apply_", "map_", "map2_", "backward", "set_", "resize_")
}


def _refuse_foreign(node: fx.Node) -> None:
    """A graph calls torch and nothing else: no function of the user's (torch.fx.wrap), no hook on a gradient."""
    if node.op == "call_method" and node.target in _HOOKS:
        raise UntraceableError(f"{node.target}, which runs Python code beside the graph")
    if node.op != "call_function" or node.target in _BUILTINS:
        return
    if not _torch_function(node.target):
        name = getattr(node.target, "__name__", node.target)
        raise UntraceableError(f"a call of {name}, which is no function of torch")


def _by_export(module: nn.Module, sample: Sequence[Any], form: TreeSpec, records: Any, leaf: Leaf) -> Captured:
    whole, tensors = _whole(module, sample, form)
    holding = [own for x, own in zip(sample, records, strict=True) if isinstance(x, Tensor)]
    layers = {name: part for name, part in module.named_modules() if leaf(part)}
    try:
        exported = export_graph(whole, tensors, holding, layers)
        return _finished(exported.graph, exported, whole, sample, "export")
    except UntraceableError:
        raise
    except Exception as error:  # as above
        raise UntraceableError(_line(error)) from None


def differs(captured: Captured, module: nn.Module, sample: list[Any], form: TreeSpec) -> str | None:
    """In what the graph is not the module's own forward, on synthetic records: values, gradients; None where it is."""
    try:
        own = _with_gradients(lambda m, a, k: m(*a, **k), module, sample, form)
    except Exception as error:  # as above
        return f"{UNFIT} ({_line(error)})"
    try:
        graph = _with_gradients(lambda m, a, k: captured(m, *a, **k), module, sample, form)
    except Exception as error:  # as above
        return f"a graph that fails where the module runs ({_line(error)})"
    return None if close(own, graph) else "a graph whose values or gradients differ from the module's own"


def _with_gradients(run: Any, module: nn.Module, sample: list[Any], form: TreeSpec) -> list[Tensor | None]:
    args, kwargs = tree_unflatten(sample, form)
    parameters = [p for p in module.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), restored_state(module):
        torch.manual_seed(0)
        outputs = [y for y in tree_flatten(run(module, args, kwargs))[0] if isinstance(y, Tensor)]
        moving = [y.float().square().sum() for y in outputs if y.requires_grad]
        trains = bool(moving and parameters)
        slopes = torch.autograd.grad(torch.stack(moving).sum(), parameters, allow_unused=True) if trains else ()
        buffers = [buffer.detach().clone() for buffer in module.buffers()]
    return [*(y.detach() for y in outputs), *slopes, *buffers]


@torch.no_grad()
def answers(captured: Captured, module: nn.Module, sample: list[Any], form: TreeSpec, seed: int = 0) -> list[Tensor]:
    """The tensors that the graph answers with."""
    args, kwargs = tree_unflatten(sample, form)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [y.detach() for y in tree_flatten(captured(module, *args, **kwargs))[0] if isinstance(y, Tensor)]


def close(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> bool:
    """Equal but for rounding, tensor by tensor; no gradient is a gradient of zero, and a meta tensor is its shape."""
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
