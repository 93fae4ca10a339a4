"""The version, in a module of its own so that anything may import it; and those of what computes."""

from __future__ import annotations

import platform
from importlib.metadata import version

__version__ = "0.2.0"
_LIBRARIES = ("torch", "numpy", "scipy")


def versions() -> dict[str, str]:
    """What computes: this package, what it rests on, Python, and the machine's kind."""
    known = {"sordino": __version__, **{name: version(name) for name in _LIBRARIES}}
    return {**known, "python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
