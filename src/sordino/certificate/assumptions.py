"""Assumptions of a certificate: what must hold outside this program, and what the numbers do not cover.

`statement` answers the questions of NIST SP 800-226: who is protected (the data subject), who holds the data and adds
the noise (the data curator), who receives the result (the data consumer) and who of them is trusted; the unit of
privacy and the neighbours; how many releases the numbers cover; whether choosing settings was charged; and what the
mathematics does not cover: side channels, rows that are not protected, other releases.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sordino import codec
from sordino.accounting.composition import Adversary, Cost, Participation, Selection
from sordino.accounting.events import GaussianNoise
from sordino.accounting.profiles import protects
from sordino.certificate.facts import CLASSES, FROZEN, VALUES, WEIGHTS, Declared, Facts
from sordino.ledger.totals import Statement

if TYPE_CHECKING:
    from sordino.plan import Plan

RECEIPTS = "what a silo says that it was charged is what stands in its own ledger"
FOLLOWS = (
    "the server follows the protocol of the secure sum: it tells all silos the same list of those that have sent, and "
    "hands on their public keys as they are where [federation] does not pin the keys that sign them"
)
BEGAN = (
    "the module was given in Python: the weights that it began with, and what they may have been trained on, are public"
)
BEGAN_FROM = (
    "the module was given in Python: what the weights that it began with were trained on is public, but for the data "
    "of the runs under `earlier`"
)
IN_MEMORY = "the rounds were counted in memory by the process that ran them: nothing shows that there were no others"
SHARED = "what the noise remembers of earlier rounds (the secret part of checkpoints) was shown to nobody"


def assumptions_of_run(
    plan: Plan, facts: Facts, cost: Cost, counts: Participation, others: Iterable[codec.Foreign]
) -> list[str]:
    """List all assumptions of a certificate; `others` are the parts from other packages."""
    secure_sum = facts.receipts and "secure_sum" in plan.needs
    return [
        *_plan_assumptions(plan, cost, counts, facts),
        *_loop_assumptions(plan, facts),
        *((RECEIPTS,) if facts.receipts else ()),
        *((FOLLOWS,) if secure_sum else ()),
        *(_trusted(part) for part in others),
        *([BEGAN_FROM if facts.earlier else BEGAN] if facts.given is not None else []),
        *([IN_MEMORY] if facts.in_memory else []),
        *(facts.selection.assumed if facts.selection is not None else ()),
        *_ledger_assumptions(facts.ledger),
    ]


def _plan_assumptions(plan: Plan, cost: Cost, counts: Participation, facts: Facts) -> list[str]:
    """List the assumptions that follow from the plan and its cost."""
    release, reads = plan.release, plan.local.reads
    shared = [SHARED] if release.correlated else []
    provided = [f"the engine provides {need}" for need in sorted(release.needs)]
    if reads is not None:
        words = SILO if facts.loop is None else LOOP  # a loop has one data set, and no silo
        said = [words["row"], f"{words['public']} {_declared(facts.public)}"]
        if reads.relation == "add_remove":
            said.append(words["rates"])
        if not reads.disjoint and reads.amplify(GaussianNoise(1.0), 0) != GaussianNoise(1.0):
            said.append(words["draws"])
        if "messages" not in release.sees:
            said.append(words["sum"])
        averaged = counts.sampled_rounds and {"cohort", "messages"} & release.sees
        return [*said, *shared, *provided, *([AVERAGED] if averaged else [])]
    said = [
        f"one {cost.unit} is one entry of the population; whoever holds two counts twice",
        f"the population and the plan are public, and {_declared(facts.public)}",
    ]
    if plan.clients.random:
        seen = {(line.relation, line.entries, line.silos) for line in cost.of("cohort")}
        if any((line.relation, line.entries, line.silos) not in seen for line in cost.of("models")):
            said.append("the random draws of the cohorts stay secret from the adversary of the first line")
        in_at_most = f"a client was in at most {counts.max_participations} rounds; more cost more"
        said.append(AVERAGED if counts.sampled_rounds else f"to one who sees the cohort, {in_at_most}")
    if "messages" not in release.sees:
        said.append("whoever sums the messages does it as planned and shows nothing else")
    return [*said, *shared, *provided]


AVERAGED = (
    "the random draws of the cohorts depend on no data; the lines of an adversary who sees the cohort are averaged "
    "over these draws, for neighbours with the same cohorts; a client in more rounds than most has a weaker guarantee "
    "(by_participations)"
)


def _trusted(part: codec.Foreign) -> str:
    """Return the assumption about a part from another package."""
    whose = f"{part.package} {part.version}" if part.version else f"{part.package}, which has no version,"
    return f"everything rests on what {whose} states for its part `{part.kind}` ({part.family})"


def _declared(public: tuple[Declared, ...]) -> str:
    """Return a clause that names the rows, values and weights declared public, and by whom."""
    if not public:
        return "no row of the data is"
    said = " and ".join(f"{one.rows} {one.what} (declared by {one.by})" for one in public)
    learnt, known = (WEIGHTS, FROZEN), (VALUES, CLASSES)
    rows = ["these rows"] if any(one.what not in (*learnt, *known) for one in public) else []
    values = ["these values"] if any(one.what in known for one in public) else []
    weights = ["what the weights were trained on"] if any(one.what in learnt for one in public) else []
    who = [*rows, *values, *weights]
    return f"so are {said}: {' and '.join(who)} {'is' if who == weights else 'are'} not protected"


SILO = {
    "row": "one record is one row of one silo; a person with several rows, or rows in several silos, "
    "counts several times",
    "public": "the silos, the number of records of each and the plan are public, and",
    "rates": "rates are those of the declared sizes, whatever the silo holds",
    "draws": "the random draws of a silo's records stay inside the silo",
    "sum": "whoever sums the messages does it as planned and shows nothing else",
}
LOOP = {
    "row": "one record is one row of the data set; a person with several rows counts several times",
    "public": "the number of records and the plan are public, and",
    "rates": "rates are those of the declared number of records, whatever the data set holds",
    "draws": "the random draws of the batches stayed secret",
    "sum": "whoever runs the loop shows nothing of a step but the model after it",
}


COUNTED = (  # steps of a loop without a ledger
    "the steps were counted by the process that took them: no chain of charges shows that there were no others",
    "no checkpoint was continued in two places; if one was, every copy has to be accounted for",
)
CHARGED = (
    "steps were charged to the ledger before their noise was drawn; a checkpoint that was continued in two places is "
    "in the ledger's sum as often",
)


def _loop_assumptions(plan: Plan, facts: Facts) -> list[str]:
    """List the assumptions about a private PyTorch loop, which has no chain of charges."""
    if facts.loop is None:
        return []
    lost = "steps after a checkpoint that was gone back to were seen by nobody: their noise would be drawn twice"
    order = "the data set gave the same record under the same number in every epoch, and after every resume"
    return [
        *((lost, order) if plan.release.correlated else ()),
        "the data set gives every record by itself, and the loop trains on the batches as the loader gives them",
        f"the loss is the {facts.loop.reduction} over the records of a batch, each with a term of its own",
        *(COUNTED if facts.ledger is None else CHARGED),
        "epsilon_so_far holds only if the run did not stop for a reason that it read off the data",
        "losses and accuracies on the training records, where the loop shows them, are not published",
    ]


def not_covered(ledger: Statement | None = None, selection: Selection | None = None) -> list[str]:
    """List what the certificate does not cover."""
    others = "other releases of the same data: a budget is the sum over all of them"
    best = "only the trials that this run is the best of are accounted"
    tuning = "tuning is not accounted" if selection is None else best
    return [
        f"choosing settings by earlier runs on the same data: {tuning}",
        "diagnostics of a simulation (update norms, clipped fraction, train metrics): they are not private",
        others if ledger is None else "releases of the same data that were not charged to the ledger",
    ]


def _ledger_assumptions(found: Statement | None) -> list[str]:
    if found is None:
        return []
    said = [f"every release of these data was charged to the ledger, as {found.dataset!r}"]
    if all(item.event.is_gaussian for item in found.items):
        return said
    return [*said, "the settings of the runs on the ledger were not chosen by what earlier ones of them had released"]


MODELS = {  # by trust model: who holds the data and adds the noise, and is trusted with what
    "local": "each {holder} for itself, before anything leaves it; nobody else is trusted",
    "shuffle": "each {holder} for itself, and a shuffler that hides who sent which message and colludes with nobody",
    "distributed": "the {holder}s together: each adds its share of the noise, and a secure sum shows nobody a single "
    "message; the server is trusted to follow the protocol, and sees who takes part",
    "central": "the server: it is trusted with every {holder}'s message, with the sampling randomness, and to add the "
    "noise",
}
SEEN: dict[Adversary, str] = {"models": "models", "cohort": "cohorts", "messages": "messages"}
OPEN = "nobody adds noise: whoever receives a model, or a message, may learn everything"
SUBJECTS = {
    "client": "a client: the person, device or organisation whose data are one entry of the population",
    "record": "a record: the person or event that one row of one silo stands for",
}
UNITS = {"client": "user level: all data of one client", "record": "event level: one record of one silo"}
IN_A_LOOP = {  # one data set, whose owner trains on it
    "data_subject": "a record: the person or event that one row of the data set stands for",
    "data_curator": "whoever runs the loop: trusted with the data, with the sampling randomness, and to add the noise",
    "unit_of_privacy": "event level: one record",
}
NEIGHBOURS = {
    "add_remove": "unbounded: the data with or without one unit",
    "replace_one": "bounded: one unit replaced by any other",
    "zero_out": "bounded: one unit takes part with its data or with an empty message",
}
NOISE = {
    "simulation": "the generator is repeatable and its output floating point: not for release",
    "secure": "double precision noise on a public grid, not a discrete mechanism",
}
UNTUNED = "not accounted: settings that were chosen by earlier runs on these data cost more"
TRIER = "; and whoever runs the tuning, who sees every trial and is trusted to release nothing but the best"
TUNED = "accounted: the number of trials was random, and the best alone is released"


def trust_model(plan: Plan) -> str:
    """Return "central", "local", "shuffle" or "distributed", by what the release reveals and needs."""
    if "shuffler" in plan.needs:
        return "shuffle"
    if "secure_sum" in plan.needs:
        return "distributed"
    return "local" if "messages" in plan.release.sees else "central"


def statement(plan: Plan, facts: Facts, counts: Participation, cost: Cost) -> dict[str, Any]:
    """Return the answers to the questions of NIST SP 800-226, one entry each."""
    model, unit, tuned = trust_model(plan), plan.unit, facts.selection is not None
    holder = "client" if unit == "client" else "silo"
    curator = OPEN if plan.release.kind == "no_noise" else MODELS[model].format(holder=holder)
    before = len(plan.prepare) * counts.prepared
    columns = f", and {before} of columns before the first" if before else ""
    made = f"; {facts.released} of them were made" if facts.released < counts.releases else ""
    when = "round" if facts.loop is None else "step"
    rows = sum(one.rows for one in facts.public if "rows" in one.what)
    unprotected = [f"{rows} rows that are declared public"] * bool(rows)
    unprotected += [f"{one.what} ({one.by})" for one in facts.public if "rows" not in one.what]
    others = "not accounted: whatever else is released of the same data adds to these numbers"
    if facts.ledger is not None:
        charged = f"{facts.ledger.dataset!r}: {facts.ledger.runs} runs"
        others = f"accounted where they were charged to the ledger as {charged}"
    return {
        "data_subject": SUBJECTS[unit],
        "data_curator": curator + (TRIER if tuned else ""),
        "data_consumer": "whoever receives a released model; not trusted",
        "trust_model": model,
        "unit_of_privacy": UNITS[unit],
        "neighbours": _neighbours(cost),
        "releases": f"{counts.releases + before} in these numbers: one after every {when}{columns}{made}",
        "tuning": TUNED if tuned else UNTUNED,
        "side_channels": f"{NOISE[facts.noise]}; time, memory and network traffic are not protected",
        "not_protected": "; ".join(unprotected) or "nothing",
        "other_releases": others,
        **(IN_A_LOOP if facts.loop is not None else {}),
    }


def _neighbours(cost: Cost) -> str:
    whose: dict[str, list[str]] = {}
    for line in cost.lines:
        seen = whose.setdefault(line.relation, [])
        if protects(line) and SEEN[line.adversary] not in seen:
            seen.append(SEEN[line.adversary])
    promised = {relation: seen for relation, seen in whose.items() if seen}
    if len(promised) < 2:
        return NEIGHBOURS[next(iter(promised or whose))]
    return "; ".join(f"{NEIGHBOURS[name]} (to one who sees {' or '.join(seen)})" for name, seen in promised.items())
