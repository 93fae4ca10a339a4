"""The clients' gradients: one client at a time through autograd, or a chunk of clients through vmap."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from sordino.data.task import Loss, Task
from sordino.layout import Layout
from sordino.parts.gradients import Batch


class OneClient:
    """One client at a time: the module's tensors are views of one flat row, and so are its gradients."""

    def __init__(self, task: Task) -> None:
        self.layout = task.layout
        self.model = copy.deepcopy(task.model).train()
        self.losses = task.losses
        self.row = torch.empty(1, self.layout.size)
        self.slope = torch.zeros(1, self.layout.size)
        self.layout.bind(self.model, self.row[0], self.slope[0])
        self.counters = [(b, b.clone()) for b in self.model.buffers() if not b.is_floating_point()]

    @property
    def trainable(self) -> int:
        return self.layout.trainable

    def place(self, start: Tensor, clients: int) -> Tensor:
        """The row [1, d], set to `start`; integer buffers begin anew for each client."""
        self.row[0].copy_(start)
        for buffer, first in self.counters:
            buffer.copy_(first)
        return self.row

    def inward(self, start: Tensor) -> Tensor:
        """Convolutions channels last."""
        return self.layout.channels_last(start[None])[0]

    def outward(self, rows: Tensor) -> Tensor:
        return self.layout.channels_first(rows)

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """Gradient [1, d] of the mean loss of the batch at w [1, d]."""
        if w is not self.row:
            kept = self.row.clone()
            self.row.copy_(w)
            slope = self._backward(batch)
            self.row[0, : self.trainable].copy_(kept[0, : self.trainable])
            return slope
        return self._backward(batch)

    def _backward(self, batch: Batch) -> Tensor:
        self.slope.zero_()
        x, y = batch.x[0], batch.y[0]
        if batch.mask is not None:
            x, y = x[batch.mask[0]], y[batch.mask[0]]
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)  # convolutions and pools are far faster so on a CPU
        self.losses(self.model(x), y).mean().backward()  # type: ignore[no-untyped-call]
        return self.slope


class ManyClients:
    """A chunk of clients at once: vmap of the gradient over rows of parameters."""

    def __init__(self, task: Task) -> None:
        self.layout = task.layout
        self.model = copy.deepcopy(task.model).train()
        self.slopes = vmap(grad(_mean_loss(self.model, task.losses)))

    @property
    def trainable(self) -> int:
        return self.layout.trainable

    def place(self, start: Tensor, clients: int) -> Tensor:
        """Rows [m, d], each a copy of `start`."""
        return start.repeat(clients, 1)

    def inward(self, start: Tensor) -> Tensor:
        return start

    def outward(self, rows: Tensor) -> Tensor:
        return rows

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """Gradients [m, d] of each client's mean loss at its own row of w [m, d]."""
        mask = batch.mask if batch.mask is not None else torch.ones(batch.y.shape[:2], dtype=w.dtype)
        named = self.slopes(self.layout.views(w), batch.x, batch.y, mask.to(w.dtype))
        return torch.cat([named[slot.name].reshape(len(w), -1) for slot in self.layout.slots], dim=1)


def _mean_loss(model: nn.Module, losses: Loss) -> Any:
    def mean_loss(named: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        values = losses(functional_call(model, named, (x,)), y)
        return (values * mask).sum() / mask.sum().clamp(min=1)

    return mean_loss


def can_batch(task: Task) -> bool:
    """Whether vmap can run this model: no buffers that change, no coins, no operation without a batching rule."""
    layout: Layout = task.layout
    if layout.trainable < layout.size or any(isinstance(part, nn.RNNBase) for part in task.model.modules()):
        return False
    records = task.clients.records
    pair = torch.from_numpy(np.resize(task.clients.index[:2], 2))
    x, y = records.x[pair], records.y[pair]
    try:
        return _padding_is_harmless(task, x, y)
    except (RuntimeError, ValueError, NotImplementedError):
        return False


def _padding_is_harmless(task: Task, x: Tensor, y: Tensor) -> bool:
    """A masked record must not change a client's gradient: it does where a layer mixes the records of a batch."""
    many = ManyClients(task)
    w = many.place(task.layout.flatten(task.model), 2)
    bare = many.gradient(w, Batch(torch.stack([x, x]), torch.stack([y, y])))
    longer_x, longer_y = torch.cat([x, x[:1] * 0]), torch.cat([y, y[:1]])
    real = torch.tensor([[True, True, False]] * 2)
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
        model(task.clients.records.x[:1])
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
