"""What every method trains: four nets, random data, a batch. Imports torch alone, so that any peer's venv can read it.

A peer that cannot clip torch's own LSTM or attention passes its replacement in `Parts`; all else is the same module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLIP, MULTIPLIER, RATE = 1.0, 1.0, 0.05  # of every method; RATE is SGD's


@dataclass(frozen=True)
class Parts:
    """The layers that some peers must replace."""

    lstm: Callable[..., nn.Module] = nn.LSTM
    attention: Callable[..., nn.Module] = nn.MultiheadAttention


@dataclass(frozen=True)
class Workload:
    """A net, `records` random records and an expected batch; an epoch has records / batch steps."""

    build: Callable[[Parts], nn.Module]
    draw: Callable[[int], Tensor]
    classes: int
    batch: int
    records: int

    def model(self, parts: Parts = Parts()) -> nn.Module:
        torch.manual_seed(0)
        return self.build(parts)

    def loader(self) -> DataLoader[Any]:
        """An ordinary loader over tensors in memory."""
        torch.manual_seed(1)
        data = TensorDataset(self.draw(self.records), torch.randint(self.classes, (self.records,)))
        return DataLoader(data, batch_size=self.batch, shuffle=True)


def tutorial_cnn(parts: Parts) -> nn.Module:
    """Paper 004's MNIST net, `sordino.models.DpMnistCnn`: 26,010 parameters."""
    first = (nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, stride=1))
    second = (nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10))


class CharLstm(nn.Module):
    """`sordino.models.CharLstm`: the last state of an LSTM over embedded characters, to the next one."""

    def __init__(self, parts: Parts, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(80, 8)
        self.lstm = parts.lstm(8, hidden, num_layers=layers, batch_first=True)
        self.out = nn.Linear(hidden, 80)

    def forward(self, windows: Tensor) -> Tensor:
        scores: Tensor = self.out(self.lstm(self.embed(windows))[0][:, -1])
        return scores


class Block(nn.Module):
    """x + attention(norm(x)), then x + dense(norm(x))."""

    def __init__(self, parts: Parts, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = parts.attention(width, 4, batch_first=True)
        self.dense = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm1(x)
        x = x + self.attend(normal, normal, normal, need_weights=False)[0]
        total: Tensor = x + self.dense(self.norm2(x))
        return total


class Positions(nn.Module):
    """Adds sines of the position; nothing to train."""

    table: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], 2).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def encoder(parts: Parts) -> nn.Module:
    """Two blocks of width 128 over 32 characters, and the mean position to the next character."""
    blocks = (nn.Embedding(80, 128), Positions(32, 128), Block(parts, 128), Block(parts, 128), nn.LayerNorm(128))
    return nn.Sequential(*blocks, Mean(), nn.Linear(128, 80))


class Mean(nn.Module):
    """Over the positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def images(count: int) -> Tensor:
    return torch.randn(count, 1, 28, 28)


def windows(length: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randint(80, (count, length))


def logistic(parts: Parts) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


WORKLOADS = {  # their titles are in render.py
    "cnn": Workload(tutorial_cnn, images, 10, batch=256, records=2560),
    "logistic": Workload(logistic, images, 10, batch=256, records=2560),
    "transformer": Workload(encoder, windows(32), 80, batch=64, records=256),
    "lstm64": Workload(lambda parts: CharLstm(parts, 64, 1), windows(80), 80, batch=64, records=192),
    "lstm256": Workload(lambda parts: CharLstm(parts, 256, 2), windows(80), 80, batch=16, records=32),
}
