"""What each way of computing clients gains: the table of sordino/engines/paths.py, measured on this machine.

CPU seconds of one round of local work by one way over those by another, taken in turns, the least of several.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from work import task

from sordino.engines.dense_clients import DenseClients
from sordino.engines.inprocess import InProcessWorker
from sordino.engines.linear_clients import LinearClients
from sordino.engines.objectives import ManyClients, OneClient
from sordino.engines.paths import WAYS, Way
from sordino.models import DpMnistCnn, EmnistCnn, Linear, Logistic, Mlp
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
    like = WAYS[0] if batched else WAYS[-1]
    way = Way(like.path, like.when, lambda given, _: make(given), "", "")
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


def rows(turns: int) -> None:
    logistic, small = (
        task(Logistic(), 10, torch.randn(2500, 784), 50),
        task(Linear(), 1, torch.randn(2500, 50), 50, "logistic"),
    )
    mlp, cnn = task(Mlp(), 10, torch.randn(1000, 784), 50), task(EmnistCnn(), 62, torch.randn(64, 1, 28, 28), 1)
    mnist = task(DpMnistCnn(), 10, torch.randn(256, 1, 28, 28), 1)
    cases: list[tuple[str, Plan, Task, Make, Make, int, bool, bool]] = [
        ("784 x 10: linear, vmap", averaging(50, 10), logistic, LinearClients, ManyClients, 50, True, True),
        (
            "784 x 10: linear, dense of one stage",
            averaging(50, 10),
            logistic,
            LinearClients,
            DenseClients,
            50,
            True,
            True,
        ),
        (
            "784 x 10: torch loops, dense of one stage",
            averaging(50, 10),
            logistic,
            plain_loops,
            DenseClients,
            50,
            True,
            True,
        ),
        (
            "784 x 10: compiled loops, torch loops",
            averaging(50, 10),
            logistic,
            LinearClients,
            plain_loops,
            50,
            True,
            True,
        ),
        ("50 x 1: linear, vmap", averaging(50, 10), small, LinearClients, ManyClients, 50, True, True),
        ("50 x 1: linear, dense of one stage", averaging(50, 10), small, LinearClients, DenseClients, 50, True, True),
        (
            "50 x 1: torch loops, dense of one stage",
            averaging(50, 10),
            small,
            plain_loops,
            DenseClients,
            50,
            True,
            True,
        ),
        (
            "50 x 1 silos: linear, dense of one stage",
            silos(50, 35, 50),
            small,
            LinearClients,
            DenseClients,
            50,
            True,
            True,
        ),
        ("50 x 1 silos: linear, vmap", silos(50, 35, 50), small, LinearClients, ManyClients, 50, True, True),
        ("784-64-10: dense, vmap", averaging(50, 10), mlp, DenseClients, ManyClients, 50, True, True),
        ("784-64-10: vmap, one at a time", averaging(50, 10), mlp, ManyClients, OneClient, 50, True, False),
        ("784-64-10 silos: dense, vmap", silos(50, 10, 20), mlp, DenseClients, ManyClients, 50, True, True),
        (
            "MNIST CNN silo of 128: one pass, each record alone",
            silos(1, 128, 256),
            mnist,
            OneClient,
            each_alone,
            1,
            False,
            False,
        ),
        (
            "EMNIST CNN: Winograd, torch",
            averaging(1, 32),
            cnn,
            OneClient,
            lambda own: OneClient(own, False),
            1,
            False,
            False,
        ),
    ]
    for name, plan, own, fast, slow, clients, batched, other in cases:
        calls = once(plan, own, fast, clients, batched), once(plan, own, slow, clients, other)
        print(f"{name}: {ratio(*calls, turns):.2f}", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--turns", type=int, default=7)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows(options.parse_args().turns)
