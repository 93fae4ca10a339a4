"""The simulated accelerator `torch.device("sim")` of the tests: built with the C++ compiler at first use, then cached.

Import this module before the first backward pass of the process: autograd starts its device threads then. `counts()`
has what the device did since `reset()`: operations, stalls (the host waits for the device), copies and bytes in each
direction, operations in float64. What it cannot show: speed, asynchronous errors, a real accelerator's rounding.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration, cpp_extension

SOURCE = Path(__file__).with_name("sim.cpp")
NAME = "sordino_sim_device"
HEADERS = Path(sysconfig.get_paths()["include"]) / "Python.h"
MISSING: str | None = None
if not shutil.which(os.environ.get("CXX", "g++")) or not HEADERS.exists():
    MISSING = "no C++ compiler, or no headers of Python, for the simulated device"


def _build() -> Path:
    """Compile the extension, unless a build of this source with this torch is in tests/device/.build."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + sysconfig.get_platform().encode())
    target = SOURCE.parent / ".build" / f"{NAME}-{key.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        include = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        libraries = cpp_extension.library_paths()
        command = [
            os.environ.get("CXX", "g++"),
            "-O1",
            "-std=c++20",
            "-shared",
            "-fPIC",
            str(SOURCE),
            "-o",
            str(partial),
        ]
        command += [f"-DTORCH_EXTENSION_NAME={NAME}", *(f"-I{path}" for path in include)]
        command += [f"-L{path}" for path in libraries] + ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        partial.rename(target)
    return target


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(NAME, _build())
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _register(extension: Any) -> None:
    """Give torch the device's name, generator and the functions that torch asks of a device module."""
    backend_registration.rename_privateuse1_backend("sim")
    extension.register_hooks()
    module: Any = types.ModuleType("torch.sim")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module.synchronize = module._lazy_init = lambda *_: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = lambda seed: extension.manual_seed(seed & ((1 << 64) - 1))
    module.get_rng_state = lambda device=0: extension.get_rng_state()
    module.set_rng_state = lambda state, device=0: extension.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.device = lambda _: contextlib.nullcontext()
    torch._register_device_module("sim", module)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)


if MISSING is None and os.environ.get("DEVICE", "sim") == "sim":  # never beside a real accelerator
    _extension = _load()
    _register(_extension)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """What the device did inside the block; the counter is filled when the block ends."""
    found: Counter[str] = Counter()
    _extension.reset()
    yield found
    found.update(_extension.counts())


def rng_state() -> torch.Tensor:
    state: torch.Tensor = _extension.get_rng_state()
    return state
