"""Inner loops in machine code by numba (`pip install 'sordino[fast]'`), for linear models and Winograd's tiles.

Called by engines/linear_clients.py and engines/winograd.py. Each computes what a few lines of torch compute, up to
rounding, and those run where numba is missing, or with SORDINO_KERNELS=off. The code is compiled on first use (seconds)
and cached for the next process; a run's header says which was used. No kernel draws noise or touches an account.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any

# Sums may be taken in another order and products fused with them; infinities and not-a-numbers stay what they are.
ROUNDING = {"reassoc", "contract", "nsz"}


@cache
def available() -> bool:
    """Whether compiled loops can be used in this process."""
    return os.environ.get("SORDINO_KERNELS") != "off" and importlib.util.find_spec("numba") is not None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in machine code, from its first call on; only for modules imported where `available()`."""
    from numba import njit

    settings: dict[str, Any] = {"error_model": "numpy", "fastmath": ROUNDING, "nogil": True}
    try:
        made: Callable[..., Any] = njit(cache=True, **settings)(function)
    except RuntimeError:  # no folder that may be written to: made anew in every process
        made = njit(**settings)(function)
    return made


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


@cache
def tune_allocator() -> str:
    """Keep large tensors in the process: glibc hands them back to the kernel at every step, and asks for them again.

    Worth 1.5x on small models. glibc only, once per process; SORDINO_MALLOC=system leaves the allocator alone. Says
    what was done, for a run's header.
    """
    if os.environ.get("SORDINO_MALLOC") == "system":
        return "system"
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return "system"
    settings = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_TOP_PAD, 64 << 20))
    done = [mallopt(name, value) for name, value in settings]
    return "tuned" if all(done) else "system"
