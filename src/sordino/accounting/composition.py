"""Composition: what a run costs, as events per adversary. Called by `Plan.cost`, ledgers and certificates.

    models    sees every released model, nothing else
    cohort    also sees who took part in which round
    messages  sees every message as it leaves the client

Each adversary has the neighbouring relation that is legal for it. A forecast and the cost of a run are one function;
they differ only in `Participation`.

Private hyperparameter selection (`Selection`, `sordino tune --private`): a trial draws a candidate by public chances,
runs it and scores its release on public rows. All trials have one cost and their number is random and secret, so the
best of them, with its candidate and score, costs `Tuned` of that cost (`trials`: Papernot, Steinke 2022).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from sordino.accounting.bounds import AlreadyPrivate, Unit
from sordino.accounting.events import Approximate, Event, Relation, Tuned, Unprotected
from sordino.accounting.matrix.sensitivity import Patterns
from sordino.accounting.trials import Trials, binomial_quantile
from sordino.codec import Part, foreign
from sordino.errors import PlanError

if TYPE_CHECKING:
    from sordino.parts.local_solvers import LocalSolver
    from sordino.parts.mechanisms import Preparation
    from sordino.parts.record_samplers import RecordSampler
    from sordino.parts.releases import Release
    from sordino.parts.samplers import Sampler

Adversary = Literal["models", "cohort", "messages"]
ADVERSARIES: tuple[Adversary, ...] = ("models", "cohort", "messages")
Entries = tuple[tuple[Event, int], ...]  # each event so many times


@dataclass(frozen=True)
class Participation:
    """How often the data was used: releases, and the rounds of the client that was in most of them.

    max_participations   rounds that a client was in for sure: by a public sampler, or as drawn where cohorts are seen
    per_client           the same for every client, where cohorts are seen
    sampled_rounds       rounds beside those that may take a client at random: a forecast, or cohorts not recorded
    repeated             rounds run again after a kill, from 0, once for each time: of the same clients and records
    repeats              how many there were: more than `repeated` names where a silo's receipts say so (of any client)
    end_reveals_cohorts  a budget ends the run by who was drawn, so its end tells something of the sampling
    """

    releases: int
    max_participations: int
    per_client: tuple[int, ...] = ()
    repeats: int = 0
    end_reveals_cohorts: bool = False
    prepared: int = 1  # how often the plan's preparations were released: more if a kill lost them
    repeated: tuple[int, ...] = ()
    sampled_rounds: int = 0

    @classmethod
    def planned(cls, clients: Sampler, rounds: int, repeated: tuple[int, ...] = ()) -> Participation:
        """As many rounds as planned, and those that were run again."""
        if not clients.random:
            sure, sampled = clients.participations_with_repeats(rounds, repeated), 0
        else:  # a random sampler that states no rate may take a client in every round
            reached = clients.amplified_rounds(rounds, repeated)
            sure, sampled = (reached, 0) if clients.inclusion_rate is None else (0, reached)
        return cls(rounds + len(repeated), sure, repeats=len(repeated), repeated=repeated, sampled_rounds=sampled)

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
        times = self.max_participations + self.sampled_rounds
        return Patterns(max(self.distinct, 1), times, clients.min_separation or 1, clients.periodic)

    @property
    def if_always_sampled(self) -> Participation:
        """The same if sampling took every client whenever it could."""
        each, most = (count + self.sampled_rounds for count in self.per_client), self.max_participations
        return replace(self, max_participations=most + self.sampled_rounds, per_client=tuple(each), sampled_rounds=0)


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
class Cost:
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


def client_cost(clients: Sampler, release: Release, participation: Participation, only: int | None = None) -> Cost:
    """The cost of a client-level plan, or of one client: amplified where sampler and release hide coins and cohort.

    To one who sees the cohort a client can be zeroed out, or, where it was never in doubt that it is there, replaced;
    round by round, or all rounds that share their noise as one event. Where coins are left and rounds share their
    noise, the sampler keeps the columns of C apart (`Release.suits`): one column for each round that a client is in.
    """
    if release.correlated and not clients.amplifies:  # columns of C may meet: no cost of single rounds
        participation = participation.if_always_sampled
    if "messages" in release.sees:
        return _message_cost(clients, release, participation, only)
    messages = Line("messages", "replace_one", _rounds(clients, release.message_event(), participation))
    relation = release.relation or ("zero_out" if clients.random else clients.relation)
    if participation.sampled_rounds:
        seen = Line("cohort", relation, _rounds(clients, release.event(), participation))
    else:
        seen = Line("cohort", relation, _with_repeats(release, participation.patterns(clients), participation))
    models, hidden = replace(seen, adversary="models"), clients.amplifies and release.hides_cohort(clients)
    if clients.random and hidden and not participation.end_reveals_cohorts:
        rounds = clients.amplified_rounds(participation.distinct, participation.repeated) + participation.unnamed
        models = Line("models", clients.relation, ((clients.amplify(release.event()), rounds),))
    return Cost("client", (models, seen, messages))


def _rounds(clients: Sampler, event: Event, participation: Participation, client: int | None = None) -> Entries:
    """The rounds of one client: `event` for those it was in for sure, and by a coin that is seen for the others."""
    sure = (
        participation.per_client[client]
        if client is not None and participation.per_client
        else participation.max_participations
    )
    if not participation.sampled_rounds:
        return ((event, sure),)
    counts: Counter[Event] = Counter({event: sure})
    counts[clients.publicly_sampled(event)] += participation.sampled_rounds
    return tuple((each, count) for each, count in counts.items() if count)


def _with_repeats(release: Release, allowed: Patterns, participation: Participation) -> Entries:
    """Where noise is shared, one event for all rounds, each counted once, and one more for every round run again.

    Where every round has noise of its own, `most` counts rounds that were run again already.
    """
    entries = release.run_events(allowed)
    if not release.correlated or not participation.all_repeats:
        return entries
    return (*entries, (release.repeated_event(allowed), participation.all_repeats))


def _one_of_each(clients: Sampler, only: int | None, parts: tuple[Part, ...], *own: tuple[float, ...]) -> range:
    """Every client, where lists say something of each, or a foreign part may; else one, who stands for all."""
    if only is not None:
        return range(only, only + 1)
    differ = any(len(each) > 1 for each in own) or bool(foreign(parts))
    return range(clients.population if differ else 1)


def _message_cost(clients: Sampler, release: Release, participation: Participation, only: int | None) -> Cost:
    """Every client noises its own message: a line for each kind of noise and number of rounds."""
    kinds: dict[Entries, list[int]] = {}
    for client in _one_of_each(clients, only, (release,), release.noise_multipliers, participation.per_client):
        rounds = _rounds(clients, release.own_event(client), participation, client)
        kinds.setdefault(rounds, []).append(client)
    lines = [
        Line(who, "replace_one", kind, tuple(found) if len(kinds) > 1 else ())
        for kind, found in kinds.items()
        for who in ADVERSARIES
    ]
    return Cost("client", tuple(lines))


def record_cost(
    clients: Sampler, local: LocalSolver, release: Release, participation: Participation, only: int | None = None
) -> Cost:
    """The cost of a record-level plan, or of one silo: the coins inside it amplify, those that choose silos never."""
    reads = local.reads
    assert reads is not None
    kinds: dict[tuple[Entries, ...], list[int]] = {}
    if release.correlated:  # rounds that share their noise have no cost of single rounds
        participation = participation.if_always_sampled
    own = (reads.sizes, participation.per_client, release.noise_multipliers, local.noise_multipliers)
    for silo in _one_of_each(clients, only, (release, local), *own):
        kinds.setdefault(_record_cost(clients, local, release, participation, silo), []).append(silo)
    lines = [
        Line(who, reads.relation, entries, tuple(silos) if len(kinds) > 1 else ())
        for costs, silos in kinds.items()
        for who, entries in zip(ADVERSARIES, costs, strict=True)
    ]
    return Cost("record", tuple(lines))


def _record_cost(
    clients: Sampler, local: LocalSolver, release: Release, participation: Participation, silo: int
) -> tuple[Entries, ...]:
    times = reads_of(clients, local, release, participation, silo)
    if not release.correlated:
        events = _record_events(local, release, silo)
        if not participation.sampled_rounds or not _silos_are_seen(clients, release):
            return tuple(((event, times),) for event in events)
        return tuple(_record_rounds(clients, local, participation, event, times, silo) for event in events)
    rounds = max(participation.distinct, 1)
    allowed = record_patterns(clients, local, rounds, min(times, rounds), silo)
    seen = _with_repeats(release, allowed, participation)
    return seen, seen, ((release.message_event(), seen[0][1]),)


def _silos_are_seen(clients: Sampler, release: Release) -> bool:
    return not clients.random or bool({"cohort", "messages"} & release.sees)


def _record_rounds(
    clients: Sampler, local: LocalSolver, participation: Participation, event: Event, times: int, silo: int
) -> Entries:
    """`times` reads of one record for sure, and those of rounds that take its silo by a coin that is seen.

    Several steps of a round share one coin. They are charged for k rounds, and P[Bin > k] <= 1e-15 as lost.
    """
    reads, spent, rate = local.reads, local.bound(), clients.inclusion_rate
    assert reads is not None
    assert rate is not None
    steps = spent.count if isinstance(spent, AlreadyPrivate) else 1
    again = _read_again(local, participation, steps, silo)
    most = reads.max_participations(participation.distinct * steps, silo) + again
    if steps == 1:
        coins = min(participation.sampled_rounds, most) if reads.disjoint else participation.sampled_rounds
        sampled = replace(participation, max_participations=times, per_client=(), sampled_rounds=coins)
        return _rounds(clients, event, sampled)
    rounds = binomial_quantile(participation.sampled_rounds, rate, LOST)
    more = min(rounds * steps, most) if reads.disjoint else rounds * steps
    return (event, times + more), (Approximate(0.0, LOST), 1)


LOST = 1e-15  # of delta, for rounds of several steps by one coin


def record_patterns(clients: Sampler, local: LocalSolver, releases: int, times: int, silo: int) -> Patterns:
    """The rounds that may read one record: as far apart as its silo's rounds, or as its batches, whichever is more."""
    assert local.reads is not None
    apart = max(clients.min_separation or 1, local.reads.min_separation(silo) or 1)
    return Patterns(max(releases, times, 1), times, apart)


def _record_events(local: LocalSolver, release: Release, silo: int) -> tuple[Event, ...]:
    reads, spent = local.reads, local.bound()
    assert reads is not None
    if isinstance(spent, AlreadyPrivate):
        return (reads.amplify(local.own_event(silo), silo),) * 3
    message = _amplified(reads, release.own_event(silo), silo)
    if "messages" in release.sees:
        return (message,) * 3
    seen = _amplified(reads, release.event(), silo) if release.amplified else release.event()
    return seen, seen, message


def _amplified(reads: RecordSampler, event: Event, silo: int) -> Event:
    return reads.amplify(event, silo) if event.protects else event


def reads_of(clients: Sampler, local: LocalSolver, release: Release, participation: Participation, silo: int) -> int:
    """How many releases one record of a silo may have been in."""
    reads, spent = local.reads, local.bound()
    assert reads is not None
    seen = _silos_are_seen(clients, release)
    rounds = participation.max_participations if seen else participation.releases
    rounds = participation.per_client[silo] if seen and participation.per_client else rounds
    steps = spent.count if isinstance(spent, AlreadyPrivate) else 1
    if not reads.disjoint:
        return rounds * steps
    again = _read_again(local, participation, steps, silo)
    return min(rounds * steps, reads.max_participations(participation.distinct * steps, silo) + again)


def _read_again(local: LocalSolver, participation: Participation, steps: int, silo: int) -> int:
    """How often one record was read again in rounds that were run again, named or not, at most.

    Steps of one epoch read disjoint records, so of an epoch the step that was run again most often counts.
    """
    reads = local.reads
    assert reads is not None
    times = Counter(step for t in participation.repeated for step in range(t * steps, (t + 1) * steps))
    most: Counter[int] = Counter()
    for step, count in times.items():
        most |= Counter({reads.epoch(step, silo): count})
    return most.total() + (
        participation.unnamed * reads.max_repeated_reads(steps, silo) if participation.unnamed else 0
    )


# ---- before the first round ------------------------------------------------------------------------------------------


def has_curator(unit: Unit, release: Release) -> bool:
    """Whether one who sees the clients' clean messages noises their sum; else everybody noises its own."""
    return unit == "client" and not release.message_event().protects


def with_preparations(cost: Cost, prepare: tuple[Preparation, ...], release: Release, times: int) -> Cost:
    """Every line with what was released before the first round, of everybody, `times` over.

    Nothing amplifies it: nobody is drawn. Where a curator noises the sum, one who reads messages reads them all.
    """
    if not prepare:
        return cost
    relation, open_to = cost.lines[0].relation, "messages" if has_curator(cost.unit, release) else ""

    def more(line: Line) -> Line:
        events = [Unprotected() if line.adversary == open_to else part.event(relation) for part in prepare]
        return replace(line, entries=(*line.entries, *((event, n * times) for event, n in Counter(events).items())))

    return replace(cost, lines=tuple(more(line) for line in cost.lines))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """How a run came to be the one that is shown: `over` which keys, `by` what; `id` is its name in a ledger."""

    id: str
    trials: Trials
    over: tuple[str, ...]
    by: str

    @property
    def assumed(self) -> list[str]:
        """What must hold for the cost."""
        return [
            f"this run is the best, by {self.by}, of a random number of trials ({self.trials.law.replace('_', ' ')}, "
            f"{self.trials.mean:g} on average) over {', '.join(self.over)}, each with the same cost",
            "how many trials there were, how long they took, and every trial but this one stayed secret",
        ]


def cost_of_best(cost: Cost, selection: Selection | None) -> Cost:
    """The cost of one trial as that of the best; no selection: as it is."""
    return cost if selection is None else replace(cost, lines=tuple(_line(one, selection.trials) for one in cost.lines))


def _line(line: Line, trials: Trials) -> Line:
    entries = tuple((event, count) for event, count in line.entries if count)
    if not entries or not all(event.protects for event, _ in entries):
        return line
    if len(entries) > 1:
        found = f"a trial of {len(entries)} kinds of events"
        raise PlanError("tuning", found, "one kind of event", "tune on public data: sordino tune without --private")
    ((event, count),) = entries
    return replace(line, entries=((Tuned(event, count, trials), 1),))
