"""The server's side of a secure sum: it sees who takes part and the sum, and no single row.

    keys -> shares -> mask -> unmask          each to those who have answered the stage before

Whoever is silent before `mask` is not in the sum; after it, the sum is opened without him, and he is in it. Fewer than
the quorum, or than the plan's `at_least`, and the session is void: nothing was opened, and another one begins.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sordino.engines.base import ClientJob, Collected
from sordino.engines.jobs import Job
from sordino.engines.remote import Remote, RemoteWorker, Transport
from sordino.errors import DataError, EngineError, QuorumError
from sordino.federation import secagg_messages
from sordino.federation.flower_api import flower
from sordino.federation.secagg_messages import SecAggMessage, Words
from sordino.parts.releases import NoiseShares
from sordino.plan import Plan
from sordino.rng import Streams
from sordino.task import Task


class Carrier(Transport, Protocol):
    """A transport that also carries letters."""

    def carry(self, bodies: Mapping[int, bytes], deadline: float) -> Any: ...


@dataclass(frozen=True)
class SecAggEngine(Remote):
    """Clients elsewhere, and a secure sum of what they send."""

    @property
    def offers(self) -> frozenset[str]:
        return self.transport.offers | {"secure_sum"}

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> SecAggWorker:
        """Refuse what no secure sum can hold; then ask who takes part."""
        if not isinstance(plan.release, NoiseShares) or plan.release.at_least < 2:
            raise EngineError(f"release {plan.release.kind!r} in a secure sum", "noise_shares with at_least 2 or more")
        asked = super().prepare(plan, task, streams)
        return SecAggWorker(self, asked.plan, asked.task, asked.streams)


@dataclass
class ServerSession:
    """One sum: what has come back, stage by stage."""

    number: str = field(default_factory=lambda: secrets.token_hex(16))
    keys: dict[int, tuple[str, str]] = field(default_factory=dict)
    sealed: dict[int, dict[str, str]] = field(default_factory=dict)
    rows: dict[int, Words] = field(default_factory=dict)
    charges: dict[int, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


class SecAggWorker(RemoteWorker):
    """The engine, ready for one plan: every round is a session, or several until one is whole."""

    engine: SecAggEngine

    @property
    def header(self) -> dict[str, str | int]:
        return {**super().header, "sum": "secure: masks by AES-256 in counter mode; the server follows the protocol"}

    def collect(self, job: ClientJob) -> Collected:
        """The sum of the cohort's rows, opened by at least `at_least` of them."""
        release = self.plan.release
        assert isinstance(release, NoiseShares)
        wanted = {int(c): replace(self._job(int(c)), public=job.public, start=job.start) for c in job.cohort}
        least = max(release.at_least, min(self.engine.quorum, len(wanted)))
        session = ServerSession()
        for _ in range(self.engine.tries if len(wanted) >= release.at_least else 0):
            session = ServerSession()
            total = self._sum_of(session, wanted, release.at_least, least)
            if total is not None:
                return self._found(session, total)
        why = next((f"; client {client}: {reason}" for client, reason in sorted(session.refused.items())), "")
        said = f"a secure sum of fewer than {least} members{why}"
        raise QuorumError(said, self._found(session, torch.zeros(self.length, dtype=torch.float64), void=True))

    def _found(self, session: ServerSession, total: Tensor, void: bool = False) -> Collected:
        came = [] if void else sorted(session.rows)
        receipts = self._receipts(session.charges)
        return Collected(
            total, len(came), noised=True, deployed=True, reported=np.asarray(came, dtype=np.int64),
            refused=session.refused, receipts=receipts,
        )  # fmt: skip

    # ---- stages ------------------------------------------------------------------------------------------------------

    def _sum_of(self, session: ServerSession, wanted: Mapping[int, Job], threshold: int, least: int) -> Tensor | None:
        """The opened sum; None: too few have answered some stage."""
        for client, letter in self._asked_for("keys", session, {client: ({}, b"") for client in wanted}).items():
            session.keys[client] = (str(letter.said.get("letters")), str(letter.said.get("masking")))
        if len(session.keys) < least:
            return None
        told = {"members": {str(one): list(pair) for one, pair in session.keys.items()}, "threshold": threshold}
        for client, letter in self._asked_for("shares", session, dict.fromkeys(session.keys, (told, b""))).items():
            session.sealed[client] = dict(letter.said.get("sealed", {}))
        if len(session.sealed) < least:
            return None
        self._take_rows(session, wanted)
        if len(session.rows) < least:
            return None
        return self._opened(session, threshold)

    def _take_rows(self, session: ServerSession, wanted: Mapping[int, Job]) -> None:
        until = time.time() + self.engine.timeout
        asked = {}
        for client in session.sealed:
            given = {str(other): sealed[str(client)] for other, sealed in session.sealed.items() if other != client}
            asked[client] = ({"sealed": given}, replace(wanted[client], deadline=until).to_bytes())
        for client, letter in self._asked_for("mask", session, asked).items():
            if len(letter.body) == 8 * self.length:
                session.rows[client] = np.frombuffer(letter.body, dtype="<u8").astype(np.uint64)
                charges = letter.said.get("charges")
                session.charges[client] = charges if type(charges) is int else 0

    def _opened(self, session: ServerSession, threshold: int) -> Tensor | None:
        """Take the masks off: own masks of those who sent, pair masks with those who did not."""
        f, sent = flower(), sorted(session.rows)
        answers = self._asked_for("unmask", session, {client: ({"sent": sent}, b"") for client in sent})
        given = [letter.said.get("shares", {}) for letter in answers.values()]
        if len(given) < threshold:
            return None
        total = np.zeros(self.length, dtype=np.uint64)
        for row in session.rows.values():
            total = total + row
        for member in session.sealed:
            secret = f.combine_shares([bytes.fromhex(shares[str(member)]) for shares in given[:threshold]])
            if member in session.rows:
                total = total - secagg_messages.mask_words(secret, self.length)
            else:
                own = f.bytes_to_private_key(secret)
                keys = {
                    i: secagg_messages.shared_key(own, f.bytes_to_public_key(bytes.fromhex(session.keys[i][1])))
                    for i in sent
                }
                total = total + secagg_messages.pairwise_mask(
                    member, keys, self.length
                )  # what it would have added, cancels theirs
        release = self.plan.release
        assert isinstance(release, NoiseShares)
        return secagg_messages.from_grid(total, secagg_messages.grid_step(release.share.std))

    def _asked_for(
        self, stage: str, session: ServerSession, asked: Mapping[int, tuple[dict[str, Any], bytes]]
    ) -> dict[int, SecAggMessage]:
        """Who answers a stage within the time, and does not refuse."""
        bodies = {
            one: SecAggMessage(stage, session.number, said, body).to_bytes() for one, (said, body) in asked.items()
        }
        carrier: Any = self.engine.transport
        found: dict[int, SecAggMessage] = {}
        for client, data in carrier.carry(bodies, time.time() + self.engine.timeout):
            try:
                letter = SecAggMessage.of_bytes(data)
            except DataError:
                continue
            if "refused" in letter.said:
                session.refused[client] = str(letter.said["refused"])
            elif (letter.stage, letter.session) == (stage, session.number) and client in asked:
                found[client] = letter
        return found
