"""What one silo pays, in the ledger's terms: for a run when it is admitted, for a job before its noise is drawn.

A silo sees the rounds that it is in and no others. So a line that rests on the server's coins (it is amplified because
nobody knows which rounds a client was in) is charged whole at admission; so is a release whose noise is one event for
the whole run. Everything else is charged round by round: a round that skips the silo does not touch its data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sordino.parts.bounds import Spent
from sordino.parts.events import Unprotected
from sordino.privacy.bill import Adversary, Line, Participation
from sordino.privacy.ledger import Asked
from sordino.privacy.spending import Block, Item

if TYPE_CHECKING:
    from sordino.plan import Plan


@dataclass(frozen=True)
class Cost:
    """A plan on one silo's data, to one adversary."""

    plan: Plan
    silo: int
    adversary: Adversary = "cohort"

    @property
    def whole(self) -> bool:
        """Whether the run is charged at admission."""
        plan = self.plan
        hidden = plan.clients.random and plan.clients.amplifies and plan.release.hides(plan.clients)
        return self.plan.release.joint or (self.adversary == "models" and plan.unit == "client" and hidden)

    @property
    def jobs(self) -> int:
        """How many messages the whole pays for: one for each round in which the coins may take this silo."""
        return self.plan.clients.amplified_rounds(self.plan.rounds) if self.whole else 0

    @property
    def asked(self) -> Asked:
        """For admission: all rounds that are planned; of random cohorts, as many as this silo is in on average."""
        line = self.plan.forecast.line(self.adversary, self.silo)
        if self.whole:
            items = tuple(Item(event, count) for event, count in line.entries if count)
            return Asked(self.plan.unit, line.relation, items, self.plan.hash)
        rounds = math.ceil(float(self.plan.clients.turns(self.plan.rounds)[self.silo]))
        return Asked(self.plan.unit, line.relation, self._rounds(rounds), self.plan.hash)

    def job(self, t: int) -> tuple[Item, ...]:
        """One message of round t; of a run that is charged whole, one that is drawn again."""
        if self.plan.release.joint:  # a round that is drawn again has no price
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
        """So many rounds that this silo is in, none amplified by the coins that choose silos."""
        seen: Adversary = "messages" if self.adversary == "messages" else "cohort"
        return self.plan.bill(Participation(rounds, rounds), self.silo).line(seen, self.silo)

    def _blocks(self, t: int) -> list[Block] | None:
        """The blocks that round t reads, step by step, if the plan's batches are blocks of a public order."""
        reads, spent = self.plan.local.reads, self.plan.local.bound()
        if reads is None:
            return None
        steps = spent.count if isinstance(spent, Spent) else 1
        found = [reads.block(step, self.silo) for step in range(t * steps, (t + 1) * steps)]
        size = reads.size(self.silo)
        blocks = [Block(f"{self.silo}/{size}/{one[0]}", one[1], one[2]) for one in found if one is not None]
        return blocks if len(blocks) == steps else None
