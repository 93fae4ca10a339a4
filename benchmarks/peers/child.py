"""One method on one workload in a process of its own: `python child.py opacus hooks cnn` prints one line of JSON.

The line is {"versions", and "seconds" per record and "memory" in MB, or "error"}: all that run.py asks of a peer.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from typing import Any

import torch
from loops import best, peak, resident, settle
from workloads import WORKLOADS


def measured(peer: Any, method: str, workload: str, budget: float) -> dict[str, Any]:
    settle()
    before = resident()
    try:
        found = best(peer.METHODS[method](WORKLOADS[workload]), budget)
    except Exception as error:  # reported beside the others' numbers
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    return {"seconds": found, "memory": round(peak() - before, 1)}


def main(name: str, method: str, workload: str, budget: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    peer = importlib.import_module(f"with_{name}")
    print(json.dumps({"versions": peer.VERSIONS, **measured(peer, method, workload, float(budget))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
