"""`recipes.best(head_size=...)` beside the defaults of `recipes.best`, on three tasks that are nowhere on the board.

Same features, linear model, clients, epsilon and seed; kept in best.json by `sordino board best`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sordino as so
from sordino.data.records import Iid
from sordino_papers.board import Problem, interval
from sordino_papers.board_choosing import KEPT, TABLE

FILE, EPSILON, SEEDS = "best.json", 4.0, 5
TASKS = {
    "digits": Problem("digits", so.features.scattering(1, 9, "photos"), Iid(150)),
    "breast_cancer": Problem("breast_cancer", TABLE, Iid(100)),
    "heart_disease": Problem("heart_disease", TABLE, Iid(100)),
}


def accuracy(problem: Problem, seed: int, by_rule: bool) -> float:
    """Test accuracy in percent of one run, with repeatable noise."""
    torch.set_num_threads(1)
    data = problem.dataset()
    model = nn.Linear(data.x.shape[1], data.classes or 1, bias=False)
    nn.init.zeros_(model.weight)
    task = so.Task.of(model, data, partition=problem.partition, seed=seed)
    size = model.weight.numel() if by_rule else None
    plan = so.recipes.best(population=task.clients.population, epsilon=EPSILON, head_size=size)
    result = so.train(plan, task, seed=seed, eval_every=plan.rounds, progress=False)
    return round(100 * float(result.history[-1]["accuracy"]), 3)


def compare(folder: Path = KEPT, seeds: int = SEEDS) -> dict[str, Any]:
    """Run all tasks by the rule and by the defaults, paired by seed, and keep the figures."""
    found = {
        name: {
            how: [accuracy(problem, seed, by_rule) for seed in range(seeds)]
            for how, by_rule in (("rule", True), ("defaults", False))
        }
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
    """A line for each task: both means, the paired difference with its interval, and the verdict."""
    lines = []
    for name, values in found.items():
        middle, half = interval([a - b for a, b in zip(values["rule"], values["defaults"], strict=True)])
        verdict = "yes" if middle > half else "no" if middle < -half else "undecided"
        means = [interval(values[how])[0] for how in ("rule", "defaults")]
        gap = f"{middle:+.2f} [{middle - half:+.2f}, {middle + half:+.2f}]"
        lines.append((name, f"{means[0]:.2f}", f"{means[1]:.2f}", gap, verdict))
    return lines
