"""Paper 002 on FEMNIST, scaled: local and global iterations under Gaussian noise of every writer on its own upload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import nn

from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.data.records import Array, Natural
from sordino.loop import run
from sordino.parts.mechanisms import Gaussian
from sordino.plan import Plan
from sordino.recipes.client_level import client_side_fed_avg
from sordino.rng import Seeded
from sordino.task import Task
from sordino_papers.choosing import judged
from sordino_papers.once import once
from sordino_papers.paper_002 import named, noised, repeated
from sordino_papers.studies import Row, gathered, side_by_side

Net = Literal["mlp", "cnn"]
WRITERS, TURN, PER_WRITER, HELD = 105, 35, 60, 30
EPSILONS = (50.0, 200.0, 800.0, math.inf)
LOCAL_STEPS, TOTAL = (1, 2, 3, 4, 6, 12, 24), 120
TOTALS, FIVE = (30, 60, 120, 240), 5  # Figure 4, and the local iterations of Figures 2 and 4
CNN_EPSILONS, CNN_STEPS, CNN_TOTAL = (200.0, 800.0, math.inf), (1, 4, 12), 48
PAPER_EPSILONS, PAPER_STEPS, PAPER_TOTAL = (10.0, 20.0, 30.0, math.inf), (1, 2, 5, 10, 25), 50  # of its Figure 6
LR, ZETA = 1.0, 0.2
SIDE, BRIGHT = 14, 5.0  # images are halved to 14 x 14, ink is BRIGHT


def model(net: Net) -> nn.Module:
    """A perceptron of 8,350 parameters, or the paper's net with a quarter of the channels: 10,558 (the paper 214,590).

    Weights come from one public seed: runs differ by their noise alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if net == "mlp":
            return nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 32), nn.ReLU(), nn.Linear(32, 62))
        first = [nn.Conv2d(1, 8, 7, padding=3), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(144, 62))


def halved(images: Array) -> torch.Tensor:
    """28 x 28 on white to 14 x 14 on nothing."""
    ink = 1 - images.reshape(-1, SIDE, 2, SIDE, 2).mean((2, 4))
    return torch.from_numpy((BRIGHT * ink[:, None]).astype(np.float32))


@cache
def femnist(net: Net) -> tuple[Task, Records]:
    """Up to 60 images of each of 105 writers to train on, up to 30 others to choose on; 1,677 to report."""
    data = load("femnist")
    assert data.groups is not None
    rng = np.random.default_rng(0)  # a writer's images come digits first
    own = [rng.permutation(np.flatnonzero(data.groups == writer)) for writer in np.unique(data.groups)]
    train, held = (
        np.concatenate([rows[first:last] for rows in own])
        for first, last in ((0, PER_WRITER), (PER_WRITER, PER_WRITER + HELD))
    )
    split = Natural().split(data.y[train], data.groups[train], Seeded(0).at(0, "partition"))
    clients = Clients(Records(halved(data.x[train]), torch.from_numpy(data.y[train])), split.index, split.offsets)
    test = Records(halved(data.test_x), torch.from_numpy(data.test_y))
    task = Task(model(net), clients, test, "cross_entropy")
    return task, Records(halved(data.x[held]), torch.from_numpy(data.y[held]))


@cache
def femnist_plan(epsilon: float, total: int, steps: int) -> Plan:
    """Gaussian noise for (epsilon, N^-1.1) over all rounds that a writer is in; a third of them in each, in turns."""
    plan = client_side_fed_avg(
        rounds=total // steps,
        population=WRITERS,
        cohort=TURN,
        lr=LR,
        steps=steps,
        clip_norm=ZETA,
        mechanism=Gaussian(1.0),
    )
    return noised(plan, epsilon, WRITERS**-1.1)


def one_run(net: Net, epsilon: float, total: int, steps: int, seed: int, along: bool) -> Row:
    """`points`: (iteration, test accuracy, accuracy on held-out images) at the end, or `along` the way as well."""
    plan, (task, held) = femnist_plan(epsilon, total, steps), femnist(net)
    choice = Task(task.model, task.clients, held, task.loss)
    found = []
    for done in run(plan, task, streams=Seeded(seed), eval_every=1 if along else plan.rounds):
        if done.metrics:
            w = plan.server.result(done.state.memory)
            found.append(((done.t + 1) * steps, done.metrics["accuracy"], choice.evaluate(w)["accuracy"]))
    return {"points": found}


def part(figure: str, net: Net, epsilon: float, total: int, steps: int, repeats: int) -> list[Row]:
    """Accuracy at the end of `total` iterations (Figures 4 and 6), or along them (Figure 2)."""
    place = {"figure": figure, "net": net, "epsilon": named(epsilon), "T": total, "E": steps}
    runs = [
        once(one_run, net, epsilon, total, steps, seed, figure == "2") for seed in range(repeated(epsilon, repeats))
    ]
    return [
        {**place, "k": k, "accuracy": accuracy, "validation": held}
        for one in runs
        for k, accuracy, held in one["points"]
    ]


def jobs(repeats: int) -> list[tuple[str, Net, float, int, int, int]]:
    """Figures 2, 4 and 6 with the perceptron."""
    return [
        *(("6", "mlp", epsilon, TOTAL, steps, repeats) for epsilon in EPSILONS for steps in LOCAL_STEPS),
        *(("2", "mlp", epsilon, TOTAL, FIVE, repeats) for epsilon in EPSILONS),
        *(("4", "mlp", epsilon, total, FIVE, repeats) for epsilon in EPSILONS for total in TOTALS),
    ]


def cnn_jobs(repeats: int) -> list[tuple[str, Net, float, int, int, int]]:
    """Figure 6 with the small CNN."""
    return [("6", "cnn", epsilon, CNN_TOTAL, steps, repeats) for epsilon in CNN_EPSILONS for steps in CNN_STEPS]


def assembled(parts: Sequence[list[Row]]) -> list[Row]:
    """What the page shows."""
    rows, keys = [row for some in parts for row in some], ("figure", "net", "epsilon", "T", "E")
    ends = judged([row for row in rows if row["figure"] != "2"], keys, "accuracy")
    return ends + gathered([row for row in rows if row["figure"] == "2"], (*keys, "k"), "accuracy")


def figure_femnist(repeats: int, workers: int) -> list[Row]:
    """Accuracy against E, along the iterations, and against T."""
    return assembled(side_by_side(part, jobs(repeats), workers))


def figure_cnn(repeats: int, workers: int) -> list[Row]:
    """Accuracy against E."""
    return assembled(side_by_side(part, cnn_jobs(repeats), workers))


def figure_paper(repeats: int, workers: int) -> list[Row]:
    """Accuracy against E at the paper's epsilons and T."""
    asked = [("6", "mlp", e, PAPER_TOTAL, steps, repeats) for e in PAPER_EPSILONS for steps in PAPER_STEPS]
    return assembled(side_by_side(part, asked, workers))
