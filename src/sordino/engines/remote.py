"""Remote engine of a deployment: the training loop runs on a server, training and noise in silos. Used by federation/.

    server:  one job per client  --transport-->  silo  --transport-->  noised message and receipt  -->  sum of messages
    silo:    job -> stored reply? send it again -> policy -> solve, encode -> charge -> noise -> store -> send

The transport carries bytes only. If too few clients reply in a round, the server sends the same jobs again to clients
without a reply; after the last try the run stops and can be resumed.
If a silo's local solver draws noise, the silo charges before it trains. Nothing is sent before it is stored, and
nothing is stored before it is charged: a silo that is killed may charge twice for one message, but never sends two
messages for one charge.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np
import torch

from sordino import codec
from sordino.engines.base import ClientJob, Collected, Engine, Receipt, Worker
from sordino.engines.checks import check_records
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.engines.messages import Job, Reply
from sordino.errors import BudgetError, ConfigError, DataError, EngineError, QuorumError, UserError
from sordino.plan import Plan
from sordino.rng import Streams, streams
from sordino.task import Task


class Transport(Protocol):
    """Channel that carries bytes to the clients and back; `offers` may contain "secure_sum" and "shuffler"."""

    @property
    def offers(self) -> frozenset[str]: ...
    @property
    def name(self) -> str: ...
    def ask(self, jobs: Mapping[int, Job], timeout: float) -> Iterable[tuple[int, bytes]]:
        """Send every client its job; yield (client, bytes) of every reply that arrives within `timeout` seconds."""


@dataclass(frozen=True)
class Remote(Engine):
    """Engine that reaches its clients over a transport; at least `quorum` clients of a cohort must reply."""

    transport: Transport
    run: str = ""  # run id of 32 hexadecimal digits, from the run folder
    quorum: int = 1
    tries: int = 3
    timeout: float = 600.0  # seconds to wait for replies in one try
    admission: bool = True  # ask all clients before round 1 whether they accept the plan
    charges: Mapping[int, int] = field(default_factory=dict)  # charges in the client's last receipt, by client
    deployed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.quorum < 1 or self.tries < 1 or not 0 < self.timeout < math.inf:
            found = f"quorum = {self.quorum}, tries = {self.tries}, timeout = {self.timeout:g}"
            needed = "quorum and tries of at least 1, and a finite timeout above 0 seconds"
            raise ConfigError(found, needed, "correct the value, or leave it out for the default")

    @property
    def offers(self) -> frozenset[str]:
        return self.transport.offers

    def for_run(self, run: str, charges: Mapping[int, int]) -> Remote:
        return replace(self, run=run, charges=charges)

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> RemoteWorker:
        """Ask all clients whether they accept the plan, then return the worker of the run."""
        if not re.fullmatch("[0-9a-f]{32}", self.run):
            fix = "give the run an output folder, which stores the id"
            raise EngineError(f"a run with the id {self.run!r}", "an id of 32 hexadecimal digits", fix)
        if self.quorum > plan.clients.population:
            found = f"quorum = {self.quorum} of {plan.clients.population} clients"
            raise ConfigError(found, "a quorum of at most the number of clients", "lower quorum")
        worker = RemoteWorker(self, plan, task, streams)
        if self.admission:
            worker.admit()
        return worker


@codec.hides_values
@dataclass
class Answers:
    """Replies that the server has received so far in one round, by client."""

    replies: dict[int, Reply] = field(default_factory=dict)
    raw: dict[int, bytes] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)  # reason why a client's reply cannot be used

    def take(self, job: Job, body: bytes, length: int) -> None:
        """Add one reply if it is valid; two different replies of one client count as no reply."""
        if self.raw.setdefault(job.client, body) != body:
            self.replies.pop(job.client, None)
            self.wrong[job.client] = "two different replies; check that no two nodes use the name of this client"
            return
        try:
            self.replies[job.client] = Reply.from_bytes(body, job, length)
            self.wrong.pop(job.client, None)
        except DataError as error:
            self.wrong[job.client] = str(error)

    @property
    def refused(self) -> dict[int, str]:
        return {client: reply.refused for client, reply in self.replies.items() if reply.refused}

    @property
    def reported(self) -> list[int]:
        return sorted(client for client, reply in self.replies.items() if reply.row is not None)


class RemoteWorker(Worker):
    """Worker of the remote engine: it sends jobs to the silos, checks their replies, and sums their messages."""

    def __init__(self, engine: Remote, plan: Plan, task: Task, streams: Streams) -> None:
        self.engine, self.plan, self.task, self.streams = engine, plan, task, streams
        self.length, self.paid = plan.length(task.layout.size), dict(engine.charges)
        self.encoding = "" if task.encoding is None else task.encoding.sha256

    @property
    def header(self) -> dict[str, str | int]:
        own: dict[str, str | int] = {"engine": "remote", "transport": self.engine.transport.name}
        own["quorum"] = self.engine.quorum
        if self.task.knows_shapes:  # else each silo checks its own code
            proof = self.task.program.of(self.plan.unit)
            own |= {"own_code": proof.grade, "own_code_why": proof.why}
        return own

    def admit(self) -> None:
        """Ask every client whether it accepts the plan; one refusal ends the run before any computation."""
        wanted = {client: self._job(client) for client in range(self.plan.clients.population)}
        least = min(self.engine.quorum, len(wanted))
        heard = self._ask_until(wanted, lambda found: len(found.replies) >= least)
        self._log_refusals(heard.refused)
        if heard.refused:
            refused = sorted(heard.refused.items())
            found = "; ".join(f"{self.name(client)}, which refuses this plan ({why})" for client, why in refused)
            raise EngineError(found, "a plan that all silos accept", "change the plan, or the policies of these silos")
        self._check_encodings({client: reply.encoding for client, reply in sorted(heard.replies.items())})

    def name(self, client: int) -> str:
        """Return a client's number, with its name if the transport has names; used in errors."""
        names: Sequence[str] = getattr(self.engine.transport, "names", ())
        return f"client {client} ({names[client]})" if names else f"client {client}"

    def _check_encodings(self, found: Mapping[int, str]) -> None:
        declared = [each for each in found.values() if each]
        usual = self.encoding or max(declared, key=declared.count, default="")
        others = [client for client, own in found.items() if own != usual]
        if others:
            whose = "the server's" if self.encoding else "that of most silos"
            each = ", ".join(f"{self.name(client)} has {found[client][:12] or 'none'}" for client in others)
            wrong = f"an encoding of records that differs from {whose} ({usual[:12]}): {each}"
            fix = "copy the columns, target, classes and person of fed.toml into silo.toml; see docs/deploy.md"
            raise EngineError(wrong, "the same encoding in all silos and on the server", fix)

    def _job(self, client: int) -> Job:
        seed = getattr(self.streams, "seed", None) if self.streams.mode == "simulation" else None
        paid = self.paid.get(client, 0)
        return Job(self.engine.run, self.plan, client, self.streams.mode, seed, paid=paid, encoding=self.encoding)

    def collect(self, job: ClientJob) -> Collected:
        """Return the sum of the silos' messages; send no job if the cohort is smaller than the release allows."""
        cohort, release = job.cohort, self.plan.release
        if not release.accepts(len(cohort)):
            return self._sum(Answers(), {int(client): "not asked" for client in cohort})
        wanted = {int(c): replace(self._job(int(c)), public=job.public, start=job.start) for c in cohort}
        least = min(self.engine.quorum, len(cohort))
        heard = self._ask_until(
            wanted, lambda found: len(found.reported) >= least and release.accepts(len(found.reported))
        )
        self._log_refusals(heard.refused)
        return self._sum(heard, heard.refused)

    def _log_refusals(self, refused: Mapping[int, str]) -> None:
        log: Callable[[Mapping[int, str]], None] | None = getattr(self.engine.transport, "log_refusals", None)
        if log is not None and refused:
            log(refused)

    def _ask_until(self, wanted: Mapping[int, Job], enough: Callable[[Answers], bool]) -> Answers:
        """Send jobs to all clients, then again to those without a reply, until `enough` accepts the replies."""
        heard = Answers()
        for _ in range(self.engine.tries):
            left = {client: job for client, job in wanted.items() if client not in heard.replies}
            if not left and wanted:
                break
            for client in heard.wrong:  # it may send again
                heard.raw.pop(client, None)
            until = time.time() + self.engine.timeout
            due = {client: replace(job, deadline=until) for client, job in left.items()}
            for client, body in self.engine.transport.ask(due, self.engine.timeout) if due else ():
                if client in due:
                    heard.take(due[client], body, self.length)
            if enough(heard):
                return heard
        raise QuorumError(self._too_few(heard), self._sum(heard, heard.refused))

    def _too_few(self, heard: Answers) -> str:
        """Return the error sentence of a round without quorum; it names clients only if the cohort is public."""
        plan, sentence = self.plan, f"fewer clients reported than a round needs (quorum {self.engine.quorum})"
        if plan.clients.random and not {"cohort", "messages"} & plan.release.sees:
            return sentence
        why = {**heard.refused, **heard.wrong}
        self._log_refusals(heard.refused)
        return f"{sentence}: {len(heard.reported)} did{self.in_words(why)}"

    def in_words(self, why: Mapping[int, str]) -> str:
        """Return the reasons of clients that sent no message as text, with the clients' names."""
        return "".join(f"; {self.name(client)}: {reason}" for client, reason in sorted(why.items()))

    def _receipts(self, charges: Mapping[int, int]) -> tuple[Receipt, ...]:
        """Return the clients' charges as receipts, and store them for the clients' next jobs."""
        self.paid |= {client: max(count, self.paid.get(client, 0)) for client, count in charges.items()}
        return tuple(Receipt(client, count) for client, count in sorted(charges.items()))

    def _sum(self, heard: Answers, refused: Mapping[int, str]) -> Collected:
        """Sum the messages in the order of the client numbers: rounding does not depend on the order of arrival."""
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


# ---- a silo ---------------------------------------------------------------------------------------------------------


class ReplyStore(Protocol):
    """Interface of a silo's durable store, which holds its charges and the replies it has sent."""

    def stored(self, job: str) -> bytes | None:
        """Return the stored reply to this job as bytes; None for a new job."""

    def charge(self, job: Job) -> int:
        """Charge one message before its noise is drawn, or raise `BudgetError`; return the run's number of charges."""

    def store(self, job: Job, reply: bytes) -> None:
        """Store the reply on disk before it is sent."""


@codec.hides_values
@dataclass
class InMemoryReplyStore:
    """Reply store in memory without a budget, for tests and for silos in the server's own process."""

    paid: dict[str, int] = field(default_factory=dict)  # by run
    replies: dict[str, bytes] = field(default_factory=dict)  # by job

    def stored(self, job: str) -> bytes | None:
        return self.replies.get(job)

    def charge(self, job: Job) -> int:
        self.paid[job.run] = self.paid.get(job.run, 0) + 1
        return self.paid[job.run]

    def store(self, job: Job, reply: bytes) -> None:
        self.replies[job.id] = reply


def worker_of(plan: Plan, task: Task, source: Streams) -> InProcessWorker:
    """Return the in-process worker that runs a plan on this silo's records, after the checks that every run makes."""
    if plan.clients.population != task.clients.population:
        found = f"a plan for {plan.clients.population} clients, and {task.clients.population} clients in this silo"
        raise DataError(found, "the same number of clients in both", "name the same silos on the server and here")
    if plan.keeps_client_state:
        found = f"local solver {plan.local.kind!r} in a silo, which stores no client state between rounds"
        raise EngineError(found, "a local solver without client state", "choose another recipe, such as dp_fed_avg")
    check_records(plan, task)
    return InProcess(own_noise=True).prepare(plan, task, source)


def check_client(job: Job, task: Task) -> None:
    """Refuse a job for a client whose records are not in this silo."""
    if job.client not in task.clients.held:
        needed, fix = "a job for this silo's client number", "compare the order of silos on the server with silo.toml"
        raise DataError(f"a job for client {job.client}", needed, fix)


def check_encoding(job: Job, task: Task) -> None:
    """Refuse a job of a server whose columns or classes differ from this silo's."""
    if job.encoding not in ("", task.encoding_sha256):
        found = f"an encoding of records {task.encoding_sha256[:12]} in this silo and {job.encoding[:12]} on the server"
        fix = "compare the columns, target, classes and person of silo.toml with the server's fed.toml"
        raise ConfigError(found, "the same columns, order, categories, ranges and classes in both", fix)


def noised_reply(worker: InProcessWorker, job: Job, pay: Callable[[Job], int]) -> Reply:
    """Train, encode, charge, add noise and return the reply to one job."""
    if job.public is None or job.start is None:
        found, needed = "an admission question in place of a round's job", "a job with public values and a model"
        raise DataError(found, needed, "install the same version of sordino on both sides")
    check_client(job, worker.task)
    charges = pay(job) if worker.noisy else 0
    [(who, rows, _)] = worker.encoded(ClientJob(job.public, job.start, np.array([job.client])))
    charges = charges if worker.noisy else pay(job)
    return Reply(job.id, job.client, worker.sent(who, rows, job.public.t)[0].cpu().float(), charges=charges)


@codec.hides_values
@dataclass
class Silo:
    """Silo that computes the reply to a job, both as bytes; its policy `allows` raises a `UserError` to refuse a job.

    For a job that cannot be read, `reply` raises a `DataError`: nothing is charged, and no reply is sent.
    """

    task: Task
    store: ReplyStore = field(default_factory=InMemoryReplyStore)
    allows: Callable[[Job], None] = lambda job: None
    now: Callable[[], float] = time.time
    log_refusal: Callable[[Job, Exception], None] = lambda job, error: None
    _workers: dict[tuple[str, str, int | None], InProcessWorker] = field(default_factory=dict, repr=False)

    def reply(self, body: bytes) -> bytes:
        """Return the reply to a job; the reply to a repeated job is the stored one, without a new charge."""
        job = Job.from_bytes(body, self.task.layout.size)
        before = None if job.admission else self.store.stored(job.id)
        if before is not None:
            return before
        if self.now() > job.deadline:
            fix = "nothing was charged; if this repeats, set the clocks, or raise the server's timeout"
            raise DataError("a job past its deadline", "a job whose reply the server still waits for", fix)
        try:
            return self._new_reply(job)
        except (UserError, BudgetError) as error:
            self.log_refusal(job, error)
            return Reply(job.id, job.client, refused=str(error)).to_bytes()

    def _new_reply(self, job: Job) -> bytes:
        check_client(job, self.task)
        check_encoding(job, self.task)
        self.allows(job)
        key = (job.plan.hash, job.mode, job.seed)
        if key not in self._workers:  # only the last worker is stored
            self._workers.clear()
            self._workers[key] = worker_of(job.plan, self.task, streams(job.mode, job.seed or 0))
        if job.admission:
            return Reply(job.id, job.client, encoding=self.task.encoding_sha256).to_bytes()
        made = noised_reply(self._workers[key], job, self.store.charge).to_bytes()
        self.store.store(job, made)
        return made
