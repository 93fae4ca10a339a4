"""A silo's service: policy and ledger are checked before anything is computed, and every message is charged first.

job -> answered before? the same bytes -> policy -> admission -> solve -> charge -> noise -> store -> send

Called by `sordino silo serve`.
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
from sordino.engines.replies import InMemoryReplyStore, Silo
from sordino.errors import ConfigError
from sordino.federation.flower_api import Node, installed
from sordino.federation.secagg_client import SecAggClient
from sordino.federation.secagg_messages import is_secagg
from sordino.federation.silo_worker import SiloSpec, StatusPrinter, serve, silo_task
from sordino.ledger import policy as policies
from sordino.ledger.budget import SiloCost
from sordino.ledger.journal import RESTORES
from sordino.ledger.ledger import Ledger, Receipt
from sordino.ledger.policy import Policy
from sordino.parts.releases import NoNoise
from sordino.task import Task

NO_POLICY = "no policy: these data are served without a limit, which only public data should be"


def model_hash(config: Config) -> str:
    """sha256 of model and loss in the federation's file; a policy lists the models it allows by it."""
    spec = config.federation
    shape = {} if spec is None else {"inputs": list(spec.inputs), "classes": spec.classes}
    return codec.digest({"model": config.task.model, "loss": config.task.loss, **shape})


@codec.hides_values
@dataclass
class LedgerReplyStore:
    """Reply store with a ledger: every message is charged to the silo's data before its noise is drawn."""

    ledger: Ledger
    policy: Policy
    silo: int
    model: str
    log: Callable[[str], None]
    code: Callable[[Unit], OwnCode]  # what is proved of model and loss, by unit of privacy
    receipts: dict[str, Receipt] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)

    def stored(self, job: str) -> bytes | None:
        return self.ledger.replay(job)

    def allows(self, job: Job) -> None:
        """Refuse a job against the policy or over the ledger's limit; the first job of a run admits the run."""
        grade = self.code(job.plan.unit).grade
        refused = self.policy.check(job.plan, noise=job.mode, silo=self.silo, model=self.model, own_code=grade)
        if refused is not None:
            raise ConfigError(refused, "a plan that this silo's policy allows")
        key = f"{job.run} {job.plan.hash}"  # another plan under the name of this run is refused by the ledger
        if key not in self.admitted:
            cost = self._cost(job)
            self.ledger.admit(job.run, self.policy.dataset, cost.asked, whole=cost.whole, jobs=cost.jobs)
            self.admitted.add(key)
            self.log(f"run {job.run}: admitted")
        known = self._charges(job)
        if known < job.paid:  # the server has seen this ledger with more charges: it is an older copy
            found = f"{known} charges of this run in the silo's ledger, where its own receipts say {job.paid}"
            raise ConfigError(found, "a ledger that is as new as its receipts", RESTORES)

    def charge(self, job: Job) -> int:
        """Charge one job; the number of charges of its run in the ledger."""
        self.receipts = {job.id: self._charge(job, job.id)}
        return self._charges(job)

    def charge_session(self, job: Job, session: str) -> int:
        """Charge one session of secure aggregation: its noise is drawn anew, so it is a release of its own."""
        self._charge(job, f"{job.id}.{session}")
        return self._charges(job)

    def _charge(self, job: Job, name: str) -> Receipt:
        assert job.public is not None
        t = job.public.t
        receipt = self.ledger.charge(job.run, name, self._cost(job).job(t), round=t)
        self.log(f"run {job.run}: round {t + 1} charged")
        return receipt

    def _charges(self, job: Job) -> int:
        return sum(self.ledger.charges(job.run).values())

    def store(self, job: Job, reply: bytes) -> None:
        self.ledger.store(self.receipts.pop(job.id), reply)

    def _cost(self, job: Job) -> SiloCost:
        return SiloCost(job.plan, self.silo, self.policy.adversary)


@codec.hides_values
@dataclass(frozen=True)
class SiloService:
    """Entry of a silo: routes single jobs, and messages of secure aggregation."""

    silo: Silo
    secagg: SecAggClient

    def reply(self, data: bytes) -> bytes:
        return self.secagg.reply(data) if is_secagg(data) else self.silo.reply(data)


def open_silo(folder: Path, spec: SiloSpec, log: Callable[[str], None]) -> SiloService:
    """The service of a silo's folder: data loaded, policy read, ledger open and holding the policy's limit."""
    config = load_config(folder / "fed.toml")
    return silo_service_of(folder, spec, silo_task(config, spec), model_hash(config), log)


def silo_service_of(folder: Path, spec: SiloSpec, task: Task, model: str, log: Callable[[str], None]) -> SiloService:
    """The same for data that are in memory already."""
    client = int(task.clients.held[0])
    if not spec.policy:
        log(NO_POLICY)
        store = InMemoryReplyStore()
        secagg = SecAggClient(client, task, refuse_release, lambda job, session: store.charge(job), time.time)
        return SiloService(Silo(task, store, refuse_release), secagg)
    policy = policies.load(folder / spec.policy)
    ledger = Ledger.open(folder / spec.ledger, create=True)
    ledger.limit(policy.dataset, policy.limit)
    charged = LedgerReplyStore(ledger, policy, client, model, log, task.program.of)
    secagg = SecAggClient(client, task, charged.allows, charged.charge_session, time.time)
    return SiloService(Silo(task, charged, charged.allows), secagg)


def refuse_release(job: Job) -> None:
    """Refuse a run for release without a ledger: after a restart its receipts would be false."""
    if job.mode == "secure" and job.plan.release.kind != NoNoise.kind:
        raise ConfigError("a run for release in a silo without a policy", "a policy and a ledger", "see docs/silos.md")


def serve_silo(folder: Path, node: str | None = None, secret: Path | None = None, as_json: bool = False) -> None:
    """`sordino silo serve`: answer jobs until the process is stopped."""
    installed()
    spec, log = SiloSpec.read(folder), StatusPrinter(as_json)
    service = open_silo(folder, spec, log)
    place = secret or (folder / spec.secret if spec.secret else None)
    try:
        shared = None if place is None else place.read_bytes()
    except OSError as error:
        raise ConfigError(f"{place}, which cannot be read ({error.strerror})", "the node's secret", "key.sh") from None
    log(f"silo {spec.name}: {len(service.silo.task.clients.index)} records, node {node or spec.node}")
    serve(Node(node or spec.node, shared), service.reply, log)
