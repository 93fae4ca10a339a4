"""Paper 002: how many local and global iterations, under noise that every client adds to its own upload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sordino.data.datasets import load
from sordino.data.partition import Natural, SortedTarget
from sordino.data.records import Dataset
from sordino.data.task import Clients, Records, Task
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.release import NoNoise
from sordino.plan import Plan
from sordino.privacy.calibrated import calibrated
from sordino.recipes.client_side import client_side_fed_avg
from sordino.report.figures import curves
from sordino.rng import Seeded
from sordino.runs.grid import run_grid
from sordino_papers.paper_001 import principal
from sordino_papers.studies import Row, Study, claim, gathered, picked, side_by_side, value

EPSILONS = (1.0, 3.0, 5.0, math.inf)
CLIENTS, COHORT = 200, 100
TOTALS = (2, 5, 10, 20, 30, 50, 70, 100, 150)
LOCAL_STEPS = (1, 2, 4, 8, 15, 30, 60)
RULES = {"E = 1": 0.0, "E = T^(1/3)": 1 / 3, "E = T^(1/2)": 1 / 2, "E = T^(2/3)": 2 / 3, "E = T": 1.0}
LR, ZETA = 0.05, 1.0


# ---- loans: linear regression, Laplace noise, pure epsilon -----------------------------------------------------------


@cache
def loans() -> Task:
    """8,000 loans in 200 silos by sorted interest rate; 11 parameters."""
    data = load("lending_club")
    return _task(data, SortedTarget(CLIENTS).split(data.y, None, Seeded(0).at(0, "partition")), 1, "mse")


def _task(data: Dataset, split: object, outputs: int, loss: str) -> Task:
    layer = nn.Linear(data.x.shape[1], outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    clients = Clients(_records(data.x, data.y), split.index, split.offsets)  # type: ignore[attr-defined]
    return Task(layer, clients, _records(data.test_x, data.test_y), loss)


def _records(x: object, y: object) -> Records:
    return Records(torch.from_numpy(x), torch.from_numpy(y))


def loans_plan(epsilon: float, total: int, steps: int) -> Plan:
    """T = total iterations in rounds of E = steps; Laplace noise for pure epsilon over all rounds a client is in."""
    rounds = max(1, round(total / steps))
    plan = client_side_fed_avg(
        rounds=rounds, population=CLIENTS, cohort=COHORT, lr=LR, steps=steps, radius=ZETA, mechanism=Laplace(1.0)
    )
    return _noised(plan, epsilon, 0.0)


def _noised(plan: Plan, epsilon: float, delta: float) -> Plan:
    """Calibrated to epsilon; without noise where it is infinite."""
    if math.isinf(epsilon):
        return replace(plan, release=NoNoise())
    return calibrated(plan, epsilon=epsilon, delta=delta)


def losses(plan: Plan, task: Task, seeds: Sequence[int]) -> list[float]:
    """Test loss of the last model, one per seed."""
    found = run_grid([plan] * len(seeds), task, seeds)
    return [task.evaluate(w)["loss"] for w in found]


def _name(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def loans_part(part: str, epsilon: float, repeats: int) -> list[Row]:
    """One curve of one study."""
    task, seeds, rows = loans(), range(repeats), []
    if part == "total":
        settings = [("E = 1", total, 1) for total in TOTALS]
    elif part == "steps":
        settings = [("T = 120", 120, steps) for steps in LOCAL_STEPS]
    else:
        settings = [(rule, t, max(1, round(t**power))) for rule, power in RULES.items() for t in TOTALS]
    for label, total, steps in settings:
        for loss in losses(loans_plan(epsilon, total, steps), task, seeds):
            rows.append({"curve": part, "rule": label, "epsilon": _name(epsilon), "T": total, "E": steps, "loss": loss})
    return rows


def figure_loans(repeats: int, workers: int) -> list[Row]:
    """Loss against T with one local step, against E at T = 120, and against T under rules for E."""
    jobs = [(part, epsilon, repeats) for part in ("total", "steps") for epsilon in EPSILONS]
    found = side_by_side(loans_part, [*jobs, ("rules", 3.0, repeats)], workers)
    return gathered([row for part in found for row in part], ("curve", "rule", "epsilon", "T", "E"), "loss")


def best_total(rows: list[Row], epsilon: float | None) -> int:
    """T* of one epsilon."""
    return int(min(picked(rows, curve="total", epsilon=epsilon), key=lambda row: row["loss"])["T"])


def best_steps(rows: list[Row], epsilon: float | None) -> int:
    """E* of one epsilon."""
    return int(min(picked(rows, curve="steps", epsilon=epsilon), key=lambda row: row["loss"])["E"])


def loans_claims(rows: list[Row]) -> list[Row]:
    """T* grows with epsilon and is inside; E* falls with epsilon; T^(2/3) is the flattest rule."""
    names = [_name(epsilon) for epsilon in EPSILONS]
    totals, steps = [best_total(rows, name) for name in names], [best_steps(rows, name) for name in names]
    inside = totals[0] not in (TOTALS[0], TOTALS[-1]) and totals == sorted(totals) and totals[-1] > totals[0]
    growth = {rule: _growth(rows, rule) for rule in RULES}
    flattest = min(growth, key=lambda rule: growth[rule])
    shown = ", ".join(f"{rule}: {ratio:.2f}" for rule, ratio in growth.items())
    return [
        claim("002: loans, an interior best T that grows with epsilon (1, 3, 5, none)", f"T* = {totals}", inside),
        claim("002: loans, smaller epsilon wants larger E", f"E* = {steps}", steps == sorted(steps, reverse=True)),
        claim("002: loans, E = T^(2/3) is flattest in T", f"worst over best loss: {shown}", flattest == "E = T^(2/3)"),
    ]


def _growth(rows: list[Row], rule: str) -> float:
    """How far the loss of a rule moves over T, from 10 iterations on."""
    found = [row["loss"] for row in picked(rows, curve="rules", rule=rule) if row["T"] >= 10]
    return float(max(found) / min(found))


def draw_loans(rows: list[Row], path: Path) -> None:
    """Three panels."""
    labels = {_name(epsilon): f"epsilon {epsilon:g}" for epsilon in EPSILONS}
    panels = {
        "E = 1": {label: _by(picked(rows, curve="total", epsilon=e), "T") for e, label in labels.items()},
        "T = 120": {label: _by(picked(rows, curve="steps", epsilon=e), "E") for e, label in labels.items()},
        "epsilon 3": {rule: _by(picked(rows, curve="rules", rule=rule), "T") for rule in RULES},
    }
    curves(panels, "iterations", "loss", path, ylabel="test loss", log=True, log_y=True)


def _by(rows: list[Row], axis: str) -> list[Row]:
    return [{**row, "iterations": row[axis]} for row in rows]


# ---- FEMNIST, scaled: 105 writers, Gaussian noise --------------------------------------------------------------------

WRITERS, TURN, PARTS = 105, 35, 20
FEMNIST_EPSILONS = (20.0, 50.0, 200.0, math.inf)
FEMNIST_STEPS, FEMNIST_TOTAL = (1, 2, 4, 8, 16), 48


@cache
def femnist() -> Task:
    """FEMNIST by writer, 62 classes, 20 principal components of MNIST's test images (public); 1,302 parameters."""
    data, (centre, axes, scale) = load("femnist"), principal(PARTS)

    def reduced(images: object) -> object:
        flat = np.asarray(images).reshape(len(images), 784)  # type: ignore[arg-type]
        return ((flat - centre) @ axes.T / scale).astype(np.float32)

    split = Natural().split(data.y, data.groups, Seeded(0).at(0, "partition"))
    layer = nn.Linear(PARTS, 62)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    clients = Clients(_records(reduced(data.x), data.y), split.index, split.offsets)
    return Task(layer, clients, _records(reduced(data.test_x), data.test_y), "cross_entropy")


def femnist_plan(epsilon: float, steps: int) -> Plan:
    """Gaussian noise for (epsilon, N^-1.1) over all rounds that a writer is in."""
    rounds = FEMNIST_TOTAL // steps
    plan = client_side_fed_avg(
        rounds=rounds, population=WRITERS, cohort=TURN, lr=2.0, steps=steps, radius=0.5, mechanism=Gaussian(1.0)
    )
    return _noised(plan, epsilon, WRITERS**-1.1)


def femnist_part(epsilon: float, repeats: int) -> list[Row]:
    """Accuracy against E for one epsilon."""
    task, rows = femnist(), []
    for steps in FEMNIST_STEPS:
        found = run_grid([femnist_plan(epsilon, steps)] * repeats, task, range(repeats))
        figures = [task.evaluate(w)["accuracy"] for w in found]
        rows += [{"epsilon": _name(epsilon), "E": steps, "accuracy": figure} for figure in figures]
    return rows


def figure_femnist(repeats: int, workers: int) -> list[Row]:
    """Accuracy against E at T = 48."""
    found = side_by_side(femnist_part, [(epsilon, repeats) for epsilon in FEMNIST_EPSILONS], workers)
    return gathered([row for part in found for row in part], ("epsilon", "E"), "accuracy")


def femnist_claims(rows: list[Row]) -> list[Row]:
    """E* falls with epsilon."""
    best = [
        int(max(picked(rows, epsilon=_name(epsilon)), key=lambda row: row["accuracy"])["E"])
        for epsilon in FEMNIST_EPSILONS
    ]
    falls = best == sorted(best, reverse=True) and best[0] > best[-1]
    top = ", ".join(
        f"{100 * value(rows, 'accuracy', epsilon=_name(e), E=steps):.1f}"
        for e, steps in zip(FEMNIST_EPSILONS, best, strict=True)
    )
    text = "002: FEMNIST, smaller epsilon wants larger E (20, 50, 200, none)"
    return [claim(text, f"E* = {best}, accuracies {top}", falls)]


def draw_femnist(rows: list[Row], path: Path) -> None:
    """One panel."""
    lines = {f"epsilon {epsilon:g}": picked(rows, epsilon=_name(epsilon)) for epsilon in FEMNIST_EPSILONS}
    curves({"T = 48": lines}, "E", "accuracy", path, ylabel="test accuracy", log=True)


STUDIES = (
    Study(
        "002-loans",
        "Local and global iterations: interest rates of loans, Laplace noise",
        "200 silos by sorted rate, 100 a round in turns, pure epsilon over all rounds of a client, replace-one (twice "
        "the paper's sensitivity). The paper publishes no learning rates: shapes are compared, not losses.",
        figure_loans,
        loans_claims,
        draw_loans,
        10,
    ),
    Study(
        "002-femnist",
        "Local iterations: FEMNIST by writer, Gaussian noise (scaled)",
        "105 writers, 35 a round in turns, T = 48, a linear model of 1,302 parameters; the paper has 3,500 writers and "
        "214,590 parameters, so the epsilons here are larger.",
        figure_femnist,
        femnist_claims,
        draw_femnist,
        5,
    ),
)
