"""Objectives with an explicit gradient formula for a chunk of clients: chains of dense layers, and linear models.

Selected by `PATHS` in engines/objectives.py. They use neither autograd nor copies of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino import kernels
from sordino.accounting.bounds import Norm
from sordino.data.clients import Records
from sordino.dpsgd.pieces import ieee_products
from sordino.engines.batches import Batches
from sordino.errors import DataError
from sordino.layout import Layout
from sordino.parts.clipping import FEW, Cast, factors, lengths, pull, summed
from sordino.parts.gradients import Ball, Batch
from sordino.parts.losses import CODES
from sordino.task import Task

SMALL = 1024  # weights of a layer, below which a product is written to a buffer and copied
Map = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[type[nn.Module], tuple[Map, Map]] = {  # a = h(z) in place, and h'(z) as a function of a
    nn.ReLU: (torch.relu_, lambda a: (a > 0).to(a.dtype)),
    nn.Tanh: (torch.tanh_, lambda a: 1 - a.square()),
    nn.Sigmoid: (torch.sigmoid_, lambda a: a - a.square()),
}
Layer = tuple[Tensor, Tensor | None]  # weights [m, o, i] and biases [m, 1, o] of m clients


@dataclass(frozen=True)
class Stage:
    """Linear layer of a chain: its sizes, the offsets of weight and bias in a flat parameter vector, its activation."""

    outputs: int
    inputs: int
    weight: int
    bias: int | None
    activation: type[nn.Module] | None  # None after the last layer

    def of(self, rows: Tensor) -> Layer:
        """Return views of the layer's weights and biases in the flat parameters [m, d] of m clients."""
        weight = rows[:, self.weight : self.weight + self.outputs * self.inputs].view(-1, self.outputs, self.inputs)
        return weight, None if self.bias is None else rows[:, None, self.bias : self.bias + self.outputs]

    def sizes(self, a: Tensor, norm: Norm) -> Tensor:
        """Return the norm of (a, 1) for every input a of the layer, or of a alone for a layer without bias."""
        sizes = lengths(a, norm)
        return sizes if self.bias is None else (sizes.square() + 1).sqrt() if norm == 2 else sizes + 1


class Copies:
    """Base class of objectives with one flat parameter vector per client, each a copy of the round's start."""

    layout: Layout

    @property
    def trainable(self) -> int:
        return self.layout.trainable

    def place(self, start: Tensor, clients: int) -> Tensor:
        return start.repeat(clients, 1)

    def inward(self, start: Tensor) -> Tensor:
        return start

    def outward(self, rows: Tensor) -> Tensor:
        return rows

    def untouched(self) -> None:
        """Do nothing: these objectives call no user module that could store a client's data."""


class DenseClients(Copies):
    """Gradients of m clients for a chain of Linear layers with ReLU, Tanh or Sigmoid, and a loss with known derivative.

    Layer l = 1..L has weights W_l, bias c_l, activation h and gradients dW_l, dc_l of the mean loss of n records x:
    a_0 = x;  z_l = a_(l-1) W_l^T + c_l;  a_l = h(z_l);      r_L = d loss / d z_L;  r_(l-1) = (r_l W_l) * h'(z_(l-1))
    dW_l = r_l^T a_(l-1) / n,  dc_l = sum r_l / n
    In every layer one record's gradient is the outer product of r_l and (a_(l-1), 1), so its norm is the product of
    their norms, and per-record gradients are never formed.
    """

    def __init__(self, task: Task) -> None:
        self.layout, self.stages, self.loss = task.layout, dense_stages(task), task.program.losses
        self.slope, self.slopes = self.loss.slope, torch.empty(0)
        x, device = task.clients.records.x, task.device  # compiled loops read float32 records where they are
        single = x.dtype == torch.float32 and x.device.type == device.type == "cpu" and x.is_contiguous()
        self.kernel = kernels.AVAILABLE and len(self.stages) == 1 and type(self.loss) in CODES and single

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of each client's mean loss at that client's row of `w`; the next call overwrites it."""
        layers = [stage.of(w) for stage in self.stages]
        inputs, scores = self._forward(layers, batch)
        last = mean_shares(self.slope(scores, batch.y), batch)
        return self._written(w, inputs, self._residuals(layers, inputs, last))

    def descend(self, start: Tensor, batches: Iterable[Batch], clients: int, lr: float, decay: float) -> Tensor | None:
        """Run SGD, w <- (1 - lr decay) w - lr gradient, one step per batch; matrix products update w in place."""
        rows = self.place(start, clients)
        layers = [(w.clone(), c if c is None else c.clone()) for w, c in (stage.of(rows) for stage in self.stages)]
        for batch in batches:
            inputs, scores = self._forward(layers, batch)
            last, pace = self.slope(scores, batch.y), -lr if batch.mask is not None else -lr / scores.shape[1]
            residuals = self._residuals(layers, inputs, last if batch.mask is None else mean_shares(last, batch))
            keep = 1 - lr * decay * (1.0 if batch.active is None else batch.active[:, None, None])
            for (weight, bias), a, r in zip(layers, inputs, residuals, strict=True):
                if decay:
                    weight.mul_(keep)
                weight.baddbmm_(r.transpose(1, 2), a, alpha=pace)
                if bias is not None:
                    (bias.mul_(keep) if decay else bias).add_(r.sum(1, keepdim=True), alpha=pace)
        for stage, (weight, bias) in zip(self.stages, layers, strict=True):
            own_weight, own_bias = stage.of(rows)
            own_weight.copy_(weight)
            if own_bias is not None and bias is not None:
                own_bias.copy_(bias)
        return rows

    @ieee_products()
    def clipped(self, w: Tensor, batch: Batch, ball: Ball) -> Tensor:
        """Return each client's sum of clipped per-record gradients; masked and non-finite gradients count as zero."""
        layers = [stage.of(w) for stage in self.stages]
        inputs, scores = self._forward(layers, batch)
        residuals = self._residuals(layers, inputs, self.slopes_at(scores, batch.y, inputs[-1], ball))
        sizes = [stage.sizes(a, ball.norm) for stage, a in zip(self.stages[1:], inputs[1:], strict=True)]
        sizes = [self.stages[0].sizes(inputs[0], ball.norm) if batch.sizes is None else batch.sizes, *sizes]
        parts = [lengths(r, ball.norm) * size for r, size in zip(residuals, sizes, strict=True)]
        norms = parts[0] if len(parts) == 1 else lengths(torch.stack(parts, -1), ball.norm)
        scale = factors(norms, ball.clip_norm, batch.mask)
        inputs = [finite(a, size) for a, size in zip(inputs, sizes, strict=True)]
        residuals = [pull(r, scale) for r in residuals]
        if batch.x.shape[1] <= FEW:
            return self._written(w, inputs, residuals)
        sums = torch.zeros_like(w, dtype=torch.float64)
        for stage, a, r in zip(self.stages, inputs, residuals, strict=True):
            weight, bias = stage.of(sums)
            weight.copy_(sum_of_outer(r, a))
            if bias is not None:
                torch.sum(r, 1, keepdim=True, dtype=torch.float64, out=bias)
        return sums

    def slopes_at(self, scores: Tensor, y: Tensor, x: Tensor, ball: Ball) -> Tensor:
        """Return the derivative of the loss, or of its Moreau envelope if `ball` asks for it, by the model's scores."""
        if ball.envelope is None:
            return self.slope(scores, y)
        squares = self.stages[0].sizes(x, 2).square()[..., None]
        return self.loss.envelope(scores, y, ball.envelope.beta / squares)

    def _forward(self, layers: list[Layer], batch: Batch) -> tuple[list[Tensor], Tensor]:
        a, inputs = batch.x.reshape(*batch.x.shape[:2], -1), []
        for stage, (weight, bias) in zip(self.stages, layers, strict=True):
            inputs.append(a)
            if stage.outputs == 1:  # a product with one column is slower than its definition
                z = (a * weight).sum(2, keepdim=True)
                z = z if bias is None else z.add_(bias)
            else:
                turned = weight.transpose(1, 2)
                z = torch.bmm(a, turned) if bias is None else torch.baddbmm(bias, a, turned)
            a = z if stage.activation is None else ACTIVATIONS[stage.activation][0](z)
        return inputs, a

    def _residuals(self, layers: list[Layer], inputs: list[Tensor], last: Tensor) -> list[Tensor]:
        found = [last]
        for i in range(len(layers) - 1, 0, -1):
            activation = self.stages[i - 1].activation
            assert activation is not None
            found.append(torch.bmm(found[-1], layers[i][0]).mul_(ACTIVATIONS[activation][1](inputs[i])))
        return found[::-1]

    def _written(self, w: Tensor, inputs: list[Tensor], residuals: list[Tensor]) -> Tensor:
        if self.slopes.shape != w.shape:
            self.slopes = torch.empty_like(w)
        for stage, a, r in zip(self.stages, inputs, residuals, strict=True):
            weight, bias = stage.of(self.slopes)
            if stage.outputs * stage.inputs < SMALL:  # a product into rows with gaps is three times as slow
                weight.copy_(torch.bmm(r.transpose(1, 2), a))
            else:
                torch.bmm(r.transpose(1, 2), a, out=weight)
            if bias is not None:
                torch.sum(r, 1, keepdim=True, out=bias)
        return self.slopes


class LinearClients(DenseClients):
    """Gradients of m clients for one Linear layer, compiled if numba is installed; supports Moreau envelopes.

    Scores of n records x with targets y: z = x W^T + c. Derivatives: r = d loss / d z, e.g. softmax(z) - onehot(y).
    Gradients of weights W and bias c: dW = r^T x / n, dc = sum r / n.
    """

    def descend(self, start: Tensor, batches: Iterable[Batch], clients: int, lr: float, decay: float) -> Tensor | None:
        """Run SGD over the batches in compiled loops, client by client, if the records are float32 on the CPU."""
        if not (self.kernel and isinstance(batches, Batches)):
            return super().descend(start, batches, clients, lr, decay)
        from sordino.kernels import linear as kernel

        stage, rows = self.stages[0], self.place(start, clients)
        edge = stage.outputs * stage.inputs
        weight, bias = rows[:, :edge].contiguous().view(clients, stage.outputs, -1), rows[:, edge:].contiguous()
        x, y = self.table(batches.records, batches.rows[batches.real])
        read, pace = np.where(batches.real, batches.rows, -1), (np.float32(lr), np.float32(decay))
        biased = stage.bias is not None
        offset = bias if biased else weight.new_zeros(weight.shape[:2])
        kernel.descend(x, y, read, weight.numpy(), offset.numpy(), biased, pace, self.code)
        return torch.cat([weight.flatten(1), bias], 1)

    def table(self, records: Records, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Return all records and targets as arrays; refuse records `rows` with a class label that the model lacks."""
        x, y = records.x.view(len(records), -1), records.y.reshape(len(records), -1).numpy()
        labels, classes = y[rows], self.stages[0].outputs
        if self.loss.targets == "class" and labels.size and not 0 <= labels.min() <= labels.max() < classes:
            found = f"labels from {labels.min()} to {labels.max()} and a model of {classes} classes"
            raise DataError(found, f"labels from 0 to {classes - 1}", "give the model one output per class")
        return x.numpy(), y

    @property
    def code(self) -> tuple[int, np.float32]:
        """Number of the loss in kernels/linear.py, and the level tau of a quantile loss."""
        return CODES[type(self.loss)], np.float32(getattr(self.loss, "tau", 0))


def sum_of_outer(residual: Tensor, x: Tensor) -> Tensor:
    """Return each client's sum of outer products r_j x_j^T over its records j; long sums are taken in float64."""

    def product(some: slice, cast: Cast, out: Tensor | None) -> Tensor:
        return torch.bmm(cast(residual[:, some].transpose(1, 2)), cast(x[:, some]), out=out)

    return summed(x.shape[1], product)


def mean_shares(residual: Tensor, batch: Batch) -> Tensor:
    """Divide the records' loss derivatives in place by their client's number of records; masked ones become zero."""
    if batch.mask is None:
        return residual.mul_(1 / residual.shape[1])
    count = batch.mask.sum(1, keepdim=True).clamp(min=1)
    return residual.mul_((batch.mask / count)[..., None])


def finite(x: Tensor, sizes: Tensor) -> Tensor:
    """Return a copy of `x` with zeros in place of records whose gradient norm is NaN or infinite."""
    real = sizes.isfinite()
    if x.device.type == "cpu" and bool(real.all()):
        return x
    return torch.where(real[..., None], x, torch.zeros_like(x))


def dense_stages(task: Task) -> list[Stage]:
    """Return the layers of a model that is a chain of trained Linear layers and activations; [] for other models."""
    whole = task.program.chain
    parts = [part for part in whole if type(part) is not nn.Flatten]
    layers, curves = parts[::2], parts[1::2]
    plain = all(type(part) is nn.Linear for part in layers) and all(type(part) in ACTIVATIONS for part in curves)
    once = len(set(layers)) == len(layers) == len(curves) + 1
    trained = all(parameter.requires_grad for parameter in task.model.parameters())
    if not (plain and once and trained) or any(type(part) is nn.Flatten for part in whole[1:]):
        return []
    names = {part: name for name, part in task.model.named_modules()}
    starts = {slot.name: slot.start for slot in task.layout.slots}
    found = []
    for layer, kind in zip(layers, [*(type(curve) for curve in curves), None], strict=True):
        assert isinstance(layer, nn.Linear)
        dot = f"{names[layer]}." if names[layer] else ""  # the model itself may be the layer
        bias = starts[f"{dot}bias"] if layer.bias is not None else None
        found.append(Stage(layer.out_features, layer.in_features, starts[f"{dot}weight"], bias, kind))
    return found


def has_written_gradient(task: Task, single: bool) -> bool:
    """Return whether a model is a chain of Linear layers (one if `single`) and its loss has a closed-form gradient."""
    found = dense_stages(task)
    if not found or (len(found) == 1) != single:
        return False
    (x, y), loss = (task.clients.records.x, task.clients.records.y), task.program.losses
    joined = all(a.outputs == b.inputs for a, b in pairwise(found))
    labels = not y.is_floating_point() and y.dim() == 1
    fits = labels if loss.targets == "class" else y[:1].numel() == found[-1].outputs
    return joined and x[:1].flatten(1).shape[1] == found[0].inputs and loss.has_slope and fits
