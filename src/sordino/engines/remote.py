"""The engine of a deployment: the loop here, records and noise in the silos, bytes between. Used by federation/.

    job per client  --transport-->  silo: row, noised before it leaves, and a receipt  --transport-->  their sum

The transport carries bytes only. A round that too few clients answer is void: it keeps its number and is sent again,
the same job to those who have not answered; after the last try the run stops, to be resumed.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np
import torch

from sordino import codec
from sordino.engines.base import ClientJob, Collected, Engine, Receipt, Worker
from sordino.engines.jobs import Job, Reply
from sordino.errors import ConfigError, DataError, EngineError, QuorumError
from sordino.plan import Plan
from sordino.rng import Streams
from sordino.task import Task


class Transport(Protocol):
    """How bytes reach the clients. `offers` is what it can do beside: "secure_sum", "shuffler"."""

    @property
    def offers(self) -> frozenset[str]: ...
    @property
    def name(self) -> str: ...
    def ask(self, jobs: Mapping[int, Job], timeout: float) -> Iterable[tuple[int, bytes]]:
        """Send every client its job; what came back within so many seconds, by whom the transport knows it is from."""


@dataclass(frozen=True)
class Remote(Engine):
    """An engine over a transport. `quorum` is how many of a cohort must report (all of a smaller one)."""

    transport: Transport
    run: str = ""  # 32 hexadecimal digits; a run folder gives its own
    quorum: int = 1
    tries: int = 3
    timeout: float = 600.0  # seconds that one try waits
    admission: bool = True  # ask all clients before the first round whether they take part
    charges: Mapping[int, int] = field(default_factory=dict)  # by client: its last receipt in an earlier process
    deployed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.quorum < 1 or self.tries < 1 or not 0 < self.timeout < math.inf:
            found = f"quorum = {self.quorum}, tries = {self.tries}, timeout = {self.timeout:g}"
            raise ConfigError(found, "at least 1, at least 1, and seconds above 0")

    @property
    def offers(self) -> frozenset[str]:
        return self.transport.offers

    def for_run(self, run: str, charges: Mapping[int, int]) -> Remote:
        return replace(self, run=run, charges=charges)

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> RemoteWorker:
        """Ask who takes part; refuse what clients could not noise themselves."""
        if not re.fullmatch("[0-9a-f]{32}", self.run):
            raise EngineError(f"a run with the id {self.run!r}", "32 hexadecimal digits", "run it into a folder")
        if self.quorum > plan.clients.population:
            raise ConfigError(f"quorum = {self.quorum} of {plan.clients.population} clients", "at most all of them")
        worker = RemoteWorker(self, plan, task, streams)
        if self.admission:
            worker.admit()
        return worker


@codec.hides_values
@dataclass
class Heard:
    """What has come back of one round."""

    replies: dict[int, Reply] = field(default_factory=dict)
    raw: dict[int, bytes] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)  # by whom something came that cannot be used, and why

    def take(self, job: Job, body: bytes, length: int) -> None:
        """One answer, if it can be read; two that differ are none."""
        if self.raw.setdefault(job.client, body) != body:
            self.replies.pop(job.client, None)
            self.wrong[job.client] = "two different answers for one client: do two nodes use its name?"
            return
        try:
            self.replies[job.client] = Reply.from_bytes(body, job, length)
            self.wrong.pop(job.client, None)
        except DataError as error:
            self.wrong[job.client] = str(error)

    def forget(self) -> None:
        """Before the next try: who sent what cannot be used may send again."""
        for client in self.wrong:
            self.raw.pop(client, None)

    @property
    def refused(self) -> dict[int, str]:
        return {client: reply.refused for client, reply in self.replies.items() if reply.refused}

    @property
    def reported(self) -> list[int]:
        return sorted(client for client, reply in self.replies.items() if reply.row is not None)


class RemoteWorker(Worker):
    """The engine, ready for one plan: it sends jobs, checks what comes back, and sums."""

    def __init__(self, engine: Remote, plan: Plan, task: Task, streams: Streams) -> None:
        self.engine, self.plan, self.task, self.streams = engine, plan, task, streams
        self.length, self.paid = plan.length(task.layout.size), dict(engine.charges)

    @property
    def header(self) -> dict[str, str | int]:
        known = self.task.knows_shapes
        code = self.task.program.of(self.plan.unit).header if known else {}  # each silo examines it on its own records
        return {"engine": "remote", "transport": self.engine.transport.name, "quorum": self.engine.quorum, **code}

    # ---- before the first round ------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Ask every client of the population; one that refuses ends the run before anything was computed."""
        wanted = {client: self._job(client) for client in range(self.plan.clients.population)}
        least = min(self.engine.quorum, len(wanted))
        heard = self._asked(wanted, lambda found: len(found.replies) >= least)
        if heard.refused:
            client, why = min(heard.refused.items())
            raise EngineError(f"client {client}, which refuses this plan ({why})", "a plan that every policy allows")

    def _job(self, client: int) -> Job:
        seed = getattr(self.streams, "seed", None) if self.streams.mode == "simulation" else None
        return Job(self.engine.run, self.plan, client, self.streams.mode, seed, paid=self.paid.get(client, 0))

    # ---- a round ----------------------------------------------------------------------------------------------------

    def collect(self, job: ClientJob) -> Collected:
        """The sum of what the cohort's silos have sent. Nobody is asked for a round that could not count."""
        cohort, release = job.cohort, self.plan.release
        if not release.accepts(len(cohort)):
            return self._sum(Heard(), {int(client): "not asked" for client in cohort})
        wanted = {int(c): replace(self._job(int(c)), public=job.public, start=job.start) for c in cohort}
        least = min(self.engine.quorum, len(cohort))

        def enough(found: Heard) -> bool:
            return len(found.reported) >= least and release.accepts(len(found.reported))

        heard = self._asked(wanted, enough)
        return self._sum(heard, heard.refused)

    def _asked(self, wanted: Mapping[int, Job], enough: Callable[[Heard], bool]) -> Heard:
        """Ask until it is enough, at most `tries` times: the same job, of those who have not answered."""
        heard = Heard()
        for _ in range(self.engine.tries):
            left = {client: job for client, job in wanted.items() if client not in heard.replies}
            if not left and wanted:
                break
            heard.forget()
            until = time.time() + self.engine.timeout
            due = {client: replace(job, deadline=until) for client, job in left.items()}
            for client, body in self.engine.transport.ask(due, self.engine.timeout) if due else ():
                if client in due:
                    heard.take(due[client], body, self.length)
            if enough(heard):
                return heard
        raise QuorumError(self._short(heard), self._sum(heard, heard.refused))

    def _short(self, heard: Heard) -> str:
        """One sentence; names, numbers and reasons only where who is asked is public or seen by design."""
        plan, said = self.plan, f"fewer clients reported than a round needs (quorum {self.engine.quorum})"
        if plan.clients.random and not {"cohort", "messages"} & plan.release.sees:
            return said
        why = {**heard.refused, **heard.wrong}
        first = next((f"; client {client}: {reason}" for client, reason in sorted(why.items())), "")
        return f"{said}: {len(heard.reported)} did{first}"

    def _receipts(self, charges: Mapping[int, int]) -> tuple[Receipt, ...]:
        """What clients say that they paid, kept for their next jobs."""
        self.paid |= {client: max(count, self.paid.get(client, 0)) for client, count in charges.items()}
        return tuple(Receipt(client, count) for client, count in sorted(charges.items()))

    def _sum(self, heard: Heard, refused: Mapping[int, str]) -> Collected:
        """In the clients' order, whatever the order in which they came."""
        total, reported = torch.zeros(self.length, dtype=torch.float64), heard.reported
        for client in reported:
            row = heard.replies[client].row
            assert row is not None
            total += row
        receipts = self._receipts({client: heard.replies[client].charges for client in reported})
        return Collected(
            total, len(reported), noised=True, deployed=True, reported=np.asarray(reported, dtype=np.int64),
            refused=refused, receipts=receipts,
        )  # fmt: skip
