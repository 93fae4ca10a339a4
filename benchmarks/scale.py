"""A round's cost by population: `python benchmarks/scale.py`. Mapped data, cohorts of 1,000, one thread."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from sordino import Poisson, recipes
from sordino.config import TaskSpec
from sordino.data.datasets import write_memmap
from sordino.loop import run
from sordino.models import Logistic
from sordino.rng import Seeded

COHORT, EACH, WIDTH, ROUNDS = 1000, 5, 20, 8


def folder(path: Path, population: int) -> Path:
    """Random records, `EACH` per client."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((population * EACH, WIDTH), dtype=np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    write_memmap(path, x, y, np.full(population, EACH), x[:100], y[:100])
    return path


def measured(path: Path, population: int) -> tuple[float, float]:
    """Seconds to build the task, and of the fastest round."""
    began = time.perf_counter()
    task = TaskSpec(dataset="mapped", options={"path": str(path), "classes": 2}, model=Logistic()).build(population, 0)
    built, rounds = time.perf_counter() - began, []
    plan = recipes.dp_fed_avg(
        rounds=ROUNDS, clients=Poisson(population, COHORT / population), lr=0.1, clip_norm=1.0, noise_multiplier=1.0, epochs=1,
        batch=5,
    )  # fmt: skip
    for done in run(plan, task, streams=Seeded(0), eval_every=ROUNDS):
        rounds.append(done.seconds)
    return built, min(rounds)


def main() -> None:
    torch.set_num_threads(1)
    print("| clients | task built, s | round of 1,000 clients, ms |\n|---:|---:|---:|")
    for population in (10_000, 100_000, 1_000_000):
        with tempfile.TemporaryDirectory() as where:
            built, fastest = measured(folder(Path(where), population), population)
            print(f"| {population:,} | {built:.2f} | {1000 * fastest:.0f} |")


if __name__ == "__main__":
    main()
