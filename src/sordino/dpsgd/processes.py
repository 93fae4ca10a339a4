"""Private loops over many processes (torchrun): one batch, one clipped sum and one noise draw for all ranks.

    total = sum over ranks r of  sum_{j in rows, j mod size = r} g_j min(1, C / ||g_j||)     all-reduced in float64

g_j is the gradient of record j, C the clip norm and `size` the number of ranks. The rows of a batch are drawn once for
all ranks. A record's gradient is computed whole on one rank, so clipping needs no exchange. Noise is added to the sum
of all ranks, from one random stream that all ranks open: in simulation its key is a hash of the seed; with secure noise
rank 0 takes a new key from the operating system for each stream, and broadcasts it. So all ranks have the same weights,
and the release, its event and its cost are those of one process. For a model sharded by `fully_shard`, the optimizer of
a rank has that rank's part of parameters and state. Ranks exchange tensors and JSON, and unpickle nothing. Called by
dpsgd/private_loop.py, loader.py, account.py and optimizer.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sordino.errors import BudgetError, ConfigError, PlanError, RankError
from sordino.rng import Mode, Secure, Streams, streams

_KEY = 16  # bytes of a stream's key
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute of a model that DistributedDataParallel reads
_FIX = "remove DistributedDataParallel, or wrap the model before make_private and train the model that it returns"


@dataclass(frozen=True)
class Ranks:
    """Process group of a private loop; by default one process. All ranks must make the same calls."""

    rank: int = 0
    size: int = 1
    device: str | torch.device = "cpu"

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        """Return the default process group of torch.distributed; one process if the script initialised none."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), next(model.parameters()).device)

    def streams(self, mode: Mode, seed: int) -> Streams:
        """Return the random streams of a loop, which are the same on every rank."""
        return Secure(self._share_key) if mode == "secure" and self.size > 1 else streams(mode, seed)

    def seed_torch(self, random: Streams, loop: int) -> None:
        """Seed torch's generators differently on every rank: shared dropout masks would make records dependent."""
        name = os.urandom(16) if random.mode == "secure" else f"{random!r} {loop} {self.rank}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1)

    def own_pieces(self, rows: list[int], width: int | None) -> list[list[int]]:
        """Return this rank's part of a batch in pieces of at most `width` rows, equally many on every rank.

        The rank of a row is its number modulo the number of ranks, so no record changes ranks if another is removed.
        """
        parts = [[row for row in rows if row % self.size == rank] for rank in range(self.size)]
        own, longest = parts[self.rank], max(1, *map(len, parts))
        return [own[i : i + (width or longest)] for i in range(0, longest, width or longest)]

    def add(self, total: Tensor) -> None:
        """Replace a vector by its sum over all ranks."""
        if self.size > 1:
            self._together(dist.all_reduce, total)

    def compare(self, found: Mapping[str, Any]) -> None:
        """Refuse to continue if the values in this table are not the same on all ranks."""
        if self.size == 1:
            return
        digests = b"".join(hashlib.sha256(_text(item)).digest() for item in found.values())
        every = self._gather(bytes_tensor(digests).view(len(found), -1))
        for place, name in enumerate(found):
            other = next((rank for rank, own in enumerate(every) if not torch.equal(own[place], every[0][place])), None)
            if other is not None:
                fix = "run the same script and files on every rank, and seed all random initialisation"
                raise ConfigError(f"{name} on rank {other} that differ from rank 0", "the same on all ranks", fix)

    def gather(self, found: Any) -> list[Any]:
        """Return the JSON data that every rank passed to this call, by rank."""
        body = _text(found)
        most = max(length for (length,) in self.numbers(len(body)))
        every = self._gather(bytes_tensor(body.ljust(most)))
        return [json.loads(own.numpy().tobytes()) for own in every]

    def numbers(self, *own: int) -> list[list[int]]:
        """Return the whole numbers that every rank passed to this call, by rank."""
        return [found.tolist() for found in self._gather(torch.tensor(own))]

    def once(self, call: Callable[[], None]) -> None:
        """Call a function on rank 0 only; an error on rank 0 is raised on every rank."""
        error: Exception | None = None
        if self.rank == 0:
            try:
                call()
            except Exception as caught:
                error = caught
        refused = [] if self.size == 1 else self.gather([] if error is None else [str(error)])[0]
        if error is not None:
            raise error
        if refused:
            raise BudgetError(refused[0] or "rank 0 failed without a message; see its output")

    def _share_key(self, key: int) -> int:
        held = bytes_tensor(key.to_bytes(_KEY, "little")).to(self.device)
        self._together(dist.broadcast, held, src=0)
        return int.from_bytes(held.cpu().numpy().tobytes(), "little")

    def _gather(self, own: Tensor) -> list[Tensor]:
        own = own.to(self.device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        self._together(dist.all_gather, every, own)
        return [found.cpu() for found in every]

    def _together(self, call: Callable[..., object], *arguments: object, **options: object) -> None:
        try:
            call_collective(call, *arguments, **options)
        except RuntimeError as error:  # gloo and NCCL: a connection that closed, or nothing within the timeout
            reason = str(error).partition("\n")[0]
            raise RankError(f"rank {self.rank} of {self.size} lost another rank ({reason})", lost=True) from error


ALONE = Ranks()


def call_collective(call: Callable[..., object], *arguments: object, **options: object) -> None:
    """Call a collective of torch.distributed, and wait until gloo's threads have released its CPU tensors.

    A thread that releases a tensor while the interpreter ends aborts the process.
    """
    items = [one for item in arguments for one in (item if isinstance(item, list) else [item])]
    tensors: list[Any] = [one for one in items if isinstance(one, Tensor) and one.device.type == "cpu"]
    references = [one._use_count() for one in tensors]
    call(*arguments, **options)
    while any(one._use_count() > before for one, before in zip(tensors, references, strict=True)):
        time.sleep(0)


def bytes_tensor(body: bytes) -> Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _text(item: Any) -> bytes:
    return item if isinstance(item, bytes) else json.dumps(item, sort_keys=True, default=str).encode()


def weights_digest(model: nn.Module) -> bytes:
    """Return a hash of the names and values of a model's parameters and buffers."""
    found = hashlib.blake2b()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def group_options(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of an optimizer's parameter groups, without the parameters."""
    return [{name: item for name, item in group.items() if name != "params"} for group in groups]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel, since a private loop sums clipped gradients itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


class Shards:
    """Sharded parameters (`fully_shard`) of the optimizer, each with the whole parameter of the model.

    A record's gradient over all parameters is computed on one rank, so the whole model is gathered once, and after
    every step. The optimizer gets this rank's part of the noised gradient, and has state for that part only.
    """

    def __init__(self, model: nn.Module) -> None:
        """Replace the sharded parameters of a model by whole ones, and remove the hooks of `fully_shard`."""
        self.whole: dict[Tensor, nn.Parameter] = {}
        if not dist.is_available() or not dist.is_initialized():
            return
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        names = {p: name for name, p in model.named_parameters() if isinstance(p, DTensor)}
        for parameter, name in names.items():
            if parameter.device_mesh.mesh.tolist() != list(range(dist.get_world_size())):
                raise _sharding_error(f"parameter '{name}' on a mesh that is not one row of all ranks")
        parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if any(getattr(part._get_fsdp_state()._mp_policy, "param_dtype", None) is not None for part in parts):
            raise _sharding_error("a MixedPrecisionPolicy", "use torch.autocast in the loop")
        if names and not (parts and set(names) <= {p for part in parts for p in part.parameters()}):
            raise _sharding_error(f"parameter '{next(iter(names.values()))}', a DTensor that fully_shard did not make")
        for part in parts:
            _remove_sharding(part)
        for module in model.modules():
            for name, own in module._parameters.items():
                if isinstance(own, DTensor):
                    if own not in self.whole:
                        self.whole[own] = nn.Parameter(own.detach().full_tensor().clone(), own.requires_grad)
                    module._parameters[name] = self.whole[own]

    def of(self, parameter: Tensor) -> Tensor:
        """Return the model's whole parameter for a parameter of the optimizer."""
        return self.whole.get(parameter, parameter)

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, sharded like the optimizer's parameter."""
        if parameter not in self.whole:
            return whole
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter
        return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context of an optimizer step: weights are copied to the shards before, and gathered from all ranks after."""
        with torch.no_grad():
            for sharded, whole in self.whole.items():
                sharded.copy_(self.part(sharded, whole))
        yield
        with torch.no_grad():
            for sharded, whole in self.whole.items():
                whole.copy_(sharded.full_tensor())  # type: ignore[attr-defined]


def _remove_sharding(part: nn.Module) -> None:
    """Undo the changes that `fully_shard` made to a module: hooks, attributes and class."""
    state: Any = part._get_fsdp_state()  # type: ignore[operator]
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        handle.remove()
    for module in part.modules():
        hooks = module._load_state_dict_post_hooks
        for key in [key for key, hook in hooks.items() if "fsdp" in getattr(hook, "__module__", "")]:
            del hooks[key]
        for name in [name for name in vars(module) if name.startswith(("__composable_api", "_is_fsdp", "_fsdp_"))]:
            delattr(module, name)
    part.__class__ = type(part).__bases__[1]


def _sharding_error(found: str, fix: str = "use fully_shard over all ranks, or DistributedDataParallel") -> PlanError:
    return PlanError("processes", found, "a model that fully_shard has sharded over all ranks, in one precision", fix)


class _WrappingRefusal:
    """Attribute of a private model that makes DistributedDataParallel(model) raise an error; copies do not have it."""

    __slots__ = ()

    def __iter__(self) -> Any:
        raise wrapping_error()

    def __reduce__(self) -> Any:
        return tuple, ()

    def __deepcopy__(self, memo: Any) -> tuple[()]:
        return ()


def wrapping_error() -> PlanError:
    found = "a private model inside DistributedDataParallel, whose averaging has no effect since the step sets .grad"
    return PlanError("processes", found, "the model that make_private returned, on every rank", _FIX)


def refuse_wrapping(model: nn.Module) -> None:
    """Make DistributedDataParallel(model) raise an error from now on."""
    setattr(model, _IGNORED, _WrappingRefusal())


def allow_wrapping(model: nn.Module) -> None:
    """Allow DistributedDataParallel(model) again, after `refuse_wrapping`."""
    vars(model).pop(_IGNORED, None)


def refuse_active_wrapper(model: nn.Module) -> None:
    """Refuse a training pass inside DistributedDataParallel, or of a model that was sharded after make_private."""
    if DistributedDataParallel._active_ddp_module is not None:
        raise wrapping_error()
    if dist.is_initialized() and any("_is_fsdp_managed_module" in vars(part) for part in model.modules()):
        found, needed = "a private model that was sharded afterwards", "a model that is sharded before make_private"
        fix = "call fully_shard first, then make the optimizer, then make_private"
        raise PlanError("processes", found, needed, fix)
