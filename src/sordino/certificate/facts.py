"""Facts of a run that its certificate needs beside the plan, the run's cost, and consistency checks of its counts.

    rounds accounted >= max(rounds charged - rounds replayed, charges that a silo's receipts report, rounds planned)
    count(line)      <= rounds accounted * releases of one unit per round, with equality if a unit is in every round

`rounds planned` is left out if a budget ended the run, and more rounds are accounted only if rounds were repeated.
count(line) is the number of releases of one unit (client or record) in one adversary's line of the cost.

Earlier runs, whose weights a run started from, are composed with it:

    together = epsilon( events of every earlier run of this unit and relation, and of this run )     at this run's delta

This epsilon holds for a unit in the data of all runs. Runs of another unit or relation are only listed, because
epsilons of different relations do not compose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from sordino import codec
from sordino.accounting import accountant
from sordino.accounting.bounds import AlreadyPrivate, Protected
from sordino.accounting.composition import ADVERSARIES, Cost, Participation, Selection, cost_of_best
from sordino.accounting.events import Event, Relation
from sordino.accounting.rounding import upto, upward
from sordino.errors import CertificateError
from sordino.graph import GRADES, Grade
from sordino.ledger.totals import Item, Statement
from sordino.rng import Mode

if TYPE_CHECKING:
    from sordino.plan import Plan


# values of `Declared.what` that are not rows
WEIGHTS = "initial weights"  # of a model, read from a file
FROZEN = "frozen weights"  # parameters that are not trained, as the base under adapters
VALUES = "ranges, categories and constants of columns"  # that encode a table's columns
CLASSES = "number of classes"  # read off the labels
MOST_KINDS = 64  # of silos, over all earlier runs, that a sum looks at


@dataclass(frozen=True)
class Declared:
    """Declaration that rows, weights or values are public, so that they are not protected."""

    rows: int
    what: str
    by: str
    sha256: str | None = None  # of weights: their file's, or that of names and values


@dataclass(frozen=True)
class Loop:
    """Facts of a DP-SGD loop in PyTorch: how its loss and the independence of its records were checked."""

    reduction: Literal["mean", "sum"]
    check: str
    kept_apart: str
    looks: int  # passes in which a record alone was compared with the record in a batch
    users: bool = False  # all records of one user are clipped together, and drawn together


@dataclass(frozen=True)
class OwnCode:
    """Result of the check (`sordino.graph`) that the user's model and loss treat records independently."""

    grade: Grade
    why: str

    @classmethod
    def of_headers(cls, lines: Iterable[Mapping[str, Any]]) -> OwnCode | None:
        """Return the weakest result in the lines of engine.jsonl, one per start of a run; None if none has a result."""
        found = [cls(line["own_code"], str(line["own_code_why"])) for line in lines if line.get("own_code") in GRADES]
        return max(found, key=lambda own: GRADES.index(own.grade), default=None)


@dataclass(frozen=True)
class EarlierRun:
    """Earlier run whose weights a run started from; `kinds` has its privacy events for each kind of silo."""

    run: str  # its id; "plan ..." where only the weights' file is known, which names the plan
    unit: Protected
    relation: Relation
    delta: float
    kinds: tuple[tuple[Item, ...], ...]
    known_from: str
    same_data: bool = False  # by a keyed fingerprint; False: not known to be the same

    @classmethod
    def of_cost(cls, cost: Cost, delta: float, run: str, known_from: str) -> EarlierRun:
        """Describe an earlier run by its cost against the adversary who sees models."""
        lines = cost.of("models")
        kinds = {tuple(Item(event, count) for event, count in line.entries if count): None for line in lines}
        return cls(run, cost.unit, lines[0].relation, delta, tuple(kinds), known_from)

    @classmethod
    def of_certificate(cls, certificate: Mapping[str, Any], run: str, known_from: str) -> EarlierRun:
        """Describe an earlier run by its certificate's entry on the adversary who sees models."""
        main = certificate["adversaries"][0]
        charged = [[one for one in entry["events"] if one["count"]] for entry in main.get("silos", [main])]
        kinds = {
            tuple(Item(codec.read(Event, one["event"], "event"), one["count"]) for one in kind): None
            for kind in charged
        }
        return cls(run, certificate["unit"], main["relation"], main["delta"], tuple(kinds), known_from)

    @property
    def epsilon(self) -> float:
        """Epsilon of the earlier run alone."""
        return max(_epsilon(kind, self.relation, self.delta) for kind in self.kinds)


@dataclass(frozen=True)
class Facts:
    """Facts of a run beside its plan, all of them public or visible to the adversary."""

    delta: float
    noise: Mode
    charged: int  # releases written down before their noise was drawn
    max_participations: int | None = None  # most rounds of one client, where the cohort is seen by design
    model: str = ""  # sha256 of model.safetensors
    config: str = ""  # sha256 of the whole configuration, where there is a file
    per_client: tuple[int, ...] = ()  # rounds of every client, where each is charged for its own
    repeats: int = 0  # how many rounds were charged again after a kill
    repeated: tuple[int, ...] = ()  # which rounds, from 0, once for each time: by the chain of charges
    deltas: tuple[float, ...] = ()  # a delta of its own for every silo
    public: tuple[Declared, ...] = ()  # rows that were evaluated on, or trained on by the server
    names: tuple[str, ...] = ()  # of the silos, where they have any
    filtered: bool = False  # a budget decides when the run ends, so its end tells of the cohorts
    stopped: bool = False  # it ended because a budget refused the next cohort, and for no other reason
    foreign: tuple[codec.Foreign, ...] = ()  # what is not Sordino's own: model, data set, partition
    loop: Loop | None = None  # of a private PyTorch loop
    receipts: tuple[int, ...] = ()  # charges that every silo reports, where clients are elsewhere
    replayed: int = 0  # charges that every silo answered with the message it had sent before: no new release
    selection: Selection | None = None  # of many runs, this is the best
    ledger: Statement | None = None  # what the data set has spent in all, where a ledger was charged
    environment: tuple[dict[str, str], ...] = ()  # every set of versions that computed some of it
    utility: dict[str, float] | None = None  # the last figures on public rows
    prepared: int = 0  # how often the plan's preparations were charged
    early: str = ""  # what stopped it early, by public figures: all planned rounds are accounted
    given: dict[str, Any] | None = None  # of a task made in Python: the identity of its module
    earlier: tuple[EarlierRun, ...] = ()  # runs that the first weights come from
    in_memory: bool = False  # no charge was on disk before its noise was drawn
    own_code: OwnCode | None = None  # of model and loss; None: not examined, as where no round has run
    sum_length: int = 0  # coordinates of a message in secure sums between machines; 0: there were none
    user_rows: int = 0  # the most rows of one user of a table, where all rows of one user are one record

    @property
    def released(self) -> int:
        """Number of releases with new noise: charges that were not replayed, or more by a silo's receipts."""
        return max(self.charged - self.replayed, *self.receipts, 0)


def participation(plan: Plan, facts: Facts) -> Participation:
    """Return the rounds that epsilon covers: all planned and repeated rounds; fewer only if a budget ended the run.

    A run that stops early may do so because of its data, so all planned rounds are accounted. If a budget refused the
    next cohort, only the charged rounds are accounted: budgets and cohorts are public or seen by this adversary, so the
    stopping time depends on no data. A run that was killed and resumed is accounted as planned, plus its repeated
    rounds. The best of many trials is accounted as planned, since nobody sees the cohorts of the other trials.
    """
    least, prepared = facts.max_participations or 0, max(1, facts.prepared)
    if facts.selection is None:
        return replace(_rounds(plan, facts), prepared=prepared)
    found = _rounds(plan, replace(facts, max_participations=None, per_client=()))
    most = found.max_participations if found.sampled_rounds else max(found.max_participations, least)
    return replace(found, max_participations=most, prepared=prepared)


def _rounds(plan: Plan, facts: Facts) -> Participation:
    revealed = facts.filtered and plan.clients.random
    if facts.stopped and not facts.repeats and facts.charged:
        if facts.max_participations is None:
            return replace(Participation.planned(plan.clients, facts.released), end_reveals_cohorts=revealed)
        return Participation(facts.released, facts.max_participations, facts.per_client, 0, revealed)
    known = max(facts.repeats, len(facts.repeated))
    distinct = max(plan.rounds, facts.released - known) if facts.loop is not None else plan.rounds
    repeats = max(known, facts.released - distinct)  # a run has no more rounds than planned: what is more ran again
    again: dict[str, Any] = {"repeats": repeats, "end_reveals_cohorts": revealed, "repeated": facts.repeated}
    if facts.max_participations is None:
        found = Participation.planned(plan.clients, distinct, facts.repeated)
        most = found.max_participations + repeats - len(facts.repeated)
        return replace(found, releases=distinct + repeats, max_participations=most, **again)
    cut = facts.charged < plan.rounds or bool(facts.early)  # by somebody who has seen its models: all that was planned
    least = Participation.planned(plan.clients, plan.rounds) if cut else Participation(0, 0)
    most = max(facts.max_participations, least.max_participations)
    each = tuple(max(count, least.max_participations) for count in facts.per_client)
    return Participation(distinct + repeats, most, each, sampled_rounds=least.sampled_rounds, **again)


def run_cost(plan: Plan, facts: Facts) -> Cost:
    """Return the cost of a run, including the private selection if the run is the best of several trials.

    If all rows of a user are one record, clipped together, the cost of one record is the cost of one user.
    """
    cost = cost_of_best(plan.cost(participation(plan, facts)), facts.selection)
    return replace(cost, unit="user") if facts.user_rows or (facts.loop is not None and facts.loop.users) else cost


def check_counts(plan: Plan, facts: Facts, counts: Participation, cost: Cost) -> None:
    """Refuse a certificate whose numbers of charged rounds, accounted rounds and events contradict each other."""
    disagree = "the counts of this run do not agree (fix: restore the unchanged folder of the run):"
    fewest = facts.released if facts.stopped else max(plan.rounds, facts.released)
    largest = max(plan.rounds + facts.repeats, facts.released)
    if not fewest <= counts.releases <= largest or not 0 <= facts.replayed <= facts.charged:
        after = f"{facts.charged} rounds charged, {facts.replayed} of them replayed, {plan.rounds} planned"
        raise CertificateError("counts", f"{disagree} {counts.releases} rounds are accounted after {after}")
    if plan.release.correlated or facts.selection is not None:  # one event stands for the whole run, or for all trials
        return
    least, most = _releases_of_one_unit(plan, facts, counts)
    kinds = len(plan.release.events(counts.rounds))  # events of rounds in a line: one, unless the noise is scheduled
    for who in ADVERSARIES:
        # a line has the releases of rounds first, then those of sampled rounds, then preparations
        found = max(
            sum(count for k, (event, count) in enumerate(line.entries) if k < kinds or event.seen_sampling is not None)
            for line in cost.of(who)
        )
        if not least <= found <= most:
            wanted = f"and not {least if least == most else f'{least} to {most}'} as accounted"
            what = f"the line {who!r} counts {found} releases of one {cost.unit}, {wanted}"
            raise CertificateError("counts", f"{disagree} {what}")


def _releases_of_one_unit(plan: Plan, facts: Facts, counts: Participation) -> tuple[int, int]:
    spent = plan.local.bound()
    each = spent.count if isinstance(spent, AlreadyPrivate) else 1
    reads = plan.local.reads
    disjoint = reads is not None and reads.disjoint
    everyone = plan.clients.max_participations(counts.releases) == counts.releases and not disjoint
    # silos may have refused rounds that are accounted
    asked = counts.releases if facts.max_participations is None else facts.max_participations
    # a run that was cut: what was drawn, beside the sampling of a whole run
    drawn = counts.max_participations if counts.sampled_rounds else 0
    return (asked if everyone else 0) * each, (counts.releases + drawn) * each


# ---- earlier runs ----------------------------------------------------------------------------------------------------


def _epsilon(kind: tuple[Item, ...], relation: Relation, delta: float) -> float:
    counts: Counter[Event] = Counter()
    for item in kind:
        counts[item.event] += item.count
    entries = tuple(sorted(counts.items(), key=repr))
    return accountant.epsilon(entries, relation, delta).value if entries else 0.0


@dataclass(frozen=True)
class Together:
    """Earlier runs of a run, those of them that compose with it, and the composed epsilon."""

    runs: tuple[EarlierRun, ...]
    composed: tuple[EarlierRun, ...]
    epsilon: float | None  # None: nothing could be composed; inf: nothing is guaranteed
    delta: float
    relation: Relation
    unit: Protected

    @classmethod
    def of(cls, cost: Cost, delta: float, runs: tuple[EarlierRun, ...]) -> Together:
        """Compose this run's cost with that of earlier runs; the largest epsilon over kinds of silos counts."""
        own = EarlierRun.of_cost(cost, delta, "", "")
        alike = tuple(run for run in runs if (run.unit, run.relation) == (own.unit, own.relation))
        count = math.prod(len(run.kinds) for run in (own, *alike))
        if not alike or count > MOST_KINDS:
            return cls(runs, (), None, delta, own.relation, own.unit)
        every = [sum(choice, ()) for choice in product(*(run.kinds for run in (own, *alike)))]
        worst = max(_epsilon(kind, own.relation, delta) for kind in every)
        return cls(runs, alike, worst, delta, own.relation, own.unit)

    def to_entry(self) -> dict[str, Any] | None:
        """Return the certificate's entry on earlier runs; None if there are none."""
        if not self.runs:
            return None
        composed = None if self.epsilon is None else upward(self.epsilon)
        total = {"unit": self.unit, "relation": self.relation, "epsilon": composed, "delta": self.delta}
        names = [run.run for run in self.composed]
        copied = ("run", "unit", "relation", "epsilon", "delta", "known_from", "same_data")
        runs = [{name: getattr(run, name) for name in copied} | {"epsilon": upward(run.epsilon)} for run in self.runs]
        return {"runs": runs, "together": {**total, "with": names} if names else None}

    def in_words(self) -> list[str]:
        """Return sentences on earlier runs, for the certificate's entry not_covered."""
        said = []
        for run in self.runs:
            spent = upward(run.epsilon)
            cost = "nothing is guaranteed" if spent is None else f"epsilon {upto(spent)} at delta {upto(run.delta)}"
            where = "on the same data" if run.same_data else "on data that are not known to be the same"
            other = "; its unit or relation is another, so the two are not added: both hold"
            said.append(
                f"the first weights come from the run {run.run} {where} ({cost}, one {run.unit}, {run.relation}; known "
                f"from {run.known_from}), which is not in this cost{'' if run in self.composed else other}"
            )
        if self.epsilon is not None:
            spent = upward(self.epsilon)
            cost = "has no guarantee" if spent is None else f"has epsilon {upto(spent)} at delta {upto(self.delta)}"
            one = len(self.composed) == 1
            others = f"run {self.composed[0].run}" if one else f"{len(self.composed)} earlier runs"
            same = all(run.same_data for run in self.composed)
            who = f"every {self.unit}" if same else f"a {self.unit} that is in all"
            said.append(f"together with the {others}, {who} {cost}, {self.relation}")
        return said
