"""Promise: no process of a local federation outlives the process that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sordino.federation.local_federation import kill_all

# A process of a federation; it starts another one, in a session of its own, whose parent ends at once.
CHILD = """
import os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        script = "import os, time; print('orphan', os.getpid(), flush=True); time.sleep(600)"
        os.execl(sys.executable, sys.executable, "-c", script)
    os._exit(0)
os.wait()
print("child", os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits a SIGINT that is ignored
from sordino.federation.local_federation import LocalFederation
with LocalFederation(Path(sys.argv[1]), (), Path(sys.argv[1]) / "home") as federation:
    federation.start("child", [sys.executable, "-c", sys.argv[2]])
    print("lifeline", federation.lifeline.pid, flush=True)
    sys.stdin.read()
"""


def alive(process: int) -> bool:
    """Whether a process runs; one that nobody has waited for is dead."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def until(what: str, seconds: float = 120.0) -> Iterator[None]:
    """Iterations of a wait; too long a wait fails."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.05)
    raise AssertionError(what)


class Started:
    """A parent process, and the ids of its lifeline, its child and its child's orphan."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", PARENT, str(folder), CHILD]
        self.parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.parent.stdout is not None
        self.lifeline = int(self.parent.stdout.readline().split()[1])
        for _ in until("two processes"):
            log = folder / "home" / "child.log"
            words = log.read_text().split() if log.exists() else []
            if len(words) == 4:
                break
        self.family = [int(words[1]), int(words[3])]
        assert all(map(alive, self.family))

    def wait_for_the_end(self) -> None:
        for _ in until("the end of all processes"):
            if not any(map(alive, [*self.family, self.lifeline])):
                break

    def close(self) -> None:
        kill_all([self.parent.pid, self.lifeline, *self.family])
        self.parent.communicate()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    found = Started(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_a_parent_that_a_signal_ends(number: int, started: Started) -> None:
    os.kill(started.parent.pid, number)
    started.parent.wait(120)
    started.wait_for_the_end()


def test_no_process_outlives_a_federation_that_is_stopped(started: Started) -> None:
    started.parent.communicate("")
    assert not any(map(alive, [*started.family, started.lifeline]))


def test_without_the_lifeline_they_would(started: Started) -> None:
    """The sabotage: these tests can fail."""
    kill_all([started.lifeline])
    started.parent.kill()
    started.parent.wait()
    assert all(map(alive, started.family))


def test_a_process_of_another_federation_is_left_alone(tmp_path: Path) -> None:
    first, second = (Started(tmp_path / name) for name in ("first", "second"))
    try:
        first.parent.kill()
        first.wait_for_the_end()
        assert all(map(alive, second.family))
    finally:
        first.close()
        second.close()
