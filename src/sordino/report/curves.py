"""What a cost means as curves: epsilon after every round, delta at every epsilon, the best attack at every false alarm.

    epsilon(t)  of the releases so far, by the same accounting that wrote the certificate; the last is the certificate's
    F(a) = min over e of exp(e) a + delta(e)    the most members that a test finds which accuses a share a of strangers

Adversaries to whom a run costs the same share one curve; where silos differ and nobody is told apart, each has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sordino.accounting import accountant
from sordino.accounting.composition import (
    ADVERSARIES,
    Adversary,
    Cost,
    Line,
    Participation,
    cost_of_best,
    repeated_rounds,
)
from sordino.accounting.pairs import Array
from sordino.accounting.profiles import power, protects, true_positives
from sordino.certificate.build import headline, line_entry
from sordino.certificate.facts import participation, run_cost
from sordino.errors import PlanError
from sordino.outcome import facts_of_charges
from sordino.report.subject import Subject

POINTS = 24  # of a curve over rounds
MOST = 6  # curves in one figure
FALSE_ALARMS = np.union1d(np.geomspace(1e-4, 1, 41), np.linspace(0, 1, 41))
_LOSSES = np.sinh(np.linspace(-6, 6, 1201)) / 10  # within 20 of 0, and close together where epsilon is small


@dataclass(frozen=True)
class Kind:
    """Who pays and to whom: adversaries to whom it costs the same; one group of silos, or (none) the worst of all."""

    adversaries: tuple[Adversary, ...]
    silos: tuple[int, ...] = ()
    label: str = ""

    def lines(self, cost: Cost) -> tuple[Line, ...]:
        """What of a cost is this kind's."""
        who = self.adversaries[0]
        return (cost.line(who, self.silos[0]),) if self.silos else cost.of(who)


def cost_of(subject: Subject) -> Cost:
    """The cost that the certificate was written from."""
    return run_cost(subject.plan, subject.facts)


def kinds(subject: Subject) -> list[Kind]:
    """The different curves of a run."""
    cost = cost_of(subject)
    alike: dict[tuple[Any, ...], list[Adversary]] = {}
    for who in ADVERSARIES:
        alike.setdefault(tuple((one.relation, one.entries, one.silos) for one in cost.of(who)), []).append(who)
    groups = [tuple(found) for found in alike.values()]
    own = cost.of(groups[0][0])
    if len(groups) == 1 and 1 < len(own) <= MOST:
        names, found = subject.certificate["silos"], []
        for silos in (line.silos for line in own):
            first = names[silos[0]] if names else f"silo {silos[0]}"
            found.append(Kind(groups[0], silos, first if len(silos) == 1 else f"{first} and {len(silos) - 1} more"))
        return found
    return [Kind(who, (), "anybody" if len(groups) == 1 else " = ".join(who)) for who in groups]


# ---- over rounds ----------------------------------------------------------------------------------------------------


def over_rounds(subject: Subject) -> list[dict[str, Any]]:
    """epsilon of the releases so far for each kind; None where nothing is guaranteed."""
    last = cost_of(subject)
    releases = participation(subject.plan, subject.facts).releases
    places = sorted({max(1, round(releases * k / POINTS)) for k in range(1, POINTS)} - {releases})
    try:
        costs = [(t, cost_of_best(subject.plan.cost(so_far(subject, t)), subject.facts.selection)) for t in places]
    except PlanError:
        costs = []  # noise that rounds share is priced for the whole run alone
    nothing = [] if subject.plan.prepare else [0]  # what columns cost is paid before the first round
    rounds = [*nothing, *(t for t, _ in costs), releases]
    found = []
    for kind in kinds(subject):
        values = [_epsilon(subject, kind, cost) for cost in (*(cost for _, cost in costs), last)]
        line = None if None in values else [*map(float, nothing), *values]
        found.append({"label": kind.label, "adversaries": list(kind.adversaries), "round": rounds, "epsilon": line})
    return found


def so_far(subject: Subject, releases: int) -> Participation:
    """The participation of the first releases: as it was where who took part is seen, else as planned."""
    plan, seen = subject.plan, subject.facts.max_participations is not None and len(subject.cohorts) >= releases
    prepared = max(1, subject.facts.prepared)
    if not seen:
        again = repeated_rounds(subject.rounds[:releases])
        return replace(Participation.planned(plan.clients, releases - len(again), again), prepared=prepared)
    facts = facts_of_charges(plan, subject.rounds[:releases], subject.cohorts[:releases], subject.facts)
    assert facts.max_participations is not None
    most, each = facts.max_participations, facts.per_client
    return Participation(releases, most, each, facts.repeats, False, prepared, facts.repeated)


def _epsilon(subject: Subject, kind: Kind, cost: Cost) -> float | None:
    lines, facts = kind.lines(cost), subject.facts
    if kind.silos:
        deltas = [facts.deltas[silo] for silo in kind.silos] if facts.deltas else [facts.delta]
        worst = [line_entry(lines[0], delta)["epsilon"] for delta in sorted(set(deltas))]
        return None if None in worst else max(worst)
    value: float | None = headline(lines, facts.delta, facts.deltas)["epsilon"]
    return value


# ---- at the end -----------------------------------------------------------------------------------------------------


def trade_off(subject: Subject) -> list[dict[str, Any]]:
    """The best attack on each kind: found members over false alarms; mu of a Gaussian release that is no better."""
    cost = cost_of(subject)
    return [
        {
            "label": kind.label,
            "adversaries": list(kind.adversaries),
            "gdp": _gdp(subject, kind, kind.lines(cost)),
            "false_positive_rate": FALSE_ALARMS.tolist(),
            "true_positive_rate": np.max([_most(line) for line in kind.lines(cost)], axis=0).tolist(),
        }
        for kind in kinds(subject)
    ]


def _most(line: Line) -> Array:
    if not protects(line):
        return np.ones_like(FALSE_ALARMS)
    mu = accountant.gaussian_mu(line.entries, line.relation)
    if mu is not None:
        return np.asarray([power(mu, a) if 0 < a < 1 else a for a in FALSE_ALARMS])
    deltas = np.asarray(accountant.deltas_at(line.entries, line.relation, _LOSSES.tolist()))
    return true_positives(FALSE_ALARMS, _LOSSES, deltas)


def _gdp(subject: Subject, kind: Kind, lines: Sequence[Line]) -> dict[str, float] | None:
    """mu, its regret and what it leaves out: the certificate's own; of a silo, where its release is Gaussian."""
    if kind.silos:
        mu = accountant.gaussian_mu(lines[0].entries, lines[0].relation)
        return None if mu is None else {"mu": mu, "regret": 0.0, "left": 0.0}
    named = next(line for line in subject.certificate["adversaries"] if line["adversary"] == kind.adversaries[0])
    found: dict[str, float] | None = named["gdp"]
    return found


def delta_curve(subject: Subject) -> list[dict[str, Any]]:
    """delta at every epsilon, from 0 to twice what is certified; nothing where nothing is guaranteed."""
    cost, found = cost_of(subject), []
    for kind in kinds(subject):
        certified = _epsilon(subject, kind, cost)
        if certified is None:
            continue
        epsilons = np.linspace(0, 2 * certified if certified else 1.0, 61)
        curves = [accountant.deltas_at(one.entries, one.relation, epsilons.tolist()) for one in kind.lines(cost)]
        deltas = [float(d) for d in np.max(np.asarray(curves), axis=0)]
        named = {"label": kind.label, "adversaries": list(kind.adversaries)}
        found.append({**named, "epsilon": epsilons.tolist(), "delta": deltas, "certified": certified})
    return found
