"""Trial rounds: a plan's rounds run by the loop on a real engine, with few clients and synthetic data, for the audit.

Every part is the plan's. Cohorts and silos are made small at the same rates, and the server is plain, so that a
round's step is the decoded mean itself. Every episode has random streams of its own: what repeats between two of them
was not secret.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino import codec
from sordino.accounting.bounds import AlreadyPrivate
from sordino.data.clients import Clients, Records
from sordino.engines.base import ClientJob, Collected, Engine, Worker
from sordino.engines.inprocess import InProcess
from sordino.errors import UserError
from sordino.loop import Round, run
from sordino.parts.encoding import Public
from sordino.parts.local_solvers import LocalSolver
from sordino.parts.releases import Release
from sordino.parts.samplers import Cohort, Sampler
from sordino.parts.schedules import at
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.rng import Seeded, Streams
from sordino.runs.charge_log import PrefixHash
from sordino.runs.checkpoint import Checkpoint
from sordino.task import Task

SIZE = 1024  # coordinates of the model
ROUNDS, EPISODE = 256, 32  # rounds in all, and at most so many with one seed
FEW, MOST = 8, 20_000  # a cohort, and the largest population
FAR = 1e38  # a target that no prediction reaches: the slope of |w x - y| is x, whatever w


@codec.hides_values
@dataclass(frozen=True)
class TrialRound:
    """One trial round: who took part, the sum before the noise, and the step that the model took."""

    episode: int
    t: int
    cohort: Cohort
    public: Public
    total: Tensor  # [d'], what the engine summed: no noise, unless clients add it in their steps
    moved: Tensor  # [d], by how much the model went down: the decoded mean


@codec.hides_values
@dataclass(frozen=True)
class TrialRounds:
    """The small plan that ran, and its rounds."""

    plan: Plan
    rounds: list[TrialRound]
    size: int = SIZE  # coordinates of the model


def run_trial_rounds(plan: Plan, seed: int = 0, rounds: int = ROUNDS) -> TrialRounds:
    """So many rounds, in all episodes together, of the small copy of the plan, through `run`."""
    small = shrink_plan(plan)
    task, length = synthetic_task(small), min(small.rounds, EPISODE)
    episodes = max(2, math.ceil(rounds / length))
    seeds = [Seeded((seed << 32) + (1 << 31) + episode) for episode in range(episodes)]
    return TrialRounds(small, [one for e, own in enumerate(seeds) for one in _episode(small, task, own, length, e)])


def _episode(plan: Plan, task: Task, streams: Streams, length: int, episode: int) -> Iterator[TrialRound]:
    engine, before = RecordingEngine(InProcess()), task.layout.flatten(task.model)
    for done in _legs(plan, task, engine, streams, length):
        job, collected = engine.seen.pop()
        after = plan.server.result(done.state.memory)
        yield TrialRound(episode, done.t, job.cohort, job.public, collected.total, before - after)
        before = after


def _legs(plan: Plan, task: Task, engine: Engine, streams: Streams, length: int) -> Iterator[Round]:
    """So many rounds; where they share their noise, half of them after a checkpoint was written and read again."""
    state, legs = None, ((length + 1) // 2, length // 2) if plan.release.correlated else (length,)
    for leg in legs:
        begun = run(plan, task, engine=engine, streams=streams, state=state, eval_every=plan.rounds + 1)
        for done in islice(begun, leg):
            yield done
        state = Checkpoint.of_bytes(Checkpoint(done.state, "", PrefixHash(), PrefixHash()).to_bytes()).state


@codec.hides_values
@dataclass(frozen=True)
class RecordingEngine(Engine):
    """An engine that keeps every job and its answer."""

    inner: Engine
    absent: frozenset[int] = frozenset()  # clients of the plan's population that do not exist
    seen: list[tuple[ClientJob, Collected]] = field(default_factory=list)

    @property
    def offers(self) -> frozenset[str]:
        return self.inner.offers

    def prepare(self, plan: Plan, task: Task, streams: Streams) -> Worker:
        return _RecordingWorker(self.inner.prepare(plan, task, streams), self.absent, self.seen)


@codec.hides_values
@dataclass(frozen=True)
class _Examined(Collected):
    """A sum that the audit itself examines, so that the loop does not refuse it first."""

    def check(self, plan: Plan, size: int, cohort: Cohort) -> None:
        """Nothing is refused."""


@codec.hides_values
@dataclass(frozen=True)
class _RecordingWorker(Worker):
    worker: Worker
    absent: frozenset[int]
    seen: list[tuple[ClientJob, Collected]]

    @property
    def header(self) -> dict[str, str | int]:
        return self.worker.header

    def load_client_state(self, stored: Mapping[str, Tensor]) -> None:
        self.worker.load_client_state(stored)

    def close(self) -> None:
        self.worker.close()

    def collect(self, job: ClientJob) -> Collected:
        if self.absent:
            job = replace(job, cohort=job.cohort[~np.isin(job.cohort, list(self.absent))])
        collected = _Examined(**vars(self.worker.collect(job)))
        self.seen.append((job, collected))
        return collected


# ---- smaller plans --------------------------------------------------------------------------------------------------


def shrink_plan(plan: Plan) -> Plan:
    """The same parts at the same rates, for few clients; the plan as it is, but for its server, if it cannot shrink."""
    plain = replace(plan, server=Sgd(lr=1.0), postprocess=())
    try:
        clients = shrink_clients(plan.clients)
        rounds = min(plan.rounds, EPISODE)
        local = shrink_local(plan.local, clients.population, rounds, SIZE // clients.population)
        release = shrink_release(plan.release, clients)
        return replace(plain, rounds=rounds, clients=clients, local=local, release=release)
    except UserError:
        return plain


def shrink_clients(clients: Sampler) -> Sampler:
    """About `FEW` in a cohort, drawn at the same rate; the sampler itself where it does not say how to shrink."""
    share = min(1.0, FEW / clients.expected, MOST / clients.population)
    return clients if share == 1.0 else clients.shrunk(share)


def shrink_release(release: Release, clients: Sampler) -> Release:
    """No more reports asked for, and no more noise multipliers, than there are clients."""
    changed: dict[str, Any] = {}
    if getattr(release, "at_least", 0) > clients.expected:
        changed["at_least"] = max(1, int(clients.expected))
    if release.noise_multipliers:
        changed["noise_multipliers"] = release.noise_multipliers[: clients.population]
    return replace(release, **changed) if changed else release  # type: ignore[type-var]


def shrink_local(local: LocalSolver, silos: int, rounds: int, most: int) -> LocalSolver:
    """The same solver for so many silos of at most `most` records each."""
    changed: dict[str, Any] = {}
    if local.noise_multipliers:
        changed["noise_multipliers"] = local.noise_multipliers[:silos]
    if local.reads is not None:
        reads = local.reads.for_silos(silos)
        share = min(1.0, most / max(reads.sizes))
        few = tuple(max(1, round(size * share)) for size in reads.sizes)
        changed["records"] = reads.shrunk(few, share, rounds * getattr(local, "steps", 1)) or reads
    return replace(local, **changed) if changed else local  # type: ignore[type-var]


# ---- synthetic data -------------------------------------------------------------------------------------------------


def synthetic_task(plan: Plan) -> Task:
    """A linear model at zero under |w x - y| with y out of reach: a record's slope is its x, in every step.

    Unit client: every client pulls all coordinates, far beyond the clip norm. Unit record: every record pulls a
    coordinate of its own, so the sum shows which were read; none pulls where the silo itself adds noise.
    """
    model = nn.Linear(SIZE, 1, bias=False)
    nn.init.zeros_(model.weight)
    reads, population = plan.local.reads, plan.clients.population
    if reads is None:
        signs = 1.0 - 2.0 * (torch.arange(SIZE) % 2)
        x = torch.stack([signs * 1e6, signs * 1e20])  # beyond the clip norm, and where float32 squares overflow
        held = Clients(Records(x, _never(len(x))), np.arange(population) % len(x), np.arange(population + 1))
    else:
        sizes = [reads.size(silo) for silo in range(population)]
        rows = np.arange(sum(sizes), dtype=np.int64)
        pull = 0.0 if isinstance(plan.bound, AlreadyPrivate) else 1e6 * at(getattr(plan.local, "clip_norm", 1.0), 0)
        x = pull * torch.eye(SIZE)
        held = Clients(Records(x, _never(SIZE)), rows % SIZE, np.cumsum([0, *sizes]).astype(np.int64))
    return Task(model, held, loss="absolute", public=Records(torch.ones(1, SIZE), _never(1)))


def _never(count: int) -> Tensor:
    return torch.full((count,), -FAR)
