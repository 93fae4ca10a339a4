"""Small private loops, and what they must equal: one record at a time, a dense solve, noise drawn again by its name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from sordino.dpsgd import PrivateLoader, PrivateOptimizer, make_private
from sordino.parts.releases import CentralNoise
from sordino.rng import Seeded

QUIET = 1e-9  # a noise multiplier whose noise is below rounding

Loss = Callable[[Any, Tensor], Tensor]
Parts = tuple[nn.Module, PrivateOptimizer, PrivateLoader]


def data(count: int = 60, shape: tuple[int, ...] = (4,), classes: int = 3, seed: int = 0) -> TensorDataset:
    coins = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, *shape, generator=coins), torch.randint(classes, (count,), generator=coins))


def mlp(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def private(
    model: nn.Module | None = None,
    dataset: Any = None,
    optimizer: Callable[..., Optimizer] = torch.optim.SGD,
    batch: int = 12,
    loader: DataLoader[Any] | None = None,
    named: Any = None,
    **settings: Any,
) -> Parts:
    """A loop on 60 records with batches of 12; one epoch and noise multiplier 1 unless set; `named` in the ledger."""
    model = model or mlp()
    if loader is None:
        loader = DataLoader(data() if dataset is None else dataset, batch_size=batch, shuffle=True)
    settings |= {} if named is None else {"dataset": named}
    settings = {"epochs": 1, **({} if "epsilon" in settings else {"noise_multiplier": 1.0}), **settings}
    return make_private(
        model, optimizer((p for p in model.parameters() if p.requires_grad), lr=0.1), loader, **settings
    )


def train(parts: Parts, loss: Loss = F.cross_entropy, epochs: int = 1) -> None:
    """The loop that everybody writes."""
    model, optimizer, loader = parts
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, clip: float, loss: Loss = F.cross_entropy) -> dict[str, Tensor]:
    """sum_j g_j min(1, clip / ||g_j||), one record at a time, of an ordinary copy of the model."""
    own = copy.deepcopy(model)
    named = {name: p for name, p in own.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
    for j in range(len(x)):
        slopes = torch.autograd.grad(loss(own(x[j : j + 1]), y[j : j + 1]), list(named.values()), allow_unused=True)
        known = {n: s.double() for n, s in zip(named, slopes, strict=True) if s is not None}
        norm = float(torch.stack([s.square().sum() for s in known.values()]).sum().sqrt())
        for name, slope in known.items():
            total[name] += slope * min(1.0, clip / norm) if norm else 0.0
    return total


def batch_of(parts: Parts, t: int) -> list[int]:
    """The records of step t, drawn again."""
    records = parts[1].account.settings.records
    rows = records.draw(t, 0, records.size(0), Seeded(parts[1].account.settings.seed).at(t, "batches"))
    return [int(row) for row in rows]


def noised_gradient(parts: Parts, t: int, total: dict[str, Tensor]) -> dict[str, Tensor]:
    """A^-1 (total + N(0, (z clip)^2)) / batch by a dense solve, tensor by tensor."""
    settings = parts[1].account.settings
    size = sum(part.numel() for part in total.values())
    release, smoothing = settings.plan.release, [getattr(step, "strength", 0.0) for step in settings.plan.postprocess]
    assert isinstance(release, CentralNoise)
    noise = torch.from_numpy(release.mechanism.sample(size, Seeded(settings.seed).at(t, "noise"))) * settings.clip_norm
    pieces = torch.split(noise, [part.numel() for part in total.values()])
    return {
        name: _smoothed((part + piece.view_as(part)) / settings.records.count, sum(smoothing))
        for (name, part), piece in zip(total.items(), pieces, strict=True)
    }


def _smoothed(tensor: Tensor, strength: float) -> Tensor:
    eye = torch.eye(tensor.numel(), dtype=torch.float64)
    laplacian = 2 * eye - torch.roll(eye, 1, 0) - torch.roll(eye, -1, 0)
    solved: Tensor = torch.linalg.solve(eye + strength * laplacian, tensor.reshape(-1))
    return solved.view_as(tensor)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def backward(parts: Parts, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(parts[0](x), y).backward()  # type: ignore[no-untyped-call]


def first_batch(parts: Parts) -> tuple[Tensor, Tensor]:
    x, y = next(iter(parts[2]))
    return x, y
