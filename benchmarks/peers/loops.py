"""One training loop, timed: with its loader, and the steps alone. Imports torch alone."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from workloads import Workload


@dataclass(frozen=True)
class Loop:
    """What a peer makes of a workload: the parts of an ordinary PyTorch loop."""

    model: nn.Module
    optimizer: Any
    loader: Iterable[Any]
    loss: Callable[[Tensor, Tensor], Any] = nn.functional.cross_entropy
    prepare: Callable[[Tensor], Tensor] = lambda x: x


Make = Callable[[Workload], Loop]


def seconds(loop: Loop) -> dict[str, float]:
    """Seconds per record over one epoch: the whole loop, and between the loader's hand and the end of the step."""
    records, step_cpu, step_wall = 0, 0.0, 0.0
    start_cpu, start_wall = time.process_time(), time.perf_counter()
    for x, y in loop.loader:
        cpu, wall = time.process_time(), time.perf_counter()
        loop.optimizer.zero_grad()
        loop.loss(loop.model(loop.prepare(x)), y).backward()
        loop.optimizer.step()
        records += len(y)
        step_cpu, step_wall = step_cpu + time.process_time() - cpu, step_wall + time.perf_counter() - wall
    cpu, wall = time.process_time() - start_cpu, time.perf_counter() - start_wall
    found = {"loop_cpu": cpu, "loop_wall": wall, "step_cpu": step_cpu, "step_wall": step_wall}
    return {name: value / records for name, value in found.items()}


def best(loop: Loop, budget: float) -> dict[str, float]:
    """The least of each over two epochs, and more while the budget (wall seconds) lasts, after one to warm up."""
    seconds(loop)
    epochs, end = [seconds(loop), seconds(loop)], time.perf_counter() + budget
    while time.perf_counter() < end:
        epochs.append(seconds(loop))
    return {name: min(epoch[name] for epoch in epochs) for name in epochs[0]}


def settle() -> None:
    """One ordinary step of a small layer: torch imports much of itself only then, and that is no method's memory."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.zeros(1, 2)).sum().backward()
    optimizer.step()


def resident() -> float:
    """Memory now, in MB; the peak counts anew from here."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> float:
    """The most memory since `resident`, in MB."""
    return _status("VmHWM")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))
