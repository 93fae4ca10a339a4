"""A silo's side of a round: local work on its own records, its own noise, and a receipt. Called by federation/.

    read the job -> answered before? the same bytes -> policy -> solve, encode -> charge -> noise -> store -> send

Where the solver itself draws noise, the charge comes before it. Nothing is sent that was not stored before, and nothing
is stored that was not charged; a silo that is killed may charge twice for one message, never send two for one charge.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sordino import codec
from sordino.engines.base import ClientJob
from sordino.engines.checks import check_records
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.engines.jobs import Job, Reply
from sordino.errors import BudgetError, DataError, EngineError, UserError
from sordino.plan import Plan
from sordino.rng import Streams, streams
from sordino.task import Task


class ReplyStore(Protocol):
    """Durable store of a silo: its charges and the replies it has sent."""

    def stored(self, job: str) -> bytes | None:
        """The bytes that were the answer to this job, if there was one."""

    def charge(self, job: Job) -> int:
        """Pay for one message, before its noise exists: how often this run has. Who cannot raises `BudgetError`."""

    def store(self, job: Job, reply: bytes) -> None:
        """Keep the answer, before it is sent."""


@codec.hides_values
@dataclass
class InMemoryReplyStore:
    """A reply store in memory, without a limit: for loopback and tests."""

    paid: dict[str, int] = field(default_factory=dict)  # by run
    said: dict[str, bytes] = field(default_factory=dict)  # by job

    def stored(self, job: str) -> bytes | None:
        return self.said.get(job)

    def charge(self, job: Job) -> int:
        self.paid[job.run] = self.paid.get(job.run, 0) + 1
        return self.paid[job.run]

    def store(self, job: Job, reply: bytes) -> None:
        self.said[job.id] = reply


def worker_of(plan: Plan, task: Task, source: Streams) -> InProcessWorker:
    """This silo's worker for a plan, after the checks of a whole run on what it holds itself."""
    if plan.clients.population != task.clients.population:
        found = f"a plan for {plan.clients.population} clients in a silo of {task.clients.population}"
        raise DataError(found, "the federation's own number")
    if plan.keeps_client_state:
        raise EngineError(f"{plan.local.kind!r} in a silo that keeps nothing between rounds", "a solver without memory")
    check_records(plan, task)
    return InProcess(own_noise=True).prepare(plan, task, source)


def answer(plan: Plan, task: Task, job: Job, source: Streams, pay: Callable[[Job], int] | None = None) -> Reply:
    """The noised row of one job, and what was paid for it."""
    return answered(worker_of(plan, task, source), job, pay or (lambda job: 1))


def answered(worker: InProcessWorker, job: Job, pay: Callable[[Job], int]) -> Reply:
    """Solve, encode, charge, noise: each step the engine's own."""
    if job.public is None or job.start is None:
        raise DataError("a question where a round's job was needed", "public and start")
    if job.client not in worker.task.clients.held:
        raise DataError(f"a job for client {job.client}", "this silo's own")
    charges = pay(job) if worker.noisy else 0
    [(who, rows, _)] = worker.encoded(ClientJob(job.public, job.start, np.array([job.client])))
    charges = charges if worker.noisy else pay(job)
    return Reply(job.id, job.client, worker.sent(who, rows, job.public.t)[0].cpu().float(), charges=charges)


@codec.hides_values
@dataclass
class Silo:
    """One silo: bytes of a job in, bytes of a reply out. `allows` is its policy: it raises a `UserError` to refuse.

    A job that cannot be read is a `DataError` to whoever carries it here: nothing was charged, and no reply is owed.
    """

    task: Task
    store: ReplyStore = field(default_factory=InMemoryReplyStore)
    allows: Callable[[Job], None] = lambda job: None
    now: Callable[[], float] = time.time
    _workers: dict[tuple[str, str, int | None], InProcessWorker] = field(default_factory=dict, repr=False)

    def reply(self, body: bytes) -> bytes:
        """The answer to a job; to one that was answered before, the same bytes, and nothing is charged."""
        job = Job.from_bytes(body, self.task.layout.size)
        before = None if job.admission else self.store.stored(job.id)
        if before is not None:
            return before
        if self.now() > job.deadline:
            raise DataError("a job past its deadline", "one that somebody waits for", "nothing was charged")
        try:
            return self._made(job)
        except (UserError, BudgetError) as error:
            return Reply(job.id, job.client, refused=str(error)).to_bytes()

    def _made(self, job: Job) -> bytes:
        if job.client not in self.task.clients.held:
            raise DataError(f"a job for client {job.client}", "this silo's own")
        self.allows(job)
        key = (job.plan.hash, job.mode, job.seed)
        if key not in self._workers:  # made once for a plan and its coins; only the last is kept
            self._workers.clear()
            self._workers[key] = worker_of(job.plan, self.task, streams(job.mode, job.seed or 0))
        if job.admission:
            return Reply(job.id, job.client).to_bytes()
        made = answered(self._workers[key], job, self.store.charge).to_bytes()
        self.store.store(job, made)
        return made
