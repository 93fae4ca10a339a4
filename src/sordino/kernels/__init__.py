"""Compiled inner loops (numba, `pip install 'sordino[fast]'`), which engines/ and dpsgd/ call.

Each loop equals a few lines of torch up to rounding; the torch lines run where numba is missing or with
SORDINO_KERNELS=off. The code is compiled on first use (seconds) and cached for the next process; a run's header names
the loops that were used. No kernel draws noise or computes a privacy cost.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

AVAILABLE = os.environ.get("SORDINO_KERNELS") != "off" and importlib.util.find_spec("numba") is not None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as machine code, which numba compiles at the first call."""
    from numba import njit

    # Sums may be taken in another order and products fused with them; infinities and NaN keep their meaning.
    settings: dict[str, Any] = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}, "nogil": True}
    try:
        return njit(cache=True, **settings)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder that may be written to: compiled again in every process
        return njit(**settings)(function)  # type: ignore[no-any-return]
