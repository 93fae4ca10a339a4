"""Nets drawn at random: convolutional, recurrent, transformers and perceptrons, with sizes that a seed decides.

Imports torch alone, so that a peer's venv can read it. A `Net` takes the place of a `Workload` of benchmarks/peers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
from workloads import Block, Mean, Parts

CLASSES, WORDS = 10, 80
DRAWN = ("cnn", "cnn", "cnn", "lstm", "lstm", "transformer", "transformer", "mlp")  # families of the nets of one seed
Build = Callable[[Parts], nn.Module]


@dataclass
class Net:
    """A net in words, and its records: images or features [records, ...] or characters [records, T]."""

    family: str
    words: str
    build: Build
    shape: tuple[int, ...]
    characters: bool = False
    batch: int = 256
    data: TensorDataset | None = field(default=None, repr=False)

    def model(self, parts: Parts = Parts()) -> nn.Module:
        torch.manual_seed(0)
        return self.build(parts)

    def draw(self) -> None:
        """Make the data set, of four batches: it is no method's memory."""
        torch.manual_seed(1)
        count = 4 * self.batch
        x = torch.randint(WORDS, (count, *self.shape)) if self.characters else torch.randn(count, *self.shape)
        self.data = TensorDataset(x, torch.randint(CLASSES, (count,)))

    def loader(self) -> DataLoader[Any]:
        assert self.data is not None
        return DataLoader(self.data, batch_size=self.batch, shuffle=True)


def nets(seed: int, batch: int) -> list[Net]:
    """Return the nets of a seed."""
    rng = random.Random(seed)
    drawn = [FAMILIES[family](rng) for family in DRAWN]
    for net in drawn:
        net.batch = batch
    return drawn


def cnn(rng: random.Random) -> Net:
    """Blocks of convolution, norm, activation and pooling; the width grows where the image shrinks."""
    channels, side = rng.choice(((1, 28), (3, 32)))
    depth, width, kernel = rng.randint(2, 4), rng.choice((8, 12, 16, 24)), rng.choice((3, 5))
    norm = rng.choice(("GroupNorm", "GroupNorm", "InstanceNorm", "no norm"))
    pooling, act = rng.choice(("max", "average", "stride")), rng.choice((nn.ReLU, nn.Tanh))

    def build(parts: Parts) -> nn.Module:
        layers: list[nn.Module] = []
        before, now, wide = channels, side, width
        for _ in range(depth):
            shrink = now >= 8
            step = 2 if shrink and pooling == "stride" else 1
            layers.append(nn.Conv2d(before, wide, kernel, stride=step, padding=kernel // 2))
            if norm != "no norm":
                instance = nn.InstanceNorm2d(wide, affine=True)
                layers.append(nn.GroupNorm(4, wide) if norm == "GroupNorm" else instance)
            layers.append(act())
            if shrink and pooling != "stride":
                layers.append(nn.MaxPool2d(2) if pooling == "max" else nn.AvgPool2d(2))
            before, now, wide = wide, (now + 1) // 2 if step == 2 else now // 2 if shrink else now, min(64, 2 * wide)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * now * now, CLASSES))

    words = f"{depth} convolutions {kernel}x{kernel} from width {width}, {norm}, {pooling} pooling, {act.__name__}"
    return Net("CNN", f"{words}, {channels}x{side}x{side}", build, (channels, side, side))


class LastOutput(nn.Module):
    """Embedded characters, or features, through an LSTM whose last output feeds a linear layer."""

    def __init__(self, parts: Parts, features: int, hidden: int, layers: int, characters: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, features) if characters else nn.Identity()
        self.lstm = parts.lstm(features, hidden, num_layers=layers, batch_first=True)
        self.out = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.lstm(self.embed(x))[0][:, -1])
        return scores


def lstm(rng: random.Random) -> Net:
    """An LSTM over characters or features."""
    length, features, hidden = rng.choice((16, 24, 32, 48)), rng.choice((8, 16, 32)), rng.choice((48, 64, 96, 128))
    layers, characters = rng.randint(1, 2), rng.random() < 0.5

    def build(parts: Parts) -> nn.Module:
        return LastOutput(parts, features, hidden, layers, characters)

    words = f"{layers} x {hidden} over {length} {'characters' if characters else 'steps'} of {features} features"
    return Net("LSTM", words, build, (length,) if characters else (length, features), characters)


def transformer(rng: random.Random) -> Net:
    """Blocks of attention and two dense layers, each behind a LayerNorm, and the mean over positions."""
    length, width, depth = rng.choice((16, 24, 32, 48)), rng.choice((32, 64, 96, 128)), rng.randint(1, 3)

    def build(parts: Parts) -> nn.Module:
        blocks = [Block(parts, width) for _ in range(depth)]
        return nn.Sequential(
            nn.Embedding(WORDS, width), *blocks, nn.LayerNorm(width), Mean(), nn.Linear(width, CLASSES)
        )

    return Net("transformer", f"{depth} x {width} over {length} characters", build, (length,), True)


def mlp(rng: random.Random) -> Net:
    """Dense layers."""
    inputs, width, depth = rng.choice((64, 200, 784)), rng.choice((64, 128, 256, 512)), rng.randint(2, 4)

    def build(parts: Parts) -> nn.Module:
        sizes = [inputs, *[width] * (depth - 1), CLASSES]
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return Net("MLP", f"{depth} layers of width {width} from {inputs} features", build, (inputs,))


FAMILIES = {"cnn": cnn, "lstm": lstm, "transformer": transformer, "mlp": mlp}
