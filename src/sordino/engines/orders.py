"""What rank 0 says to the others: one line of JSON, then whole numbers. Nothing that is read can run code."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.parts.encode import Public
from sordino.parts.samplers import Cohort

LINE = 1 << 12  # bytes that a line of JSON may take
END = b"null\n"  # the run is over


@dataclass(frozen=True)
class Order:
    """What rank 0 wants: the messages of a cohort, or, without one, an evaluation. The vector follows."""

    public: Public | None = None
    cohort: Cohort | None = None

    def written(self) -> bytes:
        """{"t", "radius", "size", "clients", "mask"}, then the cohort and the mask as int64; {} for an evaluation."""
        if self.public is None or self.cohort is None:
            return b"{}\n"
        mask = self.public.mask
        kept = np.zeros(0, dtype=np.int64) if mask is None else mask.cpu().numpy()
        said = {"t": self.public.t, "radius": self.public.radius, "size": self.public.size}
        line = {**said, "clients": len(self.cohort), "mask": None if mask is None else len(kept)}
        numbers = np.concatenate([self.cohort, kept]).astype("<i8")
        return json.dumps(line).encode() + b"\n" + numbers.tobytes()


@dataclass(frozen=True)
class Limits:
    """What an order may name: so many clients, so many coordinates. Public numbers of the plan and the model."""

    population: int
    size: int

    @property
    def most(self) -> int:
        """Bytes of the longest order there is."""
        return LINE + 8 * (self.population + self.size)

    def read(self, body: bytes) -> Order | None:
        """The order, or None when the run is over; `ValueError` for anything that rank 0 would not say."""
        line, _, numbers = body.partition(b"\n")
        said = json.loads(line)
        if said is None or said == {}:
            return None if said is None else Order()
        if not isinstance(said, dict) or set(said) != {"t", "radius", "size", "clients", "mask"}:
            raise ValueError("other words than those of an order")
        cohort, mask = self._numbers(numbers, _count(said["clients"]), said["mask"])
        return Order(Public(_count(said["t"]), _radius(said["radius"]), _count(said["size"]), mask), cohort)

    def _numbers(self, raw: bytes, clients: int, kept: Any) -> tuple[Cohort, Tensor | None]:
        found = np.frombuffer(raw, dtype="<i8").astype(np.int64)
        if len(found) != clients + (0 if kept is None else _count(kept)):
            raise ValueError("other numbers than were announced")
        cohort, mask = _within(found[:clients], self.population), _within(found[clients:], self.size)
        return cohort, None if kept is None else torch.from_numpy(mask)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no count")
    return value


def _radius(value: Any) -> float:
    if type(value) not in (int, float) or math.isnan(value) or value <= 0:
        raise ValueError("no radius")
    return float(value)


def _within(numbers: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < end:
        raise ValueError("a number out of range")
    return numbers
