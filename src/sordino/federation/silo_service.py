"""A silo's counter: policy and ledger are asked before anything is computed, and no message leaves that was not paid.

job -> answered before? the same bytes -> policy -> admission -> solve -> charge -> noise -> store -> send
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sordino import codec
from sordino.accounting.bounds import Unit
from sordino.certificate.facts import OwnCode
from sordino.config import Config, load_config
from sordino.engines.jobs import Job
from sordino.engines.replies import InMemoryReplyStore, ReplyStore, Silo
from sordino.errors import ConfigError
from sordino.federation.flower_api import Node, installed
from sordino.federation.secagg_client import SecAggClient
from sordino.federation.secagg_messages import is_secagg
from sordino.federation.silo_worker import SiloSpec, StatusPrinter, serve, silo_task
from sordino.ledger import policy as policies
from sordino.ledger.charges import SiloCost
from sordino.ledger.journal import RESTORES
from sordino.ledger.ledger import Ledger, Receipt
from sordino.ledger.policy import Policy
from sordino.parts.releases import NoNoise
from sordino.task import Task

OPEN = "no policy: these data are served without a limit, so they had better be public"


def model_hash(config: Config) -> str:
    """sha256 of what the federation's file says of the model and the loss: what a policy names it by."""
    spec = config.federation
    shape = {} if spec is None else {"inputs": list(spec.inputs), "classes": spec.classes}
    return codec.digest({"model": config.task.model, "loss": config.task.loss, **shape})


@codec.hides_values
@dataclass
class LedgerReplyStore:
    """A till over a ledger: every message is charged to the silo's data before its noise is drawn."""

    ledger: Ledger
    policy: Policy
    silo: int
    model: str
    say: Callable[[str], None]
    code: Callable[[Unit], OwnCode]  # what is proved of model and loss, with this as the unit
    receipts: dict[str, Receipt] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)

    def stored(self, job: str) -> bytes | None:
        return self.ledger.replay(job)

    def allows(self, job: Job) -> None:
        """The policy, and that the ledger can pay for the run; one that came late is admitted by its first job."""
        grade = self.code(job.plan.unit).grade
        refused = self.policy.check(job.plan, noise=job.mode, silo=self.silo, model=self.model, own_code=grade)
        if refused is not None:
            raise ConfigError(refused, "a plan that this silo's policy allows")
        key = f"{job.run} {job.plan.hash}"  # another plan under the name of this run is refused by the ledger
        if key not in self.admitted:
            cost = self._cost(job)
            self.ledger.admit(job.run, self.policy.dataset, cost.asked, whole=cost.whole, jobs=cost.jobs)
            self.admitted.add(key)
            self.say(f"run {job.run}: admitted")
        self._check_receipts(job)

    def _check_receipts(self, job: Job) -> None:
        """The server has seen this ledger: one with fewer charges of the run than its receipts said is an older one."""
        known = sum(self.ledger.charges(job.run).values())
        if known < job.paid:
            found = f"{known} charges of this run in the silo's ledger, where its own receipts say {job.paid}"
            raise ConfigError(found, "a ledger that is as new as its receipts", RESTORES)

    def charge(self, job: Job) -> int:
        assert job.public is not None
        t = job.public.t
        receipt = self.ledger.charge(job.run, job.id, self._cost(job).job(t), round=t)
        self.receipts = {job.id: receipt}
        self.say(f"run {job.run}: round {job.public.t + 1} charged")
        return sum(self.ledger.charges(job.run).values())

    def charge_session(self, job: Job, session: str) -> int:
        """For one session of a secure sum: its noise is drawn anew, and so paid anew."""
        assert job.public is not None
        t = job.public.t
        self.ledger.charge(job.run, f"{job.id}.{session}", self._cost(job).job(t), round=t)
        self.say(f"run {job.run}: round {job.public.t + 1} charged")
        return sum(self.ledger.charges(job.run).values())

    def store(self, job: Job, reply: bytes) -> None:
        self.ledger.store(self.receipts.pop(job.id), reply)

    def _cost(self, job: Job) -> SiloCost:
        return SiloCost(job.plan, self.silo, self.policy.adversary)


@codec.hides_values
@dataclass(frozen=True)
class SiloService:
    """A silo with two desks: jobs that are answered alone, and letters of secure sums."""

    silo: Silo
    member: SecAggClient

    def reply(self, data: bytes) -> bytes:
        return self.member.reply(data) if is_secagg(data) else self.silo.reply(data)


def open_silo(folder: Path, spec: SiloSpec, say: Callable[[str], None]) -> SiloService:
    """The silo of a folder: its data in memory, its policy read, its ledger open and holding the policy's limit."""
    config = load_config(folder / "fed.toml")
    return silo_service_of(folder, spec, silo_task(config, spec), model_hash(config), say)


def silo_service_of(folder: Path, spec: SiloSpec, task: Task, model: str, say: Callable[[str], None]) -> SiloService:
    """The same for data that are in memory already."""
    own = int(task.clients.held[0])
    if not spec.policy:
        say(OPEN)
        drawer = InMemoryReplyStore()
        pays = SecAggClient(own, task, refuse_release, lambda job, session: drawer.charge(job), time.time)
        return SiloService(Silo(task, drawer, refuse_release), pays)
    policy = policies.load(folder / spec.policy)
    ledger = Ledger.open(folder / spec.ledger, create=True)
    ledger.limit(policy.dataset, policy.limit)
    till = LedgerReplyStore(ledger, policy, own, model, say, task.program.of)
    kept: ReplyStore = till
    return SiloService(
        Silo(task, kept, till.allows), SecAggClient(own, task, till.allows, till.charge_session, time.time)
    )


def refuse_release(job: Job) -> None:
    """Without a ledger a silo that was started anew has forgotten what it sent: its receipts would be false."""
    if job.mode == "secure" and job.plan.release.kind != NoNoise.kind:
        raise ConfigError("a run for release in a silo without a policy", "a policy and a ledger", "see docs/silos.md")


def serve_silo(folder: Path, node: str | None = None, secret: Path | None = None, as_json: bool = False) -> None:
    """`sordino silo serve`: until it is stopped."""
    installed()
    spec, say = SiloSpec.read(folder), StatusPrinter(as_json)
    counter = open_silo(folder, spec, say)
    place = secret or (folder / spec.secret if spec.secret else None)
    try:
        shared = None if place is None else place.read_bytes()
    except OSError as error:
        raise ConfigError(f"{place}, which cannot be read ({error.strerror})", "the node's secret", "key.sh") from None
    say(f"silo {spec.name}: {len(counter.silo.task.clients.index)} records, node {node or spec.node}")
    serve(Node(node or spec.node, shared), counter.reply, say)
