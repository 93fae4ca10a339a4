"""Facts of a run that its certificate needs beside the plan, the cost that follows, and the check that counts agree.

    rounds accounted >= max(rounds charged - rounds replayed, charges by any silo's receipts), and at least the planned
                        ones, unless a budget ended the run; more only by rounds that were run again
    count(line)      <= rounds accounted * releases a round makes of one unit; with rounds that were drawn before a run
                        was cut beside them
    count(line)       = that, where the unit is in every round that is accounted

A line counts the rounds of one unit (client, or record): fewer than are accounted where it cannot have been in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from sordino import codec
from sordino.accounting.bounds import AlreadyPrivate
from sordino.accounting.composition import ADVERSARIES, Cost, Line, Participation, Selection, cost_of_best
from sordino.certificate.earlier_runs import EarlierRun
from sordino.errors import CertificateError
from sordino.graph import GRADES, Grade
from sordino.ledger.totals import Standing
from sordino.rng import Mode

if TYPE_CHECKING:
    from sordino.plan import Plan


WEIGHTS = "initial weights"  # `Declared.what` of a model's weights that were read from a file
FROZEN = "frozen weights"  # the same of parameters that are not trained, as the base under adapters
VALUES = "ranges, categories and constants of columns"  # and of what a table's columns are encoded by
CLASSES = "number of classes"  # and of a number that was read off the labels


@dataclass(frozen=True)
class Declared:
    """Rows, or initial weights, that somebody declares public: nothing protects them."""

    rows: int
    what: str
    by: str
    sha256: str = ""  # of the file, where it is one

    def as_dict(self) -> dict[str, Any]:
        """As plain data; no hash where there is none."""
        return {name: value for name, value in asdict(self).items() if name != "sha256" or value}


@dataclass(frozen=True)
class Loop:
    """Facts of a private PyTorch loop: how its loss was checked, and its records kept apart."""

    reduction: Literal["mean", "sum"]
    check: str
    kept_apart: str
    looks: int  # passes in which a record alone was compared with the record in company


@dataclass(frozen=True)
class OwnCode:
    """Grade of the code that ran on private records, model and loss (`sordino.graph`), and why."""

    grade: Grade
    why: str

    @property
    def header(self) -> dict[str, str | int]:
        """As a line of engine.jsonl says it."""
        return {"own_code": self.grade, "own_code_why": self.why}

    @classmethod
    def of_headers(cls, lines: Iterable[Mapping[str, Any]]) -> OwnCode | None:
        """The weakest grade of all that computed rounds of a run; None where none says any."""
        found = [cls(line["own_code"], str(line["own_code_why"])) for line in lines if line.get("own_code") in GRADES]
        return max(found, key=lambda own: GRADES.index(own.grade), default=None)


@dataclass(frozen=True)
class Facts:
    """Facts of a run beside its plan: all of them public, or seen by the adversary anyway."""

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
    receipts: tuple[int, ...] = ()  # charges of every silo, by its own word, where clients are elsewhere
    replayed: int = 0  # charges that every silo answered with the message it had sent before: no new release
    selection: Selection | None = None  # of many runs, this is the best
    ledger: Standing | None = None  # what the data set has spent in all, where a ledger was charged
    environment: tuple[dict[str, str], ...] = ()  # every set of versions that computed some of it
    utility: dict[str, float] | None = None  # the last figures on public rows
    prepared: int = 0  # how often the plan's preparations were charged
    early: str = ""  # what stopped it early, by public figures: all planned rounds are accounted
    given: dict[str, Any] | None = None  # of a task made in Python: by what its module is known again
    earlier: tuple[EarlierRun, ...] = ()  # runs that the first weights come from
    in_memory: bool = False  # no charge was on disk before its noise was drawn
    own_code: OwnCode | None = None  # of model and loss; None: not examined, as where no round has run

    @property
    def released(self) -> int:
        """Releases of new noise: the charges but those replayed, or as many as a silo says that it was charged for."""
        return max(self.charged - self.replayed, *self.receipts, 0)


def participation(plan: Plan, facts: Facts) -> Participation:
    """Rounds accounted: all that were planned, or more if some were run again; never fewer (stopping looks at data).

    Only a budget that refused the next cohort accounts for what was charged: budgets and cohorts are seen by this
    adversary or public, so where the run ended depends on no data. A run that was killed and run again is accounted as
    planned, and for the rounds that were run again beside. The best of many trials is accounted as planned too: who
    was in the others, which had the same cost, nobody sees.
    """
    least, prepared = 0 if facts.max_participations is None else facts.max_participations, max(1, facts.prepared)
    if facts.selection is None:
        return replace(_rounds(plan, facts), prepared=prepared)
    found = _rounds(plan, replace(facts, max_participations=None, per_client=()))
    return replace(
        found,
        max_participations=found.max_participations if found.sampled_rounds else max(found.max_participations, least),
        prepared=prepared,
    )


def _rounds(plan: Plan, facts: Facts) -> Participation:
    told = facts.filtered and plan.clients.random
    if facts.stopped and not facts.repeats and facts.charged:
        if facts.max_participations is None:
            return replace(Participation.planned(plan.clients, facts.released), end_reveals_cohorts=told)
        return Participation(facts.released, facts.max_participations, facts.per_client, 0, told)
    known = max(facts.repeats, len(facts.repeated))
    distinct = max(plan.rounds, facts.released - known) if facts.loop is not None else plan.rounds
    repeats = max(known, facts.released - distinct)  # a run has no more rounds than planned: what is more ran again
    again: dict[str, Any] = {"repeats": repeats, "end_reveals_cohorts": told, "repeated": facts.repeated}
    if facts.max_participations is not None:
        cut = facts.charged < plan.rounds or bool(facts.early)  # by whoever has seen its models: all that was planned
        least = Participation.planned(plan.clients, plan.rounds) if cut else Participation(0, 0)
        each = tuple(max(count, least.max_participations) for count in facts.per_client)
        return Participation(
            distinct + repeats,
            max(facts.max_participations, least.max_participations),
            each,
            sampled_rounds=least.sampled_rounds,
            **again,
        )
    found = Participation.planned(plan.clients, distinct, facts.repeated)
    return replace(
        found,
        releases=distinct + repeats,
        max_participations=found.max_participations + repeats - len(facts.repeated),
        **again,
    )


def run_cost(plan: Plan, facts: Facts) -> Cost:
    """The cost of a run: of its rounds, and of the trials that it is the best of."""
    return cost_of_best(plan.cost(participation(plan, facts)), facts.selection)


def check_counts(plan: Plan, facts: Facts, counts: Participation, cost: Cost) -> None:
    """Refuse a certificate whose counts of rounds charged and accounted, and of events, cannot all be true."""
    fewest = facts.released if facts.stopped else max(plan.rounds, facts.released)
    largest = max(plan.rounds + facts.repeats, facts.released)
    if not fewest <= counts.releases <= largest or not 0 <= facts.replayed <= facts.charged:
        after = f"{facts.charged} rounds charged, {facts.replayed} of them replayed, {plan.rounds} planned"
        raise _disagree(f"{counts.releases} rounds are accounted after {after}")
    if plan.release.correlated or facts.selection is not None:  # one event stands for the whole run, or for all trials
        return
    least, most = _wanted(plan, facts, counts)
    for who in ADVERSARIES:
        found = max(_releases_of(line) for line in cost.of(who))
        if not least <= found <= most:
            wanted = f"where {least if least == most else f'{least} to {most}'} are accounted"
            raise _disagree(f"the line {who!r} counts {found} releases of one {cost.unit}, {wanted}")


def _releases_of(line: Line) -> int:
    """How many releases of rounds a line counts: its first entry, and rounds by coins; then come preparations."""
    first, others = line.entries[:1], line.entries[1:]
    by_coins = ((event, count) for event, count in others if event.seen_sampling is not None)
    return sum(count for _, count in (*first, *by_coins))


def _wanted(plan: Plan, facts: Facts, counts: Participation) -> tuple[int, int]:
    """The fewest and the most releases that a line may count for the unit that it counts most of."""
    spent = plan.local.bound()
    each = spent.count if isinstance(spent, AlreadyPrivate) else 1
    reads = plan.local.reads
    disjoint = reads is not None and reads.disjoint
    everyone = plan.clients.max_participations(counts.releases) == counts.releases and not disjoint
    # silos may have refused rounds that are accounted
    asked = counts.releases if facts.max_participations is None else facts.max_participations
    # a run that was cut: what was drawn, beside the coins of a whole run
    drawn = counts.max_participations if counts.sampled_rounds else 0
    return (asked if everyone else 0) * each, (counts.releases + drawn) * each


def _disagree(what: str) -> CertificateError:
    return CertificateError("counts", f"the counts of this run do not agree: {what}")
