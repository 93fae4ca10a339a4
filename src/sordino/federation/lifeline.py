"""Helper process that kills a local federation's processes when their parent ends. Started by `local_federation`.

    python lifeline.py TOKEN

Standard input is a pipe whose other end only the parent has: the system closes it when the parent dies, also by
SIGKILL. Then each process with SORDINO_LIFELINE=TOKEN in its environment is killed. Descendants inherit the variable,
also those that have left the session or whose own parent has died. This file imports the standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "SORDINO_LIFELINE"
QUIET = 3  # scans without a process before this one ends: a process that is being started has no environment yet
PULSE = 0.1  # seconds between two scans


def processes(token: str) -> list[int]:
    """Return the ids of all processes with the token in their environment."""
    found, entry = [], f"{VARIABLE}={token}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # a process that has ended, or of another user
            if entry in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def main(token: str) -> None:
    """Wait for the end of standard input, then kill all processes with the token until none is left."""
    sys.stdin.buffer.read()
    quiet = 0
    while quiet < QUIET:
        left = processes(token)
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        quiet = 0 if left else quiet + 1
        time.sleep(PULSE)


if __name__ == "__main__":
    main(sys.argv[1])
