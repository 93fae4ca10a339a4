"""Assumptions of a certificate: conditions outside this program, and risks that its epsilon does not cover.

`statement` answers the questions of NIST SP 800-226: who is protected (the data subject), who holds the data and adds
the noise (the data curator), who receives the result (the data consumer) and who of them is trusted; the unit of
privacy and the neighbours; how many releases are covered; whether hyperparameter tuning was charged; and what epsilon
does not cover: side channels, rows that are not protected, other releases. Called by `build`.
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

RECEIPTS = "the charges that a silo reports are those in its own ledger"
FOLLOWS = (
    "the server follows the secure aggregation protocol: it sends all silos the same list of those that have sent a "
    "message, and forwards their public keys unchanged where [federation] pins no keys that sign them"
)
BEGAN = "the module was passed from Python: its initial weights, and the data they were trained on, are taken as public"
BEGAN_FROM = (
    "the module was passed from Python: the data that its initial weights were trained on are taken as public, except "
    "the data of the runs under `earlier`"
)
IN_MEMORY = "the rounds were counted in memory by the process that ran them: no file proves that there were no others"
ALLOCATED = "the allocation of the present pass (the secret part of checkpoints) was shown to nobody"
KEPT = "the clients' bins (the secret part of checkpoints), and the cohort of any round, were shown to nobody"
SHARED = "the noise state of earlier rounds (the secret part of checkpoints) was shown to nobody"


def assumptions_of_run(
    plan: Plan, facts: Facts, cost: Cost, counts: Participation, others: Iterable[codec.Foreign]
) -> list[str]:
    """Return all assumptions of a certificate; `others` are the parts from other packages."""
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
    release, reads = plan.release, plan.local.reads
    by_pass = plan.clients.pass_rounds > 1 or (reads is not None and reads.pass_rounds > 1)
    kept = [KEPT] if plan.clients.keeps_bins else [ALLOCATED] if by_pass else []
    shared = [*([SHARED] if release.correlated else []), *kept]
    provided = [f"the engine provides {need}" for need in sorted(release.needs)]
    if reads is not None:
        words = SILO if facts.loop is None else USERS if facts.loop.users else LOOP  # a loop has no silo
        row = USER_ROWS.format(facts.user_rows) if facts.user_rows else words["row"]
        said = [row, f"{words['public']} {_declared(facts.public)}"]
        if reads.relation == "add_remove":
            said.append(words["rates"])
        if reads.amplify(GaussianNoise(1.0), 0) != GaussianNoise(1.0):
            said.append(words["draws"])
        if "messages" not in release.sees:
            said.append(words["sum"])
        averaged = counts.sampled_rounds and {"cohort", "messages"} & release.sees
        return [*said, *shared, *provided, *([AVERAGED] if averaged else [])]
    said = [
        f"one {cost.unit} is one entry of the population; a person with two entries counts twice",
        f"the population and the plan are public, and {_declared(facts.public)}",
    ]
    if plan.clients.random:
        seen = {(line.relation, line.entries, line.silos) for line in cost.of("cohort")}
        if any((line.relation, line.entries, line.silos) not in seen for line in cost.of("models")):
            said.append("the random draws of the cohorts stay secret from the adversary who sees models")
        in_at_most = f"a client was in at most {counts.max_participations} rounds"
        said.append(AVERAGED if counts.sampled_rounds else f"against an adversary who sees the cohort: {in_at_most}")
    if "messages" not in release.sees:
        said.append(SUMMED)
    return [*said, *shared, *provided]


AVERAGED = (
    "the random draws of the cohorts depend on no data; the guarantee against an adversary who sees the cohort is "
    "averaged over these draws, for neighbours with the same cohorts; a client in more rounds than most has a weaker "
    "guarantee (by_participations)"
)
SUMMED = "whoever sums the messages computes the sum as planned and reveals nothing else"


def _trusted(part: codec.Foreign) -> str:
    whose = f"{part.package} {part.version}" if part.version else f"{part.package}, which has no version,"
    return f"the privacy statements that {whose} makes for its part `{part.kind}` ({part.family}) are correct"


def _declared(public: tuple[Declared, ...]) -> str:
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
    "rates": "sampling rates use the declared number of records of a silo, also if the silo holds another number",
    "draws": "the random draws of a silo's records stay inside the silo",
    "sum": SUMMED,
}
LOOP = {
    "row": "one record is one row of the data set; a person with several rows counts several times",
    "public": "the number of records and the plan are public, and",
    "rates": "sampling rates use the declared number of records, also if the data set holds another number",
    "draws": "the random draws of the batches stayed secret",
    "sum": "whoever runs the loop reveals nothing of a step but the model after the step",
}
USERS = LOOP | {  # a loop whose unit is the user
    "row": "all records of one user are one unit, by the ids that make_private was given: one user has one id in all "
    "records, and no record belongs to two users",
    "public": "the number of users and the plan are public, and",
    "rates": "sampling rates use the number of users in the ids, also if the data set holds another number",
}


COUNTED = (  # steps of a loop without a ledger
    "the steps were counted by the process that took them: no ledger proves that there were no other steps",
    "no checkpoint was continued twice; if one was, every continuation must be accounted for",
)
CHARGED = (
    "steps were charged to the ledger before their noise was drawn; every continuation of a checkpoint is charged",
)


ROWS_APART = "the data set depends on another"


def _loop_assumptions(plan: Plan, facts: Facts) -> list[str]:
    """Return the assumptions about a DP-SGD loop, which has no hash chain of charges."""
    if facts.loop is None:
        return []
    lost = "steps after the checkpoint from which the loop was resumed were seen by nobody: their noise was drawn again"
    apart = f"no record of {'a user depends on one of another user' if facts.loop.users else ROWS_APART}"
    order = "the data set returned the same record for the same index in every epoch, and after every resume"
    return [
        *((lost, order) if plan.release.correlated else ()),
        f"{apart}, and the loop trains on the batches as the loader returns them",
        f"the loss is the {facts.loop.reduction} over the records of a batch; each term depends on one record alone",
        *(COUNTED if facts.ledger is None else CHARGED),
        "epsilon_so_far holds only if the decision to stop did not depend on the training data",
        "losses and accuracies on the training records are not published",
    ]


def not_covered(ledger: Statement | None = None, selection: Selection | None = None) -> list[str]:
    """Return the privacy risks that the certificate does not cover."""
    others = "other releases of the same data: the total privacy loss is that of all of them together"
    best = "only the trials of the sweep that selected this run are accounted"
    tuning = "tuning is not accounted" if selection is None else best
    return [
        f"hyperparameters chosen by earlier runs on the same data: {tuning}",
        "diagnostics of a simulation (update norms, clipped fraction, train metrics): they are not private",
        others if ledger is None else "releases of the same data that were not charged to the ledger",
    ]


def _ledger_assumptions(found: Statement | None) -> list[str]:
    if found is None:
        return []
    said = [f"every release of these data was charged to the ledger, as {found.dataset!r}"]
    if all(item.event.is_gaussian for item in found.items):
        return said
    return [*said, "the settings of the runs in the ledger were not chosen by looking at releases of earlier runs"]


MODELS = {  # by trust model: who holds the data and adds the noise, and is trusted with what
    "local": "each {holder} noises its own messages before they leave it; nobody else is trusted",
    "shuffle": "each {holder} noises its own message; a trusted shuffler, which does not collude, hides who sent which",
    "distributed": "the {holder}s together: each adds its share of the noise, and secure aggregation hides the single "
    "messages; the server is trusted to follow the protocol, and sees who takes part",
    "central": "the server: it is trusted with every {holder}'s message and with the sampling randomness, and adds the "
    "noise",
}
SEEN: dict[Adversary, str] = {"models": "models", "cohort": "cohorts", "messages": "messages"}
OPEN = "nobody adds noise: whoever receives a model or a message may learn everything about the data"
SUBJECTS = {
    "client": "a client: the person, device or organisation whose data are one entry of the population",
    "record": "a record: the person or event that one row of one silo stands for",
    "user": "a user: whoever the column of persons names in one silo",
}
UNITS = {
    "client": "user level: all data of one client",
    "record": "event level: one record of one silo",
    "user": "user level: all rows of one user in one silo",
}
USER_ROWS = (
    "all rows of one user in a silo are one record, of which at most {} are read, the first in the file: the column "
    "of persons calls one user by one name in all rows, and whoever is in two silos is protected in each by itself"
)
IN_A_LOOP = {  # one data set, whose owner trains on it
    "data_subject": "a record: the person or event that one row of the data set stands for",
    "data_curator": "whoever runs the loop: trusted with the data, with the sampling randomness, and to add the noise",
    "unit_of_privacy": "event level: one record",
}
USERS_IN_A_LOOP = IN_A_LOOP | {
    "data_subject": "a user: whoever the ids give records of the data set to",
    "unit_of_privacy": "user level: all records of one user",
}
NEIGHBOURS = {
    "add_remove": "unbounded: the data with or without one unit",
    "replace_one": "bounded: one unit replaced by any other",
    "zero_out": "bounded: one unit takes part with its data or with an empty message",
}
NOISE = {
    "simulation": "the noise is repeatable (seeded) and in floating point: not for release",
    "secure": "the noise is double precision, rounded to a public grid; it is not a discrete mechanism",
}
UNTUNED = "not accounted: if settings were chosen by earlier runs on these data, the true privacy loss is larger"
TRIER = "; whoever runs the tuning sees every trial and is trusted to release the best trial only"
TUNED = "accounted: the number of trials was random, and only the best trial is released"


def trust_model(plan: Plan) -> str:
    """Return the trust model: "central", "local", "shuffle" or "distributed", by what the release reveals and needs."""
    if "shuffler" in plan.needs:
        return "shuffle"
    if "secure_sum" in plan.needs:
        return "distributed"
    return "local" if "messages" in plan.release.sees else "central"


def statement(plan: Plan, facts: Facts, counts: Participation, cost: Cost) -> dict[str, Any]:
    """Return the certificate's answers to the questions of NIST SP 800-226, one entry each."""
    model, unit, tuned = trust_model(plan), cost.unit, facts.selection is not None
    holder = "client" if unit == "client" else "silo"
    curator = OPEN if plan.release.kind == "no_noise" else MODELS[model].format(holder=holder)
    before = len(plan.prepare) * counts.prepared
    columns = f", and {before} of columns before the first" if before else ""
    made = f"; {facts.released} of them happened" if facts.released < counts.releases else ""
    when = "round" if facts.loop is None else "step"
    rows = sum(one.rows for one in facts.public if "rows" in one.what)
    unprotected = [f"{rows} rows that are declared public"] * bool(rows)
    unprotected += [f"{one.what} ({one.by})" for one in facts.public if "rows" not in one.what]
    others = "not accounted: every other release of the same data adds to the privacy loss"
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
        "releases": f"this certificate covers {counts.releases + before}: one after every {when}{columns}{made}",
        "tuning": TUNED if tuned else UNTUNED,
        "side_channels": f"{NOISE[facts.noise]}; time, memory and network traffic are not protected",
        "not_protected": "; ".join(unprotected) or "nothing",
        "other_releases": others,
        **({} if facts.loop is None else USERS_IN_A_LOOP if facts.loop.users else IN_A_LOOP),
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
    return "; ".join(
        f"{NEIGHBOURS[name]} (against an adversary who sees {' or '.join(seen)})" for name, seen in promised.items()
    )
