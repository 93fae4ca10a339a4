"""What every method simulates: federations of random records, and a grid of convex runs. Imports torch alone.

The cohort is smaller than in the papers where a round would take minutes; the work of one client is never smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from workloads import CharLstm, Parts, images, logistic, windows

# Of every method: clip of an update, noise over clip, local step size. More noise on so small a cohort would blow the
# weights up, and time infinities and denormal numbers instead of training; its cost does not depend on its size.
RADIUS, MULTIPLIER, RATE = 1.0, 1e-3, 0.05


@dataclass(frozen=True)
class Work:
    """Local steps and records read in them, counted by a method or expected of it."""

    steps: int = 0
    records: int = 0
    share: float = 1.0  # how much of the unit of time one mark covers

    def __add__(self, other: Work) -> Work:
        return Work(self.steps + other.steps, self.records + other.records, self.share)


@dataclass(frozen=True)
class Federation:
    """`clients` with `records` each; a round trains `cohort` of them for `epochs` in batches of `batch`."""

    build: Callable[[Parts], nn.Module]
    draw: Callable[[int], Tensor]
    classes: int
    clients: int
    records: int
    cohort: int
    epochs: int
    batch: int

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build(Parts())

    def data(self) -> tuple[Tensor, Tensor]:
        """x [clients, records, ...] and y [clients, records], the same in every process."""
        torch.manual_seed(1)
        x = self.draw(self.clients * self.records)
        y = torch.randint(self.classes, (self.clients, self.records))
        return x.view(self.clients, self.records, *x.shape[1:]), y

    def expected(self, rounds: float) -> Work:
        visits = round(rounds) * self.cohort * self.epochs
        return Work(visits * math.ceil(self.records / self.batch), visits * self.records)


@dataclass(frozen=True)
class Grid:
    """`runs` independent convex runs: in each round every silo sends one minibatch gradient of a logistic model."""

    runs: int = 180
    silos: int = 25
    records: int = 1238
    features: int = 50
    rounds: int = 35
    batch: int = 35

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(self.features, 1)

    def data(self) -> tuple[Tensor, Tensor]:
        """x [silos, records, features] and labels y [silos, records] in {0, 1}."""
        torch.manual_seed(1)
        x = torch.randn(self.silos, self.records, self.features)
        return x, torch.randint(2, (self.silos, self.records)).float()

    def expected(self, grids: float) -> Work:
        steps = round(grids * self.runs) * self.rounds * self.silos
        return Work(steps, steps * self.batch)


def cnn(shape: tuple[int, int, int], channels: tuple[int, int], hidden: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 convolutions that keep the size, each with ReLU and a 2x2 pool, then dense layers."""
    first, second = channels
    layers: list[nn.Module] = [nn.Conv2d(shape[0], first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    width = second * (shape[1] // 4) * (shape[2] // 4)
    for after in hidden:
        layers += [nn.Linear(width, after), nn.ReLU()]
        width = after
    return nn.Sequential(*layers, nn.Linear(width, classes))


def emnist_cnn(parts: Parts) -> nn.Module:
    """`sordino.models.EmnistCnn`: 1,690,046 parameters."""
    return cnn((1, 28, 28), (32, 64), (512,), 62)


def svhn_cnn(parts: Parts) -> nn.Module:
    """`sordino.models.SvhnCnn`: 3,431,754 parameters."""
    return cnn((3, 32, 32), (64, 128), (384, 192), 10)


def coloured(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 32)


FEDERATIONS: dict[str, Federation | Grid] = {  # their titles are in render_federated.py
    "w1": Federation(logistic, images, 10, clients=1000, records=50, cohort=50, epochs=5, batch=10),
    "w2": Federation(emnist_cnn, images, 62, clients=500, records=178, cohort=4, epochs=2, batch=32),
    "w3": Federation(svhn_cnn, coloured, 10, clients=100, records=300, cohort=2, epochs=1, batch=64),
    "w4": Federation(lambda parts: CharLstm(parts, 256, 2), windows(80), 80, 20, 200, cohort=2, epochs=1, batch=50),
    "w6": Grid(),
}
for _name, _cohort in (
    ("w2", 8),
    ("w3", 6),
):  # for two workers: a round's fixed costs weigh less, as in the papers
    _work = FEDERATIONS[_name]
    assert isinstance(_work, Federation)
    FEDERATIONS[f"{_name}x"] = replace(_work, cohort=_cohort)
