"""In-process engine: runs all clients in this process, in batched chunks or one at a time. Called by loop.py.

State that clients keep between rounds is stored in the secret part of the checkpoint, and is in no message and no
release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sordino import codec
from sordino.accounting.bounds import AlreadyPrivate
from sordino.data.clients import Clients
from sordino.engines.base import ClientJob, Collected, Engine, Worker, device_of
from sordino.engines.batches import Reader
from sordino.engines.checks import LeakCheck
from sordino.engines.objectives import BATCH_BELOW, GUESS, ExecutionPath, OneClient, Path, choose_path
from sordino.errors import PartError, PlanError
from sordino.parts.clipping import row_norms
from sordino.parts.encoding import Public, finite_rows
from sordino.parts.gradients import Objective
from sordino.parts.local_solvers import LocalSolver, NoiseStream, Work
from sordino.parts.record_samplers import batch_stream
from sordino.parts.releases import own_message
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Streams, forked_rng
from sordino.task import Task
from sordino.version import tune_allocator

ROW_BYTES = 1 << 28  # memory for the working rows of a chunk
CLIENTS = "clients."  # prefix of client states in `State.secret_state`
IDS = f"{CLIENTS}ids"
States = dict[str, Tensor]


@dataclass(frozen=True)
class InProcess(Engine):
    """Engine that simulates all clients in this process, and with them a secure sum and a shuffler."""

    path: Path | None = None
    chunk: int | None = None
    device: str = "cpu"  # of the clients' training and the server's sum, step and evaluation; "auto": see `device_of`
    own_noise: bool = False  # True: every client draws its own noise, as in a deployment; False: the sum is noised
    offers = frozenset({"secure_sum", "shuffler", "client_state", "preparation"})
    leads = True

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> InProcessWorker:
        """Select the method that computes gradients, from model and plan alone, and return the worker of the run."""
        tune_allocator()
        device = device_of(self.device)
        task = task if device == task.device else task.on(device)
        row = choose_path(plan, task, self.path)
        chunk = self.chunk or (max(1, min(64, ROW_BYTES // (24 * task.layout.size))) if row.path == "batched" else 1)
        if row.path == "sequential" and chunk != 1:
            found = f"chunk = {chunk} on the sequential path"
            raise PlanError("engine", found, "one client at a time on this path", "set chunk = 1, or leave it out")
        return InProcessWorker(plan, task, streams, row, chunk, self.own_noise)


class InProcessWorker(Worker):
    """Worker of the in-process engine: it trains a chunk of clients at a time and adds their messages to the sum."""

    def __init__(
        self, plan: Plan, task: Task, streams: Streams, row: ExecutionPath, chunk: int, own_noise: bool = False
    ) -> None:
        self.plan, self.task, self.streams, self.way = plan, task, streams, row
        self.device_task = task
        self.path, self.chunk, self.device, self.own_noise = row.path, chunk, task.device, own_noise
        self.objective: Objective = row.make(task, plan, streams)
        self.reader = Reader(task.clients, task.device)
        self.noisy = isinstance(plan.bounds[-1], AlreadyPrivate)
        self.slopes = any(step.needs_slopes for step in plan.encode)
        self.client_states = ClientStates(plan.local)
        shipped = task.program.plain and task.program.plain_loss  # layers of torch, losses of Sordino: no user code
        self.leak_check = None if shipped else LeakCheck(task)

    @property
    def header(self) -> dict[str, str | int]:
        header: dict[str, str | int] = {"engine": "inprocess", "path": self.path, "chunk": self.chunk}
        header |= {"gradient": type(self.objective).__name__, "device": str(self.device), "malloc": tune_allocator()}
        if self.device.type not in BATCH_BELOW:
            header["path_rule"] = f"batched below {GUESS:g} FLOP a step: a guess, not measured on {self.device.type}"
        header["loops"] = "compiled" if getattr(self.objective, "kernel", False) else "torch"
        proof = self.task.program.of(self.plan.unit)
        return {**header, "own_code": proof.grade, "own_code_why": proof.why}

    def collect(self, job: ClientJob) -> Collected:
        total, norms = self.fold(job)
        figures = update_figures(norms, job.public.clip_norm)
        return Collected(total, len(job.cohort), figures, self.client_states.stored(), noised=self.own_noise)

    def load_client_state(self, stored: Mapping[str, Tensor]) -> None:
        self.client_states.states = states_by_client(stored)

    def fold(self, job: ClientJob) -> tuple[Tensor, list[Tensor]]:
        """Return the sum of the cohort's encoded messages, and the norms of the updates before encoding."""
        total = torch.zeros(self.plan.length(len(job.start)), dtype=torch.float64, device=self.device)
        norms: list[Tensor] = []
        for chunk, rows, lengths in self.encoded(job):
            norms.append(lengths)
            leaving = self.sent(chunk, rows, job.public.t) if self.own_noise else rows
            total += leaving.sum(0, dtype=torch.float64)
        return total, [torch.cat(norms).cpu()] if norms else []

    def encoded(self, job: ClientJob) -> Iterator[tuple[Cohort, Tensor, Tensor]]:
        """Yield for every chunk its clients, their encoded messages before noise, and the norms of their updates.

        Clients with similar numbers of records are in one chunk.
        """
        sizes = self.task.clients.offsets[job.cohort + 1] - self.task.clients.offsets[job.cohort]
        order = job.cohort[np.argsort(sizes, kind="stable")]
        public = replace(job.public.on(self.device), tensors=self.task.layout.sizes)
        job = replace(job, public=public, start=job.start.to(self.device))
        if self.leak_check is not None:
            self.leak_check.before()
        for first in range(0, len(order), self.chunk):
            chunk = order[first : first + self.chunk]
            rows = self.solve(chunk, job.public, job.start)
            norms = row_norms(rows)
            slopes = self._slopes(chunk, job) if self.slopes else None
            self.objective.untouched()
            yield chunk, self.encode(finite_rows(rows, norms), job, slopes), norms
        if self.leak_check is not None:
            self.leak_check.after()

    def encode(self, rows: Tensor, job: ClientJob, slopes: Tensor | None = None) -> Tensor:
        for step in self.plan.encode:
            rows = step.encode(rows, job.public, slopes)
        return rows

    def sent(self, clients: Cohort, rows: Tensor, t: int) -> Tensor:
        """Return the clients' messages with noise, which each client draws on the CPU from its own random stream."""
        secure, drawn = self.streams.mode == "secure", [self.streams.at(t, "client noise", int(c)) for c in clients]
        each = [
            own_message(self.plan.release, row, int(client), t, rng, secure=secure)
            for client, row, rng in zip(clients, rows.cpu(), drawn, strict=True)
        ]
        return torch.stack(each).to(rows.device)

    def solve(self, clients: Cohort, public: Public, start: Tensor) -> Tensor:
        """Train a chunk of clients and return their updates before encoding, one row per client."""
        t, own = public.t, self.objective.inward(start)
        if t + 1 == self.plan.rounds and isinstance(self.objective, OneClient) and self.objective.fast is not None:
            self.objective.fast.asked = True  # the certificate is next: check that records are independent
        streams = [batch_stream(self.plan.local.reads, self.streams, t, int(c)) for c in clients]
        sizes = [self.task.clients.size(int(c)) for c in clients]
        each = zip(sizes, streams, clients, strict=True)
        drawn = [self.plan.local.indices(size, rng, t, int(c)) for size, rng, c in each]
        noise = self.noise_streams([(self.plan, self.streams, int(c)) for c in clients], t)
        batches = self.reader.batches(clients, drawn)
        state = self._ordered(self.client_states.of(clients, start), inward=True)
        if public.broadcast:
            public = replace(public, broadcast={name: self.objective.inward(v) for name, v in public.broadcast.items()})
        work = Work(self.objective, own, batches, len(clients), public, noise, state)
        if self.path == "batched":
            rows = self.plan.local.solve(work)
        else:
            with forked_rng():  # for dropout and other layers that draw random numbers
                torch.manual_seed(int(self.streams.at(t, "model", int(clients[0])).integers(2**63)))
                rows = self.plan.local.solve(work)
        if state:
            self.client_states.put(clients, self._ordered(work.state, inward=False), start)
        return self._outward(rows)

    def _ordered(self, state: States, *, inward: bool) -> States:
        """Reorder coordinates of client states from the model's order to the objective's, or back."""

        def reorder(rows: Tensor) -> Tensor:
            if rows.dim() != 2 or rows.shape[1] != self.task.layout.size:
                return rows
            return torch.stack([self.objective.inward(row) for row in rows]) if inward else self._outward(rows)

        return {name: reorder(rows) for name, rows in state.items()}

    def _outward(self, rows: Tensor) -> Tensor:
        """Reorder coordinates from the objective's order to the model's; a row holds one or more model vectors."""
        size = self.task.layout.size
        if rows.shape[1] == size:
            return self.objective.outward(rows)
        return torch.cat([self.objective.outward(part.contiguous()) for part in torch.split(rows, size, 1)], 1)

    def noise_streams(self, owners: Sequence[tuple[Plan, Streams, int]], t: int) -> list[NoiseStream]:
        """Return the clients' random streams for local noise; an empty list where the local solver draws no noise."""
        if not self.noisy:
            return []
        return [NoiseStream(c, streams.at(t, "local noise", c), plan.local) for plan, streams, c in owners]

    def _slopes(self, clients: Cohort, job: ClientJob) -> Tensor:
        """Return each client's full-batch gradient at the round's start; zero for a client without records."""
        whole = [np.arange(max(self.task.clients.size(int(c)), 1))[None, :] for c in clients]
        batch = next(iter(self.reader.batches(clients, whole)))
        w = self.objective.place(self.objective.inward(job.start), len(clients))
        return self.objective.outward(self.objective.gradient(w, batch)).nan_to_num(0.0, 0.0, 0.0)


def public_update(plan: Plan, task: Task, streams: Streams, start: Tensor, t: int) -> Tensor:
    """Train on the task's public records as one client would, and return the update before encoding."""
    assert task.public is not None
    alone = replace(task, clients=Clients.of([task.public])).on(task.device)
    worker = InProcessWorker(plan, alone, streams, choose_path(plan, alone, "sequential"), 1)
    start = start.to(task.device)
    return worker.solve(np.zeros(1, dtype=np.int64), Public(t=t, size=len(start)), start)[0].cpu()  # as masks are


@codec.hides_values
@dataclass
class ClientStates:
    """States that clients keep between rounds (such as control variates), by client, on the CPU."""

    local: LocalSolver
    states: dict[int, States] = field(default_factory=dict)

    def of(self, clients: Cohort, start: Tensor) -> States:
        """Return copies of these clients' states by name, one row per client; new clients get the initial state."""
        first = self.local.client_state(start) if any(c not in self.states for c in clients.tolist()) else {}
        found = [self.states.get(client, first) for client in clients.tolist()]
        return {name: torch.stack([one[name].cpu() for one in found]).to(start.device) for name in found[0]}

    def put(self, clients: Cohort, states: Mapping[str, Tensor], start: Tensor) -> None:
        """Store the clients' new states; a state with NaN or infinity is dropped, as is that client's message."""
        first = self.local.client_state(start)
        shapes = {name: (len(clients), *value.shape) for name, value in first.items()}
        if {name: tuple(value.shape) for name, value in states.items()} != shapes:
            found = f"local solver {self.local.kind!r}, whose `solve` changed names or shapes of {sorted(states)}"
            raise PartError(found, f"states {sorted(first)} as in `client_state`, each with one row per client")
        held = {name: value.detach().cpu() for name, value in states.items()}
        for i, client in enumerate(clients.tolist()):
            own = {name: value[i].clone() for name, value in held.items()}
            if all(bool(value.isfinite().all()) for value in own.values()):
                self.states[client] = own

    def stored(self) -> States:
        """Return the states as tensors for a checkpoint: the client numbers, and one table per state name."""
        if not self.states:
            return {}
        ids = sorted(self.states)
        tables = {name: torch.stack([self.states[i][name] for i in ids]) for name in self.states[ids[0]]}
        return {IDS: torch.tensor(ids), **{f"{CLIENTS}{name}": table for name, table in tables.items()}}


def states_by_client(stored: Mapping[str, Tensor]) -> dict[int, States]:
    """Read every client's state from the secret part of a run's state, as `ClientStates.stored` wrote it."""
    if IDS not in stored:
        return {}
    tables = {n.removeprefix(CLIENTS): held for n, held in stored.items() if n.startswith(CLIENTS) and n != IDS}
    return {int(client): {n: held[i].clone() for n, held in tables.items()} for i, client in enumerate(stored[IDS])}


def update_figures(norms: list[Tensor], clip_norm: float) -> dict[str, float]:
    """Return statistics of a cohort's update norms before clipping, and of its clip factors alpha_i. NOT private.

    Client i has alpha_i = min(1, clip norm / ||update_i||). alpha_bar is the mean of all alpha_i, and alpha_tilde the
    mean of |alpha_i - alpha_bar|.
    """
    if not norms:
        return {}
    every = torch.cat(norms)
    sound = every[every.isfinite()]
    figures = {"nonfinite_updates": float(len(every) - len(sound))}
    if not len(sound):
        return figures
    low, middle, high = torch.quantile(sound, sound.new_tensor([0.1, 0.5, 0.9])).tolist()
    alpha = (clip_norm / sound.clamp(min=1e-300)).clamp(max=1.0)
    figures |= {"update_norm_mean": float(sound.mean()), "update_norm_p10": low, "update_norm_p50": middle}
    figures |= {"update_norm_p90": high, "clipped_fraction": float((sound > clip_norm).double().mean())}
    spread = float((alpha - alpha.mean()).abs().mean())
    return figures | {"alpha_bar": float(alpha.mean()), "alpha_tilde": spread}
