"""Public numbers that change with the round: a plain float is constant, a `Schedule` is not."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from sordino.codec import Part
from sordino.errors import PlanError


class Schedule(Part):
    """A public scalar per round, fixed before the run."""

    @abstractmethod
    def at(self, t: int) -> float:
        """The value in round t, counted from 0."""


@dataclass(frozen=True)
class Constant(Schedule, kind="constant"):
    """value, in every round."""

    value: float

    def at(self, t: int) -> float:
        return self.value


@dataclass(frozen=True)
class Decay(Schedule, kind="decay"):
    """start * factor^t."""

    start: float
    factor: float

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise PlanError("schedule", f"decay factor {self.factor}", "a positive number", "0.99 loses 1% a round")

    def at(self, t: int) -> float:
        return self.start * float(self.factor**t)


@dataclass(frozen=True)
class Linear(Schedule, kind="linear"):
    """From `start` at round 0 to `end` at round `rounds`, then `end`."""

    start: float
    end: float
    rounds: int

    def __post_init__(self) -> None:
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

    def at(self, t: int) -> float:
        return self.start * float(self.factor ** sum(t >= milestone for milestone in self.milestones))


def at(value: float | Schedule, t: int) -> float:
    """The number that a field means in round t."""
    return value.at(t) if isinstance(value, Schedule) else float(value)


@dataclass(frozen=True)
class Scaled(Schedule, kind="scaled"):
    """factor * schedule."""

    schedule: Schedule
    factor: float

    def at(self, t: int) -> float:
        return self.factor * self.schedule.at(t)


def scaled(value: float | Schedule, factor: float) -> float | Schedule:
    """factor times a number or a schedule."""
    return Scaled(value, factor) if isinstance(value, Schedule) else factor * value
