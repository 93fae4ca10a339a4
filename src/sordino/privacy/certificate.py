"""The certificate: a pure function of the plan, the charges and the model. `certify` computes it again and compares."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from sordino import codec
from sordino.errors import ConfigError
from sordino.parts.events import GaussianNoise
from sordino.privacy import accounting
from sordino.privacy.bill import ADVERSARIES, Adversary, Bill, Line, Participation, curated
from sordino.privacy.selection import Selection, selected
from sordino.privacy.spending import Standing
from sordino.privacy.statement import statement
from sordino.privacy.summary import summary, upward
from sordino.rng import Mode
from sordino.version import __version__

if TYPE_CHECKING:
    from sordino.parts.preparation import Preparation
    from sordino.plan import Plan

WEIGHTS = "initial weights"  # `Declared.what` of a model's weights that were read from a file
FROZEN = "frozen weights"  # the same of parameters that are not trained, as the base under adapters
VALUES = "ranges, categories and constants of columns"  # and of what a table's columns are encoded by
CLASSES = "number of classes"  # and of a number that was read off the labels
FORMAT = 2  # of the certificate: privacy/certificate.schema.json
WHO: dict[Adversary, str] = {
    "models": "sees every released model and nothing else",
    "cohort": "sees every released model and who took part in which round",
    "messages": "sees every message as it leaves a client",
}


@dataclass(frozen=True)
class Declared:
    """Rows, or weights to begin with, that nobody protects, because somebody has said that they are public."""

    rows: int
    what: str
    by: str
    sha256: str = ""  # of the file, where it is one

    def written(self) -> dict[str, Any]:
        """As plain data; no hash where there is none."""
        return {name: value for name, value in asdict(self).items() if name != "sha256" or value}


@dataclass(frozen=True)
class Loop:
    """What a loop of the user's own saw of itself: how the loss was checked, and the records kept apart."""

    reduction: Literal["mean", "sum"]
    check: str
    kept_apart: str
    looks: int  # passes in which a record alone was compared with the record in company


FOLLOWS = "the server follows the protocol of the secure sum: it hands on the silos' public keys as they are"

BEGAN = (
    "the module was given in Python: the weights that it began with, and what they may have been trained on, are public"
)
IN_MEMORY = "the rounds were counted in memory by the process that ran them: nothing shows that there were no others"


@dataclass(frozen=True)
class Facts:
    """What a run adds to its plan: everything here is seen by the adversary anyway, or public."""

    delta: float
    noise: Mode
    charged: int  # releases written down before their noise was drawn
    most: int | None = None  # most rounds of one client, where the cohort is seen by design
    model: str = ""  # sha256 of model.safetensors
    config: str = ""  # sha256 of the whole configuration, where there is a file
    each: tuple[int, ...] = ()  # rounds of every client, where each is billed for its own
    repeats: int = 0  # rounds that were charged again after a kill
    deltas: tuple[float, ...] = ()  # a delta of its own for every silo
    public: tuple[Declared, ...] = ()  # rows that were evaluated on, or trained on by the server
    names: tuple[str, ...] = ()  # of the silos, where they have any
    filtered: bool = False  # a budget decides when the run ends, so its end tells of the cohorts
    stopped: bool = False  # it ended because a budget refused the next cohort, and for no other reason
    foreign: tuple[codec.Foreign, ...] = ()  # what is not Sordino's own: model, data set, partition
    loop: Loop | None = None  # of a private PyTorch loop
    receipts: tuple[int, ...] = ()  # charges of every silo, by its own word, where clients are elsewhere
    selection: Selection | None = None  # of many runs, this is the best
    ledger: Standing | None = None  # what the data set has spent in all, where a ledger was charged
    environment: tuple[dict[str, str], ...] = ()  # every set of versions that computed some of it
    utility: dict[str, float] | None = None  # the last figures on public rows
    prepared: int = 0  # how often the plan's preparations were charged
    early: str = ""  # what stopped it early, by public figures: all planned rounds are billed
    given: dict[str, Any] | None = None  # of a task made in Python: by what its module is known again
    in_memory: bool = False  # no charge was on disk before its noise was drawn


def default_delta(population: int) -> float:
    """population^-1.1, the largest delta that we let pass without an override."""
    return float(population**-1.1) if population > 1 else 1e-5


def check_delta(delta: float, population: int, override: bool) -> None:
    """delta must be a probability, and small against 1 / population (PRIVACY rule 10); of records, that of a silo."""
    if not 0 <= delta < 1:
        raise ConfigError(f"delta = {delta}", "a number in [0, 1)", f"use {default_delta(population):.3g}")
    if delta > default_delta(population) * (1 + 1e-9) and not override:
        limit = f"at most population^-1.1 = {default_delta(population):.3g}"
        raise ConfigError(f"delta = {delta}", limit, "lower it, or set allow_large_delta = true under [privacy]")


def silo_deltas(plan: Plan) -> tuple[float, ...]:
    """size^-1.1 of every silo, where records are the unit and silos differ in size; else nothing."""
    reads = plan.local.reads
    return () if reads is None or len(set(reads.sizes)) < 2 else tuple(default_delta(size) for size in reads.sizes)


def check_deltas(plan: Plan, delta: float, deltas: tuple[float, ...], override: bool) -> None:
    """`check_delta` for all: each silo's against the number of its own records."""
    if not deltas:
        return check_delta(delta, plan.units, override)
    if len(deltas) != plan.clients.population:
        raise ConfigError(f"{len(deltas)} deltas for {plan.clients.population} silos", "one per silo, in their order")
    for silo, own in enumerate(deltas):
        check_delta(own, plan.units if plan.local.reads is None else plan.local.reads.size(silo), override)


def participation(plan: Plan, facts: Facts) -> Participation:
    """Rounds billed: all that were planned, or more if some were run again; never fewer (stopping looks at data).

    Only a budget that refused the next cohort bills what was charged: budgets and cohorts are seen by this adversary
    or public, so where the run ended depends on no data. A run that was killed and run again is billed as planned.
    The best of many tries is billed as planned too: who was in the others, which had the same bill, nobody sees.
    """
    least, prepared = 0 if facts.most is None else facts.most, max(1, facts.prepared)
    if facts.selection is None:
        return replace(_rounds(plan, facts), prepared=prepared)
    found = _rounds(plan, replace(facts, most=None, each=()))
    return replace(found, most=max(found.most, least), prepared=prepared)


def _rounds(plan: Plan, facts: Facts) -> Participation:
    told = facts.filtered and plan.clients.random
    if facts.stopped and not facts.repeats and facts.charged:
        most = plan.clients.most(facts.charged) if facts.most is None else facts.most
        return Participation(facts.charged, most, facts.each, 0, told)
    releases = max(plan.rounds, facts.charged)
    if facts.most is not None:
        cut = facts.charged < plan.rounds or bool(
            facts.early
        )  # whoever stops a run has seen its models: bill what was planned
        least = plan.clients.most(plan.rounds) if cut else 0
        each = tuple(max(count, least) for count in facts.each)
        return Participation(releases, max(facts.most, least), each, facts.repeats, told)
    if plan.clients.random:
        return Participation(releases, plan.clients.most(releases), (), facts.repeats, told)
    again = max(releases - plan.rounds, facts.repeats)  # a public cohort that ran again is the same people
    return Participation(releases, min(releases, plan.clients.most(plan.rounds) + again), (), facts.repeats)


def billed(plan: Plan, facts: Facts) -> Bill:
    """The bill of a run: of its rounds, and of the tries that it is the best of."""
    return selected(plan.bill(participation(plan, facts)), facts.selection)


def certificate(plan: Plan, facts: Facts) -> dict[str, Any]:
    """The certificate of a run."""
    counts, bill = participation(plan, facts), billed(plan, facts)
    lines = {who: {**headline(bill.of(who), facts.delta, facts.deltas), **summary(bill.of(who))} for who in ADVERSARIES}
    main, others = lines["models"], sorted({*codec.foreign(plan), *facts.foreign})
    return {
        "format": FORMAT,
        "epsilon": main["epsilon"],
        "delta": main["delta"],
        "unit": bill.unit,
        "relation": main["relation"],
        "adversaries": [{"adversary": who, "description": WHO[who], **line} for who, line in lines.items()],
        "accountant": {"library": accounting.VERSION, "first": "PLD (pessimistic) or GDP closed form", "second": "RDP"},
        "sampler": codec.dump(plan.clients),
        "records": None if plan.local.reads is None else codec.dump(plan.local.reads),
        "trust": {"release": plan.release.kind, "sees": sorted(plan.release.sees), "needs": sorted(plan.release.needs)},
        "clip": _clip(plan),
        "denominator": denominator(plan),
        "mask": "none" if plan.mask is None else f"public: {plan.mask.source.kind}, keep {plan.mask.keep:g}",
        **_around(plan),
        "server": codec.dump(plan.server),
        "noise": {"mode": facts.noise, "note": _noise_note(facts.noise)},
        "statement": statement(plan, facts, counts, main["relation"], facts.selection is not None),
        "counts": _counts(plan, facts, counts),
        "silos": list(facts.names),
        "declared_public": [one.written() for one in facts.public],
        "assumptions": [
            *assumptions(plan, bill, counts, facts.public),
            *(_loop_assumptions(facts.loop, plan.release.joint) if facts.loop is not None else ()),
            *(("what a silo says that it was charged is what stands in its own ledger",) if facts.receipts else ()),
            *((FOLLOWS,) if facts.receipts and "secure_sum" in plan.needs else ()),
            *(*(trusted(part) for part in others), *_given_assumptions(facts)),
            *(facts.selection.assumed if facts.selection is not None else ()),
            *(_ledger_assumptions(facts.ledger) if facts.ledger is not None else ()),
        ],
        "foreign_parts": [codec.dump(part) for part in others],
        "not_covered": not_covered(facts.ledger, facts.selection),
        "plan_sha256": plan.hash,
        "config_sha256": facts.config,
        "model_sha256": facts.model,
        "sordino": __version__,
        "environment": [dict(ran) for ran in facts.environment],
        **{name: None if told is None else dict(told) for name, told in _told(facts)},
        "loop": None if facts.loop is None else _loop(plan, facts, facts.loop),
        "ledger": None if facts.ledger is None else ledger_entry(facts.ledger),
        "run": None,  # what a folder binds
    }


def _around(plan: Plan) -> dict[str, Any]:
    """What is done with a release, and what was released before the first round."""
    after = [codec.dump(step) for step in plan.postprocess]
    return {"postprocess": after, "prepared": [_preparation(plan, part) for part in plan.prepare]}


def _preparation(plan: Plan, part: Preparation) -> dict[str, Any]:
    """A release before the first round: what it was, with which noise, and whose hands add it."""
    noise = part.noise(plan.forecast.lines[0].relation)
    who = "whoever sums the messages" if curated(plan.unit, plan.release) else "each client, or silo, on its own"
    return {"release": codec.dump(part), "noise": codec.dump(noise), "noised_by": who}


def _told(facts: Facts) -> tuple[tuple[str, dict[str, Any] | None], ...]:
    return ("given", facts.given), ("utility", facts.utility)


def _loop(plan: Plan, facts: Facts, loop: Loop) -> dict[str, Any]:
    """What only a loop has: epsilon of the steps taken, which holds if nobody stopped by what they saw of the data."""
    taken = plan.bill(Participation(facts.charged, facts.charged)).line("models")
    return {
        "epsilon_so_far": line_entry(taken, facts.delta)["epsilon"] if facts.charged else 0.0,
        "loss": {"reduction": loop.reduction, "check": loop.check},
        "kept_apart": {"how": loop.kept_apart, "looks": loop.looks},
    }


def headline(lines: tuple[Line, ...], delta: float, deltas: tuple[float, ...] = ()) -> dict[str, Any]:
    """What one adversary's lines promise to everybody: the worst epsilon and the largest delta; each silo's beside.

    A neighbour changes one silo's data, so silos compose in parallel: the worst of them counts, not their sum.
    """
    if len(lines) == 1 and not deltas:
        return line_entry(lines[0], delta)
    found = [_silo_entry(line, own, silos) for line in lines for own, silos in _by_delta(line, delta, deltas).items()]
    worst = max(found, key=lambda entry: math.inf if entry["epsilon"] is None else entry["epsilon"])
    kept = {key: value for key, value in worst.items() if key != "silos"}
    return {**kept, "delta": max(entry["delta"] for entry in found), "silos": found}


def _by_delta(line: Line, delta: float, deltas: tuple[float, ...]) -> dict[float, list[int]]:
    """The silos of a line, by the delta that is theirs."""
    if not deltas:
        return {delta: list(line.silos)}
    sorted_out: dict[float, list[int]] = {}
    for silo in line.silos or range(len(deltas)):
        sorted_out.setdefault(deltas[silo], []).append(silo)
    return sorted_out


def _silo_entry(line: Line, delta: float, silos: list[int]) -> dict[str, Any]:
    return {"silos": silos, **line_entry(line, delta)}


@lru_cache(maxsize=256)
def _proved(line: Line, delta: float) -> accounting.Epsilon:
    return accounting.epsilon(line.entries, line.relation, delta)


def line_entry(line: Line, delta: float) -> dict[str, Any]:
    """One adversary's line, with what was proved of it."""
    spent = _proved(replace(line, adversary="models", silos=()), delta)
    return {
        "relation": line.relation,
        "epsilon": upward(spent.value),
        "delta": delta,
        "epsilon_rdp": None if spent.rdp is None else upward(spent.rdp),
        "method": spent.method,
        "grid": spent.grid,
        "events": [{"count": count, "event": codec.dump(event)} for event, count in line.entries],
    }


def denominator(plan: Plan) -> float | str:
    """What the sum is divided by: a constant of the plan, or in words what it follows."""
    fixed = plan.release.denominator(plan.clients.expected, 1) == plan.clients.expected
    return plan.clients.expected if fixed else "the number of messages received, which this adversary sees anyway"


def _clip(plan: Plan) -> dict[str, Any]:
    if plan.local.reads is not None:
        local = codec.dump(plan.local)
        scope = "one norm over the gradient of each single record"
        return {"scope": scope, "radius": local["radius"], "norm": local.get("norm", 2)}
    if plan.clip is None or not plan.clip.finite:
        return {"scope": "none", "radius": None, "norm": None}
    radius = codec.dump(plan.clip)["radius"]
    return {"scope": "one norm over the whole message of a client", "radius": radius, "norm": plan.clip.norm}


def _noise_note(mode: Mode) -> str:
    if mode == "simulation":
        return "fast repeatable generator: for experiments, not for release"
    return "AES counter generator keyed by the operating system, double precision, sum rounded to a public grid"


def _counts(plan: Plan, facts: Facts, counts: Participation) -> dict[str, Any]:
    seen: dict[str, Any] = {} if facts.most is None else {"most_rounds_of_a_client": facts.most}
    if facts.each:
        seen["rounds_of_each_silo"] = list(facts.each)
    if facts.receipts:
        seen["charged_by_each_silo"] = list(facts.receipts)
    if plan.local.reads is not None and plan.local.reads.disjoint:
        seen["rounds_charged_again"] = facts.repeats
    if facts.stopped:
        seen["stopped_by"] = "a budget that the next round would have overspent"
    elif facts.early:
        seen["stopped_by"] = facts.early
    return {"rounds_planned": plan.rounds, "rounds_charged": facts.charged, "rounds_billed": counts.releases, **seen}


def assumptions(plan: Plan, bill: Bill, counts: Participation, public: tuple[Declared, ...] = ()) -> list[str]:
    """What must hold outside this program for the numbers to be true."""
    if plan.local.reads is not None:
        return _record_assumptions(plan, public)
    said = [
        f"one {bill.unit} is one entry of the population; whoever holds two counts twice",
        f"the population and the plan are public, and {declared(public)}",
    ]
    if plan.clients.random:
        said.append("the coins that choose a cohort stay secret from the adversary of the first line")
        said.append(f"to one who sees the cohort, a client was in at most {counts.most} rounds; more cost more")
    if "messages" not in plan.release.sees:
        said.append("whoever sums the messages does it as planned and shows nothing else")
    if plan.release.joint:
        said.append(SHARED)
    return [*said, *(f"the engine provides {need}" for need in sorted(plan.release.needs))]


SHARED = "what the noise remembers of earlier rounds (the secret part of checkpoints) was shown to nobody"


def trusted(part: codec.Foreign) -> str:
    """What a part that is not Sordino's own asks a reader to believe."""
    whose = f"{part.package} {part.version}" if part.version else f"{part.package}, which has no version,"
    return f"everything rests on what {whose} states for its part `{part.kind}` ({part.family})"


def priced(plan: Plan, delta: float, deltas: tuple[float, ...] = ()) -> None:
    """Refuse a plan that accounting cannot price, before anything of it runs; the work is kept for the certificate."""
    for who in ADVERSARIES:
        headline(plan.forecast.of(who), delta, deltas)


def declared(public: tuple[Declared, ...]) -> str:
    """Which rows are protected by nothing, and by whose word."""
    if not public:
        return "no row of the data is"
    said = " and ".join(f"{one.rows} {one.what} (declared by {one.by})" for one in public)
    learnt, known = (WEIGHTS, FROZEN), (VALUES, CLASSES)
    rows = ["these rows"] if any(one.what not in (*learnt, *known) for one in public) else []
    values = ["these values"] if any(one.what in known for one in public) else []
    weights = ["what the weights were trained on"] if any(one.what in learnt for one in public) else []
    who = [*rows, *values, *weights]
    return f"so are {said}: {' and '.join(who)} {'is' if who == weights else 'are'} not protected"


def _record_assumptions(plan: Plan, public: tuple[Declared, ...]) -> list[str]:
    reads = plan.local.reads
    said = [
        "one record is one row of one silo; a person with several rows, or rows in several silos, counts several times",
        f"the silos, the number of records of each and the plan are public, and {declared(public)}",
    ]
    if reads is not None and reads.relation == "add_remove":
        said.append("rates are those of the declared sizes, whatever the silo holds")
    if reads is not None and not reads.disjoint and reads.amplify(GaussianNoise(1.0), 0) != GaussianNoise(1.0):
        said.append("the coins that choose a silo's records stay inside the silo")
    if "messages" not in plan.release.sees:
        said.append("whoever sums the messages does it as planned and shows nothing else")
    if plan.release.joint:
        said.append(SHARED)
    return [*said, *(f"the engine provides {need}" for need in sorted(plan.release.needs))]


def _loop_assumptions(loop: Loop, joint: bool) -> list[str]:
    """What a loop that its user wrote, and that keeps no chain of charges, asks for besides."""
    lost = "steps after a checkpoint that was gone back to were seen by nobody: their noise would be drawn twice"
    return [
        *((lost,) if joint else ()),
        "the data set gives every record by itself, and the loop trains on the batches as the loader gives them",
        f"the loss is the {loop.reduction} over the records of a batch, each with a term of its own",
        "the steps were counted by the process that took them: no chain of charges shows that there were no others",
        "no checkpoint was continued in two places; if one was, every copy has to be billed",
        "epsilon_so_far holds only if the run did not stop for a reason that it read off the data",
        "losses and accuracies on the training records, where the loop shows them, are not published",
    ]


def _given_assumptions(facts: Facts) -> list[str]:
    """What a task made in Python, and a run that was kept in memory, ask for besides."""
    return [*([BEGAN] if facts.given is not None else []), *([IN_MEMORY] if facts.in_memory else [])]


def not_covered(ledger: Standing | None = None, selection: Selection | None = None) -> list[str]:
    """What the certificate does not speak of."""
    others = "other releases of the same data: a budget is the sum over all of them"
    unbilled = "tuning is not accounted" if selection is None else "only the tries that this run is the best of are"
    return [
        f"choosing settings by earlier runs on the same data: {unbilled}",
        "diagnostics of a simulation (update norms, clipped fraction, train metrics): they are not private",
        others if ledger is None else "releases of the same data that were not charged to the ledger",
    ]


def ledger_entry(found: Standing) -> dict[str, Any]:
    """What a data set has spent over all runs, with the events that say so."""
    return {
        "dataset": found.dataset,
        "unit": found.limit.unit,
        "relation": found.limit.relation,
        "epsilon": upward(found.epsilon),
        "delta": found.limit.delta,
        "limit": found.limit.epsilon,
        "runs": found.runs,
        "lines": found.lines,
        "sha256": found.digest,
        "events": [codec.dump(item) for item in found.items],
    }


def _ledger_assumptions(found: Standing) -> list[str]:
    """What a sum over all runs rests on."""
    said = [f"every release of these data was charged to the ledger, as {found.dataset!r}"]
    if all(isinstance(item.event, GaussianNoise) for item in found.items):
        return said
    return [*said, "the settings of the runs on the ledger were not chosen by what earlier ones of them had released"]
