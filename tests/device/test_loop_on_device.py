"""Promise: `make_private` runs where the model is, and gives the numbers and the refusals that it gives on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.device.loops import CPU, DEVICE, NETS, autocast, net, private, records, train, weights
from tests.dpsgd.loops import batch_of
from torch import nn
from torch.nn import functional as F  # noqa: N812

from sordino.dpsgd.batch_independence import BatchPass
from sordino.dpsgd.private_loop import check_devices
from sordino.errors import DataError, PlanError
from sordino.parts import Adaptive, Banded


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, weight_decay=1e-3)


def record_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="none")


VARIANTS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": adam},
    "momentum": {"optimizer": momentum},
    "physical_batch": {"max_physical_batch_size": 5},
    "loss": {"loss": record_loss},
    "named_loss": {"loss": "cross_entropy"},
    "smoothing": {"smoothing": 1.0},
    "banded": {"strategy": Banded(3)},
    "epsilon": {"noise_multiplier": None, "epsilon": 4.0},
    "per_layer": {"clip": "per_layer", "clip_norm": 0.3},
    "per_layer_in_pieces": {"clip": "per_layer", "clip_norm": 0.3, "max_physical_batch_size": 5},
    "adaptive": {"clip_norm": Adaptive(0.3)},
    "schedule": {"noise_multiplier": lambda t: 1.0 + 0.05 * t},
}


def both(name: str, **settings: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Weights after all steps on the CPU and on the device; where the device's parameters and state are."""
    found = []
    for device in (CPU, DEVICE):
        parts = private(name, device, **settings)
        train(parts, device)
        found.append(weights(parts[0]))
        assert parts[1].steps == 16
    state = [t for entry in parts[1].inner.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    state = [t for t in state if t.dim() > 0]
    return found[0], found[1], {"devices": {t.device.type for t in [*parts[0].parameters(), *state]}}


@pytest.mark.parametrize("name", NETS)
def test_a_net_trains_on_the_device_as_on_the_cpu(name: str) -> None:
    cpu, device, where = both(name)
    assert (cpu - weights(net(name))).abs().max() > 1e-2  # it moved
    assert (cpu - device).abs().max() <= 1e-5
    assert where["devices"] == {DEVICE.type}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["mlp", "group_norm"])
def test_every_setting_gives_on_the_device_what_it_gives_on_the_cpu(name: str, variant: str) -> None:
    cpu, device, where = both(name, **VARIANTS[variant])
    assert (cpu - device).abs().max() <= 1e-5
    assert where["devices"] == {DEVICE.type}


@pytest.mark.parametrize("name", ["mlp", "conv", "lstm"])
def test_secure_noise_runs_where_the_model_is(name: str) -> None:
    parts = private(name, DEVICE, noise="secure")
    train(parts, DEVICE)
    assert parts[1].certificate()["epsilon"] > 0
    assert {p.device.type for p in parts[0].parameters()} == {DEVICE.type}
    assert weights(parts[0]).isfinite().all()


def test_autocast_around_the_whole_step_is_followed() -> None:
    single = private("mlp", DEVICE, noise_multiplier=1e-3)
    train(single, DEVICE)
    half = private("mlp", DEVICE, noise_multiplier=1e-3)
    train(half, DEVICE, around=lambda: autocast(DEVICE))
    distance = (weights(single[0]) - weights(half[0])).abs().max()
    assert 0 < distance < 0.05


def test_checks_leave_the_generator_of_the_device_alone() -> None:
    """Dropout on the device is drawn as without checks: the step's own passes move the generator, nothing else."""

    def state_after(checked: bool) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).to(DEVICE)
        parts = private("mlp", DEVICE if checked else CPU, model=model)
        torch.manual_seed(11)
        if checked:
            train(parts, DEVICE, steps=4)
        else:
            for t in range(4):
                model(torch.zeros(len(batch_of(parts, t)), 4, device=DEVICE))
        state: torch.Tensor = torch.get_device_module(DEVICE).get_rng_state()
        return state

    assert torch.equal(state_after(checked=True), state_after(checked=False))


def test_a_pass_that_draws_on_the_device_is_seen_to_draw() -> None:
    x = torch.ones(6, 50, device=DEVICE)
    assert BatchPass(lambda rows: F.dropout(rows, 0.5), x, 6, random=False).gap(torch.arange(2))[1]
    assert not BatchPass(lambda rows: F.relu(rows), x, 6, random=False).gap(torch.arange(2))[1]


def test_labels_without_a_class_are_refused_on_the_device() -> None:
    model = nn.Linear(4, 2).to(DEVICE)
    with pytest.raises(DataError, match=r"label|class"):
        private("mlp", DEVICE, model=model)


def test_parameters_on_two_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model[1].to(DEVICE)
    from sordino.dpsgd import make_private

    loader = torch.utils.data.DataLoader(records("mlp"), batch_size=12)
    with pytest.raises(PlanError, match="device"):
        make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=1, noise_multiplier=1.0)


def test_a_device_without_float64_is_refused() -> None:
    with pytest.raises(PlanError, match="float64"):
        check_devices({torch.device("mps")})


def test_parameters_without_memory_are_refused() -> None:
    with pytest.raises(PlanError, match="meta"):
        private("mlp", torch.device("meta"))


def test_a_batch_that_was_not_moved_is_refused_with_its_fix() -> None:
    model, optimizer, loader = private("mlp", DEVICE)
    x, _ = next(iter(loader))
    with pytest.raises(DataError, match=r"x\.to"):
        model(x)
    assert optimizer.steps == 0


def test_a_checkpoint_continues_on_another_device() -> None:
    whole = private("mlp", DEVICE, optimizer=adam)
    train(whole, DEVICE)
    first = private("mlp", CPU, optimizer=adam)
    train(first, CPU, steps=8)
    second = private("mlp", DEVICE, optimizer=adam)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    assert second[1].steps == 8
    state = [t for entry in second[1].inner.state.values() for t in entry.values() if t.dim() > 0]
    assert {t.device.type for t in state} == {DEVICE.type}
    train(second, DEVICE, steps=16)
    assert (weights(whole[0]) - weights(second[0])).abs().max() <= 1e-5
