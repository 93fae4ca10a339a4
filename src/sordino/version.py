"""Version of the package, versions of its libraries, and the rank of this process; loads no torch."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

__version__ = "0.2.0"
RENDEZVOUS = "SORDINO_RENDEZVOUS"  # environment variable that `sordino run --workers`, which watches its ranks, sets
RANK = {"RANK", "WORLD_SIZE"}  # variables that torchrun and `sordino run --workers` set in each of several ranks


def versions() -> dict[str, str]:
    """Versions of this package, its numeric libraries and Python, and the platform."""
    libraries = {name: version(name) for name in ("torch", "numpy", "scipy")}
    python = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    return {"sordino": __version__, **libraries, **python}


def local_rank() -> int:
    """Number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))
