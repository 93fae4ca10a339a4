"""A run of silos whose unit is a record refuses a model or a loss that mixes records."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.dpsgd.per_record.mixers import CLASSES, HONEST, MIXERS, Later, Own, inputs
from torch import Tensor, nn

from sordino.data.program import Trust
from sordino.engines import checks
from sordino.engines.inprocess import InProcess
from sordino.errors import PlanError
from sordino.loop import run
from sordino.parts.losses import LossFunction
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import FixedRecords, PoissonRecords
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import Forward, LocalNoise
from sordino.parts.samplers import Everyone
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task

SIZE = 30


def task(model: nn.Module, loss: str | LossFunction = "cross_entropy", own_code: Trust | None = None) -> Task:
    x = inputs(2 * SIZE, HONEST["two layers"][1])
    y = torch.arange(2 * SIZE) % CLASSES
    return Task.of(model, [(x[:SIZE], y[:SIZE]), (x[SIZE:], y[SIZE:])], loss=loss, own_code=own_code)


def plan(rounds: int = 3) -> Plan:
    local = BatchGradient(FixedRecords(20, (SIZE,)), 1.0)
    return Plan(rounds=rounds, clients=Everyone(2), local=local, release=LocalNoise(Gaussian(2.0)), server=Sgd(lr=0.5))


def local(rounds: int = 1) -> Plan:
    solver = NoisyLocalSgd(PoissonRecords(20.0, (SIZE,)), 1.0, 2.0, 0.1, 3)
    return Plan(rounds=rounds, clients=Everyone(2), local=solver, release=Forward(), server=Sgd(lr=1.0))


@pytest.mark.parametrize("planned", [plan, local])
@pytest.mark.parametrize("name", MIXERS)
def test_silos_refuse_a_model_that_mixes_records(name: str, planned: Callable[[], Plan]) -> None:
    """By its graph: an operation reads along the records, or no graph can be captured."""
    torch.manual_seed(1)
    with pytest.raises(PlanError, match=r"other records|no graph can be captured"):
        list(run(planned(), task(MIXERS[name]()), engine=InProcess(path="sequential")))


@pytest.mark.parametrize("name", MIXERS)
def test_trusted_models_that_mix_records_are_found_by_a_look(name: str) -> None:
    torch.manual_seed(1)
    with pytest.raises(PlanError, match="other records"):
        list(run(plan(), task(MIXERS[name](), own_code="trusted"), engine=InProcess(path="sequential")))


def test_the_engine_itself_looks_where_nobody_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_check_trusted_code", lambda *_: None)
    torch.manual_seed(1)
    mixing = task(MIXERS["x minus its mean"](), own_code="trusted")
    with pytest.raises(PlanError, match="other records"):
        list(run(plan(), mixing, engine=InProcess(path="sequential")))


def test_mixing_that_begins_later_ends_the_run_before_its_certificate() -> None:
    torch.manual_seed(1)
    later = task(Later(after=30), own_code="trusted")
    rounds = run(plan(40), later, engine=InProcess(path="sequential"), streams=Seeded(3))
    with pytest.raises(PlanError, match=r"other records|stores no records"):
        list(rounds)


def in_batch(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="none")


def test_silos_refuse_a_loss_that_compares_records() -> None:
    torch.manual_seed(1)
    with pytest.raises(PlanError, match="other records"):
        list(run(plan(), task(Own(), in_batch)))


@pytest.mark.parametrize("path", ["batched", "sequential"])
@pytest.mark.parametrize("name", ["two layers", "own code with dropout and noise", "a parameter of its own", "dropout"])
def test_honest_models_run_in_silos(name: str, path: str) -> None:
    torch.manual_seed(1)
    random = "dropout" in name
    if random and path == "batched":
        path = "sequential"
    done = list(run(plan(), task(HONEST[name][0]()), engine=InProcess(path=path)))  # type: ignore[arg-type]
    assert len(done) == 3
