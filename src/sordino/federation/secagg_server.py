"""Server side of secure aggregation: it learns who takes part and the sum, and no single row.

    keys -> shares -> mask -> unmask          each stage goes to those who have answered the stage before

A client that is silent before `mask` is not in the sum; one that is silent afterwards is in it, and the others open its
mask. With fewer answers than the quorum, or than the plan's `at_least`, the session is void: nothing is opened, and
another session begins. Called by `app`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.engines.base import ClientJob, Collected
from sordino.engines.messages import Job
from sordino.engines.remote import Remote, RemoteWorker
from sordino.errors import DataError, QuorumError
from sordino.federation.flower_api import flower
from sordino.federation.secagg_messages import (
    SecAggMessage,
    Words,
    from_grid,
    grid_step,
    mask_words,
    pairwise_mask,
    shared_key,
    shares_of,
)
from sordino.plan import Plan
from sordino.rng import Streams
from sordino.task import Task


@dataclass(frozen=True)
class SecAggEngine(Remote):
    """Remote clients whose messages are summed by secure aggregation."""

    @property
    def offers(self) -> frozenset[str]:
        return self.transport.offers | {"secure_sum"}

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> SecAggWorker:
        """Refuse releases other than noise shares; then prepare as `Remote` does."""
        shares_of(plan)
        asked = super().prepare(plan, task, streams)
        return SecAggWorker(self, asked.plan, asked.task, asked.streams)


@dataclass
class ServerSession:
    """Server state of one session: the answers of its stages."""

    number: str = field(default_factory=lambda: secrets.token_hex(16))
    keys: dict[int, tuple[str, str]] = field(default_factory=dict)
    sealed: dict[int, dict[str, str]] = field(default_factory=dict)
    rows: dict[int, Words] = field(default_factory=dict)
    charges: dict[int, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


class SecAggWorker(RemoteWorker):
    """Secure aggregation of one plan: a round is one session, or several until one is complete."""

    engine: SecAggEngine

    @property
    def header(self) -> dict[str, str | int]:
        return {**super().header, "sum": "secure: masks by AES-256 in counter mode; the server follows the protocol"}

    def collect(self, job: ClientJob) -> Collected:
        """The sum of the cohort's rows, opened by at least `at_least` of them."""
        release = shares_of(self.plan)
        wanted = {int(c): replace(self._job(int(c)), public=job.public, start=job.start) for c in job.cohort}
        least = max(release.at_least, min(self.engine.quorum, len(wanted)))
        session = ServerSession()
        for _ in range(self.engine.tries if len(wanted) >= release.at_least else 0):
            session = ServerSession()
            total = self._sum_of(session, wanted, release.at_least, least)
            if total is not None:
                return self._found(session, total)
        why = next((f"; client {client}: {reason}" for client, reason in sorted(session.refused.items())), "")
        what = f"a secure sum of fewer than {least} members{why}"
        raise QuorumError(what, self._found(session, torch.zeros(self.length, dtype=torch.float64), void=True))

    def _found(self, session: ServerSession, total: Tensor, void: bool = False) -> Collected:
        came = [] if void else sorted(session.rows)
        receipts = self._receipts(session.charges)
        return Collected(
            total, len(came), noised=True, deployed=True, reported=np.asarray(came, dtype=np.int64),
            refused=session.refused, receipts=receipts,
        )  # fmt: skip

    # ---- stages ------------------------------------------------------------------------------------------------------

    def _sum_of(self, session: ServerSession, wanted: Mapping[int, Job], threshold: int, least: int) -> Tensor | None:
        """The opened sum, or None where too few have answered some stage."""
        for client, message in self._asked_for("keys", session, {client: ({}, b"") for client in wanted}).items():
            session.keys[client] = (str(message.fields.get("encryption")), str(message.fields.get("masking")))
        if len(session.keys) < least:
            return None
        members = {"members": {str(one): list(pair) for one, pair in session.keys.items()}, "threshold": threshold}
        for client, message in self._asked_for("shares", session, dict.fromkeys(session.keys, (members, b""))).items():
            session.sealed[client] = dict(message.fields.get("sealed", {}))
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
        for client, message in self._asked_for("mask", session, asked).items():
            if len(message.body) == 8 * self.length:
                session.rows[client] = np.frombuffer(message.body, dtype="<u8").astype(np.uint64)
                charges = message.fields.get("charges")
                session.charges[client] = charges if type(charges) is int else 0

    def _opened(self, session: ServerSession, threshold: int) -> Tensor | None:
        """Remove the masks: own masks of those who sent a row, pairwise masks with those who did not."""
        f, sent = flower(), sorted(session.rows)
        answers = self._asked_for("unmask", session, {client: ({"sent": sent}, b"") for client in sent})
        given = [message.fields.get("shares", {}) for message in answers.values()]
        if len(given) < threshold:
            return None
        total = np.zeros(self.length, dtype=np.uint64)
        for row in session.rows.values():
            total = total + row
        for member in session.sealed:
            secret = f.combine_shares([bytes.fromhex(shares[str(member)]) for shares in given[:threshold]])
            if member in session.rows:
                total = total - mask_words(secret, self.length)
            else:
                own = f.bytes_to_private_key(secret)
                public = {i: f.bytes_to_public_key(bytes.fromhex(session.keys[i][1])) for i in sent}
                keys = {i: shared_key(own, other) for i, other in public.items()}
                total = total + pairwise_mask(member, keys, self.length)  # cancels what the others added for it
        return from_grid(total, grid_step(shares_of(self.plan).share.std))

    def _asked_for(
        self, stage: str, session: ServerSession, asked: Mapping[int, tuple[dict[str, Any], bytes]]
    ) -> dict[int, SecAggMessage]:
        """Answers to one stage within the timeout, without refusals."""
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
