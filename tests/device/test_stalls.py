"""Promise: a private step waits for the device at most four times, and copies nothing of the model's size to it.

Counted on the simulated device: a stall is an operation after which the host must wait (a value read, a copy to host).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.device import sim
from tests.device.loops import DEVICE, private, train
from torch import nn

pytestmark = pytest.mark.simulated
STALLS = 4


def one_step(name: str, model: nn.Module | None = None, **settings: Any) -> Counter[str]:
    """What the device does in the sixth step: checks that belong to the first batches are over."""
    parts = private(name, DEVICE, model=model, **settings)
    train(parts, DEVICE, steps=5)
    with sim.counted() as found:
        train(parts, DEVICE, steps=6)
    assert found["operations"] > 20
    return found


def deep(layers: int, width: int = 8) -> nn.Module:
    torch.manual_seed(1)
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, width), *hidden, nn.Linear(width, 3))


@pytest.mark.parametrize("name", ["linear", "conv", "group_norm", "lstm", "attention", "transformer", "embedding"])
def test_a_step_stalls_at_most_four_times(name: str) -> None:
    found = one_step(name)
    assert found["stalls"] <= STALLS, found


@pytest.mark.parametrize(
    "settings", [{"loss": "cross_entropy"}, {"smoothing": 1.0}, {"noise": "secure"}, {"clip": "per_layer"}]
)
def test_settings_do_not_add_stalls(settings: dict[str, Any]) -> None:
    found = one_step("mlp", **settings)
    assert found["stalls"] <= STALLS, found


@pytest.mark.parametrize("clip", ["flat", "per_layer"])
def test_stalls_do_not_grow_with_the_number_of_tensors(clip: str) -> None:
    assert one_step("mlp", deep(1), clip=clip)["stalls"] == one_step("mlp", deep(12), clip=clip)["stalls"]


@pytest.mark.parametrize("settings", [{}, {"noise": "secure"}])
def test_bytes_to_the_host_do_not_grow_with_the_model(settings: dict[str, Any]) -> None:
    small, large = (one_step("mlp", deep(2, width), **settings)["bytes to host"] for width in (8, 200))
    assert large <= small + 64


def test_noise_is_the_only_thing_of_the_models_size_that_is_copied_to_the_device() -> None:
    small, large = (one_step("mlp", deep(2, width)) for width in (8, 200))
    size = sum(p.numel() for p in deep(2, 200).parameters())
    assert large["bytes to device"] - small["bytes to device"] <= 8 * size + 64
