"""Promise: with an infinite clip and no noise every recipe is plain FedAvg, on every path of the engine.

Recipes whose unit is a record are plain minibatch or local SGD there: test_record_limit.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.contracts.test_record_limit import RECORD_LEVEL
from tests.tiny import SIZES, final, plan, task
from torch import Tensor

from sordino.engines.inprocess import InProcess
from sordino.parts.encoding import Clip, LaplacianSmoothing
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise, NoNoise
from sordino.parts.samplers import Everyone, RoundRobin, Sampler
from sordino.parts.server_optimizers import Sgd
from sordino.parts.sparsify import PublicMask, ReleasedMask
from sordino.plan import Plan
from sordino.recipes import RECIPES
from sordino.rng import Seeded
from sordino.task import Task

ROUNDS, LR, EPOCHS = 3, 0.3, 2

# Each recipe with its own idea switched off. A new recipe needs a line here.
NEUTRAL: dict[str, dict[str, Any]] = {
    "dp_fed_avg": {},
    "dp_fed_ls": {"denoiser": LaplacianSmoothing(0.0)},
    "dp_fed_sam": {"rho": 0.0, "momentum": 0.0, "weight_decay": 0.0},
    "dp_fed_sam_top_k": {"rho": 0.0, "momentum": 0.0, "weight_decay": 0.0, "sparsify": PublicMask(1.0, ReleasedMask())},
    "fed_smp": {"momentum": 0.0, "weight_decay": 0.0, "keep": 1.0},
    "blur": {"strength": 0.0, "momentum": 0.0, "weight_decay": 0.0},
    "best": {"population": len(SIZES), "epsilon": 5.0},
    "client_side_fed_avg": {},
    "dp_ftrl": {},
    "head": {"population": len(SIZES), "epsilon": 5.0, "rounds": ROUNDS},
}
# Limits of their own: tests/parts/test_scaffold.py; band_mf is dp_ftrl with coins of its own.
REMEMBERS = {"scaffold", "band_mf"}
CLIENT_LEVEL = sorted(name for name in RECIPES if name not in {*RECORD_LEVEL, *REMEMBERS})


def neutral(name: str, sampler: Sampler, batch: int | None) -> Plan:
    """The recipe with an infinite clip norm and no noise."""
    if name not in NEUTRAL:
        pytest.fail(f"recipe {name} has no neutral settings in {__name__}.NEUTRAL: add them")
    if name == "client_side_fed_avg":  # whole batches, cohorts in turn; a gradient's ball must be finite
        common = {"rounds": ROUNDS, "population": len(SIZES), "cohort": int(sampler.expected), "lr": LR}
        private = RECIPES[name](**common, steps=EPOCHS, clip_norm=1e6, mechanism=Gaussian(1.0))
        return replace(private, local=replace(private.local, batch=batch), release=NoNoise())  # type: ignore[type-var]
    if name == "head":  # its noise is solved for; its falling step and its one local step are put aside
        private = RECIPES[name](**NEUTRAL[name])
        local = replace(private.local, lr=LR, epochs=EPOCHS, batch=batch)  # type: ignore[type-var]
        return replace(private, clients=sampler, encode=(Clip(math.inf),), release=NoNoise(), server=Sgd(), local=local)
    settings = {"lr": LR, "epochs": EPOCHS, "batch": batch, "rounds": ROUNDS, **NEUTRAL[name]}
    if name == "best":  # its noise is solved for, its server slows down: both are put aside
        private = RECIPES[name](**settings)
        return replace(private, clients=sampler, encode=(Clip(math.inf),), release=NoNoise(), server=Sgd())
    return RECIPES[name](clients=sampler, clip_norm=math.inf, noise_multiplier=0.0, **settings)


def plain_fedavg(data: Task, cohort_of: Callable[[int], list[int]], local: LocalSgd, rounds: int = ROUNDS) -> Tensor:
    """w <- mean over the cohort of the model each client reaches by torch's SGD from w; nothing of sordino's loop."""
    model = copy.deepcopy(data.model)
    for t in range(rounds):
        ends = [_trained(copy.deepcopy(model), data, local, t, client) for client in cohort_of(t)]
        with torch.no_grad():
            for tensors in zip(model.parameters(), *ends, strict=True):
                tensors[0].copy_(torch.stack(tensors[1:]).mean(0))
    return torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()])


def _trained(model: torch.nn.Module, data: Task, local: LocalSgd, t: int, client: int) -> list[Tensor]:
    first, last = int(data.clients.offsets[client]), int(data.clients.offsets[client + 1])
    x, y = data.clients.records.x[first:last], data.clients.records.y[first:last]
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=local.momentum, weight_decay=local.weight_decay, dampening=0
    )
    for picks in local.indices(last - first, Seeded(0).at(t, "batches", client)):
        step = [int(i) for i in picks if i >= 0]
        optimizer.zero_grad()
        F.cross_entropy(model(x[step]), y[step]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("path", ["batched", "sequential"])
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("name", CLIENT_LEVEL)
def test_infinite_clip_and_no_noise_is_plain_fedavg(
    name: str, batch: int | None, path: Literal["batched", "sequential"]
) -> None:
    data, free = task(), neutral(name, Everyone(len(SIZES)), batch)
    assert isinstance(free.local, LocalSgd)
    wanted = plain_fedavg(data, lambda t: list(range(len(SIZES))), free.local)
    ours = final(free, data, InProcess(path=path))
    assert float((wanted - data.layout.flatten(data.model)).norm()) > 0.1  # something was learnt
    assert torch.allclose(ours, wanted, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("path", ["batched", "sequential"])
@pytest.mark.parametrize("name", CLIENT_LEVEL)
def test_a_cohort_is_averaged_over_its_own_members(name: str, path: Literal["batched", "sequential"]) -> None:
    data, free = task(), neutral(name, RoundRobin(len(SIZES), 2), None)
    assert isinstance(free.local, LocalSgd)
    wanted = plain_fedavg(data, lambda t: [2 * t % 6, (2 * t + 1) % 6], free.local)
    assert torch.allclose(final(free, data, InProcess(path=path)), wanted, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("path", ["batched", "sequential"])
def test_momentum_and_weight_decay_are_torchs(path: Literal["batched", "sequential"]) -> None:
    local = LocalSgd(lr=LR, epochs=EPOCHS, batch=2, momentum=0.5, weight_decay=0.1)
    free = neutral("dp_fed_avg", Everyone(len(SIZES)), None)
    free = plan(rounds=ROUNDS, local=local, encode=free.encode, release=free.release)
    wanted = plain_fedavg(task(), lambda t: list(range(len(SIZES))), local)
    assert torch.allclose(final(free, task(), InProcess(path=path)), wanted, rtol=0.0, atol=1e-5)


def test_every_recipe_has_neutral_settings() -> None:
    assert set(NEUTRAL) == set(CLIENT_LEVEL)


@pytest.mark.parametrize("name", CLIENT_LEVEL)
def test_a_finite_clip_or_noise_is_not_plain_fedavg(name: str) -> None:
    """The limit is a limit: the same comparison fails with privacy switched on."""
    data = task()
    free = neutral(name, Everyone(len(SIZES)), None)
    assert isinstance(free.local, LocalSgd)
    wanted = plain_fedavg(data, lambda t: list(range(len(SIZES))), free.local)
    clipped = replace(free, encode=(*free.encode[:-1], Clip(0.05)))
    noised = replace(free, encode=(*free.encode[:-1], Clip(1e3)), release=CentralNoise(Gaussian(0.01)))
    assert not torch.allclose(final(clipped, data), wanted, atol=1e-3)
    assert not torch.allclose(final(noised, data), wanted, atol=1e-3)
