"""Launcher of `sordino run --workers N`: starts N worker processes (ranks) on this machine and ends all of them.

The launching process does not import torch. If a rank dies, the launcher ends the other ranks and prints one sentence
on the reason; if the launcher dies, the ranks end themselves. Called by `cli`.
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
from pathlib import Path

from sordino.errors import ConfigError, RankError, Stopped
from sordino.version import RANK, RENDEZVOUS

FAILED, LOST = 3, 4  # exit codes of a rank: it failed, or another rank failed
OWN = (0, 1, 2, 130)  # exit codes of rank 0 that become the exit code of the run
PREFIX, LOCK = "sordino-", "watched"  # names of the ranks' rendezvous folder, and of the file that the launcher locks
ENDS = (signal.SIGTERM, signal.SIGHUP)
GRACE = 3.0  # seconds until ranks that should end are killed


def choose_engine(engine: str | None, workers: int | None) -> tuple[str, int]:
    """Return the engine of `sordino run` and the number of worker processes to start (0: run in this process).

    Options --engine and --workers that contradict each other, or contradict torchrun, are refused.
    """
    rank = os.environ.keys() >= RANK
    if rank and workers is not None:
        found = f"--workers {workers} in a process that torchrun started"
        fix = "drop --workers; set the number by torchrun's --nproc-per-node"
        raise ConfigError(found, "either torchrun or --workers", fix)
    if rank and engine == "inprocess":
        found = "--engine inprocess in a process that torchrun started"
        raise ConfigError(found, "--engine distributed, or no torchrun", "drop --engine, or start without torchrun")
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}", "at least 1 worker", "pass a positive number, or drop --workers")
    if workers is not None and engine not in (None, "distributed"):
        found = f"--workers {workers} with --engine {engine}"
        raise ConfigError(found, "--engine distributed, the only engine with workers", "drop one of the two options")
    if rank or (workers is None and engine != "distributed"):
        return engine or ("distributed" if rank else "inprocess"), 0
    return "distributed", workers or os.cpu_count() or 1


@contextmanager
def stop_signals() -> Iterator[None]:
    """Raise `Stopped` on SIGTERM and SIGHUP, so that files are closed and processes are ended before the exit.

    An ignored signal (nohup) stays ignored. Ranks are left as they are, since the launcher or torchrun ends them.
    """

    def stop(number: int, _frame: object) -> None:
        raise Stopped(number)

    alone = threading.current_thread() is threading.main_thread() and not os.environ.keys() >= RANK
    asked = [one for one in ENDS if alone and signal.getsignal(one) not in (signal.SIG_IGN, None)]
    before = [(one, signal.signal(one, stop)) for one in asked]
    try:
        yield
    finally:
        for one, handler in before:
            signal.signal(one, handler)


def launch(command: Sequence[str], workers: int, threads: int = 1) -> int:
    """Run `python command...` in `workers` processes (ranks); return the exit code of rank 0, or raise `RankError`.

    The ranks find each other through a file, which needs no free port, and listen on the loopback interface only.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    with stop_signals(), rendezvous_folder() as folder:
        shared = {"WORLD_SIZE": str(workers), RENDEZVOUS: f"file://{folder}/meet"}
        shared |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        shared |= {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(workers):
                own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                words, out = [sys.executable, *command], None if rank == 0 else subprocess.DEVNULL
                with open(folder / f"stderr.{rank}", "wb") as errors:
                    # stdin is never written to: its end tells a rank that the launcher has ended
                    ranks.append(subprocess.Popen(words, env=own, stdin=subprocess.PIPE, stdout=out, stderr=errors))
            codes = _watch(ranks)
        finally:
            _end(ranks)
        return _verdict(codes, [(folder / f"stderr.{rank}").read_text(errors="replace") for rank in range(workers)])


@contextmanager
def rendezvous_folder() -> Iterator[Path]:
    """Create a temporary folder in which ranks find each other; remove such folders of killed launchers."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), open(left, "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, open(Path(name) / "making", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(Path(name) / "making", Path(name) / LOCK)  # under this name it is locked from the first moment
        yield Path(name)


def _watch(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Return the exit codes when rank 0 has ended, or when the first rank that failed can be told."""
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


def _verdict(codes: Sequence[int | None], errors: Sequence[str]) -> int:
    """Return the exit code of rank 0, or raise the error of the rank that failed first."""
    first = next((rank for rank, code in enumerate(codes) if code not in (None, 0, LOST)), None)
    if codes[0] == 0 or (codes[0] in OWN and first in (None, 0)):
        sys.stderr.write(errors[0] if codes[0] != 130 else "")  # the caller reports an interrupt
        return int(codes[0] or 0)
    if first is None:
        silent = [str(rank) for rank, code in enumerate(codes) if code is None]
        raise RankError(f"no answer from rank {' or '.join(silent)} of {len(codes)} within --timeout")
    code, last = int(codes[first] or 0), (errors[first].strip().splitlines() or [""])[-1].removeprefix("sordino: ")
    name = f"rank {first} of {len(codes)}"
    if code == 2:
        raise ConfigError(f"on {name}: {last.removeprefix('found ')}")
    if code == FAILED:
        raise RankError(last.partition("; charged rounds")[0])
    how = f"ended with code {code}" if code > 0 else f"was killed by signal {-code}"
    with suppress(ValueError):
        how = f"was killed by {signal.Signals(-code).name}"
    raise RankError(f"{name} {how}" + (f" ({last})" if last else ""))


def exit_code(error: RankError) -> int:
    """Return the exit code of a rank after an error: 3, or 4 to tell its watcher that another rank failed."""
    return LOST if error.lost and RENDEZVOUS in os.environ else FAILED


def follow_watcher() -> None:
    """End this rank when its watcher ends; ranks other than 0 ignore an interrupt from the keyboard."""

    def end_with_watcher() -> None:
        while os.read(0, 1024):
            pass
        os._exit(LOST)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=end_with_watcher, daemon=True).start()
    if os.environ["RANK"] != "0":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
