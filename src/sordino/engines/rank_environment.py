"""What environment variables say of a process that is one rank of several; loads no torch."""

from __future__ import annotations

import os

MEETING = "SORDINO_RENDEZVOUS"  # set by `sordino run --workers`: where its ranks meet, and that somebody watches them


def is_rank() -> bool:
    """Whether torchrun, or `sordino run --workers`, started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_watched() -> bool:
    """Whether `sordino run --workers` started it: the watcher tells the user what happened."""
    return MEETING in os.environ


def local_rank() -> int:
    """This process's number on its own machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))
