"""Promises of averaging, projection and the regulariser of plain server steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.tiny import noise
from torch import Tensor

from sordino.errors import PlanError
from sordino.parts.server_optimizers import Average, Sgd, project


def outgoing(server: Sgd, rounds: int) -> tuple[list[Tensor], Tensor]:
    """The models that went out, in float64, and the result."""
    memory, sent = server.init(noise(9, seed=99)), []
    for t in range(rounds):
        sent.append(server.query(memory).double())
        memory = server.step(memory, noise(9, seed=t), t)
    return sent, server.result(memory)


@pytest.mark.parametrize("growth", [1.0, 1.3, 1.0 + 1e-9, 10.0])
@pytest.mark.parametrize("after", [0, 4])
def test_the_average_is_the_weighted_sum_of_the_models_that_went_out(growth: float, after: int) -> None:
    sent, found = outgoing(Sgd(lr=0.3, average=Average(growth, after)), 12)
    weights = torch.tensor([growth**r for r in range(12 - after)], dtype=torch.float64)
    wanted = (weights[:, None] * torch.stack(sent[after:])).sum(0) / weights.sum()
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("growth", [1.0, 1.0001, 1.3, 1e300])
def test_a_hundred_thousand_rounds_do_not_overflow(growth: float) -> None:
    server = Sgd(lr=1e-5, average=Average(growth))
    memory, push = server.init(torch.zeros(1, dtype=torch.float64)), -torch.ones(1, dtype=torch.float64)
    for t in range(100_000):
        memory = server.step(memory, push, t)
    ages = torch.arange(100_000, dtype=torch.float64)
    weights = torch.exp(-ages * math.log(growth))  # of w_{R-1-age} = (R-1-age) 1e-5
    wanted = float((weights * (99_999 - ages)).sum() / weights.sum()) * 1e-5
    assert float(server.result(memory)) == pytest.approx(wanted, rel=1e-9)


def test_before_the_average_begins_the_result_is_the_last_model_that_went_out() -> None:
    sent, found = outgoing(Sgd(average=Average(1.5, after=7)), 5)
    assert torch.equal(found.double(), sent[-1])
    server = Sgd(average=Average())
    assert torch.equal(server.result(server.init(noise(3))), noise(3))


def test_clients_start_at_the_last_model_not_at_the_average() -> None:
    plain, _ = outgoing(Sgd(lr=0.3), 6)
    averaged, _ = outgoing(Sgd(lr=0.3, average=Average(1.2)), 6)
    assert all(torch.equal(a, b) for a, b in zip(plain, averaged, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_regulariser_steps_like_torch(momentum: float) -> None:
    params = torch.nn.Parameter(noise(9, seed=99))
    optimizer = torch.optim.SGD([params], lr=0.3, momentum=momentum, weight_decay=0.2)
    for t in range(8):
        params.grad = noise(9, seed=t)
        optimizer.step()
    memory = Sgd(lr=0.3, momentum=momentum, weight_decay=0.2).init(noise(9, seed=99))
    for t in range(8):
        memory = Sgd(lr=0.3, momentum=momentum, weight_decay=0.2).step(memory, noise(9, seed=t), t)
    assert torch.allclose(memory["params"], params.detach(), rtol=1e-5, atol=1e-6)


def test_no_model_leaves_the_ball() -> None:
    server, start = Sgd(lr=2.0, momentum=0.9, ball=0.5, average=Average()), noise(9, seed=99)
    memory = server.init(start)
    for t in range(60):
        memory = server.step(memory, noise(9, seed=t), t)
        assert float((server.query(memory) - start).double().norm()) <= 0.5 * (1 + 1e-6)
        assert float((server.result(memory) - start).double().norm()) <= 0.5 * (1 + 1e-6)
    assert torch.equal(memory["center"], start)


def test_the_projection_is_the_nearest_point_found_by_brute_force() -> None:
    center = torch.tensor([1.0, -2.0], dtype=torch.float64)
    angle = torch.linspace(0, 2 * math.pi, 2001, dtype=torch.float64)[:-1]
    clip_norm = torch.linspace(0, 1.5, 601, dtype=torch.float64)
    disc = center + torch.stack([torch.outer(clip_norm, angle.cos()), torch.outer(clip_norm, angle.sin())], -1).reshape(
        -1, 2
    )
    for seed in range(20):
        point = center + 2 * noise(2, seed=seed).double()
        nearest = disc[(disc - point).square().sum(-1).argmin()]
        assert torch.allclose(project(point, center, 1.5), nearest, rtol=0, atol=3e-3)


def test_a_point_inside_the_ball_stays_where_it_is() -> None:
    assert torch.equal(project(noise(5), torch.zeros(5), 100.0), noise(5))


def test_the_memory_of_a_plain_server_is_what_it_was() -> None:
    assert set(Sgd().init(noise(3))) == {"params"}
    assert set(Sgd(momentum=0.5).init(noise(3))) == {"params", "velocity"}
    full = Sgd(momentum=0.5, weight_decay=0.1, ball=1.0, average=Average())
    memory = full.init(noise(3))
    assert set(memory) == {"params", "velocity", "center", "average", "count"}
    assert set(full.step(memory, noise(3), 0)) == set(memory)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sgd(weight_decay=-1.0),
        lambda: Sgd(weight_decay=math.nan),
        lambda: Sgd(ball=0.0),
        lambda: Sgd(ball=math.inf),
        lambda: Average(growth=0.9),
        lambda: Average(growth=math.inf),
        lambda: Average(after=-1),
    ],
)
def test_impossible_extras_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(PlanError, match="server"):
        make()
