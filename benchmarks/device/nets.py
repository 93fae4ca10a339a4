"""Nets of the accelerator benchmark, at full size and at a size for the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class LastOutput(nn.Module):
    """An LSTM whose last output feeds a linear layer."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(features, hidden, batch_first=True), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


class Encoder(nn.Module):
    """Two transformer layers and a linear layer on the mean over positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(x).mean(1))
        return scores


def cnn(small: bool) -> nn.Module:
    wide = 4 if small else 64
    return nn.Sequential(
        nn.Conv2d(3, wide, 3, padding=1), nn.GroupNorm(4, wide), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(wide, 2 * wide, 3, padding=1), nn.GroupNorm(4, 2 * wide), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * wide * (4 if small else 64), 10),
    )  # fmt: skip


def dense(small: bool) -> nn.Module:
    wide = 16 if small else 10_000
    return nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 10))


@dataclass(frozen=True)
class Net:
    name: str
    build: Callable[[bool], nn.Module]  # small?
    shape: tuple[int, ...]
    small_shape: tuple[int, ...]

    def records(self, count: int, small: bool) -> tuple[Tensor, Tensor]:
        return torch.randn(count, *(self.small_shape if small else self.shape)), torch.randint(10, (count,))


NETS = (
    Net("CNN with GroupNorm", cnn, (3, 32, 32), (3, 8, 8)),
    Net("LSTM", lambda small: LastOutput(8 if small else 64, 8 if small else 256), (80, 64), (5, 8)),
    Net("transformer", lambda small: Encoder(8 if small else 256), (128, 256), (5, 8)),
    Net("dense, 100M parameters", dense, (10_000,), (16,)),
)
