"""What can be had from torch by hand, without a framework: our yardstick. Clip, noise and server step included.

Logistic regression: all clients of the cohort in one batched product, the gradient written out. Nets: one client at a
time through autograd, channels last, fresh gradients and one fused update. The allocator is tuned as Sordino's is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from federations import MULTIPLIER, RADIUS, RATE, Federation, Grid, Work
from torch import Tensor, nn

from sordino.version import tune_allocator

VERSIONS = {"torch": torch.__version__}
Mark = Callable[[], None]


def noised(total: Tensor, cohort: int) -> Tensor:
    """The mean of clipped updates whose sum is `total`, under Gaussian noise; the sum is overwritten."""
    return total.add_(torch.randn_like(total), alpha=MULTIPLIER * RADIUS).div_(cohort)


def orders(work: Federation) -> Tensor:
    """For every client of a cohort the epochs' fresh permutations: [cohort, epochs, records]."""
    return torch.rand(work.cohort, work.epochs, work.records).argsort(-1)


def linear(work: Federation, rounds: int, mark: Mark) -> Work:
    """softmax(x W^T + c) by bmm over the cohort; the update is the product's accumulation."""
    x, y = work.data()
    x, y = x.flatten(0, 1).flatten(1), y.flatten()
    weight, bias = (parameter.detach().clone() for parameter in work.model().parameters())
    done = Work()
    for _ in range(rounds):
        cohort = torch.randperm(work.clients)[: work.cohort]
        rows = (orders(work) + (cohort * work.records)[:, None, None]).flatten(1)
        w, c = weight.repeat(work.cohort, 1, 1), bias.repeat(work.cohort, 1).unsqueeze(1)
        picked = rows.view(work.cohort, -1, work.batch).transpose(0, 1).contiguous()
        done += linear_steps(w, c, x, y[picked].flatten(1).unsqueeze(2), picked)
        linear_server(weight, bias, w, c[:, 0])
        mark()
    return done


def linear_steps(w: Tensor, c: Tensor, x: Tensor, labels: Tensor, rows: Tensor) -> Work:
    """One step of all clients per entry of `rows` [steps, m, b] and `labels` [steps, m b, 1]; w, c change in place."""
    steps, m, b = rows.shape
    batch, scores, minus = torch.empty(m * b, x.shape[1]), torch.empty(m, b, w.shape[1]), torch.full((m * b, 1), -1.0)
    turned, records = w.transpose(1, 2), batch.view(m, b, -1)
    for where, label in zip(rows.flatten(1), labels, strict=True):
        torch.index_select(x, 0, where, out=batch)
        torch.baddbmm(c, records, turned, out=scores)
        slope = torch.softmax(scores, -1)
        slope.view(m * b, -1).scatter_add_(1, label, minus)
        w.baddbmm_(slope.transpose(1, 2), records, alpha=-RATE / b)
        c.sub_(slope.sum(1, keepdim=True), alpha=RATE / b)
    return Work(steps * m, steps * m * b)


def linear_server(weight: Tensor, bias: Tensor, w: Tensor, c: Tensor) -> None:
    """Clip, sum, noise, step."""
    dw, dc = w.sub_(weight).flatten(1), c - bias
    norms = (dw.square().sum(1) + dc.square().sum(1)).sqrt_()
    factors = (RADIUS / norms).clamp_(max=1.0)
    mean = noised(torch.cat([factors @ dw, factors @ dc]), len(w))
    weight += mean[: weight.numel()].view_as(weight)
    bias += mean[weight.numel() :]


def records_last(x: Tensor) -> Tensor:
    """Records [n, ...], images with their channels last in memory too, so that a row is one piece."""
    return x.permute(0, 2, 3, 1).contiguous() if x.dim() == 4 else x


def net(work: Federation, rounds: int, mark: Mark) -> Work:
    """One client after another through autograd; the table of records is laid out once."""
    x, y = work.data()
    x, y = records_last(x.flatten(0, 1)), y.flatten()
    model = work.model().to(memory_format=torch.channels_last)
    params = list(model.parameters())
    done = Work()
    for _ in range(rounds):
        start, total = [p.detach().clone() for p in params], [torch.zeros_like(p) for p in params]
        for client, order in zip(torch.randperm(work.clients)[: work.cohort].tolist(), orders(work), strict=True):
            rows = [part for epoch in order + client * work.records for part in epoch.split(work.batch)]
            done += client_steps(model, params, x, y, rows)
            clipped_into(total, params, start)
        net_server(params, total, work.cohort)
        mark()
    return done


def client_steps(model: nn.Module, params: list[nn.Parameter], x: Tensor, y: Tensor, rows: list[Tensor]) -> Work:
    """SGD on one client, a step per entry of `rows` [b]; fresh gradients, so that none is zeroed or added to."""
    loss = nn.functional.cross_entropy
    for where in rows:
        batch = x.index_select(0, where)
        scores = model(batch.permute(0, 3, 1, 2) if batch.dim() == 4 else batch)
        slopes = torch.autograd.grad(loss(scores, y.index_select(0, where)), params)
        with torch.no_grad():
            torch._foreach_add_(params, slopes, alpha=-RATE)
    return Work(len(rows), sum(len(where) for where in rows))


@torch.no_grad()
def clipped_into(total: list[Tensor], params: list[nn.Parameter], start: list[Tensor]) -> None:
    """Adds the client's clipped update, and puts the parameters back."""
    torch._foreach_sub_(params, start)
    norm = torch.stack(torch._foreach_norm(params)).norm()
    torch._foreach_add_(total, torch._foreach_mul(params, float((RADIUS / norm).clamp(max=1.0))))
    torch._foreach_copy_(params, start)


@torch.no_grad()
def net_server(params: list[nn.Parameter], total: list[Tensor], cohort: int) -> None:
    torch._foreach_add_(params, [noised(part, cohort) for part in total])


def bare(work: Federation | Grid, rounds: int, mark: Mark) -> Work:
    if isinstance(work, Grid):
        raise NotImplementedError("no bare loop for a grid")
    tune_allocator()
    linear_model = len(list(work.model().parameters())) == 2
    with torch.inference_mode(linear_model):
        return linear(work, rounds, mark) if linear_model else net(work, rounds, mark)


METHODS = {"by hand": bare}
