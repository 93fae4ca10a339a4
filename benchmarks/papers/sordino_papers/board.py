"""The board: accuracy of private linear heads at a given epsilon. What a row is, and how one seed of it runs.

A row is a data set with public features, a unit (record or client), an epsilon, and settings that were chosen on a
STAND-IN: another data set, by accuracy on records of its training part. The stand-in's choices are kept in
chosen.json (`choose`), before the row runs; a row runs once, five seeds, and is kept whatever it says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sordino as so
from sordino.data.datasets import load
from sordino.data.records import Dataset, Partitioner
from sordino.features.extractors import Extractor
from sordino.features.heads import SHARE
from sordino.rng import Mode
from sordino_papers.beyond import dear_loans

LOADERS: dict[str, Callable[[], Dataset]] = {"dear_loans": dear_loans}
HEAVY = 60_000_000  # numbers of a batch of records, from which it is computed in parts


@dataclass(frozen=True)
class Problem:
    """What is learned: a data set, its public features, and its clients (none: the unit is a record).

    With `held`, the last `held` training records are in the place of the test records, which are not read.
    """

    data: str
    features: Extractor
    partition: Partitioner | None = None
    held: int = 0

    @property
    def unit(self) -> str:
        return "record" if self.partition is None else "client"

    def dataset(self) -> Dataset:
        """Features in place of records."""
        data = _features(self.data, self.features)
        if not self.held:
            return data
        n = len(data.y) - self.held
        rest: dict[str, Any] = {"groups": None if data.groups is None else data.groups[:n], "test_groups": None}
        return replace(data, x=data.x[:n], y=data.y[:n], test_x=data.x[n:], test_y=data.y[n:], **rest)


@cache
def _features(name: str, features: Extractor) -> Dataset:
    return features.of_dataset(LOADERS[name]() if name in LOADERS else load(name))


@dataclass(frozen=True)
class Settings:
    """Settings of a head: steps (rounds of clients), and the first step size per unit of clip norm."""

    steps: int
    step: float
    clip_norm: float = 0.05


@dataclass(frozen=True)
class Published:
    """A published figure: accuracy in percent, epsilon as claimed, and where it stands; `note`: what differs."""

    accuracy: float
    epsilon: float
    source: str
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One row of the board; `stand_in` names the choice of chosen.json that its settings come from."""

    id: str
    title: str
    problem: Problem
    epsilon: float
    stand_in: str
    goal: float | None = None
    published: Published | None = None


@dataclass(frozen=True)
class Run:
    """One seed of a row: accuracy in percent, CPU seconds of the head, certificate, and what to keep of the run."""

    accuracy: float
    seconds: float
    certificate: dict[str, Any]
    save: Callable[[Path], Any] = field(repr=False)


def run(problem: Problem, epsilon: float, settings: Settings, seed: int, noise: Mode = "secure") -> Run:
    """Train one head; the partition into clients follows from the seed."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train = _record_head if problem.partition is None else _client_head
    return train(problem, epsilon, settings, seed, noise)


def _record_head(problem: Problem, epsilon: float, settings: Settings, seed: int, noise: Mode) -> Run:
    data = problem.dataset()
    assert data.classes
    x, rows = torch.from_numpy(data.x), round(SHARE * len(data.y))
    parts = -(-rows * x.shape[1] // HEAVY)
    started = time.process_time()
    head = so.features.fit_head(
        x, data.y, epsilon=epsilon, classes=data.classes, steps=settings.steps, step=settings.step,
        clip_norm=settings.clip_norm, public=data.declared, noise=noise, seed=seed,
        max_physical_batch_size=-(-rows // parts) if parts > 1 else None,
    )  # fmt: skip
    seconds = time.process_time() - started
    accuracy = 100 * head.accuracy(torch.from_numpy(data.test_x), data.test_y)
    return Run(accuracy, seconds, head.certificate(), lambda folder: head.save_certificate(folder / "certificate.json"))


def _client_head(problem: Problem, epsilon: float, settings: Settings, seed: int, noise: Mode) -> Run:
    data = problem.dataset()
    model = nn.Linear(data.x.shape[1], data.classes or 1, bias=False)
    nn.init.zeros_(model.weight)
    task = so.Task.of(model, data, partition=problem.partition, seed=seed)
    plan = so.recipes.head(
        population=task.clients.population, epsilon=epsilon, rounds=settings.steps, step=settings.step,
        clip_norm=settings.clip_norm,
    )  # fmt: skip
    started = time.process_time()
    result = so.train(plan, task, noise=noise, seed=seed, eval_every=settings.steps, progress=False)
    seconds = time.process_time() - started
    return Run(100 * float(result.history[-1]["accuracy"]), seconds, dict(result.certificate), result.save)


def without_privacy(problem: Problem, ridge: float = 1e-6, iterations: int = 50) -> float:
    """Accuracy in percent of the same head on the same features without clip and noise: logistic loss by L-BFGS."""
    data = problem.dataset()
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    weight = torch.zeros(data.classes or 1, x.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS([weight], max_iter=iterations, history_size=10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        found = nn.functional.cross_entropy(x @ weight.T, y) + ridge / 2 * weight.square().sum()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    solver.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        scores = torch.from_numpy(data.test_x) @ weight.T
    return 100 * float((scores.argmax(1) == torch.from_numpy(data.test_y)).double().mean())


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95% interval by Student's t."""
    from scipy import stats

    middle, n = float(np.mean(values)), len(values)
    return middle, float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
