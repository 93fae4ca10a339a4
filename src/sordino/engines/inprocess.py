"""The in-process engine: all clients here, a chunk of them batched or one at a time, by engines/paths.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sordino.accounting.bounds import AlreadyPrivate
from sordino.data.clients import Clients
from sordino.engines.base import ClientJob, Collected, Engine, Worker
from sordino.engines.batches import Reader, chunks
from sordino.engines.checks import leak_check_of
from sordino.engines.client_state import ClientStates, States, of_updates
from sordino.engines.objectives import OneClient
from sordino.engines.paths import ExecutionPath, Path, Settings, choose_path, compiled, winograd
from sordino.errors import ConfigError, PlanError
from sordino.kernels import tune_allocator
from sordino.parts.clipping import row_norms
from sordino.parts.encoding import Public, finite_rows
from sordino.parts.gradients import Objective
from sordino.parts.local_solvers import Coins, Work
from sordino.parts.releases import own_message
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Streams, forked_rng
from sordino.task import Task

ROW_BYTES = 1 << 28  # what a chunk's working rows may take


@dataclass(frozen=True)
class InProcess(Engine):
    """Simulates every client here. It stands in for a secure sum and a shuffler, and keeps what clients remember."""

    path: Path | None = None
    chunk: int | None = None
    device: str = "cpu"  # where clients train; the server's noise and step stay on the CPU
    winograd: bool = True  # wide 5 x 5 convolutions with fewer products, where clients go one at a time on a CPU
    own_noise: bool = False  # every client draws its own noise, as in a deployment; else all of it in one go

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"secure_sum", "shuffler", "client_state", "preparation"})

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> InProcessWorker:
        """Choose the way once (engines/paths.py), from the model and the plan, never from a clock."""
        tune_allocator()
        task = task.on(known_device(self.device))
        way = choose_path(plan, task, self.path)
        chunk = self.chunk or (max(1, min(64, ROW_BYTES // (24 * task.layout.size))) if way.path == "batched" else 1)
        if way.path == "sequential" and chunk != 1:
            raise PlanError("engine", f"chunk = {chunk} on the sequential path", "chunk = 1")
        return InProcessWorker(plan, task, streams, way, chunk, self.winograd, self.own_noise)


def known_device(name: str) -> torch.device:
    """The device of this name, if torch can use it here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = f"device {name!r} ({str(error).splitlines()[0]})"
        raise ConfigError(found, "a device that torch can use here", "leave it out for the CPU") from None
    return device


class InProcessWorker(Worker):
    """The engine, ready for one plan on one task; rows are folded into the sum chunk by chunk."""

    def __init__(
        self, plan: Plan, task: Task, streams: Streams, way: ExecutionPath, chunk: int, winograd: bool = True,
        own_noise: bool = False,
    ) -> None:  # fmt: skip
        self.plan, self.task, self.streams, self.way = plan, task, streams, way
        self.path, self.chunk, self.device, self.own_noise = way.path, chunk, task.device, own_noise
        self.objective: Objective = way.make(task, Settings(winograd, streams, plan.local.any_order))
        self.reader = Reader(task.clients, task.device)
        self.noisy = isinstance(plan.bound, AlreadyPrivate)
        self.slopes = any(step.needs_slopes for step in plan.encode)
        self.client_states = ClientStates(plan.local)
        self.leak_check = leak_check_of(task)

    @property
    def header(self) -> dict[str, str | int]:
        gradient = type(self.objective).__name__
        header: dict[str, str | int] = {"engine": "inprocess", "path": self.path, "gradient": gradient}
        header |= {"chunk": self.chunk, "device": str(self.device), "malloc": tune_allocator()}
        loops = "compiled" if compiled(self.objective) else "torch"
        header |= {"loops": loops, "winograd": winograd(self.objective)}
        return {**header, **self.task.program.of(self.plan.unit).header}

    def collect(self, job: ClientJob) -> Collected:
        """Run the cohort."""
        total, norms = self.fold(job)
        figures = of_updates(norms, job.public.clip_norm)
        return Collected(total, len(job.cohort), figures, self.client_states.stored(), noised=self.own_noise)

    def load_client_state(self, stored: Mapping[str, Tensor]) -> None:
        self.client_states.load(stored)

    def fold(self, job: ClientJob) -> tuple[Tensor, list[Tensor]]:
        """The sum [d'] of the cohort's messages, and the norms of its updates."""
        total = torch.zeros(self.plan.length(len(job.start)), dtype=torch.float64, device=self.device)
        norms: list[Tensor] = []
        for chunk, rows, lengths in self.encoded(job):
            norms.append(lengths)
            leaving = self.sent(chunk, rows, job.public.t) if self.own_noise else rows
            total += leaving.sum(0, dtype=torch.float64)
        return total.cpu(), [part.cpu() for part in norms]

    def encoded(self, job: ClientJob) -> Iterator[tuple[Cohort, Tensor, Tensor]]:
        """Chunk by chunk: who, their rows [m, d'] before noise, norms of their updates; those of like size together."""
        sizes = self.task.clients.offsets[job.cohort + 1] - self.task.clients.offsets[job.cohort]
        order = job.cohort[np.argsort(sizes, kind="stable")]
        public = replace(job.public.on(self.device), tensors=self.task.layout.sizes)
        job = replace(job, public=public, start=job.start.to(self.device))
        if self.leak_check is not None:
            self.leak_check.before()
        for chunk in chunks(order, self.chunk):
            rows = self.solve(chunk, job.public, job.start)
            norms = row_norms(rows)
            slopes = self._slopes(chunk, job) if self.slopes else None
            self.objective.untouched()
            yield chunk, self._encode(finite_rows(rows, norms), job, slopes), norms
        if self.leak_check is not None:
            self.leak_check.after()

    def sent(self, clients: Cohort, rows: Tensor, t: int) -> Tensor:
        """The rows [m, d'] as they leave their clients, each with the noise of its own stream; noise is of the CPU."""
        secure, drawn = self.streams.mode == "secure", [self.streams.at(t, "client noise", int(c)) for c in clients]
        each = [
            own_message(self.plan.release, row, int(client), t, rng, secure=secure)
            for client, row, rng in zip(clients, rows.cpu(), drawn, strict=True)
        ]
        return torch.stack(each).to(rows.device)

    def solve(self, clients: Cohort, public: Public, start: Tensor) -> Tensor:
        """Messages [m, d] of a chunk."""
        t, own = public.t, self.objective.inward(start)
        if t + 1 == self.plan.rounds and isinstance(self.objective, OneClient) and self.objective.fast is not None:
            self.objective.fast.asked = True  # the certificate is next: look whether records are kept apart
        streams = [self.streams.at(t, "batches", int(c)) for c in clients]
        sizes = [self.task.clients.size(int(c)) for c in clients]
        each = zip(sizes, streams, clients, strict=True)
        drawn = [self.plan.local.indices(size, rng, t, int(c)) for size, rng, c in each]
        coins = self.coins([(self.plan, self.streams, int(c)) for c in clients], t)
        batches = self.reader.batches(clients, drawn)
        state = self._ordered(self.client_states.of(clients, start), inward=True)
        if public.broadcast:
            public = replace(public, broadcast={name: self.objective.inward(v) for name, v in public.broadcast.items()})
        work = Work(self.objective, own, batches, len(clients), public, coins, state)
        if self.path == "batched":
            rows = self.plan.local.solve(work)
        else:
            with forked_rng():  # dropout and its kin
                torch.manual_seed(int(self.streams.at(t, "model", int(clients[0])).integers(2**63)))
                rows = self.plan.local.solve(work)
        if state:
            self.client_states.put(clients, self._ordered(work.state, inward=False), start)
        return self._outward(rows)

    def _ordered(self, state: States, *, inward: bool) -> States:
        """A chunk's states with those tensors that are of the model's length in the objective's order, or back."""

        def turned(rows: Tensor) -> Tensor:
            if rows.dim() != 2 or rows.shape[1] != self.task.layout.size:
                return rows
            return torch.stack([self.objective.inward(row) for row in rows]) if inward else self._outward(rows)

        return {name: turned(rows) for name, rows in state.items()}

    def _outward(self, rows: Tensor) -> Tensor:
        """Rows of one or several models each, back in the layout's order."""
        size = self.task.layout.size
        if rows.shape[1] == size:
            return self.objective.outward(rows)
        return torch.cat([self.objective.outward(part.contiguous()) for part in torch.split(rows, size, 1)], 1)

    def coins(self, owners: Sequence[tuple[Plan, Streams, int]], t: int) -> list[Coins]:
        """Every client's own coins, where the local solver draws noise."""
        if not self.noisy:
            return []
        return [Coins(c, streams.at(t, "local noise", c), plan.local) for plan, streams, c in owners]

    def _encode(self, rows: Tensor, job: ClientJob, slopes: Tensor | None = None) -> Tensor:
        for step in self.plan.encode:
            rows = step.encode(rows, job.public, slopes)
        return rows

    def _slopes(self, clients: Cohort, job: ClientJob) -> Tensor:
        """Gradients [m, d] of each client's whole loss at the round's start; zero for a client without records."""
        whole = [np.arange(max(self.task.clients.size(int(c)), 1))[None, :] for c in clients]
        batch = next(iter(self.reader.batches(clients, whole)))
        w = self.objective.place(self.objective.inward(job.start), len(clients))
        return self.objective.outward(self.objective.gradient(w, batch)).nan_to_num(0.0, 0.0, 0.0)


def public_update(plan: Plan, task: Task, streams: Streams, start: Tensor, t: int) -> Tensor:
    """One update [d] on the public records of a task: no client's."""
    assert task.public is not None
    alone = replace(task, clients=Clients.of([task.public])).on(task.device)
    worker = InProcessWorker(plan, alone, streams, choose_path(plan, alone, "sequential"), 1)
    start = start.to(task.device)
    return worker.solve(np.zeros(1, dtype=np.int64), Public(t=t, size=len(start)), start)[0].cpu()
