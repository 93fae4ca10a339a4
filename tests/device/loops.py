"""Nets and private loops that the device tests run twice: on the CPU and on the device."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tests.device import sim
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from sordino.dpsgd import PrivateLoader, PrivateOptimizer, make_private

DEVICE = torch.device(os.environ.get("DEVICE", "cpu" if sim.MISSING else "sim"))
CPU = torch.device("cpu")
RECORDS, BATCH, CLASSES = 48, 12, 3


class Recurrent(nn.Module):
    """An LSTM or GRU and a linear head on its last output."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(5, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(self.recurrent(x)[0][:, -1])
        return head


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return head


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(self.embedding(x).mean(1))
        return head


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(self.layer(x).mean(1))
        return head


def _image(count: int) -> Tensor:
    return torch.randn(count, 3, 8, 8)


def _sequence(features: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randn(count, 7, features)


def _conv(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 16, CLASSES))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (lambda: nn.Linear(4, CLASSES), lambda count: torch.randn(count, 4)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
        lambda count: torch.randn(count, 4),
    ),
    "conv": (lambda: _conv(nn.Conv2d(3, 8, 3, padding=1)), _image),
    "grouped_conv": (
        lambda: _conv(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=4)),
        _image,
    ),
    "group_norm": (lambda: _conv(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8)), _image),
    "embedding": (Words, lambda count: torch.randint(11, (count, 7))),
    "lstm": (lambda: Recurrent(nn.LSTM), _sequence(5)),
    "gru": (lambda: Recurrent(nn.GRU), _sequence(5)),
    "attention": (Attention, _sequence(8)),
    "transformer": (Transformer, _sequence(8)),
}


def net(name: str) -> nn.Module:
    torch.manual_seed(3)
    return NETS[name][0]()


def records(name: str) -> TensorDataset:
    torch.manual_seed(4)
    return TensorDataset(NETS[name][1](RECORDS), torch.randint(CLASSES, (RECORDS,)))


Parts = tuple[nn.Module, PrivateOptimizer, PrivateLoader]


def private(
    name: str,
    device: torch.device,
    optimizer: Callable[..., Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    model: nn.Module | None = None,
    dataset: TensorDataset | None = None,
    **settings: Any,
) -> Parts:
    """`make_private` of a net whose parameters are on `device`; four epochs of four batches, noise multiplier 1."""
    model = copy.deepcopy(net(name) if model is None else model).to(device)
    loader = DataLoader(records(name) if dataset is None else dataset, batch_size=BATCH)
    known = {"epochs": 4, "noise_multiplier": 1.0, "seed": 5, **settings}
    return make_private(model, optimizer(model.parameters()), loader, **known)


def train(
    parts: Parts, device: torch.device, steps: int | None = None, around: Callable[[], Any] = nullcontext
) -> None:
    """The loop that everybody writes: each batch is moved to the device, then one backward pass and one step."""
    model, optimizer, loader = parts
    for _ in range(4):
        for x, y in loader:
            with around():
                x, y = x.to(device), y.to(device)
                loss = optimizer.loss if optimizer.own is not None else F.cross_entropy
                optimizer.zero_grad()
                loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if steps is not None and optimizer.steps >= steps:
                return


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().cpu().double().reshape(-1) for p in model.parameters()])


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16)
