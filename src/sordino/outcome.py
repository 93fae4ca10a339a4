"""What a run leaves: lines of history, the model, what was declared public, and the counts that a cost needs."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.accounting.composition import repeated_rounds
from sordino.certificate.facts import WEIGHTS, Declared, Facts
from sordino.data.clients import unwrapped_model
from sordino.data.lineage import declared_frozen, file_metadata
from sordino.errors import DataError
from sordino.ledger.charges import ClientCharges
from sordino.loop import Round, RoundReceipts
from sordino.parts.samplers import NO_RANDOMNESS, Cohort
from sordino.plan import Plan, State
from sordino.rng import Mode
from sordino.task import Task

_LOG = logging.getLogger("sordino")
DIAGNOSTIC = "diagnostic, not private"  # the key in history under which figures of unreleased data stand
_NO_FIGURES = ("round", "void", DIAGNOSTIC)  # of a line of history


def declared_public(task: Task) -> tuple[Declared, ...]:
    """The rows, values and weights of a task that are public, each by the word of whoever brought them."""
    given = (
        (task.test, task.source.rows, task.source.by),
        (task.public, "rows", "the caller: public of it"),
    )
    rows = [Declared(len(rows), what, by) for rows, what, by in given if rows is not None]
    init = task.init
    first = () if init is None else (Declared(init.numbers, WEIGHTS, f"the user: init = {init.file}", init.sha256),)
    return (*rows, *task.source.values, *first, *declared_frozen(unwrapped_model(task.model)))


def history_line(done: Round) -> dict[str, Any]:
    """A round as one line of history: public figures, and diagnostics marked as not private."""
    line: dict[str, Any] = {"round": done.t + 1, **done.metrics}
    if done.void:
        line["void"] = True
    return {**line, DIAGNOSTIC: {**done.diagnostics, "seconds": round(done.seconds, 4)}}


def releasable(line: dict[str, Any], noise: Mode) -> dict[str, Any]:
    """What of a line is written: diagnostics of a run for release are shown to whoever runs it, and never kept."""
    return {name: value for name, value in line.items() if noise == "simulation" or name != DIAGNOSTIC}


def last_figures(history: list[dict[str, Any]]) -> dict[str, float] | None:
    """The newest figures on public rows; None if there are none."""
    told = ({name: line[name] for name in line if name not in _NO_FIGURES} for line in reversed(history))
    return next((figures for figures in told if figures), None)


def warn_if_no_update(history: list[dict[str, Any]]) -> None:
    """Say so where no client's update was other than zero: the weights moved by noise alone."""
    norms = [line.get(DIAGNOSTIC, {}).get("update_norm_mean") for line in history]
    if norms and all(norm == 0.0 for norm in norms):
        _LOG.warning("In no round was a client's update other than zero: what moved, noise has moved. Look at lr.")


def final_model(plan: Plan, task: Task, state: State) -> nn.Module:
    """A copy of the module that the task was made with, holding the result of the run."""
    model = copy.deepcopy(task.model)
    task.layout.load(model, plan.server.result(state.memory))
    return unwrapped_model(model).eval()


def model_bytes(model: nn.Module) -> bytes:
    """The model as a safetensors file; of one that is frozen in parts, only what was trained."""
    fixed = _frozen_names(model)
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items() if name not in fixed}
    return safetensors.torch.save(state, metadata=file_metadata(model) or None)


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """What `model_bytes` has stored, into a module of the same kind; what is frozen there stays as it is."""
    own = unwrapped_model(model)
    lacking = own.load_state_dict(dict(weights), strict=False)
    wrong = [*lacking.unexpected_keys, *(name for name in lacking.missing_keys if name not in _frozen_names(own))]
    if wrong:
        raise DataError(f"weights that do not fit the model at {wrong[0]!r}", "those of a model of the same kind")


def _frozen_names(model: nn.Module) -> set[str]:
    every = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in every if not parameter.requires_grad}


def model_digest(model: nn.Module) -> str:
    """sha256 of the safetensors file."""
    return hashlib.sha256(model_bytes(model)).hexdigest()


def facts_of_charges(
    plan: Plan, rounds: list[int], cohorts: list[Cohort], facts: Facts, settled: Sequence[RoundReceipts] = ()
) -> Facts:
    """The facts with what was charged; who was in how many rounds only where the cohort is seen by design."""
    again = repeated_rounds(rounds)
    facts = replace(facts, charged=len(rounds), repeats=len(again), repeated=again)
    if not settled and (not cohorts or not plan.clients.random):
        return facts
    known = count_charges(plan, rounds, cohorts, settled)
    each = known.total
    if settled:
        again = tuple(sorted((Counter(again) - Counter(known.replayed)).elements()))
        beyond = int((each - _asked_once(plan, rounds, cohorts)).max())
        facts = replace(facts, receipts=tuple(each.tolist()), repeats=max(len(again), beyond), repeated=again)
        facts = replace(facts, replayed=len(known.replayed))
    own = plan.unit == "record" or bool(plan.release.noise_multipliers)
    return replace(facts, max_participations=int(each.max(initial=0)), per_client=tuple(each.tolist()) if own else ())


def _asked_once(plan: Plan, rounds: list[int], cohorts: list[Cohort]) -> NDArray[np.int64]:
    """In how many different rounds every client was asked."""
    if not plan.clients.random:
        cohorts = [plan.clients.draw(t, NO_RANDOMNESS) for t in rounds]
    asked = {(t, int(client)) for t, cohort in zip(rounds, cohorts, strict=True) for client in cohort}
    return np.bincount([client for _, client in asked], minlength=plan.clients.population)


def spent(plan: Plan, rounds: list[int], cohorts: list[Cohort], settled: Sequence[RoundReceipts]) -> NDArray[np.int64]:
    """How often every client was charged; without a word of the silos, how often it was asked."""
    return count_charges(plan, rounds, cohorts, settled).total


def count_charges(
    plan: Plan, rounds: list[int], cohorts: list[Cohort], settled: Sequence[RoundReceipts]
) -> ClientCharges:
    """Every charge of the chain and what silos said of it, counted by client and by release."""
    known = ClientCharges.of(plan) if settled else replace(ClientCharges.of(plan), replays=False)
    replay_charges(plan, rounds, cohorts, settled, known)
    return known


class ChargeListener(Protocol):
    """Whoever is told of charges, and of what became of them, in the order in which it was."""

    def ask(self, cohort: Cohort, t: int) -> None: ...
    def add_receipts(self, refused: Iterable[int], charged: Iterable[tuple[int, int]], t: int) -> None: ...


def replay_charges(
    plan: Plan, rounds: Sequence[int], cohorts: Sequence[Cohort], settled: Sequence[RoundReceipts], who: ChargeListener
) -> None:
    """Every charge, and after it what silos said of it."""
    if not plan.clients.random:
        cohorts = [plan.clients.draw(t, NO_RANDOMNESS) for t in rounds]
    notes, asked = list(settled), list(zip(rounds, cohorts, strict=True))
    for charged in range(len(asked) + 1):
        t = rounds[charged - 1] if charged else 0
        if charged:
            who.ask(asked[charged - 1][1], t)
        while notes and notes[0].after == charged:
            note = notes.pop(0)
            who.add_receipts(note.refused, [(one.client, one.charges) for one in note.receipts], t)
