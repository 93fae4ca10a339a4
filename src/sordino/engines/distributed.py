"""Many processes or machines: every rank runs its share of the cohort, one sum per round brings them together.

    order (cohort), start  --broadcast-->  rank r: sum of its clients' messages  --reduce-->  rank 0: total

Rank 0 alone draws the cohort and the noise of a release, charges, steps and writes. The other ranks draw only what a
client draws for itself: its batches, its dropout, and the noise of a solver that is private already.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sordino.data.clients import Records
from sordino.data.metrics import figures
from sordino.engines.base import ClientJob, Collected, Engine, Worker
from sordino.engines.batches import equal_shares, records_read
from sordino.engines.client_state import of_updates
from sordino.engines.group import Group, join, own_rank
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.engines.jobs import END, Limits, Order
from sordino.errors import DataError, RankError
from sordino.plan import Plan
from sordino.rng import Streams
from sordino.task import Task, sums_of


class Served(SystemExit):
    """How a rank other than 0 leaves the engine when the run is over: the process ends, with code 0, unless caught."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Distributed(Engine):
    """Every rank runs its share of each cohort the way `InProcess` would.

    For use in a process that torchrun or `sordino run --workers` started. Rank 0 goes through the whole run; in the
    others `prepare` serves it and then ends the process (`Served`), so what follows in a script happens once.
    Guarantee: with one seed the result is that of `InProcess` up to the rounding of a sum (1e-5), for any number of
    ranks, because every coin is keyed by (round, purpose, client); and the certificate is the same, because what is
    drawn, charged and released is.
    It stands in for a secure sum and a shuffler as `InProcess` does: all ranks are one operator's simulation, in which
    nobody looks at a single message. A rank's partial sum is no more protected than the records it was computed from.
    """

    each: InProcess = field(default_factory=InProcess)
    threads: int = 1
    timeout: float = 3600.0  # seconds one rank waits for another: a slow client is not a dead one

    @property
    def offers(self) -> frozenset[str]:
        return self.each.offers - {"client_state", "preparation"}  # a client is on another rank in another round

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0."""
        return own_rank() == 0

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> Rank:
        """Meet the others; on rank 0 the worker of the run, elsewhere never returns."""
        torch.set_num_threads(self.threads)
        group = join(task.device, self.timeout)
        group.compare(_print(plan, task, streams))
        rank = Rank(group, self.each.prepare(plan, task, streams), task)
        if group.rank != 0:
            rank.serve()
            raise Served
        return rank


def _print(plan: Plan, task: Task, streams: Streams) -> str:
    """What must be the same on every rank: plan, who holds what, the model, a sample of the records, the seed."""
    clients, found = task.clients, hashlib.sha256(f"{plan.hash} {streams.mode}".encode())
    found.update(str(getattr(streams, "seed", "")).encode())
    x, y = clients.records.x, clients.records.y
    tensors = [x[:: len(x) // 1024 + 1], y[:: len(y) // 1024 + 1], *task.model.state_dict().values()]
    tables = [clients.offsets, clients.index, *(tensor.detach().cpu().numpy() for tensor in tensors)]
    for table in tables:
        found.update(np.ascontiguousarray(table).tobytes())
    return found.hexdigest()


class Rank(Worker):
    """One rank's part of a run; on rank 0 it is the run's worker, and leads the others."""

    def __init__(self, group: Group, worker: InProcessWorker, task: Task) -> None:
        self.group, self.worker, self.task = group, worker, task  # the worker's own task may lie on another device
        self.costs = records_read(worker.plan.local, np.diff(task.clients.offsets))
        self.idle = True  # between two orders: the others wait for the next one

    @property
    def header(self) -> dict[str, str | int]:
        own: dict[str, str | int] = {"engine": "distributed", "workers": self.group.size, "backend": self.group.backend}
        return {**self.worker.header, **own}

    # ---- rank 0 -----------------------------------------------------------------------------------------------------

    def collect(self, job: ClientJob) -> Collected:
        """The whole cohort's sum: tell, run the own share, add."""
        total, rest = self._led(Order(job.public, job.cohort), job.start)
        norms = [rest[1:]] if len(job.cohort) else []
        figures = of_updates(norms, job.public.clip_norm)
        return Collected(total, int(rest[0]), figures, noised=self.worker.own_noise)

    def evaluate(self, model: Tensor) -> dict[str, float]:
        """What `Task.evaluate` finds, each rank on its part of the test records; metrics need all of them, here."""
        if self.task.test is None:
            return {}
        if self.task.metrics:
            return self.task.evaluate(model)
        return figures(self._led(Order(), model)[0].cpu())

    def close(self) -> None:
        """The run is over. After a failure nothing is said: the others notice that this process is gone."""
        if self.idle:
            with suppress(RankError):  # whoever is gone is not needed any more
                self.group.tell(END)

    def _led(self, order: Order, vector: Tensor) -> tuple[Tensor, Tensor]:
        self.idle = False
        self.group.tell(order.written())
        done = self._do(order, self.group.share(vector))
        self.idle = True
        return done

    # ---- every rank -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Do what rank 0 says until it has nothing more to say."""
        limits = Limits(self.task.clients.population, self.task.layout.size)
        while True:
            try:
                order = limits.read(self.group.hear(limits.most))
            except DataError:  # not a frame, or not an order
                raise self.group.misheard("what is no order") from None
            if order is None:
                return
            if order.public is not None:  # it was read on the CPU
                order = replace(order, public=order.public.on(self.group.device))
            self._do(order, self.group.share(torch.empty(self.task.layout.size)))

    def _do(self, order: Order, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Two sums over all ranks, in one buffer; true on rank 0."""
        if order.public is None or order.cohort is None:
            parts = self._judge(vector)
        else:
            parts = self._run(ClientJob(order.public, vector, order.cohort))
        both = self.group.add(torch.cat(parts))
        return both[: len(parts[0])], both[len(parts[0]) :]

    def _run(self, job: ClientJob) -> tuple[Tensor, Tensor]:
        """This rank's sum [d'], then how many clients that was, and their norms in slots [cohort] of their own."""
        cut = equal_shares(self.costs[job.cohort], self.group.size)
        before, own = sum(map(len, cut[: self.group.rank])), job.cohort[cut[self.group.rank]]
        with self.group.own_work(f"round {job.public.t + 1}"):
            total, norms = self.worker.fold(replace(job, cohort=own))
        rest = total.new_zeros(1 + len(job.cohort))
        rest[0] = len(own)
        if norms:
            rest[1 + before : 1 + before + len(own)] = torch.cat(norms)
        return total, rest

    def _judge(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of this rank's test records; without any, zeros in the same places."""
        test = self.task.test
        assert test is not None
        cut = zip(*(side.tensor_split(self.group.size) for side in (test.x, test.y)), strict=True)
        own = Records(*list(cut)[self.group.rank])
        with self.group.own_work("the evaluation"):
            some = own if len(own) else Records(test.x[:1], test.y[:1])
            found = sums_of(self.task.at(vector), some, self.task.program.losses)
        sums = (found if len(own) else torch.zeros_like(found)).to(self.group.device)
        return sums, sums.new_empty(0)
