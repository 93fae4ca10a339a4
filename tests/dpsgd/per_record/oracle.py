"""The definition, one record at a time in float64 norms: what every fast path must equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sordino.dpsgd import Clipped

Losses = Callable[[Tensor, Tensor], Tensor]


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    """One loss per record for outputs of any shape: sum (output - y)^2 / 2."""
    return (outputs.flatten(1) - y[:, None]).square().sum(1) / 2


def classes(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def record_gradients(model: nn.Module, losses: Losses, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """g_j by name, a loop over records."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for j in range(len(y)):
        loss = losses(model(x[j : j + 1]), y[j : j + 1]).sum()
        slopes = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        pairs = zip(named.items(), slopes, strict=True)
        found.append({name: torch.zeros_like(p) if slope is None else slope for (name, p), slope in pairs})
    return found


def size(gradient: dict[str, Tensor], order: int = 2) -> float:
    """The norm over all parameters together, in float64."""
    whole = torch.cat([part.flatten().double() for part in gradient.values()])
    return float(torch.linalg.vector_norm(whole, ord=order))


def clipped_loop(
    model: nn.Module, losses: Losses, x: Tensor, y: Tensor, clip_norm: float, order: int = 2
) -> tuple[dict[str, Tensor], Tensor]:
    """sum_j g_j min(1, clip norm / ||g_j||), and the norms."""
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters() if p.requires_grad}
    norms = []
    for gradient in record_gradients(model, losses, x, y):
        norms.append(size(gradient, order))
        factor = 1.0 if norms[-1] <= clip_norm else clip_norm / norms[-1]
        for name, part in gradient.items():
            total[name] += factor * part.double()
    return total, torch.tensor(norms, dtype=torch.float64)


def middle_clip_norm(norms: Tensor) -> float:
    """A clip norm that clips about half of the records, and is no record's own norm."""
    return float(norms.median()) * 1.001


def assert_equal(got: Clipped, total: dict[str, Tensor], norms: Tensor) -> None:
    """To 1e-5 of the norms, and of the largest entry of the sum (the clip itself aims 1e-5 inside)."""
    torch.testing.assert_close(got.norms, norms, rtol=1e-5, atol=1e-7)
    largest = max(float(part.abs().max()) for part in total.values())
    assert got.total.keys() == total.keys()
    for name, part in total.items():
        torch.testing.assert_close(got.total[name].double(), part, rtol=0, atol=3e-5 * largest, msg=name)
