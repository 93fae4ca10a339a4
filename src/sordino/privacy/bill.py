"""What a run costs, line by line: one line per adversary, each with the relation that is legal for it.

    models    sees every released model, nothing else
    cohort    also sees who took part in which round
    messages  sees every message as it leaves the client

Forecast and bill are one function; they differ only in `participation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from sordino.codec import Part, foreign
from sordino.matrix.patterns import Patterns
from sordino.parts.bounds import Spent, Unit
from sordino.parts.events import Event, Relation, Unprotected
from sordino.parts.preparation import Preparation
from sordino.parts.release import Release
from sordino.parts.releases import LocalNoise, ShuffledNoise
from sordino.parts.samplers import Sampler

if TYPE_CHECKING:
    from sordino.parts.local import LocalSolver
    from sordino.parts.records import RecordSampler

Adversary = Literal["models", "cohort", "messages"]
ADVERSARIES: tuple[Adversary, ...] = ("models", "cohort", "messages")
Entries = tuple[tuple[Event, int], ...]  # each event so many times


@dataclass(frozen=True)
class Participation:
    """How often the data was touched: releases made, and the most that any one client was in.

    `most` comes from the plan unless the adversary sees the cohort; then it is the realised count, and `each` that of
    every single client. `repeated` names the rounds that were run again after a kill, from 0 and once for each time:
    the same clients and records are in them again, so what they cost depends on which they are. `repeats` is how many
    there were; it is more than `repeated` names where a silo says that it paid for more, and those may be of anybody.
    `told`: a budget ends the run by who was drawn, so one who sees when it ended knows something of the coins.
    """

    releases: int
    most: int
    each: tuple[int, ...] = ()
    repeats: int = 0
    told: bool = False
    prepared: int = 1  # how often the plan's preparations were released: more if a kill lost them
    repeated: tuple[int, ...] = ()

    @classmethod
    def planned(cls, clients: Sampler, rounds: int, repeated: tuple[int, ...] = ()) -> Participation:
        """As many rounds as planned, and those that were run again."""
        most, count = clients.max_participations(rounds, repeated), len(repeated)
        return cls(releases=rounds + count, most=most, repeats=count, repeated=repeated)

    @property
    def all_repeats(self) -> int:
        """Rounds that were run again, named or not."""
        return max(self.repeats, len(self.repeated))

    @property
    def distinct(self) -> int:
        """Rounds that were run at least once."""
        return max(self.releases - self.all_repeats, 0)

    @property
    def unnamed(self) -> int:
        """Rounds that were run again, nobody knows which: they may have been any client's."""
        return self.all_repeats - len(self.repeated)

    def patterns(self, clients: Sampler) -> Patterns:
        """The rounds that one client may have been in, each counted once."""
        return Patterns(max(self.distinct, 1), self.most, clients.apart or 1)


def repeated_rounds(charged: Iterable[int]) -> tuple[int, ...]:
    """Of the rounds of a chain of charges, those that were run again: once for each time after the first."""
    found = Counter(charged)
    return tuple(sorted((found - Counter(set(found))).elements()))


@dataclass(frozen=True)
class Line:
    """Each event so many times, to `adversary`, when the data changes by `relation`; of `silos`, or of all if empty."""

    adversary: Adversary
    relation: Relation
    entries: Entries
    silos: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bill:
    """All that was released, per adversary; unit is what one neighbour may change.

    Where silos differ, an adversary has a line for each kind: a neighbour changes one silo, so the worst counts.
    """

    unit: Unit
    lines: tuple[Line, ...]

    def of(self, adversary: Adversary) -> tuple[Line, ...]:
        """The lines of one adversary."""
        return tuple(line for line in self.lines if line.adversary == adversary)

    def line(self, adversary: Adversary, silo: int = 0) -> Line:
        """The line of one adversary, for one silo where they differ."""
        lines = self.of(adversary)
        return next(line for line in lines if not line.silos or silo in line.silos)


def client_bill(clients: Sampler, release: Release, participation: Participation, only: int | None = None) -> Bill:
    """The bill of a client-level plan, or of one client: the sampler amplifies only where its coins are unseen."""
    if isinstance(release, LocalNoise) and (release.multipliers or participation.each):
        return _own_bill(clients, release, participation, only)
    messages = Line("messages", "replace_one", ((release.message_event(), participation.most),))
    if "messages" in release.sees:
        return Bill("client", (replace(messages, adversary="models"), replace(messages, adversary="cohort"), messages))
    allowed = participation.patterns(clients)
    seen = Line("cohort", _seen_relation(clients, release), _with_repeats(release, allowed, participation))
    return Bill("client", (_models_line(clients, release, participation, seen), seen, messages))


def _with_repeats(release: Release, allowed: Patterns, participation: Participation) -> Entries:
    """Where noise is shared, one event for all rounds, each counted once, and one more for every round run again.

    Where every round has noise of its own, `most` counts rounds that were run again already.
    """
    entries = release.over(allowed)
    if not release.joint or not participation.all_repeats:
        return entries
    return (*entries, (release.repeated_event(allowed), participation.all_repeats))


def _one_of_each(clients: Sampler, only: int | None, parts: tuple[Part, ...], *own: tuple[float, ...]) -> range:
    """Every client, where lists say something of each, or a foreign part may; else one, who stands for all."""
    if only is not None:
        return range(only, only + 1)
    differ = any(len(each) > 1 for each in own) or bool(foreign(parts))
    return range(clients.population if differ else 1)


def _own_bill(clients: Sampler, release: LocalNoise, participation: Participation, only: int | None) -> Bill:
    """Every client noises its own message: a line for each kind of noise and number of rounds."""
    kinds: dict[tuple[Event, int], list[int]] = {}
    for client in _one_of_each(clients, only, (release,), release.multipliers, participation.each):
        rounds = participation.each[client] if participation.each else participation.most
        kinds.setdefault((release.of(client).event(), rounds), []).append(client)
    lines = [
        Line(who, "replace_one", (kind,), tuple(found) if len(kinds) > 1 else ())
        for kind, found in kinds.items()
        for who in ADVERSARIES
    ]
    return Bill("client", tuple(lines))


def record_bill(
    clients: Sampler, local: LocalSolver, release: Release, participation: Participation, only: int | None = None
) -> Bill:
    """The bill of a record-level plan, or of one silo: the coins inside it amplify, those that choose silos never."""
    reads = local.reads
    assert reads is not None
    kinds: dict[tuple[Entries, ...], list[int]] = {}
    own = [getattr(part, "multipliers", ()) for part in (release, local)]
    for silo in _one_of_each(clients, only, (release, local), reads.sizes, participation.each, *own):
        kinds.setdefault(_record_cost(clients, local, release, participation, silo), []).append(silo)
    lines = [
        Line(who, reads.relation, entries, tuple(silos) if len(kinds) > 1 else ())
        for costs, silos in kinds.items()
        for who, entries in zip(ADVERSARIES, costs, strict=True)
    ]
    return Bill("record", tuple(lines))


def _record_cost(
    clients: Sampler, local: LocalSolver, release: Release, participation: Participation, silo: int
) -> tuple[Entries, ...]:
    """What one record of a silo pays to each adversary, and how often."""
    times = reads_of(clients, local, release, participation, silo)
    if not release.joint:
        return tuple(((event, times),) for event in _record_events(local, release, silo))
    rounds = max(participation.distinct, 1)
    allowed = record_patterns(clients, local, rounds, min(times, rounds), silo)
    seen = _with_repeats(release, allowed, participation)
    return seen, seen, ((release.message_event(), seen[0][1]),)


def record_patterns(clients: Sampler, local: LocalSolver, releases: int, times: int, silo: int) -> Patterns:
    """The rounds that may read one record: as far apart as its silo's rounds, or as its batches, whichever is more."""
    assert local.reads is not None
    apart = max(clients.apart or 1, local.reads.apart(silo) or 1)
    return Patterns(max(releases, times, 1), times, apart)


def _record_events(local: LocalSolver, release: Release, silo: int) -> tuple[Event, ...]:
    """One release of one silo's records, to each adversary."""
    reads, spent = local.reads, local.bound()
    assert reads is not None
    if isinstance(spent, Spent):
        return (reads.amplify(local.own_event(silo), silo),) * 3
    if isinstance(release, LocalNoise):
        return (reads.amplify(release.of(silo).event(), silo),) * 3
    message = release.message_event()
    seen = release.event() if isinstance(release, ShuffledNoise) else _amplified(reads, release.event(), silo)
    return (seen, seen, _amplified(reads, message, silo))


def _amplified(reads: RecordSampler, event: Event, silo: int) -> Event:
    return event if isinstance(event, Unprotected) else reads.amplify(event, silo)


def reads_of(clients: Sampler, local: LocalSolver, release: Release, participation: Participation, silo: int) -> int:
    """How many releases one record of a silo may have been in."""
    reads, spent = local.reads, local.bound()
    assert reads is not None
    seen = not clients.random or bool({"cohort", "messages"} & release.sees)
    rounds = participation.most if seen else participation.releases
    rounds = participation.each[silo] if seen and participation.each else rounds
    steps = spent.count if isinstance(spent, Spent) else 1
    if not reads.disjoint:
        return rounds * steps
    again = repeated_reads(reads, participation.repeated, steps, silo)
    again += participation.unnamed * reads.again(steps, silo)
    return min(rounds * steps, reads.most(participation.distinct * steps, silo) + again)


def repeated_reads(reads: RecordSampler, repeated: Sequence[int], steps: int, silo: int) -> int:
    """How often one record was read again in rounds that were run again, at most.

    Steps of one epoch read disjoint records, so of an epoch the step that was run again most often counts.
    """
    times = Counter(step for t in repeated for step in range(t * steps, (t + 1) * steps))
    most: Counter[int] = Counter()
    for step, count in times.items():
        most |= Counter({reads.epoch(step, silo): count})
    return most.total()


def _seen_relation(clients: Sampler, release: Release) -> Relation:
    """Who is there is seen: a client can be zeroed out, or, where that was never in doubt, replaced."""
    if isinstance(release, ShuffledNoise):
        return "replace_one"
    return "zero_out" if clients.random else clients.relation


def _models_line(clients: Sampler, release: Release, participation: Participation, seen: Line) -> Line:
    """Amplified where sampler and release both say that neither coins nor cohort are seen."""
    if clients.random and clients.amplifies and release.hides(clients) and not participation.told:
        rounds = clients.amplified_rounds(participation.distinct, participation.repeated) + participation.unnamed
        return Line("models", clients.relation, ((clients.amplify(release.event()), rounds),))
    return replace(seen, adversary="models")


# ---- before the first round ------------------------------------------------------------------------------------------


def curated(unit: Unit, release: Release) -> bool:
    """Whether one who sees the clients' clean messages noises their sum; else everybody noises its own."""
    return unit == "client" and isinstance(release.message_event(), Unprotected)


def with_preparations(bill: Bill, prepare: tuple[Preparation, ...], release: Release, times: int) -> Bill:
    """Every line with what was released before the first round, of everybody, `times` over.

    Nothing amplifies it: nobody is drawn. Where a curator noises the sum, one who reads messages reads them all.
    """
    if not prepare:
        return bill
    relation, open_to = bill.lines[0].relation, "messages" if curated(bill.unit, release) else ""

    def more(line: Line) -> Line:
        events = [Unprotected() if line.adversary == open_to else part.event(relation) for part in prepare]
        return replace(line, entries=(*line.entries, *((event, n * times) for event, n in Counter(events).items())))

    return replace(bill, lines=tuple(more(line) for line in bill.lines))
