"""The certificate of a run, a pure function of plan, charges and model. `certify` computes it again and compares."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sordino import codec
from sordino.accounting import accountant
from sordino.accounting.composition import ADVERSARIES, Adversary, Line, Participation, has_curator
from sordino.accounting.profiles import by_participations, summary, upward
from sordino.certificate.assumptions import assumptions_of_run, not_covered, statement
from sordino.certificate.earlier_runs import in_words, together
from sordino.certificate.earlier_runs import to_entry as earlier_entry
from sordino.certificate.facts import Facts, Loop, check_counts, participation, run_cost
from sordino.ledger.totals import Standing
from sordino.rng import Mode
from sordino.version import __version__

if TYPE_CHECKING:
    from sordino.parts.mechanisms import Preparation
    from sordino.plan import Plan

FORMAT = 2  # of the certificate: certificate.schema.json
WHO: dict[Adversary, str] = {
    "models": "sees every released model and nothing else",
    "cohort": "sees every released model and who took part in which round",
    "messages": "sees every message as it leaves a client",
}
NOISE_NOTES: dict[Mode, str] = {
    "simulation": "fast repeatable generator: for experiments, not for release",
    "secure": "AES counter generator keyed by the operating system, double precision, rounded to a public grid",
}


def certificate(plan: Plan, facts: Facts) -> dict[str, Any]:
    """The certificate of a run."""
    counts, cost = participation(plan, facts), run_cost(plan, facts)
    check_counts(plan, facts, counts, cost)
    lines = {who: {**headline(cost.of(who), facts.delta, facts.deltas), **summary(cost.of(who))} for who in ADVERSARIES}
    behind = together(cost, facts.delta, facts.earlier)
    main, others = lines["models"], sorted({*codec.foreign(plan), *facts.foreign})
    return {
        "format": FORMAT,
        "epsilon": main["epsilon"],
        "delta": main["delta"],
        "unit": cost.unit,
        "relation": main["relation"],
        "own_code": None if facts.own_code is None else asdict(facts.own_code),
        "adversaries": [{"adversary": who, "description": WHO[who], **line} for who, line in lines.items()],
        "accountant": {"library": accountant.VERSION, "first": "PLD (pessimistic) or GDP closed form", "second": "RDP"},
        "sampler": codec.dump(plan.clients),
        "records": None if plan.local.reads is None else codec.dump(plan.local.reads),
        "trust": {"release": plan.release.kind, "sees": sorted(plan.release.sees), "needs": sorted(plan.release.needs)},
        "clip": _clip(plan),
        "denominator": denominator(plan),
        "mask": "none" if plan.mask is None else f"public: {plan.mask.source.kind}, keep {plan.mask.keep:g}",
        "postprocess": [codec.dump(step) for step in plan.postprocess],
        "prepared": [_preparation(plan, part) for part in plan.prepare],
        "server": codec.dump(plan.server),
        "noise": {"mode": facts.noise, "note": NOISE_NOTES[facts.noise]},
        "statement": statement(plan, facts, counts, cost),
        "counts": _counts(plan, facts, counts),
        "silos": list(facts.names),
        "declared_public": [one.as_dict() for one in facts.public],
        "assumptions": assumptions_of_run(plan, facts, cost, counts, others),
        "foreign_parts": [codec.dump(part) for part in others],
        "not_covered": [*not_covered(facts.ledger, facts.selection), *in_words(behind)],
        "plan_sha256": plan.hash,
        "config_sha256": facts.config,
        "model_sha256": facts.model,
        "sordino": __version__,
        "environment": [dict(ran) for ran in facts.environment],
        "given": None if facts.given is None else dict(facts.given),
        "utility": None if facts.utility is None else dict(facts.utility),
        "loop": None if facts.loop is None else _loop(plan, facts, facts.loop),
        "ledger": None if facts.ledger is None else ledger_entry(facts.ledger),
        "earlier": earlier_entry(behind),
        "run": None,  # what a folder binds
    }


def _preparation(plan: Plan, part: Preparation) -> dict[str, Any]:
    """A release before the first round: what it was, with which noise, and whose hands add it."""
    noise = part.noise(plan.forecast.lines[0].relation)
    who = "whoever sums the messages" if has_curator(plan.unit, plan.release) else "each client, or silo, on its own"
    return {"release": codec.dump(part), "noise": codec.dump(noise), "noised_by": who}


def _loop(plan: Plan, facts: Facts, loop: Loop) -> dict[str, Any]:
    """What only a loop has: epsilon of the steps taken, which holds if nobody stopped by what they saw of the data."""
    taken = plan.cost(Participation(facts.charged, facts.charged)).line("models")
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
    by_delta = [(line, own, silos) for line in lines for own, silos in _by_delta(line, delta, deltas).items()]
    found = [{"silos": silos, **line_entry(line, own)} for line, own, silos in by_delta]
    worst = max(found, key=lambda entry: math.inf if entry["epsilon"] is None else entry["epsilon"])
    kept = {key: value for key, value in worst.items() if key != "silos"}
    return {**kept, "delta": max(entry["delta"] for entry in found), "silos": found}


def _by_delta(line: Line, delta: float, deltas: tuple[float, ...]) -> dict[float, list[int]]:
    if not deltas:
        return {delta: list(line.silos)}
    sorted_out: dict[float, list[int]] = {}
    for silo in line.silos or range(len(deltas)):
        sorted_out.setdefault(deltas[silo], []).append(silo)
    return sorted_out


@lru_cache(maxsize=256)
def _proved(line: Line, delta: float) -> accountant.Epsilon:
    return accountant.epsilon(line.entries, line.relation, delta)


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
        **({"by_participations": told} if (told := by_participations(line, delta)) else {}),
    }


def denominator(plan: Plan) -> float | str:
    """What the sum is divided by: a constant of the plan, or in words what it follows."""
    fixed = plan.release.denominator(plan.clients.expected, 1) == plan.clients.expected
    return plan.clients.expected if fixed else "the number of messages received, which this adversary sees anyway"


def _clip(plan: Plan) -> dict[str, Any]:
    if plan.local.reads is not None:
        local = codec.dump(plan.local)
        scope = "one norm over the gradient of each single record"
        return {"scope": scope, "clip_norm": local["clip_norm"], "norm": local.get("norm", 2)}
    if plan.clip is None or not plan.clip.finite:
        return {"scope": "none", "clip_norm": None, "norm": None}
    clip_norm = codec.dump(plan.clip)["clip_norm"]
    return {"scope": "one norm over the whole message of a client", "clip_norm": clip_norm, "norm": plan.clip.norm}


def _counts(plan: Plan, facts: Facts, counts: Participation) -> dict[str, Any]:
    seen: dict[str, Any] = {} if facts.max_participations is None else {"max_participations": facts.max_participations}
    if facts.per_client:
        seen["participations_per_silo"] = list(facts.per_client)
    if facts.receipts:
        seen["charges_per_silo"] = list(facts.receipts)
    if plan.local.reads is not None and plan.local.reads.disjoint:
        seen["rounds_charged_again"] = facts.repeats
    if facts.stopped:
        seen["stopped_by"] = "a budget that the next round would have overspent"
    elif facts.early:
        seen["stopped_by"] = facts.early
    if facts.replayed:
        seen["rounds_replayed"] = facts.replayed
    return {"rounds_planned": plan.rounds, "rounds_charged": facts.charged, "rounds_accounted": counts.releases, **seen}


def check_provable(plan: Plan, delta: float, deltas: tuple[float, ...] = ()) -> None:
    """Refuse a plan that accounting cannot bound, before anything of it runs; the work is kept for the certificate."""
    for who in ADVERSARIES:
        headline(plan.forecast.of(who), delta, deltas)


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
