"""Promise: the mechanism audit finds six bugs that papers and frameworks have shipped, and passes the correct code.

Each sabotage is a copy of the pipeline with one step broken; the promise it is held to is the correct plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino.audit.mechanism import MechanismAudit, Pipeline, audit_mechanism
from sordino.audit.worst_case import WIDTH
from sordino.engines.base import ClientJob, Collected
from sordino.parts.encode import Clip
from sordino.parts.local import LocalSgd
from sordino.parts.samplers import Cohort, FixedSize, Poisson, RoundRobin, Sampler
from sordino.parts.server import Sgd
from sordino.plan import Plan
from sordino.privacy.mechanisms import Gaussian
from sordino.privacy.release import CentralNoise, NoiseShares, Release
from sordino.rng import Seeded, Streams
from sordino.run import noised_mean, run

DELTA = 1e-5


def plan(clients: Sampler, release: Release) -> Plan:
    local = LocalSgd(lr=0.1, steps=1)
    return Plan(rounds=8, clients=clients, local=local, encode=(Clip(0.7),), release=release, server=Sgd(lr=1.0))


class ClipPerTensor(Pipeline):
    """Each of four tensors is clipped to the radius: the message reaches sqrt(4) (PRIVACY.md rule 5)."""

    def encode(self, rows: Tensor) -> Tensor:
        return torch.cat([super(ClipPerTensor, self).encode(part) for part in torch.split(rows, WIDTH, dim=1)], dim=1)


class NoiseHalved(Pipeline):
    """Half of the noise that was billed."""

    def released(self, messages: Tensor, cohort: Cohort, copies: int, streams: Streams) -> Tensor:
        clean = messages.sum(0, dtype=torch.float64) / self.plan.clients.expected
        return (clean + super().released(messages, cohort, copies, streams)) / 2


class ShareLost(Pipeline):
    """One client's share of the noise never reaches the sum; its message does."""

    def released(self, messages: Tensor, cohort: Cohort, copies: int, streams: Streams) -> Tensor:
        collected = Collected(messages.sum(0, dtype=torch.float64).repeat(copies), len(cohort))
        return noised_mean(self.plan, collected, cohort[:-1], streams, self.t).view(copies, -1)


class TopKAfterNoise(Pipeline):
    """Each client keeps the largest coordinates of its NOISED message: others' noise thins out (rule 7)."""

    def released(self, messages: Tensor, cohort: Cohort, copies: int, streams: Streams) -> Tensor:
        total = torch.zeros(copies, messages.shape[1], dtype=torch.float64)
        for message, client in zip(messages, cohort, strict=True):
            noised = self.message(message, int(client), copies, streams)
            kept = noised.abs().topk(5, dim=1).indices
            total.scatter_add_(1, kept, noised.gather(1, kept))
        return total / self.plan.clients.expected


class RealisedCohort(Pipeline):
    """The sum over as many clients as came: the noise scale tells how many (rule 4)."""

    def released(self, messages: Tensor, cohort: Cohort, copies: int, streams: Streams) -> Tensor:
        mean = super().released(messages, cohort, copies, streams)
        return mean * (self.plan.clients.expected / max(len(cohort), 1))


class SeededByRound(Pipeline):
    """Cohorts that anybody can draw again from the round's number (rule 3)."""

    def cohort(self, rng: np.random.Generator) -> Cohort:
        return self.plan.clients.draw(self.t, np.random.default_rng(self.t))


@dataclass(frozen=True)
class Case:
    """A plan, its broken copy, who finds it, and the separation that the audit must at least prove."""

    plan: Plan
    broken: Callable[[Plan], Pipeline]
    adversary: str
    at_least: float
    trials: int = 60_000


GAUSSIAN = plan(RoundRobin(20, 5), CentralNoise(Gaussian(1.0)))
POISSON = plan(Poisson(50, 0.2), CentralNoise(Gaussian(1.0)))
CASES = {
    "clip per tensor": Case(GAUSSIAN, ClipPerTensor, "cohort", 1.85),
    "noise halved": Case(GAUSSIAN, NoiseHalved, "cohort", 1.85),
    "noise share lost": Case(plan(RoundRobin(20, 4), NoiseShares(1.0, at_least=2)), ShareLost, "cohort", 1.3),
    "top-k after noise": Case(plan(RoundRobin(20, 8), NoiseShares(1.0, at_least=8)), TopKAfterNoise, "cohort", 1.4),
    "divided by the realised cohort": Case(POISSON, RealisedCohort, "models", 0.9, 20_000),
    "cohort seeded by the round": Case(POISSON, SeededByRound, "models", 0.8, 20_000),
}


@cache
def correct(planned: Plan, trials: int) -> dict[str, MechanismAudit]:
    return {audit.adversary: audit for audit in audit_mechanism(planned, delta=DELTA, trials=trials)}


@cache
def broken(name: str) -> MechanismAudit:
    case = CASES[name]
    found = audit_mechanism(case.plan, delta=DELTA, trials=case.trials, pipeline=case.broken(case.plan))
    return next(audit for audit in found if audit.adversary == case.adversary)


@pytest.mark.parametrize("name", CASES)
def test_the_sabotage_is_caught_and_the_correct_code_passes(name: str) -> None:
    case, caught = CASES[name], broken(name)
    promised = correct(case.plan, case.trials)
    assert all(audit.passed for audit in promised.values())
    assert not caught.passed
    assert caught.lower_mu > max(case.at_least, 1.2 * caught.upper_mu)
    assert caught.upper_epsilon == promised[case.adversary].upper_epsilon  # the promise did not move


def test_the_realised_cohort_shows_in_the_spread_of_the_noise_and_breaks_the_epsilon() -> None:
    caught = broken("divided by the realised cohort")
    assert "spread" in caught.attack
    assert caught.lower_epsilon > 1.3 * caught.upper_epsilon


class Watching:
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
    task = SimpleNamespace(clients=clients, layout=layout, model=None, evaluate=lambda _: {}, public=None)
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
