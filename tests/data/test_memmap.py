"""Promises of mapped data: the same run as in memory, nothing read but the cohort's rows, mistakes in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.counts import calls, peak

from sordino import Poisson, recipes
from sordino.config import TaskSpec
from sordino.data.clients import Clients, Records
from sordino.data.datasets import write_memmap
from sordino.errors import ConfigError, DataError
from sordino.loop import run
from sordino.models import Logistic
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task


def made(folder: Path, population: int, each: int = 4, width: int = 6) -> Path:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((population * each, width)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    write_memmap(folder, x, y, np.full(population, each), x[:50], y[:50])
    return folder


def spec(folder: Path, **options: Any) -> TaskSpec:
    return TaskSpec(dataset="memmap", options={"path": str(folder), "classes": 2, **options}, model=Logistic())


def plan(population: int, cohort: float, rounds: int = 3) -> Plan:
    return recipes.dp_fed_avg(
        rounds=rounds, clients=Poisson(population, cohort / population), lr=0.1, clip_norm=1.0, noise_multiplier=1.0,
        epochs=1, batch=2,
    )  # fmt: skip


def test_a_run_is_the_same_as_with_the_data_in_memory(tmp_path: Path) -> None:
    mapped = spec(made(tmp_path, 40)).build(40, 0)
    x, y = (torch.from_numpy(np.load(tmp_path / f"{name}.npy")) for name in ("x", "y"))
    clients = Clients(Records(x, y), np.arange(len(x)), np.load(tmp_path / "clients.npy"))
    memory = Task(mapped.model, clients, mapped.test)
    first, second = ([*run(plan(40, 10.0), task, streams=Seeded(1))][-1].state.memory for task in (mapped, memory))
    assert all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))


def test_records_outside_the_cohort_are_never_read(tmp_path: Path) -> None:
    """A file with a hole: its rows are there for all clients, on the disk for none, and the run leaves it so."""
    made(tmp_path, 10)
    rows, width = 50_000_000, 6
    hole = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(rows, width))
    labels = np.lib.format.open_memmap(tmp_path / "y.npy", mode="w+", dtype=np.int64, shape=(rows,))
    del hole, labels
    np.save(tmp_path / "clients.npy", np.linspace(0, rows, 1001).astype(np.int64))
    task = spec(tmp_path).build(1000, 0)
    small = recipes.dp_fed_avg(
        rounds=1, clients=Poisson(1000, 0.002), lr=0.1, clip_norm=1.0, noise_multiplier=1.0, epochs=1, batch=None
    )  # fmt: skip
    before = resident()
    assert len([*run(small, task)]) == 1
    assert resident() - before < 300, "MB; the file has 1,200"


def resident() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def cost(folder: Path, population: int) -> tuple[int, int]:
    """Calls of one round, and bytes of another, behind a first one."""
    task = spec(made(folder, population)).build(population, 0)
    rounds = run(plan(population, 100.0, 4), task, eval_every=4)
    next(rounds)
    return calls(lambda: next(rounds)), peak(lambda: next(rounds))


def test_a_round_costs_what_its_cohort_costs_not_the_population(tmp_path: Path) -> None:
    few, many = cost(tmp_path / "few", 1000), cost(tmp_path / "many", 300_000)
    assert many[0] < 2 * few[0]
    assert many[1] < 2 * few[1]


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("x", np.zeros((40, 6)), "float64"),
        ("y", np.zeros(40, np.float32), "int64 labels and a number of classes"),
        ("y", np.zeros(39, np.int64), "39 of y"),
        ("clients", np.array([0, 20, 10, 40]), "rise from 0"),
        ("clients", np.array([0, 20]), "rise from 0"),
        ("test_x", np.full((50, 6), np.nan, np.float32), "test_x"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path, name: str, array: Any, said: str) -> None:
    made(tmp_path, 10)
    np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(DataError, match=said):
        spec(tmp_path).build(10, 0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    made(tmp_path, 10)
    (tmp_path / "clients.npy").unlink()
    with pytest.raises(DataError, match=r"clients\.npy"):
        spec(tmp_path).build(10, 0)


def test_options_that_would_read_everything_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory-mapped"):
        spec(made(tmp_path, 10), train=5).build(10, 0)


def test_a_record_that_no_round_reads_is_not_looked_at(tmp_path: Path) -> None:
    x = np.load(made(tmp_path, 10) / "x.npy")
    x[0, 0] = np.nan
    np.save(tmp_path / "x.npy", x)
    assert spec(tmp_path).build(10, 0).clients.population == 10
