"""Canaries of one training: bounds that hold, runs that pass, and noise that is missing is found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.commands import federation, sordino
from tests.tiny import noise
from torch import nn

from sordino.accounting.composition import Line
from sordino.accounting.events import GaussianNoise
from sordino.audit.training_attacks import (
    SHARES,
    Guesses,
    audit_canaries,
    chance,
    gaussian_inverse,
    guesses,
    least_epsilon,
    least_mu,
    lower_bounds,
    rejects,
)
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import AllRecords, FixedRecords, PoissonRecords
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import CentralNoise, Forward, LocalNoise, NoiseShares, Release
from sordino.parts.samplers import Everyone, FixedSize, Poisson, Sampler
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.task import Task

DELTA = 1e-5


def plan(clients: Sampler, release: Release, local: Any = None, rounds: int = 3) -> Plan:
    local = local or LocalSgd(lr=0.5, steps=1)
    steps = () if local.reads else (Clip(0.1),)
    return Plan(rounds=rounds, clients=clients, local=local, encode=steps, release=release, server=Sgd(lr=0.1))


def task(sizes: list[int]) -> Task:
    """A linear model of many features, so that canaries pull apart."""
    x, y = noise(sum(sizes), 200, seed=1), torch.arange(sum(sizes)) % 5
    model = nn.Linear(200, 5)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return Task.of(model, list(zip(torch.split(x, sizes), torch.split(y, sizes), strict=True)))


def cases(z: float, rounds: int = 4) -> dict[str, tuple[Plan, list[int]]]:
    """Plans of both units, and the sizes of their clients."""
    poisson = BatchGradient(PoissonRecords(100, (160,)), 0.5)
    fixed = BatchGradient(FixedRecords(50, (80,)), 0.5)
    steps = NoisyLocalSgd(AllRecords((80,)), 0.5, 2 * z, 0.1, 1)
    return {
        "clients, poisson": (plan(Poisson(150, 0.6), CentralNoise(Gaussian(z)), None, rounds), [2] * 150),
        "clients, everyone": (plan(Everyone(150), CentralNoise(Gaussian(2 * z)), None, rounds), [1] * 150),
        "clients, shares": (plan(FixedSize(150, 90), NoiseShares(z, at_least=90), None, rounds), [1] * 150),
        "records, dp-sgd": (plan(Everyone(1), CentralNoise(Gaussian(z)), poisson, rounds), [160]),
        "records, silos": (plan(Everyone(2), LocalNoise(Gaussian(2 * z)), fixed, rounds), [80] * 2),
        "records, noise in steps": (plan(Everyone(2), Forward(), steps, rounds), [80] * 2),
    }


@pytest.mark.parametrize("name", cases(1.0))
def test_a_correct_run_stays_below_its_certificate(name: str) -> None:
    planned, sizes = cases(1.0)[name]
    found = audit_canaries(planned, task(sizes), delta=DELTA, most=150)
    assert found.passed
    assert found.unit == planned.unit
    assert found.lower_epsilon < found.upper_epsilon
    assert found.right > 0.55 * found.guessed  # not vacuous: most guesses are right


@pytest.mark.parametrize("name", ["clients, poisson", "clients, everyone", "records, dp-sgd", "records, silos"])
def test_noise_that_is_missing_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, sizes = cases(8.0)[name]  # little is promised: 150 canaries cannot refute much
    monkeypatch.setattr(Gaussian, "sample", lambda self, size, rng: np.full(size, 1e-3))
    found = audit_canaries(planned, task(sizes), delta=DELTA, most=150)
    assert not found.passed
    assert found.right > 0.85 * found.guessed


def test_a_gaussian_release_gives_what_the_papers_find() -> None:
    """mu = 1 (epsilon 4.38) and mu = .5 (epsilon 2.0): 1.2 to 2 and .3 to 1 of it, more if the curve is known."""
    rng = np.random.default_rng(0)
    for mu, least, more in ((1.0, 1.2, 1.8), (0.5, 0.3, 0.5)):
        line, inside = Line("models", "zero_out", ((GaussianNoise(1 / mu), 1),)), rng.random(1000) < 0.5
        scores = np.where(inside, mu, 0.0) + rng.standard_normal(1000)
        found = lower_bounds(scores, inside, line, DELTA, "client", 1)
        assert found.passed
        assert least < found.lower_epsilon < found.upper_epsilon
        assert more < found.gaussian_epsilon < found.upper_epsilon
        assert 0.3 * mu < found.lower_mu < mu


def test_all_right_is_worth_what_randomised_response_says() -> None:
    """P[100 of 100] = expit(epsilon)^100 at delta 0."""
    rate = 0.05 ** (1 / 100)
    assert least_epsilon(Guesses(100, 100, 100), 0.0, 0.05) == pytest.approx(math.log(rate / (1 - rate)), abs=1e-6)
    assert chance(Guesses(100, 100, 100), 1.0, 0.0) == pytest.approx((1 / (1 + math.exp(-1))) ** 100, rel=1e-6)
    assert least_epsilon(Guesses(100, 100, 50), 0.0, 0.05) == 0.0
    assert least_mu(Guesses(100, 100, 50), 0.05) == 0.0


def test_delta_costs_its_share() -> None:
    found = Guesses(1000, 200, 170)
    bounds = [least_epsilon(found, delta, 0.05) for delta in (0.0, 1e-6, 1e-5, 1e-3)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]


def test_the_truth_is_refuted_no_more_often_than_said() -> None:
    rng, wrong = np.random.default_rng(1), np.zeros(2)
    for _ in range(200):
        inside = rng.random(200) < 0.5
        scores = np.where(inside, 1.0, 0.0) + rng.standard_normal(200)
        wrong[0] += rejects(gaussian_inverse(1.0), guesses(scores, inside, 0.25), 0.05)
        answers = np.where(rng.random(200) < 1 / (1 + math.exp(-1)), inside, ~inside)
        right = int((answers == inside).sum())
        wrong[1] += chance(Guesses(200, 200, right), 1.0, 0.0) <= 0.05
    assert (wrong <= 0.05 * 200 + 10).all()


def test_guesses_are_the_largest_and_the_smallest_scores() -> None:
    inside = np.array([False, True, False, True])
    assert guesses(np.array([0.0, 3.0, 1.0, 2.0]), inside, 0.5) == Guesses(4, 2, 2)
    assert guesses(np.array([3.0, 0.0, 2.0, 1.0]), inside, 1.0) == Guesses(4, 4, 0)
    assert len(SHARES) == 5


def test_the_command_prints_lower_beside_upper_and_keeps_it_with_the_run(tmp_path: Path) -> None:
    file, folder = federation(tmp_path), tmp_path / "a"
    told = sordino("audit", str(file), "--canaries")
    assert told.code == 0, told.err
    assert "epsilon at least" in told.out
    assert "certified" in told.out
    assert sordino("run", str(file), "--out", str(folder)).code == 0
    kept = sordino("audit", str(folder), "--canaries", "--json").json
    assert kept == json.loads((folder / "audit.json").read_text("utf-8"))["layers"]["canaries"]
    assert kept["canaries"]["lower_epsilon"] <= kept["canaries"]["upper_epsilon"]
    assert sordino("certify", str(folder)).code == 0  # the run itself is as it was
