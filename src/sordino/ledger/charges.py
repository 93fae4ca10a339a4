"""Charges of deployed runs: what one silo is charged by its ledger, and how often each client was charged.

`SiloCost`, for silos. A silo sees the rounds that it is in and no others. So a line that rests on the server's sampling
(amplified because nobody knows which rounds a client was in) is charged whole at admission; so is a release whose noise
is one event for the whole run. Everything else is charged round by round: a round without the silo does not use its
data.

`ClientCharges`, for the server. By its own charges, and by the silos' receipts,

    charges of a client = max(its last receipt + asked since then - refused since then,  what the server knows itself)

The same job again is the same bytes and no new charge, where a silo stores what it has sent. What the server knows
itself: a client that has answered k rounds was charged for k of them; and where the server draws the noise, every round
that it has run is a release, whatever silos stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.bounds import AlreadyPrivate
from sordino.accounting.composition import Adversary, Line, Participation
from sordino.accounting.events import Unprotected
from sordino.ledger.ledger import Request
from sordino.ledger.totals import Block, Item
from sordino.parts.samplers import Cohort

if TYPE_CHECKING:
    from sordino.plan import Plan


@dataclass(frozen=True)
class SiloCost:
    """Cost of a plan on one silo's data, to one adversary, as charges to its ledger."""

    plan: Plan
    silo: int
    adversary: Adversary = "cohort"

    @property
    def whole(self) -> bool:
        """Whether the run is charged at admission."""
        plan = self.plan
        hidden = plan.clients.random and plan.clients.amplifies and plan.release.hides_cohort(plan.clients)
        return self.plan.release.correlated or (self.adversary == "models" and plan.unit == "client" and hidden)

    @property
    def jobs(self) -> int:
        """How many messages the whole covers: one for each round in which sampling may take this silo."""
        return self.plan.clients.amplified_rounds(self.plan.rounds) if self.whole else 0

    @property
    def asked(self) -> Request:
        """For admission: all rounds that are planned; of random cohorts, as many as this silo is in on average."""
        line = self.plan.forecast.line(self.adversary, self.silo)
        if self.whole:
            items = tuple(Item(event, count) for event, count in line.entries if count)
            return Request(self.plan.unit, line.relation, items, self.plan.hash)
        rounds = math.ceil(float(self.plan.clients.participations(self.plan.rounds)[self.silo]))
        return Request(self.plan.unit, line.relation, self._rounds(rounds), self.plan.hash)

    def job(self, t: int) -> tuple[Item, ...]:
        """One message of round t; of a run that is charged whole, one that is drawn again."""
        if self.plan.release.correlated:  # a round that is drawn again has no bound
            return (Item(Unprotected()),)
        blocks = self._blocks(t)
        if blocks is None:
            return tuple(Item(event, count) for event, count in self._line(1).entries)
        ((event, _),) = self._line(1).entries
        return tuple(Item(event, 1, block) for block in blocks)

    def _rounds(self, rounds: int) -> tuple[Item, ...]:
        if self._blocks(0) is not None:
            return tuple(item for t in range(rounds) for item in self.job(t))
        return tuple(Item(event, count) for event, count in self._line(rounds).entries if count)

    def _line(self, rounds: int) -> Line:
        """So many rounds that this silo is in, none amplified by the sampling of silos."""
        seen: Adversary = "messages" if self.adversary == "messages" else "cohort"
        return self.plan.cost(Participation(rounds, rounds), self.silo).line(seen, self.silo)

    def _blocks(self, t: int) -> list[Block] | None:
        """The blocks that round t reads, step by step, if the plan's batches are blocks of a public order."""
        reads, spent = self.plan.local.reads, self.plan.local.bound()
        if reads is None:
            return None
        steps = spent.count if isinstance(spent, AlreadyPrivate) else 1
        found = [reads.block(step, self.silo) for step in range(t * steps, (t + 1) * steps)]
        size = reads.size(self.silo)
        blocks = [Block(f"{self.silo}/{size}/{one[0]}", one[1], one[2]) for one in found if one is not None]
        return blocks if len(blocks) == steps else None


Counts = NDArray[np.int64]  # by client


@dataclass
class ClientCharges:
    """Charges of every client so far; `replays`: the same job again costs nothing."""

    asked: Counts  # and not refused
    since: Counts  # the same, after the last receipt
    receipts: Counts
    replays: bool
    local: bool
    answered: dict[int, set[int]] = field(default_factory=dict)  # by round
    open: dict[int, set[int]] = field(default_factory=dict)  # by round, whom its present job was sent to
    replayed: list[int] = field(default_factory=list)  # rounds charged again for a job that all had: no new noise

    @classmethod
    def of(cls, plan: Plan) -> ClientCharges:
        """Nothing was charged yet."""
        none = np.zeros(plan.clients.population, dtype=np.int64)
        local = plan.release.local
        return cls(none, none.copy(), none.copy(), local and "secure_sum" not in plan.needs, local)

    def again(self, cohort: Cohort, t: int) -> NDArray[np.bool_]:
        """Who of a cohort has the job of round t already."""
        known = self.open.get(t) if self.replays else None
        return np.zeros(len(cohort), dtype=np.bool_) if not known else np.isin(cohort, list(known))

    def ask(self, cohort: Cohort, t: int) -> None:
        """Round t is charged. Rounds after it that were asked before may now begin elsewhere, and be other jobs."""
        fresh = cohort[~self.again(cohort, t)]
        self.replayed += [t] * (len(cohort) > 0 and len(fresh) == 0)
        self.asked[fresh] += 1
        self.since[fresh] += 1
        if self.replays:
            self.open = {round: who for round, who in self.open.items() if round <= t}
            self.open.setdefault(t, set()).update(cohort.tolist())

    def add_receipts(self, refused: Iterable[int], charged: Iterable[tuple[int, int]], t: int) -> None:
        """Who refused the last charge, which was for round t, and what others say that they were charged in all."""
        for client in refused:
            self.asked[client] = max(0, self.asked[client] - 1)
            self.since[client] -= 1
            self.open.get(t, set()).discard(client)
        for client, charges in charged:
            self.receipts[client], self.since[client] = max(self.receipts[client], charges), 0
            self.answered.setdefault(t, set()).add(client)

    @property
    def total(self) -> Counts:
        """How often each was charged."""
        floor = self.asked if not self.local else np.zeros_like(self.asked)
        for who in self.answered.values() if self.local else ():
            floor[list(who)] += 1
        found: Counts = np.maximum(self.receipts + np.maximum(self.since, 0), floor)
        return found
