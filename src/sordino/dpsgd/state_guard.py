"""Coins that stand still: while this mode is on, every random operation of torch gives constants.

A record's forward pass can then be compared with the same pass in other company: dropout keeps every entry in both, and
what differs comes from the records. A random permutation becomes a turn by one, so that mixing by it still shows.

What a module keeps beside what is stepped: noted once, compared with what is there later, refused if it changed.

A module may hide records anywhere: in frozen parameters, in buffers of any type, in tensors, arrays and numbers among
its attributes; and a write through `.data` or numpy leaves no trace in a tensor's version. So contents are compared:

    digest(t) = the blocks of t's memory, each a sum of 8-byte words times random odd numbers, modulo 2^64

A word that changed changes its block's sum for sure; several changes cancel with probability about 2^-63."""

from __future__ import annotations

import os
import types
import zlib
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode

from sordino import codec
from sordino.errors import PlanError

_SEEDED = torch.Tag.nondeterministic_seeded
_aten = torch.ops.aten


class Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random numbers are 0.5, coins 1, random indices the smallest there are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _SEEDED not in func.tags:
            return func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is _aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if packet in (_aten.rrelu_with_noise, _aten.rrelu_with_noise_):
            args[1].copy_(torch.where(args[0] > 0, 1.0, (args[2] + args[3]) / 2))  # the slopes that its backward takes
            return args[0] * args[1]
        if func is _aten.bernoulli.p:  # how vmap writes dropout: the tensor is only a shape
            return torch.ones_like(args[0])
        if packet in (_aten.bernoulli, _aten.normal) and isinstance(args[0], Tensor):
            return args[0].clone()
        return _constant(func(*args, **(kwargs or {})), packet, args)


def _constant(drawn: Any, packet: Any, args: Any) -> Any:
    if not isinstance(drawn, Tensor):
        return drawn
    if packet is _aten.randperm:
        return drawn.copy_(torch.arange(len(drawn)).roll(1))
    if packet is _aten.bernoulli_ or drawn.dtype == torch.bool:
        return drawn.fill_(1)
    if drawn.is_floating_point():
        return drawn.fill_(0.5)
    bounds = [a for a in args if isinstance(a, int)]
    return drawn.fill_(bounds[0] if packet is _aten.randint and len(bounds) > 1 else 0)


@contextmanager
def still(random: bool = True) -> Iterator[None]:
    """Gradients on, coins standing still (if there are any: `random`), torch's own generator left as it was."""
    mode = Still() if random else nullcontext()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), mode:
        yield


BLOCK = 4096
_KEY = np.frombuffer(os.urandom(8 * BLOCK), dtype=np.int64) | 1  # no noise: it only tells contents apart
_OWN = frozenset(vars(nn.Module())) | {"forward", "state_dict", "load_state_dict"}  # what torch and we keep there
_VALUES = (int, float, str, type(None), bool, complex, bytes)
_NONE: frozenset[str] = frozenset()
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
FEW, SMALL, DEEP = 64, 1 << 22, 4  # items and entries that every look reads; how far attributes of attributes go


@codec.hides_values
@dataclass(frozen=True)
class Mark:
    """A tensor as it was: where it lay, how often torch had written it, and its content."""

    tensor: Tensor
    place: tuple[int, int]
    digest: Any


class Steady:
    """The state of a module at one time. `moving` is stepped by us: of it, only that it lies where it lay.

    `check` reads small tensors and everything's place; `check(full=True)` reads all.
    """

    def __init__(self, model: nn.Module, moving: Collection[Tensor] = (), doing: str = "", fix: str = "") -> None:
        self.model, self.moving = model, {id(tensor) for tensor in moving}
        self.doing, self.fix = doing, fix
        self.marks: dict[str, Any] = {}
        self.note()

    def note(self) -> None:
        """From now on, this is how it was."""
        self.marks = {name: self._mark(item) for name, item in kept(self.model, full=True)}

    def note_tensors(self, tensors: Collection[Tensor]) -> None:
        """These are now as they are."""
        stepped = {id(tensor) for tensor in tensors}
        for name, mark in self.marks.items():
            if isinstance(mark, Mark) and id(mark.tensor) in stepped:
                self.marks[name] = self._mark(mark.tensor)

    def note_values(self) -> bool:
        """Numbers and words anew: a loop may set them between passes, as a schedule does. Whether it has."""
        now = {name: item for name, item in kept(self.model) if isinstance(item, _VALUES)}
        changed = any(name not in self.marks or self.marks[name] != item for name, item in now.items())
        self.marks.update(now)
        return changed

    def check(self, full: bool = False) -> None:
        """Refuse what is not as it was."""
        seen = 0
        for name, item in kept(self.model, full):
            seen += 1
            if name not in self.marks or not self._same(self.marks[name], item, full):
                raise self._refusal(name)
        if full and seen != len(self.marks):
            raise self._refusal(min(self.marks.keys() - {name for name, _ in kept(self.model, full)}))

    def _mark(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item if isinstance(item, _VALUES) else digest(item)
        return Mark(item, _place(item), None if id(item) in self.moving else digest(item))

    def _same(self, mark: Any, item: Any, full: bool) -> bool:
        if isinstance(item, Tensor) and isinstance(mark, Mark):
            if id(item) in self.moving or id(mark.tensor) in self.moving:
                return item is mark.tensor and _place(item)[0] == mark.place[0]
            large = item.numel() > SMALL and not full
            return (large and item is mark.tensor and _place(item) == mark.place) or digest(item) == mark.digest
        if isinstance(item, (Tensor, np.ndarray)):
            return bool(digest(item) == mark)
        return bool(item == mark) or (item != item and mark != mark)  # nan stays nan

    def _refusal(self, name: str) -> PlanError:
        needed = "a model that keeps nothing of the records it saw: no noise is added there"
        return PlanError("state", f"{name}, which changed {self.doing}", needed, self.fix)


def _place(tensor: Tensor) -> tuple[int, int]:
    return (0, 0) if _wrapped(tensor) else (tensor.data_ptr(), tensor._version)


def _wrapped(tensor: Tensor) -> bool:
    """Without memory of its own: inside vmap or grad, sparse, meta."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.layout != torch.strided or tensor.is_meta


def digest(item: Any) -> Any:
    """The content of a tensor or an array; what has none that can be read is told apart by what it is."""
    if isinstance(item, Tensor):
        if _wrapped(item):
            return id(item)
        array = _array(item.detach())
        return item.dtype, array.shape, content(array)
    return id(item) if item.dtype.hasobject else (item.dtype, item.shape, content(np.ascontiguousarray(item)))


def _array(tensor: Tensor) -> Any:
    """A tensor's memory as numpy sees it; types that numpy lacks as bytes."""
    if not tensor.is_contiguous() or not tensor.is_cpu:
        tensor = tensor.cpu().contiguous()
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):  # bfloat16 and its kin, bits not yet conjugated
        return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()


def content(array: Any) -> int:
    """The digest of what an array holds."""
    if array.nbytes < 8 * BLOCK:
        return zlib.crc32(array)
    memory = array.reshape(-1).view(np.uint8)
    whole = len(memory) // (8 * BLOCK) * (8 * BLOCK)
    words = memory[:whole].view(np.int64).reshape(-1, BLOCK)
    return zlib.crc32((words @ _KEY).tobytes(), zlib.crc32(memory[whole:]))


def kept(model: nn.Module, full: bool = False) -> Iterator[tuple[str, Any]]:
    """Everything a module holds, by name: parameters, buffers, and the values, tensors and arrays of attributes."""
    known: set[int] = set()
    yield from _of_module(model, "", full, known)


def _of_module(model: nn.Module, prefix: str, full: bool, known: set[int]) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules(prefix=prefix):
        if id(module) in known:
            continue
        known.add(id(module))
        dot = f"{path}." if path else ""
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in known:
                    known.add(id(tensor))
                    yield f"{kind} '{dot}{name}'", tensor
        derived = _derived(module)
        for name, item in vars(module).items():
            if name not in _OWN and name not in derived:
                yield from _of_attribute(f"attribute '{dot}{name}'", item, full, known, DEEP)


def _derived(module: nn.Module) -> frozenset[str]:
    """Attributes that torch itself computes from the parameters."""
    if isinstance(module, nn.RNNBase):
        return frozenset({"_flat_weights"})
    hooks = module._forward_pre_hooks.values()
    return frozenset(hook.name for hook in hooks if isinstance(hook, WeightNorm)) if hooks else _NONE


def _of_attribute(name: str, item: Any, full: bool, known: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(item, _VALUES):
        yield name, item
        return
    if id(item) in known or not depth or isinstance(item, _OPAQUE):
        return
    if isinstance(item, nn.Module):
        yield from _of_module(item, name.split("'", 1)[1].replace("'", ""), full, known)
        return
    known.add(id(item))
    if isinstance(item, (Tensor, np.ndarray)):
        yield name, item
        return
    inside = _inside(item)
    if inside is None:
        return
    yield f"{name}, its length", len(inside)
    if full or len(inside) <= FEW:
        for key, part in inside.items():
            yield from _of_attribute(f"{name}[{key!r}]", part, full, known, depth - 1)


def _inside(item: Any) -> dict[Any, Any] | None:
    """What a container, or an object with attributes, holds."""
    if isinstance(item, dict):
        return item
    if isinstance(item, (list, tuple, deque, set, frozenset)):
        return dict(enumerate(item))
    return getattr(item, "__dict__", None)
