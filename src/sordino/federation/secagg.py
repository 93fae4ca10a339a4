"""Secure aggregation (Bonawitz et al. 2017): messages, masks, the silo's side (`silo_service`), the server's (`app`).

A session has four stages, in which each member (a client of the cohort) sends

    keys    two fresh public keys, signed
    shares  Shamir shares of its masking key and of the seed of its own mask, encrypted for each other member
    mask    its row (its message as a vector), charged to its ledger, then noised, then masked
    unmask  one share of each member: of that member's seed if it has sent its row, else of its masking key

Each stage goes to the members that answered the stage before. The server learns who takes part and the sum, but no
single row. A row x_i with its share N_i of the noise, in integer steps of a public grid, is sent with cancelling masks:

    y_i = rint((x_i + N_i) / g) + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)   mod 2^bits,
    s_ij = HKDF(ECDH(i, j));  g and bits, 16 or more, from the plan (`accounting.secure_sums`)

PRG is AES-256 in counter mode, b_i is member i's own seed, s_ij the secret of members i and j. A mask is as hard to
guess as its 256-bit key. Flower's own generator reduces a key to 28 effective bits (flwrlabs/flower#7522), which can be
searched in seconds, and is not used.

Each member signs its two public keys with its silo's node key, and checks all members' signatures against the keys that
its own copy of the federation's file pins. So the server can neither invent members nor send messages for one.

Assumption: the server sends all members the same list of those that have sent their rows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino import codec
from sordino.accounting.secure_sums import SumGrid
from sordino.engines.base import ClientJob, Collected
from sordino.engines.inprocess import InProcessWorker
from sordino.engines.messages import Job, count
from sordino.engines.remote import Remote, RemoteWorker, check_encoding, worker_of
from sordino.errors import BudgetError, DataError, EngineError, QuorumError, UserError, brief_repr, shorten
from sordino.federation.flower_api import flower
from sordino.federation.keys import Signer
from sordino.parts.releases import NoiseShares
from sordino.plan import Plan
from sordino.rng import Streams, streams
from sordino.task import Task

MARK = b"sordino sum 2\n"
HEAD = 1 << 20  # most bytes of a message's JSON head
STAGES = ("keys", "shares", "mask", "unmask")
KEYS = ("encryption", "masking", "signature")
_WRITTEN, _SAME = "a message written by Sordino", "use the same version of sordino on server and silos"
_AGAIN = "let the server start a new session"
Words = NDArray[np.unsignedinteger[Any]]


@codec.hides_values
@dataclass(frozen=True)
class SecAggMessage:
    """Message of a secure aggregation session, a server's request or a client's reply: a JSON head, then bytes."""

    stage: str
    session: str
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def to_bytes(self) -> bytes:
        head = json.dumps({"stage": self.stage, "session": self.session, "fields": self.fields}).encode()
        return MARK + len(head).to_bytes(4, "little") + head + self.body

    @classmethod
    def of_bytes(cls, data: bytes) -> SecAggMessage:
        """Parse a message written by `to_bytes`; raise `DataError` for any other bytes."""
        start = len(MARK) + 4
        length = int.from_bytes(data[len(MARK) : start], "little")
        if not data.startswith(MARK) or not 0 < length <= min(HEAD, len(data) - start):
            raise DataError("a secure aggregation message without a JSON head", _WRITTEN, _SAME)
        try:
            table = json.loads(data[start : start + length])
            stage, session, fields = table["stage"], table["session"], table["fields"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError("an unreadable secure aggregation message", _WRITTEN, _SAME) from None
        if stage not in STAGES or not isinstance(session, str) or len(session) > 64 or not isinstance(fields, dict):
            needed = "one of " + ", ".join(STAGES)
            raise DataError(f"stage {brief_repr(stage)} of secure aggregation", needed, _SAME)
        return cls(stage, session, fields, data[start + length :])


def shares_of(plan: Plan) -> NoiseShares:
    """Return the plan's release; refuse any release but `noise_shares` with at_least >= 2."""
    if not isinstance(plan.release, NoiseShares) or plan.release.at_least < 2:
        found = f"release {plan.release.kind!r} with secure aggregation"
        raise EngineError(found, "release noise_shares with at_least of 2 or more", "change the plan's release")
    return plan.release


def signed_keys(session: str, client: int, encryption: str, masking: str) -> bytes:
    """Return the bytes that a member signs: the session, the member's number and its two public keys."""
    return json.dumps(["sordino secure sum", session, client, encryption, masking]).encode()


# ---- masks and the grid ----------------------------------------------------------------------------------------------


def mask_words(key: bytes, count: int, bits: int = 64) -> Words:
    """Return a mask of `count` words of `bits` bits: the AES-256-CTR key stream of a key that is used once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = Cipher(algorithms.AES(hashlib.sha256(key).digest()), modes.CTR(bytes(16))).encryptor()
    return words_of_bytes(cipher.update(bytes(count * bits // 8)), bits)


def words_of_bytes(data: bytes, bits: int) -> Words:
    """Return the little-endian words of `bits` bits in `data`."""
    return np.frombuffer(data, dtype=f"<u{bits // 8}").astype(f"u{bits // 8}")


def shared_key(own: Any, other: Any) -> bytes:
    """Return the shared key of two clients: HKDF of their ECDH secret, in the form that Flower's `encrypt` takes."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = own.exchange(ec.ECDH(), other)
    return base64.urlsafe_b64encode(HKDF(hashes.SHA256(), 32, None, None).derive(secret))


def pairwise_mask(member: int, own: Any, publics: Mapping[int, bytes], count: int, bits: int) -> Words:
    """Return the sum of a client's pairwise masks; one client of each pair adds the mask, the other subtracts it."""
    total: Words = np.zeros(count, dtype=f"u{bits // 8}")
    for other, public in publics.items():
        mask = mask_words(shared_key(own, flower().bytes_to_public_key(public)), count, bits)
        total = total + mask if other > member else total - mask
    return total


def grid_of(plan: Plan) -> SumGrid:
    """Return the grid and the word size of a plan's secure sums."""
    return shares_of(plan).sum_grid(plan.clients, plan.local.reads)


def to_words(steps: NDArray[np.int64], grid: SumGrid) -> Words:
    """Return integers modulo 2^bits, as words of the grid's size."""
    return steps.astype(f"u{grid.bits // 8}")


def from_words(words: Words, grid: SumGrid) -> Tensor:
    """Convert a sum modulo 2^bits to real numbers: its residue in [-2^(bits-1), 2^(bits-1)) times the grid's step."""
    return torch.from_numpy(words.view(f"i{grid.bits // 8}").astype(np.float64)) * grid.step


# ---- a silo ----------------------------------------------------------------------------------------------------------


@codec.hides_values
@dataclass
class ClientSession:
    """Client's state in one session of secure aggregation, which is one attempt at one round."""

    encryption: Any = None  # private keys
    masking: Any = None
    own: bytes = field(default_factory=lambda: secrets.token_bytes(32))  # seed of the client's own mask
    members: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # public keys: for encryption, for masks
    threshold: int = 0
    sent: bool = False
    opened: bool = False
    shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # by member: of its seed, of its masking key

    def encryption_key(self, other: int) -> bytes:
        if other not in self.members:
            needed = "a client that has been in the session since its first stage"
            raise DataError(f"member {other} in a session of secure aggregation", needed, _AGAIN)
        return shared_key(self.encryption, flower().bytes_to_public_key(self.members[other][0]))


@codec.hides_values
@dataclass
class SecAggClient:
    """Client of secure aggregation in one silo; `charge` charges a session's release to the silo's ledger.

    The client helps to unmask only sums of at least the plan's `at_least` members, and each session at most once. Noise
    is drawn, and charged, anew in each session: two sums over different members with the same noise would reveal one
    message.
    """

    client: int
    task: Any
    allows: Callable[[Job], None]
    charge: Callable[[Job, str], int]
    now: Callable[[], float]
    signer: Signer = field(default_factory=Signer)
    log_refusal: Callable[[Job | None, Exception], None] = lambda job, error: None
    sessions: dict[str, ClientSession] = field(default_factory=dict)

    def reply(self, data: bytes) -> bytes:
        """Reply to one message of the server; raise `DataError` for a malformed message."""
        message = SecAggMessage.of_bytes(data)
        if message.stage == "keys":
            self.sessions = {message.session: ClientSession()}  # one at a time
        session = self.sessions.get(message.session)
        if session is None:
            found = "an unknown session of secure aggregation"
            raise DataError(found, "a session in which this silo has sent its keys", _AGAIN)
        stages = {"keys": self._keys, "shares": self._shares, "mask": self._mask, "unmask": self._unmask}
        try:
            fields, body = stages[message.stage](session, message)
        except (UserError, BudgetError) as error:
            job = None
            with suppress(UserError):
                job = Job.from_bytes(message.body, self.task.layout.size) if message.stage == "mask" else None
            self.log_refusal(job, error)
            fields, body = {"refused": shorten(str(error))}, b""
        return SecAggMessage(message.stage, message.session, fields, body).to_bytes()

    def _keys(self, session: ClientSession, message: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        f = flower()
        (session.encryption, public), (session.masking, mask) = f.generate_key_pairs(), f.generate_key_pairs()
        pair = f.public_key_to_bytes(public).hex(), f.public_key_to_bytes(mask).hex()
        signature = self.signer.sign(signed_keys(message.session, self.client, *pair)).hex()
        return {"encryption": pair[0], "masking": pair[1], "signature": signature}, b""

    def _shares(self, session: ClientSession, message: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        """Store the members' keys; return a share of both secrets for each member, encrypted for that member."""
        f, table = flower(), message.fields.get("members")
        try:
            rows = {int(one): [str(part) for part in row] for one, row in dict(table).items()}  # type: ignore[arg-type]
            members = {one: (bytes.fromhex(row[0]), bytes.fromhex(row[1])) for one, row in rows.items()}
            signatures = {one: bytes.fromhex(row[2]) for one, row in rows.items()}
        except (TypeError, ValueError, IndexError, KeyError):
            needed = "two public keys of each member"
            raise DataError("members of secure aggregation without keys", needed, _AGAIN) from None
        for one, (public, mask, *_) in rows.items():
            if not self.signer.signed_by(one, signatures[one], signed_keys(message.session, one, public, mask)):
                found = f"member {one} of a secure sum with keys that its silo did not sign"
                fix = "check the pinned keys in fed.toml of server and silos"
                raise DataError(found, "keys signed by the silo's key in [federation]", fix)
        session.threshold = count(message.fields.get("threshold"), "threshold")
        if self.client not in members or not 1 < session.threshold <= len(members) or session.members:
            found = f"secure aggregation of {len(members)} members with threshold {session.threshold}"
            needed = "this silo among the members, a threshold of 2 or more, and one request per session"
            raise DataError(found, needed, _AGAIN)
        session.members = members
        both = [session.own, f.private_key_to_bytes(session.masking)]
        cut = [f.create_shares(secret, session.threshold, len(members)) for secret in both]
        sealed = {}
        for other, *pair in zip(sorted(members), *cut, strict=True):
            if other == self.client:
                session.shares[other] = (pair[0], pair[1])
            else:
                text = json.dumps([part.hex() for part in pair]).encode()
                sealed[str(other)] = f.encrypt(session.encryption_key(other), text).decode()
        return {"sealed": sealed}, b""

    def _mask(self, session: ClientSession, message: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        """Check the job, decrypt the shares, check the policy, charge, draw noise, and return the masked message."""
        job = Job.from_bytes(message.body, self.task.layout.size)
        if job.admission or job.client != self.client or session.sent:
            found = "a secure aggregation job of another silo, or a second one"
            raise DataError(found, "one job for this silo in each session", _AGAIN)
        if self.now() > job.deadline:
            needed = "a job that the server still waits for"
            raise DataError("a job past its deadline", needed, "synchronise the clocks; nothing was charged")
        if job.mode == "secure" and not self.signer.pinned:
            found = "a secure sum with secure noise in a silo without the other members' pinned keys"
            raise DataError(found, "[federation] keys of each silo", "run sordino federation pin fed.toml NAME.pub")
        least = getattr(job.plan.release, "at_least", None)
        if least != session.threshold:
            found = f"threshold {session.threshold} of secure aggregation"
            raise DataError(found, f"the plan's at_least = {least} as threshold", _AGAIN)
        sealed = message.fields.get("sealed")
        if not isinstance(sealed, dict) or len(sealed) + 1 < session.threshold:
            needed = f"shares of at least {session.threshold - 1} other members"
            raise DataError("fewer shares than the threshold", needed, _AGAIN)
        for name, text in sealed.items():
            try:
                key = session.encryption_key(int(name))
                first, second, *_ = json.loads(flower().decrypt(key, str(text).encode()))
                session.shares[int(name)] = (bytes.fromhex(first), bytes.fromhex(second))
            except Exception:
                found = f"a share from member {brief_repr(name)} that cannot be decrypted"
                raise DataError(found, "a share encrypted for this silo", _AGAIN) from None
        check_encoding(job, self.task)
        self.allows(job)
        clean = clean_row(worker_of(job.plan, self.task, streams(job.mode, job.seed or 0)), job)
        charges, grid = self.charge(job, message.session), grid_of(job.plan)
        words, size = to_words(noised_steps(job, clean), grid), (len(clean), grid.bits)
        session.sent = True
        others = {other: session.members[other][1] for other in session.shares if other != self.client}
        masks = pairwise_mask(self.client, session.masking, others, *size) + mask_words(session.own, *size)
        return {"charges": charges}, (words + masks).astype(f"<u{grid.bits // 8}").tobytes()

    def _unmask(self, session: ClientSession, message: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        """Return one share of each member, of its seed or of its key but never both; refuse too few members."""
        listed = message.fields.get("sent")
        sent = {count(one, "a member") for one in listed} if isinstance(listed, list) else set()
        if len(sent) < session.threshold or not sent <= set(session.shares) or session.opened or not session.sent:
            found = f"a request to open a sum of {len(sent)} members"
            needed = f"at least {session.threshold} members that have sent a message, and one request per session"
            raise DataError(found, needed, _AGAIN)
        session.opened = True
        return {"shares": {str(one): pair[0 if one in sent else 1].hex() for one, pair in session.shares.items()}}, b""


def clean_row(worker: InProcessWorker, job: Job) -> NDArray[np.float64]:
    """Return the clipped and encoded message of a job without noise."""
    assert job.public is not None
    assert job.start is not None
    [(_, rows, _norms)] = worker.encoded(ClientJob(job.public, job.start, np.array([job.client])))
    row: NDArray[np.float64] = rows[0].cpu().double().numpy()
    return row


def noised_steps(job: Job, row: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the message with this client's share of the noise, as integer multiples of the grid step.

    Noise is added before rounding, so that rounding is post-processing and biases no coordinate.
    """
    assert job.public is not None
    rng = streams(job.mode, job.seed or 0).at(job.public.t, "client noise", job.client)
    return shares_of(job.plan).share.sample_rounded(row, grid_of(job.plan).step, rng)


# ---- the server ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SecAggEngine(Remote):
    """Engine of remote clients whose messages are summed by secure aggregation."""

    @property
    def offers(self) -> frozenset[str]:
        return self.transport.offers | {"secure_sum"}

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> SecAggWorker:
        """Refuse a release other than `noise_shares`, and ask all clients whether they accept the plan."""
        shares_of(plan)
        asked = super().prepare(plan, task, streams)
        return SecAggWorker(self, asked.plan, asked.task, asked.streams)


@dataclass
class ServerSession:
    """Server's state in one session: the clients' replies to each stage, by client."""

    number: str = field(default_factory=lambda: secrets.token_hex(16))
    keys: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    sealed: dict[int, dict[str, str]] = field(default_factory=dict)
    rows: dict[int, Words] = field(default_factory=dict)
    charges: dict[int, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


class SecAggWorker(RemoteWorker):
    """Server's worker of secure aggregation, which repeats sessions in each round until one is complete."""

    engine: SecAggEngine

    @property
    def header(self) -> dict[str, str | int]:
        return {
            **super().header,
            "sum": "secure: masks by AES-256 in counter mode; members by pinned keys; one list of senders for all",
            "sum_length": self.length,
            "sum_bits": grid_of(self.plan).bits,
        }

    def collect(self, job: ClientJob) -> Collected:
        """Return the sum of the cohort's messages, unmasked with the help of at least `at_least` clients.

        A client that drops out before stage `mask` is not in the sum. A client that drops out later is in the sum, and
        the others' shares remove its mask. With too few replies nothing is unmasked, and another session begins.
        """
        least, session = shares_of(self.plan).at_least, ServerSession()
        wanted = {int(c): replace(self._job(int(c)), public=job.public, start=job.start) for c in job.cohort}
        quorum = max(least, min(self.engine.quorum, len(wanted)))
        total: Tensor | None = None
        for _ in range(self.engine.tries if len(wanted) >= least else 0):
            session = ServerSession()
            if self._has_rows(session, wanted, least, quorum):
                total = self._open(session, least)
            if total is not None:
                break
        came = [] if total is None else sorted(session.rows)
        self._log_refusals(session.refused)
        collected = Collected(
            torch.zeros(self.length, dtype=torch.float64) if total is None else total, len(came), noised=True,
            deployed=True, reported=np.asarray(came, dtype=np.int64), refused=session.refused,
            receipts=self._receipts(session.charges),
        )  # fmt: skip
        if total is None:
            why = self.in_words(session.refused)
            raise QuorumError(f"secure aggregation of fewer than {quorum} members{why}", collected)
        return collected

    def _has_rows(self, session: ServerSession, wanted: Mapping[int, Job], threshold: int, quorum: int) -> bool:
        """Ask for keys, shares and masked rows; return whether each stage has at least `quorum` replies."""
        for client, message in self._ask("keys", session, dict.fromkeys(wanted, ({}, b""))).items():
            public, mask, signature = (str(message.fields.get(name)) for name in KEYS)
            session.keys[client] = public, mask, signature
        if len(session.keys) < quorum:
            return False
        members = {"members": {str(one): list(pair) for one, pair in session.keys.items()}, "threshold": threshold}
        for client, message in self._ask("shares", session, dict.fromkeys(session.keys, (members, b""))).items():
            session.sealed[client] = dict(message.fields.get("sealed", {}))
        if len(session.sealed) < quorum:
            return False
        until, asked, bits = time.time() + self.engine.timeout, {}, grid_of(self.plan).bits
        for client in session.sealed:
            shares = {str(other): sealed[str(client)] for other, sealed in session.sealed.items() if other != client}
            asked[client] = ({"sealed": shares}, replace(wanted[client], deadline=until).to_bytes())
        for client, message in self._ask("mask", session, asked).items():
            if len(message.body) == bits // 8 * self.length:
                session.rows[client] = words_of_bytes(message.body, bits)
                charges = message.fields.get("charges")
                session.charges[client] = charges if type(charges) is int else 0
        return len(session.rows) >= quorum

    def _open(self, session: ServerSession, threshold: int) -> Tensor | None:
        """Sum the rows; remove own masks of clients that sent a row, and pairwise masks with those that did not."""
        f, sent = flower(), sorted(session.rows)
        answers = self._ask("unmask", session, dict.fromkeys(sent, ({"sent": sent}, b"")))
        shares = [message.fields.get("shares", {}) for message in answers.values()][:threshold]
        if len(shares) < threshold:
            return None
        grid = grid_of(self.plan)
        size, total = (self.length, grid.bits), to_words(np.zeros(self.length, dtype=np.int64), grid)
        for row in session.rows.values():
            total = total + row
        publics = {client: bytes.fromhex(session.keys[client][1]) for client in sent}
        for member in session.sealed:
            secret = f.combine_shares([bytes.fromhex(each[str(member)]) for each in shares])
            if member in session.rows:
                total = total - mask_words(secret, *size)
            else:  # its pairwise masks cancel what the others added for it
                total = total + pairwise_mask(member, f.bytes_to_private_key(secret), publics, *size)
        return from_words(total, grid)

    def _ask(
        self, stage: str, session: ServerSession, asked: Mapping[int, tuple[dict[str, Any], bytes]]
    ) -> dict[int, SecAggMessage]:
        """Return the replies to one stage within the timeout; refusals go to `session.refused`."""
        bodies = {one: SecAggMessage(stage, session.number, *content).to_bytes() for one, content in asked.items()}
        transport: Any = self.engine.transport
        found: dict[int, SecAggMessage] = {}
        for client, data in transport.exchange(bodies, time.time() + self.engine.timeout):
            try:
                message = SecAggMessage.of_bytes(data)
            except DataError:
                continue
            if "refused" in message.fields:
                session.refused[client] = str(message.fields["refused"])
            elif (message.stage, message.session) == (stage, session.number) and client in asked:
                found[client] = message
        return found
