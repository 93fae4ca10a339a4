"""Client side of secure aggregation: a silo charges its ledger, then draws noise, then sends its masked row.

    keys    two fresh key pairs          shares  Shamir shares of its masking key and of the seed of its own mask
    mask    the row, noised and masked   unmask  for every member one share: of the seed if that member has sent its
                                                 row, else of its masking key; never both, and once in a session

A sum of fewer than the plan's `at_least` members is not opened. Noise is drawn, and charged, anew in every session: two
sums over different members with the same noise would reveal one member's message. Assumed: the server follows the
protocol and hands on the members' public keys. Called by `silo_service`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sordino import codec
from sordino.engines.base import ClientJob
from sordino.engines.inprocess import InProcessWorker
from sordino.engines.messages import Job, count
from sordino.engines.remote import worker_of
from sordino.errors import BudgetError, DataError, UserError, brief_repr, shorten
from sordino.federation.flower_api import flower
from sordino.federation.secagg_messages import (
    SecAggMessage,
    grid_step,
    mask_words,
    pairwise_mask,
    round_noise,
    shared_key,
    shares_of,
    to_grid,
)
from sordino.rng import streams

Keys = dict[int, tuple[bytes, bytes]]  # public keys of members: for encryption, for masks


@codec.hides_values
@dataclass
class ClientSession:
    """Client state of one session; the next session replaces it."""

    encryption: Any = None  # private keys
    masking: Any = None
    own: bytes = field(default_factory=lambda: secrets.token_bytes(32))  # the seed of its own mask
    members: Keys = field(default_factory=dict)
    threshold: int = 0
    sent: bool = False
    opened: bool = False
    shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # of others: own mask, mask key


@codec.hides_values
@dataclass
class SecAggClient:
    """One silo as a client of secure aggregation; `charge` writes a session's release into its ledger."""

    client: int
    task: Any
    allows: Callable[[Job], None]
    charge: Callable[[Job, str], int]
    now: Callable[[], float]
    sessions: dict[str, ClientSession] = field(default_factory=dict)

    def reply(self, data: bytes) -> bytes:
        """Answer one message of the server; malformed ones are a `DataError`."""
        message = SecAggMessage.of_bytes(data)
        if message.stage == "keys":
            self.sessions = {message.session: ClientSession()}  # one at a time
        session = self.sessions.get(message.session)
        if session is None:
            raise DataError("a session of a secure sum that this silo does not know", "one that began with its keys")
        stages = {"keys": self._keys, "shares": self._shares, "mask": self._mask, "unmask": self._unmask}
        try:
            fields, body = stages[message.stage](session, message)
        except (UserError, BudgetError) as error:
            fields, body = {"refused": shorten(str(error))}, b""
        return SecAggMessage(message.stage, message.session, fields, body).to_bytes()

    # ---- four stages -------------------------------------------------------------------------------------------------

    def _keys(self, session: ClientSession, message: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        f = flower()
        (session.encryption, public), (session.masking, mask) = f.generate_key_pairs(), f.generate_key_pairs()
        return {"encryption": f.public_key_to_bytes(public).hex(), "masking": f.public_key_to_bytes(mask).hex()}, b""

    def _shares(self, session: ClientSession, message: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        """Note the members; return a share of both secrets for each of them, encrypted to it."""
        f, table = flower(), message.fields.get("members")
        try:
            pairs = dict(table).items()  # type: ignore[arg-type]
            members = {int(one): (bytes.fromhex(pair[0]), bytes.fromhex(pair[1])) for one, pair in pairs}
        except (TypeError, ValueError, IndexError, KeyError):
            raise DataError("members of a secure sum without keys", "two public keys of each") from None
        session.threshold = count(message.fields.get("threshold"), "threshold")
        if self.client not in members or not 1 < session.threshold <= len(members) or session.members:
            raise DataError(f"a secure sum of {len(members)} with threshold {session.threshold}", "more than one, once")
        session.members = members
        others = sorted(members)
        both = [session.own, f.private_key_to_bytes(session.masking)]
        cut = [f.create_shares(secret, session.threshold, len(others)) for secret in both]
        sealed = {}
        for place, other in enumerate(others):
            pair = (cut[0][place], cut[1][place])
            if other == self.client:
                session.shares[other] = pair
            else:
                text = json.dumps([part.hex() for part in pair]).encode()
                sealed[str(other)] = f.encrypt(self._encryption_key(session, other), text).decode()
        return {"sealed": sealed}, b""

    def _mask(self, session: ClientSession, message: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        """Decrypt the others' shares; check the policy, charge, draw noise, and return the masked row."""
        job = Job.from_bytes(message.body, self.task.layout.size)
        self._check(session, job)
        self._take(session, message.fields.get("sealed"))
        self.allows(job)
        clean = row_on_grid(worker_of(job.plan, self.task, streams(job.mode, job.seed or 0)), job)
        charges = self.charge(job, message.session)
        words = clean + noise_on_grid(job, len(clean))
        session.sent = True
        f, own = flower(), self.client
        others = {other: f.bytes_to_public_key(session.members[other][1]) for other in session.shares if other != own}
        keys = {other: shared_key(session.masking, public) for other, public in others.items()}
        masks = mask_words(session.own, len(words)) + pairwise_mask(own, keys, len(words))
        return {"charges": charges}, (words.view(np.uint64) + masks).astype("<u8").tobytes()

    def _unmask(self, session: ClientSession, message: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        """One share of every member; a sum of fewer members than the threshold is not opened."""
        listed = message.fields.get("sent")
        sent = {count(one, "a member") for one in listed} if isinstance(listed, list) else set()
        if len(sent) < session.threshold or not sent <= set(session.shares) or session.opened or not session.sent:
            found = f"a sum of {len(sent)} members to be opened"
            raise DataError(found, f"at least {session.threshold} that have sent, and once")
        session.opened = True
        given = {str(one): pair[0 if one in sent else 1].hex() for one, pair in session.shares.items()}
        return {"shares": given}, b""

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _check(self, session: ClientSession, job: Job) -> None:
        if job.admission or job.client != self.client or session.sent:
            raise DataError("a job of a secure sum that is not this silo's, or a second one", "one for each session")
        if self.now() > job.deadline:
            raise DataError("a job past its deadline", "one that somebody waits for", "nothing was charged")
        least = getattr(job.plan.release, "at_least", None)
        if least != session.threshold:
            raise DataError(f"threshold {session.threshold} of a secure sum", f"at_least = {least} of the plan")

    def _take(self, session: ClientSession, sealed: Any) -> None:
        """Decrypt and store the shares that the other members made for this one."""
        if not isinstance(sealed, dict) or len(sealed) + 1 < session.threshold:
            raise DataError("fewer shares than the threshold", f"those of {session.threshold - 1} others")
        f = flower()
        for name, text in sealed.items():
            try:
                other = int(name)
                opened = json.loads(f.decrypt(self._encryption_key(session, other), str(text).encode()))
                session.shares[other] = (bytes.fromhex(opened[0]), bytes.fromhex(opened[1]))
            except Exception:
                found = f"a share from member {brief_repr(name)} that cannot be opened"
                raise DataError(found, "one sealed for us") from None

    def _encryption_key(self, session: ClientSession, other: int) -> bytes:
        if other not in session.members:
            raise DataError(f"member {other} of a secure sum", "one of those that it began with")
        return shared_key(session.encryption, flower().bytes_to_public_key(session.members[other][0]))


def row_on_grid(worker: InProcessWorker, job: Job) -> Any:
    """The clipped row without noise, in steps of the grid; it stays in this process."""
    assert job.public is not None
    assert job.start is not None
    [(_, rows, _norms)] = worker.encoded(ClientJob(job.public, job.start, np.array([job.client])))
    return to_grid(rows[0].cpu(), grid_step(shares_of(job.plan).share.std), job.plan.unit)


def noise_on_grid(job: Job, length: int) -> Any:
    """This client's noise share, in steps of the grid."""
    release = shares_of(job.plan)
    assert job.public is not None
    rng = streams(job.mode, job.seed or 0).at(job.public.t, "client noise", job.client)
    drawn = release.on_client(torch.zeros(length, dtype=torch.float64), job.client, rng)
    return round_noise(drawn, grid_step(release.share.std))
