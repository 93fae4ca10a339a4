"""A parameter without dimensions (CLIP has one) is trained like any other, record by record and client by client."""

from __future__ import annotations

import pytest
import torch
from tests import tiny
from tests.dpsgd.loops import private, train
from tests.dpsgd.per_record.oracle import assert_equal, classes, clipped_loop
from torch import Tensor, nn

from sordino.dpsgd import ClippedGradient
from sordino.engines.inprocess import InProcess
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import AllRecords, PoissonRecords, RecordSampler
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import CentralNoise
from sordino.parts.samplers import Everyone
from sordino.training import train as train_plan


class Scaled(nn.Module):
    """Logits times exp(logit_scale)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x) * self.logit_scale.exp()
        return logits


@pytest.mark.parametrize("records", [AllRecords((8,)), PoissonRecords(4.0, (8,))], ids=["all", "poisson"])
def test_record_level_training_moves_a_scalar_parameter(records: RecordSampler) -> None:
    plan = tiny.plan(
        clients=Everyone(3), local=BatchGradient(records, 1.0), encode=(), release=CentralNoise(Gaussian(0.01))
    )
    done = train_plan(plan, tiny.task(sizes=(8, 8, 8), model=Scaled()))
    (scale,) = [p for p in done.model.parameters() if p.dim() == 0]
    assert scale.item() != 0.5


def test_a_scalar_parameter_has_the_clipped_gradient_of_the_definition() -> None:
    model, x, y = Scaled(), tiny.noise(6, 4), torch.arange(6) % 3
    assert_equal(ClippedGradient(model, classes).sum(x, y, 0.3), *clipped_loop(model, classes, x, y, 0.3))


def test_a_loop_trains_a_scalar_parameter() -> None:
    parts = private(Scaled())
    train(parts)
    (scale,) = [p for p in parts[0].parameters() if p.dim() == 0]
    assert scale.item() != 0.5


def test_both_paths_of_the_engine_agree_on_a_scalar_parameter() -> None:
    plan, task = tiny.plan(clients=Everyone(3)), tiny.task(sizes=(8, 8, 8), model=Scaled())
    one, other = (tiny.final(plan, task, InProcess(path=path)) for path in ("batched", "sequential"))
    torch.testing.assert_close(one, other, rtol=0.0, atol=1e-5)
