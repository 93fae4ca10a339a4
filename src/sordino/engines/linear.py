"""Linear models, a chunk of clients at once, with the gradient written out: no autograd, no copies, buffers reused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import kernels
from sordino.data.task import Records, Task
from sordino.engines.base import Copies
from sordino.engines.batches import Batches
from sordino.errors import DataError
from sordino.parts.bounds import Norm
from sordino.parts.clipping import FEW_DIGITS, factors, pull
from sordino.parts.gradients import Ball, Batch
from sordino.parts.losses import CODES
from sordino.parts.norms import SLACK, lengths

SMALL = 1024  # weights of a model
FEW, MANY = 128, 4096  # records of a batch: up to FEW are added in float32, products of more than MANY in float64
Rows = NDArray[np.int64]


class LinearClients(Copies):
    """m clients of one `Linear` layer under a loss whose slope is written out.

    z = x W^T + c;  r = d loss / d z, e.g. softmax(z) - onehot(y);   dW = r^T x / n,  dc = sum r / n
    One record's gradient is the outer product of r and (x, 1), so its norm is ||r|| ||(x, 1)||: it is never formed.
    """

    def __init__(self, task: Task) -> None:
        self.layout = task.layout
        layer = linear_layer(task.model)
        assert layer is not None
        self.outputs, self.inputs = layer.weight.shape
        self.bias = layer.bias is not None
        self.loss = task.losses
        self.slope = self.loss.slope
        self.slopes = torch.empty(0)
        known = type(self.loss) in CODES
        self.kernel = known and kernels.available() and _readable(task.clients.records.x, layer.weight)

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """Gradients [m, d], written into one buffer that the next call overwrites."""
        if self.slopes.shape != w.shape:
            self.slopes = torch.empty_like(w)
        m, edge = len(w), self.outputs * self.inputs
        x = batch.x.reshape(m, -1, self.inputs)
        weight = w[:, :edge].view(m, self.outputs, self.inputs)
        residual = mean_shares(self.slope(self._scores(x, weight, w[:, edge:]), batch.y), batch)
        return self._written(residual, x)

    def descend(self, start: Tensor, batches: Iterable[Batch], clients: int, lr: float, decay: float) -> Tensor | None:
        """w <- (1 - lr decay) w - lr gradient, batch after batch: the product that makes the gradient adds it too.

        Weights and biases lie apart meanwhile: a product on rows of their own is a third faster.
        """
        rows, edge = self.place(start, clients), self.outputs * self.inputs
        weight, bias = rows[:, :edge].contiguous().view(clients, self.outputs, -1), rows[:, edge:].contiguous()
        if self.kernel and isinstance(batches, Batches):
            return self._by_kernel(weight, bias, batches, lr, decay)
        for batch in batches:
            x = batch.x.reshape(clients, -1, self.inputs)
            residual = self.slope(self._scores(x, weight, bias), batch.y)
            pace = -lr if batch.mask is not None else -lr / residual.shape[1]
            residual = residual if batch.mask is None else mean_shares(residual, batch)
            if decay:
                keep = 1 - lr * decay * (1.0 if batch.active is None else batch.active[:, None])
                weight.mul_(keep if batch.active is None else keep[..., None])  # type: ignore[index]
                bias.mul_(keep)
            weight.baddbmm_(residual.transpose(1, 2), x, alpha=pace)
            if self.bias:
                bias.add_(residual.sum(1), alpha=pace)
        return torch.cat([weight.flatten(1), bias], 1)

    def _by_kernel(self, weight: Tensor, bias: Tensor, batches: Batches, lr: float, decay: float) -> Tensor:
        """The same in machine code, client after client."""
        from sordino.kernels import linear as kernel

        x, y = self._table(batches.records, batches.rows[batches.real])
        rows, pace = np.where(batches.real, batches.rows, -1), (np.float32(lr), np.float32(decay))
        offset = bias if self.bias else weight.new_zeros(weight.shape[:2])
        kernel.descend(x, y, rows, weight.numpy(), offset.numpy(), self.bias, pace, self._code())
        return torch.cat([weight.flatten(1), bias], 1)

    def pulled(self, w: Tensor, rows: Rows, records: Records, sizes: Tensor, ball: Ball, order: Rows) -> Tensor:
        """`clipped` of the table's `rows` [m, b] in machine code, in this `order`; `sizes` [n] are those of (x, 1)."""
        from sordino.kernels import linear as kernel

        y = self._table(records, rows)[1]
        edge, out = self.outputs * self.inputs, torch.zeros_like(w)
        weight = w[:, :edge].contiguous().view(len(w), self.outputs, -1)
        bias = w[:, edge:].contiguous() if self.bias else w.new_zeros(weight.shape[:2])
        limits = (ball.radius * (1 - SLACK), ball.norm, FEW_DIGITS)
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

    def clipped(self, w: Tensor, batch: Batch, ball: Ball) -> Tensor:
        """Sums [m, d] of every record's gradient, each pulled into the ball; masked and non-finite ones are zero."""
        if self.slopes.shape != w.shape:
            self.slopes = torch.empty_like(w)
        m, edge = len(w), self.outputs * self.inputs
        x = batch.x.reshape(m, -1, self.inputs)
        scores = self._scores(x, w[:, :edge].view(m, self.outputs, self.inputs), w[:, edge:])
        residual = self._slopes_at(scores, batch.y, x, ball)
        sizes = self.sizes(x, ball.norm) if batch.sizes is None else batch.sizes
        scale = factors(lengths(residual, ball.norm) * sizes, ball.radius, batch.mask)
        residual, x = pull(residual, scale), finite(x, sizes)
        if x.shape[1] <= FEW:
            return self._written(residual, x)
        weights = summed(residual, x).flatten(1)
        return torch.cat([weights, residual.sum(1, dtype=torch.float64)], 1) if self.bias else weights

    def shared(self, w: Tensor, x: Tensor, y: Tensor, ball: Ball) -> Tensor:
        """`clipped` where all rows of w [g, d] read the same records x [n, ...], y [n, ...]: one product for all."""
        g, edge, x = len(w), self.outputs * self.inputs, x.reshape(len(x), self.inputs)
        scores = (x @ w[:, :edge].reshape(g * self.outputs, self.inputs).T).view(len(x), g, self.outputs)
        if self.bias:
            scores += w[:, edge:]
        residual = self._slopes_at(scores, y[:, None].expand(len(x), g, *y.shape[1:]), x[:, None], ball)
        sizes = self.sizes(x, ball.norm)
        residual = pull(residual, factors(lengths(residual, ball.norm) * sizes[:, None], ball.radius, None))
        weights = summed(residual.view(1, len(x), -1), finite(x, sizes)[None]).view(g, edge)
        return torch.cat([weights, residual.sum(0, dtype=torch.float64)], 1) if self.bias else weights

    def sizes(self, x: Tensor, norm: Norm) -> Tensor:
        """||(x, 1)|| of every record."""
        return with_bias(lengths(x, norm), norm) if self.bias else lengths(x, norm)

    def _slopes_at(self, scores: Tensor, y: Tensor, x: Tensor, ball: Ball) -> Tensor:
        if ball.envelope is None:
            return self.slope(scores, y)
        return self.loss.envelope(scores, y, ball.envelope.beta / self.sizes(x, 2).square()[..., None])

    def _written(self, residual: Tensor, x: Tensor) -> Tensor:
        m, edge = len(x), self.outputs * self.inputs
        weights = self.slopes[:, :edge].view(m, self.outputs, self.inputs)
        if edge < SMALL:  # a product into rows with gaps between them is three times as slow
            weights.copy_(torch.bmm(residual.transpose(1, 2), x))
        else:
            torch.bmm(residual.transpose(1, 2), x, out=weights)
        if self.bias:
            torch.sum(residual, 1, out=self.slopes[:, edge:])
        return self.slopes

    def _scores(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.outputs == 1:  # a product with one column is slower than its definition
            scores = (x * weight).sum(2, keepdim=True)
            return scores.add_(bias[:, None, :]) if self.bias else scores
        if not self.bias:
            return torch.bmm(x, weight.transpose(1, 2))
        return torch.baddbmm(bias[:, None, :], x, weight.transpose(1, 2))


def summed(residual: Tensor, x: Tensor) -> Tensor:
    """sum_j r_j x_j^T of records [m, b, ...], in float64: what one record adds must not drown in what others sum to.

    Measured where all records point one way, a float32 sum let one of them move it by 1 + 1e-5 among 100 (slack
    included), by 1 + 6e-5 among 1,000 and by 1.004 among 200,000. So products of `FEW` records are added in float64; of
    more than `MANY`, every product is. No worst case is proved for the float32 part.
    """
    b = x.shape[1]
    kind, width = (x.dtype, FEW) if b <= MANY else (torch.float64, MANY)
    total = x.new_zeros(len(x), residual.shape[2], x.shape[2], dtype=torch.float64)
    for r, some in zip(torch.split(residual, width, 1), torch.split(x, width, 1), strict=True):
        total += torch.bmm(r.transpose(1, 2).to(kind), some.to(kind))
    return total


def with_bias(sizes: Tensor, norm: Norm) -> Tensor:
    """||(x, 1)|| from ||x||."""
    return (sizes.square() + 1).sqrt() if norm == 2 else sizes + 1


def mean_shares(residual: Tensor, batch: Batch) -> Tensor:
    """Each record's share of its client's mean, in place."""
    if batch.mask is None:
        return residual.mul_(1 / residual.shape[1])
    count = batch.mask.sum(1, keepdim=True).clamp(min=1)
    return residual.mul_((batch.mask / count)[..., None])


def finite(x: Tensor, sizes: Tensor) -> Tensor:
    """x, with zeros for records that are not finite: they have no weight, and must not spoil those of others."""
    real = sizes.isfinite()
    return x if bool(real.all()) else torch.where(real[..., None], x, torch.zeros_like(x))


def _readable(x: Tensor, weight: Tensor) -> bool:
    """Whether machine code can read the records where they lie."""
    single = x.dtype == weight.dtype == torch.float32
    return single and x.device.type == weight.device.type == "cpu" and x.is_contiguous()


def check_labels(labels: NDArray[np.int64], classes: int) -> None:
    """Refuse a label that no score stands for."""
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        found = f"labels from {labels.min()} to {labels.max()} and a model of {classes} classes"
        raise DataError(found, f"labels from 0 to {classes - 1}", "give the model one output per class")


def linear_layer(model: nn.Module) -> nn.Linear | None:
    """The only layer of a model that is Linear, or Flatten and Linear; None for any other model."""
    parts = chain(model)
    plain = all(type(part) in (nn.Flatten, nn.Linear) for part in parts)
    layers = [part for part in parts if isinstance(part, nn.Linear)]
    if not plain or len(layers) != 1 or type(model) not in (nn.Sequential, nn.Linear):
        return None
    trained = all(parameter.requires_grad for parameter in layers[0].parameters())
    return layers[0] if trained and parts[-1] is layers[0] else None


def chain(model: nn.Module) -> list[nn.Module]:
    """What runs, in order: a layer that is used twice stands twice, and a Sequential of another class for itself."""
    if type(model) is not nn.Sequential:
        return [model]
    return [part for child in model for part in chain(child)]


def can_write_out(task: Task) -> bool:
    """Whether this task is a linear model under a loss whose gradient is written here."""
    layer = linear_layer(task.model)
    if layer is None:
        return False
    flat = task.clients.records.x[:1].flatten(1).shape[1] == layer.in_features
    return flat and known_targets(task, layer.out_features)


def known_targets(task: Task, outputs: int) -> bool:
    """Whether the slope of the task's loss is written, and its targets fit this many scores."""
    y, loss = task.clients.records.y, task.losses
    fits = not y.is_floating_point() and y.dim() == 1 if loss.targets == "class" else y[:1].numel() == outputs
    return loss.has_slope and fits
