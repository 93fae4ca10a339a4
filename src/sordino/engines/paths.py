"""Execution paths: the table of all ways to compute clients, with their measured gains. Called by engines/inprocess.py.

The first row of `PATHS` whose condition holds is taken. Conditions read public numbers alone: the plan, the shapes of
model and records: the path is written to `engine.jsonl`, while how many records a client holds is private.
Gains are ratios of CPU seconds on one AVX2 core (interleaved, least of several) on models that nobody tuned for: linear
617 x 26; MLPs of widths 93-41-7, 617-51-26 and 617-203-97-26; CNNs of odd channels. A path that gains less than 1.2
is not kept. `python benchmarks/own/paths.py` measures them again.

Inside a path, by conditions that stand where they are computed:
| what | in | condition | gain |
|---|---|---|---|
| compiled loops (kernels/linear.py) | LinearClients | numba, float32 records on a CPU, a shipped loss | 1.36 |
| one backward pass for all records (dpsgd/) | OneClient | an L2 clip, no layer that mixes records | 3.3 (MNIST CNN) |
| Winograd (engines/winograd.py) | OneClient | numba, 5 x 5 convolutions of 32 channels or more on a CPU | 1.1 to 1.3 |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sordino.engines.dense_clients import DenseClients, can_chain
from sordino.engines.linear_clients import LinearClients, can_write_out
from sordino.engines.objectives import ManyClients, OneClient
from sordino.layout import Layout
from sordino.parts.gradients import Batch, Objective
from sordino.plan import Plan
from sordino.rng import Streams, forked_rng
from sordino.task import Task

Path = Literal["batched", "sequential"]  # a chunk of clients at once, or one at a time
BATCH_BELOW = {"cpu": 2e7}  # FLOP per local step: below, one bmm over many clients beats one client at a time
ELSEWHERE = 2e9  # the same on other devices: a guess, never measured; `path` overrules it
NOMINAL = 32  # records of a step, for the rule above, where the plan does not say


@dataclass(frozen=True)
class Settings:
    """Options of the engine that a path is built with."""

    winograd: bool
    streams: Streams
    any_order: bool = True  # whether the plan's local solver treats all coordinates alike


@dataclass(frozen=True)
class ExecutionPath:
    """One way to compute clients. `anywhere`: taken whatever `when` says, where its path is asked for by name."""

    path: Path
    when: Callable[[Plan, Task], bool]
    make: Callable[[Task, Settings], Objective]
    why: str
    gain: str
    anywhere: bool = False


def choose_path(plan: Plan, task: Task, path: Path | None = None) -> ExecutionPath:
    """The first path whose condition holds; `path` leaves only those of that name."""
    fitting = (way for way in PATHS if path in (None, way.path))
    return next(way for way in fitting if (path is not None and way.anywhere) or way.when(plan, task))


def _small(plan: Plan, task: Task) -> bool:
    """Few operations in a step, and nothing that `vmap` cannot run."""
    batch = getattr(plan.local, "batch", None) or NOMINAL
    few = step_flops(task, batch) < BATCH_BELOW.get(task.device.type, ELSEWHERE)
    return few and can_batch(task)


PATHS = (
    ExecutionPath(
        "batched",
        lambda plan, task: can_write_out(task) and (not plan.local.needs_envelope or task.losses.has_envelope),
        lambda task, _: LinearClients(task),
        "one Linear layer: the gradient is written out, without autograd; compiled loops; Moreau envelopes",
        "2.4 times as fast as vmap; with every record clipped 17",
    ),
    ExecutionPath(
        "batched",
        lambda plan, task: can_chain(task) and not plan.local.needs_envelope,
        lambda task, _: DenseClients(task),
        "Linear layers and activations: the gradient is written out, layer by layer",
        "0.9 to 2.4 times as fast as vmap; with every record clipped 16 to 21",
    ),
    ExecutionPath(
        "batched",
        _small,
        lambda task, _: ManyClients(task),
        "one product for many clients costs less than many small ones",
        "1.6 to 8.5 times as fast as one client at a time; even near 20 MFLOP a step, slower above 50",
        anywhere=True,
    ),
    ExecutionPath(
        "sequential",
        lambda plan, task: True,
        lambda task, asked: OneClient(task, asked.winograd, asked.streams.at(0, "mixing"), asked.any_order),
        "whatever torch can run: recurrence, buffers, dropout, large convolutions",
        "1: the others are measured against it",
        anywhere=True,
    ),
)


def compiled(objective: Objective) -> bool:
    """Whether compiled loops run in an objective."""
    linear = isinstance(objective, LinearClients) and objective.kernel
    return linear or winograd(objective) > 0


def winograd(objective: Objective) -> int:
    """How many convolutions of an objective run by Winograd's method."""
    return objective.winograd if isinstance(objective, OneClient) else 0


def can_batch(task: Task) -> bool:
    """Whether vmap can run this model: no buffers that change, no coins, no operation without a batching rule.

    Records must keep apart, for a client with fewer of them than others is filled up with some that do not count.
    """
    layout: Layout = task.layout
    if layout.trainable < layout.size or any(isinstance(part, nn.RNNBase) for part in task.model.modules()):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # vmap warns where it would loop slowly
            many, (x, y) = ManyClients(task), task.program.sample(2)  # two clients with made-up records
            y = y if y.is_floating_point() else torch.zeros_like(y)
            start = many.place(task.layout.flatten(task.model), 2)
            many.gradient(start, Batch(torch.stack([x, x]), torch.stack([y, y])))
    except (RuntimeError, ValueError, NotImplementedError, UserWarning):
        return False
    return task.program.apart


def step_flops(task: Task, batch: int) -> float:
    """Floating-point operations of one local step (forward and backward) on `batch` records, by two made-up ones."""
    model, counted = task.program.running().train(), [0.0]

    def count(module: nn.Module, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        weights = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        counted[0] += 2.0 * weights * _positions(module, first)

    for module in model.modules():
        module.register_forward_hook(count)
    with torch.no_grad(), forked_rng():
        model(task.program.sample(2)[0])
    return 3.0 * batch * counted[0] / 2


def _positions(module: nn.Module, output: Tensor) -> float:
    """How often a module's weights are used for one record: per pixel in a convolution, per step in a recurrence."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return output.numel() / module.out_channels
    if isinstance(module, nn.Linear):
        return output.numel() / module.out_features
    return output.numel() / output.shape[-1] if isinstance(module, nn.RNNBase) else 1.0
