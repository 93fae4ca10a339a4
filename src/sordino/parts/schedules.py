"""Schedules, which are public numbers that change with the round, and range checks of the parts' numbers.

A plain float is a constant schedule. `finite`, `positive`, `natural` and `share` check all their arguments at once,
within the range of float32; they accept None, and a `Schedule`, whose values the plan checks.
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from sordino.codec import Part
from sordino.codec.boundary import of_type, returns
from sordino.errors import PlanError, brief_repr

FINITE = sys.float_info.max
HUGE = 3e38  # about the largest float32
TINY = 1e-38  # about the smallest float32 with full precision
MOST = 10**6  # largest accepted number of epochs, steps or layers
CLIENTS = 10**10  # largest accepted number of clients or records


def require(holds: bool, rule: str, found: str, needed: str, fix: str = "") -> None:
    """Raise `PlanError(rule, found, needed, fix)` unless a condition holds."""
    if not holds:
        raise PlanError(rule, found, needed, fix)


def require_values(holds: bool, rule: str, needed: str, fix: str = "", /, **values: Any) -> None:
    """Raise `PlanError` about named values, such as lr=0.1, unless a condition on them holds."""
    if not holds:
        found = ", ".join(f"{name} = {brief_repr(value)}" for name, value in values.items())
        raise PlanError(rule, found, needed, fix or f"change {' or '.join(values)}")


class Schedule(Part):
    """Base class of schedules, which give a public number per round, fixed before the run."""

    learned: ClassVar[bool] = False  # True: `at` gives the first value; later values are read off releases
    monotone: ClassVar[bool] = False  # True: never rises or never falls, so its first and last values bound it
    per_step: ClassVar[bool] = False  # True: the value changes from one local step of a round to the next

    @abstractmethod
    @returns(of_type(float, int))
    def at(self, t: int) -> float:
        """Return the value in round t, counted from 0."""

    def at_step(self, t: int, j: int, steps: int) -> float:
        """Return the value in local step j (from 0) of round t, where a round has `steps` local steps."""
        return self.at(t)

    def span(self, rounds: int) -> tuple[float, float]:
        """Return the least and the largest value in `rounds` rounds; (NaN, NaN) if a value is NaN."""
        values = [self.at(t) for t in ((0, rounds - 1) if self.monotone else range(rounds))]
        return (math.nan, math.nan) if any(map(math.isnan, values)) else (min(values), max(values))


@dataclass(frozen=True)
class Constant(Schedule, kind="constant"):
    """Constant schedule: `value` in every round."""

    value: float
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_values(abs(self.value) <= FINITE, "schedule", "a finite number", value=self.value)

    def at(self, t: int) -> float:
        return self.value


@dataclass(frozen=True)
class Decay(Schedule, kind="decay"):
    """Exponential decay start * factor^t in round t."""

    start: float
    factor: float
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_values(
            abs(self.start) <= FINITE and abs(self.factor) <= FINITE,
            "schedule",
            "a finite number",
            start=self.start,
            factor=self.factor,
        )
        fix = "set factor = 0.99 to lose 1% a round"
        require_values(self.factor > 0, "schedule", "a positive number", fix, factor=self.factor)

    def at(self, t: int) -> float:
        try:
            return self.start * float(self.factor) ** t
        except OverflowError:
            return self.start * math.inf if self.start else 0.0


@dataclass(frozen=True)
class Linear(Schedule, kind="linear"):
    """Linear schedule from `start` in round 0 to `end` in round `rounds`, and `end` afterwards."""

    start: float
    end: float
    rounds: int
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_values(
            abs(self.start) <= FINITE and abs(self.end) <= FINITE,
            "schedule",
            "a finite number",
            start=self.start,
            end=self.end,
        )
        found = f"a linear schedule over {self.rounds} rounds"
        require(self.rounds >= 1, "schedule", found, "at least 1 round", "set rounds to those of the plan")

    def at(self, t: int) -> float:
        return self.start + (self.end - self.start) * min(t / self.rounds, 1.0)


@dataclass(frozen=True)
class InverseTime(Schedule, kind="inverse_time"):
    """Inverse-time schedule scale / (shift + k), where k is the round or, inside `PerStep`, the local step.

    For a mu-strongly convex, lambda-smooth loss and E local steps, scale = 2 / mu and shift = max(8 lambda / mu, E) is
    the local step size of `client_side_fed_avg`. As the server's step size, scale / (1 + k) is that of DP-LSSGD.
    """

    scale: float
    shift: float = 1.0
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_values(
            abs(self.scale) <= FINITE and abs(self.shift) <= FINITE,
            "schedule",
            "a finite number",
            scale=self.scale,
            shift=self.shift,
        )
        require_values(self.shift > 0, "schedule", "a positive number", "set shift = 1", shift=self.shift)

    def at(self, t: int) -> float:
        return self.scale / (self.shift + t)


@dataclass(frozen=True)
class Piecewise(Schedule, kind="piecewise"):
    """Piecewise constant schedule start * factor^(number of milestones up to the round)."""

    start: float
    factor: float
    milestones: tuple[int, ...]
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_values(
            abs(self.start) <= FINITE and abs(self.factor) <= FINITE,
            "schedule",
            "a finite number",
            start=self.start,
            factor=self.factor,
        )
        require_values(self.factor >= 0, "schedule", "a number of at least 0", factor=self.factor)

    def at(self, t: int) -> float:
        try:
            return self.start * float(self.factor) ** sum(t >= milestone for milestone in self.milestones)
        except OverflowError:
            return self.start * math.inf


@dataclass(frozen=True)
class PerStep(Schedule, kind="per_step"):
    """Schedule per local step: schedule(k) in local step j of round t, k = t E + j, where E is the solver's `steps`.

    A solver with `epochs` is refused, since its number of steps depends on a client's data. Without local steps (a
    server, a clip norm) k is the round. Guarantee: the step size is public and has no effect on bounds and cost.
    """

    schedule: Schedule
    per_step: ClassVar[bool] = True

    def span(self, rounds: int) -> tuple[float, float]:
        return self.schedule.span(rounds)

    def at(self, t: int) -> float:
        return self.schedule.at(t)

    def at_step(self, t: int, j: int, steps: int) -> float:
        return self.schedule.at(t * steps + j)


@dataclass(frozen=True)
class Travelled(Schedule, kind="travelled"):
    """Sum of schedule(k) over the `steps` local steps k = t steps, ..., (t + 1) steps - 1 of round t, as a clip norm.

    Local steps of these sizes, with gradients in the unit ball, change a model by at most this sum.
    """

    schedule: Schedule
    steps: int

    def __post_init__(self) -> None:
        fix = "set steps to those of the local solver"
        require_values(1 <= self.steps <= MOST, "schedule", f"from 1 to {MOST:,} steps a round", fix, steps=self.steps)

    def span(self, rounds: int) -> tuple[float, float]:
        """Return bounds on the values in `rounds` rounds: `steps` times the smallest and the largest step size."""
        low, high = self.schedule.span(rounds * self.steps)
        return low * self.steps, high * self.steps

    def at(self, t: int) -> float:
        return math.fsum(self.schedule.at(t * self.steps + j) for j in range(self.steps))


@dataclass(frozen=True)
class Scaled(Schedule, kind="scaled"):
    """Schedule times a constant `factor`."""

    schedule: Schedule
    factor: float

    def __post_init__(self) -> None:
        require_values(abs(self.factor) <= FINITE, "schedule", "a finite number", factor=self.factor)

    def span(self, rounds: int) -> tuple[float, float]:
        ends = [self.factor * end for end in self.schedule.span(rounds)]
        return min(ends), max(ends)

    @property
    def per_step(self) -> bool:  # type: ignore[override]
        return self.schedule.per_step

    def at(self, t: int) -> float:
        return self.factor * self.schedule.at(t)

    def at_step(self, t: int, j: int, steps: int) -> float:
        return self.factor * self.schedule.at_step(t, j, steps)


def at(value: float | Schedule, t: int) -> float:
    """Return the value of a number or a schedule in round t."""
    return value.at(t) if isinstance(value, Schedule) else float(value)


def scaled(value: float | Schedule, factor: float) -> float | Schedule:
    """Return factor times a number or a schedule."""
    return Scaled(value, factor) if isinstance(value, Schedule) else factor * value


def step_values(value: float | Schedule, t: int, steps: int) -> list[float]:
    """Return the value of a number or a schedule in each local step of round t."""
    if isinstance(value, Schedule) and value.per_step:
        return [value.at_step(t, j, steps) for j in range(steps)]
    return [at(value, t)] * steps


def travelled(value: float | Schedule, t: int, steps: int) -> float:
    """Return the sum of a number or a schedule over the local steps of round t."""
    varied = isinstance(value, Schedule) and value.per_step
    return math.fsum(step_values(value, t, steps)) if varied else steps * at(value, t)


def span_of_steps(value: float | Schedule, rounds: int, steps: int) -> tuple[float, float]:
    """Return the least and the largest value in any local step of a run."""
    if isinstance(value, Schedule):
        return value.span(rounds * steps if value.per_step else rounds)
    return float(value), float(value)


def _within(low: float, high: float, *values: Any) -> bool:
    return all(value is None or isinstance(value, Schedule) or low <= value <= high for value in values)


finite = partial(_within, -HUGE, HUGE)  # any float32 number
positive = partial(_within, TINY, HUGE)  # above 0, and large enough that the inverse does not overflow
natural = partial(_within, 0, HUGE)  # at least 0
share = partial(_within, TINY, 1)  # above 0, at most 1
