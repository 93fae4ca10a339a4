"""Messages of a round as versioned bytes, never a pickle: jobs and replies of silos, orders of rank 0.

Called by engines/remote.py, engines/replies.py and engines/distributed.py; frames.py has the format. Reading one cannot
run code.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, get_args

from torch import Tensor

from sordino import codec
from sordino.engines import frames
from sordino.engines.frames import PUBLIC, Frame, bad, count, text, vector, within
from sordino.errors import DataError, UserError, brief_repr, shorten
from sordino.parts.encoding import Public
from sordino.parts.samplers import Cohort
from sordino.plan import Plan
from sordino.rng import Mode

HEAD = 4 << 20  # bytes of JSON: a plan may hold a number for every silo
WORDS = 4096  # bytes of JSON in a reply
_RUN = re.compile(r"[0-9a-f]{32}")
_JOB = re.compile(r"[0-9a-f]{64}")


@codec.hides_values
@dataclass(frozen=True)
class Job:
    """One client's work in one round; without `public` and `start` the question whether it will take part at all.

    The same work has the same `id`, whenever it is asked for: a silo that has answered sends the same bytes again. The
    seed of a simulation is in it; in a run for release there is none, and one that is sent is refused.
    """

    run: str
    plan: Plan
    client: int
    mode: Mode
    seed: int | None = None
    deadline: float = math.inf  # seconds since 1970, after which nobody waits for an answer
    public: Public | None = None
    start: Tensor | None = None  # [d]
    paid: int = 0  # charges of this run by the client's last receipt: a silo whose ledger has fewer refuses

    @property
    def admission(self) -> bool:
        """Whether nothing is computed yet."""
        return self.public is None

    @cached_property
    def id(self) -> str:
        """sha256 of all but the deadline and what was paid."""
        return hashlib.sha256(replace(self, deadline=math.inf, paid=0).to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        deadline = self.deadline if math.isfinite(self.deadline) else None
        said = {"run": self.run, "client": self.client, "mode": self.mode, "seed": self.seed, "deadline": deadline}
        said |= {"paid": self.paid, "plan": codec.dump(self.plan)}
        if self.public is None or self.start is None:
            return Frame("admission", said).to_bytes()
        arrays = {"start": self.start.cpu().numpy(), **frames.public_arrays(self.public)}
        return Frame("round", {**said, **frames.public_said(self.public)}, arrays).to_bytes()

    @classmethod
    def from_bytes(cls, body: bytes, size: int) -> Job:
        """What `to_bytes` wrote for a model of `size` numbers; else a `DataError` in one sentence."""
        frame = Frame.of_bytes(body, HEAD + 4 * size + frames.public_bytes(size), HEAD)
        words = ("run", "client", "mode", "seed", "deadline", "paid", "plan")
        if frame.kind == "admission":
            frame.holds(words, set())
            return _question(frame)
        if frame.kind != "round":
            raise bad(f"kind {brief_repr(frame.kind)}", "admission or round")
        frame.holds((*words, *PUBLIC), {"start", *frames.public_names(frame)})
        start = vector(frame.arrays["start"], "start", size)
        job = replace(_question(frame), public=frames.public_of(frame, size), start=start)
        _check_round(job, size)
        return job


def _question(frame: Frame) -> Job:
    """All of a job that is not the round's."""
    said = frame.said
    if not (isinstance(said["run"], str) and _RUN.fullmatch(said["run"])):
        raise bad(f"run = {brief_repr(said['run'])}", "the 32 hexadecimal digits of a run")
    if said["mode"] not in get_args(Mode):
        raise bad(f"mode = {brief_repr(said['mode'])}", "simulation or secure")
    if not isinstance(said["plan"], dict):
        raise bad(f"plan = {brief_repr(said['plan'])}", "a table")
    try:
        plan = read_plan(json.dumps(said["plan"], sort_keys=True))
    except UserError as error:
        raise bad(f"a plan that cannot run: {error}") from None
    client = count(said["client"], "client", plan.clients.population)
    seed, deadline = _seed(said["seed"], said["mode"]), math.inf if said["deadline"] is None else said["deadline"]
    if said["deadline"] is not None and (type(deadline) not in (int, float) or not 0 <= deadline < math.inf):
        raise bad(f"deadline = {brief_repr(deadline)}", "seconds since 1970, or null")
    return Job(said["run"], plan, client, said["mode"], seed, float(deadline), paid=count(said["paid"], "paid"))


def _seed(seed: Any, mode: Mode) -> int | None:
    """A simulation's; in a run for release a seed would be somebody's knowledge of the noise."""
    if mode == "secure" and seed is not None:
        raise bad("a seed in secure mode", "none: every silo's noise comes from its own operating system")
    if mode == "simulation" and not (type(seed) is int and -(2**63) <= seed < 2**63):
        raise bad(f"seed = {brief_repr(seed)}", "a whole number of at most 64 bits, in a simulation")
    found: int | None = seed
    return found


@lru_cache(maxsize=8)
def read_plan(written: str) -> Plan:
    """A plan from its JSON. Every kind there is stands ready before the first is looked up."""
    from sordino import recipes

    assert recipes.RECIPES  # importing them has brought in every part of our own
    codec.load_plugins()
    table = json.loads(written)
    codec.check_plain(table)
    found: Plan = codec.read(Plan, table)
    return found


def _check_round(job: Job, size: int) -> None:
    """The round's numbers are those of the plan."""
    public, plan = job.public, job.plan
    assert public is not None
    count(public.t, "t", plan.rounds)
    if public.size != size:
        raise bad(f"size = {public.size}", f"the model's {size}")
    wanted = None if plan.mask is None else plan.mask.length(size)
    found = None if public.mask is None else len(public.mask)
    if found != wanted:
        raise bad(f"a mask of {found} coordinates", f"{wanted}, as the plan says")


@codec.hides_values
@dataclass(frozen=True)
class Reply:
    """One client's answer: its noised row; or why there is none; or, to the first question, that it takes part.

    `charges` is the receipt: how often this run has been charged to the client's data so far, this message included.
    """

    job: str
    client: int
    row: Tensor | None = None  # [d'], float32
    refused: str = ""
    charges: int = 0

    def to_bytes(self) -> bytes:
        said = {"job": self.job, "client": self.client, "refused": shorten(self.refused), "charges": self.charges}
        return Frame("reply", said, {} if self.row is None else {"row": self.row.cpu().numpy()}).to_bytes()

    @classmethod
    def from_bytes(cls, body: bytes, job: Job, length: int) -> Reply:
        """The answer to `job`, whose row has `length` numbers; else a `DataError` in one sentence."""
        frame = Frame.of_bytes(body, WORDS + 4 * length, WORDS)
        if frame.kind != "reply":
            raise bad(f"kind {brief_repr(frame.kind)}", "reply")
        said, refused = frame.said, text(frame.said.get("refused"), "refused")
        sent = {"row"} if not refused and not job.admission else set[str]()
        frame.holds(("job", "client", "refused", "charges"), sent)
        if said["job"] != job.id or count(said["client"], "client") != job.client:
            raise bad("an answer to another job", f"client {job.client}'s to this one: the same plan, round and start")
        row = vector(frame.arrays["row"], "row", length) if sent else None
        return cls(job.id, job.client, row, refused, count(said["charges"], "charges"))


LINE = 1 << 12  # bytes that a line of JSON may take
END = Frame("end").to_bytes()  # the run is over


@codec.hides_values
@dataclass(frozen=True)
class Order:
    """What rank 0 wants: the messages of a cohort, or, without one, an evaluation. The vector follows."""

    public: Public | None = None
    cohort: Cohort | None = None

    def written(self) -> bytes:
        """What everybody knows, and the cohort; nothing for an evaluation."""
        if self.public is None or self.cohort is None:
            return Frame("evaluation").to_bytes()
        arrays = {"cohort": self.cohort.astype("<i8"), **frames.public_arrays(self.public)}
        return Frame("round", frames.public_said(self.public), arrays).to_bytes()


@dataclass(frozen=True)
class Limits:
    """What an order may name: so many clients, so many coordinates. Public numbers of the plan and the model."""

    population: int
    size: int

    @property
    def most(self) -> int:
        """Bytes of the longest order there is."""
        return LINE + 8 * self.population + frames.public_bytes(self.size)

    def read(self, body: bytes) -> Order | None:
        """The order, or None when the run is over; `DataError` for anything that rank 0 would not say."""
        frame = Frame.of_bytes(body, self.most, LINE)
        if frame.kind in ("end", "evaluation"):
            frame.holds((), set())
            return None if frame.kind == "end" else Order()
        if frame.kind != "round":
            raise DataError("other words than those of an order")
        frame.holds(PUBLIC, {"cohort", *frames.public_names(frame)})
        return Order(frames.public_of(frame, self.size), within(frame.arrays["cohort"], "cohort", self.population))
