"""Earlier runs that the first weights of a run come from: what they cost, and what both cost together.

    together = epsilon( events of every earlier run of this unit and relation, and of this run )     at this run's delta

It holds for whoever is in the data of all of them. Runs of another unit or relation are named and not added: no epsilon
follows from epsilons of different relations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from sordino import codec
from sordino.accounting import accountant
from sordino.accounting.bounds import Unit
from sordino.accounting.composition import Cost
from sordino.accounting.events import Event, Relation
from sordino.accounting.profiles import upward
from sordino.accounting.rounding import upto
from sordino.ledger.totals import Item

MOST_KINDS = 64  # of silos, over all runs, that a sum looks at
Kind = tuple[Item, ...]  # all releases that one record, or one client, was in


@dataclass(frozen=True)
class EarlierRun:
    """A run whose result another run began with; `kinds`: its events, for each kind of silo where silos differ."""

    run: str  # its id; "plan ..." where the weights' file alone is known, which names the plan
    unit: Unit
    relation: Relation
    delta: float
    kinds: tuple[Kind, ...]
    known_from: str
    same_data: bool = False  # by a keyed fingerprint; False: not known to be the same

    @property
    def epsilon(self) -> float:
        """Of that run alone."""
        return max(_epsilon(kind, self.relation, self.delta) for kind in self.kinds)

    def on(self, same_data: bool) -> EarlierRun:
        """The same run, with what is known of its data."""
        return replace(self, same_data=same_data)


def cost_of(cost: Cost, delta: float, run: str, known_from: str) -> EarlierRun:
    """A run by its cost, to whoever sees its models."""
    lines = cost.of("models")
    kinds = {tuple(Item(event, count) for event, count in line.entries if count): None for line in lines}
    return EarlierRun(run, cost.unit, lines[0].relation, delta, tuple(kinds), known_from)


def of_certificate(made: Mapping[str, Any], run: str, known_from: str) -> EarlierRun:
    """A run by its certificate: the events of the first adversary, of each kind of silo."""
    main = made["adversaries"][0]
    charged = [[one for one in entry["events"] if one["count"]] for entry in main.get("silos", [main])]
    kinds = {
        tuple(Item(codec.read(Event, one["event"], "event"), one["count"]) for one in kind): None for kind in charged
    }
    return EarlierRun(run, made["unit"], main["relation"], main["delta"], tuple(kinds), known_from)


def _epsilon(kind: Kind, relation: Relation, delta: float) -> float:
    """Of all releases in a kind, composed; none costs nothing."""
    counts: Counter[Event] = Counter()
    for item in kind:
        counts[item.event] += item.count
    entries = tuple(sorted(counts.items(), key=repr))
    return accountant.epsilon(entries, relation, delta).value if entries else 0.0


@dataclass(frozen=True)
class Together:
    """A run and its earlier runs: those that can be composed with it, and the epsilon of all of them."""

    runs: tuple[EarlierRun, ...]
    composed: tuple[EarlierRun, ...]
    epsilon: float | None  # None: nothing could be composed; inf: nothing is guaranteed
    delta: float
    relation: Relation
    unit: Unit


def together(cost: Cost, delta: float, runs: tuple[EarlierRun, ...]) -> Together:
    """This run's cost with what the runs before it cost; a neighbour is in one kind of silo of each."""
    own = cost_of(cost, delta, "", "")
    alike = tuple(run for run in runs if (run.unit, run.relation) == (own.unit, own.relation))
    count = math.prod(len(run.kinds) for run in (own, *alike))
    if not alike or count > MOST_KINDS:
        return Together(runs, (), None, delta, own.relation, own.unit)
    every = [sum(choice, ()) for choice in product(*(run.kinds for run in (own, *alike)))]
    worst = max(_epsilon(kind, own.relation, delta) for kind in every)
    return Together(runs, alike, worst, delta, own.relation, own.unit)


def to_entry(found: Together) -> dict[str, Any] | None:
    """What a certificate says of it; None where nothing is known of earlier runs."""
    if not found.runs:
        return None
    composed = None if found.epsilon is None else upward(found.epsilon)
    total = {"unit": found.unit, "relation": found.relation, "epsilon": composed, "delta": found.delta}
    names = [run.run for run in found.composed]
    return {"runs": [_entry(run) for run in found.runs], "together": {**total, "with": names} if names else None}


def _entry(run: EarlierRun) -> dict[str, Any]:
    return {
        "run": run.run,
        "unit": run.unit,
        "relation": run.relation,
        "epsilon": upward(run.epsilon),
        "delta": run.delta,
        "known_from": run.known_from,
        "same_data": run.same_data,
    }


def in_words(found: Together) -> list[str]:
    """The same in words, for what a certificate does not cover."""
    return [*(_cost_in_words(run, found) for run in found.runs), *_sum_in_words(found)]


def _cost_in_words(run: EarlierRun, found: Together) -> str:
    epsilon = upward(run.epsilon)
    cost = "nothing is guaranteed" if epsilon is None else f"epsilon {upto(epsilon)} at delta {upto(run.delta)}"
    where = "on the same data" if run.same_data else "on data that are not known to be the same"
    apart = "" if run in found.composed else "; its unit or relation is another, so the two are not added: both hold"
    return (
        f"the first weights come from the run {run.run} {where} ({cost}, one {run.unit}, {run.relation}; known from "
        f"{run.known_from}), which is not in this cost{apart}"
    )


def _sum_in_words(found: Together) -> list[str]:
    if found.epsilon is None:
        return []
    epsilon = upward(found.epsilon)
    cost = "has no guarantee" if epsilon is None else f"has epsilon {upto(epsilon)} at delta {upto(found.delta)}"
    others = f"run {found.composed[0].run}" if len(found.composed) == 1 else f"{len(found.composed)} earlier runs"
    who = f"every {found.unit}" if all(run.same_data for run in found.composed) else f"a {found.unit} that is in all"
    return [f"together with the {others}, {who} {cost}, {found.relation}"]
