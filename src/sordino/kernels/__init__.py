"""Compiled inner loops (numba, `pip install 'sordino[fast]'`) and memory settings; called by engines/ and dpsgd/.

Each loop computes what a few lines of torch compute, up to rounding, and those run where numba is missing or with
SORDINO_KERNELS=off. The code is compiled on first use (seconds) and cached for the next process; a run's header names
the loops that were used. No kernel draws noise or computes a privacy cost.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any

AVAILABLE = os.environ.get("SORDINO_KERNELS") != "off" and importlib.util.find_spec("numba") is not None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as machine code, compiled at its first call; needs numba."""
    from numba import njit

    # Sums may be taken in another order and products fused with them; infinities and NaN keep their meaning.
    settings: dict[str, Any] = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}, "nogil": True}
    try:
        made: Callable[..., Any] = njit(cache=True, **settings)(function)
    except RuntimeError:  # no folder that may be written to: compiled again in every process
        made = njit(**settings)(function)
    return made


@cache
def tune_allocator() -> str:
    """Make glibc keep the memory of large tensors in the process, once; return "tuned" or "system".

    By default glibc hands it back to the kernel at every step: keeping it makes small models 1.5 times as fast.
    SORDINO_MALLOC=system leaves the allocator alone.
    """
    if os.environ.get("SORDINO_MALLOC") == "system":
        return "system"
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return "system"
    settings = ((-3, 1 << 30), (-1, (1 << 31) - 1), (-2, 64 << 20))  # malloc.h: mmap and trim thresholds, padding
    done = [mallopt(name, value) for name, value in settings]
    return "tuned" if all(done) else "system"
