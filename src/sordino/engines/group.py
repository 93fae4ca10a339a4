"""The ranks of one run, joined by torch.distributed: what they say to one another, and what the loss of one means."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from sordino.engines.ranks import MEETING, is_rank, is_watched
from sordino.errors import EngineError, RankError, SordinoError


def own_rank() -> int:
    """Which of the ranks this process is."""
    if dist.is_initialized():
        return dist.get_rank()
    if not is_rank():
        found, fix = "a process that is no rank", "sordino run --workers 2, or torchrun --nproc-per-node 2 ..."
        raise EngineError(found, "one started by torchrun, or by --workers", fix)
    return int(os.environ["RANK"])


@dataclass(frozen=True)
class Group:
    """All ranks. Every call is made by all of them; a rank that is lost raises `RankError` in the others."""

    rank: int
    size: int
    device: torch.device
    store: Any = None  # torch's; None where the script made the process group itself

    @property
    def backend(self) -> str:
        """NCCL where the model lies on a GPU, else gloo."""
        return backend_of(self.device)

    def tell(self, order: object) -> Any:
        """Rank 0's `order`, on every rank."""
        box = [order]
        self._together(dist.broadcast_object_list, box, src=0, device=self.device)
        return box[0]

    def share(self, vector: Tensor) -> Tensor:
        """Rank 0's `vector`, on every rank: written into theirs, without a detour through bytes."""
        here = vector.to(self.device).contiguous()
        self._together(dist.broadcast, here, src=0)
        return here

    def add(self, part: Tensor) -> Tensor:
        """The sum of all parts, in float64; true on rank 0 only."""
        self._together(dist.reduce, part, dst=0)
        return part

    def compare(self, print_: str) -> None:
        """Refuse ranks that do not run the same thing on the same data."""
        prints: list[str] = [""] * self.size
        self._together(dist.all_gather_object, prints, print_)
        other = next((rank for rank, found in enumerate(prints) if found != prints[0]), None)
        if other is not None:
            found = f"another plan, model or data on rank {other} than on rank 0"
            fix = "the same files on every machine; in a script, seed what is random before it is built"
            raise EngineError(found, "the same on every rank", fix)

    def _together(self, call: Callable[..., object], *arguments: object, **options: object) -> None:
        try:
            call(*arguments, **options)
        except RuntimeError as error:  # gloo and NCCL: a connection that closed, or nothing heard within the timeout
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> RankError:
        return self.lost("was not heard of in time" if "timed out" in str(error).lower() else "is gone")

    def lost(self, what: str) -> RankError:
        """Another rank has ended; with two of them it is known which."""
        other = f"rank {1 - self.rank} of 2" if self.size == 2 else f"one of {self.size} ranks"
        return RankError(f"{other} {what} (noticed by rank {self.rank})", lost=True, said=not self._first())

    def _first(self) -> bool:
        """Whether no other rank has reported yet, so that one sentence is printed; under `--workers` none is."""
        if is_watched() or self.store is None:
            return not is_watched()
        try:
            return bool(self.store.compare_set("failed", "", str(self.rank)) == str(self.rank).encode())
        except RuntimeError:  # the store went down with its host
            return True

    @contextmanager
    def own_work(self, where: str) -> Iterator[None]:
        """Whatever fails in here is this rank's own doing; it is said with its number."""
        try:
            yield
        except SordinoError:
            raise
        except Exception as error:
            self._first()
            reason = f"{type(error).__name__}: {error}"
            raise RankError(f"rank {self.rank} of {self.size} failed in {where} ({reason})") from error


def backend_of(device: torch.device) -> str:
    """How tensors of a device travel."""
    return "nccl" if device.type == "cuda" else "gloo"


@cache
def join(device: torch.device, timeout: float) -> Group:
    """Meet the other ranks, once per process; `timeout` is how long one waits for another in one call."""
    rank = own_rank()  # refuses a process that is none
    if dist.is_initialized():
        return Group(rank, dist.get_world_size(), device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        group = _met(device, timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RankError(f"rank {rank} did not meet the others ({reason})") from error
    if rank == 0 and not is_watched():
        _hear(group)
    return group


def _met(device: torch.device, patience: timedelta) -> Group:
    """In the file of `--workers`, or where torchrun says; torchrun keeps its store when it starts ranks anew."""
    where, place = os.environ.get(MEETING, "env://"), (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    store, rank, size = next(iter(rendezvous(where, *place, timeout=patience)))
    store.set_timeout(patience)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"sordino/{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend_of(device), store=store, rank=rank, world_size=size, timeout=patience)
    return Group(rank, size, device, store)


def _hear(group: Group) -> None:
    """torchrun ends the ranks that are left when one has failed: say so, where nobody else listens for it."""

    def told(*_: object) -> None:
        raise group.lost("has ended, or this one was told to")

    alone = threading.current_thread() is threading.main_thread()
    if alone and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, told)
