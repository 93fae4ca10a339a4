"""Bounds as text: what is printed is never on the wrong side of what was proved.

A page rounds 1.00004 to 1, and a reader takes 1 for a promise. So an upper bound is rounded up and a lower one down,
at the last digit that is printed; a number that needs no more digits stays as it is.
"""

from __future__ import annotations

import math


def upto(bound: float | None, digits: int = 3) -> str:
    """An upper bound: rounded up to so many significant digits, never below what was proved."""
    return "no guarantee" if bound is None else _rounded(bound, digits, 1)


def atleast(bound: float, digits: int = 3) -> str:
    """A lower bound, or the most that is allowed: rounded down."""
    return _rounded(bound, digits, -1)


def _rounded(bound: float, digits: int, way: int) -> str:
    near = f"{bound:.{digits}g}"
    if not math.isfinite(bound) or (float(near) - bound) * way >= 0:
        return near
    step = 10.0 ** (math.floor(math.log10(abs(bound))) - digits + 1)
    return f"{(round(bound / step) + way) * step:.{digits}g}"
