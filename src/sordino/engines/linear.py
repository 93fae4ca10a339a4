"""Linear models, a chunk of clients at once, with the gradient written out: no autograd, no copies, buffers reused."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sordino.data.task import Task
from sordino.parts.gradients import Batch


class LinearClients:
    """m clients of one `Linear` layer under cross-entropy or squared error.

    z = x W^T + c;  g = (softmax(z) - onehot(y)) / n   or   2 (z - y) / n;   dW = g^T x,  dc = sum g
    """

    def __init__(self, task: Task) -> None:
        self.layout = task.layout
        layer = linear_layer(task.model)
        assert layer is not None
        self.outputs, self.inputs = layer.weight.shape
        self.bias = layer.bias is not None
        self.classes = task.loss == "cross_entropy"
        self.slopes = torch.empty(0)

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
        """Gradients [m, d], written into one buffer that the next call overwrites."""
        if self.slopes.shape != w.shape:
            self.slopes = torch.empty_like(w)
        m, edge = len(w), self.outputs * self.inputs
        x = batch.x.reshape(m, -1, self.inputs)
        weight = w[:, :edge].view(m, self.outputs, self.inputs)
        residual = self._residual(self._scores(x, weight, w[:, edge:]), batch)
        torch.bmm(residual.transpose(1, 2), x, out=self.slopes[:, :edge].view(m, self.outputs, self.inputs))
        if self.bias:
            torch.sum(residual, 1, out=self.slopes[:, edge:])
        return self.slopes

    def _scores(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if not self.bias:
            return torch.bmm(x, weight.transpose(1, 2))
        return torch.baddbmm(bias[:, None, :], x, weight.transpose(1, 2))

    def _residual(self, scores: Tensor, batch: Batch) -> Tensor:
        """d loss / d scores, [m, b, outputs]."""
        if self.classes:
            residual = torch.softmax(scores, -1)
            residual.scatter_add_(-1, batch.y[..., None], residual.new_full((*batch.y.shape, 1), -1.0))
        else:
            residual = (scores - batch.y.to(scores.dtype).reshape(scores.shape)) * (2 / self.outputs)
        if batch.mask is None:
            return residual.mul_(1 / scores.shape[1])
        count = batch.mask.sum(1, keepdim=True).clamp(min=1)
        return residual.mul_((batch.mask / count)[..., None])


def linear_layer(model: nn.Module) -> nn.Linear | None:
    """The only layer of a model that is Linear, or Flatten and Linear; None for any other model."""
    parts = _parts(model)
    plain = all(type(part) in (nn.Flatten, nn.Linear) for part in parts)
    layers = [part for part in parts if isinstance(part, nn.Linear)]
    if not plain or len(layers) != 1 or type(model) not in (nn.Sequential, nn.Linear):
        return None
    trained = all(parameter.requires_grad for parameter in layers[0].parameters())
    return layers[0] if trained and parts[-1] is layers[0] else None


def _parts(model: nn.Module) -> list[nn.Module]:
    """What runs, in order: a layer that is used twice stands twice, and a Sequential of another class for itself."""
    if type(model) is not nn.Sequential:
        return [model]
    return [part for child in model for part in _parts(child)]


def can_write_out(task: Task) -> bool:
    """Whether this task is a linear model under a loss whose gradient is written here."""
    layer = linear_layer(task.model)
    if layer is None or not isinstance(task.loss, str):
        return False
    flat = task.clients.records.x[:1].flatten(1).shape[1] == layer.in_features
    labels = not task.clients.records.y.is_floating_point()
    return flat and (
        (task.loss == "cross_entropy" and labels and task.clients.records.y.dim() == 1) or task.loss == "mse"
    )
