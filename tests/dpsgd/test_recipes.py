"""The recipes of paper 004 are the loop: one silo, every record clipped, the same steps and the same cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import QUIET, data, mlp, private, train, weights
from torch.nn import functional as F  # noqa: N812

from sordino.engines.inprocess import InProcess
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.record_samplers import PoissonRecords
from sordino.plan import Plan
from sordino.recipes import RECIPES
from sordino.task import Task
from sordino.training import Result
from sordino.training import train as run

USUAL: dict[str, Any] = {
    "rounds": 5,
    "records": PoissonRecords(60, (60,)),
    "lr": 0.1,
    "clip_norm": 0.5,
    "noise_multiplier": 0.0,
}
TWINS: dict[str, tuple[Any, float]] = {
    "dp_sgd": (torch.optim.SGD, 0.0),
    "dp_ls_sgd": (torch.optim.SGD, 2.0),
    "dp_adam": (torch.optim.Adam, 0.0),
    "dp_ls_adam": (torch.optim.Adam, 2.0),
}


def plan(name: str, **changes: Any) -> Plan:
    smoothing = {"denoiser": LaplacianSmoothing(TWINS[name][1])} if "ls" in name else {}
    return RECIPES[name](**{**USUAL, **smoothing, **changes})


def trained(planned: Plan, path: Any = None) -> Result:
    return run(planned, Task.of(mlp(), [data().tensors]), engine=InProcess(path=path))


@pytest.mark.parametrize("path", ["batched", "sequential"])
@pytest.mark.parametrize("name", TWINS)
def test_a_recipe_takes_the_steps_of_the_loop(name: str, path: Any) -> None:
    """With all records in every batch and no noise above rounding, nothing is left to chance."""
    optimizer, strength = TWINS[name]
    parts = private(
        mlp(), data(), optimizer, batch=60, epochs=5, noise_multiplier=QUIET, clip_norm=0.5, smoothing=strength
    )
    train(parts, epochs=5)
    found = trained(plan(name), path)
    assert float((weights(found.model) - weights(mlp())).norm()) > 0.005
    torch.testing.assert_close(weights(found.model), weights(parts[0]), rtol=0, atol=1e-6 if "sgd" in name else 2e-3)


@pytest.mark.parametrize("name", TWINS)
def test_a_recipe_without_clip_noise_and_smoothing_is_the_plain_optimizer(name: str) -> None:
    model, (x, y) = mlp(), data().tensors
    optimizer = TWINS[name][0](model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = trained(plan(name, clip_norm=1e6, denoiser=None))
    torch.testing.assert_close(weights(found.model), weights(model), rtol=0, atol=1e-4)
    assert found.certificate["epsilon"] is None


@pytest.mark.parametrize("name", TWINS)
def test_a_recipe_is_billed_as_the_loop(name: str) -> None:
    planned = plan(name, records=PoissonRecords(12, (60,)), noise_multiplier=1.3)
    found, ours = trained(planned).certificate, private(batch=12, noise_multiplier=1.3)[1].certificate()
    for key in ("epsilon", "delta", "unit", "relation"):
        assert found[key] == ours[key]
    assert replace(planned, postprocess=()).cost() == planned.cost()


def test_momentum_and_weight_decay_are_torchs() -> None:
    def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.7, weight_decay=0.1)

    parts = private(mlp(), data(), optimizer, batch=60, epochs=5, noise_multiplier=QUIET, clip_norm=0.5, smoothing=1.0)
    train(parts, epochs=5)
    found = trained(plan("dp_ls_sgd", denoiser=LaplacianSmoothing(1.0), momentum=0.7, weight_decay=0.1))
    torch.testing.assert_close(weights(found.model), weights(parts[0]), rtol=0, atol=1e-5)
