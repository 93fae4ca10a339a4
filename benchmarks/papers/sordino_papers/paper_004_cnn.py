"""Paper 004, Section 4.2 and 4.3 (scaled): CNNs on MNIST and CIFAR-10, every method at the step that validated best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch.nn.functional import avg_pool2d

from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.loop import run
from sordino.models import DpMnistCnn, build_seeded
from sordino.outcome import final_model
from sordino.rng import Seeded
from sordino.task import Task, evaluate
from sordino_papers.panels import curves
from sordino_papers.paper_004 import Setting, noise_multiplier
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import verdict

METHODS = {"DP-SGD": (0.0, False), "DP-LSSGD": (1.0, False), "DP-Adam": (0.0, True), "DP-LSAdam": (1.0, True)}
PAIRS = (("DP-LSSGD", "DP-SGD"), ("DP-LSAdam", "DP-Adam"))
SGD, ADAM = (4.0, 8.0, 16.0, 32.0), (0.008, 0.016, 0.032, 0.064)  # steps tried
TRIAL = 100  # the seed that tries steps; none of those reported
Parts = tuple[Records, Records]


@dataclass(frozen=True)
class Bench:
    """A data set: training and validation images, test images apart so that no choice can reach them."""

    name: str
    setting: Setting
    epsilons: tuple[float, ...]
    held: Callable[[], Parts]  # to train on, to validate on: both of the training images
    test: Callable[[], Records]

    def task(self, seed: int) -> Task:
        """One holder of the training images; what is measured on the way are the validation images."""
        train, validation = self.held()
        net = build_seeded(DpMnistCnn(), tuple(train.x.shape[1:]), 10, seed)
        return Task(net, Clients.of([train]), validation)


# ---- the data --------------------------------------------------------------------------------------------------------


def halved(x: object, y: object) -> Records:
    """Images averaged over 2x2 pixels."""
    return Records(avg_pool2d(torch.as_tensor(x), 2), torch.as_tensor(y))


@cache
def mnist_held() -> Parts:
    """The first 20,000 training images at 14x14, and the last 10,000."""
    data = load("mnist")
    return halved(data.x[:20_000], data.y[:20_000]), halved(data.x[50_000:], data.y[50_000:])


@cache
def mnist_test() -> Records:
    data = load("mnist")
    return halved(data.test_x, data.test_y)


@cache
def cifar_held() -> Parts:
    """18,000 of the first 20,000 training images at 16x16, and the other 2,000."""
    data = load("cifar10")
    return halved(data.x[:18_000], data.y[:18_000]), halved(data.x[18_000:20_000], data.y[18_000:20_000])


@cache
def cifar_test() -> Records:
    data = load("cifar10")
    return halved(data.test_x, data.test_y)


MNIST = Bench("mnist", Setting(records=20_000, batch=500, epochs=3, clip_norm=0.5), (0.4, 2.0), mnist_held, mnist_test)
CIFAR = Bench("cifar10", Setting(records=18_000, batch=500, epochs=2, clip_norm=0.5), (8.0,), cifar_held, cifar_test)
BENCHES = {bench.name: bench for bench in (MNIST, CIFAR)}


# ---- choose on validation, then run ----------------------------------------------------------------------------------


def course(bench: Bench, epsilon: float, method: str, step: float, seed: int) -> tuple[list[Row], float]:
    """Validation accuracy after every epoch, and the test accuracy of the last model if the seed is a reported one."""
    (strength, adam), task, setting = METHODS[method], bench.task(seed), bench.setting
    plan, every = (
        setting.plan(noise_multiplier(setting, epsilon), strength, step, adam),
        setting.rounds // setting.epochs,
    )
    kept = [done for done in run(plan, task, streams=Seeded(seed), eval_every=every) if done.metrics]
    rows = [{"epoch": (done.t + 1) // every, "accuracy": 100 * done.metrics["accuracy"]} for done in kept]
    if seed == TRIAL:
        return rows, rows[-1]["accuracy"]
    final = evaluate(final_model(plan, task, kept[-1].state), bench.test(), task.losses)
    return rows, 100 * final["accuracy"]


def tried(name: str, epsilon: float, method: str, step: float) -> Row:
    """One step size of one method, judged on validation images."""
    rows, _ = course(BENCHES[name], epsilon, method, step, TRIAL)
    return {"epsilon": epsilon, "method": method, "step": step, "validation": rows[-1]["accuracy"]}


def best_step(rows: list[Row], epsilon: float, method: str) -> float:
    """The step that validated best for this method at this epsilon."""
    return float(max(picked(rows, epsilon=epsilon, method=method), key=lambda row: float(row["validation"]))["step"])


def reported(name: str, epsilon: float, method: str, step: float, seed: int) -> list[Row]:
    """One run at the chosen step; epoch None is the accuracy on the test images at the end."""
    rows, final = course(BENCHES[name], epsilon, method, step, seed)
    keys = {"epsilon": epsilon, "method": method, "step": step}
    return [{**keys, **row} for row in (*rows, {"epoch": None, "accuracy": final})]


def measured(name: str, repeats: int, workers: int) -> list[Row]:
    """What every step had on validation images, then every method at its best."""
    epsilons = BENCHES[name].epsilons
    asked = [
        (name, e, m, step) for e in epsilons for m, (_, adam) in METHODS.items() for step in (ADAM if adam else SGD)
    ]
    trials = side_by_side(tried, asked, workers)
    jobs = [(name, e, m, best_step(trials, e, m), seed) for e in epsilons for m in METHODS for seed in range(repeats)]
    rows = [row for one in side_by_side(reported, jobs, workers) for row in one]
    return [*trials, *gathered(rows, ("epsilon", "method", "step", "epoch"), "accuracy")]


CHOSEN = "step: validation images, each method its own"


def claims(label: str, rows: list[Row]) -> list[Row]:
    """Smoothing against none for both optimizers at every epsilon, by test accuracy."""

    def test(epsilon: float, method: str) -> list[float]:
        (row,) = [r for r in picked(rows, epsilon=epsilon, method=method) if "accuracy" in r and r["epoch"] is None]
        return list(row["values"])

    epsilons = dict.fromkeys(row["epsilon"] for row in rows)
    return [
        verdict(f"004: {label}, {better} beats {worse} at epsilon {e:g}", test(e, better), test(e, worse), CHOSEN)
        for e in epsilons
        for better, worse in PAIRS
    ]


def draw(rows: list[Row], path: Path) -> None:
    """Validation accuracy per epoch, one panel per epsilon."""
    inside = [row for row in rows if row.get("epoch") is not None]
    panels = {
        f"epsilon {epsilon:g}": {method: picked(inside, epsilon=epsilon, method=method) for method in METHODS}
        for epsilon in dict.fromkeys(row["epsilon"] for row in inside)
    }
    curves(panels, "epoch", "accuracy", path, xlabel="epochs trained", ylabel="validation accuracy, %")


def mnist_rows(repeats: int, workers: int) -> list[Row]:
    """The MNIST study."""
    return measured("mnist", repeats, workers)


def cifar_rows(repeats: int, workers: int) -> list[Row]:
    """The CIFAR-10 study."""
    return measured("cifar10", repeats, workers)


def mnist_claims(rows: list[Row]) -> list[Row]:
    """Claims of the MNIST study."""
    return claims("MNIST CNN (scaled)", rows)


def cifar_claims(rows: list[Row]) -> list[Row]:
    """Claims of the CIFAR-10 study."""
    return claims("CIFAR-10 CNN (scaled)", rows)


_HOW = (
    "delta 1e-5, clip 0.5 per record, Poisson batches of 500, step falling to zero. Rows with an epoch: validation "
    "accuracy; without: the 10,000 test images; rows with a step alone: what chose it, on one run of another seed."
)
STUDIES = (
    Study(
        "004-cnn",
        "MNIST CNN: DP-LSSGD and DP-LSAdam, steps tuned for every method (scaled)",
        f"20,000 images averaged to 14x14, 10,650 parameters, 3 epochs; 10,000 more images to validate on; {_HOW}",
        mnist_rows,
        mnist_claims,
        draw,
        5,
        CHOSEN,
        partial(tried, "mnist", 2.0, "DP-SGD", 8.0),
        "validation",
    ),
    Study(
        "004-cifar10",
        "CIFAR-10 CNN: Section 4.3 (scaled)",
        f"18,000 images averaged to 16x16, 2,000 more to validate on, the net of 004-cnn, 2 epochs; {_HOW}",
        cifar_rows,
        cifar_claims,
        draw,
        5,
        CHOSEN,
        partial(tried, "cifar10", 8.0, "DP-SGD", 8.0),
        "validation",
    ),
)
