"""The certificate in the words of NIST SP 800-226: who is trusted with what, and what the numbers leave out.

That guide asks whoever states a guarantee to say who is protected (the data subject), who holds the data and adds the
noise (the data curator), who receives the result (the data consumer) and whom of them one has to trust; the unit of
privacy and what neighbours are; how many releases the numbers cover; whether choosing settings was charged; and what
the mathematics does not see: side channels, rows that are not protected, other releases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sordino.accounting.composition import Adversary, Cost, Participation
from sordino.accounting.profiles import protects

if TYPE_CHECKING:
    from sordino.certificate.facts import Facts
    from sordino.plan import Plan

MODELS = {  # by trust model: who holds the data and adds the noise, and is trusted with what
    "local": "each {holder} for itself, before anything leaves it; nobody else is trusted",
    "shuffle": "each {holder} for itself, and a shuffler that hides who sent which message and colludes with nobody",
    "distributed": "the {holder}s together: each adds its share of the noise, and a secure sum shows nobody a single "
    "message; the server is trusted to follow the protocol, and sees who takes part",
    "central": "the server: it is trusted with every {holder}'s message, with the coins, and to add the noise",
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
    "data_curator": "whoever runs the loop: trusted with the data, with the coins, and to add the noise",
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


def trust_model(plan: Plan) -> str:
    """Central, local, shuffle or distributed, by what the release shows and needs."""
    if "shuffler" in plan.needs:
        return "shuffle"
    if "secure_sum" in plan.needs:
        return "distributed"
    return "local" if "messages" in plan.release.sees else "central"


def statement(plan: Plan, facts: Facts, counts: Participation, cost: Cost) -> dict[str, Any]:
    """One entry per question of the guide."""
    model, unit, tuned = trust_model(plan), plan.unit, facts.selection is not None
    holder = "client" if unit == "client" else "silo"
    return {
        "data_subject": SUBJECTS[unit],
        "data_curator": _curator(plan, model, holder) + (TRIER if tuned else ""),
        "data_consumer": "whoever receives a released model; not trusted",
        "trust_model": model,
        "unit_of_privacy": UNITS[unit],
        "neighbours": _neighbours(cost),
        "releases": _releases(plan, facts, counts, "round" if facts.loop is None else "step"),
        "tuning": TUNED if tuned else UNTUNED,
        "side_channels": f"{NOISE[facts.noise]}; time, memory and network traffic are not protected",
        "not_protected": _open(facts),
        "other_releases": _others(facts),
        **(IN_A_LOOP if facts.loop is not None else {}),
    }


def _curator(plan: Plan, model: str, holder: str) -> str:
    """Who holds the data and adds the noise; without noise, who only holds them."""
    return OPEN if plan.release.kind == "no_noise" else MODELS[model].format(holder=holder)


def _neighbours(cost: Cost) -> str:
    """What neighbours are; where lines that promise something differ in it, to whom."""
    whose: dict[str, list[str]] = {}
    for line in cost.lines:
        seen = whose.setdefault(line.relation, [])
        if protects(line) and SEEN[line.adversary] not in seen:
            seen.append(SEEN[line.adversary])
    promised = {relation: seen for relation, seen in whose.items() if seen}
    if len(promised) < 2:
        return NEIGHBOURS[next(iter(promised or whose))]
    return "; ".join(f"{NEIGHBOURS[name]} (to one who sees {' or '.join(seen)})" for name, seen in promised.items())


def _releases(plan: Plan, facts: Facts, counts: Participation, when: str) -> str:
    before = len(plan.prepare) * counts.prepared
    columns = f", and {before} of columns before the first" if before else ""
    made = f"; {facts.released} of them were made" if facts.released < counts.releases else ""
    return f"{counts.releases + before} in these numbers: one after every {when}{columns}{made}"


UNTUNED = "not accounted: settings that were chosen by earlier runs on these data cost more"
TRIER = "; and whoever runs the tuning, who sees every trial and is trusted to release nothing but the best"
TUNED = "accounted: the number of trials was random, and the best alone is released"


def _open(facts: Facts) -> str:
    rows = sum(one.rows for one in facts.public if "rows" in one.what)
    said = [f"{rows} rows that are declared public"] * bool(rows)
    said += [f"{one.what} ({one.by})" for one in facts.public if "rows" not in one.what]
    return "; ".join(said) or "nothing"


def _others(facts: Facts) -> str:
    if facts.ledger is None:
        return "not accounted: whatever else is released of the same data adds to these numbers"
    return f"accounted where they were charged to the ledger as {facts.ledger.dataset!r}: {facts.ledger.runs} runs"
