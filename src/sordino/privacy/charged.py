"""How often every client of a deployed run was charged: by the server's charges, and by the silos' own receipts.

    charges of a client = max(its last receipt + asked since then - refused since then,  what the server knows itself)

The same job again is the same bytes and no new charge, where a silo keeps what it has sent: a round that is asked again
from the state that it was asked from before. What the server knows itself: a client that has answered k rounds has paid
for k of them; and where the server draws the noise, every round that it has run is a release, whatever silos kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sordino.parts.samplers import Cohort

if TYPE_CHECKING:
    from sordino.plan import Plan

Counts = NDArray[np.int64]  # by client


@dataclass
class Charged:
    """Counts that grow charge by charge; `replays`: the same job again costs nothing."""

    asked: Counts  # and not refused
    since: Counts  # the same, after the last receipt
    receipts: Counts
    replays: bool
    local: bool
    answered: dict[int, set[int]] = field(default_factory=dict)  # by round
    open: dict[int, set[int]] = field(default_factory=dict)  # by round, whom its present job was sent to
    replayed: list[int] = field(default_factory=list)  # rounds charged again for a job that all had: no new noise

    @classmethod
    def of(cls, plan: Plan) -> Charged:
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

    def settle(self, refused: Iterable[int], paid: Iterable[tuple[int, int]], t: int) -> None:
        """Who refused the last charge, which was for round t, and what others say that they have paid in all."""
        for client in refused:
            self.asked[client] = max(0, self.asked[client] - 1)
            self.since[client] -= 1
            self.open.get(t, set()).discard(client)
        for client, charges in paid:
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
