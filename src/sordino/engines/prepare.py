"""Noised histograms of columns, released once before round 1; the state keeps what was released. Called by loop.py.

charge  ->  each message + noise (or their sum + noise, with a trusted curator)  ->  State.public_state  ->  the records
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.accounting.composition import has_curator
from sordino.data.clients import Records
from sordino.data.tables import scale_columns
from sordino.errors import DataError
from sordino.parts.mechanisms import Preparation, Values
from sordino.parts.releases import on_grid
from sordino.plan import PREPARED, Plan, State
from sordino.rng import Streams
from sordino.task import Task

Charge = Callable[[int, None], None]
BEFORE = -1  # the round in whose place preparations are charged


def check_prepared(plan: Plan, task: Task) -> None:
    """Every histogram that a column waits for is in the cost, and no other."""
    asked = {one.release.column: one.release for one in task.waiting}
    accounted = {part.column: part for part in plan.prepare}
    if asked == accounted:
        return
    wrong = sorted(name for name in {*asked, *accounted} if asked.get(name) != accounted.get(name))[0]
    found = f"column {wrong!r}, whose histogram " + (
        "is not in the plan's cost" if wrong not in accounted else "the task does not wait for, or in another form"
    )
    raise DataError(found, "the same preparations in plan and task", "let the file that names the data make both")


def begin(plan: Plan, task: Task, streams: Streams, charge: Charge, state: State) -> tuple[Task, State]:
    """The task with its columns scaled: by releases that the state remembers, or by new ones, which are charged."""
    if not plan.prepare:
        return task, state
    if not known(state):
        charge(BEFORE, None)
        found, clients, x = {}, task.clients, task.clients.records.x
        for part in plan.prepare:
            place = next(one.place for one in task.waiting if one.release.column == part.column)
            column = x[:, place].double().numpy()
            held = (column[clients.rows(k)] for k in range(clients.population))
            found[f"{PREPARED}{part.column}"] = noised_total(plan, part, held, streams)
        state = replace(state, public_state=state.public_state | found)
    return scaled(task, known(state)), state


def known(state: State) -> dict[str, Values]:
    """The noised histograms that a state remembers."""
    kept = {name.removeprefix(PREPARED): held for name, held in state.public_state.items() if name.startswith(PREPARED)}
    return {name: held.double().numpy() for name, held in kept.items()}


def noised_total(plan: Plan, part: Preparation, held: Iterable[Values], streams: Streams) -> Tensor:
    """The noised sum of everybody's messages: noised by everybody, or where there is a curator, once."""
    noise, trusted = part.noise(plan.forecast.lines[0].relation), has_curator(plan.unit, plan.release)

    def noised(message: Values, client: int) -> Tensor:
        rng = streams.at(0, f"prepare {part.column}", client)
        sum_of_both = torch.from_numpy(message + noise.sample(len(message), rng))
        return on_grid(sum_of_both, noise.std) if streams.mode == "secure" else sum_of_both

    total: Any = 0.0
    for client, shares in enumerate(held):
        message = part.message(shares, plan.unit)
        total = total + (message if trusted else noised(message, client))
    return noised(np.asarray(total), -1) if trusted else torch.as_tensor(total)


def scaled(task: Task, found: Mapping[str, Values]) -> Task:
    """The task whose columns wait for nothing any more."""
    records, test = task.clients.records, task.test
    clients = replace(task.clients, records=_scaled(records, task, found))
    return replace(task, clients=clients, test=None if test is None else _scaled(test, task, found), waiting=())


def _scaled(records: Records, task: Task, found: Mapping[str, Values]) -> Records:
    return replace(records, x=torch.from_numpy(scale_columns(records.x.numpy(), task.waiting, found)))


def said(task: Task, state: State) -> dict[str, Any]:
    """What the releases say of every column, in its own unit: with it new rows are prepared as the model's were."""
    found = known(state)
    totals = {one.release.column: (one, found[one.release.column]) for one in task.waiting}
    return {name: {**one.read(total), "noised_histogram": total.tolist()} for name, (one, total) in totals.items()}
