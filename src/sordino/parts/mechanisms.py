"""The noise: the only file that draws it (a test reads every other file for offenders).

Every message lies in the unit ball, so the scale of the noise IS the multiplier.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sordino.codec import Part
from sordino.errors import PlanError, shown
from sordino.parts.bounds import Norm
from sordino.parts.events import Event, GaussianNoise, LaplaceNoise
from sordino.parts.numbers import positive


class Mechanism(Part):
    """Additive noise of a known scale."""

    multiplier: float

    @property
    @abstractmethod
    def norm(self) -> Norm:
        """The norm in which the message must be bounded."""

    @property
    @abstractmethod
    def std(self) -> float:
        """Standard deviation of one coordinate."""

    @abstractmethod
    def event(self) -> Event:
        """What one release costs."""

    def with_multiplier(self, multiplier: float) -> Mechanism:
        """The same law with another scale."""
        other: Mechanism = replace(self, multiplier=multiplier)  # type: ignore[type-var]
        return other

    @abstractmethod
    def sample(self, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """One draw for a message of `size` coordinates."""


def _positive(name: str, multiplier: float) -> None:
    if not positive(multiplier):
        raise PlanError(
            "noise",
            f"{name} multiplier {shown(multiplier)}",
            "a positive finite number that float32 holds",
            "use release NoNoise() to train without privacy",
        )


@dataclass(frozen=True)
class Gaussian(Mechanism, kind="gaussian"):
    """x + N(0, multiplier^2 I) for ||x||_2 <= 1.

    Guarantee: mu-GDP with mu = movement / multiplier (Dong, Roth, Su 2022), movement 1 or, replace-one, 2.
    """

    multiplier: float

    def __post_init__(self) -> None:
        _positive("gaussian", self.multiplier)

    @property
    def norm(self) -> Norm:
        return 2

    @property
    def std(self) -> float:
        return self.multiplier

    def event(self) -> Event:
        return GaussianNoise(self.multiplier)

    def sample(self, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return rng.standard_normal(size) * self.multiplier


@dataclass(frozen=True)
class Laplace(Mechanism, kind="laplace"):
    """x + Laplace(multiplier) per coordinate for ||x||_1 <= 1.

    Guarantee: pure epsilon = movement / multiplier (Dwork et al. 2006), movement 1 or, replace-one, 2.
    """

    multiplier: float

    def __post_init__(self) -> None:
        _positive("laplace", self.multiplier)

    @property
    def norm(self) -> Norm:
        return 1

    @property
    def std(self) -> float:
        return math.sqrt(2) * self.multiplier

    def event(self) -> Event:
        return LaplaceNoise(self.multiplier)

    def sample(self, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return rng.laplace(scale=self.multiplier, size=size)
