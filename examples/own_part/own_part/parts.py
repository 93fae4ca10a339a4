"""Three parts: who takes part, what a client does to its message, what the server does to the noised mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino import Seeded
from sordino.errors import PlanError
from sordino.parts import Bound, Event, Noised, NoiseStd, Postprocess, Public, Relation, Sampler, Step


@dataclass(frozen=True)
class Halves(Sampler, kind="halves"):
    """Even clients in even rounds, odd ones in odd rounds.

    Guarantee: public, so nothing is amplified; a client is in every second round, and is charged for those.
    """

    population: int
    relation: ClassVar[Relation] = "zero_out"
    random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.population < 2 or self.population % 2:
            raise PlanError("sampling", f"population = {self.population}", "an even number of at least 2")

    @property
    def expected(self) -> float:
        return self.population / 2

    def draw(self, t: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.arange(t % 2, self.population, 2, dtype=np.int64)

    def amplify(self, event: Event) -> Event:
        return event

    def max_participations(self, rounds: int) -> int:
        return (rounds + 1) // 2


@dataclass(frozen=True)
class Mirror(Step, kind="mirror"):
    """x -> s x with public random signs s, fresh in every round, and back: s (s x + noise) = x + s noise.

    Bound: signs change no norm. Noise: its law stays what it was, coordinate by coordinate.
    """

    seed: int = 0

    def signs(self, size: int, public: Public) -> Tensor:
        """One sign per coordinate, known to all."""
        bits = Seeded(self.seed).at(public.t, "mirror").integers(2, size=size)
        return torch.from_numpy(2.0 * bits - 1.0)

    def encode(self, rows: Tensor, public: Public, slopes: Tensor | None = None) -> Tensor:
        return rows * self.signs(rows.shape[-1], public).to(rows)

    def decode(self, mean: Tensor, public: Public) -> Tensor:
        return mean * self.signs(len(mean), public).to(mean)

    def bound(self, before: Bound) -> Bound:
        return before

    def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
        return std


@dataclass(frozen=True)
class Wiener(Postprocess, kind="wiener"):
    """y * P / (P + nu^2), tensor by tensor, P = max(0, mean(y^2) - nu^2) the signal's power, nu the noise's deviation.

    Guarantee: a function of what is released already and of public numbers, so it costs nothing.
    """

    needs_noise: ClassVar[bool] = True

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        found, each = mean.clone(), known.each()
        for slot in known.layout.slots:
            part, noise = found[slot.start : slot.stop], float(each[slot.start : slot.stop].square().mean())
            signal = max(0.0, float(part.double().square().mean()) - noise)
            part.mul_(signal / (signal + noise) if noise else 1.0)
        return found
