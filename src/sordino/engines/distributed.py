"""Distributed engine: every rank (process) runs a share of the cohort, and one reduction per round sums all shares.

    cohort and model  --broadcast-->  rank r: sum of its clients' messages  --reduce-->  rank 0: total

Built on torch.distributed; used by engines/base.py. Rank 0 alone draws the cohort and the noise of a release, charges
the round, updates the model and writes files. The other ranks draw only a client's own random numbers: its batches, its
dropout, and the noise that a local solver adds.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from heapq import heapreplace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from sordino.data.clients import Records
from sordino.data.metrics import figures
from sordino.dpsgd.processes import bytes_tensor, call_collective
from sordino.engines.base import CPU, ClientJob, Collected, Engine, Worker
from sordino.engines.inprocess import InProcess, InProcessWorker, update_figures
from sordino.engines.messages import END, Limits, Order
from sordino.errors import DataError, EngineError, RankError, SordinoError
from sordino.plan import Plan
from sordino.rng import Streams
from sordino.task import Task, sums_of
from sordino.version import RANK, RENDEZVOUS

STORE_SECONDS = 20.0  # within which torch's store replies on a busy machine


class Served(SystemExit):
    """SystemExit raised in ranks other than 0 when the run is over; the process ends with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Distributed(Engine):
    """Engine in which every rank runs its share of each cohort as the `InProcess` engine does.

    The processes are started by torchrun or `sordino run --workers`. Rank 0 runs the whole script; in the other ranks
    `prepare` computes rank 0's requests and then ends the process (`Served`).
    Guarantee: with the same seed the result is that of `InProcess` up to the rounding of a sum (1e-5), for any number
    of ranks, because every random stream is keyed by (round, purpose, client). The certificate is the same.
    Like `InProcess` this engine simulates a secure sum and a shuffler: all ranks belong to one operator, and a rank's
    partial sum is as sensitive as the records that it was computed from.
    """

    each: InProcess = field(default_factory=InProcess)
    threads: int = 1
    timeout: float = 3600.0  # seconds one rank waits for another: a slow client is not a dead one

    @property
    def offers(self) -> frozenset[str]:
        return self.each.offers - {"client_state", "preparation"}  # a client may be on another rank in another round

    @property
    def leads(self) -> bool:
        return own_rank() == 0

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> Rank:
        """Join the other ranks; return the run's worker on rank 0, and never return on the others."""
        torch.set_num_threads(self.threads)
        group = join(task.device, self.timeout)
        group.compare(_fingerprint(plan, task, streams))
        rank = Rank(group, self.each.prepare(plan, task, streams))
        if group.rank != 0:
            rank.serve()
            raise Served
        return rank


def _fingerprint(plan: Plan, task: Task, streams: Streams) -> bytes:
    """Return a SHA-256 that must agree on all ranks: of plan, partition, model, a sample of the records, and seed."""
    clients, found = task.clients, hashlib.sha256(f"{plan.hash} {streams.mode}".encode())
    found.update(str(getattr(streams, "seed", "")).encode())
    x, y = clients.records.x, clients.records.y
    tensors = [x[:: len(x) // 1024 + 1], y[:: len(y) // 1024 + 1], *task.model.state_dict().values()]
    for table in (clients.offsets, clients.index, *(tensor.detach().cpu().numpy() for tensor in tensors)):
        found.update(np.ascontiguousarray(table).tobytes())
    return found.digest()


def equal_shares(loads: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """Assign a cohort's positions to ranks: largest load first, each to the rank with the least load so far.

    The largest load is within 4/3 of the optimum (Graham 1969). Ties go to the earlier client and the lower rank.
    """
    owner, busy = np.empty(len(loads), dtype=np.int64), [(0, rank) for rank in range(ranks)]
    for place in np.argsort(-loads, kind="stable"):
        load, rank = busy[0]
        heapreplace(busy, (load + int(loads[place]), rank))
        owner[place] = rank
    return [np.flatnonzero(owner == rank) for rank in range(ranks)]


class Rank(Worker):
    """Worker of one rank; rank 0's worker is called by the training loop and sends requests to the other ranks."""

    def __init__(self, group: Group, worker: InProcessWorker) -> None:
        self.group, self.worker = group, worker
        self.task = self.device_task = task = worker.task  # on the worker's device; ranks talk through the group's
        sizes, read = np.diff(task.clients.offsets), worker.plan.local.records_read
        self.costs = np.asarray([1 + read(int(size)) for size in sizes], dtype=np.int64)  # public sizes
        self.idle = True  # between two orders: the other ranks wait for the next one

    @property
    def header(self) -> dict[str, str | int]:
        own: dict[str, str | int] = {"engine": "distributed", "workers": self.group.size, "backend": self.group.backend}
        return {**self.worker.header, **own}

    # ---- rank 0 -----------------------------------------------------------------------------------------------------

    def collect(self, job: ClientJob) -> Collected:
        total, rest = self._lead(Order(job.public.on(CPU), job.cohort), job.start)
        norms = [rest[1:].cpu()] if len(job.cohort) else []
        diagnostics = update_figures(norms, job.public.clip_norm)
        return Collected(total, int(rest[0]), diagnostics, noised=self.worker.own_noise)

    def evaluate(self, model: Tensor) -> dict[str, float]:
        """Evaluate the test records, divided among the ranks; rank 0 evaluates all where metrics need all outputs."""
        if self.task.test is None:
            return {}
        if self.task.metrics:
            return self.task.evaluate(model)
        return figures(self._lead(Order(), model)[0].cpu())

    def close(self) -> None:
        """End the other ranks; after a failure nothing is sent, and the other ranks see the closed connection."""
        if self.idle:
            with suppress(RankError):  # a rank that is gone is not needed any more
                self.group.send(END)

    def _lead(self, order: Order, vector: Tensor) -> tuple[Tensor, Tensor]:
        self.idle = False
        self.group.send(order.to_bytes())
        done = self._do(order, self.group.share(vector))
        self.idle = True
        return done

    # ---- every rank -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Compute rank 0's requests until rank 0 ends the run."""
        limits = Limits(self.task.clients.population, self.task.layout.size)
        while True:
            try:
                order = limits.read(self.group.receive(limits.most))
            except DataError:
                raise self.group.bad_message("bytes that are no order") from None
            if order is None:
                return
            if order.public is not None:  # it was read on the CPU
                order = replace(order, public=order.public.on(self.group.device))
            self._do(order, self.group.share(torch.empty(self.task.layout.size)))

    def _do(self, order: Order, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one request; return the sums over all ranks (messages, norms), which are complete on rank 0 only."""
        if order.public is None or order.cohort is None:
            parts = self._evaluate_share(vector)
        else:
            parts = self._run_share(ClientJob(order.public, vector, order.cohort))
        both = self.group.add(torch.cat(parts))
        return both[: len(parts[0])], both[len(parts[0]) :]

    def _run_share(self, job: ClientJob) -> tuple[Tensor, Tensor]:
        """Return this rank's sum of messages, and a vector of its number of clients followed by their update norms."""
        cut = equal_shares(self.costs[job.cohort], self.group.size)
        before, own = sum(map(len, cut[: self.group.rank])), job.cohort[cut[self.group.rank]]
        with self.group.own_work(f"round {job.public.t + 1}"):
            total, norms = self.worker.fold(replace(job, cohort=own))
        total = total.to(self.group.device)
        rest = total.new_zeros(1 + len(job.cohort))
        rest[0] = len(own)
        if norms:
            rest[1 + before : 1 + before + len(own)] = torch.cat(norms)
        return total, rest

    def _evaluate_share(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums of metrics over this rank's test records; zeros for a rank without test records."""
        test = self.task.test
        assert test is not None
        cut = zip(*(side.tensor_split(self.group.size) for side in (test.x, test.y)), strict=True)
        own = Records(*list(cut)[self.group.rank])
        with self.group.own_work("the evaluation"):
            some = own if len(own) else Records(test.x[:1], test.y[:1])
            found = sums_of(self.task.at(vector), some, self.task.program.losses)
        sums = (found if len(own) else torch.zeros_like(found)).to(self.group.device)
        return sums, sums.new_empty(0)


# ---- the group of ranks ---------------------------------------------------------------------------------------------


def own_rank() -> int:
    """Return the rank of this process; refuse a process that neither torchrun nor --workers started."""
    if dist.is_initialized():
        return dist.get_rank()
    if not os.environ.keys() >= RANK:
        fix = "run `sordino run --workers 2`, or `torchrun --nproc-per-node 2 ...`"
        raise EngineError("a process without a rank", "a process that torchrun or --workers started", fix)
    return int(os.environ["RANK"])


@dataclass(frozen=True)
class Group:
    """Process group of all ranks. Every rank makes every call; if a rank ends, the others raise `RankError`."""

    rank: int
    size: int
    device: torch.device
    store: Any = None  # key-value store of torch.distributed; None if the script made the process group itself

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def send(self, body: bytes) -> None:
        """Send bytes from rank 0 to every rank, their length first; nothing is pickled."""
        self._together(dist.broadcast, torch.tensor([len(body)], device=self.device), src=0)
        self._together(dist.broadcast, bytes_tensor(body).to(self.device), src=0)

    def receive(self, most: int) -> bytes:
        """Receive rank 0's bytes; refuse more than `most` of them before they arrive."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._together(dist.broadcast, length, src=0)
        if not 0 < int(length) <= most:
            raise self.bad_message("an order of an impossible length")
        body = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._together(dist.broadcast, body, src=0)
        return body.cpu().numpy().tobytes()

    def bad_message(self, what: str) -> RankError:
        found = f"rank {self.rank} of {self.size} received {what}"
        return RankError(f"{found}; check that no other program uses its network port")

    def share(self, vector: Tensor) -> Tensor:
        """Broadcast rank 0's `vector` into the vectors of the other ranks."""
        here = vector.to(self.device).contiguous()
        self._together(dist.broadcast, here, src=0)
        return here

    def add(self, part: Tensor) -> Tensor:
        """Sum a float64 vector over all ranks; only rank 0 receives the result."""
        self._together(dist.reduce, part, dst=0)
        return part

    def compare(self, fingerprint: bytes) -> None:
        """Refuse ranks whose fingerprints of plan, model and data differ."""
        own = bytes_tensor(fingerprint).to(self.device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        self._together(dist.all_gather, every, own)
        other = next((rank for rank, found in enumerate(every) if not torch.equal(found, every[0])), None)
        if other is not None:
            found = f"another plan, model or data on rank {other} than on rank 0"
            fix = "use the same files on every machine; in a script, seed torch before building model and data"
            raise EngineError(found, "the same plan, model and data on every rank", fix)

    def _together(self, call: Callable[..., object], *arguments: object, **options: object) -> None:
        try:
            call_collective(call, *arguments, **options)
        except RuntimeError as error:  # gloo and NCCL: a connection that closed, or nothing within the timeout
            late = "timed out" in str(error).lower()
            raise self.lost("was not heard of in time" if late else "is gone") from error

    def lost(self, what: str) -> RankError:
        other = f"rank {1 - self.rank} of 2" if self.size == 2 else f"one of {self.size} ranks"
        return RankError(f"{other} {what} (noticed by rank {self.rank})", lost=True, said=not self._is_first())

    def _is_first(self) -> bool:
        """Return whether this rank is the first to report an error and may print it; always False under `--workers`."""
        if RENDEZVOUS in os.environ:
            return False
        if self.store is None:
            return True
        try:
            return bool(self.store.compare_set("failed", "", str(self.rank)) == str(self.rank).encode())
        except RuntimeError:  # the store ended with its host
            return True

    @contextmanager
    def own_work(self, where: str) -> Iterator[None]:
        """Turn any failure inside into a `RankError` that names this rank."""
        try:
            yield
        except SordinoError:
            raise
        except Exception as error:
            self._is_first()
            reason = f"{type(error).__name__}: {error}"
            raise RankError(f"rank {self.rank} of {self.size} failed in {where} ({reason})") from error


@cache
def join(device: torch.device, timeout: float) -> Group:
    """Join the other ranks, once per process; one rank waits at most `timeout` seconds for another in one call."""
    rank = own_rank()
    if dist.is_initialized():
        return Group(rank, dist.get_world_size(), device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        group = _joined(device, timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            reason = f"port {os.environ['MASTER_PORT']} is in use: choose another one, torchrun's --master-port"
        raise RankError(f"rank {rank} could not connect to the other ranks ({reason})") from error
    atexit.register(_leave)
    if rank == 0 and RENDEZVOUS not in os.environ:  # torchrun ends the ranks that are left when one has failed

        def terminated(*_: object) -> None:
            raise group.lost("has ended, or this rank received SIGTERM")

        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, terminated)
    return group


def _leave() -> None:
    """Leave the group before the interpreter ends; otherwise threads of the group end the process with SIGABRT."""
    with suppress(RuntimeError, ValueError):  # the script has left already, or a rank has ended
        dist.destroy_process_group()


def _joined(device: torch.device, timeout: timedelta) -> Group:
    """Form the process group through the file of `--workers`, or at the address that torchrun set."""
    where, place = os.environ.get(RENDEZVOUS, "env://"), (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if where == "env://" and place[0] != 0:
        _check_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout.total_seconds())
    store, rank, size = next(iter(rendezvous(where, *place, timeout=timeout)))
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store when it restarts ranks
    store = dist.PrefixStore(f"sordino/{attempt}", store)  # type: ignore[attr-defined]
    group = Group(rank, size, device, store)
    dist.init_process_group(group.backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return group


def _check_store(host: str, port: int, seconds: float) -> None:
    """Wait for rank 0's port, and refuse another program there, for which torch itself would wait for ever."""
    until, answered = time.monotonic() + seconds, threading.Event()
    while True:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=STORE_SECONDS).close()
            break
        if time.monotonic() > until:
            raise RuntimeError(f"no process listens at {host}:{port}")
        time.sleep(0.1)

    def ask() -> None:
        with suppress(RuntimeError):
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))  # type: ignore[attr-defined]
            store.num_keys()
            answered.set()

    threading.Thread(target=ask, daemon=True).start()
    if not answered.wait(STORE_SECONDS):
        fix = "choose another port with torchrun's --master-port"
        raise RuntimeError(f"the program that listens at {host}:{port} is not rank 0: {fix}")
