"""Trial rounds of the behaviour audit: the loop and an engine run a plan's rounds on few clients with synthetic data.

All parts are the plan's, except the server, which is SGD with step 1, so that a round's step is the decoded mean.
Cohorts and silos are smaller, at the same sampling rates. Every episode has its own random streams.
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
    """One trial round: cohort, sum before the noise, and step of the model."""

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
    """Run about `rounds` rounds of a copy of the plan with few clients, in at least two episodes (independent runs).

    Under correlated noise an episode is interrupted once and resumed from a checkpoint.
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
    """Sum of messages that the loop accepts without its own checks, because the audit examines the sum."""

    def check(self, plan: Plan, size: int, cohort: Cohort) -> None:
        pass


@codec.hides_values
@dataclass(frozen=True)
class RecordingEngine(InProcess):
    """In-process engine that records every job and its sum in `seen`."""

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
    """Return the plan with few clients at the same sampling rates, and plain averaging as its server optimizer.

    A plan that allows no smaller population is returned with all its clients.
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
    """Return the sampler with fewer clients at the same rate, so that a cohort has about `COHORT` clients."""
    share = min(1.0, COHORT / clients.expected, POPULATION / clients.population)
    return clients if share == 1.0 else clients.shrunk(share)


def shrink_release(release: Release, clients: Sampler) -> Release:
    """Return the release for fewer clients: its required number of reports and its noise multipliers per client are
    cut.
    """
    changed: dict[str, Any] = {}
    if getattr(release, "at_least", 0) > clients.expected:
        changed["at_least"] = max(1, int(clients.expected))
    if release.noise_multipliers:
        changed["noise_multipliers"] = release.noise_multipliers[: clients.population]
    return replace(release, **changed) if changed else release  # type: ignore[type-var]


def shrink_local(local: LocalSolver, silos: int, rounds: int, most: int) -> LocalSolver:
    """Return the solver for this many silos of at most `most` records each."""
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
    """Build a task with a linear model at zero and loss |w x - y|, y so large that a record's gradient is always its x.

    If clients are protected, every client's gradient has all coordinates, far beyond the clip norm. If records are
    protected, every record has a coordinate of its own, so that the sum shows which records were read; gradients are 0
    where the silo itself adds noise.
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
