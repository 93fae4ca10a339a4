"""Beyond the papers: secret coins, correlated noise, or both, at equal epsilon.

Two federations of people who write: MNIST by 500 of its writers, and FEMNIST, whose 105 writers are cut into ten
clients each (a client is a tenth of a writer there: 105 people are too few for an epsilon below 8). Logistic
regression, T = 100 rounds of a tenth of the clients, one local epoch in batches of 10, lr .1, clip .8. The server's
step is chosen for every row by itself, by a run of another seed on images that nobody trains on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from sordino.accounting.accountant import largest_delta
from sordino.accounting.calibration import calibrate
from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.data.records import Dataset
from sordino.models import Logistic, build_seeded
from sordino.parts.correlated_noise import CorrelatedNoise, noise_of_models
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise
from sordino.parts.samplers import CyclicPoisson, Poisson, RoundRobin, Sampler
from sordino.parts.server_optimizers import Sgd
from sordino.parts.strategies import Banded, Strategy
from sordino.plan import Plan
from sordino.recipes.arguments import federated
from sordino.task import Task
from sordino_papers.correlated import PILOTS, accuracy, climbed, values_of
from sordino_papers.once import once
from sordino_papers.panels import curves
from sordino_papers.paper_002_femnist import halved
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import verdict

ROUNDS, SHARE, CUT = 100, 10, 10  # a round takes one client in SHARE; a writer of FEMNIST is CUT clients
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
CHOSEN = "the server's step: another seed on images held out from training, each row by itself; clip, lr as on MNIST"
CHOSEN_AGAIN = CHOSEN.replace("another seed", "three other seeds")
Split = tuple[Task, Records]


def _federation(data: Dataset, parts: list[np.ndarray], held: np.ndarray, see: Callable[..., torch.Tensor]) -> Split:
    """Clients with the rows of each part; what is held out to choose on."""
    x, y = see(data.x), torch.from_numpy(data.y)
    offsets = np.cumsum([0, *(len(part) for part in parts)])
    clients = Clients(Records(x, y), np.concatenate(parts).astype(np.int64), offsets.astype(np.int64))
    model = build_seeded(Logistic(), x.shape[1:], data.classes or 1, 0)
    test = Records(see(data.test_x), torch.from_numpy(data.test_y))
    rows = torch.from_numpy(held)
    return Task(model, clients, test, "cross_entropy"), Records(x[rows], y[rows])


@cache
def writers() -> Split:
    """MNIST by 500 writers; 39 others are held out, the test writers are yet others."""
    data = load("mnist_writers")
    assert data.groups is not None
    who = np.unique(data.groups)
    parts = [np.flatnonzero(data.groups == writer) for writer in who[:500]]
    return _federation(data, parts, np.flatnonzero(np.isin(data.groups, who[500:])), torch.from_numpy)


@cache
def femnist() -> Split:
    """A seventh of each writer's images is held out, the rest dealt to ten clients; 1,677 later images are the test."""
    data, rng = load("femnist"), np.random.default_rng(0)
    assert data.groups is not None
    own = [rng.permutation(np.flatnonzero(data.groups == writer)) for writer in np.unique(data.groups)]
    parts = [part for rows in own for part in np.array_split(rows[len(rows) // 7 :], CUT)]
    return _federation(data, parts, np.concatenate([rows[: len(rows) // 7] for rows in own]), halved)


TASKS = {"MNIST by writer": writers, "FEMNIST": femnist}
POPULATION = {"MNIST by writer": 500, "FEMNIST": 1050}
KINDS: dict[str, Callable[[int], tuple[Sampler, Strategy | None]]] = {
    "Poisson, independent": lambda n: (Poisson(n, 1 / SHARE), None),
    "in turn, 10 bands": lambda n: (RoundRobin(n, n // SHARE, seed=0), Banded(SHARE)),
    "3 sampled groups, 3 bands": lambda n: (CyclicPoisson(n, 3, 3 / SHARE), Banded(3)),
}


def planned(kind: str, population: int, rounds: int = ROUNDS) -> Plan:
    """The run, with noise of noise multiplier 1."""
    clients, strategy = KINDS[kind](population)
    noise = CentralNoise(Gaussian(1.0)) if strategy is None else CorrelatedNoise(Gaussian(1.0), strategy)
    return federated(rounds=rounds, clients=clients, lr=0.1, batch=10, clip_norm=0.8, release=noise, server=Sgd())


@cache
def private(kind: str, population: int, epsilon: float, rounds: int = ROUNDS) -> Plan:
    """At (epsilon, N^-1.1), to one who sees the models."""
    return calibrate(planned(kind, population, rounds), epsilon=epsilon, delta=largest_delta(population))


def _crossing(name: str, kind: str, epsilon: float, step: float, seed: int, choose: bool) -> Row:
    task, held = TASKS[name]()
    plan = replace(private(kind, POPULATION[name], epsilon), server=Sgd(lr=step))
    return {"accuracy": accuracy(plan, task, held if choose else None, seed)}


def crossing(name: str, kind: str, epsilon: float, step: float, seed: int, choose: bool = False) -> float:
    """One run at an epsilon."""
    return float(once(_crossing, name, kind, epsilon, step, seed, choose)["accuracy"])


def crossing_step(name: str, kind: str, epsilon: float, seeds: tuple[int, ...] = PILOTS[-1:]) -> float:
    """By `seeds` that are not reported, on images that nobody trains on."""

    def measured(step: float) -> float:
        return mean(crossing(name, kind, epsilon, step, seed, choose=True) for seed in seeds)

    return climbed(measured, start=epsilon**0.5 / 4)


def crossing_rows(repeats: int, workers: int) -> list[Row]:
    cells = [(name, kind, epsilon) for name in TASKS for epsilon in EPSILONS for kind in KINDS]
    steps = side_by_side(crossing_step, cells, workers)
    jobs = [(*cell, step, seed) for cell, step in zip(cells, steps, strict=True) for seed in range(repeats)]
    keys = ("task", "noise", "epsilon", "step")
    found = side_by_side(crossing, jobs, workers)
    rows = [{**dict(zip(keys, job, strict=False)), "accuracy": v} for job, v in zip(jobs, found, strict=True)]
    return gathered(rows, keys, "accuracy")


def quick() -> Row:
    """Seed 0 of clients in turn on MNIST by writer at the smallest epsilon."""
    job = ("MNIST by writer", "in turn, 10 bands", EPSILONS[0], EPSILONS[0] ** 0.5 / 8)
    return {**dict(zip(("task", "noise", "epsilon", "step"), job, strict=True)), **_crossing(*job, 0, choose=False)}


def quick_again() -> Row:
    """Seed 0 of clients in turn on FEMNIST at the largest epsilon, with the step that three seeds chose."""
    kind, epsilon = "in turn, 10 bands", EPSILONS[-1]
    found = _crossing("FEMNIST", kind, epsilon, epsilon**0.5, 0, choose=False)
    return {"noise": kind, "step": epsilon**0.5, "times the chosen": 1.0, **found}


def crossing_claims(rows: list[Row]) -> list[Row]:
    found = []
    for name, epsilon in [(name, epsilon) for name in TASKS for epsilon in EPSILONS]:
        one, other, third = (values_of(rows, task=name, noise=kind, epsilon=epsilon) for kind in KINDS)
        where = f"{name}, epsilon {epsilon:g}:"
        text = f"{where} correlated noise in turn beats Poisson sampling with independent noise"
        found.append(verdict(text, other, one, CHOSEN))
        better = max(one, other, key=mean)
        found.append(verdict(f"{where} both together beat the better of the two", third, better, CHOSEN))
    return found


def draw_crossing(rows: list[Row], path: Path) -> None:
    panels = {name: {kind: picked(rows, task=name, noise=kind) for kind in KINDS} for name in TASKS}
    curves(panels, "epsilon", "accuracy", path, ylabel="test accuracy, %", log=True)


def again_rows(repeats: int, workers: int) -> list[Row]:
    """FEMNIST at the largest epsilon: steps by three seeds, and half and twice of each beside it."""
    cells = [("FEMNIST", kind, EPSILONS[-1]) for kind in KINDS]
    steps = side_by_side(crossing_step, [(*cell, PILOTS) for cell in cells], workers)
    near = [(cell, by, by * step) for cell, step in zip(cells, steps, strict=True) for by in (0.5, 1.0, 2.0)]
    jobs = [(*cell, step, seed) for cell, _, step in near for seed in range(repeats)]
    found = iter(side_by_side(crossing, jobs, workers))
    keys = ("noise", "step", "times the chosen")
    rows = [
        {**dict(zip(keys, (cell[1], step, by), strict=True)), "accuracy": next(found)}
        for cell, by, step in near
        for _ in range(repeats)
    ]
    return gathered(rows, keys, "accuracy")


def again_claims(rows: list[Row]) -> list[Row]:
    one, other, third = (values_of(rows, noise=kind, **{"times the chosen": 1.0}) for kind in KINDS)
    where = f"FEMNIST, epsilon {EPSILONS[-1]:g}, steps by three seeds:"
    text = f"{where} correlated noise in turn beats Poisson sampling with independent noise"
    both = f"{where} both together beat Poisson sampling with independent noise"
    return [verdict(text, other, one, CHOSEN_AGAIN), verdict(both, third, one, CHOSEN_AGAIN)]


def draw_again(rows: list[Row], path: Path) -> None:
    lines = {kind: picked(rows, noise=kind) for kind in KINDS}
    title = f"FEMNIST, epsilon {EPSILONS[-1]:g}"
    curves({title: lines}, "times the chosen", "accuracy", path, ylabel="test accuracy, %", log=True)


def forecast_rows(population: int = 1000, rounds: int = 200) -> list[Row]:
    """No data: the noise of the models at equal epsilon, in clips, and over that of the first kind."""
    found: list[Row] = []
    for kind, epsilon in [(kind, epsilon) for kind in KINDS for epsilon in EPSILONS]:
        plan = private(kind, population, epsilon, rounds)
        noise = (noise_of_models(plan.release, plan.server.workload(rounds)) or 0.0) / plan.clients.expected
        first = next((row["rms"] for row in found if row["epsilon"] == epsilon), noise)
        found.append({"noise": kind, "epsilon": epsilon, "rms": noise, "ratio": noise / first})
    return found


def draw_forecast(rows: list[Row], path: Path) -> None:
    """The figure of docs/correlated-noise.md."""
    lines = {kind: picked(rows, noise=kind) for kind in KINDS}
    title = "N = 1000, T = 200, 100 a round"
    curves({title: lines}, "epsilon", "ratio", path, ylabel="noise of the models over Poisson's", log=True)


STUDIES = (
    Study(
        "beyond-crossing",
        "Beyond: coins, correlation, or both, MNIST by writer (N = 500) and FEMNIST (N = 1050), T = 100",
        "Poisson cohorts of a tenth with independent noise, clients in turn with ten optimised bands, and both: three "
        "groups in turn, sampled at rate .3, three bands. One who sees the models; delta = N^-1.1. A client of FEMNIST "
        "is a tenth of a writer. The server's step is a power of 2 times sqrt(epsilon).",
        crossing_rows,
        crossing_claims,
        draw_crossing,
        chosen=CHOSEN,
        quick=quick,
        measure="accuracy",
    ),
    Study(
        "beyond-crossing-again",
        "Beyond: coins, correlation, or both, FEMNIST at epsilon 8, steps by three seeds",
        "The rows of beyond-crossing in which one choosing seed took a step of 5.7 for both forms of correlated noise. "
        "Their test figures had been seen before three seeds chose. Half and twice the chosen step are shown beside it "
        "and have no part in the verdicts.",
        again_rows,
        again_claims,
        draw_again,
        chosen=CHOSEN_AGAIN,
        quick=quick_again,
        measure="accuracy",
    ),
)
