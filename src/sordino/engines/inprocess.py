"""All clients in this process: a chunk of them batched, or one at a time, by a rule of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.data.task import Clients, Task
from sordino.diagnostics import of_updates
from sordino.engines import allocator
from sordino.engines.base import ClientJob, Collected, chunks
from sordino.engines.linear import LinearClients, can_write_out
from sordino.engines.objectives import ManyClients, OneClient, can_batch, step_flops
from sordino.engines.slopes import has_prox
from sordino.errors import ConfigError, PlanError
from sordino.parts.encode import Public, finite_rows
from sordino.parts.gradients import Batch, Moreau, Objective
from sordino.parts.local import Coins
from sordino.parts.norms import row_norms
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.privacy.bounds import Spent
from sordino.rng import Streams

Path = Literal["batched", "sequential"]
BATCH_BELOW = {"cpu": 2e7}  # FLOP per local step: below, one bmm over many clients beats one client at a time
ELSEWHERE = 2e9  # the same on other devices: a guess, never measured; `path` overrules it
ROW_BYTES = 1 << 28  # what a chunk's working rows may take


@dataclass(frozen=True)
class InProcess:
    """Simulates every client here. It stands in for a secure sum and a shuffler, so it offers both."""

    path: Path | None = None
    chunk: int | None = None
    device: str = "cpu"  # where clients train; the server's noise and step stay on the CPU

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"secure_sum", "shuffler"})

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> InProcessWorker:
        """Choose the path once, from the model and the plan, never from a clock."""
        allocator.tune()
        task = task.on(known_device(self.device))
        path = self.path or _path(plan, task)
        chunk = self.chunk or (max(1, min(64, ROW_BYTES // (24 * task.layout.size))) if path == "batched" else 1)
        if path == "sequential" and chunk != 1:
            raise PlanError("engine", f"chunk = {chunk} on the sequential path", "chunk = 1")
        return InProcessWorker(plan, task, streams, path, chunk)


def _path(plan: Plan, task: Task) -> Path:
    largest = int(np.diff(task.clients.offsets).max())
    batch = min(getattr(plan.local, "batch", None) or largest, largest)
    small = step_flops(task, batch) < BATCH_BELOW.get(task.device.type, ELSEWHERE)
    return "batched" if small and (can_write_out(task) or can_batch(task)) else "sequential"


def known_device(name: str) -> torch.device:
    """The device of this name, if torch can use it here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = f"device {name!r} ({str(error).splitlines()[0]})"
        raise ConfigError(found, "a device that torch can use here", "leave it out for the CPU") from None
    return device


def _objective(plan: Plan, task: Task, path: Path) -> Objective:
    if path == "sequential":
        return OneClient(task)
    smooths = isinstance(getattr(plan.local, "gradient", None), Moreau)
    written = can_write_out(task) and (not smooths or has_prox(str(task.loss)))
    return LinearClients(task) if written else ManyClients(task)


class InProcessWorker:
    """The engine, ready for one plan on one task; rows are folded into the sum chunk by chunk."""

    def __init__(self, plan: Plan, task: Task, streams: Streams, path: Path, chunk: int) -> None:
        self.plan, self.task, self.streams = plan, task, streams
        self.path, self.chunk, self.device = path, chunk, task.device
        self.objective = _objective(plan, task, path)
        self.buffer: Tensor | None = None
        self.noisy = isinstance(plan.bound, Spent)
        self.slopes = any(step.needs_slopes for step in plan.encode)

    @property
    def header(self) -> dict[str, str | int]:
        gradient = type(self.objective).__name__
        header: dict[str, str | int] = {"engine": "inprocess", "path": self.path, "gradient": gradient}
        return {**header, "chunk": self.chunk, "device": str(self.device), "malloc": allocator.tune()}

    def collect(self, job: ClientJob) -> Collected:
        """Run the cohort."""
        total, norms = self.fold(job)
        return Collected(total, len(job.cohort), of_updates(norms, job.public.radius))

    def fold(self, job: ClientJob) -> tuple[Tensor, list[Tensor]]:
        """The sum [d'] of the cohort's messages, and the norms of its updates; clients of like size share a chunk."""
        sizes = self.task.clients.offsets[job.cohort + 1] - self.task.clients.offsets[job.cohort]
        order = job.cohort[np.argsort(sizes, kind="stable")]
        job = replace(job, public=job.public.on(self.device), start=job.start.to(self.device))
        total = torch.zeros_like(self._encode(torch.zeros_like(job.start)[None], job)[0], dtype=torch.float64)
        norms: list[Tensor] = []
        for chunk in chunks(order, self.chunk):
            rows = self.solve(chunk, job.public, job.start)
            norms.append(row_norms(rows))
            slopes = self._slopes(chunk, job) if self.slopes else None
            total += self._encode(finite_rows(rows, norms[-1]), job, slopes).sum(0, dtype=torch.float64)
        return total.cpu(), [part.cpu() for part in norms]

    def solve(self, clients: Cohort, public: Public, start: Tensor) -> Tensor:
        """Messages [m, d] of a chunk."""
        t, own = public.t, self.objective.inward(start)
        streams = [self.streams.at(t, "batches", int(c)) for c in clients]
        sizes = [self.task.clients.size(int(c)) for c in clients]
        drawn = [
            self.plan.local.indices(size, rng, t, int(c)) for size, rng, c in zip(sizes, streams, clients, strict=True)
        ]
        coins = self.coins([(self.plan, self.streams, int(c)) for c in clients], t)
        batches = self.batches(clients, drawn)
        if self.path == "batched":
            rows = self.plan.local.solve(self.objective, own, batches, len(clients), public, coins)
        else:
            with torch.random.fork_rng(devices=[]):  # dropout and its kin
                torch.manual_seed(int(self.streams.at(t, "model", int(clients[0])).integers(2**63)))
                rows = self.plan.local.solve(self.objective, own, batches, 1, public, coins)
        return self.objective.outward(rows)

    def coins(self, owners: Sequence[tuple[Plan, Streams, int]], t: int) -> list[Coins]:
        """Every client's own coins, where the local solver draws noise."""
        if not self.noisy:
            return []
        return [Coins(c, streams.at(t, "local noise", c), plan.local) for plan, streams, c in owners]

    def batches(self, clients: Cohort, drawn: list[NDArray[np.int64]]) -> Iterator[Batch]:
        """One Batch per step: rows of the table gathered for all clients of the chunk; good until the next one."""
        table = _padded(drawn)
        rows = torch.from_numpy(self._rows(clients, table)).to(self.task.clients.records.x.device)
        real = (table >= 0).transpose(1, 0, 2)  # [steps, m, b]
        whole, busy = np.all(real, axis=(1, 2)).tolist(), np.any(real, axis=2)
        idle, y = (~busy.all(1)).tolist(), gather(self.task.clients.records.y, rows).to(self.device)
        for step in range(len(rows)):
            if whole[step]:
                yield Batch(self._gathered(rows[step]), y[step])
            elif len(clients) == 1 and busy[step, 0]:  # without a mask: there is nothing to look up on the device
                there = torch.from_numpy(np.flatnonzero(real[step, 0]))
                yield Batch(self._gathered(rows[step][:, there]), y[step][:, there])
            else:
                active = torch.from_numpy(busy[step]).to(self.device, torch.float32) if idle[step] else None
                mask = torch.from_numpy(real[step]).to(self.device)
                yield Batch(self._gathered(rows[step]), y[step], mask, active)

    def _rows(self, clients: Cohort, picks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the table for picks [m, steps, b] of the clients' own records: [steps, m, b]; any row for none."""
        held, first = self.task.clients, self.task.clients.offsets[clients][:, None, None]
        places = np.minimum(first + np.maximum(picks, 0), len(held.index) - 1)
        return np.ascontiguousarray(held.index[places].transpose(1, 0, 2))

    def _gathered(self, where: Tensor) -> Tensor:
        """Rows of x, gathered where it lies into a buffer that the next batch overwrites, on the model's device."""
        x, count = self.task.clients.records.x, where.numel()
        if self.buffer is None or len(self.buffer) < count:
            self.buffer = x.new_empty(count, *x.shape[1:])
        torch.index_select(x, 0, where.reshape(-1), out=self.buffer[:count])
        return self.buffer[:count].view(*where.shape, *x.shape[1:]).to(self.device)

    def _encode(self, rows: Tensor, job: ClientJob, slopes: Tensor | None = None) -> Tensor:
        for step in self.plan.encode:
            rows = step.encode(rows, job.public, slopes)
        return rows

    def _slopes(self, clients: Cohort, job: ClientJob) -> Tensor:
        """Gradients [m, d] of each client's whole loss at the round's start; zero for a client without records."""
        whole = [np.arange(max(self.task.clients.size(int(c)), 1))[None, :] for c in clients]
        batch = next(self.batches(clients, whole))
        w = self.objective.place(self.objective.inward(job.start), len(clients))
        return self.objective.outward(self.objective.gradient(w, batch)).nan_to_num(0.0, 0.0, 0.0)

    def public_update(self, start: Tensor, t: int) -> Tensor:
        """The update of the plan's own local solver on the task's public records: what a public mask is read from."""
        assert self.task.public is not None
        alone = replace(self.task, clients=Clients.of([self.task.public])).on(self.device)
        worker = InProcessWorker(self.plan, alone, self.streams, "sequential", 1)
        start = start.to(self.device)
        return worker.solve(np.zeros(1, dtype=np.int64), Public(t=t, size=len(start)), start)[0].cpu()


def gather(table: Tensor, where: Tensor) -> Tensor:
    """Rows of a table: [n, ...] at [m, b] -> [m, b, ...]."""
    return table.index_select(0, where.reshape(-1)).view(*where.shape, *table.shape[1:])


def _padded(drawn: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """[m, steps, b], -1 where a client has fewer steps or records."""
    steps = max((len(picks) for picks in drawn), default=0)
    width = max((picks.shape[1] for picks in drawn), default=1)
    table = np.full((len(drawn), steps, width), -1, dtype=np.int64)
    for i, picks in enumerate(drawn):
        table[i, : len(picks), : picks.shape[1]] = picks
    return table
