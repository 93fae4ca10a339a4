"""Composition: the cost of a run as privacy events for each adversary. Called by `Plan.cost`, ledgers, certificates.

    models    sees every released model, nothing else
    cohort    also sees which clients took part in which round
    messages  sees every message as it leaves the client

Each adversary has the neighbouring relation that is valid for it. Forecast and final cost are computed by one function;
they differ only in `Participation`.

Private hyperparameter selection (`Selection`, `sordino tune --private`): a trial draws a candidate with public
probabilities, runs it and scores its release on public rows. All trials have the same cost and their number is random
and secret, so the best of them, with its candidate and score, costs the event `Tuned` (`renyi.Trials`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc

from sordino.accounting.bounds import AlreadyPrivate, Protected
from sordino.accounting.events import Approximate, Event, Relation, Tuned, Unprotected
from sordino.accounting.renyi import Trials
from sordino.accounting.sensitivity import Patterns
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
Entries = tuple[tuple[Event, int], ...]  # events and their counts
LOST = 1e-15  # share of delta for rounds of several steps whose silo is drawn once


@dataclass(frozen=True)
class Participation:
    """Counts of a run's releases, from which its cost is computed.

    releases             number of rounds, each counted as often as it was run
    max_participations   largest number of rounds that certainly included one client: by a public sampler, or counted
                         if cohorts are visible
    per_client           such a number for each client, if cohorts are visible
    sampled_rounds       further rounds that include a client at random: in a forecast, or if cohorts are not recorded
    repeated             rounds (from 0) that were run again after a kill, with the same clients and records
    repeats              number of repeated rounds; may exceed the length of `repeated` by silos' receipts
    end_reveals_cohorts  whether a budget decides when the run ends, so that its end depends on the drawn cohorts
    prepared             number of times that the releases before round 1 were made (more than one after a kill)
    first                round from which these releases are counted; not 0 for a part of a run
    """

    releases: int
    max_participations: int
    per_client: tuple[int, ...] = ()
    repeats: int = 0
    end_reveals_cohorts: bool = False
    prepared: int = 1
    repeated: tuple[int, ...] = ()
    sampled_rounds: int = 0
    first: int = 0

    @classmethod
    def planned(cls, clients: Sampler, rounds: int, repeated: tuple[int, ...] = ()) -> Participation:
        """Return the participation of a planned run of `rounds` rounds, of which those in `repeated` are run again."""
        if not clients.random:
            sure, sampled = clients.participations_with_repeats(rounds, repeated), 0
        else:  # a random sampler that states no rate may include a client in every round
            reached = clients.amplified_rounds(rounds, repeated)
            sure, sampled = (reached, 0) if clients.inclusion_rate is None else (0, reached)
        return cls(rounds + len(repeated), sure, repeats=len(repeated), repeated=repeated, sampled_rounds=sampled)

    @property
    def rounds(self) -> range:
        """Numbers of the rounds of these releases."""
        return range(self.first, self.first + self.releases)

    @property
    def unnamed(self) -> int:
        """Number of repeated rounds that are not listed in `repeated`, which may have included any client."""
        return max(self.repeats - len(self.repeated), 0)

    @property
    def distinct(self) -> int:
        """Number of rounds that were run at least once."""
        return max(self.releases - max(self.repeats, len(self.repeated)), 0)

    def patterns(self, clients: Sampler) -> Patterns:
        """Return the participation patterns of one client, with each round counted once."""
        times = self.max_participations + self.sampled_rounds
        return Patterns(max(self.distinct, 1), times, clients.min_separation or 1, clients.periodic)

    @property
    def if_always_sampled(self) -> Participation:
        """Participation of a client that is included in every sampled round, the worst case."""
        each, most = (count + self.sampled_rounds for count in self.per_client), self.max_participations
        return replace(self, max_participations=most + self.sampled_rounds, per_client=tuple(each), sampled_rounds=0)


def repeated_rounds(charged: Iterable[int]) -> tuple[int, ...]:
    """Return the rounds that occur several times among `charged`, once for each repetition."""
    found = Counter(charged)
    return tuple(sorted((found - Counter(set(found))).elements()))


@dataclass(frozen=True)
class Line:
    """Privacy events that one adversary observes, with their counts, under one neighbouring relation.

    The line holds for the units in `silos`, or for all units if `silos` is empty.
    """

    adversary: Adversary
    relation: Relation
    entries: Entries
    silos: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cost:
    """Privacy cost of a run: the events that each adversary observes, for neighbours that differ in one `unit`.

    If silos differ, an adversary has one line per kind of silo. Neighbours differ in one silo, so the line with the
    largest epsilon counts.
    """

    unit: Protected
    lines: tuple[Line, ...]

    def of(self, adversary: Adversary) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.adversary == adversary)

    def line(self, adversary: Adversary, silo: int = 0) -> Line:
        """Return one adversary's line; if silos differ, its line for `silo`."""
        return next(line for line in self.of(adversary) if not line.silos or silo in line.silos)


# ---- clients ---------------------------------------------------------------------------------------------------------


def client_cost(clients: Sampler, release: Release, participation: Participation, only: int | None = None) -> Cost:
    """Return the cost of a client-level plan, or of the client `only`; sampling amplifies if cohorts are hidden.

    Against an adversary who sees the cohort the relation is zero-out or, if the sampler is public, replace-one. Rounds
    are separate events; under correlated noise all rounds are one event. If sampling amplifies correlated noise, the
    columns of the strategy matrix C in a client's rounds are disjoint (`Release.check` ensures this), so that each of
    its rounds is a separate event.
    """
    if release.correlated and not clients.amplifies:  # columns of C may overlap: no cost of single rounds
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
    hidden = hidden and clients.random and not participation.end_reveals_cohorts
    if hidden and clients.keeps_bins:
        models = Line("models", clients.relation, _kept_bins(clients, release, participation) or seen.entries)
    elif hidden:
        rounds = clients.amplified_rounds(participation.distinct, participation.repeated)
        rounds += participation.unnamed if participation.repeats else 0
        models = Line("models", clients.relation, ((clients.amplify(release.event()), rounds),))
    return Cost("client", (models, seen, messages))


def _rounds(clients: Sampler, event: Event, participation: Participation, client: int | None = None) -> Entries:
    """Return one client's events: `event` for rounds that certainly included it, `PubliclySampled` for sampled ones."""
    own = client is not None and participation.per_client
    sure = participation.per_client[client or 0] if own else participation.max_participations
    if not participation.sampled_rounds:
        return ((event, sure),)
    counts: Counter[Event] = Counter({event: sure})
    counts[clients.publicly_sampled(event)] += participation.sampled_rounds
    return tuple((each, count) for each, count in counts.items() if count)


def _with_repeats(release: Release, allowed: Patterns, participation: Participation) -> Entries:
    """Return the events of all rounds; if noise is correlated, with one more event for each repeated round.

    If noise is independent, `max_participations` includes the repeated rounds.
    """
    entries, repeats = release.run_events(allowed), max(participation.repeats, len(participation.repeated))
    return (*entries, (release.repeated_event(allowed), repeats)) if release.correlated and repeats else entries


def _kept_bins(clients: Sampler, release: Release, participation: Participation) -> Entries | None:
    """Return the events of a run with kept bins, and one release without amplification for every repeated round."""
    whole = release.kept_bins_event(clients.min_separation or 1, max(participation.distinct, 1))
    repeats = max(participation.repeats, len(participation.repeated))
    again = ((release.repeated_event(participation.patterns(clients)), repeats),) if repeats else ()
    return None if whole is None else ((whole, 1), *again)


def _one_of_each(clients: Sampler, only: int | None, parts: tuple[Part, ...], *own: tuple[float, ...]) -> range:
    """Return the clients whose cost must be computed: all if costs may differ, otherwise one."""
    if only is not None:
        return range(only, only + 1)
    differ = any(len(each) > 1 for each in own) or bool(foreign(parts))
    return range(clients.population if differ else 1)


def _message_cost(clients: Sampler, release: Release, participation: Participation, only: int | None) -> Cost:
    """Return the cost of a plan whose clients add their own noise: a line per noise level and number of rounds."""
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


# ---- records ---------------------------------------------------------------------------------------------------------


def record_cost(
    clients: Sampler, local: LocalSolver, release: Release, participation: Participation, only: int | None = None
) -> Cost:
    """Return the cost of a record-level plan, or of the silo `only`; only the sampling of records amplifies."""
    reads = _record_sampler(local)
    kinds: dict[tuple[Entries, ...], list[int]] = {}
    if release.correlated:  # rounds that share their noise have no cost of single rounds
        participation = participation.if_always_sampled
    own = (reads.sizes, participation.per_client, release.noise_multipliers, local.noise_multipliers)
    for silo in _one_of_each(clients, only, (release, local), *own):
        kinds.setdefault(_silo_cost(clients, local, release, participation, silo), []).append(silo)
    lines = [
        Line(who, reads.relation, entries, tuple(silos) if len(kinds) > 1 else ())
        for costs, silos in kinds.items()
        for who, entries in zip(ADVERSARIES, costs, strict=True)
    ]
    return Cost("record", tuple(lines))


def _record_sampler(local: LocalSolver) -> RecordSampler:
    assert local.reads is not None
    return local.reads


def _silo_cost(
    clients: Sampler, local: LocalSolver, release: Release, participation: Participation, silo: int
) -> tuple[Entries, ...]:
    times = reads_of(clients, local, release, participation, silo)
    if release.correlated:
        rounds = max(participation.distinct, 1)
        allowed = record_patterns(clients, local, rounds, min(times, rounds), silo)
        seen = _with_repeats(release, allowed, participation)
        return seen, seen, ((release.message_event(), seen[0][1]),)
    reads = _record_sampler(local)

    def amplified(event: Event) -> Event:
        return reads.amplify(event, silo) if event.protects else event

    if isinstance(local.bound(), AlreadyPrivate):
        events = (reads.amplify(local.own_event(silo), silo),) * 3
    elif "messages" in release.sees:
        events = (amplified(release.own_event(silo)),) * 3
    elif release.scheduled:  # a record may be read in every round, each with noise of its own (`Release.check`)
        own = tuple((amplified(event), count) for event, count in release.events(participation.rounds))
        return own, own, ((release.message_event(), times),)
    else:
        to_models = amplified(release.event()) if release.amplified else release.event()
        events = (to_models, to_models, amplified(release.own_event(silo)))
    if not participation.sampled_rounds or not _silos_are_seen(clients, release):
        return tuple(((event, times),) for event in events)
    return tuple(_record_rounds(clients, local, participation, event, times, silo) for event in events)


def _silos_are_seen(clients: Sampler, release: Release) -> bool:
    return not clients.random or bool({"cohort", "messages"} & release.sees)


def _steps(local: LocalSolver) -> int:
    """Return the number of releases that read one record in one round."""
    spent = local.bound()
    return spent.count if isinstance(spent, AlreadyPrivate) else 1


def _record_rounds(
    clients: Sampler, local: LocalSolver, participation: Participation, event: Event, times: int, silo: int
) -> Entries:
    """Return the events of `times` certain reads of one record, and of rounds that include its silo at random.

    All steps of a round share one draw of the silo. So k rounds with P[Bin(rounds, rate) > k] <= 1e-15 are charged, and
    1e-15 is added to delta.
    """
    reads, steps, rate = _record_sampler(local), _steps(local), clients.inclusion_rate
    assert rate is not None
    again = _read_again(local, participation, steps, silo)
    most = reads.max_participations(participation.distinct * steps, silo) + again
    if steps == 1:
        draws = min(participation.sampled_rounds, most) if reads.disjoint else participation.sampled_rounds
        sampled = replace(participation, max_participations=times, per_client=(), sampled_rounds=draws)
        return _rounds(clients, event, sampled)
    rounds = binomial_quantile(participation.sampled_rounds, rate, LOST)
    more = min(rounds * steps, most) if reads.disjoint else rounds * steps
    return (event, times + more), (Approximate(0.0, LOST), 1)


def record_patterns(clients: Sampler, local: LocalSolver, releases: int, times: int, silo: int) -> Patterns:
    """Return the participation patterns of one record, separated by the sampling of silos or by disjoint batches."""
    apart = max(clients.min_separation or 1, _record_sampler(local).min_separation(silo) or 1)
    return Patterns(max(releases, times, 1), times, apart)


def reads_of(clients: Sampler, local: LocalSolver, release: Release, participation: Participation, silo: int) -> int:
    """Return the largest number of releases that may have read one record of a silo."""
    reads, steps, seen = _record_sampler(local), _steps(local), _silos_are_seen(clients, release)
    rounds = participation.max_participations if seen else participation.releases
    rounds = participation.per_client[silo] if seen and participation.per_client else rounds
    if not reads.disjoint:
        return rounds * steps
    again = _read_again(local, participation, steps, silo)
    return min(rounds * steps, reads.max_participations(participation.distinct * steps, silo) + again)


def _read_again(local: LocalSolver, participation: Participation, steps: int, silo: int) -> int:
    """Return the largest number of additional reads of one record in repeated rounds."""
    reads, unnamed = _record_sampler(local), participation.unnamed
    times = Counter(step for t in participation.repeated for step in range(t * steps, (t + 1) * steps))
    return reads.reads_again(times, silo) + (unnamed * reads.max_repeated_reads(steps, silo) if unnamed else 0)


# ---- number of rounds in which independent sampling includes one client ----------------------------------------------


def binomial_most(population: int, rounds: int, rate: float) -> int:
    """Return the smallest k with population * P[Bin(rounds, rate) > k] <= 1e-6, for forecasts only."""
    return binomial_quantile(rounds, rate, 1e-6 / population)


def binomial_quantile(rounds: int, rate: float, tail: float) -> int:
    """Return the smallest k with P[Bin(rounds, rate) > k] <= tail."""
    low, high = -1, rounds  # P[> k] falls in k: above the tail at low, below it at high
    while high - low > 1:
        k = (low + high) // 2
        low, high = (low, k) if bdtrc(k, rounds, rate) <= tail else (k, high)
    return high


def binomial_within(allowed: NDArray[np.int64], rounds: int, rate: float) -> NDArray[np.float64]:
    """Return P[Bin(rounds, rate) <= k] for each k in `allowed`."""
    return np.asarray(bdtr(np.minimum(allowed, rounds), rounds, rate))


# ---- before the first round, and the best of many trials -------------------------------------------------------------


def has_curator(unit: Protected, release: Release) -> bool:
    """Return whether a trusted curator adds noise to the sum of messages; if not, each client adds its own noise."""
    return unit == "client" and not release.message_event().protects


def with_preparations(cost: Cost, prepare: tuple[Preparation, ...], release: Release, times: int) -> Cost:
    """Return the cost with the releases before round 1 (column histograms) added, each `times` times.

    These releases use all units, so sampling does not amplify them. If a curator adds noise to the sum, an adversary
    who sees messages sees the histograms without noise.
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
    """Private selection of the best trial: names of the tuned settings (`over`), score (`by`), and `id` in ledgers."""

    id: str
    trials: Trials
    over: tuple[str, ...]
    by: str

    @property
    def assumed(self) -> list[str]:
        return [
            f"this run is the best, by {self.by}, of a random number of trials ({self.trials.law.replace('_', ' ')}, "
            f"{self.trials.mean:g} on average) over {', '.join(self.over)}, each with the same cost",
            "how many trials there were, how long they took, and every trial but this one stayed secret",
        ]


def cost_of_best(cost: Cost, selection: Selection | None) -> Cost:
    """Return the cost of the best of many trials from the cost of one trial; the same cost if `selection` is None."""
    if selection is None:
        return cost
    lines = []
    for line in cost.lines:
        entries = tuple((event, count) for event, count in line.entries if count)
        if entries and all(event.protects for event, _ in entries):
            if len(entries) > 1:
                found = f"a trial whose cost has {len(entries)} kinds of events"
                fix = "tune on public data: sordino tune without --private"
                raise PlanError("tuning", found, "trials with a single kind of event for private tuning", fix)
            ((event, count),) = entries
            line = replace(line, entries=((Tuned(event, count, selection.trials), 1),))
        lines.append(line)
    return replace(cost, lines=tuple(lines))
