"""A model: what it is made of stands in the file, `build` makes it for records of a shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from sordino.models import Architecture


@dataclass(frozen=True)
class Tanh(Architecture, kind="tanh"):
    """One hidden layer."""

    width: int = 16

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        layers = nn.Linear(math.prod(shape), self.width), nn.Tanh(), nn.Linear(self.width, outputs)
        return nn.Sequential(nn.Flatten(), *layers)
