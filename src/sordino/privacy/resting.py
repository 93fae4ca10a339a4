"""Who comes too early: under noise that rounds share, a client is billed for rounds that lie apart, and held to it.

A client whose last round is nearer than the sampler promised, or who has had all the rounds it is billed for, is left
out of the cohort before anything of it is computed: its round is void for it, not billed wrong.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sordino.parts.release import Release
from sordino.parts.samplers import Cohort, Sampler
from sordino.parts.turns import Turns
from sordino.rng import Streams

_LOG = logging.getLogger("sordino")


@dataclass(frozen=True)
class Rest:
    """The last round of every client and how many it had; `most` is what it is billed for."""

    clients: Sampler
    most: int
    last: NDArray[np.int64]
    count: NDArray[np.int64]

    def keep(self, t: int, cohort: Cohort) -> Cohort:
        """Those of a cohort who may come to round t; they rest from now on."""
        kept = cohort[self._may(t, cohort)]
        self.last[kept] = t
        self.count[kept] += 1
        if len(kept) < len(cohort):
            _LOG.warning("round %d: %d clients came too early and are left out", t + 1, len(cohort) - len(kept))
        return kept

    def _may(self, t: int, cohort: Cohort) -> NDArray[np.bool_]:
        if isinstance(self.clients, Turns):
            return np.asarray(cohort % self.clients.groups == t % self.clients.groups)
        rested = t - self.last[cohort] >= (self.clients.apart or 1)
        return np.asarray(rested if self.clients.random else rested & (self.count[cohort] < self.most))


def resting(clients: Sampler, release: Release, rounds: int, streams: Streams, t: int) -> Rest | None:
    """Where a run stands before round t: public cohorts are drawn again; where coins were secret, everybody rests."""
    if not release.joint:
        return None
    began = t - 1 if t and clients.random else -rounds - (clients.apart or 1)
    last = np.full(clients.population, began, dtype=np.int64)
    rest = Rest(clients, clients.most(rounds), last, np.zeros(clients.population, dtype=np.int64))
    for before in range(0 if clients.random else t):
        rest.keep(before, clients.draw(before, streams.at(before, "cohort")))
    return rest
