"""Runs that the ranks of a process group, and one process alone, must finish alike; and two that they must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.silos import SIZES as SILOS
from tests.silos import planned, silos
from tests.tiny import SIZES, clients, mlp, noise, plan, seeded
from torch import Tensor, nn

from sordino.data.clients import Records
from sordino.engines.base import ClientJob, Engine
from sordino.engines.inprocess import InProcess, InProcessWorker
from sordino.loop import run
from sordino.parts.encoding import Adaptive, Clip
from sordino.parts.local_solvers import LocalSgd, NoiseStream
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.record_solvers import NoisyLocalSgd
from sordino.parts.releases import Forward, LocalNoise, NoiseShares, ShuffledNoise
from sordino.parts.samplers import Poisson, RoundRobin
from sordino.parts.sparsify import PublicDataMask, PublicMask
from sordino.plan import Plan
from sordino.rng import Secure, Seeded, Streams
from sordino.task import Task

ONE, SEED = InProcess(), Seeded(5)


@dataclass(frozen=True)
class Case:
    """One run; `each` is how a process runs its clients."""

    plan: Plan
    task: Task
    each: InProcess = ONE
    streams: Streams = SEED

    def play(self, engine: Engine) -> dict[str, Any]:
        """What the run ends with, and the figures of every round."""
        start = self.task.layout.flatten(self.task.model)
        done = list(run(self.plan, self.task, engine=engine, streams=self.streams))
        figures = [{**one.metrics, **one.diagnostics} for one in done]
        return {"params": self.plan.server.result(done[-1].state.memory), "start": start, "figures": figures}


def with_test(model: nn.Module, shape: tuple[int, ...] = (4,), wanted: Tensor | None = None) -> Task:
    """Ragged clients, 33 test records and 9 public ones."""
    labels = torch.arange(33) % 3 if wanted is None else wanted
    test, public = Records(noise(33, *shape, seed=9), labels), Records(noise(9, *shape, seed=10), labels[:9])
    return Task.of(model, clients(SIZES, shape), test=test, public=public)


def numbers() -> Task:
    """Targets that are numbers, so that the figure is a root mean square."""
    held = [(x, x[:, :1]) for x, _ in clients()]
    return Task.of(seeded(nn.Linear(4, 1)), held, test=(noise(7, 4), noise(7, 1)), loss="mse")


def conv() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, 3)))


SGD = LocalSgd(lr=0.3, epochs=2, batch=2, momentum=0.5)
OWN = NoisyLocalSgd(FixedRecords(2, SILOS), 1.0, 2.0, 0.3, 3)
SHARES = NoiseShares(1.0, 2)
CASES = {
    "central noise": Case(plan(rounds=3, local=SGD, clients=Poisson(6, 0.7)), with_test(mlp())),
    "one client at a time": Case(plan(local=SGD), with_test(conv(), (1, 6, 6)), InProcess("sequential")),
    "chunks of two": Case(plan(local=SGD), with_test(mlp()), InProcess("batched", 2)),
    "noise shares": Case(plan(release=SHARES), with_test(mlp())),
    "local noise": Case(plan(encode=(Clip(1.0, 1),), release=LocalNoise(Laplace(2.0))), with_test(mlp())),
    "shuffled": Case(plan(release=ShuffledNoise(Gaussian(3.0), 3)), with_test(mlp())),
    "noise of the solver's own": Case(planned(local=OWN, release=Forward()), silos()),
    "adaptive clip norm": Case(plan(rounds=4, encode=(Clip(Adaptive(0.5)),), local=SGD), with_test(mlp())),
    "mask from public records": Case(
        plan(encode=(PublicMask(0.3, PublicDataMask()), Clip(0.7)), local=SGD), with_test(mlp())
    ),
    "a cohort of one": Case(plan(rounds=6, clients=RoundRobin(6, 1), local=SGD), with_test(mlp())),
    "a cohort of nobody": Case(plan(clients=Poisson(6, 1e-9)), with_test(mlp())),
    "numbers": Case(plan(), numbers()),
}


def wide() -> Task:
    """3030 parameters, so that a standard deviation is measured to 2%."""
    return Task.of(seeded(nn.Linear(100, 30)), clients((8, 8, 8, 8), (100,), 30))


STILL = plan(rounds=1, clients=RoundRobin(4, 4), local=LocalSgd(lr=0.0, epochs=1))  # every message is zero
LOUD = NoisyLocalSgd(FixedRecords(8, (8,)), 1.0, 100.0, 8.0, 1)  # 1.0 / batch * lr = 1: its noise is all there is
SECURE = {  # the standard deviation that the sum of four clients must have, in units of the message
    "central noise": (Case(STILL, wide(), streams=Secure()), 1.0),
    "noise shares": (Case(replace(STILL, release=NoiseShares(1.0, 2)), wide(), streams=Secure()), 2.0**0.5),
    "noise of the solver's own": (
        Case(replace(STILL, encode=(), local=LOUD, release=Forward()), wide(), streams=Secure()),
        200.0,
    ),
}

Fold = Callable[[InProcessWorker, ClientJob], tuple[Tensor, list[Tensor]]]


@contextmanager
def every_rank_adds_the_noise(rank: int) -> Iterator[None]:
    """The server's noise is added to every partial sum, and to the total once more."""
    honest: Fold = InProcessWorker.fold

    def fold(self: InProcessWorker, job: ClientJob) -> tuple[Tensor, list[Tensor]]:
        total, norms = honest(self, job)
        return self.plan.release.on_server(total, self.streams.at(job.public.t, "server noise")), norms

    yield from _while("fold", fold)


@contextmanager
def noise_of_rank_one_is_lost(rank: int) -> Iterator[None]:
    """Clients of rank 1 send what they should, but for the noise of their own."""
    honest = InProcessWorker.noise_streams

    def streams(self: InProcessWorker, owners: Any, t: int) -> list[NoiseStream]:
        quiet = replace(self.plan.local, noise_multiplier=1e-9)  # type: ignore[type-var]
        return [replace(one, solver=quiet if rank else one.solver) for one in honest(self, owners, t)]

    yield from _while("noise_streams", streams)


def _while(name: str, instead: Any) -> Iterator[None]:
    honest = getattr(InProcessWorker, name)
    setattr(InProcessWorker, name, instead)
    try:
        yield
    finally:
        setattr(InProcessWorker, name, honest)


SABOTAGE = {"central noise": every_rank_adds_the_noise, "noise of the solver's own": noise_of_rank_one_is_lost}
