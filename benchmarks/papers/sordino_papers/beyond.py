"""Beyond the papers: what post-processing and server choices are worth at equal epsilon.

Three tasks chose the defaults of `recipes.best` (TASKS); two that had no part in it confirm or refute them (UNSEEN).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from sordino.accounting.accountant import largest_delta
from sordino.config import TaskSpec
from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.data.records import Dataset, Iid, Natural
from sordino.models import Logistic, Mlp, build_seeded
from sordino.parts.encoding import JamesStein, LaplacianSmoothing, Postprocess
from sordino.parts.server_optimizers import ServerOptimizer
from sordino.recipes.best import averaging_server, best
from sordino.rng import Seeded
from sordino.task import Task
from sordino_papers.cells import Cell, Job, Results, Row, Table
from sordino_papers.claims import beats
from sordino_papers.paper_000 import mnist_logistic


def adult(seed: int) -> Task:
    """UCI Adult dealt to 1000 clients, logistic regression."""
    return TaskSpec(dataset="adult", partition=Iid(1000), model=Logistic()).build(1000, seed)


def writers(seed: int) -> Task:
    """MNIST by 500 of its real writers, a perceptron with 32 hidden units; test writers are other people."""
    spec = TaskSpec(dataset="mnist_writers", partition=Natural(500), model=Mlp((32,)))
    return spec.build(500, seed)


def _dealt(data: Dataset, population: int, seed: int) -> Task:
    """A data set dealt at random, logistic regression."""
    split = Iid(population).split(data.y, None, Seeded(seed).at(0, "partition"))
    model = build_seeded(Logistic(), data.x.shape[1:], data.classes or 1, seed)
    train, test = (Records(torch.from_numpy(x), torch.from_numpy(y)) for x, y in _parts(data))
    return Task(model, Clients(train, split.index, split.offsets), test)


def _parts(data: Dataset) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    return (data.x, data.y), (data.test_x, data.test_y)


@cache
def pooled_cifar() -> Dataset:
    """CIFAR-10 mapped to 192 features: the mean of every 4 x 4 square of a colour, from [0, 1] to [-1, 1]."""
    data = load("cifar10", train=20_000)

    def mapped(x: Any) -> Any:
        return (2 * x.reshape(len(x), 3, 8, 4, 8, 4).mean((3, 5)) - 1).reshape(len(x), 192).astype(np.float32)

    return replace(data, x=mapped(data.x), test_x=mapped(data.test_x))


@cache
def dear_loans() -> Dataset:
    """Loans as two classes: an interest rate above 12 percent, or not."""
    data = load("loans")
    dear = [(y > 1.2).astype(np.int64) for y in (data.y, data.test_y)]
    return replace(data, y=dear[0], test_y=dear[1], classes=2)


def cifar(seed: int) -> Task:
    """20,000 images of CIFAR-10 over 1000 clients; 10,000 test images."""
    return _dealt(pooled_cifar(), 1000, seed)


def loans(seed: int) -> Task:
    """8,000 loans over 1000 clients; 2,000 held out."""
    return _dealt(dear_loans(), 1000, seed)


Setting = tuple[Callable[[int], Task], int, float, dict[str, Any]]  # task, population, epsilon, settings
TASKS: dict[str, Setting] = {
    "mnist": (partial(mnist_logistic, 500), 500, 2.0, {"clip_norm": 0.8, "lr": 0.1}),
    "adult": (adult, 1000, 1.0, {"clip_norm": 0.8, "lr": 0.3}),
    "writers": (writers, 500, 6.0, {"clip_norm": 0.8, "lr": 0.1}),
}
UNSEEN: dict[str, Setting] = {  # step and clip are those of mnist and adult, taken over before the first run
    "cifar": (cifar, 1000, 2.0, {"clip_norm": 0.8, "lr": 0.1}),
    "loans": (loans, 1000, 1.0, {"clip_norm": 0.8, "lr": 0.3}),
}
ABOUT = (
    "T = 60, rate 0.1. Tried and dropped, since it lost on all three tasks: spectral shrinkage, a Wiener filter per "
    "octave of frequencies whose noise is known exactly (with a falling step 86.83, 83.43 and 83.99 where the falling "
    "step alone had 89.82, 84.68 and 89.41). Choosing sigma by the least squared error of one update is the same idea."
)
CONFIRMS = "T = 60, rate 0.1, logistic regression. This task had no part in choosing the defaults of recipes.best. "
CHOSEN = "the test figures of beyond-mnist, -adult and -writers, which show them (picked there, so no confirmation)"
UNCHOSEN = "tasks other than this one (beyond-mnist, -adult, -writers); step and clip taken over from them unchanged"
ROUNDS, SMOOTHING = 60, LaplacianSmoothing(1.0)
LAST, MEAN = averaging_server(ROUNDS, step=1.0, window=0.0), averaging_server(ROUNDS, step=1.5, window=1 / 6)
VARIANTS: dict[str, tuple[ServerOptimizer, Postprocess | None]] = {
    "last model": (LAST, None),
    "smoothing, sigma 1": (LAST, SMOOTHING),
    "momentum 0.5": (averaging_server(ROUNDS, step=1.0, window=0.0, momentum=0.5), None),
    "momentum 0.8": (averaging_server(ROUNDS, step=1.0, window=0.0, momentum=0.8), None),
    "falling step": (averaging_server(ROUNDS, step=1.8, window=0.0, final=0.1), None),
    "mean of models": (averaging_server(ROUNDS, step=1.0, window=1 / 6), None),
    "mean of models, step 1.5": (MEAN, None),
    "mean of models, step 1.5, smoothing": (MEAN, SMOOTHING),
    "James-Stein": (LAST, JamesStein()),
}


def job(task: str, variant: str, seed: int) -> Job:
    """One run of one variant."""
    build, population, epsilon, settings = (TASKS | UNSEEN)[task]
    server, denoiser = VARIANTS[variant]
    delta = largest_delta(population)
    plan = best(
        population=population, epsilon=epsilon, delta=delta, rate=0.1, rounds=ROUNDS, denoiser=denoiser, **settings
    )
    return Job(replace(plan, server=server), build(seed), delta)


def _table(task: str) -> Table:
    build, population, epsilon, _ = (TASKS | UNSEEN)[task]
    cells = tuple(
        Cell(f"beyond-{task}-{_slug(variant)}", variant, partial(job, task, variant), seeds=5) for variant in VARIANTS
    )
    title = f"Beyond: {task}, N = {population}, epsilon {epsilon:g}"
    unseen = task in UNSEEN
    about = f"{CONFIRMS}{build.__doc__}" if unseen else ABOUT
    return Table(f"beyond-{task}", title, cells, about, _chosen(task), partial(against_last, task))


def _chosen(task: str) -> str:
    return UNCHOSEN if task in UNSEEN else CHOSEN


def against_last(task: str, results: Results) -> Iterator[Row]:
    """Every variant against the last model at step 1."""
    base = f"beyond-{task}-last-model"
    for variant in VARIANTS:
        name = f"beyond-{task}-{_slug(variant)}"
        if name in results and name != base:
            known = " (the defaults of recipes.best)" if VARIANTS[variant] == (MEAN, None) else ""
            text = f"beyond: {task}, {variant}{known} beats the last model"
            yield beats(results, text, name, base, _chosen(task))


def _slug(variant: str) -> str:
    return variant.lower().replace(",", "").replace(" ", "-")


TABLES = tuple(_table(task) for task in TASKS | UNSEEN)
