"""How clients are computed: the one place where a way is chosen. `WAYS` is the table, the first that fits is taken.

By public numbers alone, the plan and the shapes of model and records: the way is written down (`engine.jsonl`), and how
many records a client holds, or what stands in them, is private. Gains are CPU time on one AVX2 core;
`python benchmarks/own/paths.py` measures them anew.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sordino import kernels
from sordino.data.task import Task
from sordino.engines.dense import DenseClients, can_chain
from sordino.engines.linear import LinearClients, can_write_out
from sordino.engines.objectives import ManyClients, OneClient
from sordino.layout import Layout
from sordino.parts.gradients import Batch, Moreau, Objective
from sordino.plan import Plan
from sordino.rng import Streams

Path = Literal["batched", "sequential"]  # a chunk of clients at once, or one at a time
BATCH_BELOW = {"cpu": 2e7}  # FLOP per local step: below, one bmm over many clients beats one client at a time
ELSEWHERE = 2e9  # the same on other devices: a guess, never measured; `path` overrules it
NOMINAL = 32  # records of a step, for the rule above, where the plan does not say


@dataclass(frozen=True)
class Settings:
    """What an engine was asked for."""

    winograd: bool
    streams: Streams


@dataclass(frozen=True)
class Way:
    """A way to compute clients; `anywhere`: where its path is asked for by name it is taken, whatever `when` says."""

    path: Path
    when: Callable[[Plan, Task], bool]
    make: Callable[[Task, Settings], Objective]
    why: str
    gain: str
    anywhere: bool = False


def chosen(plan: Plan, task: Task, path: Path | None = None) -> Way:
    """The first way that fits; `path` leaves only its own."""
    fitting = (way for way in WAYS if path in (None, way.path))
    return next(way for way in fitting if (path is not None and way.anywhere) or way.when(plan, task))


def _linear(plan: Plan, task: Task) -> bool:
    """One Linear layer under a loss whose slope is written, and its envelope where the plan asks for that."""
    return can_write_out(task) and (not _smooths(plan) or task.losses.has_envelope)


def _dense(plan: Plan, task: Task) -> bool:
    """Two or more Linear layers with ReLU, Tanh or Sigmoid between them, the same losses; no envelope."""
    return can_chain(task) and not _smooths(plan)


def _small(plan: Plan, task: Task) -> bool:
    """Few operations in a step, and nothing that `vmap` cannot run."""
    batch = getattr(plan.local, "batch", None) or NOMINAL
    few = step_flops(task, batch) < BATCH_BELOW.get(task.device.type, ELSEWHERE)
    return few and can_batch(task)


def _smooths(plan: Plan) -> bool:
    return isinstance(getattr(plan.local, "gradient", None), Moreau)


WAYS = (
    Way(
        "batched",
        _linear,
        lambda task, _: LinearClients(task),
        "the gradient is written out: no autograd, no copies. A chain of one layer, with machine code and envelopes",
        "4.9 times as fast as vmap (784 x 10), 5.6 (50 x 1); with every record clipped 37",
    ),
    Way(
        "batched",
        _dense,
        lambda task, _: DenseClients(task),
        "the gradient is written out, layer by layer",
        "1.8 times as fast as vmap (784-64-10), with every record clipped 21",
    ),
    Way(
        "batched",
        _small,
        lambda task, _: ManyClients(task),
        "one product for many clients costs less than many small ones",
        "6 times as fast as one at a time (784-64-10); even near 20 MFLOP a step, slower above 50",
        anywhere=True,
    ),
    Way(
        "sequential",
        lambda plan, task: True,
        lambda task, asked: OneClient(task, asked.winograd, asked.streams.at(0, "mixing")),
        "whatever torch can run: recurrence, buffers, dropout, large convolutions",
        "the one that the others are measured against",
        anywhere=True,
    ),
)

# Inside a way, by rules of their own that stand where they are computed:
# | what | in | when | gain |
# |---|---|---|---|
# | machine code (kernels/linear.py) | LinearClients | numba, records of float32 on a CPU, a loss of ours | 1.6 |
# | one backward pass for all records (per_record/) | OneClient | a clip in the L2 norm, no layer that mixes | 3.3 |
# | Winograd (engines/winograd.py) | OneClient | wide 5 x 5 convolutions of stride 1 on a CPU | 1.35, a round 2 |


def compiled(objective: Objective) -> bool:
    """Whether machine code runs in it."""
    linear = isinstance(objective, LinearClients) and objective.kernel
    return linear or (winograd(objective) > 0 and kernels.available())


def winograd(objective: Objective) -> int:
    """How many of its convolutions go by Winograd's method."""
    return objective.winograd if isinstance(objective, OneClient) else 0


def can_batch(task: Task) -> bool:
    """Whether vmap can run this model: no buffers that change, no coins, no operation without a batching rule."""
    layout: Layout = task.layout
    if layout.trainable < layout.size or any(isinstance(part, nn.RNNBase) for part in task.model.modules()):
        return False
    x, y = (_stand_in(side).to(task.device) for side in (task.clients.records.x, task.clients.records.y))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # vmap warns where it would loop slowly
            return _padding_is_harmless(task, x, y)
    except (RuntimeError, ValueError, NotImplementedError, UserWarning):
        return False


def _stand_in(table: Tensor) -> Tensor:
    """Two rows as those of a table, but made up: what is decided by them is written down, and must tell of nobody."""
    shape = (2, *table.shape[1:])
    size = math.prod(shape)
    numbers = torch.linspace(0.05, 0.95, size) if table.is_floating_point() else torch.zeros(size)
    return numbers.to(table.dtype).view(shape)


def _padding_is_harmless(task: Task, x: Tensor, y: Tensor) -> bool:
    """A masked record must not change a client's gradient: it does where a layer mixes the records of a batch."""
    many = ManyClients(task)
    w = many.place(task.layout.flatten(task.model), 2)
    bare = many.gradient(w, Batch(torch.stack([x, x]), torch.stack([y, y])))
    longer_x, longer_y = torch.cat([x, x[:1] * 0]), torch.cat([y, y[:1]])
    real = torch.tensor([[True, True, False]] * 2, device=task.device)
    padded = many.gradient(w, Batch(torch.stack([longer_x] * 2), torch.stack([longer_y] * 2), real))
    return torch.allclose(bare, padded, rtol=1e-3, atol=1e-5)


def step_flops(task: Task, batch: int) -> float:
    """Floating-point operations of one local step (forward and backward) on `batch` records, counted on one record."""
    model, counted = copy.deepcopy(task.model).eval(), [0.0]

    def count(module: nn.Module, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        counted[0] += 2.0 * _weights(module) * _positions(module, first)

    for module in model.modules():
        module.register_forward_hook(count)
    with torch.no_grad():
        model(task.clients.records.x[:1].to(task.device))
    return 3.0 * batch * counted[0]


def _weights(module: nn.Module) -> int:
    """Entries of the parameters that a module itself holds."""
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def _positions(module: nn.Module, output: Tensor) -> float:
    """How often a module's weights are used for one record: per pixel in a convolution, per step in a recurrence."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return output.numel() / module.out_channels
    if isinstance(module, nn.Linear):
        return output.numel() / module.out_features
    return output.numel() / output.shape[-1] if isinstance(module, nn.RNNBase) else 1.0
