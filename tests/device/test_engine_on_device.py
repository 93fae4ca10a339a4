"""Promise: the federated engine runs every recipe where the model is, and ends with the CPU's numbers to 1e-5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.device import sim
from tests.device.loops import CLASSES, DEVICE, NETS, net
from tests.engines.cases import CASES
from tests.recipes.test_recipes import OWN, built, data
from tests.tiny import plan, rounds
from torch import Tensor

from sordino.engines.inprocess import InProcess
from sordino.parts import (
    Adaptive,
    Banded,
    Clip,
    CorrelatedNoise,
    Everyone,
    FixedSize,
    Gaussian,
    LocalSgd,
    RoundRobin,
    Sam,
)
from sordino.parts.local_solvers import Scaffold
from sordino.plan import Plan
from sordino.recipes import RECIPES
from sordino.task import Task

SIZES = (5, 3, 6, 4, 7, 4)


def device_engine(each: InProcess | None = None) -> InProcess:
    return replace(each or InProcess(), device=str(DEVICE))


def end_of(plan: Plan, task: Task, engine: InProcess) -> tuple[Tensor, dict[str, Any]]:
    """The model that a run ends with, and its last figures."""
    last = rounds(plan, task, engine, seed=5)[-1]
    return plan.server.result(last.state.memory).cpu(), {**last.metrics}


def check_equal(plan: Plan, task: Task, each: InProcess | None = None) -> None:
    cpu, figures = end_of(plan, task, each or InProcess())
    device, there = end_of(plan, task, device_engine(each))
    assert not torch.equal(cpu, task.layout.flatten(task.model))
    assert float((cpu - device).abs().max()) <= 1e-5
    assert there == pytest.approx(figures, abs=1e-5)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_ends_on_the_device_as_on_the_cpu(name: str) -> None:
    for own in OWN[name]:
        check_equal(built(name, own), data(own))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.streams.mode == "simulation"])
def test_a_case_of_the_engines_ends_on_the_device_as_on_the_cpu(name: str) -> None:
    case = CASES[name]
    if "Dropout" in str(case.task.model):
        pytest.skip("dropout draws from the generator of the device: other masks than on the CPU")
    check_equal(case.plan, case.task, case.each)


def federation(name: str) -> Task:
    torch.manual_seed(6)
    clients = [(NETS[name][1](size), torch.randint(CLASSES, (size,))) for size in SIZES]
    return Task.of(net(name), clients, test=(NETS[name][1](20), torch.randint(CLASSES, (20,))))


LOCAL = LocalSgd(lr=0.1, epochs=2, batch=3)
PLANS: dict[str, Plan] = {
    "average": plan(local=LOCAL),
    "sam": plan(local=replace(LOCAL, gradient=Sam(0.05))),
    "adaptive": plan(local=LOCAL, encode=(Clip(Adaptive(0.5)),)),
    "scaffold": plan(local=Scaffold(lr=0.1, steps=3, batch=3)),
    "fixed size": plan(local=LOCAL, clients=FixedSize(len(SIZES), 3)),
    "banded": plan(
        rounds=4, local=LOCAL, clients=RoundRobin(len(SIZES), 3), release=CorrelatedNoise(Gaussian(1.0), Banded(2))
    ),
}


@pytest.mark.parametrize("path", ["sequential", "batched"])
@pytest.mark.parametrize("local", PLANS)
@pytest.mark.parametrize("name", ["conv", "group_norm", "lstm", "embedding"])
def test_nets_and_solvers_end_on_the_device_as_on_the_cpu(name: str, local: str, path: Any) -> None:
    if name == "lstm" and path == "batched":
        pytest.skip("a recurrent layer has no rule for clients side by side, on any device")
    task = federation(name)
    check_equal(PLANS[local].fitted(), task, InProcess(path))


@pytest.mark.simulated
def test_evaluation_runs_where_the_model_is() -> None:
    task, quiet = federation("conv"), plan(local=LOCAL)
    with sim.counted() as found:
        end_of(quiet, task, device_engine())
    with sim.counted() as without:
        end_of(quiet, replace(task, test=None), device_engine())
    assert found["operations"] - without["operations"] > 10


def counts_of_a_round(name: str, clients: int, path: Any) -> dict[str, int]:
    torch.manual_seed(6)
    records = [(NETS[name][1](4), torch.randint(CLASSES, (4,))) for _ in range(clients)]
    task, many = Task.of(net(name), records), plan(local=LOCAL, rounds=3)
    many = replace(many, clients=Everyone(clients))
    totals = []
    for last in (2, 3):
        with sim.counted() as found:
            end_of(replace(many, rounds=last), task, device_engine(InProcess(path)))
        totals.append(found)
    return {name: totals[1][name] - totals[0][name] for name in totals[1]}


@pytest.mark.simulated
def test_a_round_of_batched_clients_stalls_a_fixed_number_of_times() -> None:
    few, many = (counts_of_a_round("mlp", clients, "batched")["stalls"] for clients in (4, 16))
    assert few == many <= 8


@pytest.mark.simulated
def test_a_round_of_single_clients_stalls_per_client_and_not_per_tensor() -> None:
    for name in ("linear", "transformer"):
        few, many = (counts_of_a_round(name, clients, "sequential")["stalls"] for clients in (4, 16))
        assert many - few <= 12 * 2
