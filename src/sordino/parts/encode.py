"""Client steps between the local solver and the noise: encode on the client, decode on the server, bound beside."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.codec import Part
from sordino.errors import PlanError
from sordino.parts.norms import SLACK, row_norms
from sordino.parts.schedules import Schedule, at
from sordino.privacy.bounds import Bound, Norm


@dataclass(frozen=True)
class Public:
    """What everybody may know in round t: nothing here depends on unreleased data."""

    t: int
    radius: float = math.inf


class Step(Part):
    """One client step: effect, its undoing after the noise, and what it does to the bound."""

    @abstractmethod
    def encode(self, rows: Tensor, public: Public) -> Tensor:
        """On the client: rows [m, d] -> [m, d']."""

    @abstractmethod
    def decode(self, mean: Tensor, public: Public) -> Tensor:
        """On the server, after the noise: [d'] -> [d]."""

    @abstractmethod
    def bound(self, before: Bound) -> Bound:
        """The bound after this step."""


@dataclass(frozen=True)
class Clip(Step, kind="clip"):
    """x / radius, pulled into the unit ball: x * min(1 / radius, 1 / ||x||).

    One norm over the whole message. A row with a non-finite entry becomes zero. radius = inf leaves x alone and
    bounds nothing.
    Guarantee: ||encode(x)|| <= 1 exactly, in float32, for any x; so movement is 1 (zero out) or 2 (replace).
    """

    radius: float | Schedule
    norm: Norm = 2

    def __post_init__(self) -> None:
        if not isinstance(self.radius, Schedule) and not self.radius > 0:
            raise PlanError(
                "clip", f"radius {self.radius}", "a positive number", "use a radius near the typical update norm"
            )

    @property
    def finite(self) -> bool:
        """Whether this clip bounds anything."""
        return isinstance(self.radius, Schedule) or math.isfinite(self.radius)

    def radius_at(self, t: int) -> float:
        """The public radius of round t."""
        return at(self.radius, t)

    def encode(self, rows: Tensor, public: Public) -> Tensor:
        norms = row_norms(rows, self.norm)
        sound = finite_rows(rows, norms)
        if not self.finite:
            return sound
        inverse = 1.0 / self.radius_at(public.t)
        return _scaled(sound, ((1.0 - SLACK) / norms).nan_to_num(posinf=inverse).clamp(max=inverse))

    def decode(self, mean: Tensor, public: Public) -> Tensor:
        return mean * self.radius_at(public.t) if self.finite else mean

    def bound(self, before: Bound) -> Bound:
        if before.unit == "record":
            raise PlanError(
                "record bound",
                "Clip on the message of a record-level plan",
                "clipping of each record",
                "drop Clip: BatchGradient clips records",
            )
        return Bound(unit=before.unit, norm=self.norm, finite=self.finite)


def finite_rows(rows: Tensor, norms: Tensor) -> Tensor:
    """Rows with a non-finite entry (so a non-finite norm) count as zero: they never reach the sum."""
    bad = ~norms.isfinite()
    return torch.where(bad[:, None], torch.zeros_like(rows), rows) if bool(bad.any()) else rows


def _scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """rows * factors; a factor beyond float32's range is applied in float64."""
    ordinary = (factors > 1e-30) & (factors < 1e30)
    if bool(ordinary.all()):
        return rows * factors.to(rows.dtype)[:, None]
    return (rows.double() * factors[:, None]).to(rows.dtype)
