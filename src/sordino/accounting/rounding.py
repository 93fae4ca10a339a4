"""Rounding of bounds for certificates and printed text: a printed upper bound is never below the proved bound.

Printing an upper bound of 1.00004 as 1 would be false. So an upper bound is rounded up and a lower bound down, at the
last printed digit; a number that needs no more digits is printed exactly. Called by all printed output.
"""

from __future__ import annotations

import math


def upto(bound: float | None, digits: int = 3) -> str:
    """Return an upper bound as text, rounded up to `digits` significant digits; "no guarantee" for None."""
    return "no guarantee" if bound is None else _rounded(bound, digits, 1)


def atleast(bound: float, digits: int = 3) -> str:
    """Return a lower bound as text, rounded down to `digits` significant digits."""
    return _rounded(bound, digits, -1)


def _rounded(bound: float, digits: int, direction: int) -> str:
    near = f"{bound:.{digits}g}"
    if not math.isfinite(bound) or (float(near) - bound) * direction >= 0:
        return near
    step = 10.0 ** (math.floor(math.log10(abs(bound))) - digits + 1)
    return f"{(round(bound / step) + direction) * step:.{digits}g}"


def upward(value: float) -> float | None:
    """Return epsilon rounded up at the sixth decimal place; None (no guarantee) if it is infinite."""
    if not math.isfinite(value):
        return None
    steps = math.ceil(value * 1e6)
    return steps / 1e6 if steps / 1e6 >= value else (steps + 1) / 1e6


def rounded_up(delta: float) -> float:
    """Return delta rounded up to three significant digits, and at least 1e-12."""
    if delta >= 1.0:
        return 1.0
    small = max(delta, 1e-12)
    digits = 2 - math.floor(math.log10(small))
    steps = math.ceil(small * 10**digits * (1 - 1e-12))
    return min(1.0, float(f"{steps}e{-digits}"))
