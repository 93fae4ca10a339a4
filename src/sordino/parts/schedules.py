"""Schedules: public numbers that change with the round; and the ranges of numbers that parts accept.

A plain float is constant. `finite`, `positive`, `natural` and `share` check all their values at once, within what
float32 holds; they pass over None and over a `Schedule`, whose values the plan checks.
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from sordino.codec import Part
from sordino.codec.boundary import of_type, returns
from sordino.errors import PlanError, brief_repr


class Schedule(Part):
    """A public scalar per round, fixed before the run."""

    learned: ClassVar[bool] = False  # True: later values are read off releases, and `at` says the first one only
    monotone: ClassVar[bool] = False  # True: it only falls, or only grows, so that its ends say how far it goes

    @abstractmethod
    @returns(of_type(float, int))
    def at(self, t: int) -> float:
        """The value in round t, counted from 0."""

    @property
    def per_step(self) -> bool:
        """Whether the value changes from one local step of a round to the next."""
        return False

    def at_step(self, t: int, j: int, steps: int) -> float:
        """The value in local step j of round t, both counted from 0, where a round has so many steps."""
        return self.at(t)

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
            raise PlanError("schedule", f"{name} = {brief_repr(value)}", "a finite number")


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
class InverseTime(Schedule, kind="inverse_time"):
    """scale / (shift + k), k the round.

    Inside `PerStep`, k counts local steps: scale = 2 / mu and shift = max(8 lambda / mu, E) is the step of paper 002,
    Theorem 3. As the server's step of a run with one gradient a round, scale / (1 + k) is that of paper 004.
    """

    scale: float
    shift: float = 1.0
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _finite(scale=self.scale, shift=self.shift)
        if not self.shift > 0:
            raise PlanError("schedule", f"shift = {self.shift}", "a positive number", "1 begins at `scale`")

    def at(self, t: int) -> float:
        return self.scale / (self.shift + t)


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
class PerStep(Schedule, kind="per_step"):
    """schedule(k) in local step j of round t, k = t E + j: a step size that changes inside a round.

    E is the `steps` of the local solver, a public number of the plan; with `epochs` it would depend on a client's data,
    so that is refused. Where there are no local steps (a server, a clip norm) k is the round.
    Guarantee: the step size is public and bounds nothing; clip, event and cost are those of any other schedule.
    """

    schedule: Schedule

    @property
    def per_step(self) -> bool:
        return True

    def span(self, rounds: int) -> tuple[float, float]:
        return self.schedule.span(rounds)

    def at(self, t: int) -> float:
        return self.schedule.at(t)

    def at_step(self, t: int, j: int, steps: int) -> float:
        return self.schedule.at(t * steps + j)


@dataclass(frozen=True)
class Travelled(Schedule, kind="travelled"):
    """sum of schedule(k) over the `steps` local steps k = t steps, ..., (t + 1) steps - 1 of round t.

    How far a model can go in a round whose gradients are in the unit ball: the clip norm for a `PerStep` size.
    """

    schedule: Schedule
    steps: int

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 10**6:
            found = f"travelled over {brief_repr(self.steps)} steps"
            raise PlanError("schedule", found, "from 1 to 1,000,000 steps a round")

    def span(self, rounds: int) -> tuple[float, float]:
        """Bounds: all steps as small, or as large, as any."""
        low, high = self.schedule.span(rounds * self.steps)
        return low * self.steps, high * self.steps

    def at(self, t: int) -> float:
        return math.fsum(self.schedule.at(t * self.steps + j) for j in range(self.steps))


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

    @property
    def per_step(self) -> bool:
        return self.schedule.per_step

    def at(self, t: int) -> float:
        return self.factor * self.schedule.at(t)

    def at_step(self, t: int, j: int, steps: int) -> float:
        return self.factor * self.schedule.at_step(t, j, steps)


def scaled(value: float | Schedule, factor: float) -> float | Schedule:
    """factor times a number or a schedule."""
    return Scaled(value, factor) if isinstance(value, Schedule) else factor * value


def changes_inside(value: float | Schedule) -> bool:
    """Whether a number changes from one local step of a round to the next."""
    return isinstance(value, Schedule) and value.per_step


def paces(value: float | Schedule, t: int, steps: int) -> list[float]:
    """What a field means in each of the local steps of round t."""
    if isinstance(value, Schedule) and value.per_step:
        return [value.at_step(t, j, steps) for j in range(steps)]
    return [at(value, t)] * steps


def travelled(value: float | Schedule, t: int, steps: int) -> float:
    """The sum of `paces`."""
    return math.fsum(paces(value, t, steps)) if changes_inside(value) else steps * at(value, t)


def span_of_steps(value: float | Schedule, rounds: int, steps: int) -> tuple[float, float]:
    """The least and the largest value in any local step of a run."""
    if isinstance(value, Schedule):
        return value.span(rounds * steps if value.per_step else rounds)
    return float(value), float(value)


HUGE = 3e38  # about the largest float32
TINY = 1e-38  # and the smallest with all its digits
MOST = 10**6  # epochs, steps or layers: more is a slip of the pen
CLIENTS = 10**10  # more than there are people


def finite(*values: Any) -> bool:
    """Any number of either sign."""
    return all(-HUGE <= value <= HUGE for value in _numbers(values))


def positive(*values: Any) -> bool:
    """Above zero, and not so near that its inverse overflows."""
    return all(TINY <= value <= HUGE for value in _numbers(values))


def natural(*values: Any) -> bool:
    """Zero or above."""
    return all(0 <= value <= HUGE for value in _numbers(values))


def share(*values: Any) -> bool:
    """A part of a whole: above 0, at most 1."""
    return all(TINY <= value <= 1 for value in _numbers(values))


def _numbers(values: tuple[Any, ...]) -> list[Any]:
    return [value for value in values if value is not None and not isinstance(value, Schedule)]
