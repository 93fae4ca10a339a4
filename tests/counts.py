"""What an act costs, counted rather than timed: the same on every machine, however busy."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable


def calls(act: Callable[[], object]) -> int:
    """Functions that it calls, those of C among them."""
    counted = [0]

    def count(_frame: object, event: str, _argument: object) -> None:
        counted[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
    return counted[0]


def peak(act: Callable[[], object]) -> int:
    """The most bytes that it holds at once, beside what was there."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
