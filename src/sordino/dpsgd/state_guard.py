"""Guards that refuse a model which changed between private steps other than by the private optimizer.

A module may store records anywhere: in frozen parameters, in buffers of any type, in tensors, arrays and numbers among
its attributes; and a write through `.data` or numpy does not change a tensor's version counter. So contents are
compared, by a digest of the memory of every tensor t:

    digest(t) = for every block of the memory, the sum of its 8-byte words times random odd numbers, modulo 2^64

One changed word always changes the sum of its block; several changes cancel with probability about 2^-63. Tensors on an
accelerator are summed there, and all their sums are compared by one read. Used by dpsgd/recording.py, and between
clients by engines/objectives.py.
"""

from __future__ import annotations

import logging
import os
import types
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.weight_norm import WeightNorm

from sordino import codec
from sordino.errors import PlanError

_LOG = logging.getLogger("sordino")
BLOCK = 4096
_KEY = np.frombuffer(os.urandom(8 * BLOCK), dtype=np.int64) | 1  # random odd numbers of the digest
_OWN = frozenset(vars(nn.Module())) | {"forward", "state_dict", "load_state_dict"}  # attributes of torch and Sordino
_VALUES = (int, float, str, type(None), bool, complex, bytes)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
FEW, SMALL, DEEP = 64, 1 << 22, 4  # items, and entries of tensors, that every check reads; depth of nested attributes


@codec.hides_values
@dataclass(frozen=True)
class TensorDigest:
    """Reference of a tensor: its address and version counter (`place`), and the digest of its content."""

    tensor: Tensor
    place: tuple[int, int]
    digest: Any


class StateGuard:
    """Guard that compares a module's state with a reference; of trained (`moving`) tensors only the address.

    `check` reads the content of small tensors and all addresses; `check(full=True)` reads all contents.
    """

    def __init__(self, model: nn.Module, moving: Collection[Tensor] = (), doing: str = "", fix: str = "") -> None:
        self.model, self.moving = model, {id(tensor) for tensor in moving}
        self.doing, self.fix = doing, fix
        self.marks: dict[str, Any] = {}
        self.note()

    def note(self) -> None:
        """Store the module's present state as the reference for later checks."""
        self.marks = {name: self._mark(item) for name, item in module_state(self.model, full=True)}

    def note_tensors(self, tensors: Collection[Tensor]) -> None:
        """Store the present content of these tensors as the reference."""
        stepped = {id(tensor) for tensor in tensors}
        for name, mark in self.marks.items():
            if isinstance(mark, TensorDigest) and id(mark.tensor) in stepped:
                self.marks[name] = self._mark(mark.tensor)

    def note_values(self) -> bool:
        """Accept numbers and strings that the loop changed between passes (a schedule); return whether it did."""
        now = {name: item for name, item in module_state(self.model) if isinstance(item, _VALUES)}
        changed = any(name not in self.marks or self.marks[name] != item for name, item in now.items())
        self.marks.update(now)
        return changed

    def check(self, full: bool = False, also: DeviceChecks | None = None) -> None:
        """Refuse a module whose state differs from the reference; add checks on an accelerator to `also` if given."""
        checks = DeviceChecks() if also is None else also
        seen = 0
        for name, item in module_state(self.model, full):
            seen += 1
            same = name in self.marks and self._same(self.marks[name], item, full)
            if isinstance(same, Tensor):
                checks.add(same, partial(self._refusal, name))
            elif not same:
                raise self._refusal(name)
        if also is None:
            checks.read()
        if full and seen != len(self.marks):
            raise self._refusal(min(self.marks.keys() - {name for name, _ in module_state(self.model, full)}))

    def _mark(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item if isinstance(item, _VALUES) else digest(item)
        return TensorDigest(item, _place(item), None if id(item) in self.moving else digest(item))

    def _same(self, mark: Any, item: Any, full: bool) -> bool | Tensor:
        if isinstance(item, Tensor) and isinstance(mark, TensorDigest):
            if id(item) in self.moving or id(mark.tensor) in self.moving:
                return item is mark.tensor and _place(item)[0] == mark.place[0]
            large = item.numel() > SMALL and not full
            return (large and item is mark.tensor and _place(item) == mark.place) or _same_digest(item, mark.digest)
        if isinstance(item, (Tensor, np.ndarray)):
            return _same_digest(item, mark)
        return bool(item == mark) or (item != item and mark != mark)  # nan stays nan

    def _refusal(self, name: str) -> PlanError:
        needed = "a model that stores no records: stored records would be released without noise"
        if "'_original_forward'" in name:  # accelerator.prepare has wrapped the model's forward in autocast
            found, needed = f"{name}, which accelerate's mixed precision sets", "the model's own forward"
            fix = 'use Accelerator(mixed_precision="no"), and torch.autocast in the loop or a model in bfloat16'
            return PlanError("state", found, needed, fix)
        return PlanError("state", f"{name}, which changed {self.doing}", needed, self.fix)


class DeviceChecks:
    """Pending check results on an accelerator; `read` copies all of them to the host at once."""

    def __init__(self) -> None:
        self.passed: list[Tensor] = []
        self.refusals: list[Callable[[], Exception]] = []

    def add(self, passed: Tensor, refusal: Callable[[], Exception]) -> None:
        """Add a check: a tensor of one boolean, and the error to raise if it is False."""
        self.passed.append(passed)
        self.refusals.append(refusal)

    def read(self) -> None:
        """Raise the error of the first check that failed."""
        found = torch.stack(self.passed).tolist() if self.passed else []
        for passed, refusal in zip(found, self.refusals, strict=True):
            if not passed:
                raise refusal()


def _same_digest(item: Any, before: Any) -> bool | Tensor:
    now = digest(item)
    if isinstance(now, tuple) and isinstance(now[2], Tensor):
        alike = isinstance(before, tuple) and now[:2] == before[:2] and isinstance(before[2], Tensor)
        return now[2] == before[2] if alike and now[2].device == before[2].device else False
    return bool(now == before)


def _place(tensor: Tensor) -> tuple[int, int]:
    return (0, 0) if _has_no_memory(tensor) else (tensor.data_ptr(), tensor._version)


def _has_no_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's memory cannot be read, as inside vmap or grad, or of a sparse or meta tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.layout != torch.strided or tensor.is_meta


def digest(item: Any) -> Any:
    """Return dtype, shape and content digest of a tensor or array; its id() if the content cannot be read."""
    if isinstance(item, Tensor):
        if _has_no_memory(item):
            return id(item)
        if not item.is_cpu:
            return item.dtype, item.shape, _device_digest(item.detach())
        array: Any
        tensor = item.detach().contiguous()
        try:
            array = tensor.numpy()
        except (TypeError, RuntimeError):  # bfloat16 and other types that numpy lacks, bits not yet conjugated
            array = tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
    elif item.dtype.hasobject:
        return id(item)
    else:
        array = np.ascontiguousarray(item)
    if array.nbytes < 8 * BLOCK:
        return item.dtype, array.shape, zlib.crc32(array)
    memory = array.reshape(-1).view(np.uint8)
    whole = len(memory) // (8 * BLOCK) * (8 * BLOCK)
    words = memory[:whole].view(np.int64).reshape(-1, BLOCK)
    return item.dtype, array.shape, zlib.crc32((words @ _KEY).tobytes(), zlib.crc32(memory[whole:]))


def _device_digest(tensor: Tensor) -> Tensor:
    """Return a keyed digest of a tensor, computed on its accelerator.

    In blocks, 8-byte words are multiplied by the words of a secret key and summed; the sums are treated the same way
    until one is left.
    """
    memory = tensor.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    words = F.pad(memory, (0, -len(memory) % 8)).view(torch.int64)
    key = torch.from_numpy(_KEY).to(tensor.device)
    while len(words) > 1:
        chunks = [F.pad(chunk, (0, -len(chunk) % BLOCK)).view(-1, BLOCK) for chunk in torch.split(words, BLOCK * BLOCK)]
        words = torch.cat([(chunk * key).sum(1) for chunk in chunks])
    return words.sum()


def module_state(
    model: nn.Module, full: bool = False, prefix: str = "", known: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield name and value of all state of a module: parameters, buffers, and what its attributes hold."""
    known = set() if known is None else known
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
        derived = {"_flat_weights"} if isinstance(module, nn.RNNBase) else set()  # torch computes them from parameters
        derived |= {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)}
        for name, item in vars(module).items():
            if name not in _OWN and name not in derived:
                yield from _of_attribute(f"attribute '{dot}{name}'", item, full, known, DEEP)


def _of_attribute(name: str, item: Any, full: bool, known: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(item, _VALUES):
        if not (item is True and name.endswith("'_is_accelerate_prepared'")):  # accelerator.prepare sets that flag
            yield name, item
        return
    if id(item) in known or not depth or isinstance(item, _OPAQUE):
        return
    if isinstance(item, nn.Module):
        yield from module_state(item, full, name.split("'", 1)[1].replace("'", ""), known)
        return
    known.add(id(item))
    if isinstance(item, (Tensor, np.ndarray)):
        yield name, item
        return
    inside = dict(enumerate(item)) if isinstance(item, (list, tuple, deque, set, frozenset)) else item
    inside = inside if isinstance(inside, dict) else getattr(item, "__dict__", None)
    if inside is None:
        return
    yield f"{name}, its length", len(inside)
    if full or len(inside) <= FEW:
        for key, part in inside.items():
            yield from _of_attribute(f"{name}[{key!r}]", part, full, known, depth - 1)


_FIX = (
    "remove it, or freeze it in eval mode; build it before make_private if the first pass builds it; "
    "change weights in the step of the optimizer that you pass in, or by model.load_state_dict"
)


class GuardedMethod:
    """Method of a model with callbacks before and after it; copies and pickles have the plain method."""

    def __init__(self, model: nn.Module, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.model, self.name, self.before, self.after = model, name, before, after
        self.plain: Callable[..., Any] = getattr(model, name)
        setattr(model, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.before()
        found = self.plain(*args, **kwargs)
        self.after()
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(getattr(type(self.model), self.name), memo.get(id(self.model), self.model))

    def __reduce__(self) -> Any:
        return getattr, (self.model, self.name)


class ModelGuard:
    """Guard against changes of a model outside private steps, which checks at every step and `state_dict`."""

    def __init__(self, model: nn.Module, stepped: Iterable[Tensor]) -> None:
        self.state, self.stepped = StateGuard(model, doing="without a step of the private optimizer", fix=_FIX), stepped
        self.inside = 0  # number of running passes: state that they load is not the user's
        self.on_export: Callable[[], None] = lambda: None  # called at every state_dict
        calls = {"state_dict": (self._export, lambda: None), "load_state_dict": (lambda: None, self.accept)}
        self.methods = [GuardedMethod(model, name, *calls[name]) for name in calls if name not in vars(model)]

    def check(self, full: bool = True, also: DeviceChecks | None = None) -> None:
        """Refuse a model that changed without a step of the private optimizer."""
        if self.methods:
            self.state.check(full, also)

    def _export(self) -> None:
        self.check()
        self.on_export()

    def accept(self) -> None:
        """Store the present state as the reference, after the user loaded a checkpoint."""
        if not self.inside:
            self.state.note()

    def stepped_on(self) -> None:
        """Store the present weights as the reference, after a private step."""
        self.state.note_tensors(list(self.stepped))

    def remove(self) -> None:
        """Remove the guard, after a last check of the model."""
        self.check()
        for method in self.methods:
            delattr(method.model, method.name)
        self.methods = []


class GradientChangeWarning:
    """Warning, given once, if the loop changes .grad between backward() and step(), which has no effect.

    During a private loop .grad holds nothing of the batch: gradients are recorded record by record, and step()
    replaces .grad by the noised mean. So the smallest trained parameter gets a .grad of zeros in place of None: its
    version counter shows a change in place (clip_grad_norm_ always multiplies), and its identity a replacement. A
    change of other parameters' gradients alone is not detected.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.watched = min(parameters, key=lambda p: p.numel(), default=None)
        self.zeros: Tensor | None = None  # the .grad that replaced None
        self.before: tuple[Tensor, int] | None = None  # the .grad after the backward pass, and its version
        self.warned = False

    def begin(self) -> None:
        """Store .grad and its version after a backward pass."""
        if self.watched is None or not self.watched.requires_grad:
            return
        if self.watched.grad is None:
            self.zeros = self.watched.grad = torch.zeros_like(self.watched)
        self.before = self.watched.grad, self.watched.grad._version

    def end(self) -> None:
        """Warn before a step if .grad was changed since the backward pass, and remove the zeros."""
        before, self.before = self.before, None
        if before is None or self.watched is None:
            return
        now = self.watched.grad
        changed = now is not None and (now is not before[0] or now._version != before[1])
        if changed and not self.warned:
            self.warned = True
            _LOG.warning(
                "The gradients were changed between backward() and step(), for instance by clip_grad_norm_."
                " That has no effect: a private step clips every record's gradient to clip_norm= of make_private, and "
                "sets .grad itself, noised. Remove the call; to clip tighter, lower clip_norm=."
            )
        if now is self.zeros:
            self.watched.grad = None
        self.zeros = None
