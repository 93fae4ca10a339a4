"""The ranks of one distributed run: environment, joining, broadcast, reduce, and the loss of a rank.

Built on torch.distributed; called by engines/distributed.py and runs/launch.py.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from sordino.engines.rank_environment import MEETING, is_rank, is_watched
from sordino.errors import EngineError, RankError, SordinoError

ANSWER = 20.0  # seconds within which a store that listens answers, however busy the machine


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

    def tell(self, body: bytes) -> None:
        """Rank 0's words, to every rank: how many bytes, then the bytes. They are never unpickled."""
        self._together(dist.broadcast, torch.tensor([len(body)], device=self.device), src=0)
        self._together(dist.broadcast, _bytes(body).to(self.device), src=0)

    def hear(self, most: int) -> bytes:
        """What rank 0 tells; more bytes than there can be are not waited for."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._together(dist.broadcast, length, src=0)
        if not 0 < int(length) <= most:
            raise self.misheard("an order of a length that none has")
        body = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._together(dist.broadcast, body, src=0)
        return body.cpu().numpy().tobytes()

    def misheard(self, what: str) -> RankError:
        """Something else than a rank of this run has spoken."""
        return RankError(f"rank {self.rank} of {self.size} was sent {what}: is a stranger on its network?")

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
        own = _bytes(bytes.fromhex(print_)).to(self.device)
        prints = [torch.empty_like(own) for _ in range(self.size)]
        self._together(dist.all_gather, prints, own)
        other = next((rank for rank, found in enumerate(prints) if not torch.equal(found, prints[0])), None)
        if other is not None:
            found = f"another plan, model or data on rank {other} than on rank 0"
            fix = "the same files on every machine; in a script, seed what is random before it is built"
            raise EngineError(found, "the same on every rank", fix)

    def _together(self, call: Callable[..., object], *arguments: object, **options: object) -> None:
        try:
            call(*arguments, **options)
        except RuntimeError as error:  # gloo and NCCL: a connection that closed, or nothing heard within the timeout
            late = "timed out" in str(error).lower()
            raise self.lost("was not heard of in time" if late else "is gone") from error

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


def _bytes(body: bytes) -> Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


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
        group = _met(device, timeout)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            reason = f"port {os.environ['MASTER_PORT']} is in use: choose another one, torchrun's --master-port"
        raise RankError(f"rank {rank} did not meet the others ({reason})") from error
    atexit.register(_leave)
    if rank == 0 and not is_watched():
        _hear(group)
    return group


def _leave() -> None:
    """Before the interpreter goes: threads of a group that is still there then end the process with SIGABRT."""
    with suppress(RuntimeError, ValueError):  # the script has done so itself, or a rank is gone
        dist.destroy_process_group()


def _store(patience: timedelta) -> tuple[Any, int, int]:
    """The ranks' store, own rank and count of ranks: in the file of `--workers`, or where torchrun says."""
    where, place = os.environ.get(MEETING, "env://"), (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if where == "env://" and place[0] != 0:
        _answered(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), patience.total_seconds())
    store, rank, size = next(iter(rendezvous(where, *place, timeout=patience)))
    store.set_timeout(patience)
    return store, rank, size


def _answered(host: str, port: int, patience: float) -> None:
    """Rank 0 may be late, but whoever listens there must answer as a store does: torch itself would wait for ever."""
    until, met = time.monotonic() + patience, threading.Event()
    while True:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=ANSWER).close()
            break
        if time.monotonic() > until:
            raise RuntimeError(f"nobody listens at {host}:{port}")
        time.sleep(0.1)

    def greet() -> None:
        with suppress(RuntimeError):
            dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ANSWER)).num_keys()  # type: ignore[attr-defined]
            met.set()

    threading.Thread(target=greet, daemon=True).start()
    if not met.wait(ANSWER):
        fix = "choose another port, torchrun's --master-port"
        raise RuntimeError(f"what listens at {host}:{port} is not rank 0: {fix}")


def _met(device: torch.device, timeout: float) -> Group:
    """All ranks, joined; torchrun keeps its store when it starts ranks anew."""
    patience = timedelta(seconds=timeout)
    store, rank, size = _store(patience)
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
