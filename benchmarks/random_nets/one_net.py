"""One method on one net in a process of its own, one thread: `python one_net.py opacus hooks SEED NET BATCH`.

Prints one line of JSON: CPU milliseconds of a step (the least), peak resident memory over imports and data set, and
the peak of live tensors over the data set from the model's making on, as torch's allocator counts them (two steps).
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from nets import Net, nets

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))
from loops import Loop, Make, peak, resident, settle


def step(loop: Loop, batches: Any) -> tuple[float, int]:
    """Take one step; return its CPU seconds, from the loader's return on, and the number of its records."""
    x, y = next(batches)
    began = time.process_time()
    loop.optimizer.zero_grad()
    loop.loss(loop.model(x), y).backward()
    loop.optimizer.step()
    return time.process_time() - began, len(y)


def endless(loop: Loop) -> Any:
    while True:
        yield from loop.loader


def timed(make: Make, net: Net, budget: float) -> dict[str, float]:
    """The least CPU milliseconds of a step (of one logical batch), and the peak of resident memory in MB."""
    before = resident()
    loop = make(net)  # type: ignore[arg-type]
    batches, found, end = endless(loop), [], 0.0
    while len(found) < 4 or time.perf_counter() < end:
        end = end or time.perf_counter() + budget
        seconds = records = 0
        while records < 0.75 * net.batch:  # a batch may come in pieces
            one = step(loop, batches)
            seconds, records = seconds + one[0], records + one[1]
        found.append(1000 * net.batch * seconds / records)
    return {"ms": min(found), "rss": peak() - before}


def live(make: Make, net: Net) -> float:
    """The peak of live tensors in MB, over what was live before the model was made."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loop = make(net)  # type: ignore[arg-type]
        batches, records = endless(loop), 0
        while records < 2 * net.batch:
            records += step(loop, batches)[1]
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    total = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most / 2**20


def main(peer: str, method: str, seed: str, number: str, batch: str, budget: str, first: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module = importlib.import_module(f"with_{peer}")
    net = nets(int(seed), int(batch))[int(number)]
    net.draw()
    settle()
    make = module.METHODS[method]
    try:
        found: dict[str, Any] = timed(make, net, float(budget))
        if first == "True":
            found["live"] = live(make, net)
    except Exception as error:  # reported beside the others' numbers
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    print(json.dumps({"versions": module.VERSIONS, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
