"""The simulated device is registered before any test of this folder runs; without a C++ compiler all are skipped.

`DEVICE=cuda pytest tests/device` runs the same tests on a real accelerator, but for what only the simulation counts.
"""

from __future__ import annotations

import os

import pytest
import torch

torch.set_num_threads(1)
DEVICE = os.environ.get("DEVICE", "sim")
if DEVICE == "sim":
    from tests.device import sim

    MISSING = sim.MISSING
else:
    MISSING = None if torch.empty(0, device=DEVICE) is not None else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MISSING:
            item.add_marker(pytest.mark.skip(reason=MISSING))
        elif DEVICE != "sim" and item.get_closest_marker("simulated"):
            item.add_marker(pytest.mark.skip(reason="counted on the simulated device alone"))
