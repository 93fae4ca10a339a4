"""Gradient oracles: which slope a local step follows."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sordino.codec import Part


@dataclass(frozen=True)
class Batch:
    """One minibatch of each of m clients. `mask` marks real records, `active` clients that still have steps to do."""

    x: Tensor  # [m, b, ...]
    y: Tensor  # [m, b, ...]
    mask: Tensor | None = None  # [m, b], None: all real
    active: Tensor | None = None  # [m], None: all active


class Objective(Protocol):
    """The clients' losses at their own parameters, as an engine computes them."""

    @property
    def trainable(self) -> int: ...
    def place(self, start: Tensor, clients: int) -> Tensor: ...
    def gradient(self, w: Tensor, batch: Batch) -> Tensor: ...


class Gradient(Part):
    """A way to turn the loss into a direction."""

    @abstractmethod
    def at(self, objective: Objective, w: Tensor, batch: Batch) -> Tensor:
        """The direction at w [m, d] for one minibatch per client; may be overwritten by the next call."""


@dataclass(frozen=True)
class Plain(Gradient, kind="plain"):
    """grad f(w)."""

    def at(self, objective: Objective, w: Tensor, batch: Batch) -> Tensor:
        return objective.gradient(w, batch)
