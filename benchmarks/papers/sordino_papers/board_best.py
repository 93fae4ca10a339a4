"""`recipes.best(head_size=...)` beside the defaults of `recipes.best`, on three tasks that are nowhere on the board.

Same clients, epsilon and seed; the defaults train a logistic regression on the records themselves, for which they were
made, and on the same features, for which their step is too small. Kept in best.json by `sordino board best`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sordino as so
from sordino.data.datasets import load
from sordino.data.records import Iid
from sordino.models import Logistic
from sordino_papers.board import Problem, interval
from sordino_papers.board_choosing import KEPT, TABLE

FILE, EPSILON, SEEDS = "best.json", 4.0, 5
HOW = ("rule", "records", "features")  # the rule; the defaults on the records; the defaults on the features
TASKS = {
    "digits": Problem("digits", so.features.scattering(1, 9, "photos"), Iid(150)),
    "breast_cancer": Problem("breast_cancer", TABLE, Iid(100)),
    "heart_disease": Problem("heart_disease", TABLE, Iid(100)),
}


def accuracy(problem: Problem, seed: int, how: str) -> float:
    """Test accuracy in percent of one run, with repeatable noise."""
    torch.set_num_threads(1)
    data = load(problem.data) if how == "records" else problem.dataset()
    model = Logistic().build(data.x.shape[1:], data.classes or 1)
    if how == "rule":
        model = nn.Linear(data.x.shape[1], data.classes or 1, bias=False)
        nn.init.zeros_(model.weight)
    task = so.Task.of(model, data, partition=problem.partition, seed=seed)
    size = sum(parameter.numel() for parameter in model.parameters()) if how == "rule" else None
    plan = so.recipes.best(population=task.clients.population, epsilon=EPSILON, head_size=size)
    result = so.train(plan, task, seed=seed, eval_every=plan.rounds, progress=False)
    return round(100 * float(result.history[-1]["accuracy"]), 3)


def compare(folder: Path = KEPT, seeds: int = SEEDS) -> dict[str, Any]:
    """Run all tasks by the rule and by the defaults, paired by seed, and keep the figures."""
    found = {
        name: {how: [accuracy(problem, seed, how) for seed in range(seeds)] for how in HOW}
        for name, problem in TASKS.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def stored(folder: Path = KEPT) -> dict[str, Any]:
    """What is kept; empty before the first run."""
    path = folder / FILE
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each task: the means, the paired difference to the better defaults, and the verdict."""
    lines: list[tuple[str, ...]] = []
    for name, values in found.items():
        means = {how: interval(values[how])[0] for how in HOW}
        other = max(HOW[1:], key=lambda how: means[how])
        middle, half = interval([a - b for a, b in zip(values["rule"], values[other], strict=True)])
        verdict = "yes" if middle > half else "no" if middle < -half else "undecided"
        gap = f"{middle:+.2f} [{middle - half:+.2f}, {middle + half:+.2f}]"
        lines.append((name, *(f"{means[how]:.2f}" for how in HOW), gap, verdict))
    return lines
