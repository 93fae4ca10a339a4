"""Promise: a secure sum in 16-bit words sends half the bytes of 32-bit words, and its models are as good.

`make bench-deploy` prints the table of docs/deploy.md: four silos in one process, which send, mask, add and unmask.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.deploy.test_secure_sum import AT_LEAST, RUN, SHARE, SILOS, Wire, chi_square, job, noise_of_sums, plan, task
from torch import nn

from sordino import loop
from sordino.accounting import secure_sums
from sordino.data.clients import Records
from sordino.federation import secagg
from sordino.federation.secagg import SecAggEngine
from sordino.parts.releases import NoiseShares
from sordino.rng import Seeded
from sordino.task import Task

INPUTS, SEEDS, ROUNDS = 250_000, 5, 20


def use_words(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_sums, "WORDS", (bits,))


def session(whole: Task) -> tuple[int, float]:
    """Bytes of one silo's masked message, and the CPU seconds of one sum of four."""
    wire = Wire.of(whole)
    engine = SecAggEngine(wire, RUN, 1, 2, 600.0, False)
    worker, asked = engine.prepare(plan(), whole.as_server(), Seeded(7)), job(whole)
    began = time.process_time()
    worker.collect(asked)
    took = time.process_time() - began
    return max(len(message.body) for message in wire.seen if "charges" in message.fields), took


def digits() -> Task:
    """Handwritten digits, dealt to four silos; every fifth is public and evaluates."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    public = torch.arange(len(y)) % 5 == 0
    silos = [(x[~public][i::SILOS], y[~public][i::SILOS]) for i in range(SILOS)]
    torch.manual_seed(0)
    return Task.of(nn.Linear(64, 10), [Records(*pair) for pair in silos], test=Records(x[public], y[public]))


def accuracy(whole: Task, seed: int) -> float:
    engine = SecAggEngine(Wire.of(whole), RUN, 1, 2, 600.0, False)
    planned = plan(rounds=ROUNDS, release=NoiseShares(0.15, AT_LEAST))
    *_, last = loop.run(planned, whole.as_server(), engine=engine, streams=Seeded(seed))
    return float(last.metrics["accuracy"])


def test_sixteen_bits_beside_thirty_two(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[int, dict[str, Any]] = {}
    large, small = task(INPUTS), digits()
    for bits in (16, 32, 64):
        use_words(bits, monkeypatch)
        grid = secagg.grid_of(plan())
        sizes = [session(large) for _ in range(3)]
        rows[bits] = {
            "bytes": sizes[0][0],
            "cpu s": min(took for _, took in sizes),
            "std in steps": SHARE / grid.step,
            "added variance": 1 / (12 * grid.ratio**2),
            "distance": grid.distance(2 * INPUTS + 2, 5),
            "accuracy": [accuracy(small, seed) for seed in range(SEEDS)],
            "chi-square p": chi_square(noise_of_sums(200)),
        }
        print(bits, rows[bits])
    moved = np.subtract(rows[16]["accuracy"], rows[32]["accuracy"])
    half = 2.776 * moved.std(ddof=1) / math.sqrt(SEEDS)  # Student's t, 95%, 4 degrees of freedom
    print(f"accuracy, 16 bits less 32: {moved.mean():+.4f} +- {half:.4f}")
    assert rows[16]["bytes"] * 2 == rows[32]["bytes"]
    assert abs(moved.mean()) < 0.01
    values: Any = [row["chi-square p"] for row in rows.values()]
    assert min(values) > 1e-3
