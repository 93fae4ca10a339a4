"""Encoding steps between local training and noise: the clip, and the base of all steps. Engines call `encode`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from sordino import codec
from sordino.accounting.bounds import Bound, Norm
from sordino.codec import Part
from sordino.codec.boundary import of_type, returns, tensor
from sordino.errors import PlanError, brief_repr
from sordino.parts.clipping import SLACK, factors, row_norms, scaled
from sordino.parts.schedules import Schedule, at, positive


@codec.hides_values
@dataclass(frozen=True)
class Public:
    """What everybody may know in round t: nothing here depends on unreleased data."""

    t: int
    clip_norm: float = math.inf
    size: int = 0  # d, the length of a message before any step
    mask: Tensor | None = None  # coordinates that are sent, where a PublicMask chose them
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)  # what `LocalSolver.split` read off releases, [d]
    tensors: tuple[int, ...] = ()  # sizes of the model's tensors, in the order of the message
    state: Mapping[str, float] = field(default_factory=dict)  # what `Step.learn` read off earlier releases

    def on(self, device: torch.device) -> Public:
        """The same, with its tensors there."""
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, mask=mask, broadcast={name: held.to(device) for name, held in self.broadcast.items()})


NoiseStd = float | Tensor  # standard deviation of the noise: one number for all coordinates, or one for each [d]


def decoded(found: object, step: Step, mean: Tensor) -> str:
    """A vector that `encode` makes one of the length of `mean` of."""
    fits = isinstance(found, Tensor) and found.dim() == mean.dim() and step.length(found.shape[-1]) == mean.shape[-1]
    needed = f"a floating tensor of which encode makes {mean.shape[-1]} numbers"
    return tensor(found, tuple(found.shape), mean) if fits and isinstance(found, Tensor) else needed


class Step(Part):
    """One client step: effect, its undoing after the noise, and what it does to the bound and to the noise."""

    @property
    def needs_slopes(self) -> bool:
        """Whether `encode` wants the clients' gradients at the round's start."""
        return False

    @property
    def needs_tensors(self) -> bool:
        """Whether `encode` looks at where one tensor of the model ends and the next begins."""
        return False

    @abstractmethod
    @returns(lambda found, part, rows, *_, **__: tensor(found, (*rows.shape[:-1], part.length(rows.shape[-1])), rows))
    def encode(self, rows: Tensor, public: Public, slopes: Tensor | None = None) -> Tensor:
        """On the client: rows [m, d] -> [m, d']."""

    def length(self, before: int) -> int:
        """How many numbers `encode` makes of so many."""
        return before

    def learn(self, mean: Tensor, public: Public) -> dict[str, float]:
        """Public numbers for later rounds (`Public.state`), read off the noised mean before it is decoded."""
        return {}

    @abstractmethod
    @returns(lambda found, part, mean, public: decoded(found, part, mean))
    def decode(self, mean: Tensor, public: Public) -> Tensor:
        """On the server, after the noise: [d'] -> [d]."""

    @abstractmethod
    @returns(of_type(Bound))
    def bound(self, before: Bound) -> Bound:
        """The bound after this step."""

    @abstractmethod
    @returns(of_type(float, int, Tensor))
    def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
        """The noise's standard deviation after `decode`, where it was `std` before."""


@dataclass(frozen=True)
class Adaptive(Schedule, kind="adaptive"):
    """A clip norm that follows the `quantile` of update norms (Andrew, Thakkar, McMahan, Ramaswamy 2021).

        message = (sqrt(1 - share^2) * x / clip norm,  share * b),  b = +1 if ||x|| <= clip norm else -1
        clip norm <- clip norm * exp(-rate * (fraction inside - quantile)),  read off the noised mean

    The bit is one coordinate of the same unit-ball message, under the same noise: it costs no epsilon of its own, and
    the factor sqrt(1 - share^2) is its price in signal.
    """

    learned: ClassVar[bool] = True
    start: float
    quantile: float = 0.5
    rate: float = 0.2
    share: float = 0.1
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (positive(self.start, self.rate) and 0 < self.quantile < 1 and 0 < self.share < 1):
            found = f"start {self.start}, quantile {self.quantile}, rate {self.rate}, share {self.share}"
            raise PlanError("adaptive clip", found, "start and rate above 0, quantile and share in (0, 1)")

    def at(self, t: int) -> float:
        return self.start

    def join(self, rows: Tensor, inside: Tensor) -> Tensor:
        """[m, d] -> [m, d + 1], still in the unit ball."""
        bits = torch.where(inside, self.share, -self.share).to(rows.dtype) * (1.0 - SLACK)
        return torch.cat([rows * self.kept, bits[:, None]], dim=1)

    def part(self, mean: Tensor) -> Tensor:
        """The update's share of a noised mean, or of its noise per coordinate."""
        return mean[:-1] / self.kept

    @property
    def kept(self) -> float:
        """sqrt(1 - share^2): what of the unit ball is left for the update."""
        return math.sqrt(1 - self.share**2)

    def next(self, mean: Tensor, clip_norm: float) -> float:
        """The next clip norm, kept within a factor of 1000 of the first."""
        fraction = min(1.0, max(0.0, (float(mean[-1]) / self.share + 1) / 2))
        moved = clip_norm * math.exp(-self.rate * (fraction - self.quantile))
        return min(self.start * 1e3, max(self.start * 1e-3, moved))


@dataclass(frozen=True)
class Clip(Step, kind="clip"):
    """x / clip norm, pulled into the unit ball: x * min(1 / clip norm, 1 / ||x||).

    One norm over the whole message. A row with a non-finite entry becomes zero. clip_norm = inf leaves x alone and
    bounds nothing. An `Adaptive` clip norm sends one more coordinate: whether x was inside (Andrew et al. 2021).
    Guarantee: ||encode(x)|| <= 1 exactly, in float32, for any x; so sensitivity is 1 (zero out) or 2 (replace).
    """

    clip_norm: float | Schedule
    norm: Norm = 2

    def __post_init__(self) -> None:
        if isinstance(self.clip_norm, Adaptive) and self.norm != 2:
            raise PlanError("clip", "an adaptive clip norm in the L1 norm", "norm = 2")
        if self.clip_norm != math.inf and not positive(self.clip_norm):
            found = f"clip_norm {brief_repr(self.clip_norm)}"
            raise PlanError("clip", found, "a positive number", "use a clip norm near the typical update norm")

    @property
    def finite(self) -> bool:
        """Whether this clip bounds anything."""
        return isinstance(self.clip_norm, Schedule) or math.isfinite(self.clip_norm)

    def clip_norm_at(self, t: int, learnt: float | None = None) -> float:
        """The public clip norm of round t; `learnt` is what an adaptive one has become."""
        return at(self.clip_norm, t) if learnt is None else learnt

    def _clip_norm(self, public: Public) -> float:
        """What the plan says of this round, or what an adaptive clip norm has become."""
        return public.clip_norm if isinstance(self.clip_norm, Adaptive) else self.clip_norm_at(public.t)

    def encode(self, rows: Tensor, public: Public, slopes: Tensor | None = None) -> Tensor:
        norms = row_norms(rows, self.norm)
        sound = finite_rows(rows, norms)
        if not self.finite:
            return sound
        clip_norm = self._clip_norm(public)
        inside = scaled(sound, factors(norms, clip_norm, unit=True))
        return self.clip_norm.join(inside, norms <= clip_norm) if isinstance(self.clip_norm, Adaptive) else inside

    def length(self, before: int) -> int:
        return before + isinstance(self.clip_norm, Adaptive)

    def decode(self, mean: Tensor, public: Public) -> Tensor:
        if not self.finite:
            return mean
        return (self.clip_norm.part(mean) if isinstance(self.clip_norm, Adaptive) else mean) * self._clip_norm(public)

    def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
        if not self.finite:
            return std
        if isinstance(self.clip_norm, Adaptive):
            std = self.clip_norm.part(std) if isinstance(std, Tensor) else std / self.clip_norm.kept
        return std * self._clip_norm(public)

    def learn(self, mean: Tensor, public: Public) -> dict[str, float]:
        if not isinstance(self.clip_norm, Adaptive):
            return {}
        return {"clip_norm": self.clip_norm.next(mean, self._clip_norm(public))}

    def bound(self, before: Bound) -> Bound:
        if before.unit == "record":
            found = "Clip on the message of a record-level plan"
            raise PlanError("record bound", found, "clipping of each record", "drop Clip: BatchGradient clips records")
        return Bound(unit=before.unit, norm=self.norm, finite=self.finite)


def finite_rows(rows: Tensor, norms: Tensor) -> Tensor:
    """Rows with a non-finite entry (so a non-finite norm) count as zero: they never reach the sum."""
    bad = ~norms.isfinite()
    return torch.where(bad[:, None], torch.zeros_like(rows), rows) if bool(bad.any()) else rows
