"""Explanation of a certificate in plain sentences. Called by `sordino explain` and by reports."""

from __future__ import annotations

from typing import Any

from sordino.accounting.composition import ADVERSARIES, Adversary
from sordino.accounting.profiles import Ceiling, ceiling, participations_in_words
from sordino.accounting.rounding import upto
from sordino.certificate.facts import Facts, run_cost
from sordino.plan import Plan

CHANGE = {
    "add_remove": "adding or removing {all}",
    "replace_one": "replacing {all} by any other data",
    "zero_out": "one {unit} taking part with its data or with an empty message",
}
PROTECTED = {
    "client": "everything that one client",
    "record": "what any single record of a silo",
    "user": "everything that one user, by all rows of one silo,",
    "loop": "what any single record",
    "user of a loop": "everything that one user, by all records,",
}
NOTHING = "Nothing is protected: no adversary is promised anything."
REPLAYED = " {} {} charged again, but every silo sent its stored message again: no new release."
SO_FAR = " The steps taken so far cost epsilon {}, if the decision to stop did not depend on the training data."
ALL = {
    "client": "all the data of one client",
    "record": "one record of one silo",
    "user": "all rows of one user in one silo",
    "loop": "one record",
    "user of a loop": "all records of one user",
}
WHO: dict[Adversary, str] = {
    "models": "Someone who sees every model that was released, and nothing else",
    "cohort": "Someone who also sees which clients took part in which round",
    "messages": "Someone who reads every message as it leaves a {holder}",
}
LOOP: dict[Adversary, str] = {  # of a PyTorch loop: one data set, and nobody takes part but its owner
    "models": "Someone who sees the model after every step, and nothing else",
    "cohort": "Someone who also knows that this data set is used in every step",
    "messages": "Someone who sees a step's gradients before their noise",
}


def ceilings(plan: Plan, facts: Facts) -> dict[Adversary, Ceiling]:
    """Return upper bounds on true-positive rate and AUC of membership attacks, for each adversary."""
    cost = run_cost(plan, facts)
    found: dict[Adversary, Ceiling] = {}
    for who in ADVERSARIES:  # of several silos, the one that an attack gets furthest with
        silos = [ceiling(line) for line in cost.of(who)]
        found[who] = Ceiling(max(one.true_positives for one in silos), max(one.auc for one in silos))
    return found


def explain(certificate: dict[str, Any], reach: dict[Adversary, Ceiling]) -> dict[str, Any]:
    """Return the sentences that explain a certificate, by topic; `reach` has the bounds of `ceilings`."""
    unit = certificate["unit"]
    if certificate["loop"] is not None:
        unit = "user of a loop" if unit == "user" else "loop"
    promised, when = PROTECTED[unit], "rounds" if certificate["loop"] is None else "steps"
    protected = f"What is protected is {promised} contributed to the training, in all {when}."
    own, lines = certificate["own_code"], certificate["adversaries"]
    examined = "The code that ran on private records was not examined."
    if own is not None:
        examined = f"The code that ran on private records, model and loss: {own['grade']}. {sentence(own['why'])}"
    noise = "The noise came from a cryptographic generator keyed by the operating system; it cannot be repeated."
    if certificate["epsilon"] is None:
        noise = "No noise was added: this run gives no guarantee to anybody."
    elif certificate["noise"]["mode"] == "simulation":
        noise = "The noise came from a repeatable generator: this run is an experiment and must not be released."
    return {
        "protected": protected if _promises(certificate) else NOTHING,
        "own_code": examined,
        "against": [
            {
                "adversary": line["adversary"],
                "sentence": _strength(line, reach[line["adversary"]], unit),
                "true_positive_rate_at_1_percent": reach[line["adversary"]].true_positives,
                "auc_at_most": reach[line["adversary"]].auc,
            }
            for line in lines
        ],
        "noise": noise,
        "stated": [f"{name.replace('_', ' ')}: {text}" for name, text in certificate["statement"].items()],
        "other_words": [said for line in lines for said in _other_words(line)],
        "assumed": [sentence(text) for text in certificate["assumptions"]],
        "not_covered": [sentence(text) for text in certificate["not_covered"]],
        "counted": _counted(certificate),
        "silos": [_silo(entry, certificate["silos"]) for entry in lines[-1].get("silos", [])],
    }


def _silo(entry: dict[str, Any], known: list[str]) -> str:
    names = ", ".join(known[silo] if known else str(silo) for silo in entry["silos"])
    held = "Silo" if len(entry["silos"]) == 1 else "Silos"
    if entry["epsilon"] is None:
        return f"{held} {names}: nothing is guaranteed."
    return f"{held} {names}: epsilon {upto(entry['epsilon'])} at delta {upto(entry['delta'])}."


def _promises(certificate: dict[str, Any]) -> bool:
    return any(line["epsilon"] is not None for line in certificate["adversaries"])


def _strength(line: dict[str, Any], reach: Ceiling, unit: str) -> str:
    known = LOOP if unit in ("loop", "user of a loop") else WHO
    who = known[line["adversary"]].format(holder="client" if unit == "client" else "silo")
    if line["epsilon"] is None:
        return f"{who}: nothing is guaranteed."
    change = CHANGE[line["relation"]].format(unit=unit, all=ALL[unit])
    return (
        f"{who}: epsilon {upto(line['epsilon'])} at delta {upto(line['delta'])}, for {change}. "
        f"With 1% false positives, the best membership attack finds at most {upto(100 * reach.true_positives)}% of the "
        f"members; its AUC is at most {upto(reach.auc)} (guessing has 0.5)."
        + (f" This is {participations_in_words(line['by_participations'])}." if line.get("by_participations") else "")
    )


def _other_words(line: dict[str, Any]) -> list[str]:
    if not line["other_deltas"]:
        return []
    at = ", ".join(
        f"{'no' if one['epsilon'] is None else upto(one['epsilon'])} epsilon at delta {upto(one['delta'])}"
        for one in line["other_deltas"]
    )
    gdp = line["gdp"]
    mu = "" if gdp is None else f"; mu {upto(gdp['mu'])} (Gaussian DP, regret {upto(gdp['regret'], 2)})"
    return [f"{line['adversary']}: {at}{mu}"]


def _counted(certificate: dict[str, Any]) -> str:
    counts, loop = certificate["counts"], certificate["loop"]
    again = counts.get("rounds_replayed")
    what = "rounds" if loop is None else "steps of the loop"
    when = " before their noise was drawn" if _promises(certificate) else ""
    return (
        f"{counts['rounds_planned']} {what} were planned, {counts['rounds_charged']} were charged{when}, "
        f"this certificate covers {counts['rounds_accounted']}."
        + (REPLAYED.format(again, "round was" if again == 1 else "rounds were") if again is not None else "")
        + _of_one(certificate)
        + (_prepared(certificate["prepared"]) if certificate["prepared"] else "")
        + (f" The run ended by {counts['stopped_by']}." if "stopped_by" in counts else "")
        + (SO_FAR.format(upto(loop["epsilon_so_far"])) if loop is not None else "")
        + (f" {in_all(certificate['ledger'])}" if certificate["ledger"] is not None else "")
    )


def _of_one(certificate: dict[str, Any]) -> str:
    """Return a sentence on the number of releases charged to one unit; empty if all releases are charged to it.

    A count of 1 may mean the whole run (correlated noise, best of several trials), and gives no sentence.
    """
    first, rounds = certificate["adversaries"][0], certificate["counts"]["rounds_accounted"]
    most = max(line["events"][0]["count"] for line in first.get("silos", [first]) if line["events"])
    if not 1 < most < rounds:
        return ""
    return f" Each {certificate['unit']} is charged for at most {most} of them, since it took part in no more."


def _prepared(found: list[dict[str, Any]]) -> str:
    moments = [one["release"] for one in found if "epsilon" not in one["release"]]
    if moments:
        names = ", ".join(f"{one['column']} (noise multiplier {one['noise_multiplier']:g})" for one in moments)
        return f" Before the first step noised sums were released: {names}; the cost includes them."
    names = ", ".join(
        f"{one['release']['column']} (epsilon {upto(one['release']['epsilon'], 4)} by itself)" for one in found
    )
    return (
        f" Before the first round noised histograms were released of {names}, to compute ranges or constants for "
        f"missing values; their noise was added by {found[0]['noised_by']}, and the cost includes them."
    )


def in_all(ledger: dict[str, Any]) -> str:
    """Return a sentence on the epsilon that the data set has spent over all runs."""
    runs = f"{ledger['runs']} run" + "s" * (ledger["runs"] != 1)
    if ledger["epsilon"] is None:
        return f"The data set {ledger['dataset']!r} has no guarantee after {runs}."
    spent = f"epsilon {upto(ledger['epsilon'], 4)} of {upto(ledger['limit'], 6)}"
    return (
        f"The data set {ledger['dataset']!r} has spent {spent} in all, at delta {upto(ledger['delta'])}, "
        f"relation {ledger['relation']}, in {runs} that were charged to its ledger."
    )


def sentence(text: str) -> str:
    """Return a clause as a sentence, with a capital first letter and a full stop."""
    return text[0].upper() + text[1:] + "."


def page(found: dict[str, Any]) -> str:
    """Return the explanation, as `explain` returns it, as one text."""
    lines = [found["protected"], found["own_code"], "", "Against whom, and how strongly:"]
    lines += [f"- {entry['sentence']}" for entry in found["against"]]
    if found["silos"]:
        lines += ["", "Guarantee of each silo, even against someone who reads its messages:"]
        lines += [f"- {text}" for text in found["silos"]]
    if found["other_words"]:
        lines += ["", "The same guarantees at other deltas and as Gaussian DP, by adversary:"]
        lines += [f"- {text}" for text in found["other_words"]]
    lines += ["", "The questions of NIST SP 800-226:", *(f"- {text}" for text in found["stated"])]
    lines += ["", found["noise"], found["counted"], "", "What must hold for this to be true:"]
    lines += [f"- {text}" for text in found["assumed"]]
    return "\n".join([*lines, "", "What this does not cover:", *(f"- {text}" for text in found["not_covered"])])
