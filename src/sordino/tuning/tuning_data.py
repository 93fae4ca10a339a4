"""Data for hyperparameter search that costs no privacy: public or synthetic records in the shape of the task."""

from __future__ import annotations

import copy
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sordino.certificate.facts import Declared
from sordino.data.clients import Clients, Records
from sordino.errors import DataError
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task

Source = Literal["public", "synthetic"]


def privacy_cost(plan: Plan, task: Task, source: Source, public: tuple[Declared, ...]) -> str:
    """What the search has read, and who declared it public."""
    read = " and ".join(f"{one.rows} {one.what} (declared by {one.by})" for one in public)
    text = {
        "public": f"nothing beyond what is declared public: {read} were read; they are not protected",
        "synthetic": "nothing: every record was synthetic",
    }[source]
    if plan.local.reads is not None:
        return text
    return f"{text}; that a client holds {_sizes(plan, task)[0]} records on average was taken as public"


def tuning_task(plan: Plan, task: Task, source: Source, seed: int) -> Task:
    """A task of the same shape: as many clients, of as many records each, and a test of its own."""
    sizes = _sizes(plan, task)
    records, test = _public(task, seed) if source == "public" else _synthetic(task, sum(sizes), seed)
    rng = Seeded(seed).at(0, "stand-in")
    index = rng.choice(len(records), sum(sizes), replace=len(records) < sum(sizes)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Task(task.model, Clients(records, index, offsets), test, task.loss)


def _sizes(plan: Plan, task: Task) -> list[int]:
    """Declared sizes where one record is the unit; else the average size for all, which is taken as public."""
    reads, population = plan.local.reads, plan.clients.population
    if reads is not None:
        return [reads.size(silo) for silo in range(population)]
    return [max(1, len(task.clients.index) // population)] * population


def _public(task: Task, seed: int) -> tuple[Records, Records]:
    """The public records in two halves: one to train on, one to test on."""
    known = task.public or task.test
    if known is None or len(known) < 20:
        found = "no public records to tune on, and private ones are never read"
        raise DataError(found, "at least 20 that are declared public", "name a test file, or use --data synthetic")
    order = torch.from_numpy(Seeded(seed).at(0, "public halves").permutation(len(known)))
    half = len(order) // 2
    return tuple(Records(known.x[part], known.y[part]) for part in (order[:half], order[half:]))  # type: ignore[return-value]


def _synthetic(task: Task, count: int, seed: int) -> tuple[Records, Records]:
    """Standard normal inputs, labelled by a random teacher network of the same architecture."""
    shape, rng = task.clients.records.x.shape[1:], Seeded(seed).at(0, "made up")
    if not task.clients.records.x.is_floating_point():
        raise DataError("inputs that are not numbers", "a task with numeric inputs", "use --data public")
    x = _normal((count + 1000, *shape), rng)
    y = _labels(task, x, rng)
    return Records(x[:count], y[:count]), Records(x[count:], y[count:])


def _normal(shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def _labels(task: Task, x: Tensor, rng: np.random.Generator) -> Tensor:
    teacher = copy.deepcopy(task.model).eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.copy_(_normal(tuple(parameter.shape), rng) / max(1, parameter[0].numel()) ** 0.5)
        out: Tensor = teacher(x)
    like = task.clients.records.y
    if like.is_floating_point():
        noisy = out + 0.3 * _normal(tuple(out.shape), rng)
        return noisy.reshape(len(x), *like.shape[1:])
    return (out.argmax(-1) if out.shape[-1] > 1 else (out[:, 0] > 0)).to(like.dtype)
