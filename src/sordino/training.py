"""The whole thing in one call: train, and hand over the model, the history and the certificate."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
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
from sordino.parts.silo import NoisyLocalSgd
from sordino.plan import Plan, State
from sordino.privacy import accounting, calibrate
from sordino.privacy.bill import Line
from sordino.privacy.budget import Budget
from sordino.privacy.certificate import Declared, Facts, certificate, check_deltas, default_delta, silo_deltas
from sordino.privacy.release import CentralNoise, Forward, LocalNoise, NoiseShares, Release, ShuffledNoise
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
    deltas: Sequence[float] = (),
    allow_large_delta: bool = False,
    seed: int = 0,
    noise: Mode = "simulation",
    engine: Engine | None = None,
    eval_every: int = 1,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Run every round of the plan; delta defaults to population^-1.1, for records to size^-1.1 of their silo."""
    engine = engine or InProcess()
    check(plan, task, engine)
    deltas = tuple(deltas) or (silo_deltas(plan) if delta is None else ())
    delta = default_delta(plan.units) if delta is None else delta
    check_deltas(plan, delta, deltas, allow_large_delta)
    tally, history, state = Tally(), [], State.initial(plan, task.layout.flatten(task.model))
    for done in run(
        plan, task, engine=engine, streams=streams(noise, seed), charges=tally, state=state, eval_every=eval_every
    ):
        state = done.state
        history.append(entry(done))
        if on_round:
            on_round(history[-1])
    model = final_model(plan, task, state)
    known = Facts(delta, noise, 0, model=model_digest(model), deltas=deltas, public=declared_by_caller(task))
    facts = counted(plan, tally.rounds, tally.cohorts, known)
    return Result(model, history, certificate(plan, facts))


def declared_by_caller(task: Task) -> tuple[Declared, ...]:
    """The rows that a task made in Python calls public."""
    given = {
        "test rows": (task.test, "the caller: test of the task"),
        "rows": (task.public, "the caller: public of it"),
    }
    return tuple(Declared(len(rows), what, by) for what, (rows, by) in given.items() if rows is not None)


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


def counted(plan: Plan, rounds: list[int], cohorts: list[Cohort], facts: Facts) -> Facts:
    """The facts with what was charged; who was in how many rounds only where the cohort is seen by design."""
    again = len(rounds) - len(set(rounds))
    facts = replace(facts, charged=len(rounds), repeats=again)
    if not cohorts or not plan.clients.random:
        return facts
    each = np.bincount(np.concatenate(cohorts), minlength=plan.clients.population)
    own = plan.unit == "record" or (isinstance(plan.release, LocalNoise) and bool(plan.release.multipliers))
    return replace(facts, most=int(each.max(initial=0)), each=tuple(each.tolist()) if own else ())


def with_multiplier(plan: Plan, multiplier: float) -> Plan:
    """The same plan with another multiplier, the same for all."""
    release = plan.release
    match release:
        case CentralNoise(mechanism) | ShuffledNoise(mechanism):
            changed: Release = replace(release, mechanism=replace(mechanism, multiplier=multiplier))  # type: ignore[type-var]
        case LocalNoise(mechanism):
            changed = LocalNoise(replace(mechanism, multiplier=multiplier))  # type: ignore[type-var]
        case NoiseShares():
            changed = replace(release, multiplier=multiplier)
        case Forward() if isinstance(plan.local, NoisyLocalSgd):
            return replace(plan, local=replace(plan.local, multiplier=multiplier, multipliers=()))
        case _:
            raise PlanError("calibration", f"release {release.kind!r}, which has no multiplier", "a release with noise")
    return replace(plan, release=changed)


def with_multipliers(plan: Plan, multipliers: tuple[float, ...]) -> Plan:
    """The same plan with a multiplier for every silo."""
    if isinstance(plan.release, LocalNoise):
        return replace(plan, release=replace(plan.release, multipliers=multipliers))
    if isinstance(plan.local, NoisyLocalSgd):
        return replace(plan, local=replace(plan.local, multipliers=multipliers))
    raise PlanError(
        "calibration", f"release {plan.release.kind!r} and a budget per silo", "local_noise, or noisy_local_sgd"
    )


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
    delta = default_delta(plan.units) if delta is None else delta
    weakest = _weakest(plan, delta, free)

    def line_of(changed: Plan) -> Line:
        return changed.bill().line("models", weakest)

    def noisier(z: float) -> Plan:
        return with_multiplier(plan, z)

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


def _weakest(plan: Plan, delta: float, free: str) -> int:
    """Whose line decides: with one multiplier for all the smallest silo, whose records are read most."""
    lines = plan.bill().of("models")
    if free == "multiplier" or len(lines) == 1:
        return 0 if plan.local.reads is None else int(np.argmin(plan.local.reads.sizes))
    return max(lines, key=lambda line: accounting.bound(line.entries, line.relation, delta).value).silos[0]


def calibrated_silos(plan: Plan, budgets: Sequence[Budget]) -> Plan:
    """The plan with a multiplier of its own for every silo, so that each spends its own budget and no more."""
    if len(budgets) != plan.clients.population:
        raise PlanError(
            "calibration", f"{len(budgets)} budgets for {plan.clients.population} silos", "one budget per silo"
        )
    solved: dict[tuple[int, Budget], float] = {}

    def solve(silo: int, budget: Budget) -> float:
        size = plan.local.reads.size(silo) if plan.local.reads is not None else 0
        if (size, budget) not in solved:
            solved[size, budget] = calibrate.multiplier(
                lambda z: with_multiplier(plan, z).bill().line("messages", silo), budget.epsilon, budget.delta
            )
        return solved[size, budget]

    return with_multipliers(plan, tuple(solve(silo, budget) for silo, budget in enumerate(budgets)))
