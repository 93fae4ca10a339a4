"""What a table of runs costs once it is looked at: all their bills together, per adversary, as one composition.

    epsilon(table) = epsilon( all events of all cells ),   never a sum of epsilons

The settings are fixed before the first cell runs (a grid, or draws from a public seed), so nothing is chosen by what an
earlier cell has shown, and composition needs no more. A cell that diverged, or was stopped, is billed as planned.
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

ALIKE = "cells that protect the same thing in the same way"


def composed(costs: Sequence[Cost], population: int) -> Cost:
    """One bill for all cells; refused where they protect different things."""
    units = sorted({cost.unit for cost in costs})
    if len(units) > 1:
        raise ConfigError(f"cells that protect one {units[0]} and cells that protect one {units[1]}", ALIKE)
    lines = [line for who in ADVERSARIES for line in _lines([cost.of(who) for cost in costs], who, population)]
    return Cost(costs[0].unit, tuple(lines))


def _lines(each: Sequence[tuple[Line, ...]], who: Adversary, population: int) -> list[Line]:
    """All cells' lines to one adversary: one, or one for every kind of silo."""
    relations = sorted({line.relation for lines in each for line in lines})
    if len(relations) > 1:
        found = f"cells whose neighbours differ by {' and by '.join(relations)}, to one who {WHO[who]}"
        raise ConfigError(found, f"{ALIKE}: no relation follows from another", "sweep them in two files")
    differ = any(line.silos for lines in each for line in lines)
    kinds: dict[frozenset[tuple[Event, int]], list[int]] = {}
    for silo in range(population if differ else 1):
        whole: Counter[Event] = Counter()
        for lines in each:
            own = next(line for line in lines if not line.silos or silo in line.silos)
            whole.update(dict(_counted(own)))
        kinds.setdefault(frozenset(whole.items()), []).append(silo)
    entries = [(tuple(sorted(kind, key=repr)), tuple(silos)) for kind, silos in kinds.items()]
    return [Line(who, relations[0], kind, silos if len(entries) > 1 else ()) for kind, silos in entries]


def _counted(line: Line) -> Counter[Event]:
    found: Counter[Event] = Counter()
    for event, count in line.entries:
        found[event] += count
    return found


def priced(cost: Cost, config: Config) -> dict[str, Any]:
    """The composition as a certificate says it."""
    lines = {who: headline(cost.of(who), config.delta, config.deltas) for who in ADVERSARIES}
    main = lines["models"]
    told = [{"adversary": who, "description": WHO[who], **line} for who, line in lines.items()]
    known = {"epsilon": main["epsilon"], "delta": main["delta"], "unit": cost.unit, "relation": main["relation"]}
    return {**known, "adversaries": told}


def check_alike(configs: Sequence[Config]) -> None:
    """Refuse cells that cannot be billed together: other data, other deltas, other clients, a budget of their own."""
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
                found = f"cells of different {what} ({ours} and {theirs}) on private data"
                raise ConfigError(found, "one composition over the same data", "sweep them in two files")


def _data(config: Config) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    options = {name: value for name, value in config.task.options.items() if name != "test"}
    return config.task.dataset, options, config.task.silos


def check_same_cut(tasks: Sequence[Task]) -> None:
    """Refuse cells in which a client is not the same client: a bill per client would then mean nothing."""
    first = tasks[0].clients
    for task in tasks[1:]:
        own = task.clients
        if not (np.array_equal(first.index, own.index) and np.array_equal(first.offsets, own.offsets)):
            fix = 'sweep neither run.seed nor the partition, or say data = "public" if they are'
            found = "private data that some cells cut into clients otherwise"
            raise ConfigError(found, "the same clients in every cell, so that their bills add up", fix)


def asked(configs: Sequence[Config]) -> Request:
    """All cells' bills in the ledger's terms, to be considered before the first of them runs."""
    each = [admission.ledger_request(config, admission.planned_facts(config)) for config in configs]
    return replace(each[0], items=tuple(item for one in each for item in one.items), plan="")
