"""Privacy cost of reading a table of runs: the composition of all their events, per adversary. Used by `sordino sweep`.

    epsilon(table) = epsilon( all events of all runs ),   never a sum of epsilons

The settings are fixed before the first run (a grid, or draws from a public seed), so nothing is chosen by what an
earlier run has shown, and composition needs no more. A run that diverged, or was stopped, is charged as planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sordino.accounting.composition import ADVERSARIES, Adversary, Cost, Line
from sordino.accounting.events import Event
from sordino.certificate.build import WHO, headline
from sordino.config import Config
from sordino.errors import ConfigError
from sordino.ledger.ledger import Request
from sordino.runs import admission
from sordino.task import Task

ALIKE = "runs that protect the same thing in the same way"


def composed(costs: Sequence[Cost], population: int) -> Cost:
    """One cost for all runs; refused where they protect different things."""
    units = sorted({cost.unit for cost in costs})
    if len(units) > 1:
        raise ConfigError(f"runs that protect one {units[0]} and runs that protect one {units[1]}", ALIKE)
    lines = [line for who in ADVERSARIES for line in _lines([cost.of(who) for cost in costs], who, population)]
    return Cost(costs[0].unit, tuple(lines))


def _lines(each: Sequence[tuple[Line, ...]], who: Adversary, population: int) -> list[Line]:
    """All runs' lines to one adversary: one, or one for every kind of silo."""
    relations = sorted({line.relation for lines in each for line in lines})
    if len(relations) > 1:
        found = f"runs whose neighbours differ by {' and by '.join(relations)}, to one who {WHO[who]}"
        raise ConfigError(found, f"{ALIKE}: no relation follows from another", "sweep them in two files")
    differ = any(line.silos for lines in each for line in lines)
    kinds: dict[frozenset[tuple[Event, int]], list[int]] = {}
    for silo in range(population if differ else 1):
        whole: Counter[Event] = Counter()
        for lines in each:
            own = next(line for line in lines if not line.silos or silo in line.silos)
            for event, count in own.entries:
                whole[event] += count
        kinds.setdefault(frozenset(whole.items()), []).append(silo)
    entries = [(tuple(sorted(kind, key=repr)), tuple(silos)) for kind, silos in kinds.items()]
    return [Line(who, relations[0], kind, silos if len(entries) > 1 else ()) for kind, silos in entries]


def statement(cost: Cost, config: Config) -> dict[str, Any]:
    """The composition as a certificate says it."""
    lines = {who: headline(cost.of(who), config.delta, config.deltas) for who in ADVERSARIES}
    main = lines["models"]
    adversaries = [{"adversary": who, "description": WHO[who], **line} for who, line in lines.items()]
    known = {"epsilon": main["epsilon"], "delta": main["delta"], "unit": cost.unit, "relation": main["relation"]}
    return {**known, "adversaries": adversaries}


def check_alike(configs: Sequence[Config]) -> None:
    """Refuse runs that cannot be composed: other data, other deltas, other clients, another ledger."""
    first = configs[0]
    for one in configs[1:]:
        for what, ours, theirs in (
            ("data sets", _data(first), _data(one)),
            ("deltas", (first.delta, first.deltas), (one.delta, one.deltas)),
            ("numbers of clients", first.plan.clients.population, one.plan.clients.population),
            ("ledgers", (first.privacy.ledger, first.privacy.dataset), (one.privacy.ledger, one.privacy.dataset)),
            ("noise modes", first.privacy.noise, one.privacy.noise),
        ):
            if ours != theirs:
                found = f"runs of different {what} ({ours} and {theirs}) on private data"
                raise ConfigError(found, "one composition over the same data", "sweep them in two files")


def _data(config: Config) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    options = {name: value for name, value in config.task.options.items() if name != "test"}
    return config.task.dataset, options, config.task.silos


def check_same_clients(tasks: Sequence[Task]) -> None:
    """Refuse runs in which a client is not the same client: a cost per client would then mean nothing."""
    first = tasks[0].clients
    for task in tasks[1:]:
        own = task.clients
        if not (np.array_equal(first.index, own.index) and np.array_equal(first.offsets, own.offsets)):
            fix = 'sweep neither run.seed nor the partition, or say data = "public" if they are'
            found = "private data that some runs partition into other clients"
            raise ConfigError(found, "the same clients in every run, so that their events compose", fix)


def charges(configs: Sequence[Config]) -> Request:
    """All runs' events in the ledger's terms, to be considered before the first of them runs."""
    each = [admission.ledger_request(config, admission.planned_facts(config)) for config in configs]
    return replace(each[0], items=tuple(item for one in each for item in one.items), plan="")
