"""Import dp_accounting without the half of scipy that it hardly uses: most of the time an epsilon takes.

The library reads scipy.stats for a normal distribution, scipy.signal for a convolution and scipy.optimize for roots
that we find ourselves. While it is imported, the three names stand for modules that load when they are first asked for
anything else than `norm` and `fftconvolve`, which are written here with the very functions that scipy calls (equal to
the bit: tests).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy import fft, special


class Normal:
    """N(0, scale^2), as scipy.stats.norm(scale=...) where the library uses it: cdf, logcdf, ppf."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, scale: float = 1.0) -> Normal:
        return Normal(scale)

    def cdf(self, x: Any) -> Any:
        return special.ndtr(np.asarray(x) / self.scale)

    def logcdf(self, x: Any) -> Any:
        return special.log_ndtr(np.asarray(x) / self.scale)

    def ppf(self, q: Any) -> Any:
        return special.ndtri(np.asarray(q)) * self.scale


def fftconvolve(first: Any, second: Any) -> NDArray[np.float64]:
    """The full convolution of two real sequences, as scipy.signal.fftconvolve computes it."""
    a, b = np.asarray(first), np.asarray(second)
    if len(a) == 1 or len(b) == 1:
        return np.asarray(a * b)
    count = len(a) + len(b) - 1
    size = fft.next_fast_len(count, True)
    product: NDArray[np.float64] = fft.irfft(fft.rfft(a, size) * fft.rfft(b, size), size)[:count]
    return product


class Later(ModuleType):
    """A module that is imported when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system's own questions
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]  # asked while still standing in
        return getattr(import_module(self.__name__), name)


_LATER: dict[str, dict[str, Any]] = {
    "scipy.stats": {"norm": Normal()},
    "scipy.signal": {"fftconvolve": fftconvolve},
    "scipy.optimize": {},
}


@contextmanager
def light_scipy() -> Iterator[None]:
    """Inside, `from scipy import stats` and its kin bind modules that load later; outside, nothing has changed."""
    held = [name for name in _LATER if name not in sys.modules]
    for name in held:
        later = Later(name)
        vars(later).update(_LATER[name])
        sys.modules[name] = later
        setattr(scipy, name.split(".")[1], later)
    try:
        yield
    finally:
        for name in held:
            if isinstance(sys.modules.get(name), Later):
                del sys.modules[name]
            if isinstance(vars(scipy).get(name.split(".")[1]), Later):
                delattr(scipy, name.split(".")[1])
