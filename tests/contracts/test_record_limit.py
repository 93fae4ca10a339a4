"""Promise: with a clip that never binds and no noise, recipes of unit record are plain minibatch SGD or local SGD."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from tests.tiny import clients, final, mlp, seeded
from torch import Tensor, nn

from sordino.engines.inprocess import InProcess
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import AllRecords, FixedRecords, OnePass, PoissonRecords
from sordino.parts.releases import CentralNoise, NoNoise
from sordino.parts.samplers import Everyone
from sordino.plan import Plan
from sordino.recipes import RECIPES
from sordino.rng import Seeded
from sordino.task import Task

SIZES, ROUNDS, LR, WIDE = (6, 4, 9), 3, 0.3, 1e3  # no gradient here is so long
Path = Literal["batched", "sequential"]
SILOS: dict[str, Any] = {"rounds": ROUNDS, "clients": Everyone(3), "clip_norm": WIDE, "noise_multiplier": 0.0}
ALONE: dict[str, Any] = {
    "rounds": ROUNDS,
    "records": PoissonRecords(5, (19,)),
    "lr": LR,
    "clip_norm": WIDE,
    "noise_multiplier": 0.0,
}
# Every recipe whose unit is a record, with its own idea switched off. A new one needs a line here and a test below.
RECORD_LEVEL: dict[str, list[dict[str, Any]]] = {
    "noisy_minibatch_sgd": [
        {**SILOS, "lr": LR, "records": reads}
        for reads in (FixedRecords(4, SIZES), OnePass(1, SIZES), PoissonRecords(3, SIZES), AllRecords(SIZES))
    ],
    "accelerated_minibatch_sgd": [{**SILOS, "v": 2.0, "records": FixedRecords(4, SIZES)}],
    "noisy_local_sgd": [{**SILOS, "lr": LR, "records": FixedRecords(2, SIZES), "steps": 2, "noise_multiplier": 1e-9}],
    "silo": [
        {
            "sizes": SIZES,
            "epsilons": (9.0,),
            "rounds": ROUNDS,
            "clip_norm": WIDE,
            "lr": LR,
            "momentum": 0.0,
            "final": 1.0,
        }
    ],
    "dp_sgd": [ALONE],
    "dp_ls_sgd": [{**ALONE, "denoiser": LaplacianSmoothing(0.0)}],
    "dp_adam": [ALONE],
    "dp_ls_adam": [{**ALONE, "denoiser": None}],
}
PLAIN = ("noisy_minibatch_sgd", "silo", "dp_sgd", "dp_ls_sgd")  # whose server takes plain steps
ADAM = ("dp_adam", "dp_ls_adam")
ALONE_LEVEL = {"dp_sgd", "dp_ls_sgd", *ADAM}  # one silo holds all


def free(name: str, settings: dict[str, Any]) -> Plan:
    """The recipe without noise."""
    made = RECIPES[name](**settings)
    return made if name == "noisy_local_sgd" else replace(made, release=NoNoise())


def data(name: str, linear: bool = False) -> Task:
    sizes = (19,) if name in ALONE_LEVEL else SIZES
    return Task.of(seeded(nn.Linear(4, 3)) if linear else mlp(), clients(sizes))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()])


def mean_gradient(task: Task, plan: Plan, model: nn.Module, t: int) -> None:
    """Into .grad: the silos' sums over what they drew, divided by silos times batch; nothing of sordino's engine."""
    reads, records = plan.local.reads, task.clients.records
    assert reads is not None
    model.zero_grad()
    for silo in range(task.clients.population):
        picks = reads.draw(t, silo, task.clients.size(silo), Seeded(0).at(t, "batches", silo))
        own = torch.from_numpy(task.clients.rows(silo)[picks])
        loss = task.losses(model(records.x[own]), records.y[own]).sum()
        (loss / (reads.count * task.clients.population)).backward()  # type: ignore[no-untyped-call]


def trained(task: Task, plan: Plan, optimizer: Callable[[Any], torch.optim.Optimizer]) -> Tensor:
    """torch's own optimizer on those gradients."""
    model = copy.deepcopy(task.model)
    steps = optimizer(model.parameters())
    for t in range(plan.rounds):
        mean_gradient(task, plan, model, t)
        steps.step()
    return flat(model)


def same(ours: Tensor, wanted: Tensor, task: Task) -> None:
    assert float((wanted - task.layout.flatten(task.model)).norm()) > 0.05  # something was learnt
    assert torch.allclose(ours, wanted, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("path", ["batched", "sequential"])
@pytest.mark.parametrize("name", PLAIN)
def test_it_is_torchs_sgd_on_the_mean_gradient(name: str, path: Path) -> None:
    for settings in RECORD_LEVEL[name]:
        task, plan = data(name), free(name, settings)
        wanted = trained(task, plan, lambda parameters: torch.optim.SGD(parameters, lr=LR))
        same(final(plan, task, InProcess(path=path)), wanted, task)


@pytest.mark.parametrize("path", ["batched", "sequential"])
@pytest.mark.parametrize("name", ADAM)
def test_it_is_torchs_adam_on_the_mean_gradient(name: str, path: Path) -> None:
    task, plan = data(name), free(name, {**RECORD_LEVEL[name][0], "lr": 0.05})
    wanted = trained(task, plan, lambda parameters: torch.optim.Adam(parameters, lr=0.05))
    same(final(plan, task, InProcess(path=path)), wanted, task)


def test_acceleration_is_three_sequences_of_the_mean_gradient() -> None:
    """Ghadimi, Lan 2012: alpha = 2 / (r + 1), eta = 4 v / (r (r + 1)), mu = 0, no ball."""
    (settings,) = RECORD_LEVEL["accelerated_minibatch_sgd"]
    task, plan = data("accelerated_minibatch_sgd"), free("accelerated_minibatch_sgd", settings)
    model, w = copy.deepcopy(task.model), task.layout.flatten(task.model)
    aggregate = w.clone()
    for t in range(ROUNDS):
        r = t + 1
        alpha, eta = 2 / (r + 1), 4 * 2.0 / (r * (r + 1))
        task.layout.load(model, (1 - alpha) * aggregate + alpha * w)
        mean_gradient(task, plan, model, t)
        slope = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        w = w - alpha / eta * slope
        aggregate = alpha * w + (1 - alpha) * aggregate
    same(final(plan, task), aggregate, task)


@pytest.mark.parametrize("path", ["batched", "sequential"])
def test_local_steps_are_torchs_sgd_in_every_silo(path: Path) -> None:
    (settings,) = RECORD_LEVEL["noisy_local_sgd"]
    task, plan = data("noisy_local_sgd"), free("noisy_local_sgd", settings)
    w = task.layout.flatten(task.model)
    for t in range(ROUNDS):
        w = torch.stack([local_end(task, plan, w, t, silo) for silo in range(3)]).mean(0)
    same(final(plan, task, InProcess(path=path)), w, task)


def local_end(task: Task, plan: Plan, w: Tensor, t: int, silo: int) -> Tensor:
    model, records = copy.deepcopy(task.model), task.clients.records
    task.layout.load(model, w)
    steps = torch.optim.SGD(model.parameters(), lr=LR)
    for picks in plan.local.indices(task.clients.size(silo), Seeded(0).at(t, "batches", silo), t, silo):
        own = torch.from_numpy(task.clients.rows(silo)[picks])
        steps.zero_grad()
        task.losses(model(records.x[own]), records.y[own]).mean().backward()  # type: ignore[no-untyped-call]
        steps.step()
    return flat(model)


@pytest.mark.parametrize("name", PLAIN)
def test_a_clip_that_binds_or_noise_is_not_plain_sgd(name: str) -> None:
    """The limit is a limit: the same comparison fails with privacy switched on."""
    task, plan = data(name), free(name, RECORD_LEVEL[name][0])
    wanted = trained(task, plan, lambda parameters: torch.optim.SGD(parameters, lr=LR))
    clipped = replace(plan, local=replace(plan.local, clip_norm=0.05))  # type: ignore[type-var]
    noised = replace(plan, release=CentralNoise(Gaussian(1e-4)))
    assert not torch.allclose(final(clipped, task), wanted, atol=1e-3)
    assert not torch.allclose(final(noised, task), wanted, atol=1e-3)


def test_every_recipe_of_unit_record_has_its_limit() -> None:
    tested = {*PLAIN, *ADAM, "accelerated_minibatch_sgd", "noisy_local_sgd"}
    assert tested == set(RECORD_LEVEL)
    for name, settings in RECORD_LEVEL.items():
        assert all(RECIPES[name](**each).unit == "record" for each in settings)
