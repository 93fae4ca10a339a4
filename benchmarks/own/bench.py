"""Ourselves against ourselves: `make bench` fails if a workload got slower, `make bench-update` stores what it found.

CPU seconds of a workload over those of a fixed kernel (products of matrices, and copies of memory) that runs before and
after it in the same process: this ratio, unlike seconds, can be stored on one machine and compared on another.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from compare import Ratios, least, regressions, table
from work import WORK

BASELINE = Path(__file__).resolve().parent / "baseline.json"
SIDE, COPIED = 512, 1 << 23  # of the kernel: matrices of 512 x 512, and 32 MB


def kernel() -> Callable[[], None]:
    a, b = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
    source, target = torch.ones(COPIED), torch.empty(COPIED)

    def once() -> None:
        for _ in range(8):
            torch.mm(a, b)
        for _ in range(4):
            target.copy_(source).mul_(0.5)

    return once


def seconds(once: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    once()
    return time.process_time() - began


def ratio(once: Callable[[], object], calibrate: Callable[[], None], turns: int) -> float:
    """The least over turns, workload and kernel in turn, after one call of each to warm up."""
    once(), calibrate()
    return least([(seconds(once), min(seconds(calibrate) for _ in range(3))) for _ in range(turns)])


def measured(names: list[str], turns: int) -> Ratios:
    calibrate, found = kernel(), {}
    for name in names:
        torch.manual_seed(0)
        found[name] = round(ratio(WORK[name](), calibrate, turns), 4)
        print(f"{name}: {found[name]:.3f} times the kernel", file=sys.stderr, flush=True)
    return found


def again(found: Ratios, stored: Ratios, turns: int) -> Ratios:
    """What looks slower is measured once more before it is said: other work on the machine is no regression."""
    doubtful = regressions(found, stored)
    return {**found, **{name: min(found[name], value) for name, value in measured(doubtful, 2 * turns).items()}}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--turns", type=int, default=7)
    options.add_argument("--update", action="store_true", help="store what was found as the baseline")
    given = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    stored: Ratios = json.loads(BASELINE.read_text("utf-8")) if BASELINE.exists() else {}
    found = measured(list(WORK), given.turns)
    if given.update:
        BASELINE.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    else:
        found = again(found, stored, given.turns)
    print(table(found, stored))
    return 0 if given.update else int(bool(regressions(found, stored)))


if __name__ == "__main__":
    sys.exit(main())
