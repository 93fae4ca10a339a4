"""What each way of computing clients gains: the table of sordino/engines/objectives.py, measured on this machine.

CPU seconds of one round of local work by one way over those by another, taken in turns, the least of several.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from sordino.data.clients import Clients, Records
from sordino.engines.dense_clients import DenseClients, LinearClients
from sordino.engines.inprocess import InProcessWorker
from sordino.engines.objectives import PATHS, ExecutionPath, ManyClients, OneClient
from sordino.parts.encoding import Public
from sordino.parts.gradients import Objective
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.samplers import Everyone
from sordino.plan import Plan
from sordino.recipes import dp_fed_avg, noisy_minibatch_sgd
from sordino.rng import Seeded
from sordino.task import Task

Make = Callable[[Task], Objective]


def plain_loops(own: Task) -> Objective:
    found = LinearClients(own)
    found.kernel = False
    return found


def each_alone(own: Task) -> Objective:
    found = OneClient(own)
    found.fast = None
    return found


def once(plan: Plan, own: Task, make: Make, clients: int, batched: bool) -> Callable[[], object]:
    """One round of local work of every client, in chunks of 50 or one by one."""
    like = PATHS[0] if batched else PATHS[-1]
    way = ExecutionPath(like.path, like.when, lambda given, _: make(given), "", "")
    worker = InProcessWorker(plan, own, Seeded(0), way, 50 if batched else 1)
    start, public = own.layout.flatten(own.model), Public(t=0, size=own.layout.size)
    groups = np.array_split(np.arange(clients), 1 if batched else clients)
    return lambda: [worker.solve(group, public, start) for group in groups]


def ratio(fast: Callable[[], object], slow: Callable[[], object], turns: int) -> float:
    """CPU seconds of the slow one over those of the fast one."""
    least = [np.inf, np.inf]
    fast(), slow()
    for _ in range(turns):
        for i, call in enumerate((fast, slow)):
            began = time.process_time()
            call()
            least[i] = min(least[i], time.process_time() - began)
    return least[1] / least[0]


def averaging(population: int, batch: int) -> Plan:
    return dp_fed_avg(
        rounds=1, clients=Everyone(population), lr=0.05, clip_norm=1.0, noise_multiplier=1.0, epochs=1, batch=batch
    )


def silos(population: int, batch: int, size: int) -> Plan:
    read = FixedRecords(batch, (size,))
    plan = noisy_minibatch_sgd(
        rounds=1, clients=Everyone(population), records=read, clip_norm=1.0, noise_multiplier=1.0, lr=0.1
    )
    assert isinstance(plan.local, BatchGradient)
    return plan


def federation(model: nn.Module, x: Tensor, outputs: int, clients: int) -> Task:
    offsets = np.arange(clients + 1, dtype=np.int64) * (len(x) // clients)
    return Task(
        model, Clients(Records(x, torch.randint(outputs, (len(x),))), np.arange(len(x), dtype=np.int64), offsets)
    )


def mlp(widths: tuple[int, ...]) -> Task:
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in pairwise(widths)]
    model = nn.Sequential(*[layer for pair in layers for layer in pair][:-1])
    return federation(model, torch.randn(1600, widths[0]), widths[-1], 40)


def cnn(channels: tuple[int, int, int], kernel: int, side: int) -> Task:
    """Two convolutions with odd numbers of channels."""
    first, second, third = channels
    last = ((side - kernel + 1) // 2 - kernel + 1) // 2
    front = nn.Conv2d(first, second, kernel), nn.ReLU(), nn.MaxPool2d(2)
    back = nn.Conv2d(second, third, kernel), nn.ReLU(), nn.MaxPool2d(2)
    model = nn.Sequential(*front, *back, nn.Flatten(), nn.Linear(third * last * last, 11))
    return federation(model, torch.randn(96, first, side, side), 11, 1)


def rows(turns: int) -> None:
    """Models that nobody tuned a path for."""
    fed, silo = averaging(40, 13), silos(40, 13, 40)
    cases: list[tuple[str, Plan, Task, Make, Make, int, bool, bool]] = []
    linear = mlp((617, 26))
    cases += [
        ("617-26: linear, vmap", fed, linear, LinearClients, ManyClients, 40, True, True),
        ("617-26: compiled loops, torch loops", fed, linear, LinearClients, plain_loops, 40, True, True),
        ("617-26 silos: linear, vmap", silo, linear, LinearClients, ManyClients, 40, True, True),
    ]
    for widths in ((93, 41, 7), (617, 51, 26), (617, 203, 97, 26)):
        own, name = mlp(widths), "-".join(map(str, widths))
        cases += [
            (f"{name}: dense, vmap", fed, own, DenseClients, ManyClients, 40, True, True),
            (f"{name}: vmap, one at a time", fed, own, ManyClients, OneClient, 40, True, False),
            (f"{name} silos: dense, vmap", silo, own, DenseClients, ManyClients, 40, True, True),
        ]
    own = cnn((1, 19, 37), 5, 28)
    cases.append(
        ("CNN silo: one pass, each record alone", silos(1, 32, 96), own, OneClient, each_alone, 1, False, False)
    )
    for name, plan, own, fast, slow, clients, batched, other in cases:
        calls = once(plan, own, fast, clients, batched), once(plan, own, slow, clients, other)
        print(f"{name}: {ratio(*calls, turns):.2f}", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--turns", type=int, default=7)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows(options.parse_args().turns)
