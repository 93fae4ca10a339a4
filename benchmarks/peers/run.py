"""Every method on every workload, interleaved, one process and one thread each: half of `make bench-peers`.

Rounds go A, B, C, ..., A, B, C, ...; of each figure the least counts. Writes results.json and the table in README.md.
A peer is a file NAME.txt of pinned requirements, installed in .venv-NAME, a module with_NAME.py, and lines in JOBS.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import render

HERE = Path(__file__).resolve().parent
OURS = ("sordino", "torch")  # run by the interpreter of this file
OPACUS = tuple(("opacus", mode) for mode in ("hooks", "functorch", "ew", "ghost"))
ALWAYS = (("sordino", "make_private"), ("torch", "SGD"))
IMAGES = (("torch", "SGD, channels last"), ("torch", "SGD, channels last, allocator tuned"))
METHODS = {
    "cnn": (*ALWAYS, ("sordino", "make_private, not compiled"), *IMAGES, *OPACUS),
    "logistic": (*ALWAYS, *OPACUS),
    "transformer": (*ALWAYS, *OPACUS),
    "lstm64": (*ALWAYS, *OPACUS),
    "lstm256": (*ALWAYS, OPACUS[0]),  # its fastest on lstm64; seconds for each step of a batch
}
JOBS = tuple((workload, peer, method) for workload, methods in METHODS.items() for peer, method in methods)
Job = tuple[str, str, str]


def interpreter(peer: str) -> str:
    return sys.executable if peer in OURS else str(HERE / f".venv-{peer}" / "bin" / "python")


def child(job: Job, budget: float) -> dict[str, Any]:
    """What one process says of one method; a process that dies or hangs is an error of the method."""
    workload, peer, method = job
    command = [interpreter(peer), "child.py", peer, method, workload, str(budget)]
    single = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=HERE, env=single, capture_output=True, text=True, timeout=75)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": "more than 75 seconds"}
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    return found


def least(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The better of two rounds, figure by figure; of memory the larger."""
    if "error" in found or not before:
        return {**before, **found, "rounds": before.get("rounds", 0) + 1}
    seconds = {name: min(value, before["seconds"][name]) for name, value in found["seconds"].items()}
    return {
        **found,
        "seconds": seconds,
        "memory": max(found["memory"], before["memory"]),
        "rounds": before["rounds"] + 1,
    }


def turns(rounds: int) -> Iterator[tuple[int, Job]]:
    """All rounds of the workload with bars, its methods in turn; then those of the others, all of them in turn."""
    for barred in (True, False):
        yield from ((turn, job) for turn in range(rounds) for job in JOBS if (job[0] == "cnn") == barred)


def measure(rounds: int, budget: float, minutes: float) -> dict[Job, dict[str, Any]]:
    """The rounds of `turns` until out of time; a failure is not tried again."""
    found: dict[Job, dict[str, Any]] = {job: {} for job in JOBS}
    end = time.monotonic() + 60 * minutes
    for turn, job in turns(rounds):
        if time.monotonic() > end:
            print("out of time: the rest of the rounds is left out", file=sys.stderr)
            break
        if "error" not in found[job]:
            found[job] = least(found[job], child(job, budget))
            said = found[job].get("error") or f"{1 / found[job]['seconds']['loop_cpu']:,.0f} samples/s"
            print(f"round {turn + 1}, {', '.join(job)}: {said}", file=sys.stderr, flush=True)
    return found


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def results(found: dict[Job, dict[str, Any]], load: list[float]) -> dict[str, Any]:
    """What is kept: versions, and per method its least seconds per record and how many times as long as ours."""
    versions: dict[str, str] = {}
    rows = []
    for (workload, peer, method), entry in found.items():
        versions.update(entry.pop("versions", {}))
        ours = found[workload, *ALWAYS[0]].get("seconds", {})
        both = [name for name in ours if name in entry.get("seconds", {})]
        ratio = {name: round(entry["seconds"][name] / ours[name], 3) for name in both}
        rows.append({"workload": workload, "peer": peer, "method": method, "ratio": ratio, **entry})
    return {"machine": machine(), "load": load, "versions": versions, "rows": rows}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument(
        "--budget", type=float, default=0.5, help="seconds of measuring per process, at least two epochs"
    )
    options.add_argument("--minutes", type=float, default=13.0, help="no process starts later")
    given, before = options.parse_args(), os.getloadavg()[0]
    found = measure(given.rounds, given.budget, given.minutes)
    kept = results(found, [round(load, 1) for load in (before, os.getloadavg()[0])])
    (HERE / "results.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    page = HERE / "README.md"
    page.write_text(render.inserted(page.read_text("utf-8"), kept), "utf-8")
    print(render.table(kept))


if __name__ == "__main__":
    main()
