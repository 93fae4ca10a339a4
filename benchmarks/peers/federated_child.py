"""One method on one federation in a process of its own: `python federated_child.py pfl FedAvg w1 3` prints JSON.

The line is {"versions", and "seconds" per round, or "error"}: all that federated.py asks of a peer.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from typing import Any

import torch
from federations import FEDERATIONS, Federation, Grid, Work
from stopwatch import Stopwatch, adopt_orphans


def checked(counted: Work, work: Federation | Grid, marks: int) -> None:
    """Refuse a method that did more or less than the workload says."""
    wanted = work.expected(marks * counted.share)
    if (counted.steps, counted.records) != (wanted.steps, wanted.records):
        raise AssertionError(f"{counted.steps} steps on {counted.records} records instead of {wanted}")


def measured(peer: Any, method: str, workload: str, rounds: int) -> dict[str, Any]:
    mark, work = Stopwatch(), FEDERATIONS[workload]
    try:
        counted = peer.METHODS[method](work, 1 + rounds, mark)
        checked(counted, work, 1 + rounds)
    except Exception as error:  # reported beside the others' numbers
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    return {"seconds": {name: value / counted.share for name, value in mark.least().items()}}


def main(name: str, method: str, workload: str, rounds: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    adopt_orphans()
    peer = importlib.import_module(f"with_{name}")
    print(json.dumps({"versions": peer.VERSIONS, **measured(peer, method, workload, int(rounds))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
