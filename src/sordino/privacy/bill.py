"""What a run costs, line by line: one line per adversary, each with the relation that is legal for it.

    models    sees every released model, nothing else
    cohort    also sees who took part in which round
    messages  sees every message as it leaves the client

Forecast and bill are one function; they differ only in `participation`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sordino.parts.samplers import FixedSize, Poisson, Sampler
from sordino.privacy.bounds import Spent, Unit
from sordino.privacy.events import Event, Relation
from sordino.privacy.release import NoiseShares, NoNoise, Release, ShuffledNoise

Adversary = Literal["models", "cohort", "messages"]


@dataclass(frozen=True)
class Participation:
    """How often the data was touched: releases made, and the most that any one client was in.

    `most` comes from the plan unless the adversary sees the cohort; then it is the realised count.
    """

    releases: int
    most: int

    @classmethod
    def planned(cls, clients: Sampler, rounds: int) -> Participation:
        """Before the run: as many rounds as planned."""
        return cls(releases=rounds, most=clients.most(rounds))


@dataclass(frozen=True)
class Line:
    """Each event so many times, to `adversary`, when the data changes by `relation`."""

    adversary: Adversary
    relation: Relation
    entries: tuple[tuple[Event, int], ...]


@dataclass(frozen=True)
class Bill:
    """All that was released, per adversary; unit is what one neighbour may change."""

    unit: Unit
    lines: tuple[Line, ...]

    def line(self, adversary: Adversary) -> Line:
        """The line of one adversary."""
        return next(line for line in self.lines if line.adversary == adversary)


def client_bill(clients: Sampler, release: Release, participation: Participation) -> Bill:
    """The bill of a client-level plan: the sampler amplifies only where its coins are unseen."""
    messages = Line("messages", "replace_one", ((release.message_event(), participation.most),))
    if "messages" in release.sees:
        return Bill("client", (replace(messages, adversary="models"), replace(messages, adversary="cohort"), messages))
    seen = Line("cohort", _seen_relation(clients, release), ((release.event(), participation.most),))
    return Bill("client", (_models_line(clients, release, participation, seen), seen, messages))


def spent_bill(spent: Spent, participation: Participation) -> Bill:
    """The bill of messages that are private already: every adversary may see them."""
    entries = ((spent.event, participation.most),)
    lines = (Line("models", "replace_one", entries), Line("cohort", "replace_one", entries))
    return Bill(spent.unit, (*lines, Line("messages", "replace_one", entries)))


def _seen_relation(clients: Sampler, release: Release) -> Relation:
    """Who is there is seen: a client can be zeroed out, or, where that was never in doubt, replaced."""
    if isinstance(release, ShuffledNoise):
        return "replace_one"
    return "zero_out" if clients.random else clients.relation


def _models_line(clients: Sampler, release: Release, participation: Participation, seen: Line) -> Line:
    if clients.random and _noise_hides_count(clients, release) and not isinstance(release, NoNoise):
        return Line("models", clients.relation, ((clients.amplify(release.event()), participation.releases),))
    return replace(seen, adversary="models")


def _noise_hides_count(clients: Sampler, release: Release) -> bool:
    """Whether the released sum tells nothing of the cohort's size. Noise shares do, unless the size is fixed."""
    if isinstance(release, NoiseShares):
        return isinstance(clients, FixedSize) and release.at_least == clients.cohort
    return isinstance(clients, Poisson | FixedSize) and "cohort" not in release.sees
