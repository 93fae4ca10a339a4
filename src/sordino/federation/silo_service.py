"""Process of a silo, `sordino silo serve DIR`: its data, policy and ledger, and the loop that answers its Flower node.

A job is answered with the stored bytes if it was answered before. Otherwise the steps are: check of the policy,
admission to the ledger, local training, charge, noise, storage of the reply, sending. The process takes tasks from its
node itself; no code that a Flower run contains is executed.

DIR/silo.toml     the silo's name, the address of its node, and its data
DIR/fed.toml      the federation's file, with the model and the silos
DIR/policy.toml   the data-use policy                  DIR/ledger.db   the charges to the data
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sordino import codec
from sordino.accounting.bounds import Unit
from sordino.accounting.rounding import upward
from sordino.certificate.facts import OwnCode
from sordino.config import Config, load_config
from sordino.data.clients import Records
from sordino.data.datasets import load
from sordino.data.files import CsvFormat
from sordino.data.records import Dataset
from sordino.data.tables import encoded_rows
from sordino.engines.messages import Job
from sordino.engines.remote import InMemoryReplyStore, Silo
from sordino.errors import ConfigError, SordinoError, shorten
from sordino.federation.delivery import MARK as RESULT
from sordino.federation.delivery import Inbox
from sordino.federation.flower_api import Node, NodeTask, flower
from sordino.federation.keys import Signer, signer_of
from sordino.federation.secagg import MARK, SecAggClient
from sordino.federation.status import NAME, StatusBoard, notify_systemd, rotating_log
from sordino.ledger import policy as policies
from sordino.ledger.budget import SiloCost
from sordino.ledger.journal import RESTORES
from sordino.ledger.ledger import Ledger, Receipt
from sordino.ledger.policy import Policy
from sordino.models import InMemoryModel
from sordino.parts.releases import NoNoise
from sordino.runs.bundle import Bundle
from sordino.task import Task

PULSE = 0.5  # seconds between two polls for a task
IDLE = 0.5  # seconds before the next poll of a node that does not answer
REFRESH = 10.0  # seconds between two computations of the budget that is left
NO_POLICY = "no policy: these data are served without a limit, which only public data should be"
Log = Callable[..., None]  # of a line, and of its level (default: "INFO")


# ---- data and model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiloSpec:
    """Contents of silo.toml: the silo's name, node and data.

    `group` selects one natural client of the data set; without it the silo has all rows. With `simulated`, the rows are
    this silo's part of the federation's data set, by the partition that a simulation uses.
    """

    name: str
    dataset: str
    node: str = "127.0.0.1:9094"
    secret: str = ""
    key: str = ""  # the node's private key, which signs this silo's answers
    options: dict[str, Any] = field(default_factory=dict)
    group: str = ""
    simulated: bool = False
    policy: str = "policy.toml"
    ledger: str = "ledger.db"
    heldout: str = ""  # table of this silo's rows that are not trained on; the finished model is evaluated on it here

    @classmethod
    def read(cls, folder: Path) -> SiloSpec:
        table = codec.read_toml(folder / "silo.toml", "sordino federation new makes one")
        found: SiloSpec = codec.read(cls, table, "silo.toml")
        return found


def model_hash(config: Config) -> str:
    """Return the SHA-256 of the configuration's model, loss and columns, by which policies list allowed models."""
    encoding, (shape, classes) = config.task.encoding, ((), 0) if config.federation is None else config.record
    known = {"inputs": list(shape), "classes": classes, "encoding": None if encoding is None else encoding.sha256}
    return codec.digest({"model": config.task.model, "loss": config.task.loss, **known})


def silo_data(folder: Path, spec: SiloSpec) -> Dataset:
    """Load the data set of silo.toml; paths are relative to the silo's folder."""

    def there(given: Any) -> Any:
        return [str(folder / one) for one in given] if isinstance(given, list) else str(folder / str(given))

    files = {key: there(value) for key, value in spec.options.items() if key in ("path", "files", "test")}
    try:
        return load(spec.dataset, **{**spec.options, **files})
    except TypeError as error:  # a value of the wrong type
        found = f"options in silo.toml of a wrong type ({error})"
        raise ConfigError(found, f"options of the data set {spec.dataset}", "correct the options") from None


def site_bundle(config: Config, spec: SiloSpec, task: Task) -> Bundle | None:
    """Return the bundle with which this site scores raw rows of its files; None if its data are no table."""
    if task.encoding is None or isinstance(config.task.model, InMemoryModel):
        return None
    written = codec.read(CsvFormat, spec.options.get("format", {}), "options.format")
    return Bundle(encoding=task.encoding, model=config.task.model, seed=config.run.seed, csv=written)


def heldout_rows(folder: Path, spec: SiloSpec, task: Task) -> Records:
    """Return the held-out rows of a silo whose data are a table."""
    if task.encoding is None:
        found = "heldout in silo.toml, but a data set that is no table"
        raise ConfigError(found, "a table (dataset = csv)", "drop heldout")
    written = codec.read(CsvFormat, spec.options.get("format", {}), "options.format")
    x, y = encoded_rows(task.encoding, folder / spec.heldout, written)
    return Records(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y))


def silo_task(config: Config, spec: SiloSpec, folder: Path = Path()) -> Task:
    """Return a silo's task: the federation's model with this silo's records.

    A table must have the encoding that the federation's file declares: columns in order, categories, ranges, classes.
    """
    names = () if config.federation is None else config.federation.silos
    if config.federation is None or spec.name not in names:
        raise ConfigError(f"silo {spec.name!r}", "a silo of fed.toml", codec.nearest(spec.name, list(names)))
    place = names.index(spec.name)
    if spec.simulated:
        return config.build().as_silo(place)
    data, agreed = silo_data(folder, spec), config.task.encoding
    if agreed is not None and data.encoding is not None and agreed.differs(data.encoding):
        found = f"columns in silo.toml that differ from those of fed.toml: {agreed.differs(data.encoding)}"
        fix = "copy [task.options.columns], target, classes and person from fed.toml; put other columns into ignore"
        raise ConfigError(found, "the encoding of the federation", fix)
    x, y, classes = data.x, data.y, data.classes or 0
    if spec.group:
        if data.groups is None or spec.group not in data.names:
            found, known = f"group = {spec.group!r} in silo.toml", list(data.names or ())
            raise ConfigError(found, f"a natural silo of {spec.dataset}", codec.nearest(spec.group, known))
        mine = data.groups == np.unique(data.groups)[list(data.names).index(spec.group)]
        x, y = x[mine], y[mine]
    shape = config.record[0] or x.shape[1:]
    if shape != x.shape[1:]:
        found = f"records of shape {list(x.shape[1:])} in the data of silo.toml"
        fix = "correct the data, or the shape in [federation]"
        raise ConfigError(found, f"records of shape {list(shape)}, as in [federation]", fix)
    model, loss, _ = config.model_and_loss(shape, classes)
    task = Task.silo(model, place, len(names), (x, y), loss, own_code=config.task.own_code)
    return replace(task, encoding=data.encoding)


# ---- policy and ledger -----------------------------------------------------------------------------------------------


@codec.hides_values
@dataclass
class LedgerReplyStore:
    """Reply store that charges each message to the silo's privacy ledger before its noise is drawn."""

    ledger: Ledger
    policy: Policy
    silo: int
    model: str
    log: Log
    code: Callable[[Unit], OwnCode]  # what is proved of model and loss, by unit of privacy
    persons: bool = False  # each record holds all rows of one person
    project: str = ""  # by this silo's fed.toml
    receipts: dict[str, Receipt] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)

    def stored(self, job: str) -> bytes | None:
        return self.ledger.replay(job)

    @property
    def budget(self) -> dict[str, Any]:
        """Epsilon of this silo's data set: spent in all runs, the limit, and what is left."""
        found = self.ledger.statement(self.policy.dataset)
        spent, limit = upward(found.epsilon), found.limit.epsilon
        left = 0.0 if spent is None else max(0.0, math.floor((limit - spent) * 1e6) / 1e6)
        return {"dataset": self.policy.dataset, "spent": spent, "limit": limit, "left": left}

    def allows(self, job: Job) -> None:
        """Refuse a job that the policy forbids or that exceeds the ledger's limit; a run's first job admits the run."""
        grade = self.code(job.plan.unit).grade
        about: dict[str, Any] = {"silo": self.silo, "model": self.model, "own_code": grade, "persons": self.persons}
        refused = self.policy.check(job.plan, noise=job.mode, **about)
        if refused is not None:
            fix = "change the plan, or let the silo's operator change policy.toml"
            raise ConfigError(refused, "a plan that this silo's policy allows", fix)
        key = f"{job.run} {job.plan.hash}"  # another plan under the name of this run is refused by the ledger
        if key not in self.admitted:
            cost = SiloCost(job.plan, self.silo, self.policy.adversary, self.persons)
            asked: dict[str, Any] = {"whole": cost.whole, "jobs": cost.jobs, "project": self.project}
            self.ledger.admit(job.run, self.policy.dataset, cost.asked, **asked)
            self.admitted.add(key)
            self.log(f"run {job.run}: admitted")
        known = sum(self.ledger.charges(job.run).values())
        if known < job.paid:  # the server has seen this ledger with more charges: it is an older copy
            found = f"{known} charges of this run in the silo's ledger, but {job.paid} in the silo's replies"
            raise ConfigError(found, "a ledger with all charges that the silo has reported", RESTORES)

    def charge(self, job: Job, session: str | None = None) -> int:
        """Charge one job, or one session of secure aggregation; return the run's number of charges.

        Each session draws new noise, so that each session is charged as a release.
        """
        assert job.public is not None
        name, t = job.id if session is None else f"{job.id}.{session}", job.public.t
        cost = SiloCost(job.plan, self.silo, self.policy.adversary).job(t)
        receipt = self.ledger.charge(job.run, name, cost, round=t)
        if session is None:
            self.receipts = {job.id: receipt}
        self.log(f"run {job.run}: round {t + 1} charged")
        return sum(self.ledger.charges(job.run).values())

    def store(self, job: Job, reply: bytes) -> None:
        self.ledger.store(self.receipts.pop(job.id), reply)


@codec.hides_values
@dataclass(frozen=True)
class SiloService:
    """Dispatcher of a silo's requests: jobs, messages of secure aggregation, and deliveries of the finished model."""

    silo: Silo
    secagg: SecAggClient
    inbox: Inbox
    budget: Callable[[], dict[str, Any] | None] = lambda: None

    @classmethod
    def open(
        cls,
        folder: Path,
        spec: SiloSpec,
        task: Task,
        model: str,
        log: Log,
        config: Config | None = None,
        signer: Signer | None = None,
    ) -> SiloService:
        """Read the policy in a silo's folder, and open the ledger that enforces the policy's limit."""
        signer = signer or Signer()
        client, heldout = int(task.clients.held[0]), None
        bundle = None if config is None else site_bundle(config, spec, task)
        if spec.heldout:
            heldout = heldout_rows(folder, spec, task)
        inbox = partial(Inbox, folder, task, bundle, heldout=heldout, log=log)
        project = "" if config is None or config.federation is None else config.federation.project

        def refused(job: Job | None, error: Exception) -> None:
            about = "" if job is None else f" (run {job.run}, project {project!r}, plan {job.plan.hash})"
            log(f"refused: {' '.join(str(error).split())}{about}", "WARNING")

        if not spec.policy:
            log(NO_POLICY)
            store = InMemoryReplyStore()
            secagg = SecAggClient(
                client, task, refuse_release, lambda job, session: store.charge(job), time.time, signer, refused
            )
            public = Silo(task, store, refuse_release, log_refusal=refused)
            return cls(public, secagg, inbox(lambda run: run in store.paid))
        policy = policies.load(folder / spec.policy)
        ledger = Ledger.open(folder / spec.ledger, create=True)
        ledger.limit(policy.dataset, policy.limit)
        persons = task.encoding is not None and task.encoding.person is not None
        charged = LedgerReplyStore(ledger, policy, client, model, log, task.program.of, persons, project)
        secagg = SecAggClient(client, task, charged.allows, charged.charge, time.time, signer, refused)
        knows = inbox(lambda run: bool(sum(ledger.charges(run).values())))
        return cls(Silo(task, charged, charged.allows, log_refusal=refused), secagg, knows, lambda: charged.budget)

    def reply(self, data: bytes) -> bytes:
        if data.startswith(RESULT):
            return self.inbox.take(data)
        return self.secagg.reply(data) if data.startswith(MARK) else self.silo.reply(data)


def refuse_release(job: Job) -> None:
    """Refuse a run with secure noise in a silo without a ledger, whose charges would be lost by a restart."""
    if job.mode == "secure" and job.plan.release.kind != NoNoise.kind:
        found = "a run with secure noise in a silo without a policy"
        raise ConfigError(found, "a policy and a ledger", "write policy.toml (docs/silos.md)")


# ---- the process -----------------------------------------------------------------------------------------------------


def serve_silo(
    folder: Path,
    node: str | None = None,
    secret: Path | None = None,
    key: Path | None = None,
    as_json: bool = False,
    status: str = "",
) -> None:
    """Answer the jobs of a silo's node until the process is stopped (`sordino silo serve`).

    Lines go to silo.log and to standard output, what `sordino federation status` prints to status.json in the folder;
    `status` is HOST:PORT of its HTTP endpoint.
    """
    flower()
    spec, config, last = SiloSpec.read(folder), load_config(folder / "fed.toml"), ""
    write, board = rotating_log(folder / "silo.log"), StatusBoard(folder / NAME)
    project = "" if config.federation is None else config.federation.project
    board.update(role="silo", name=spec.name, project=project, state="started")

    def log(line: str, level: str = "INFO") -> None:  # a line equal to the one before is not repeated
        nonlocal last
        if line != last:
            print(json.dumps({"status": line}) if as_json else line, flush=True)
            write(line, level)
            board.update(last=line)
        last = line

    signer = signer_of(config.federation, key or (folder / spec.key if spec.key else None))
    service = SiloService.open(folder, spec, silo_task(config, spec, folder), model_hash(config), log, config, signer)
    shared = _read_secret(secret or (folder / spec.secret if spec.secret else None))
    if status:
        board.serve(status)
    log(f"silo {spec.name}: {len(service.silo.task.clients.index)} records, node {node or spec.node}")
    board.update(state="serving", budget=service.budget())
    notify_systemd("READY=1")
    answered, shown = False, time.monotonic()

    def reply(data: bytes) -> bytes:
        nonlocal answered
        board.update(busy=True)
        try:
            return signer.signed_answer(data, service.reply(data))
        finally:
            answered = True
            board.update(busy=False)

    def beat() -> None:  # what is left of the budget takes time to compose: not in every round
        nonlocal answered, shown
        board.beat()
        if answered and time.monotonic() - shown >= REFRESH:
            board.update(budget=service.budget())
            answered, shown = False, time.monotonic()

    serve(Node(node or spec.node, shared), reply, log, beat)


def _read_secret(file: Path | None) -> bytes | None:
    """Return the secret between a node and its silo's process; None where there is none."""
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        found = f"{file}, which cannot be read ({error.strerror})"
        raise ConfigError(found, "the file with the node's secret", "write it with key.sh") from None


def serve(node: Node, reply: Callable[[bytes], bytes], log: Log, beat: Callable[[], None] = lambda: None) -> None:
    """Answer the node's tasks until the process ends; a node that does not respond is asked again."""
    f, take = flower(), node.poller()
    while True:
        beat()
        try:
            task = take()
            if task is None:
                time.sleep(PULSE)
            else:
                answer_task(task, reply, log)
        except f.HTTPError as error:
            said = f"the node at {node.address} does not answer ({shorten(str(error)) or type(error).__name__})"
            log(said, "WARNING")
            time.sleep(IDLE)


def answer_task(task: NodeTask, reply: Callable[[bytes], bytes], log: Log) -> None:
    """Answer one task of the node; a refusal is logged here and sent to the server as an error."""
    with task.heartbeat():
        try:
            if task.data is None:
                needed = "a job of a Sordino server"
                raise ConfigError("a Flower task that Sordino did not write", needed, "stop that Flower run")
            answer = reply(task.data)
        except SordinoError as error:
            log(f"refused: {error}", "WARNING")
            task.refuse(str(error))
        else:
            task.reply(answer)
