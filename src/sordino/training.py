"""The whole thing in one call: train, and hand over the model, the history and the certificate."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import safetensors.torch
from torch import nn

from sordino.data.task import Task
from sordino.engines.base import Engine
from sordino.engines.inprocess import InProcess
from sordino.errors import PlanError
from sordino.parts.samplers import Cohort, FixedSize, Poisson, Sampler
from sordino.plan import Plan, State
from sordino.privacy import calibrate
from sordino.privacy.bill import Line
from sordino.privacy.certificate import Facts, certificate, check_delta, default_delta
from sordino.privacy.release import CentralNoise, LocalNoise, NoiseShares, Release, ShuffledNoise
from sordino.rng import Mode, streams
from sordino.run import Round, Tally, check, run

DIAGNOSTIC = "diagnostic, not private"  # the key in history under which figures of unreleased data stand


@dataclass(frozen=True)
class Result:
    """What a run leaves: the model of the last round, one entry per round, and the certificate."""

    model: nn.Module
    history: list[dict[str, Any]]
    certificate: dict[str, Any]


def train(
    plan: Plan,
    task: Task,
    *,
    delta: float | None = None,
    allow_large_delta: bool = False,
    seed: int = 0,
    noise: Mode = "simulation",
    engine: Engine | None = None,
    eval_every: int = 1,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Run every round of the plan; delta defaults to population^-1.1."""
    engine = engine or InProcess()
    check(plan, task, engine)
    delta = default_delta(plan.clients.population) if delta is None else delta
    check_delta(delta, plan.clients.population, allow_large_delta)
    tally, history, state = Tally(), [], State.initial(plan, task.layout.flatten(task.model))
    for done in run(
        plan, task, engine=engine, streams=streams(noise, seed), charges=tally, state=state, eval_every=eval_every
    ):
        state = done.state
        history.append(entry(done))
        if on_round:
            on_round(history[-1])
    model = final_model(plan, task, state)
    facts = Facts(delta, noise, len(tally.rounds), most_rounds(plan, tally.cohorts), model_digest(model))
    return Result(model, history, certificate(plan, facts))


def entry(done: Round) -> dict[str, Any]:
    """A round as one line of history: public figures, and diagnostics marked as not private."""
    line: dict[str, Any] = {"round": done.t + 1, **done.metrics}
    if done.void:
        line["void"] = True
    return {**line, DIAGNOSTIC: {**done.diagnostics, "seconds": round(done.seconds, 4)}}


def final_model(plan: Plan, task: Task, state: State) -> nn.Module:
    """A copy of the task's module with the result of the run."""
    model = copy.deepcopy(task.model)
    task.layout.load(model, plan.server.result(state.memory))
    return model.eval()


def model_bytes(model: nn.Module) -> bytes:
    """The model as a safetensors file."""
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    return safetensors.torch.save(state)


def model_digest(model: nn.Module) -> str:
    """sha256 of the safetensors file."""
    return hashlib.sha256(model_bytes(model)).hexdigest()


def most_rounds(plan: Plan, cohorts: list[Cohort]) -> int | None:
    """The most rounds of one client, where the cohort is seen by design; None where it is secret or public anyway."""
    if not cohorts or not plan.clients.random:
        return None
    return int(np.bincount(np.concatenate(cohorts), minlength=1).max(initial=0))


def with_multiplier(release: Release, multiplier: float) -> Release:
    """The same release with another multiplier."""
    match release:
        case CentralNoise(mechanism) | LocalNoise(mechanism, ()) | ShuffledNoise(mechanism):
            return replace(release, mechanism=replace(mechanism, multiplier=multiplier))  # type: ignore[type-var]
        case NoiseShares():
            return replace(release, multiplier=multiplier)
    raise PlanError("calibration", f"release {release.kind!r}, which has no multiplier", "a release with noise")


def with_cohort(clients: Sampler, cohort: int) -> Sampler:
    """The same sampler with another expected cohort."""
    match clients:
        case Poisson():
            return replace(clients, rate=cohort / clients.population)
        case FixedSize():
            return replace(clients, cohort=cohort)
    raise PlanError("calibration", f"sampler {clients.kind!r}", "poisson or fixed, whose cohort can be chosen")


def calibrated(plan: Plan, *, epsilon: float, delta: float | None = None, free: str = "multiplier") -> Plan:
    """The plan with its multiplier, rounds or cohort (`free`) changed so that it costs `epsilon` at `delta`."""
    delta = default_delta(plan.clients.population) if delta is None else delta

    def line_of(changed: Plan) -> Line:
        return changed.bill().line("models")

    def noisier(z: float) -> Plan:
        return replace(plan, release=with_multiplier(plan.release, z))

    def longer(rounds: int) -> Plan:
        return replace(plan, rounds=rounds)

    def larger(cohort: int) -> Plan:
        return replace(plan, clients=with_cohort(plan.clients, cohort))

    if free == "rounds":
        return longer(calibrate.rounds(lambda n: line_of(longer(n)), epsilon, delta))
    if free == "cohort":
        population, least = plan.clients.population, getattr(plan.release, "at_least", 1)
        return larger(calibrate.cohort(lambda n: line_of(larger(n)), epsilon, delta, population, least))
    return noisier(calibrate.multiplier(lambda z: line_of(noisier(z)), epsilon, delta))
