"""Keep large tensors in the process: glibc hands them back to the kernel at every step, and asks for them again.

Worth 1.5x on small models. glibc only; SORDINO_MALLOC=system leaves the allocator alone; named in a run's header.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


@cache
def tune() -> str:
    """Raise the thresholds, once per process; says what was done."""
    if os.environ.get("SORDINO_MALLOC") == "system":
        return "system"
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return "system"
    settings = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_TOP_PAD, 64 << 20))
    done = [mallopt(name, value) for name, value in settings]
    return "tuned" if all(done) else "system"
