"""Linear models, a chunk of clients at once, with the gradient written out: no autograd, no copies, buffers reused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import kernels
from sordino.accounting.bounds import Norm
from sordino.data.clients import Records
from sordino.engines.batches import Batches
from sordino.engines.dense_clients import DenseClients, finite, known_targets, sum_of_outer
from sordino.errors import DataError
from sordino.parts.clipping import FEW_DIGITS, SLACK, factors, lengths, pull
from sordino.parts.gradients import Ball, Batch
from sordino.parts.losses import CODES
from sordino.task import Task

SMALL = 1024  # weights of a model
Rows = NDArray[np.int64]


class LinearClients(DenseClients):
    """A chain of one layer: with machine code, envelopes, and records that several models share.

    z = x W^T + c;  r = d loss / d z, e.g. softmax(z) - onehot(y);   dW = r^T x / n,  dc = sum r / n
    One record's gradient is the outer product of r and (x, 1), so its norm is ||r|| ||(x, 1)||: it is never formed.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        layer = linear_layer(task)
        assert layer is not None
        self.outputs, self.inputs = layer.weight.shape
        self.bias, self.loss = layer.bias is not None, task.program.losses
        known = type(self.loss) in CODES
        x, w = task.clients.records.x, layer.weight  # machine code can read the records where they lie
        single = x.dtype == w.dtype == torch.float32 and x.device.type == w.device.type == "cpu"
        self.kernel = known and kernels.available() and single and x.is_contiguous()

    def descend(self, start: Tensor, batches: Iterable[Batch], clients: int, lr: float, decay: float) -> Tensor | None:
        """The same steps in machine code, client after client, where that can read the records."""
        if not (self.kernel and isinstance(batches, Batches)):
            return super().descend(start, batches, clients, lr, decay)
        from sordino.kernels import linear as kernel

        rows, edge = self.place(start, clients), self.outputs * self.inputs
        weight, bias = rows[:, :edge].contiguous().view(clients, self.outputs, -1), rows[:, edge:].contiguous()
        x, y = self._table(batches.records, batches.rows[batches.real])
        read, pace = np.where(batches.real, batches.rows, -1), (np.float32(lr), np.float32(decay))
        offset = bias if self.bias else weight.new_zeros(weight.shape[:2])
        kernel.descend(x, y, read, weight.numpy(), offset.numpy(), self.bias, pace, self._code())
        return torch.cat([weight.flatten(1), bias], 1)

    def pulled(self, w: Tensor, rows: Rows, records: Records, sizes: Tensor, ball: Ball, order: Rows) -> Tensor:
        """`clipped` of the table's `rows` [m, b] in machine code, in this `order`; `sizes` [n] are those of (x, 1)."""
        from sordino.kernels import linear as kernel

        y = self._table(records, rows)[1]
        edge, out = self.outputs * self.inputs, torch.zeros_like(w)
        weight = w[:, :edge].contiguous().view(len(w), self.outputs, -1)
        bias = w[:, edge:].contiguous() if self.bias else w.new_zeros(weight.shape[:2])
        limits = (ball.clip_norm * (1 - SLACK), ball.norm, FEW_DIGITS)
        at = self.filled(records).numpy(), y, rows, weight.numpy(), bias.numpy(), sizes.numpy()
        kernel.clipped(*at, self._code(), limits, out.numpy(), order)
        return out

    def _table(self, records: Records, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """All records and targets as machine code reads them, where they lie; labels are looked at before it does."""
        x, y = records.x.view(len(records), -1), records.y.reshape(len(records), -1)
        if self.loss.targets == "class":
            check_labels(y.numpy()[rows], self.outputs)
        return x.numpy(), y.numpy()

    def filled(self, records: Records) -> Tensor:
        """The table in one row, every record filled up with zeros to a multiple of 8."""
        return nn.functional.pad(records.x.flatten(1), (0, -self.inputs % 8)).flatten()

    def _code(self) -> tuple[int, np.float32]:
        """The loss as a kernel knows it."""
        return CODES[type(self.loss)], np.float32(getattr(self.loss, "tau", 0))

    def shared(self, w: Tensor, x: Tensor, y: Tensor, ball: Ball) -> Tensor:
        """`clipped` where all rows of w [g, d] read the same records x [n, ...], y [n, ...]: one product for all."""
        g, edge, x = len(w), self.outputs * self.inputs, x.reshape(len(x), self.inputs)
        scores = (x @ w[:, :edge].reshape(g * self.outputs, self.inputs).T).view(len(x), g, self.outputs)
        if self.bias:
            scores += w[:, edge:]
        residual = self.slopes_at(scores, y[:, None].expand(len(x), g, *y.shape[1:]), x[:, None], ball)
        sizes = self.sizes(x, ball.norm)
        residual = pull(residual, factors(lengths(residual, ball.norm) * sizes[:, None], ball.clip_norm, None))
        weights = sum_of_outer(residual.view(1, len(x), -1), finite(x, sizes)[None]).view(g, edge).double()
        return torch.cat([weights, residual.sum(0, dtype=torch.float64)], 1) if self.bias else weights

    def sizes(self, x: Tensor, norm: Norm) -> Tensor:
        """||(x, 1)|| of every record."""
        return self.stages[0].sizes(x, norm)

    def slopes_at(self, scores: Tensor, y: Tensor, x: Tensor, ball: Ball) -> Tensor:
        """d loss / d scores, or that of the loss' envelope."""
        if ball.envelope is None:
            return self.slope(scores, y)
        return self.loss.envelope(scores, y, ball.envelope.beta / self.sizes(x, 2).square()[..., None])


def check_labels(labels: NDArray[np.int64], classes: int) -> None:
    """Refuse a label that no score stands for."""
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        found = f"labels from {labels.min()} to {labels.max()} and a model of {classes} classes"
        raise DataError(found, f"labels from 0 to {classes - 1}", "give the model one output per class")


def linear_layer(task: Task) -> nn.Linear | None:
    """The only layer of a model that is Linear, or Flatten and Linear; None for any other model."""
    parts = task.program.chain
    plain = all(type(part) in (nn.Flatten, nn.Linear) for part in parts)
    layers = [part for part in parts if isinstance(part, nn.Linear)]
    if not plain or len(layers) != 1:
        return None
    trained = all(parameter.requires_grad for parameter in task.model.parameters())
    return layers[0] if trained and parts[-1] is layers[0] else None


def can_write_out(task: Task) -> bool:
    """Whether this task is a linear model under a loss whose gradient is written here."""
    layer = linear_layer(task)
    if layer is None:
        return False
    flat = task.clients.records.x[:1].flatten(1).shape[1] == layer.in_features
    return flat and known_targets(task, layer.out_features)
