"""The server's optimizer: it subtracts the mean message. Its memory is a dict of tensors: what a checkpoint holds."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.codec import Part
from sordino.errors import PlanError
from sordino.parts.schedules import Schedule, at

Memory = dict[str, Tensor]


class ServerOptimizer(Part):
    """init / query / step / result; query is where clients start, result is what is kept."""

    def init(self, params: Tensor) -> Memory:
        """Memory before the first round."""
        return {"params": params.clone()}

    def query(self, memory: Memory) -> Tensor:
        """The model that goes out to the clients."""
        return memory["params"]

    def result(self, memory: Memory) -> Tensor:
        """The model that the run returns."""
        return memory["params"]

    @abstractmethod
    def step(self, memory: Memory, mean: Tensor, t: int) -> Memory:
        """Memory after a round whose mean message was `mean`."""


@dataclass(frozen=True)
class Sgd(ServerOptimizer, kind="sgd"):
    """v <- momentum * v + mean;  w <- w - lr_t * v. With lr = 1 and no momentum: FedAvg."""

    lr: float | Schedule = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise PlanError("server", f"momentum {self.momentum}", "a number in [0, 1)")

    def init(self, params: Tensor) -> Memory:
        memory = {"params": params.clone()}
        return memory | {"velocity": torch.zeros_like(params)} if self.momentum else memory

    def step(self, memory: Memory, mean: Tensor, t: int) -> Memory:
        if not self.momentum:
            return {"params": memory["params"] - at(self.lr, t) * mean}
        velocity = self.momentum * memory["velocity"] + mean
        return {"params": memory["params"] - at(self.lr, t) * velocity, "velocity": velocity}


@dataclass(frozen=True)
class Adam(ServerOptimizer, kind="adam"):
    """FedAdam (Reddi et al. 2021): bias-corrected moments of the mean message;  w <- w - lr * m / (sqrt(v) + floor)."""

    lr: float | Schedule = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    floor: float = 1e-3

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.floor > 0):
            raise PlanError(
                "server", f"adam betas {self.beta1}, {self.beta2}, floor {self.floor}", "betas in [0, 1), floor > 0"
            )

    def init(self, params: Tensor) -> Memory:
        zeros = torch.zeros_like(params)
        return {
            "params": params.clone(),
            "first": zeros,
            "second": zeros.clone(),
            "count": torch.zeros((), dtype=torch.int64),
        }

    def step(self, memory: Memory, mean: Tensor, t: int) -> Memory:
        count = memory["count"] + 1
        first = self.beta1 * memory["first"] + (1 - self.beta1) * mean
        second = self.beta2 * memory["second"] + (1 - self.beta2) * mean.square()
        scale = (second / (1 - self.beta2 ** int(count))).sqrt() + self.floor
        moved = at(self.lr, t) * (first / (1 - self.beta1 ** int(count))) / scale
        return {"params": memory["params"] - moved, "first": first, "second": second, "count": count}
