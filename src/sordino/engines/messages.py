"""Byte formats of a round's messages: jobs and replies of silos, and requests of rank 0 to other ranks.

Used by engines/remote.py, engines/distributed.py and federation/. Every message is a line of JSON, then arrays.
Reading a message cannot run code:

    {"format": 1, "kind": "round", ..., "arrays": [["start", "<f4", 7850], ...]}\\n   then their bytes, in that order

The reader limits length and content; any other message is refused with a `DataError`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino import codec
from sordino.errors import DataError, UserError, brief_repr, shorten
from sordino.parts.encoding import Public
from sordino.parts.samplers import Cohort
from sordino.plan import BROADCAST, Plan
from sordino.rng import Mode

FORMAT = 1
DTYPES = ("<f4", "<f8", "<i8")
MOST_BROADCAST = 4  # vectors of earlier releases that a solver may receive
MOST_STATE = 16  # numbers that steps may have learned from earlier releases
JOB_HEAD, REPLY_HEAD, ORDER_HEAD = 4 << 20, 4096, 4096  # bytes of JSON: a plan may hold a number for every silo
PUBLIC = ("t", "clip_norm", "size", "state")
Array = NDArray[Any]


def bad(found: str, needed: str) -> DataError:
    return DataError(f"a message with {found}", needed, "install the same version of sordino on both sides")


@codec.hides_values
@dataclass(frozen=True)
class Frame:
    """Content of one message: a kind, JSON fields, and one-dimensional arrays."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of_round(cls, public: Public, fields: Mapping[str, Any], arrays: Mapping[str, Array]) -> Frame:
        """Build a round's message from `fields`, `arrays` and the public values; an infinite clip norm becomes null."""
        clip_norm = None if public.clip_norm == math.inf else public.clip_norm
        known = {"t": public.t, "clip_norm": clip_norm, "size": public.size, "state": dict(public.state)}
        held = {} if public.mask is None else {"mask": public.mask.cpu().numpy().astype("<i8")}
        held |= {f"{BROADCAST}{name}": value.cpu().numpy().astype("<f4") for name, value in public.broadcast.items()}
        return cls("round", {**fields, **known}, {**arrays, **held})

    def public(self, size: int) -> Public:
        """Read the public values of a round that `of_round` wrote, for a model of `size` numbers."""
        t, clip_norm, length, state = (self.fields.get(name) for name in PUBLIC)
        if clip_norm is not None and not (type(clip_norm) in (int, float) and 0 < clip_norm < math.inf):
            raise bad(f"clip_norm {brief_repr(clip_norm)}", "a number above 0, or null")
        broadcast = [name for name in self.arrays if name.startswith(BROADCAST)]
        if len(broadcast) > MOST_BROADCAST:
            raise bad(f"{len(broadcast)} broadcast vectors", f"at most {MOST_BROADCAST} such vectors")
        values = list(state.values()) if isinstance(state, dict) else [math.nan]
        if len(values) > MOST_STATE or not all(type(one) in (int, float) and math.isfinite(one) for one in values):
            raise bad(f"state {brief_repr(state)}", f"at most {MOST_STATE} finite numbers, by name")
        mask = self.arrays.get("mask")
        return Public(
            count(t, "t"),
            math.inf if clip_norm is None else float(clip_norm),
            count(length, "size", size + 1),
            None if mask is None else torch.from_numpy(distinct(mask, "mask", size)),
            {name.removeprefix(BROADCAST): vector(self.arrays[name], name, size) for name in broadcast},
            state={name: float(value) for name, value in dict(state or {}).items()},
        )

    def to_bytes(self) -> bytes:
        kinds = {name: array.dtype.newbyteorder("<").str for name, array in self.arrays.items()}
        assert set(kinds.values()) <= set(DTYPES), kinds
        declared = [[name, kinds[name], len(array)] for name, array in self.arrays.items()]
        head = {"format": FORMAT, "kind": self.kind, **self.fields, "arrays": declared}
        bodies = (np.ascontiguousarray(held).astype(kinds[n], copy=False).tobytes() for n, held in self.arrays.items())
        return b"".join([json.dumps(head).encode(), b"\n", *bodies])

    @classmethod
    def of_bytes(cls, body: bytes, most: int, head: int) -> Frame:
        """Parse a message written by `to_bytes`; refuse more than `most` bytes, or more than `head` bytes of JSON."""
        if len(body) > most:
            raise bad(f"{len(body)} bytes", f"at most {most} bytes")
        end = body.find(b"\n", 0, head)
        if end < 0:
            raise bad("no line of JSON at its beginning", f"a first line of at most {head} bytes")
        try:
            fields = json.loads(body[:end])
        except (ValueError, RecursionError):
            raise bad("a first line that is not JSON", "a JSON object in the first line") from None
        if not isinstance(fields, dict):
            raise bad("a first line that is no JSON object", "a JSON object in the first line")
        version, kind, declared = (fields.pop(name, None) for name in ("format", "kind", "arrays"))
        if type(version) is not int or version != FORMAT:
            raise bad(f"format {brief_repr(version)}", f"format {FORMAT}")
        if not isinstance(kind, str):
            raise bad(f"kind {brief_repr(kind)}", "a kind that is text")
        return cls(kind, fields, _arrays(declared, memoryview(body)[end + 1 :]))

    def check_names(self, fields: Iterable[str], arrays: Iterable[str]) -> None:
        """Refuse a message whose fields or arrays are not exactly the named ones and a round's public values."""
        own = {name for name in self.arrays if self.kind == "round" and (name == "mask" or name.startswith(BROADCAST))}
        known = PUBLIC if self.kind == "round" else ()
        for found, needed in ((set(self.fields), {*fields, *known}), (set(self.arrays), {*arrays, *own})):
            if found != needed:
                other = sorted(found ^ needed)[0]
                wrong = "a missing" if other in needed else "an unknown"
                raise bad(f"{wrong} entry {brief_repr(other)}", f"the entries of a message of kind {self.kind!r}")


def _arrays(declared: Any, raw: memoryview) -> dict[str, Array]:
    if not isinstance(declared, list):
        raise bad(f"arrays {brief_repr(declared)}", "a list of [name, type, length]")
    found: dict[str, Array] = {}
    place = 0
    for one in declared:
        if not (isinstance(one, list) and len(one) == 3 and isinstance(one[0], str) and one[0] not in found):
            raise bad(f"an array {brief_repr(one)}", "[name, type, length], each name once")
        name, dtype, length = one
        if dtype not in DTYPES:
            raise bad(f"an array of type {brief_repr(dtype)}", f"a type out of {', '.join(DTYPES)}")
        size = count(length, f"the length of {brief_repr(name)}") * np.dtype(dtype).itemsize
        if place + size > len(raw):
            raise bad(f"{len(raw) - place} bytes for array {brief_repr(name)}", f"all of its {size} bytes")
        found[name] = np.frombuffer(raw[place : place + size], dtype=dtype)
        place += size
    if place != len(raw):
        raise bad(f"{len(raw) - place} bytes after its last array", "a message that ends with its last array")
    return found


def count(value: Any, name: str, end: int = 2**63) -> int:
    """Return `value` if it is a whole number from 0 to `end` - 1; refuse any other value."""
    if type(value) is not int or not 0 <= value < end:
        raise bad(f"{name} = {brief_repr(value)}", f"a whole number from 0 to {end - 1}")
    return value


def vector(array: Array, name: str, length: int) -> Tensor:
    """Return the array as a tensor if it has `length` finite float32 numbers; refuse any other array."""
    if array.dtype != np.dtype("<f4"):
        raise bad(f"{name} of type {array.dtype.str}", "type <f4 (float32)")
    if len(array) != length:
        raise bad(f"{name} of {len(array)} numbers", f"{length} numbers")
    if not bool(np.isfinite(array).all()):
        raise bad(f"NaN or infinity in {name}", "finite numbers")
    return torch.from_numpy(array.astype(np.float32))


def distinct(array: Array, name: str, end: int) -> NDArray[np.int64]:
    """Return the array if it has distinct whole numbers from 0 to `end` - 1; refuse any other array."""
    if array.dtype != np.dtype("<i8"):
        raise bad(f"{name} of type {array.dtype.str}", "type <i8 (int64)")
    if len(array) and not 0 <= array.min() <= array.max() < end:
        raise bad(f"a number out of range in {name}", f"numbers from 0 to {end - 1}")
    if len(np.unique(array)) != len(array):
        raise bad(f"a number twice in {name}", "every number at most once")
    return array.astype(np.int64)


def digest_or_none(value: Any) -> str:
    """Return `value` if it is a SHA-256 in hexadecimal digits, or the empty string; refuse any other value."""
    if not (isinstance(value, str) and re.fullmatch("([0-9a-f]{64})?", value)):
        raise bad(f"encoding = {brief_repr(value)}", "64 hexadecimal digits, or an empty text")
    return value


def public_bytes(size: int) -> int:
    """Return the largest size in bytes of a round's public values, for a model of `size` parameters."""
    return (8 + 4 * MOST_BROADCAST) * size


# ---- silos ----------------------------------------------------------------------------------------------------------


@codec.hides_values
@dataclass(frozen=True)
class Job:
    """Request of the server to one client: train in one round or, without `public` and `start`, accept the run's plan.

    A request that is sent again has the same `id`, and a silo sends the same reply to it. In a simulation the request
    holds the seed of the run; in a run with secure noise a request with a seed is refused.
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
    encoding: str = ""  # SHA-256 of the columns and classes that the server declares: a silo with another refuses

    @property
    def admission(self) -> bool:
        """Whether this request asks, before the first round, if the client accepts the plan."""
        return self.public is None

    @cached_property
    def id(self) -> str:
        """SHA-256 of all fields of the request except `deadline` and `paid`."""
        return hashlib.sha256(replace(self, deadline=math.inf, paid=0).to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        deadline = self.deadline if math.isfinite(self.deadline) else None
        fields = {"run": self.run, "client": self.client, "mode": self.mode, "seed": self.seed, "deadline": deadline}
        fields |= {"paid": self.paid, "encoding": self.encoding, "plan": codec.dump(self.plan)}
        if self.public is None or self.start is None:
            return Frame("admission", fields).to_bytes()
        return Frame.of_round(self.public, fields, {"start": self.start.cpu().numpy()}).to_bytes()

    @classmethod
    def from_bytes(cls, body: bytes, size: int) -> Job:
        """Parse a request for a model of `size` parameters; raise `DataError` for any other bytes."""
        frame = Frame.of_bytes(body, JOB_HEAD + 4 * size + public_bytes(size), JOB_HEAD)
        if frame.kind not in ("admission", "round"):
            raise bad(f"kind {brief_repr(frame.kind)}", "kind admission or round")
        names = ("run", "client", "mode", "seed", "deadline", "paid", "encoding", "plan")
        frame.check_names(names, {"start"} if frame.kind == "round" else ())
        job = cls._of_fields(*(frame.fields[name] for name in names))
        if frame.kind == "admission":
            return job
        public, mask = frame.public(size), job.plan.mask
        count(public.t, "t", job.plan.rounds)
        if public.size != size:
            raise bad(f"size = {public.size}", f"the model's {size} parameters")
        wanted, found = (None if mask is None else mask.length(size)), None if public.mask is None else len(public.mask)
        if found != wanted:
            raise bad(f"a mask of {found} coordinates", f"the plan's {wanted} coordinates")
        return replace(job, public=public, start=vector(frame.arrays["start"], "start", size))

    @classmethod
    def _of_fields(
        cls, run: Any, client: Any, mode: Any, seed: Any, deadline: Any, paid: Any, encoding: Any, table: Any
    ) -> Job:
        if not (isinstance(run, str) and re.fullmatch("[0-9a-f]{32}", run)):
            raise bad(f"run = {brief_repr(run)}", "a run id of 32 hexadecimal digits")
        if mode not in get_args(Mode):
            raise bad(f"mode = {brief_repr(mode)}", "mode simulation or secure")
        if not isinstance(table, dict):
            raise bad(f"plan = {brief_repr(table)}", "a plan as a JSON object")
        try:
            plan = read_plan(json.dumps(table, sort_keys=True))
        except UserError as error:
            raise bad(f"a plan that cannot run ({error})", "a plan that this silo can run") from None
        client = count(client, "client", plan.clients.population)
        if mode == "secure" and seed is not None:  # whoever knows a seed knows the noise
            raise bad("a seed in secure mode", "no seed: every silo's noise comes from its own operating system")
        if mode == "simulation" and not (type(seed) is int and -(2**63) <= seed < 2**63):
            raise bad(f"seed = {brief_repr(seed)}", "a whole number of at most 64 bits, in a simulation")
        if deadline is not None and (type(deadline) not in (int, float) or not 0 <= deadline < math.inf):
            raise bad(f"deadline = {brief_repr(deadline)}", "seconds since 1970, or null")
        until = math.inf if deadline is None else float(deadline)
        return cls(run, plan, client, mode, seed, until, paid=count(paid, "paid"), encoding=digest_or_none(encoding))


@lru_cache(maxsize=8)
def read_plan(written: str) -> Plan:
    """Read a plan from its JSON; parts of recipes and plugins are registered first."""
    from sordino import recipes

    assert recipes.RECIPES  # the import registers every shipped part
    codec.load_plugins()
    table = json.loads(written)
    codec.check_plain(table)
    found: Plan = codec.read(Plan, table)
    return found


@codec.hides_values
@dataclass(frozen=True)
class Reply:
    """Reply of one client to a job: a noised message, the reason of a refusal, or neither (the plan is accepted).

    `charges` is the number of this run's charges in the client's ledger, this message included. `encoding` is the
    SHA-256 of the columns and classes of the client's records; it is sent with the acceptance of a plan.
    """

    job: str
    client: int
    row: Tensor | None = None  # [d'], float32
    refused: str = ""
    charges: int = 0
    encoding: str = ""

    def to_bytes(self) -> bytes:
        fields = {"job": self.job, "client": self.client, "refused": shorten(self.refused), "charges": self.charges}
        fields["encoding"] = self.encoding
        return Frame("reply", fields, {} if self.row is None else {"row": self.row.cpu().numpy()}).to_bytes()

    @classmethod
    def from_bytes(cls, body: bytes, job: Job, length: int) -> Reply:
        """Parse the reply to `job`, whose message has `length` numbers; raise `DataError` for any other bytes."""
        frame = Frame.of_bytes(body, REPLY_HEAD + 4 * length, REPLY_HEAD)
        if frame.kind != "reply":
            raise bad(f"kind {brief_repr(frame.kind)}", "kind reply")
        fields, refused = frame.fields, frame.fields.get("refused")
        if not isinstance(refused, str) or len(refused) > 600:
            raise bad(f"refused = {brief_repr(refused)}", "text of at most 600 characters")
        sent = {"row"} if not refused and not job.admission else set[str]()
        frame.check_names(("job", "client", "refused", "charges", "encoding"), sent)
        if fields["job"] != job.id or count(fields["client"], "client") != job.client:
            raise bad("the reply to another job", f"the reply of client {job.client} to this job")
        row = vector(frame.arrays["row"], "row", length) if sent else None
        charges, encoding = count(fields["charges"], "charges"), digest_or_none(fields["encoding"])
        return cls(job.id, job.client, row, refused, charges, encoding)


# ---- ranks ----------------------------------------------------------------------------------------------------------

END = Frame("end").to_bytes()  # order that ends the run


@codec.hides_values
@dataclass(frozen=True)
class Order:
    """Request of rank 0 to the other ranks: train a cohort or, without a cohort, evaluate. The model is sent next."""

    public: Public | None = None
    cohort: Cohort | None = None

    def to_bytes(self) -> bytes:
        if self.public is None or self.cohort is None:
            return Frame("evaluation").to_bytes()
        return Frame.of_round(self.public, {}, {"cohort": self.cohort.astype("<i8")}).to_bytes()


@dataclass(frozen=True)
class Limits:
    """Size limits of rank 0's requests, computed from the public numbers of clients and of model parameters."""

    population: int
    size: int

    @property
    def most(self) -> int:
        """Size of the longest valid request in bytes."""
        return ORDER_HEAD + 8 * self.population + public_bytes(self.size)

    def read(self, body: bytes) -> Order | None:
        """Parse a request of rank 0; None means the end of the run. Bytes that rank 0 cannot have sent are refused."""
        frame = Frame.of_bytes(body, self.most, ORDER_HEAD)
        if frame.kind not in ("end", "evaluation", "round"):
            raise bad(f"kind {brief_repr(frame.kind)}", "kind end, evaluation or round")
        frame.check_names((), {"cohort"} if frame.kind == "round" else ())
        if frame.kind == "round":
            return Order(frame.public(self.size), distinct(frame.arrays["cohort"], "cohort", self.population))
        return None if frame.kind == "end" else Order()
