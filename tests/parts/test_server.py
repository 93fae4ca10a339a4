"""Promises of the server: torch's own optimizers, with the mean message as the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from tests.tiny import noise
from torch import Tensor

from sordino.errors import PlanError
from sordino.parts.schedules import Decay
from sordino.parts.server_optimizers import Adagrad, Adam, ServerOptimizer, Sgd, Yogi

MEANS = [noise(11, seed=seed) * 10.0 ** (seed % 3 - 1) for seed in range(8)]
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def ours(server: ServerOptimizer) -> Tensor:
    memory = server.init(noise(11, seed=99))
    for t, mean in enumerate(MEANS):
        memory = server.step(memory, mean, t)
    return server.result(memory)


def theirs(make: Make, lr_at: Callable[[int], float] | None = None) -> Tensor:
    params = torch.nn.Parameter(noise(11, seed=99))
    optimizer = make([params])
    for t, mean in enumerate(MEANS):
        if lr_at:
            optimizer.param_groups[0]["lr"] = lr_at(t)
        params.grad = mean.clone()
        optimizer.step()
    return params.detach()


@pytest.mark.parametrize(
    ("server", "make"),
    [
        (Sgd(), lambda p: torch.optim.SGD(p, lr=1.0)),
        (Sgd(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
        (Sgd(lr=0.3, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)),
        (Adam(), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.99), eps=1e-3)),
        (
            Adam(lr=0.1, beta1=0.5, beta2=0.999, floor=1e-8),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.999), eps=1e-8),
        ),
        (Adagrad(lr=0.1, floor=1e-3), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3)),
        (Adam(lr=0.1, beta1=0.0, beta2=0.0), lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.0), eps=1e-3)),
    ],
    ids=lambda value: str(value) if isinstance(value, ServerOptimizer) else "",
)
def test_the_server_steps_like_torch(server: ServerOptimizer, make: Make) -> None:
    assert torch.allclose(ours(server), theirs(make), rtol=1e-5, atol=1e-6)


def test_yogi_is_its_formula_coordinate_by_coordinate() -> None:
    server = Yogi(lr=0.1, beta1=0.5, beta2=0.8, floor=0.01)
    start = noise(11, seed=99)
    w, m, v = start.tolist(), [0.0] * 11, [0.0] * 11
    for mean in MEANS:
        for i, g in enumerate(mean.tolist()):
            m[i] = 0.5 * m[i] + 0.5 * g
            v[i] = v[i] - 0.2 * g * g * math.copysign(1.0, v[i] - g * g) * (v[i] != g * g)
            w[i] -= 0.1 * m[i] / (math.sqrt(v[i]) + 0.01)
    assert torch.allclose(ours(server), torch.tensor(w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_schedule_sets_the_rate_of_each_round(momentum: float) -> None:
    lr = Decay(0.5, 0.8)
    wanted = theirs(lambda p: torch.optim.SGD(p, lr=1.0, momentum=momentum), lr.at)
    assert torch.allclose(ours(Sgd(lr=lr, momentum=momentum)), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("server", [Sgd(lr=0.3), Sgd(lr=0.3, momentum=0.9), Adam(), Yogi(), Adagrad()], ids=str)
def test_a_step_leaves_the_memory_before_it_as_it_was(server: ServerOptimizer) -> None:
    before = server.init(noise(11))
    kept = {name: tensor.clone() for name, tensor in before.items()}
    after = server.step(server.step(before, MEANS[0], 0), MEANS[1], 1)
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    assert set(after) == set(before)  # a checkpoint has one shape for the whole run
    assert not torch.equal(after["params"], before["params"])


@pytest.mark.parametrize("server", [Sgd(), Sgd(momentum=0.5), Adam(), Yogi(), Adagrad()], ids=str)
def test_clients_start_where_the_result_is(server: ServerOptimizer) -> None:
    memory = server.step(server.init(noise(11)), MEANS[0], 0)
    assert torch.equal(server.query(memory), server.result(memory))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sgd(momentum=1.0),
        lambda: Sgd(momentum=-0.1),
        lambda: Adam(beta1=1.0),
        lambda: Yogi(beta2=1.0),
        lambda: Adagrad(floor=0.0),
        lambda: Adam(beta2=-0.1),
        lambda: Adam(floor=0.0),
    ],
)
def test_impossible_servers_are_refused(make: Callable[[], ServerOptimizer]) -> None:
    with pytest.raises(PlanError, match="server"):
        make()
