"""Public numbers that change with the round: a plain float is constant, a `Schedule` is not."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from sordino.codec import Part
from sordino.errors import PlanError, shown


class Schedule(Part):
    """A public scalar per round, fixed before the run."""

    monotone: ClassVar[bool] = False  # True: it only falls, or only grows, so that its ends say how far it goes

    @abstractmethod
    def at(self, t: int) -> float:
        """The value in round t, counted from 0."""

    def span(self, rounds: int) -> tuple[float, float]:
        """The least and the largest value of a run; NaN, twice, if one is not a number."""
        low, high = math.inf, -math.inf
        for value in map(self.at, (0, rounds - 1) if self.monotone else range(rounds)):
            if math.isnan(value):
                return math.nan, math.nan
            low, high = min(low, value), max(high, value)
        return low, high


def _finite(**values: float) -> None:
    for name, value in values.items():
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise PlanError("schedule", f"{name} = {shown(value)}", "a finite number")


def _power(base: float, n: int) -> float:
    """base^n, infinite where a float cannot hold it."""
    try:
        return float(base) ** n
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Constant(Schedule, kind="constant"):
    """value, in every round."""

    value: float
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _finite(value=self.value)

    def at(self, t: int) -> float:
        return self.value


@dataclass(frozen=True)
class Decay(Schedule, kind="decay"):
    """start * factor^t."""

    start: float
    factor: float
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _finite(start=self.start, factor=self.factor)
        if not self.factor > 0:
            raise PlanError("schedule", f"decay factor {self.factor}", "a positive number", "0.99 loses 1% a round")

    def at(self, t: int) -> float:
        return self.start * _power(self.factor, t) if self.start else 0.0


@dataclass(frozen=True)
class Linear(Schedule, kind="linear"):
    """From `start` at round 0 to `end` at round `rounds`, then `end`."""

    start: float
    end: float
    rounds: int
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _finite(start=self.start, end=self.end)
        if self.rounds < 1:
            raise PlanError("schedule", f"linear over {self.rounds} rounds", "at least 1 round")

    def at(self, t: int) -> float:
        return self.start + (self.end - self.start) * min(t / self.rounds, 1.0)


@dataclass(frozen=True)
class Piecewise(Schedule, kind="piecewise"):
    """start * factor^(number of milestones passed)."""

    start: float
    factor: float
    milestones: tuple[int, ...]
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _finite(start=self.start, factor=self.factor)
        if self.factor < 0:
            raise PlanError("schedule", f"piecewise factor {self.factor}", "a number of at least 0")

    def at(self, t: int) -> float:
        return self.start * _power(self.factor, sum(t >= milestone for milestone in self.milestones))


def at(value: float | Schedule, t: int) -> float:
    """The number that a field means in round t."""
    return value.at(t) if isinstance(value, Schedule) else float(value)


@dataclass(frozen=True)
class Scaled(Schedule, kind="scaled"):
    """factor * schedule."""

    schedule: Schedule
    factor: float

    def __post_init__(self) -> None:
        _finite(factor=self.factor)

    def span(self, rounds: int) -> tuple[float, float]:
        ends = [self.factor * end for end in self.schedule.span(rounds)]
        return min(ends), max(ends)

    def at(self, t: int) -> float:
        return self.factor * self.schedule.at(t)


def scaled(value: float | Schedule, factor: float) -> float | Schedule:
    """factor times a number or a schedule."""
    return Scaled(value, factor) if isinstance(value, Schedule) else factor * value
