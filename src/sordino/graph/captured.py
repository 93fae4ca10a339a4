"""Captured graphs as a data type, synthetic records, and capture by torch.export.

Called by `capture` and `flow`, and by the code of dpsgd, data and task that runs graphs.
"""

from __future__ import annotations

import inspect
import io
import logging
import operator
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sordino import codec
from sordino.rng import forked_rng

Leaf = Callable[[nn.Module], bool]
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LIBRARIES = ("torch", "_operator", "math")


class UntraceableError(Exception):
    """Raised if the user's code cannot be captured as a graph; the message says why."""


@codec.hides_values
@dataclass(frozen=True)
class Captured:
    """Captured forward pass: `function(module, *tensors, *constants)`, with the structure of inputs and outputs."""

    graph: fx.Graph
    function: Callable[..., Any]
    constants: tuple[Tensor, ...]
    output_form: TreeSpec
    fixed: tuple[Any, ...]  # outputs that are no tensors, by place; None where a tensor belongs
    tensors: tuple[bool, ...]  # which leaves of the arguments are tensors
    module: nn.Module
    source: str  # "fx" or "export"

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the graph with the layers of `module`, on the arguments of `module`'s own forward."""
        if self.source == "layers":
            return type(module).forward(module, *args, **kwargs)
        enabled = torch.is_grad_enabled()
        outputs = self.function(GraphSelf(module), *self.fed(flat(args, kwargs)[0]))
        if torch.is_grad_enabled() != enabled:  # a region without gradients has ended in the graph, and not outside
            torch.set_grad_enabled(enabled)
            outputs = tuple(y.detach() for y in outputs)
        return self.answered(outputs)

    def answered(self, outputs: Any) -> Any:
        """Return flat output tensors in the structure of the module's own outputs."""
        supply = iter(outputs)
        leaves = [next(supply) if constant is None else constant.value for constant in self.fixed]
        return tree_unflatten(leaves, self.output_form)

    def fed(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the graph's input tensors: those among the flat arguments, then the graph's constants."""
        constants = [tensor.clone() for tensor in self.constants] if self.writes else self.constants
        return [*(x for x in inputs if isinstance(x, Tensor)), *constants]

    @cached_property
    def writes(self) -> bool:
        """Whether an operation may write in place; every call then gets fresh copies of the constants."""
        return any(_may_write(node, self.module) for node in self.graph.nodes)

    def as_module(self) -> fx.GraphModule:
        """Return the graph with the user's layers as a module for torch.fx's interpreter."""
        root = nn.Module()
        vars(root)["_modules"]["module"] = self.module
        return fx.GraphModule(root, self.graph)


@dataclass(frozen=True)
class GraphSelf:
    """The object `self` in the code of a graph: the user's model, and functions that run regions of the graph."""

    module: nn.Module
    regions: Any = None


@dataclass(frozen=True)
class Fixed:
    value: Any


def flat(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Return all arguments as a flat list, keywords in alphabetical order, and their pytree structure."""
    leaves, form = tree_flatten((tuple(args), dict(sorted(kwargs.items()))))
    return leaves, form


def synthetic_batch(inputs: Sequence[Any], records: Sequence[bool], count: int) -> list[Any]:
    """Return `count` synthetic records with the shapes and dtypes of `inputs`: normal numbers, or zeros and ones.

    Inputs that `records` does not mark are returned as they are.
    """
    generator = torch.Generator().manual_seed(count)
    found: list[Any] = []
    for x, own in zip(inputs, records, strict=True):
        if own:
            shape, real = (count, *x.shape[1:]), x.is_floating_point() or x.is_complex()
            drawn = torch.randn(shape, generator=generator) if real else torch.randint(2, shape, generator=generator)
            x = drawn.to(x.device, x.dtype)
        found.append(x)
    return found


@contextmanager
def pinned() -> Iterator[None]:
    """Context in which recurrent layers run by plain ATen operations; torch's generators are restored afterwards."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with forked_rng():
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def replaced_forwards(forwards: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Context in which the forward of these modules is replaced by these functions."""
    before = [vars(module).get("forward") for module, _ in forwards]
    for module, forward in forwards:
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for (module, _), own in zip(forwards, before, strict=True):
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own


def torch_layer(module: nn.Module) -> bool:
    """Return whether a module is a torch.nn layer without hooks, parametrizations or user functions."""
    return not isinstance(module, _CONTAINERS) and all(torch_written(part) for part in module.modules())


def torch_written(module: nn.Module, libraries: tuple[str, ...] = ("torch.nn.modules.",)) -> bool:
    """Return whether a call of the module, not counting submodules, runs only code of these libraries."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    plain = type(module).__module__.startswith(libraries) and "forward" not in vars(module)
    return plain and not hooks and all(torch_function(value) for value in vars(module).values() if callable(value))


def torch_function(function: Any) -> bool:
    """Return whether a function is written in C or belongs to torch or Python's standard library."""
    if isinstance(function, torch._ops.OpOverload):
        return function.namespace in ("aten", "prims", "prim")
    return str(getattr(function, "__module__", None) or "torch").partition(".")[0] in _LIBRARIES


def compile_graph(graph: fx.Graph, module: nn.Module) -> Callable[..., Any]:
    """Return a graph compiled into a Python function `function(self, *inputs)`."""
    graph.set_codegen(CodeGen())
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(compile(code.src, f"<graph of {type(module).__name__}>", "exec"), space)
    function: Callable[..., Any] = space["forward"]
    return function


def layer_call(node: fx.Node, names: Container[str]) -> tuple[str, str] | None:
    """Return the call and the name of the outermost module in `names` whose forward contains a node."""
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        name = str(path).removeprefix("module").removeprefix(".")
        if name in names:
            return str(key), name
    return None


def has_effect(node: fx.Node) -> bool:
    """Return whether a node must stay even if its result is unused, as inputs and in-place operations must."""
    if node.op in ("placeholder", "output", "call_module") or node.target is torch._C._set_grad_enabled:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    schema = getattr(node.target, "_schema", None)
    return bool(schema.is_mutable) if schema is not None else name.split(".")[0].endswith("_") or name == "setitem"


def _may_write(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target).partition(".")[2])
        return any(getattr(part, "inplace", False) for part in layer.modules())
    flagged = "out" in node.kwargs or any(value is True for value in (*node.args, *node.kwargs.values()))
    return node.op in ("call_function", "call_method") and (flagged or has_effect(node))


def export_graph(
    module: nn.Module, tensors: Sequence[Tensor], records: Sequence[bool], layers: dict[str, nn.Module]
) -> fx.GraphModule:
    """Return torch.export's graph of module(*tensors) for any number of records; calls of `layers` are single nodes."""
    dim = torch.export.Dim
    free = [{} if x.is_floating_point() else dict.fromkeys(range(1, x.dim()), dim.AUTO) for x in tensors]
    shapes = tuple({0: dim.DYNAMIC, **sizes} if own else None for sizes, own in zip(free, records, strict=True))
    with _quiet():
        program = torch.export.export(module, tuple(tensors), dynamic_shapes=shapes, strict=False)
        takes = inspect.signature(program.module).parameters  # torch 2.6 makes no guards, and has no such option
        found = program.module(**({"check_guards": False} if "check_guards" in takes else {}))
        assert isinstance(found, fx.GraphModule)
        _inline_no_grad(found)
        found.graph.owning_module = None
        calls: dict[Any, list[fx.Node]] = {}  # what one call of a layer computed is a call of that layer again
        for node in found.graph.nodes:
            key = layer_call(node, layers)
            if key is not None:
                calls.setdefault(key, []).append(node)
        for (_, name), nodes in calls.items():
            _replace_by_call(found.graph, name, nodes)
        output = next(n for n in found.graph.nodes if n.op == "output")
        output.args = (tuple(tree_flatten(output.args[0])[0]),)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), forked_rng(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _inline_no_grad(flattened: fx.GraphModule) -> None:
    """Inline subgraphs under torch.no_grad(), between calls that switch gradients off and on."""
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
                raise UntraceableError("several tensors that leave a torch.no_grad() block as one tuple")
            user.replace_all_uses_with(given[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(node)
        graph.erase_node(inner)


def _replace_by_call(graph: fx.Graph, name: str, nodes: list[fx.Node]) -> None:
    """Replace a layer's nodes by one call of the layer, if they have one input and one output tensor."""
    inside = set(nodes)
    for node in nodes:  # a cast that changes nothing gives its input: what else reads that input reads it there
        source = node.args[0] if node.args and str(node.target).startswith("aten.to.") else None
        if isinstance(source, fx.Node) and source not in inside and _same_kind(node, source):
            for user in [user for user in node.users if user not in inside]:
                user.replace_input_with(node, source)
    taken = {a for n in nodes for a in n.all_input_nodes if a not in inside and a.op != "get_attr"}
    taken = {a for a in taken if not isinstance(a.meta.get("val"), int | torch.SymInt)}
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


def _same_kind(first: fx.Node, second: fx.Node) -> bool:
    a, b = first.meta.get("val"), second.meta.get("val")
    return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.dtype, a.device) == (b.dtype, b.device)
