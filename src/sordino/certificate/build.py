"""Builder of a run's certificate from its plan and facts. Called at the end of a run, and by `certify` to compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sordino import codec
from sordino.accounting import accountant
from sordino.accounting.composition import ADVERSARIES, Adversary, Line, Participation, has_curator
from sordino.accounting.events import Event
from sordino.accounting.profiles import by_participations, summary
from sordino.accounting.rounding import upward
from sordino.certificate.assumptions import assumptions_of_run, not_covered, statement
from sordino.certificate.facts import Facts, Together, check_counts, participation, run_cost
from sordino.errors import CertificateError
from sordino.parts.releases import NoiseShares
from sordino.rng import Mode
from sordino.version import __version__

if TYPE_CHECKING:
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
    """Build the certificate of a run, as a dictionary for JSON."""
    counts, cost = participation(plan, facts), run_cost(plan, facts)
    check_counts(plan, facts, counts, cost)
    summed, near = _secure_sum(plan, facts, counts)
    lines = {who: _guarantee(who, cost.of(who), facts, near) for who in ADVERSARIES}
    behind = Together.of(cost, facts.delta, facts.earlier)
    main, others, reads = lines["models"], sorted({*codec.foreign(plan), *facts.foreign}), plan.local.reads
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
        "records": None if reads is None else codec.dump(reads),
        "trust": {"release": plan.release.kind, "sees": sorted(plan.release.sees), "needs": sorted(plan.release.needs)},
        "clip": _clip(plan),
        "denominator": denominator(plan),
        "mask": "none" if plan.mask is None else f"public: {plan.mask.source.kind}, keep {plan.mask.keep:g}",
        "postprocess": [codec.dump(step) for step in plan.postprocess],
        "prepared": _preparations(plan),
        "server": codec.dump(plan.server),
        "noise": {"mode": facts.noise, "note": NOISE_NOTES[facts.noise]},
        "secure_sum": summed,
        "statement": statement(plan, facts, counts, cost),
        "counts": _counts(plan, facts, counts),
        "silos": list(facts.names),
        "declared_public": codec.dump(facts.public),
        "assumptions": assumptions_of_run(plan, facts, cost, counts, others),
        "foreign_parts": [codec.dump(part) for part in others],
        "not_covered": [*not_covered(facts.ledger, facts.selection), *behind.in_words()],
        "plan_sha256": plan.hash,
        "config_sha256": facts.config,
        "model_sha256": facts.model,
        "sordino": __version__,
        "environment": [dict(ran) for ran in facts.environment],
        "given": None if facts.given is None else dict(facts.given),
        "utility": None if facts.utility is None else dict(facts.utility),
        "loop": _loop(plan, facts),
        "ledger": _ledger(facts),
        "earlier": behind.to_entry(),
        "run": None,  # filled in by the run folder
    }


def _preparations(plan: Plan) -> list[dict[str, Any]]:
    who = "whoever sums the messages" if has_curator(plan.unit, plan.release) else "each client, or silo, on its own"
    relation = plan.forecast.lines[0].relation
    return [
        {"release": codec.dump(part), "noise": codec.dump(part.noise(relation)), "noised_by": who}
        for part in plan.prepare
    ]


def _loop(plan: Plan, facts: Facts) -> dict[str, Any] | None:
    """Return the entry on a DP-SGD loop; epsilon_so_far holds if the stopping time depends on no data."""
    if facts.loop is None:
        return None
    taken = plan.cost(Participation(facts.charged, facts.charged)).line("models")
    return {
        "epsilon_so_far": line_entry(taken, facts.delta)["epsilon"] if facts.charged else 0.0,
        "loss": {"reduction": facts.loop.reduction, "check": facts.loop.check},
        "kept_apart": {"how": facts.loop.kept_apart, "looks": facts.loop.looks},
    }


def _guarantee(who: Adversary, lines: tuple[Line, ...], facts: Facts, near: float) -> dict[str, Any]:
    """Return one adversary's guarantee; only those who see sums see something at a distance from the events."""
    return {**headline(lines, facts.delta, facts.deltas, 0.0 if who == "messages" else near), **summary(lines)}


def _secure_sum(plan: Plan, facts: Facts, counts: Participation) -> tuple[dict[str, Any] | None, float]:
    """Return the certificate's entry on secure sums, and the total variation of their noise from Gaussian noise."""
    release = plan.release
    if not facts.sum_length or not isinstance(release, NoiseShares):
        return None, 0.0
    grid = release.sum_grid(plan.clients, plan.local.reads)
    distance = grid.distance(facts.sum_length, counts.releases)
    entry = {
        "step": grid.step,
        "share_std_in_steps": grid.ratio,
        "word_bits": grid.bits,
        "members_at_most": grid.members,
        "coordinates": facts.sum_length,
        "releases": counts.releases,
        "rounding": grid.rounding,
        "wrapping": grid.wrapping,
        "distance": distance,
    }
    return entry, distance


def headline(
    lines: tuple[Line, ...], delta: float, deltas: tuple[float, ...] = (), distance: float = 0.0
) -> dict[str, Any]:
    """Return one adversary's guarantee over all silos: the largest epsilon, the largest delta, and an entry per silo.

    Neighbouring data sets differ in one silo only, so silos compose in parallel: epsilons are not added.
    """
    if len(lines) == 1 and not deltas:
        return line_entry(lines[0], delta, distance)
    found = []
    for line in lines:
        by_delta: dict[float, list[int]] = {} if deltas else {delta: list(line.silos)}
        for silo in (line.silos or range(len(deltas))) if deltas else ():
            by_delta.setdefault(deltas[silo], []).append(silo)
        found += [{"silos": silos, **line_entry(line, own, distance)} for own, silos in by_delta.items()]
    worst = max(found, key=lambda entry: math.inf if entry["epsilon"] is None else entry["epsilon"])
    rest = {key: value for key, value in worst.items() if key != "silos"}
    return {**rest, "delta": max(entry["delta"] for entry in found), "silos": found}


@lru_cache(maxsize=256)
def _proved(line: Line, delta: float, distance: float) -> accountant.Epsilon:
    return accountant.epsilon_near(line.entries, line.relation, delta, distance)


def line_entry(line: Line, delta: float, distance: float = 0.0) -> dict[str, Any]:
    """Return the certificate's entry on one adversary: relation, epsilon, delta, accounting method and events.

    `distance` is that of the releases from the events, in total variation.
    """
    spent = _proved(replace(line, adversary="models", silos=()), delta, distance)
    return {
        "relation": line.relation,
        "epsilon": upward(spent.value),
        "delta": delta,
        "epsilon_rdp": None if spent.rdp is None else upward(spent.rdp),
        "method": spent.method,
        "grid": spent.grid,
        "events": [{"count": count, "event": codec.dump(event)} for event, count in line.entries],
        **({"by_participations": by_count} if (by_count := by_participations(line, delta)) else {}),
    }


def check_epsilons(made: Mapping[str, Any]) -> None:
    """Raise `CertificateError` unless every epsilon of a certificate follows from its events, relation and delta."""
    near = 0.0 if made["secure_sum"] is None else float(made["secure_sum"]["distance"])
    for line in made["adversaries"]:
        who, computed = line["adversary"], []
        field, distance = f"epsilon of the adversary {who!r}", 0.0 if who == "messages" else near
        for entry in line.get("silos", [line]):
            entries = tuple((codec.read(Event, one["event"], "event"), one["count"]) for one in entry["events"])
            computed.append(_proved(Line("models", entry["relation"], entries), entry["delta"], distance).value)
            _check_same(field, entry["epsilon"], upward(computed[-1]))
        _check_same(field, line["epsilon"], upward(max(computed)))
    first = made["adversaries"][0]
    for name in ("epsilon", "delta", "relation"):
        if made[name] != first[name]:
            what = f"{name} is {made[name]!r}, but {first[name]!r} for the first adversary"
            raise CertificateError(name, f"{what}; fix: restore the unchanged certificate")


def _check_same(field: str, stored: float | None, computed: float | None) -> None:
    if stored != computed:
        what = f"{field} is {stored}, but its events give {computed}"
        raise CertificateError(field, f"{what}; fix: restore the unchanged certificate")


def denominator(plan: Plan) -> float | str:
    """Return the divisor of the noised sum: a constant of the plan, or a text on what determines it."""
    fixed = plan.release.denominator(plan.clients.expected, 1) == plan.clients.expected
    return plan.clients.expected if fixed else "the number of messages received, which this adversary sees anyway"


def _clip(plan: Plan) -> dict[str, Any]:
    if plan.local.reads is not None:
        local = codec.dump(plan.local)
        return {"scope": plan.local.clip_scope, "clip_norm": local["clip_norm"], "norm": local.get("norm", 2)}
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


def _ledger(facts: Facts) -> dict[str, Any] | None:
    found = facts.ledger
    if found is None:
        return None
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
