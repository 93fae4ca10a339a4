"""The graph of a module's forward, captured on made-up records before it sees a private one.

torch.fx is asked first: layers of torch.nn stay the user's own objects, calls of them are nodes. Where fx cannot
follow (loops over shapes, branches on them), torch.export is asked, and what a layer of torch.nn computed becomes a
call of that layer again. Both refuse branches on data, and both freeze what Python objects outside the module hold.
A capture is used only if it answers as the module does afterwards, with the same gradients.
"""

from __future__ import annotations

import inspect
import io
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sordino import codec

SAME = 1e-4  # relative: a graph and its module, values and gradients
UNFIT = "made-up records do not fit"
RECORDS = 5  # of the made-up batch on which a module is captured

Leaf = Callable[[nn.Module], bool]
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class UntraceableError(Exception):
    """Code that no graph can be captured of, and why."""


@codec.hides_values
@dataclass(frozen=True)
class Captured:
    """A forward pass as a graph: `function(module, *tensors, *constants)` and how arguments and answers are nested."""

    graph: fx.Graph
    function: Callable[..., Any]
    constants: tuple[Tensor, ...]
    answer: TreeSpec
    fixed: tuple[Any, ...]  # of the answer: what is no tensor, by place; None where a tensor belongs
    tensors: tuple[bool, ...]  # which leaves of the arguments are tensors
    module: nn.Module
    source: str  # "fx" or "export"

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The answer of the module with these arguments, by the graph; its layers are those of `module`."""
        if self.source == "layers":
            return type(module).forward(module, *args, **kwargs)
        enabled = torch.is_grad_enabled()
        outputs = self.function(_Holder(module), *self.fed(flat(args, kwargs)[0]))
        if torch.is_grad_enabled() != enabled:  # a region without gradients has ended in the graph, and not outside
            torch.set_grad_enabled(enabled)
            outputs = tuple(y.detach() for y in outputs)
        return self.answered(outputs)

    def answered(self, outputs: Any) -> Any:
        supply = iter(outputs)
        leaves = [next(supply) if kept is None else kept.value for kept in self.fixed]
        return tree_unflatten(leaves, self.answer)

    def fed(self, inputs: Sequence[Any]) -> list[Tensor]:
        """What the graph takes: the tensors among the flat arguments, then its constants."""
        constants = [tensor.clone() for tensor in self.constants] if self.writes else self.constants
        return [*(x for x in inputs if isinstance(x, Tensor)), *constants]

    @cached_property
    def writes(self) -> bool:
        """Whether a node may write in place: then every call has constants of its own, and none remembers a record."""
        return any(_may_write(node, self.module) for node in self.graph.nodes)

    def as_module(self) -> fx.GraphModule:
        """For an interpreter: the graph beside the user's own layers."""
        root = nn.Module()
        vars(root)["_modules"]["module"] = self.module
        return fx.GraphModule(root, self.graph)


@dataclass(frozen=True)
class _Holder:
    """What the code of a graph calls `self`."""

    module: nn.Module


@dataclass(frozen=True)
class _Fixed:
    value: Any


@dataclass
class _Answer:
    """How the last answer was nested, and what in it was no tensor."""

    form: TreeSpec | None = None
    fixed: tuple[Any, ...] = ()


def flat(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Arguments as a list of leaves; keywords in alphabetical order."""
    leaves, form = tree_flatten((tuple(args), dict(sorted(kwargs.items()))))
    return leaves, form


def synthetic_batch(inputs: Sequence[Any], records: Sequence[bool], count: int) -> list[Any]:
    """So many records of the same kind as `inputs`, with none of their values: random numbers, zeros and ones."""
    coins = torch.Generator().manual_seed(count)
    return [_like(x, count, coins) if own else x for x, own in zip(inputs, records, strict=True)]


def _like(x: Tensor, count: int, coins: torch.Generator) -> Tensor:
    shape = (count, *x.shape[1:])
    if x.is_floating_point() or x.is_complex():
        return torch.randn(shape, generator=coins).to(x.device, x.dtype)
    return torch.randint(2, shape, generator=coins).to(x.device, x.dtype)


@contextmanager
def pinned() -> Iterator[None]:
    """torch's generators as they were afterwards, and recurrent layers computed by plain operations."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def torch_layer(module: nn.Module) -> bool:
    """A layer of torch.nn exactly as torch wrote it: no hook, no parametrization, no function of the user's inside."""
    return not isinstance(module, _CONTAINERS) and all(torch_written(part) for part in module.modules())


def torch_written(module: nn.Module, libraries: tuple[str, ...] = ("torch.nn.modules.",)) -> bool:
    """Whether the code that runs when this module is called is torch's alone, but for the modules inside it."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    plain = type(module).__module__.startswith(libraries) and "forward" not in vars(module)
    return plain and not hooks and all(_torch_function(value) for value in vars(module).values() if callable(value))


def _torch_function(function: Any) -> bool:
    """Whether a function is torch's or Python's own: what is written in C, or in a module of theirs."""
    if isinstance(function, torch._ops.OpOverload):
        return function.namespace in ("aten", "prims", "prim")
    return str(getattr(function, "__module__", None) or "torch").partition(".")[0] in _LIBRARIES


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
        return _alike(first, way(*given))
    except UntraceableError:
        return False


@contextmanager
def restored_state(module: nn.Module) -> Iterator[None]:
    """Attributes of the module, its parts and their classes that forward writes while it is captured are put back."""
    parts = list(module.modules())
    tables = [vars(part) for part in parts]
    tables += [vars(part)[name] for part in parts for name in ("_buffers", "_parameters", "_modules")]
    before = [(table, dict(table)) for table in tables]
    classes = [(kind, dict(vars(kind))) for kind in {k for part in parts for k in type(part).__mro__ if _written(k)}]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for table, kept in before:
            table.clear()
            table.update(kept)
        for kind, own in classes:
            _restore(kind, own)
        with torch.no_grad():
            for buffer, values in buffers:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


def _written(kind: type) -> bool:
    """A class that is neither torch's nor Python's."""
    return kind.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing")


def _restore(kind: type, own: dict[str, Any]) -> None:
    now = dict(vars(kind))
    for name in now.keys() - own.keys():
        delattr(kind, name)
    for name, value in own.items():
        if now.get(name) is not value:
            setattr(kind, name, value)


class _Whole(nn.Module):
    """A module whose forward takes flat tensors: the rest of the arguments is part of it."""

    def __init__(self, module: nn.Module, sample: Sequence[Any], form: TreeSpec) -> None:
        super().__init__()
        self.module, self.sample, self.form = module, list(sample), form
        self.last = _Answer()

    def answer(self, *tensors: Any) -> list[Any]:
        supply = iter(tensors)
        leaves = [next(supply) if isinstance(x, Tensor) else x for x in self.sample]
        args, kwargs = tree_unflatten(leaves, self.form)
        outputs, form = tree_flatten(self.module(*args, **kwargs))
        moving = [isinstance(y, Tensor | fx.Proxy) for y in outputs]
        fixed = tuple(None if moves else _Fixed(y) for y, moves in zip(outputs, moving, strict=True))
        self.last.form, self.last.fixed = form, fixed
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
    spaces = [function.__globals__ for given in code if (function := inspect.unwrap(given)) and _is_python(function)]
    new = {id(space): space for space in spaces if "len" not in space}
    for space in new.values():
        space["len"] = _len
    try:
        yield
    finally:
        for space in new.values():
            del space["len"]


def _len(item: Any) -> Any:
    return item.tracer.create_proxy("call_function", len, (item,), {}) if isinstance(item, fx.Proxy) else len(item)


def _is_python(function: Any) -> bool:
    """Whether a function is written in Python, by the user."""
    space = getattr(function, "__globals__", None)
    return space is not None and not str(space.get("__name__", "")).startswith("torch.")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no word').splitlines()[0][:160]}"


def _finished(graph: fx.Graph, owner: nn.Module, whole: _Whole, sample: Sequence[Any], source: str) -> Captured:
    """Names as the user's module has them; constants as further inputs."""
    constants: list[Tensor] = []
    last = max((n for n in graph.nodes if n.op == "placeholder"), key=list(graph.nodes).index, default=None)
    for node in list(graph.nodes):
        if node.op in ("call_module", "get_attr"):
            if _own(whole, str(node.target)):
                continue
            value = _attribute(owner, str(node.target))
            with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
                last = graph.placeholder(f"constant{len(constants)}")
            constants.append(value)
            node.replace_all_uses_with(last)
            graph.erase_node(node)
    graph.owning_module = None
    graph.eliminate_dead_code(is_impure_node=_acts)
    graph.set_codegen(CodeGen())
    graph.lint()
    for node in graph.nodes:
        _refuse_foreign(node)
    code = graph.python_code("self")
    space = dict(code.globals)
    module, last_answer = whole.module, whole.last
    if any(n.op == "call_module" and n.target == "module" for n in graph.nodes):
        source = "layers"
    exec(compile(code.src, f"<graph of {type(module).__name__}>", "exec"), space)
    tensors = tuple(isinstance(x, Tensor) for x in sample)
    assert last_answer.form is not None
    return Captured(
        graph, space["forward"], tuple(constants), last_answer.form, last_answer.fixed, tensors, module, source
    )


def _acts(node: fx.Node) -> bool:
    """In-place operations and inputs stay; anything else that nobody reads goes."""
    if node.op in ("placeholder", "output", "call_module") or node.target is torch._C._set_grad_enabled:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    schema = getattr(node.target, "_schema", None)
    return bool(schema.is_mutable) if schema is not None else name.split(".")[0].endswith("_") or name == "setitem"


_LIBRARIES = ("torch", "_operator", "math")
_BUILTINS = {getattr, len, abs, min, max, sum, round, pow, divmod}
_HOOKS = {
    "register_hook",
    "register_post_accumulate_grad_hook",
    "apply_",
    "map_",
    "map2_",
    "backward",
    "set_",
    "resize_",
}


def _refuse_foreign(node: fx.Node) -> None:
    """A graph calls torch and nothing else: no function of the user's (torch.fx.wrap), no hook on a gradient."""
    if node.op == "call_method" and node.target in _HOOKS:
        raise UntraceableError(f"{node.target}, which runs Python code beside the graph")
    if node.op != "call_function" or node.target in _BUILTINS:
        return
    if not _torch_function(node.target):
        raise UntraceableError(
            f"a call of {getattr(node.target, '__name__', node.target)}, which is no function of torch"
        )


def _may_write(node: fx.Node, module: nn.Module) -> bool:
    """Whether a node may change a tensor that it is given: in place by its name, by `out`, or by a flag."""
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target).partition(".")[2])
        return any(getattr(part, "inplace", False) for part in layer.modules())
    flagged = "out" in node.kwargs or any(value is True for value in (*node.args, *node.kwargs.values()))
    return node.op in ("call_function", "call_method") and (flagged or _acts(node))


def _own(whole: _Whole, name: str) -> bool:
    """Whether a name is one of the user's module: anything else is a constant of the graph."""
    found: Any = whole
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None and name.partition(".")[0] == "module"


def _attribute(root: nn.Module, name: str) -> Tensor:
    found: Any = root
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, Tensor):
        raise UntraceableError(f"a constant of type {type(found).__name__}")
    return found.detach()


def _by_export(module: nn.Module, sample: Sequence[Any], form: TreeSpec, records: Any, leaf: Leaf) -> Captured:
    whole, tensors = _whole(module, sample, form)
    holding = [own for x, own in zip(sample, records, strict=True) if isinstance(x, Tensor)]
    shapes = tuple(_dynamic(x, own) for x, own in zip(tensors, holding, strict=True))
    layers = {name: part for name, part in module.named_modules() if leaf(part)}
    try:
        with _quiet():
            program = torch.export.export(whole, tuple(tensors), dynamic_shapes=shapes, strict=False)
            flattened = program.module(check_guards=False)
            _inlined(flattened)
            flattened.graph.owning_module = None
            _restored(flattened.graph, layers)
            _flat_output(flattened.graph)
            return _finished(flattened.graph, flattened, whole, sample, "export")
    except UntraceableError:
        raise
    except Exception as error:  # as above
        raise UntraceableError(_line(error)) from None


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


def _inlined(flattened: fx.GraphModule) -> None:
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


def _flat_output(graph: fx.Graph) -> None:
    node = next(n for n in graph.nodes if n.op == "output")
    node.args = (tuple(tree_flatten(node.args[0])[0]),)


def _restored(graph: fx.Graph, layers: dict[str, nn.Module]) -> None:
    """What one call of a layer computed is a call of that layer again, where it took and gave one tensor."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        key = _layer_of(node, layers)
        if key is not None:
            groups.setdefault(key, []).append(node)
    for (_, name), nodes in groups.items():
        _replace(graph, name, nodes)


def _layer_of(node: fx.Node, layers: dict[str, nn.Module]) -> tuple[str, str] | None:
    """The outermost layer whose call a node belongs to."""
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        name = str(path).removeprefix("module").removeprefix(".")
        if name in layers:
            return str(key), name
    return None


def _replace(graph: fx.Graph, name: str, nodes: list[fx.Node]) -> None:
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


def _alike(first: Captured, second: Captured) -> bool:
    if first.graph.python_code("self").src != second.graph.python_code("self").src:
        return False
    pairs = zip(first.constants, second.constants, strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs) and repr(first.fixed) == repr(second.fixed)


def differs(captured: Captured, module: nn.Module, sample: list[Any], form: TreeSpec) -> str | None:
    """In what the graph is not the module's own forward, on made-up records: values, gradients; None where it is."""
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
