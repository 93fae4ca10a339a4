"""Promise: the audit finds 24 bugs, the 19 of a review among them, and passes the correct code.

Each sabotage breaks one step of the code that runs, or of a copy of it; the promise is the correct plan's.
`sordino audit FILE --mechanism` asks all of these questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.audit.attacks import MechanismAudit
from sordino.audit.mechanism import Pipeline, audit_mechanism
from sordino.audit.noise_test import failures, unexamined
from sordino.audit.summary import audit_behaviour
from sordino.engines.base import ClientJob, Collected, Worker
from sordino.engines.dense_clients import LinearClients
from sordino.loop import run
from sordino.parts import encoding
from sordino.parts.encoding import Clip
from sordino.parts.gradients import Ball, Batch
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import AllRecords, FixedRecords, PoissonRecords
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import CentralNoise, Forward, LocalNoise, NoiseShares, Release
from sordino.parts.samplers import Cohort, Everyone, FixedSize, Poisson, RoundRobin, Sampler
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.rng import Seeded, Streams

DELTA, ROUNDS = 1e-5, 96
TENSORS, EACH = "sensitivity to one client, tensors model, batched", "noise of each round"
RECORD, PAIR = "sensitivity to one record, linear model", "noise of two rounds"
Array = NDArray[np.float64]
Patch = pytest.MonkeyPatch


def plan(clients: Sampler, release: Release, local: Any = None) -> Plan:
    local = local or LocalSgd(lr=0.1, steps=1)
    steps = () if local.reads else (Clip(0.7),)
    return Plan(rounds=8, clients=clients, local=local, encode=steps, release=release, server=Sgd(lr=1.0))


POISSON = plan(Poisson(50, 0.2), CentralNoise(Gaussian(1.0)))
TURNS = plan(RoundRobin(20, 5), CentralNoise(Gaussian(1.0)))
SHARES = plan(RoundRobin(20, 4), NoiseShares(1.0, at_least=2))
TOP_K = plan(RoundRobin(20, 8), NoiseShares(1.0, at_least=8))
SILOS = plan(Everyone(2), LocalNoise(Gaussian(1.5)), BatchGradient(FixedRecords(4, (16,)), 0.7))
DP_SGD = plan(Everyone(1), CentralNoise(Gaussian(1.5)), BatchGradient(PoissonRecords(8.0, (64,)), 0.7))
NOISY = plan(Everyone(2), Forward(), NoisyLocalSgd(AllRecords((8,)), 0.7, 1.5, 0.1, steps=2))


# ---- what is broken --------------------------------------------------------------------------------------------------


def noise(change: Callable[[Array, np.random.Generator], Array]) -> Callable[[Patch], None]:
    """The Gaussian's draw, changed."""
    drawn = Gaussian.sample

    def sample(self: Gaussian, size: int, rng: np.random.Generator) -> Array:
        return change(drawn(self, size, rng) / self.noise_multiplier, rng) * self.noise_multiplier

    return lambda patch: patch.setattr(Gaussian, "sample", sample)


def put(owner: Any, name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def one_silent(z: Array, rng: np.random.Generator) -> Array:
    z[min(7, len(z) - 1)] = 0.0
    return z


def uneven(z: Array, rng: np.random.Generator) -> Array:
    return z * np.where(np.arange(len(z)) < len(z) // 4, 3.0, 0.5)


def twice_the_rate(self: Poisson, t: int, rng: np.random.Generator, drawn: Any = Poisson.draw) -> Cohort:
    return cast(Cohort, drawn(replace(self, rate=2 * self.rate), t, rng))


def twice_the_records(
    self: PoissonRecords, t: int, silo: int, size: int, rng: np.random.Generator, drawn: Any = PoissonRecords.draw
) -> Cohort:
    return cast(Cohort, drawn(replace(self, batch=2 * self.batch), t, silo, size, rng))


def of_the_round(self: Poisson, t: int, rng: np.random.Generator, drawn: Any = Poisson.draw) -> Cohort:
    return cast(Cohort, drawn(self, t, np.random.default_rng(t)))


def always_as_many(self: Poisson, t: int, rng: np.random.Generator) -> Cohort:
    return FixedSize(self.population, round(self.expected)).draw(t, rng)


def per_tensor(self: Clip, rows: Tensor, public: Any, slopes: Any = None, whole: Any = Clip.encode) -> Tensor:
    parts = torch.chunk(rows, 4, dim=1)
    return torch.cat([cast(Tensor, whole(self, part, public, slopes)) for part in parts], dim=1)


def one_share_less(self: Any, total: Tensor, cohort: Cohort, rng: Any, whole: Any = NoiseShares.in_sum) -> Tensor:
    return cast(Tensor, whole(self, total, cohort[1:], rng))


def one_silo_less(self: Any, total: Tensor, cohort: Cohort, rng: Any, whole: Any = LocalNoise.in_sum) -> Tensor:
    return cast(Tensor, whole(self, total, cohort[1:], rng))


def following(self: CentralNoise, total: Tensor, cohort: Cohort, coins: Any, memory: Any) -> tuple[Tensor, Any]:
    share: float = (len(cohort) / 8) ** 0.5
    return total + share * self.on_server(torch.zeros_like(total), coins("server noise")), memory


def the_same_again(self: CentralNoise, total: Tensor, rng: Any, whole: Any = CentralNoise.on_server) -> Tensor:
    return cast(Tensor, whole(self, total, np.random.default_rng(0)))


def by_those_who_came(self: CentralNoise, expected: float, received: int) -> float:
    return float(max(received, 1))


def tiled(z: Array, rng: np.random.Generator) -> Array:
    return z[:1].repeat(len(z))


def the_mean(self: LinearClients, w: Tensor, batch: Batch, ball: Ball) -> Tensor:
    """The batch's mean gradient is clipped, not each record's (PRIVACY rule 8)."""
    mean = self.gradient(w, batch)
    inside = (ball.clip_norm / mean.norm(dim=1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)
    total: Tensor = mean * inside * batch.y.shape[1]
    return total


def half_in_a_step(self: NoisyLocalSgd, *of: Any, whole: Any = NoisyLocalSgd._noise) -> Iterator[Tensor]:
    for drawn in whole(self, *of):
        yield drawn / 2


def first_records(self: FixedRecords, t: int, silo: int, size: int, rng: Any) -> Cohort:
    return np.arange(self.batch, dtype=np.int64)


@dataclass(frozen=True)
class Sabotage:
    """A plan, how the code under it is broken, and the question whose answer gives it away."""

    plan: Plan
    breaks: Callable[[Patch], None]
    question: str


BROKEN = {
    "one coordinate without noise": Sabotage(POISSON, noise(one_silent), "noise of each coordinate"),
    "noise x3 on one tensor, x.5 on others": Sabotage(POISSON, noise(uneven), "noise of each block of coordinates"),
    "sampling at 2q": Sabotage(POISSON, put(Poisson, "draw", twice_the_rate), "cohort: rate"),
    "noise x.98": Sabotage(POISSON, noise(lambda z, _: z * 0.98), "noise of all coordinates"),
    "tails cut at 3.5 sigma": Sabotage(POISSON, noise(lambda z, _: z.clip(-3.5, 3.5)), "tails of the noise"),
    "clip per tensor": Sabotage(TURNS, put(Clip, "encode", per_tensor), TENSORS),
    "noise halved": Sabotage(TURNS, noise(lambda z, _: z / 2), "noise of all coordinates"),
    "noise forgotten": Sabotage(
        TURNS, put(CentralNoise, "on_server", lambda self, total, rng: total), "noise of each round"
    ),
    "noise share lost": Sabotage(SHARES, put(NoiseShares, "in_sum", one_share_less), "noise of all coordinates"),
    "divided by the realised cohort": Sabotage(
        POISSON,
        put(CentralNoise, "denominator", by_those_who_came),
        "noise along the sum",
    ),
    "cohort seeded by the round": Sabotage(POISSON, put(Poisson, "draw", of_the_round), "cohort: secrecy"),
    "noise that follows the cohort": Sabotage(POISSON, put(CentralNoise, "noised", following), EACH),
    "the mean is clipped, not the records": Sabotage(SILOS, put(LinearClients, "clipped", the_mean), RECORD),
    "records are not clipped": Sabotage(
        SILOS,
        put(LinearClients, "clipped", lambda self, w, batch, ball: self.gradient(w, batch) * batch.y.shape[1]),
        RECORD,
    ),
    "a silo forgets its noise": Sabotage(SILOS, put(LocalNoise, "in_sum", one_silo_less), "noise of all coordinates"),
    "half the noise in a local step": Sabotage(
        NOISY, put(NoisyLocalSgd, "_noise", half_in_a_step), "noise of each round"
    ),
    "a batch that is always the same": Sabotage(SILOS, put(FixedRecords, "draw", first_records), "batch: rate of each"),
    # beyond the review
    "records drawn at twice the rate": Sabotage(
        DP_SGD, put(PoissonRecords, "draw", twice_the_records), "trial rounds, batch: rate"
    ),
    "the same noise in every round": Sabotage(
        POISSON, put(CentralNoise, "on_server", the_same_again), "noise of two rounds"
    ),
    "one draw for all coordinates": Sabotage(POISSON, noise(tiled), "noise of two coordinates"),
    "Laplace noise of the same size": Sabotage(
        POISSON, noise(lambda z, rng: rng.laplace(scale=0.5**0.5, size=len(z))), "shape of the noise"
    ),
    "a cohort of fixed size, accounted as Poisson": Sabotage(
        POISSON, put(Poisson, "draw", always_as_many), "cohort: spread of sizes"
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_run_as_planned_is_caught(name: str, monkeypatch: Patch) -> None:
    case = BROKEN[name]
    case.breaks(monkeypatch)
    assert case.question in {found.question for found in failures(audit_behaviour(case.plan, rounds=ROUNDS))}


@pytest.mark.parametrize("planned", [POISSON, TURNS, SHARES, TOP_K, SILOS, DP_SGD, NOISY], ids=lambda p: p.release.kind)
def test_the_correct_code_runs_as_planned(planned: Plan) -> None:
    found = audit_behaviour(planned, rounds=ROUNDS, seed=1)
    assert failures(found) == []
    assert unexamined(found) == []


# ---- and what beats the certificate ----------------------------------------------------------------------------------


class TopKAfterNoise(Pipeline):
    """Each client keeps the largest coordinates of its NOISED message: others' noise thins out (rule 7)."""

    def released(self, messages: Tensor, cohort: Cohort, copies: int, streams: Streams) -> Tensor:
        total = torch.zeros(copies, messages.shape[1], dtype=torch.float64)
        for message, client in zip(messages, cohort, strict=True):
            noised = self.message(message, int(client), copies, streams)
            kept = noised.abs().topk(5, dim=1).indices
            total.scatter_add_(1, kept, noised.gather(1, kept))
        return total / self.plan.clients.expected


@dataclass(frozen=True)
class Beaten:
    """A plan, how it is broken, who finds it, and the separation that the audit must at least prove."""

    plan: Plan
    adversary: str
    at_least: float
    breaks: Callable[[Patch], None] = lambda _: None
    pipeline: Callable[[Plan], Pipeline] = Pipeline
    trials: int = 60_000


BEATEN = {
    "clip per tensor": Beaten(TURNS, "cohort", 1.85, put(Clip, "encode", per_tensor)),
    "noise halved": Beaten(TURNS, "cohort", 1.85, noise(lambda z, _: z / 2)),
    "noise share lost": Beaten(SHARES, "cohort", 1.3, put(NoiseShares, "in_sum", one_share_less)),
    "top-k after noise": Beaten(TOP_K, "cohort", 1.4, pipeline=TopKAfterNoise),
    "divided by the realised cohort": Beaten(
        POISSON,
        "models",
        0.9,
        put(CentralNoise, "denominator", by_those_who_came),
        trials=20_000,
    ),
    "cohort seeded by the round": Beaten(POISSON, "models", 0.8, put(Poisson, "draw", of_the_round), trials=20_000),
    "a message that is not a number": Beaten(
        TURNS, "cohort", 1.0, put(encoding, "finite_rows", lambda rows, norms: rows), trials=4000
    ),
}


@cache
def correct(planned: Plan, trials: int) -> dict[str, MechanismAudit]:
    return {audit.adversary: audit for audit in audit_mechanism(planned, delta=DELTA, trials=trials)}


@pytest.mark.parametrize("name", BEATEN)
def test_the_sabotage_beats_the_certificate_and_the_correct_code_does_not(name: str, monkeypatch: Patch) -> None:
    case = BEATEN[name]
    promised = correct(case.plan, case.trials)
    assert all(audit.passed for audit in promised.values())
    case.breaks(monkeypatch)
    found = audit_mechanism(case.plan, delta=DELTA, trials=case.trials, pipeline=case.pipeline(case.plan))
    caught = next(audit for audit in found if audit.adversary == case.adversary)
    assert not caught.passed
    assert caught.lower_mu > max(case.at_least, 1.2 * caught.upper_mu)
    assert caught.upper_epsilon == promised[case.adversary].upper_epsilon  # the promise did not move
    if name == "divided by the realised cohort":  # shows in the spread of the noise, and breaks the epsilon
        assert "spread" in caught.attack
        assert caught.lower_epsilon > 1.3 * caught.upper_epsilon


def test_all_nineteen_of_the_review_are_in_the_tables() -> None:
    assert len(set(BROKEN) | set(BEATEN)) == 24


class Watching(Worker):
    """A worker that writes down the cohorts that the loop asks it for."""

    def __init__(self) -> None:
        self.cohorts: list[tuple[int, ...]] = []

    def collect(self, job: ClientJob) -> Collected:
        self.cohorts.append(tuple(job.cohort.tolist()))
        return Collected(torch.zeros(len(job.start), dtype=torch.float64), len(job.cohort))


def cohorts_of_a_run(clients: Sampler, seed: int) -> list[tuple[int, ...]]:
    """What `run` itself draws, without data or model."""
    worker = Watching()
    engine = SimpleNamespace(offers=frozenset({"secure_sum", "shuffler"}), prepare=lambda *_: worker)
    layout = SimpleNamespace(flatten=lambda _: torch.zeros(3))
    task = SimpleNamespace(
        clients=clients, layout=layout, model=torch.nn.Linear(1, 1), evaluate=lambda _: {}, public=None, waiting=(),
        knows_shapes=False, client_test=None,
    )  # fmt: skip
    planned = plan(clients, CentralNoise(Gaussian(1.0)))
    list(run(planned, cast(Any, task), engine=cast(Any, engine), streams=Seeded(seed)))
    return worker.cohorts


@pytest.mark.parametrize("clients", [Poisson(50, 0.2), Poisson(50, 0.2, cap=12), FixedSize(50, 10)], ids=str)
def test_a_run_draws_its_cohorts_from_secret_streams(clients: Sampler) -> None:
    """Other secrets, other cohorts, in every round; the same secret, the same run."""
    first, other, again = (cohorts_of_a_run(clients, seed) for seed in (1, 2, 1))
    assert len(first) == 8
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))
    assert len(set(first)) == 8  # and rounds differ from each other


@pytest.mark.parametrize("clients", [Poisson(50, 0.2), Poisson(50, 0.2, cap=12), FixedSize(50, 10)], ids=str)
def test_a_random_sampler_does_not_draw_from_the_round_number(clients: Sampler) -> None:
    drawn = {tuple(clients.draw(3, Seeded(seed).at(3, "cohort")).tolist()) for seed in range(20)}
    assert len(drawn) == 20
