"""Revert the device code one place at a time, and say whether a test of this folder turns red. Not collected by pytest.

    python tests/device/reverts.py [WORDS OF A PLACE ...]        exit code 1 if a revert stays green

Each revert is applied to a copy of src/ in a temporary folder. About half an hour on two cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LOOP, STALLS, PRECISION, ENGINE = (
    "test_loop_on_device",
    "test_stalls",
    "test_precision_on_device",
    "test_engine_on_device",
)


class Revert(NamedTuple):
    """The text of a place, the text that takes its place, and the tests that should notice."""

    file: str
    text: str
    instead: str
    tests: tuple[str, ...]


REVERTS = (
    # make_private
    Revert("dpsgd/clipped_sum.py", "dtype=torch.float64, device=device)", "dtype=torch.float64)", (LOOP,)),
    Revert(
        "dpsgd/clipped_sum.py",
        "torch.autocast(device.type, enabled=False)",
        'torch.autocast("cpu", enabled=False)',
        (PRECISION,),
    ),
    Revert(
        "dpsgd/pieces.py",
        "torch.autocast(self.anchor.device.type, enabled=False)",
        'torch.autocast("cpu", enabled=False)',
        (PRECISION,),
    ),
    Revert("dpsgd/pieces.py", "requires_grad=True, device=device)", "requires_grad=True)", (LOOP,)),
    Revert("dpsgd/pieces.py", "torch.arange(b, device=self.index.device)", "torch.arange(b)", (LOOP,)),
    Revert("dpsgd/recording.py", "torch.zeros((), device=ctx.inner[0].device)", "torch.zeros(())", (LOOP,)),
    Revert("dpsgd/recording.py", "requires_grad=True, device=inner[0].device)", "requires_grad=True)", (LOOP,)),
    Revert("dpsgd/recording.py", "        self._check_device(args, kwargs)\n", "", (LOOP,)),
    Revert("dpsgd/recording.py", "        with ieee_products():", "        if True:", (PRECISION,)),
    Revert("dpsgd/optimizer.py", "dtype=torch.float64, device=device)", "dtype=torch.float64)", (LOOP,)),
    Revert("dpsgd/loader.py", "b = b.to(a.device, non_blocking=True)", "pass", (LOOP,)),
    Revert("dpsgd/own_code.py", "target.to(one.device, non_blocking=True)", "target", (LOOP,)),
    Revert(
        "dpsgd/layer_rules.py", ".view(3, -1).to(weight.device, weight.dtype)", ".view(3, -1).to(weight.dtype)", (LOOP,)
    ),
    Revert(
        "dpsgd/layer_rules.py",
        "torch.is_autocast_enabled(input.device.type)",
        "torch.is_autocast_enabled('cpu')",
        (PRECISION, LOOP),
    ),
    Revert("dpsgd/state_guard.py", "if not item.is_cpu:", "if False:", (LOOP, STALLS)),
    Revert("dpsgd/private_loop.py", "    check_devices({p.device for p in model.parameters()})\n", "", (LOOP,)),
    Revert(
        "dpsgd/private_loop.py",
        'if len(devices) > 1 or any(device.type == "meta" for device in devices):',
        "if len(devices) > 1:",
        (LOOP,),
    ),
    Revert("dpsgd/private_loop.py", 'if any(device.type == "mps" for device in devices):', "if False:", (LOOP,)),
    Revert(
        "dpsgd/model_graphs.py",
        'torch.autocast(next((p.device.type for p in model.parameters()), "cpu"), enabled=False)',
        'torch.autocast("cpu", enabled=False)',
        (PRECISION, LOOP),
    ),
    Revert("dpsgd/model_graphs.py", "Tape(parameters[0].device if parameters else None)", "Tape(None)", (LOOP,)),
    Revert("dpsgd/batch_independence.py", ".to(p.device, p.dtype)", ".to(p.dtype)", (LOOP,)),
    Revert(
        "dpsgd/batch_independence.py",
        "torch.is_autocast_enabled(p.device.type)",
        "torch.is_autocast_enabled('cpu')",
        (PRECISION, LOOP),
    ),
    Revert("graph/captured.py", "x = drawn.to(x.device, x.dtype)", "x = drawn.to(x.dtype)", (LOOP,)),
    Revert("rng.py", "[torch.accelerator.current_device_index()]", "[]", (LOOP,)),
    Revert(
        "parts/releases.py",
        "mechanism.sample(total.numel(), rng)).to(total.device)",
        "mechanism.sample(total.numel(), rng))",
        (LOOP, ENGINE),
    ),
    Revert("parts/correlated_noise.py", "rng)).to(total.device)", "rng))", (LOOP, ENGINE)),
    Revert("parts/correlated_noise.py", "held.to(total.device) if held.dim() else held", "held", (LOOP, ENGINE)),
    # the federated engine
    Revert("task.py", "x.to(device), y.to(device)", "x, y", (ENGINE,)),
    Revert("task.py", "dtype=records.x.dtype, device=self.device)", "dtype=records.x.dtype)", (ENGINE,)),
    Revert("task.py", "model=copy.deepcopy(self.model).to(device)", "model=copy.deepcopy(self.model)", (ENGINE,)),
    Revert("loop.py", "        state = state.on(task.device)\n", "        pass\n", (ENGINE,)),
    Revert("loop.py", "    public = public.on(start.device)\n", "", (ENGINE,)),
    Revert("loop.py", "worker.device_task or task", "task", (ENGINE,)),
    Revert("engines/inprocess.py", "dtype=torch.float64, device=self.device)", "dtype=torch.float64)", (ENGINE,)),
    Revert("engines/inprocess.py", "job.public.on(self.device)", "job.public", (ENGINE,)),
    Revert("engines/inprocess.py", "start=job.start.to(self.device)", "start=job.start", (ENGINE,)),
    Revert("engines/inprocess.py", "torch.stack(each).to(rows.device)", "torch.stack(each)", (ENGINE,)),
    Revert(
        "engines/objectives.py",
        "torch.empty(1, self.layout.size, device=task.device)",
        "torch.empty(1, self.layout.size)",
        (ENGINE,),
    ),
    Revert(
        "engines/objectives.py",
        "torch.zeros(1, self.layout.size, device=task.device)",
        "torch.zeros(1, self.layout.size)",
        (ENGINE,),
    ),
    Revert(
        "engines/batches.py",
        "view(*where.shape, *x.shape[1:]).to(self.device)",
        "view(*where.shape, *x.shape[1:])",
        (ENGINE,),
    ),
    Revert("engines/batches.py", "gather(self.records.y, rows).to(device)", "gather(self.records.y, rows)", (ENGINE,)),
    Revert("engines/batches.py", "torch.from_numpy(real[step]).to(device)", "torch.from_numpy(real[step])", (ENGINE,)),
    Revert("engines/checks.py", "(side[rows].to(task.device) for side", "(side[rows] for side", (ENGINE,)),
    Revert("engines/checks.py", "task.layout.size, device=task.device)", "task.layout.size)", (ENGINE,)),
    Revert("engines/dense_clients.py", "    @ieee_products()\n", "", (ENGINE, PRECISION)),
    Revert("parts/record_solvers.py", "noise.to(w.device)", "noise", (ENGINE,)),
    Revert("parts/sparsify.py", "std, device=public.mask.device)", "std)", (ENGINE,)),
    Revert(
        "parts/encoding.py",
        "self.std.to(device or self.std.device, torch.float64)",
        "self.std.to(torch.float64)",
        (ENGINE,),
    ),
    Revert("parts/encoding.py", "dtype=torch.float64, device=device)", "dtype=torch.float64)", (ENGINE,)),
    Revert(
        "parts/encoding.py", "mask = None if self.mask is None else self.mask.to(device)", "mask = self.mask", (ENGINE,)
    ),
    Revert("plan.py", "v.to(device) if v.dim() and n.startswith(prefix) else v", "v", (ENGINE,)),
    Revert("engines/base.py", "torch.device(_accelerator() if name ==", "torch.device('cpu' if name ==", (ENGINE,)),
)


def is_noticed(revert: Revert, folder: Path) -> bool:
    """Return whether a test fails once this place is reverted in the copy at `folder`."""
    place = folder / "sordino" / revert.file
    whole = place.read_text("utf-8")
    if revert.text not in whole:
        raise SystemExit(f"{revert.file} has no {revert.text!r}: bring REVERTS up to date")
    place.write_text(whole.replace(revert.text, revert.instead), "utf-8")
    try:
        tests = [str(ROOT / "tests" / "device" / f"{name}.py") for name in revert.tests]
        paths, environment = (
            f"pythonpath={folder} {ROOT / 'benchmarks' / 'papers'}",
            {**os.environ, "OMP_NUM_THREADS": "1"},
        )
        command = [sys.executable, "-m", "pytest", "-x", "-o", paths, "-p", "no:cacheprovider", *tests]
        found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True).returncode
        if found in (2, 3, 4, 5):  # interrupted, internal, usage, nothing collected
            raise SystemExit(f"pytest ended with exit code {found} for {revert.file} {revert.text!r}")
        return found != 0
    finally:
        place.write_text(whole, "utf-8")


def main() -> None:
    chosen = [one for one in REVERTS if not sys.argv[1:] or any(word in one.file + one.text for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(ROOT / "src" / "sordino", Path(name) / "sordino")
        missed = []
        for revert in chosen:
            red = is_noticed(revert, Path(name))
            print("red  " if red else "GREEN", revert.file, revert.text.strip()[:90], flush=True)
            missed += [] if red else [revert]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} reverts turn a test red")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
