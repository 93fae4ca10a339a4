"""Promise: what a notebook prints of an object shows no record, and is short.

One contract for every class: a dataclass that holds a tensor, an array, bytes, or another holder of them, has the repr
that shows shapes alone (`codec.hides_values`). And a planted record is looked for in what public objects print.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tests.dpsgd.loops import private
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sordino as so
from sordino.data.clients import Clients, Records
from sordino.data.metrics import Predictions
from sordino.data.records import Dataset
from sordino.dpsgd.loader import BatchPiece
from sordino.engines.base import ClientJob
from sordino.loop import run
from sordino.parts.gradients import Batch
from sordino.task import Task
from sordino.training import Result

LONGEST = 600  # characters
SENTINEL = 7351.28125  # a value of one record that stands nowhere else
DIGITS = re.compile(r"7351|7\.351")
HELD = {"Tensor", "NDArray", "ndarray", "bytes", "Array", "Ints", "Cohort"}
DIAGNOSTICS = {"Result", "Executed", "Subject", "InMemoryRun", "RunStart", "Round"}  # figures that are not private
WITHOUT_DATA = (
    "sordino_papers.theory",
    "sordino.accounting",
    "sordino.certificate",
    "sordino.ledger",
    "sordino.audit.tradeoff",
)


def dataclasses_of_the_package() -> list[type[Any]]:
    found: dict[type[Any], None] = {}
    for module in pkgutil.walk_packages(so.__path__, "sordino."):
        if module.name.endswith("__main__") or module.name.startswith(WITHOUT_DATA):
            continue
        try:
            names = vars(importlib.import_module(module.name)).values()
        except ImportError:  # of an extra that is not installed here
            continue
        found.update((c, None) for c in names if _own_dataclass(c, module.name))
    return list(found)


def _own_dataclass(found: Any, module: str) -> bool:
    return isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__ == module


def held_types(cls: type[Any], classes: list[type[Any]]) -> tuple[set[str], set[type[Any]]]:
    """Words and dataclasses in the annotations of what a repr would print; what a function takes is not held."""
    shown = [str(field.type) for field in dataclasses.fields(cls) if field.repr and "Callable" not in str(field.type)]
    words = {word for said in shown for word in re.findall(r"\w+", said)}
    here = vars(sys.modules[cls.__module__])
    known = {here.get(word) for word in words}
    return words, {c for c in classes if c in known or (c.__name__ in words and c.__name__ not in here)}


def holders(classes: list[type[Any]]) -> set[type[Any]]:
    """Every class from whose fields a tensor, an array, bytes or a diagnostic can be reached."""
    fields = {c: held_types(c, classes) for c in classes}
    found = {c for c, (words, _) in fields.items() if words & HELD or c.__name__ in DIAGNOSTICS}
    while more := {c for c, (_, inner) in fields.items() if inner & found} - found:
        found |= more
    return found


def test_every_class_that_can_hold_records_prints_shapes_alone() -> None:
    from sordino.codec.part import hides

    found = holders(dataclasses_of_the_package())
    expected = {"Records", "Clients", "Task", "Dataset", "Result", "BatchPiece", "Batch", "Round", "Silo", "Call"}
    assert expected <= {c.__name__ for c in found}
    values = sorted(f"{c.__module__}.{c.__qualname__}" for c in found if not hides(c))
    assert values == [], "put @codec.hides_values above their @dataclass"


class Notebook:
    """What IPython would ask an object for."""

    def __init__(self, value: object) -> None:
        html = getattr(value, "_repr_html_", None)
        self.texts = [repr(value), str(value), f"{value}", *([] if html is None else [html()])]


def planted(count: int = 60) -> tuple[Tensor, Tensor]:
    coins = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=coins)
    x[0] = SENTINEL
    return x, torch.randint(3, (count,), generator=coins)


@pytest.fixture(scope="module")
def task() -> Task:
    x, y = planted()
    clients = [(x[i : i + 6], y[i : i + 6]) for i in range(0, 60, 6)]
    return Task.of(nn.Linear(4, 3), clients, test=(x, y), public=(x, y), groups=["a", "b"] * 30)


@pytest.fixture(scope="module")
def result(task: Task) -> Result:
    return so.train(plan(), task)


def plan() -> so.Plan:
    return so.recipes.dp_fed_avg(
        clients=so.Everyone(10), rounds=2, epochs=1, batch=6, lr=0.1, clip_norm=1.0, noise_multiplier=1.0
    )


def public_objects(task: Task, result: Result) -> dict[str, object]:
    x, y = planted()
    model, optimizer, loader = private(dataset=TensorDataset(x, y))
    piece = BatchPiece(60, 0, True, x)
    array = x.numpy()
    whole = Dataset(x=array, y=y.numpy(), test_x=array, test_y=y.numpy(), names=("p7351",), name="planted")
    job = ClientJob(plan().public(0), x.reshape(-1), np.arange(10))
    done = list(run(plan(), task))
    return {
        "task": task, "clients": task.clients, "records": task.test, "one silo": task.as_silo(0),
        "server": task.as_server(), "result": result, "task of the result": result.task, "kept": result.in_memory,
        "loader": loader, "optimizer": optimizer, "model": model, "sampler": loader.pieces, "pending": loader.pending,
        "piece": piece, "dataset": whole, "clients' batch": Batch(x[None], y[None]), "job": job, "round": done[-1],
        "state": done[-1].state, "seen": Predictions(x, y, task.losses), "Clients.of": Clients.of([(x, y)]),
        "Records": Records(x, y), "rounds": done, "many": [Records(x, y)], "named": {"x": Records(x, y)},
    }  # fmt: skip


def test_no_public_object_prints_a_value_of_a_record(task: Task, result: Result) -> None:
    assert DIGITS.search(repr(planted()[0]))  # the search would find it
    for name, value in public_objects(task, result).items():
        for text in Notebook(value).texts:
            assert not DIGITS.search(text), f"{name}: {text[:200]}"
            assert len(text) < LONGEST, f"{name}: {len(text)} characters"


def test_a_task_says_what_it_is_without_its_records(task: Task) -> None:
    assert repr(task.clients.records) == "Records(x=float32[60, 4], y=int64[60], lazy=False)"
    assert "model=Linear" in repr(task)
    assert "float32[60, 4]" in repr(task)


def test_a_result_says_what_it_cost_and_no_diagnostic(result: Result) -> None:
    found = repr(result)
    assert f"epsilon={result.certificate['epsilon']}" in found
    assert "update_norm" not in found
    assert "not private" not in found
