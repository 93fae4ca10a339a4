"""Every method on every federation, interleaved, a process each: half of `make bench-peers`.

Repeats go A, B, C, ..., A, B, C, ...; the least of each figure counts. Writes federated.json and the README's table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import render_federated
from run import machine
from schedule import JOBS, Job, joined, merged, rows, turns

HERE = Path(__file__).resolve().parent
OURS = ("sordino_fl", "bare")  # run by the interpreter of this file
LIMIT, GRACE = 110.0, 30.0  # seconds that one process may take, and that the last one may take beyond the end


def spoken(command: list[str], seconds: float) -> dict[str, Any]:
    """The last line a process prints, as JSON; one that dies or hangs is an error, and nothing of it is left."""
    single = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=HERE, env=single, **pipes) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return {"error": f"more than {seconds:.0f} seconds"}
    try:
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": (err.strip().splitlines() or ["no output"])[-1][:200]}
    return found


def interpreter(peer: str) -> str:
    return sys.executable if peer in OURS else str(HERE / f".venv-{peer}" / "bin" / "python")


def child(job: Job, seconds: float) -> dict[str, Any]:
    """What one process says of one method."""
    try:
        command = [interpreter(job.peer), "federated_child.py", job.peer, job.method, job.workload, str(job.rounds)]
        return spoken(command, seconds)
    except FileNotFoundError:
        return {"error": f"benchmarks/peers/.venv-{job.peer} is missing"}


def measure(jobs: tuple[Job, ...], repeats: int, end: float) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Repeats of all jobs until done or out of time; what failed once is not tried again."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {job.key: {} for job in jobs}
    for job in turns(repeats, jobs):
        if time.monotonic() > end:
            print("out of time: the rest of the repeats is left out", file=sys.stderr)
            break
        if "error" not in found[job.key]:
            now = child(job, min(LIMIT, end + GRACE - time.monotonic()))
            found[job.key] = merged(found[job.key], now)
            said = now.get("error") or "{cpu:.4g} s CPU, {wall:.4g} s wall".format(**now["seconds"])
            print(f"{', '.join(job.key)}: {said}", file=sys.stderr, flush=True)
    return found


def figures(end: float) -> dict[str, Any]:
    """What is measured of ours alone."""
    found = {}
    for name in render_federated.FIGURES:
        if time.monotonic() < end:
            found[name] = spoken([sys.executable, "figures.py", name], LIMIT)
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--minutes", type=float, default=11.0, help="no process starts later")
    options.add_argument("--only", default="", help="workloads, such as w1,w6; nothing is written without --keep")
    options.add_argument("--keep", action="store_true", help="replace what is kept of the workloads of --only")
    given, before = options.parse_args(), os.getloadavg()[0]
    end, only = time.monotonic() + 60 * given.minutes, given.only.split(",") if given.only else []
    alone = {} if only else figures(end)
    found = measure(tuple(job for job in JOBS if not only or job.workload in only), given.repeats, end)
    versions = {name: value for entry in found.values() for name, value in entry.get("versions", {}).items()}
    load = [round(value, 1) for value in (before, os.getloadavg()[0])]
    kept = {"machine": machine(), "load": load, "versions": versions, "figures": alone, "rows": rows(found)}
    if only and given.keep:
        kept = joined(json.loads((HERE / "federated.json").read_text("utf-8")), kept, only)
    if not only or given.keep:
        (HERE / "federated.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        page = HERE / "README.md"
        page.write_text(render_federated.inserted(page.read_text("utf-8"), kept), "utf-8")
    print(render_federated.table(kept))


if __name__ == "__main__":
    main()
