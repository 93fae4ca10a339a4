"""`sordino run --workers N`: starts N ranks on this machine, watches them, and leaves none behind.

The watcher loads no torch. It sees the death of a rank at once, whatever the others are doing, ends them, and says in
one sentence what happened; a rank whose watcher is gone ends itself.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sordino.errors import ConfigError, RankError, Stopped
from sordino.version import RANK, RENDEZVOUS

FAILED, LOST = 3, 4  # exit codes of a rank: its own failure, and that of another
OWN = (0, 1, 2, 130)  # exit codes of rank 0 that are the run's
PREFIX, LOCK = "sordino-", "watched"  # of the folder in which ranks meet, and of the file that its watcher holds
ENDS = (signal.SIGTERM, signal.SIGHUP)
GRACE = 3.0  # seconds until ranks that were told, or ought, to end are ended


@dataclass(frozen=True)
class EngineChoice:
    """What `sordino run` is to do: which engine, in this process or in so many others."""

    engine: str
    workers: int = 0  # 0: this process


def choose_engine(engine: str | None, workers: int | None) -> EngineChoice:
    """Read --engine and --workers beside what torchrun says; refuse what contradicts itself."""
    rank = os.environ.keys() >= RANK
    if rank and workers is not None:
        found = f"--workers {workers} in a process that torchrun started"
        raise ConfigError(found, "one of them", "drop --workers: torchrun's --nproc-per-node says how many")
    if rank and engine == "inprocess":
        found = "--engine inprocess in a process that torchrun started"
        raise ConfigError(found, "--engine distributed, or no torchrun", "drop one of them")
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}", "at least 1")
    if workers is not None and engine not in (None, "distributed"):
        found = f"--workers {workers} with --engine {engine}"
        raise ConfigError(found, "--engine distributed, which has workers", "drop one of them")
    if rank or (workers is None and engine != "distributed"):
        return EngineChoice(engine or ("distributed" if rank else "inprocess"))
    return EngineChoice("distributed", workers or os.cpu_count() or 1)


@contextmanager
def stop_signals() -> Iterator[None]:
    """A request to end raises `Stopped`, so that files and processes are cleared away first.

    Whoever ignores a signal (nohup) still does. Ranks are left alone: their watcher, or torchrun, speaks for them.
    """
    alone = threading.current_thread() is threading.main_thread() and not os.environ.keys() >= RANK
    asked = [one for one in ENDS if alone and signal.getsignal(one) not in (signal.SIG_IGN, None)]
    before = [(one, signal.signal(one, _stopped)) for one in asked]
    try:
        yield
    finally:
        for one, handler in before:
            signal.signal(one, handler)


def _stopped(number: int, _frame: object) -> None:
    raise Stopped(number)


def launch(command: Sequence[str], workers: int, threads: int = 1) -> int:
    """Run `python command...` as ranks 0 to workers - 1; the exit code of rank 0, or `RankError`."""
    with stop_signals(), rendezvous_folder() as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(workers):
                ranks.append(_start(command, rank, _environment(folder, rank, workers, threads), folder))
            codes = _watch(ranks)
        finally:
            _end(ranks)
        return _verdict(codes, [(folder / f"said.{rank}").read_text(errors="replace") for rank in range(workers)])


@contextmanager
def rendezvous_folder() -> Iterator[Path]:
    """A folder for the time of a run. Those of watchers that were killed go first: nobody holds their lock."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        # Remove the folder, if its watcher is gone and it is ours
        with suppress(OSError), open(left, "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, open(Path(name) / "making", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(Path(name) / "making", Path(name) / LOCK)  # under this name it is locked from the first moment
        yield Path(name)


def _environment(folder: Path, rank: int, workers: int, threads: int) -> dict[str, str]:
    """One rank's own; the ranks meet in a file, so no port can be taken, and listen on the loopback only."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers), RENDEZVOUS: f"file://{folder}/meet"}
    own |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    local = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    return {**os.environ, **local, **own}


def _start(command: Sequence[str], rank: int, environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with open(folder / f"said.{rank}", "wb") as said:
        own, out = [sys.executable, *command], None if rank == 0 else subprocess.DEVNULL
        # stdin is never written to: its end tells a rank that its watcher is gone
        return subprocess.Popen(own, env=environment, stdin=subprocess.PIPE, stdout=out, stderr=said)


def _watch(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes once rank 0 is done, or some rank has failed and it is known which was first."""
    until = float("inf")
    while True:
        codes = [rank.poll() for rank in ranks]
        bad = [code for code in codes if code]
        if None not in codes or (any(code != LOST for code in bad) and codes[0] is not None):
            return codes
        if codes[0] is not None or bad:
            killed = any(code < 0 for code in bad)
            until = min(until, time.monotonic() + (0.0 if killed else GRACE))
        if time.monotonic() >= until:
            return codes
        time.sleep(0.02)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Nobody is left: asked first, then killed."""
    for rank in ranks:
        with suppress(OSError):
            rank.terminate()
    until = time.monotonic() + GRACE
    for rank in ranks:
        try:
            rank.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
        if rank.stdin is not None:
            rank.stdin.close()


def _verdict(codes: Sequence[int | None], said: Sequence[str]) -> int:
    """What the run came to: rank 0's own end, or who ended it."""
    first = next((rank for rank, code in enumerate(codes) if code not in (None, 0, LOST)), None)
    if codes[0] == 0 or (codes[0] in OWN and first in (None, 0)):
        sys.stderr.write(said[0] if codes[0] != 130 else "")  # an interrupt is said by whoever called
        return int(codes[0] or 0)
    if first is None:
        silent = [str(rank) for rank, code in enumerate(codes) if code is None]
        raise RankError(f"no answer from rank {' or '.join(silent)} of {len(codes)} within --timeout")
    code, last = codes[first], (said[first].strip().splitlines() or [""])[-1].removeprefix("sordino: ")
    name = f"rank {first} of {len(codes)}"
    if code == 2:
        raise ConfigError(f"on {name}: {last.removeprefix('found ')}")
    if code == FAILED:
        raise RankError(last.partition("; what was charged")[0])
    raise RankError(f"{name} {_how(int(code or 0))}" + (f" ({last})" if last else ""))


def _how(code: int) -> str:
    if code > 0:
        return f"ended with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def exit_code(error: RankError) -> int:
    """3; but a rank tells its watcher that it was another's failure, not its own."""
    return LOST if error.lost and RENDEZVOUS in os.environ else FAILED


def follow_watcher() -> None:
    """In a rank: end with the watcher; an interrupt from the keyboard is for rank 0 and it, a hangup for it alone."""
    if RENDEZVOUS not in os.environ:
        return
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=_until_alone, daemon=True).start()
    if os.environ["RANK"] != "0":
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _until_alone() -> None:
    while os.read(0, 1024):
        pass
    os._exit(LOST)
