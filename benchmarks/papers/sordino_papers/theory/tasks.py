"""Of a task at hand: whether the theorems apply, and how much its silos differ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call

from sordino.engines.dense_clients import dense_stages
from sordino.errors import ConfigError, DataError
from sordino.parts.losses import OURS
from sordino.task import Task


def require_convex(task: Task, smooth: bool = False) -> None:
    """Refuse a task that the theorems say nothing about: anything but one linear layer under a convex (smooth) loss."""
    if len(dense_stages(task)) != 1:
        found = f"a {type(task.model).__name__} that is not one linear layer"
        raise ConfigError(found, "a linear model, which makes the loss convex", "use a linear or logistic model")
    loss = task.losses
    if not loss.convex or (smooth and not loss.smooth):
        found = f"loss {loss.kind!r}" if loss.kind else "a loss function of your own"
        fits = [known.kind for known in OURS if known.convex and (known.smooth or not smooth)]
        raise ConfigError(found, "one of " + ", ".join(fits), "name a known loss")


def heterogeneity(task: Task) -> float:
    """v_*^2 = mean over silos of ||grad F_i(w*)||^2,  w* = argmin of the mean of the F_i; 0 if all silos agree on it.

    For a linear model under a smooth convex loss; F_i is the mean loss of silo i, silos without records are left out.
    L-BFGS in float64. Reads the data: a diagnostic, not a release. Paper 001, Appendix E.1.
    """
    require_convex(task, smooth=True)
    silos = [task.clients.rows(i) for i in range(task.clients.population) if task.clients.size(i)]
    rows = [torch.from_numpy(found) for found in silos]
    weights = torch.cat([torch.full((len(found),), 1 / len(found), dtype=torch.float64) for found in rows])
    losses, everyone = _losses(task), torch.cat(rows)
    best = _argmin(lambda w: (losses(w, everyone) * weights).sum() / len(rows), task.layout.trainable)
    norms = [torch.func.grad(lambda w, mine=mine: losses(w, mine).mean())(best).square().sum() for mine in rows]
    return float(torch.stack(norms).mean())


def _losses(task: Task) -> Callable[[Tensor, Tensor], Tensor]:
    """(flat parameters, rows of the table) -> one loss per record, in float64."""
    model, records = task.program.training_model().double(), task.clients.records
    x, y = records.x.double(), records.y.double() if records.y.is_floating_point() else records.y
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def losses(w: Tensor, rows: Tensor) -> Tensor:
        parts = torch.split(w, [shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return task.losses(functional_call(model, named, (x[rows],)), y[rows])

    return losses


def _argmin(loss: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Where the loss is least, from 0; refuses a point whose gradient has not vanished."""
    w = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [w], max_iter=2000, history_size=50, tolerance_grad=1e-10, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(w)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    first = float(torch.func.grad(loss)(w.detach()).norm())
    optimizer.step(closure)  # type: ignore[no-untyped-call]
    left = float(torch.func.grad(loss)(w.detach()).norm())
    if not left <= 1e-6 * max(first, 1.0):
        raise DataError(f"a gradient of norm {left:.3g} after 2000 steps", "a minimum", "scale the inputs to unit size")
    return w.detach()
