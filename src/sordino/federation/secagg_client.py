"""A silo's side of a secure sum. It charges before its noise exists, and opens a sum of at least `at_least` or none.

    keys    two fresh key pairs          shares  of its mask key and of its own mask, one for every other member
    mask    the row, noised, under masks unmask  for every member one share: of its own mask if it has sent, else of its
                                                 key; never both, and once in a session

Noise is drawn anew in every session, and paid: two sums over different members that held the same noise would show one
member's message. The server must follow the protocol: it hands on the members' public keys.
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
from sordino.engines.frames import count
from sordino.engines.inprocess import InProcessWorker
from sordino.engines.jobs import Job
from sordino.engines.replies import worker_of
from sordino.errors import BudgetError, DataError, UserError, brief_repr, shorten
from sordino.federation import secagg_messages
from sordino.federation.flower_api import flower
from sordino.federation.secagg_messages import SecAggMessage
from sordino.parts.releases import NoiseShares
from sordino.rng import streams

Keys = dict[int, tuple[bytes, bytes]]  # public keys of members: for letters, for masks


@codec.hides_values
@dataclass
class ClientSession:
    """What a member remembers of one sum, and forgets with the next."""

    letters: Any = None  # private keys
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
    """One silo in secure sums: letters in, letters out."""

    client: int
    task: Any
    allows: Callable[[Job], None]
    pay: Callable[[Job, str], int]
    now: Callable[[], float]
    sessions: dict[str, ClientSession] = field(default_factory=dict)

    def reply(self, data: bytes) -> bytes:
        """The answer to one letter, or a `DataError`."""
        letter = SecAggMessage.of_bytes(data)
        if letter.stage == "keys":
            self.sessions = {letter.session: ClientSession()}  # one at a time
        session = self.sessions.get(letter.session)
        if session is None:
            raise DataError("a session of a secure sum that this silo does not know", "one that began with its keys")
        stages = {"keys": self._keys, "shares": self._shares, "mask": self._mask, "unmask": self._unmask}
        try:
            said, body = stages[letter.stage](session, letter)
        except (UserError, BudgetError) as error:
            said, body = {"refused": shorten(str(error))}, b""
        return SecAggMessage(letter.stage, letter.session, said, body).to_bytes()

    # ---- four stages -------------------------------------------------------------------------------------------------

    def _keys(self, session: ClientSession, letter: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        f = flower()
        (session.letters, public), (session.masking, mask) = f.generate_key_pairs(), f.generate_key_pairs()
        return {"letters": f.public_key_to_bytes(public).hex(), "masking": f.public_key_to_bytes(mask).hex()}, b""

    def _shares(self, session: ClientSession, letter: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        """Who takes part, and a share of both secrets for each of the others, sealed for them."""
        f, members = flower(), _members(letter.said.get("members"))
        session.threshold = count(letter.said.get("threshold"), "threshold")
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
                sealed[str(other)] = f.encrypt(self._letter_key(session, other), text).decode()
        return {"sealed": sealed}, b""

    def _mask(self, session: ClientSession, letter: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        """Open the others' shares; then policy, charge, noise, and the row under its masks."""
        job = Job.from_bytes(letter.body, self.task.layout.size)
        self._check(session, job)
        self._take(session, letter.said.get("sealed"))
        self.allows(job)
        clean = row_on_grid(worker_of(job.plan, self.task, streams(job.mode, job.seed or 0)), job)
        charges = self.pay(job, letter.session)
        words = clean + noise_on_grid(job, len(clean))
        session.sent = True
        f, own = flower(), self.client
        keys = {
            other: secagg_messages.shared_key(session.masking, f.bytes_to_public_key(session.members[other][1]))
            for other in session.shares
            if other != own
        }
        hidden = (
            words.view(np.uint64)
            + secagg_messages.mask_words(session.own, len(words))
            + secagg_messages.pairwise_mask(own, keys, len(words))
        )
        return {"charges": charges}, hidden.astype("<u8").tobytes()

    def _unmask(self, session: ClientSession, letter: SecAggMessage) -> tuple[dict[str, Any], bytes]:
        """One share for every member whose shares are here; a sum of fewer than the threshold is not opened."""
        listed = letter.said.get("sent")
        sent = {count(one, "a member") for one in listed} if isinstance(listed, list) else set()
        if len(sent) < session.threshold or not sent <= set(session.shares) or session.opened or not session.sent:
            found = f"a sum of {len(sent)} members to be opened"
            raise DataError(found, f"at least {session.threshold} that have sent, and once")
        session.opened = True
        given = {str(one): pair[0 if one in sent else 1].hex() for one, pair in session.shares.items()}
        return {"shares": given}, b""

    # ---- what a member checks ----------------------------------------------------------------------------------------

    def _check(self, session: ClientSession, job: Job) -> None:
        if job.admission or job.client != self.client or session.sent:
            raise DataError("a job of a secure sum that is not this silo's, or a second one", "one for each session")
        if self.now() > job.deadline:
            raise DataError("a job past its deadline", "one that somebody waits for", "nothing was charged")
        least = getattr(job.plan.release, "at_least", None)
        if least != session.threshold:
            raise DataError(f"threshold {session.threshold} of a secure sum", f"at_least = {least} of the plan")

    def _take(self, session: ClientSession, sealed: Any) -> None:
        """The shares that others made for this member, each under the key of the two."""
        if not isinstance(sealed, dict) or len(sealed) + 1 < session.threshold:
            raise DataError("fewer shares than the threshold", f"those of {session.threshold - 1} others")
        f = flower()
        for name, text in sealed.items():
            try:
                other = int(name)
                opened = json.loads(f.decrypt(self._letter_key(session, other), str(text).encode()))
                session.shares[other] = (bytes.fromhex(opened[0]), bytes.fromhex(opened[1]))
            except Exception:
                raise DataError(
                    f"a share from member {brief_repr(name)} that cannot be opened", "one sealed for us"
                ) from None

    def _letter_key(self, session: ClientSession, other: int) -> bytes:
        if other not in session.members:
            raise DataError(f"member {other} of a secure sum", "one of those that it began with")
        return secagg_messages.shared_key(session.letters, flower().bytes_to_public_key(session.members[other][0]))


def _members(table: Any) -> Keys:
    try:
        return {int(one): (bytes.fromhex(pair[0]), bytes.fromhex(pair[1])) for one, pair in dict(table).items()}
    except (TypeError, ValueError, IndexError, KeyError):
        raise DataError("members of a secure sum without keys", "two public keys of each") from None


def row_on_grid(worker: InProcessWorker, job: Job) -> Any:
    """The clean row in steps of the grid: nothing of it has left."""
    assert job.public is not None
    assert job.start is not None
    [(_, rows, _norms)] = worker.encoded(ClientJob(job.public, job.start, np.array([job.client])))
    release = job.plan.release
    assert isinstance(release, NoiseShares)
    return secagg_messages.to_grid(rows[0].cpu(), secagg_messages.grid_step(release.share.std), job.plan.unit)


def noise_on_grid(job: Job, length: int) -> Any:
    """This member's share of the noise, in steps of the grid."""
    release = job.plan.release
    assert isinstance(release, NoiseShares)
    assert job.public is not None
    rng = streams(job.mode, job.seed or 0).at(job.public.t, "client noise", job.client)
    drawn = release.on_client(torch.zeros(length, dtype=torch.float64), job.client, rng)
    return secagg_messages.round_noise(drawn, secagg_messages.grid_step(release.share.std))
