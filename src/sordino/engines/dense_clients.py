"""Chains of dense layers, a chunk of clients at once, with the gradient written out: no autograd, no copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from sordino.accounting.bounds import Norm
from sordino.layout import Layout
from sordino.parts.clipping import FEW, Cast, factors, lengths, pull, summed
from sordino.parts.gradients import Ball, Batch
from sordino.task import Task

SMALL = 1024  # weights of a layer
SLOPES: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {  # h'(z) as a function of a = h(z)
    nn.ReLU: lambda a: (a > 0).to(a.dtype),
    nn.Tanh: lambda a: 1 - a.square(),
    nn.Sigmoid: lambda a: a - a.square(),
}
CURVES: dict[type[nn.Module], Callable[[Tensor], Tensor]]
CURVES = {nn.ReLU: torch.relu_, nn.Tanh: torch.tanh_, nn.Sigmoid: torch.sigmoid_}
Layer = tuple[Tensor, Tensor | None]  # weights [m, o, i] and biases [m, 1, o] of m clients


@dataclass(frozen=True)
class Stage:
    """One layer in the flat row: where its weight and bias lie, and the curve behind it (None: the scores)."""

    outputs: int
    inputs: int
    weight: int
    bias: int | None
    curve: type[nn.Module] | None

    def of(self, rows: Tensor) -> Layer:
        """Its weights and biases in rows [m, d]: views."""
        weight = rows[:, self.weight : self.weight + self.outputs * self.inputs].view(-1, self.outputs, self.inputs)
        return weight, None if self.bias is None else rows[:, None, self.bias : self.bias + self.outputs]

    def sizes(self, a: Tensor, norm: Norm) -> Tensor:
        """||(a, 1)|| of what the layer reads; ||a|| where it has no bias."""
        sizes = lengths(a, norm)
        return sizes if self.bias is None else (sizes.square() + 1).sqrt() if norm == 2 else sizes + 1


class Copies:
    """Rows in the layout's order: every client's row [d] begins as a copy of the start. A base of objectives."""

    layout: Layout

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

    def untouched(self) -> None:
        """The gradient is written out: no module runs, and none keeps anything."""


class DenseClients(Copies):
    """m clients of Linear layers with ReLU, Tanh or Sigmoid between them, under a loss whose slope is written out.

    a_0 = x;  z_l = a_(l-1) W_l^T + c_l;  a_l = h(z_l);      r_L = d loss / d z_L;  r_(l-1) = (r_l W_l) * h'(z_(l-1))
    dW_l = r_l^T a_(l-1) / n,  dc_l = sum r_l / n
    In every layer one record's gradient is the outer product of r_l and (a_(l-1), 1): its norm is never formed from it.
    """

    def __init__(self, task: Task) -> None:
        self.layout, self.stages = task.layout, stages(task)
        self.slope = task.program.losses.slope
        self.slopes = torch.empty(0)

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        """Gradients [m, d] of each client's mean loss, written into one buffer that the next call overwrites."""
        layers = [stage.of(w) for stage in self.stages]
        inputs, scores = self._forward(layers, batch)
        last = mean_shares(self.slope(scores, batch.y), batch)
        return self._written(w, inputs, self._residuals(layers, inputs, last))

    def descend(self, start: Tensor, batches: Iterable[Batch], clients: int, lr: float, decay: float) -> Tensor | None:
        """w <- (1 - lr decay) w - lr gradient, batch after batch: the product that makes the gradient adds it too."""
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

    def clipped(self, w: Tensor, batch: Batch, ball: Ball) -> Tensor:
        """Sums [m, d] of every record's gradient, each pulled into the ball; masked and non-finite ones are zero."""
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
        """d loss / d scores."""
        return self.slope(scores, y)

    def _forward(self, layers: list[Layer], batch: Batch) -> tuple[list[Tensor], Tensor]:
        """What every layer reads, a_0 to a_(L-1), and the scores."""
        a, inputs = batch.x.reshape(*batch.x.shape[:2], -1), []
        for stage, (weight, bias) in zip(self.stages, layers, strict=True):
            inputs.append(a)
            z = _scores(a, weight, bias)
            a = z if stage.curve is None else CURVES[stage.curve](z)
        return inputs, a

    def _residuals(self, layers: list[Layer], inputs: list[Tensor], last: Tensor) -> list[Tensor]:
        """r_1 to r_L."""
        found = [last]
        for i in range(len(layers) - 1, 0, -1):
            curve = self.stages[i - 1].curve
            assert curve is not None
            found.append(torch.bmm(found[-1], layers[i][0]).mul_(SLOPES[curve](inputs[i])))
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


def _scores(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """a W^T + c."""
    if weight.shape[1] == 1:  # a product with one column is slower than its definition
        scores = (a * weight).sum(2, keepdim=True)
        return scores if bias is None else scores.add_(bias)
    turned = weight.transpose(1, 2)
    return torch.bmm(a, turned) if bias is None else torch.baddbmm(bias, a, turned)


def sum_of_outer(residual: Tensor, x: Tensor) -> Tensor:
    """sum_j r_j x_j^T of records [m, b, ...]; of many in float64."""

    def product(some: slice, cast: Cast, out: Tensor | None) -> Tensor:
        return torch.bmm(cast(residual[:, some].transpose(1, 2)), cast(x[:, some]), out=out)

    return summed(x.shape[1], product)


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


def stages(task: Task) -> list[Stage]:
    """The layers of a chain, in order; empty for any other model."""
    whole = task.program.chain
    parts = [part for part in whole if type(part) is not nn.Flatten]
    layers, curves = parts[::2], parts[1::2]
    plain = all(type(part) is nn.Linear for part in layers) and all(type(part) in CURVES for part in curves)
    once = len(set(layers)) == len(layers) == len(curves) + 1
    trained = all(parameter.requires_grad for parameter in task.model.parameters())
    if not (plain and once and trained) or any(type(part) is nn.Flatten for part in whole[1:]):
        return []
    names = {part: name for name, part in task.model.named_modules()}
    starts = {slot.name: slot.start for slot in task.layout.slots}
    kinds = [*(type(curve) for curve in curves), None]
    found = []
    for layer, kind in zip(layers, kinds, strict=True):
        assert isinstance(layer, nn.Linear)
        dot = f"{names[layer]}." if names[layer] else ""  # the model itself may be the layer
        bias = starts[f"{dot}bias"] if layer.bias is not None else None
        found.append(Stage(layer.out_features, layer.in_features, starts[f"{dot}weight"], bias, kind))
    return found


def can_chain(task: Task) -> bool:
    """Whether this task is a chain of two or more dense layers under a loss whose gradient is written here."""
    found = stages(task)
    if len(found) < 2:
        return False
    flat = task.clients.records.x[:1].flatten(1).shape[1] == found[0].inputs
    joined = all(a.outputs == b.inputs for a, b in pairwise(found))
    return flat and joined and known_targets(task, found[-1].outputs)


def known_targets(task: Task, outputs: int) -> bool:
    """Whether the slope of the task's loss is written, and its targets fit this many scores."""
    y, loss = task.clients.records.y, task.program.losses
    fits = not y.is_floating_point() and y.dim() == 1 if loss.targets == "class" else y[:1].numel() == outputs
    return loss.has_slope and fits
