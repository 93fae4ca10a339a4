"""Results of a run: lines of its history, its model, and its charges counted. Used by runs/ and training.py."""

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
from sordino.certificate.facts import Facts
from sordino.data.clients import unwrapped_model
from sordino.data.lineage import file_metadata
from sordino.errors import DataError
from sordino.ledger.budget import ClientCharges
from sordino.loop import Round, RoundReceipts
from sordino.parts.samplers import NO_RANDOMNESS, Cohort
from sordino.plan import Plan, State
from sordino.rng import Mode
from sordino.task import Task

_LOG = logging.getLogger("sordino")
DIAGNOSTIC = "diagnostic, not private"  # key in history of figures of unreleased data
_NOT_METRICS = ("round", "void", DIAGNOSTIC)  # keys of a history line


def history_line(done: Round) -> dict[str, Any]:
    """Return a round's line of the history: public metrics, and diagnostics marked as not private."""
    line: dict[str, Any] = {"round": done.t + 1, **done.metrics}
    if done.void:
        line["void"] = True
    return {**line, DIAGNOSTIC: {**done.diagnostics, "seconds": round(done.seconds, 4)}}


def releasable(line: dict[str, Any], noise: Mode) -> dict[str, Any]:
    """Return a history line as it is stored: diagnostics are not private, so a run for release drops them."""
    return {name: value for name, value in line.items() if noise == "simulation" or name != DIAGNOSTIC}


def last_figures(history: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return the latest metrics of public test rows in a run's history; None if there are none."""
    lines = ({name: line[name] for name in line if name not in _NOT_METRICS} for line in reversed(history))
    return next((figures for figures in lines if figures), None)


def warn_if_no_update(history: list[dict[str, Any]]) -> None:
    """Log a warning if every client's update was zero, so that noise alone changed the weights."""
    norms = [line.get(DIAGNOSTIC, {}).get("update_norm_mean") for line in history]
    if norms and all(norm == 0.0 for norm in norms):
        _LOG.warning("Every client's update was zero in every round: noise alone changed the weights. Check lr.")


def final_model(plan: Plan, task: Task, state: State) -> nn.Module:
    """Return a copy of the task's module with the run's final weights."""
    model = copy.deepcopy(task.model)
    task.layout.load(model, plan.server.result(state.memory))
    return unwrapped_model(model).eval()


def model_bytes(model: nn.Module) -> bytes:
    """Return the model as a safetensors file, without frozen parameters."""
    fixed = _frozen_names(model)
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items() if name not in fixed}
    return safetensors.torch.save(state, metadata=file_metadata(model) or None)


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights that `model_bytes` stored into a module of the same kind; frozen parameters do not change."""
    own = unwrapped_model(model)
    lacking = own.load_state_dict(dict(weights), strict=False)
    wrong = [*lacking.unexpected_keys, *(name for name in lacking.missing_keys if name not in _frozen_names(own))]
    if wrong:
        found, needed = f"weights that do not fit the model at {wrong[0]!r}", "weights of a model of the same kind"
        raise DataError(found, needed, "load them into the architecture that was trained")


def _frozen_names(model: nn.Module) -> set[str]:
    every = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in every if not parameter.requires_grad}


def model_digest(model: nn.Module) -> str:
    """Return the SHA-256 of the model's safetensors file."""
    return hashlib.sha256(model_bytes(model)).hexdigest()


def facts_of_charges(
    plan: Plan, rounds: list[int], cohorts: list[Cohort], facts: Facts, settled: Sequence[RoundReceipts] = ()
) -> Facts:
    """Return the certificate's facts with the number of charged rounds, and per client if cohorts are not secret."""
    again = repeated_rounds(rounds)
    facts = replace(facts, charged=len(rounds), repeats=len(again), repeated=again)
    if not settled and (not cohorts or not plan.clients.random):
        return facts
    known = count_charges(plan, rounds, cohorts, settled)
    each = known.total
    if settled:
        again = tuple(sorted((Counter(again) - Counter(known.replayed)).elements()))
        beyond = int((each - _distinct_rounds_by_client(plan, rounds, cohorts)).max())
        facts = replace(facts, receipts=tuple(each.tolist()), repeats=max(len(again), beyond), repeated=again)
        facts = replace(facts, replayed=len(known.replayed))
    own = plan.unit == "record" or bool(plan.release.noise_multipliers)
    return replace(facts, max_participations=int(each.max(initial=0)), per_client=tuple(each.tolist()) if own else ())


def _distinct_rounds_by_client(plan: Plan, rounds: list[int], cohorts: list[Cohort]) -> NDArray[np.int64]:
    if not plan.clients.random:
        cohorts = [plan.clients.draw(t, NO_RANDOMNESS) for t in rounds]
    asked = {(t, int(client)) for t, cohort in zip(rounds, cohorts, strict=True) for client in cohort}
    return np.bincount([client for _, client in asked], minlength=plan.clients.population)


def count_charges(
    plan: Plan, rounds: list[int], cohorts: list[Cohort], settled: Sequence[RoundReceipts]
) -> ClientCharges:
    """Return how often each client was charged in a run, corrected by the silos' receipts and refusals."""
    known = ClientCharges.of(plan) if settled else replace(ClientCharges.of(plan), replays=False)
    replay_charges(plan, rounds, cohorts, settled, known)
    return known


class ChargeListener(Protocol):
    """Object that `replay_charges` calls with the charges, refusals and receipts of a run, in their order."""

    def ask(self, cohort: Cohort, t: int) -> None: ...
    def add_receipts(self, refused: Iterable[int], charged: Iterable[tuple[int, int]], t: int) -> None: ...


def replay_charges(
    plan: Plan, rounds: Sequence[int], cohorts: Sequence[Cohort], settled: Sequence[RoundReceipts], who: ChargeListener
) -> None:
    """Call a listener with every charge of a run, and after each with the silos' refusals and receipts."""
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
