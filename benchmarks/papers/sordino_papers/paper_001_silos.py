"""Paper 001, Section 5: odd against even digits in 25 silos, one per pair of digits or all alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.data.records import Array
from sordino.task import Task
from sordino_papers.studies import Row
from sordino_papers.theory import heterogeneity

SILOS, PER_SILO, TEST, FEATURES = 25, 1238, 310, 50


@cache
def principal(count: int, white: float = 0.0) -> tuple[Array, Array, float]:
    """Mean, principal axes and scale of MNIST's 10,000 TEST images, declared public: none of a silo is used.

    Axes are divided by the power `white` of their singular values (0: plain, as in the paper); the scale is the mean
    length of a reduced image.
    """
    public = load("mnist").test_x.reshape(-1, 784).astype(np.float64)
    centre = public.mean(0)
    _, sizes, axes = np.linalg.svd(public - centre, full_matrices=False)
    kept = axes[:count] / sizes[:count, None] ** white
    return centre, kept, float(np.linalg.norm((public - centre) @ kept.T, axis=1).mean())


@cache
def reduced() -> tuple[Array, Array]:
    """All training images as 50 principal components of mean length about 1, and whether their digit is odd."""
    data, (centre, axes, scale) = load("mnist"), principal(FEATURES)
    return ((data.x.reshape(-1, 784) - centre) @ axes.T / scale).astype(np.float32), data.y


def odd_even(split: int, alike: bool = False) -> tuple[Task, Records]:
    """25 silos with train and test parts, and other training images of the same kinds to choose step sizes on.

    One silo per (odd, even) pair of digits, or, with `alike`, the same images dealt out at random. Every image is in
    one place: in one silo's train part, in the test, or among the held-out ones.
    """
    (x, digits), rng = reduced(), np.random.default_rng(split)
    piles = {digit: list(rng.permutation(np.flatnonzero(digits == digit))) for digit in range(10)}
    cuts = np.cumsum([PER_SILO // 2, TEST // 2, TEST // 2])
    parts: list[list[Array]] = [[], [], []]
    for pair in range(SILOS):
        mine = [[piles[d].pop() for _ in range(cuts[-1])] for d in (1 + 2 * (pair // 5), 2 * (pair % 5))]
        for part, (first, last) in zip(parts, zip((0, *cuts), cuts, strict=False), strict=True):
            part.append(np.concatenate([rows[first:last] for rows in mine]))
    silos, test, held = parts
    if alike:
        silos = np.split(rng.permutation(np.concatenate(silos)), SILOS)
    y = (digits % 2).astype(np.int64)
    chosen_on = np.concatenate(held)
    task = silo_task(x, y, silos, np.concatenate(test), "logistic")
    return task, Records(torch.from_numpy(x[chosen_on]), torch.from_numpy(y[chosen_on]))


def silo_task(x: Array, y: Array, silos: Sequence[Array], test: Array, loss: str) -> Task:
    """A linear model that starts at zero."""
    layer = nn.Linear(x.shape[1], 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    clients = Clients.of([(torch.from_numpy(x[rows]), torch.from_numpy(y[rows])) for rows in silos])
    return Task(layer, clients, Records(torch.from_numpy(x[test]), torch.from_numpy(y[test])), loss)


def errors(w: Tensor, records: Records) -> Tensor:
    """Share of records on the wrong side, for every row of w."""
    scores = records.x @ w[:, :-1].T + w[:, -1]
    return ((scores > 0).long() != records.y[:, None]).double().mean(0)


def differences(split: int) -> list[Row]:
    """v*^2 = mean ||grad F_i(w*)||^2 of both arrangements: as trained on, and with features in units of pixels."""
    scale, rows = principal(FEATURES)[2], list[Row]()
    for alike in (False, True):
        task, _ = odd_even(split, alike)
        pixels = Task(task.model, _longer(task.clients, scale), task.test, "logistic")
        row = {"arrangement": "alike" if alike else "one pair of digits each", "split": split}
        found = (float(f"{heterogeneity(one):.4g}") for one in (task, pixels))
        rows.append({**row, **dict(zip(("v*^2", "v*^2, pixels"), found, strict=True))})
    return rows


def _longer(clients: Clients, scale: float) -> Clients:
    return Clients(Records(clients.records.x * scale, clients.records.y), clients.index, clients.offsets)
