"""Trial rounds of the behaviour audit: the loop and an engine run a plan on few clients with synthetic data.

All parts are the plan's, except the server, which is SGD with step 1, so that a round's step is the decoded mean.
Cohorts and silos are smaller, at the same sampling rates. Rounds are run in episodes, which are independent runs with
their own random streams. Called by `summary` and by the other tests of the audit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino import codec
from sordino.accounting.bounds import AlreadyPrivate
from sordino.data.clients import Clients, Records
from sordino.engines.base import ClientJob, Collected
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.errors import UserError
from sordino.loop import run
from sordino.parts.encoding import Public
from sordino.parts.local_solvers import LocalSolver
from sordino.parts.releases import Release
from sordino.parts.samplers import Cohort, Sampler
from sordino.parts.schedules import at
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.rng import Seeded, Streams
from sordino.runs.charge_log import PrefixHash
from sordino.runs.writer import Checkpoint
from sordino.task import Task

SIZE = 1024  # coordinates of the model
ROUNDS, EPISODE = 256, 32  # rounds in all, and most rounds with one seed
COHORT, POPULATION = 8, 20_000  # expected cohort, and largest population, of a small plan
FAR = 1e38  # a target that no prediction reaches: the gradient of |w x - y| is then x for every w


@codec.hides_values
@dataclass(frozen=True)
class TrialRound:
    """Trial round: its cohort, its sum of messages before noise, and its step of the model."""

    episode: int
    t: int
    cohort: Cohort
    public: Public
    total: Tensor  # [d'], the engine's sum: without noise, unless clients add noise in their steps
    moved: Tensor  # [d], model before minus model after the round: the decoded mean


@codec.hides_values
@dataclass(frozen=True)
class TrialRounds:
    """Copy of a plan with few clients, and the trial rounds that were run with it."""

    plan: Plan
    rounds: list[TrialRound]
    size: int = SIZE  # coordinates of the model


def run_trial_rounds(plan: Plan, seed: int = 0, rounds: int = ROUNDS) -> TrialRounds:
    """Run about `rounds` trial rounds of a copy of the plan with few clients, in at least two independent episodes.

    If the noise is correlated over rounds, each episode is interrupted once and resumed from a checkpoint.
    """
    small = shrink_plan(plan)
    task, length, found = synthetic_task(small), min(small.rounds, EPISODE), list[TrialRound]()
    for episode in range(max(2, math.ceil(rounds / length))):
        engine, streams = RecordingEngine(), Seeded((seed << 32) + (1 << 31) + episode)
        before, state = task.layout.flatten(task.model), None
        for leg in ((length + 1) // 2, length // 2) if small.release.correlated else (length,):
            begun = run(small, task, engine=engine, streams=streams, state=state, eval_every=small.rounds + 1)
            for done in islice(begun, leg):
                (job, collected), after = engine.seen.pop(), small.server.result(done.state.memory)
                found.append(TrialRound(episode, done.t, job.cohort, job.public, collected.total, before - after))
                before = after
            state = Checkpoint.of_bytes(Checkpoint(done.state, "", PrefixHash(), PrefixHash()).to_bytes()).state
    return TrialRounds(small, found)


@codec.hides_values
@dataclass(frozen=True)
class _Unchecked(Collected):
    """Sum of messages that the loop does not check, because the audit must see an invalid sum."""

    def check(self, plan: Plan, size: int, cohort: Cohort) -> None:
        pass


@codec.hides_values
@dataclass(frozen=True)
class RecordingEngine(InProcess):
    """In-process engine that appends each job and its collected sum to `seen`."""

    absent: frozenset[int] = frozenset()  # clients that never answer
    seen: list[tuple[ClientJob, Collected]] = field(default_factory=list)

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> InProcessWorker:
        worker = super().prepare(plan, task, streams)
        collect = worker.collect

        def record(job: ClientJob) -> Collected:
            job = replace(job, cohort=job.cohort[~np.isin(job.cohort, list(self.absent))])
            self.seen.append((job, _Unchecked(**vars(collect(job)))))
            return self.seen[-1][1]

        worker.collect = record  # type: ignore[method-assign]
        return worker


def shrink_plan(plan: Plan) -> Plan:
    """Return a copy of the plan with few clients at the same sampling rates, and SGD with step 1 as its server.

    If the plan's parts refuse a smaller population, the copy has all clients.
    """
    plain = replace(plan, server=Sgd(lr=1.0), postprocess=())
    try:
        clients, rounds = shrink_clients(plan.clients), min(plan.rounds, EPISODE)
        local = shrink_local(plan.local, clients.population, rounds, SIZE // clients.population)
        release = shrink_release(plan.release, clients)
        return replace(plain, rounds=rounds, clients=clients, local=local, release=release)
    except UserError:
        return plain


def shrink_clients(clients: Sampler) -> Sampler:
    """Return a copy of the sampler with fewer clients at the same rate, and about `COHORT` clients in a cohort."""
    share = min(1.0, COHORT / clients.expected, POPULATION / clients.population)
    return clients if share == 1.0 else clients.shrunk(share)


def shrink_release(release: Release, clients: Sampler) -> Release:
    """Return a copy of the release for fewer clients: with fewer required reports and noise multipliers per client."""
    changed: dict[str, Any] = {}
    if getattr(release, "at_least", 0) > clients.expected:
        changed["at_least"] = max(1, int(clients.expected))
    if release.noise_multipliers:
        changed["noise_multipliers"] = release.noise_multipliers[: clients.population]
    return replace(release, **changed) if changed else release  # type: ignore[type-var]


def shrink_local(local: LocalSolver, silos: int, rounds: int, most: int) -> LocalSolver:
    """Return a copy of the local solver for `silos` silos of at most `most` records each."""
    changed: dict[str, Any] = {}
    if local.noise_multipliers:
        changed["noise_multipliers"] = local.noise_multipliers[:silos]
    if local.reads is not None:
        reads = local.reads.for_silos(silos)
        share = min(1.0, most / max(reads.sizes))
        few = tuple(max(1, round(size * share)) for size in reads.sizes)
        changed["records"] = reads.shrunk(few, share, rounds * getattr(local, "steps", 1)) or reads
    return replace(local, **changed) if changed else local  # type: ignore[type-var]


def synthetic_task(plan: Plan) -> Task:
    """Build a task with a linear model w = 0 and loss |w x - y|, with -y so large that a record's gradient is its x.

    If the privacy unit is a client, each gradient has all coordinates and is far beyond the clip norm. If it is a
    record, each record has a coordinate of its own, so that the sum shows which records were read; x is 0 if the local
    solver adds noise in its steps.
    """
    model = nn.Linear(SIZE, 1, bias=False)
    nn.init.zeros_(model.weight)
    reads, population = plan.local.reads, plan.clients.population
    if reads is None:
        signs = 1.0 - 2.0 * (torch.arange(SIZE) % 2)
        x = torch.stack([signs * 1e6, signs * 1e20])  # beyond the clip norm, and where float32 squares overflow
        targets, rows = torch.full((len(x),), -FAR), np.arange(population) % len(x)
        held = Clients(Records(x, targets), rows, np.arange(population + 1))
    else:
        sizes = [reads.size(silo) for silo in range(population)]
        rows = np.arange(sum(sizes), dtype=np.int64)
        pull = 0.0 if isinstance(plan.bound, AlreadyPrivate) else 1e6 * at(getattr(plan.local, "clip_norm", 1.0), 0)
        x = pull * torch.eye(SIZE)
        held = Clients(Records(x, torch.full((SIZE,), -FAR)), rows % SIZE, np.cumsum([0, *sizes]).astype(np.int64))
    return Task(model, held, loss="absolute", public=Records(torch.ones(1, SIZE), torch.full((1,), -FAR)))
