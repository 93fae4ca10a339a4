"""`make bench-gpu`: everything about an accelerator that a machine without one cannot show, in one command.

(a) tests/device with DEVICE=<device>; a failure stops the benchmark.
(b) DP-SGD: milliseconds of a step and peak memory of plain SGD, Sordino and Opacus (where it is installed).
(c) The federated engine: clients side by side against one after the other, around the threshold of FLOP per local step.
(d) Norms of per-record gradients with TF32 allowed, against float64.
Writes one JSON file and one Markdown table. What cannot run here is skipped, and the table says so. On the simulated
device sizes are small and times mean nothing: it shows that the benchmark itself works.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from nets import NETS, Net
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]
METHODS = ("plain", "sordino", "opacus")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", help="cuda, xpu, mps, ...; default: the accelerator that torch finds, else sim")
    options.add_argument("--out", type=Path, default=Path("bench-gpu"))
    options.add_argument("--no-tests", action="store_true", help="leave (a) out")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    name = given.device or _found_device()
    simulated = name.startswith("sim")
    if simulated:  # torch knows the name after this import
        sys.path.insert(0, str(ROOT))
        __import__("tests.device.sim")
    device = torch.device(name)
    found: dict[str, Any] = {"machine": machine(device), "simulated": simulated}
    if not given.no_tests and not run_tests(device):
        print(f"tests/device failed with DEVICE={device}; nothing was measured", file=sys.stderr)
        return 1
    found["tests"] = "left out" if given.no_tests else "passed"
    found["steps"] = list(step_rows(device, simulated))
    found["engine"] = list(engine_rows(device, simulated))
    found["norms"] = list(norm_rows(device))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "bench-gpu.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    (given.out / "bench-gpu.md").write_text(markdown(found), "utf-8")
    print(markdown(found))
    return 0


def _found_device() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "sim"


def machine(device: torch.device) -> Row:
    """Device, driver, torch and commit that the figures belong to."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    known = {"device": str(device), "torch": torch.__version__, "python": platform.python_version()}
    known["commit"] = git.stdout.strip() or "unknown"
    if device.type == "cuda":
        known |= {"name": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        known["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return known


def run_tests(device: torch.device) -> bool:
    """(a) The device tests in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(ROOT / "tests" / "device")]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "DEVICE": str(device)}).returncode == 0


# ---- (b) steps of DP-SGD ---------------------------------------------------------------------------------------------


def step_rows(device: torch.device, simulated: bool) -> Iterator[Row]:
    batches, warm, steps = ((8,), 1, 2) if simulated else ((256, 1024), 10, 30)
    for net in NETS:
        for batch in batches:
            for method in METHODS:
                row: Row = {"net": net.name, "batch": batch, "method": method}
                yield row | measured(lambda: timed_steps(net, batch, method, device, warm, steps, simulated))  # noqa: B023


def measured(figures: Callable[[], Row]) -> Row:
    """Figures of a row, or why there are none: a row that fails is a finding, and the others still count."""
    try:
        return figures()
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"}


def timed_steps(net: Net, batch: int, method: str, device: torch.device, warm: int, steps: int, small: bool) -> Row:
    """Median milliseconds of a synchronised step after `warm` steps, peak memory, and waits for the device."""
    torch.manual_seed(0)
    model = net.build(small).to(device)
    data = TensorDataset(*net.records(batch * 4, small))
    step = LOOPS[method](model, data, batch, device, warm + steps + 1)
    for _ in range(warm):
        step()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(steps):
        _synchronise(device)
        began = time.perf_counter()
        step()
        _synchronise(device)
        times.append(1000 * (time.perf_counter() - began))
    row: Row = {"ms": round(statistics.median(times), 3), "parameters": sum(p.numel() for p in model.parameters())}
    if cuda:
        row |= {"peak MB": round(torch.cuda.max_memory_allocated(device) / 2**20, 1), "waits": _waits(step)}
    return row


def _synchronise(device: torch.device) -> None:
    if device.type not in ("cpu", "sim"):
        torch.accelerator.synchronize()


def _waits(step: Callable[[], None]) -> int:
    """How often torch warns of a synchronising call in one step (CUDA)."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in seen)


def plain_loop(model: Any, data: TensorDataset, batch: int, device: torch.device, steps: int) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return _stepper(model, optimizer, DataLoader(data, batch_size=batch, shuffle=True), device)


def sordino_loop(model: Any, data: TensorDataset, batch: int, device: torch.device, steps: int) -> Callable[[], None]:
    import sordino

    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=batch)
    private = sordino.make_private(model, optimizer, loader, epochs=steps, noise_multiplier=1.0)
    return _stepper(private[0], private[1], private[2], device)


def opacus_loop(model: Any, data: TensorDataset, batch: int, device: torch.device, steps: int) -> Callable[[], None]:
    from opacus import PrivacyEngine  # type: ignore[import-not-found]

    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(data, batch_size=batch)
    known = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": True}
    return _stepper(
        *PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=loader, **known), device
    )


LOOPS = {"plain": plain_loop, "sordino": sordino_loop, "opacus": opacus_loop}


def _stepper(model: Any, optimizer: Any, loader: Any, device: torch.device) -> Callable[[], None]:
    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    some = batches()

    def step() -> None:
        x, y = next(some)
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()

    return step


# ---- (c) paths of the federated engine -------------------------------------------------------------------------------


def engine_rows(device: torch.device, simulated: bool) -> Iterator[Row]:
    """Seconds of a round for clients side by side over those for one after the other; 1 is the threshold."""
    widths, clients = ((2, 4), 4) if simulated else ((4, 16, 64, 256), 32)
    for width in widths:
        yield {"channels": width} | measured(lambda: path_figures(width, clients, device))  # noqa: B023


def path_figures(width: int, clients: int, device: torch.device) -> Row:
    """A CNN, which has no written gradient: the rule in engines/objectives.py decides by its FLOP alone."""
    import sordino
    from sordino.engines.inprocess import InProcess
    from sordino.engines.objectives import step_flops
    from sordino.loop import run

    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, width, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(width, width, 3, padding=1)
    model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(width * 256, 10))
    task = sordino.Task.of(model, [(torch.randn(64, 3, 16, 16), torch.randint(10, (64,))) for _ in range(clients)])
    plan = sordino.recipes.dp_fed_avg(
        rounds=3, clients=sordino.Poisson(clients, 1.0), lr=0.1, clip_norm=1.0, noise_multiplier=1.0, batch=32
    )
    seconds = {}
    for path in ("batched", "sequential"):
        rounds = run(plan, task, engine=InProcess(path, device=str(device)), streams=sordino.rng.Seeded(0))
        next(rounds)
        _synchronise(device)
        began = time.perf_counter()
        for _ in rounds:
            _synchronise(device)
        seconds[path] = time.perf_counter() - began
    flop = round(step_flops(task, 32) / 1e6, 2)
    return {"MFLOP of a step": flop, "batched / sequential": round(seconds["batched"] / seconds["sequential"], 3)}


# ---- (d) TF32 --------------------------------------------------------------------------------------------------------


def norm_rows(device: torch.device) -> Iterator[Row]:
    """How much longer than the clip norm a clipped gradient is, with TF32 off and on; above 1e-5 the bound is false."""
    for precision in ("highest", "high"):
        yield {"float32 products": precision} | measured(lambda: norm_figures(precision, device))  # noqa: B023


def norm_figures(precision: str, device: torch.device) -> Row:
    import sordino

    torch.manual_seed(0)
    x = torch.randn(1, 64).expand(32, 64).clone()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, torch.zeros(32, dtype=torch.int64)), batch_size=16)
    known: dict[str, Any] = {"epochs": 1, "noise_multiplier": 1e-9, "clip_norm": 1e-3}
    private, step, batches = sordino.make_private(model, optimizer, loader, **known)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        some, labels = next(iter(batches))
        step.zero_grad()
        F.cross_entropy(private(some.to(device)), labels.to(device)).backward()
        step.step()
    finally:
        torch.set_float32_matmul_precision(before)
    total = torch.cat([p.grad.reshape(-1).double().cpu() for p in private.parameters() if p.grad is not None])
    return {"clipped norm - 1": f"{float(total.norm()) * 16 / 1e-3 / len(some) - 1:.2e}"}


# ---- the table -------------------------------------------------------------------------------------------------------


def markdown(found: dict[str, Any]) -> str:
    lines = ["# bench-gpu", "", ", ".join(f"{name} {value}" for name, value in found["machine"].items()), ""]
    if found["simulated"]:
        lines += ["**Simulated device: times mean nothing. Not run on a real accelerator.**", ""]
    lines += [f"Device tests: {found['tests']}.", ""]
    for title, rows in (("DP-SGD", "steps"), ("Engine paths", "engine"), ("TF32", "norms")):
        keys = list(dict.fromkeys(key for row in found[rows] for key in row))
        lines += [f"## {title}", "", f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
        lines += [f"| {' | '.join(str(row.get(key, '')) for key in keys)} |" for row in found[rows]] + [""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
