"""Numbers that a part accepts: finite, and within what float32 holds, so that no step overflows on them.

Each answers for all its values at once; a `Schedule` is asked for its own numbers when the plan is built, None is left.
"""

from __future__ import annotations

from typing import Any

from sordino.parts.schedules import Schedule

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
