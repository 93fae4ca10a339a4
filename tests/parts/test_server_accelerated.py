"""Promises of the accelerated servers: the paper's recursions, the bound that is proved for them, and stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from tests.tiny import noise
from torch import Tensor

from sordino.errors import PlanError
from sordino.parts.schedules import Decay
from sordino.parts.server_optimizers import Accelerated, Adam, Average, Memory, ServerOptimizer, Sgd, Stage, Stages

Gradient = Callable[[Tensor], Tensor]
CURVES = torch.logspace(-3, 0, 20, dtype=torch.float64)  # a quadratic of smoothness 1, modulus 1e-3


def value(w: Tensor) -> float:
    return float(0.5 * (CURVES * w.square()).sum())


def slope(w: Tensor) -> Tensor:
    return CURVES * w


def far() -> Tensor:
    return noise(20, seed=3).double() * 3


def results(server: ServerOptimizer, start: Tensor, rounds: int, gradient: Gradient = slope) -> list[Tensor]:
    """The result after each round, with exact gradients at the model that goes out."""
    memory, seen = server.init(start), []
    for t in range(rounds):
        memory = server.step(memory, gradient(server.query(memory)), t)
        seen.append(server.result(memory))
    return seen


def after(server: ServerOptimizer, start: Tensor, means: list[Tensor]) -> Memory:
    memory = server.init(start)
    for t, mean in enumerate(means):
        memory = server.step(memory, mean, t)
    return memory


# ---- AC-SA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v", [1.0, 2.0, 8.0])
def test_without_noise_the_proved_rate_holds_in_every_round(v: float) -> None:
    distance = float(far().square().sum())
    for r, w in enumerate(results(Accelerated(v=v), far(), 300), start=1):
        assert value(w) <= 2 * v * distance / (r * (r + 1)) * (1 + 1e-12)


def test_it_needs_far_fewer_rounds_than_plain_steps() -> None:
    target = 1e-4 * value(far())
    plain = next(r for r, w in enumerate(results(Sgd(lr=1.0), far(), 5000)) if value(w) < target)
    fast = next(r for r, w in enumerate(results(Accelerated(v=1.0), far(), 5000)) if value(w) < target)
    assert fast * 5 < plain


def reference(start: Tensor, means: list[Tensor], v: float, mu: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Algorithm 2 as printed, with the argmin found from its normal equation: (md, w, ag) of every round."""
    w = ag = start
    rows = []
    for r, g in enumerate(means, start=1):
        alpha, eta = 2 / (r + 1), 4 * v / (r * (r + 1))
        bottom = eta + (1 - alpha**2) * mu
        md = (1 - alpha) * (mu + eta) / bottom * ag + alpha * ((1 - alpha) * mu + eta) / bottom * w
        w = (alpha * mu * md + ((1 - alpha) * mu + eta) * w - alpha * g) / (alpha * mu + (1 - alpha) * mu + eta)
        ag = alpha * w + (1 - alpha) * ag
        rows.append((md, w, ag))
    return rows


@pytest.mark.parametrize("mu", [0.0, 0.3, 5.0])
def test_the_three_sequences_are_those_of_the_paper(mu: float) -> None:
    server, start = Accelerated(v=1.7, mu=mu), noise(6, seed=1).double()
    means = [noise(6, seed=10 + r).double() for r in range(5)]
    memory = server.init(start)
    for t, (md, w, ag) in enumerate(reference(start, means, 1.7, mu)):
        assert torch.allclose(server.query(memory), md, rtol=0, atol=1e-12)
        memory = server.step(memory, means[t], t)
        assert torch.allclose(memory["prox"], w, rtol=0, atol=1e-12)
        assert torch.allclose(server.result(memory), ag, rtol=0, atol=1e-12)


def test_the_regulariser_is_the_same_loss_with_its_square_added() -> None:
    given = results(Accelerated(v=2.0, mu=0.1, weight_decay=0.4), far(), 20)
    written = results(Accelerated(v=2.0, mu=0.5), far(), 20, lambda w: slope(w) + 0.4 * w)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(given, written, strict=True))


def test_the_step_in_a_ball_is_the_argmin_found_by_brute_force() -> None:
    server, start = Accelerated(v=0.5, mu=0.4, ball=0.7), torch.tensor([0.2, -0.1], dtype=torch.float64)
    memory = server.init(start)
    angle = torch.linspace(0, 2 * math.pi, 2001, dtype=torch.float64)[:-1]
    clip_norm = torch.linspace(0, 0.7, 701, dtype=torch.float64)
    disc = start + torch.stack([torch.outer(clip_norm, angle.cos()), torch.outer(clip_norm, angle.sin())], -1).reshape(
        -1, 2
    )
    for r in range(1, 6):
        mean, md, w = noise(2, seed=50 + r).double(), server.query(memory), memory["prox"]
        alpha, eta = 2 / (r + 1), 2.0 / (r * (r + 1))
        near = alpha * (disc @ mean + 0.2 * (md - disc).square().sum(-1))
        cost = near + ((1 - alpha) * 0.2 + eta / 2) * (w - disc).square().sum(-1)
        memory = server.step(memory, mean, r - 1)
        assert torch.allclose(memory["prox"], disc[cost.argmin()], rtol=0, atol=3e-3)


def test_no_sequence_leaves_the_ball() -> None:
    server, start = Accelerated(v=0.5, mu=0.1, ball=0.5), noise(11, seed=4)
    memory = server.init(start)
    for t in range(50):
        memory = server.step(memory, 3 * noise(11, seed=t), t)
        for point in (memory["prox"], server.query(memory), server.result(memory)):
            assert float((point - start).double().norm()) <= 0.5 * (1 + 1e-6)


def test_clients_start_elsewhere_than_the_result() -> None:
    server = Accelerated(v=1.0)
    memory = after(server, noise(5), [noise(5, seed=1), noise(5, seed=2)])
    assert not torch.equal(server.query(memory), server.result(memory))


# ---- stages ----------------------------------------------------------------------------------------------------------


def test_stages_are_the_servers_run_by_hand_one_after_another() -> None:
    first, second, third = Accelerated(v=2.0), Sgd(lr=Decay(0.5, 0.5), momentum=0.5), Accelerated(v=1.0, mu=0.1)
    server = Stages((Stage(4, first), Stage(3, second), Stage(5, third)))
    assert server.rounds == 12
    one = results(first, far(), 4)[-1]
    two = results(second, one, 3)[-1]
    wanted = results(third, two, 5)
    found = results(server, far(), 12)
    assert torch.equal(found[6], two)
    assert all(torch.equal(a, b) for a, b in zip(found[7:], wanted, strict=True))


def test_a_stage_restarts_the_counter_of_acceleration() -> None:
    server = Stages((Stage(3, Accelerated(v=2.0)), Stage(3, Accelerated(v=2.0))))
    memory = after(server, far(), [slope(far())] * 3)
    assert int(memory["inner.count"]) == 0
    assert torch.equal(server.query(memory), server.result(memory))


def test_the_ball_of_every_stage_is_around_the_start_of_the_run() -> None:
    ball = Accelerated(v=0.2, ball=1.0)
    server = Stages((Stage(2, Sgd(lr=0.1)), Stage(2, ball), Stage(2, Stages((Stage(1, ball), Stage(1, ball))))))
    push = [torch.ones(4) * 10] * 6
    memory = after(server, torch.zeros(4), push)
    assert torch.equal(memory["center"], torch.zeros(4))
    assert float(memory["inner.inner.prox"].norm()) == pytest.approx(1.0, abs=1e-6)


def test_rounds_beyond_the_last_stage_stay_in_it() -> None:
    server = Stages((Stage(1, Sgd(lr=0.5)), Stage(1, Sgd(lr=0.25))))
    assert torch.allclose(after(server, torch.zeros(2), [torch.ones(2)] * 3)["inner.params"], torch.full((2,), -1.0))


SERVERS: list[ServerOptimizer] = [
    Accelerated(v=2.0),
    Accelerated(v=2.0, mu=0.5, weight_decay=0.1, ball=3.0),
    Stages((Stage(2, Accelerated(v=2.0, ball=1.0)), Stage(1, Sgd(ball=1.0, average=Average(1.5))), Stage(2, Adam()))),
]


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.kind)
def test_a_checkpoint_in_any_round_goes_on_as_if_nothing_had_happened(server: ServerOptimizer) -> None:
    """Through the file format of a checkpoint, which refuses tensors that share their storage."""
    means = [noise(7, seed=r) for r in range(5)]
    memory = stored = server.init(noise(7, seed=9))
    for t, mean in enumerate(means):
        stored = safetensors.torch.load(safetensors.torch.save(stored))
        memory, stored = server.step(memory, mean, t), server.step(stored, mean, t)
        assert torch.equal(server.query(memory), server.query(stored))
        assert torch.equal(server.result(memory), server.result(stored))
    safetensors.torch.save(stored)


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.kind)
def test_a_step_leaves_the_memory_before_it_as_it_was(server: ServerOptimizer) -> None:
    before = server.init(noise(7))
    kept = {name: tensor.clone() for name, tensor in before.items()}
    server.step(server.step(server.step(before, noise(7, seed=1), 0), noise(7, seed=2), 1), noise(7, seed=3), 2)
    assert all(torch.equal(before[name], kept[name]) for name in kept)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Accelerated(v=0.0),
        lambda: Accelerated(v=math.inf),
        lambda: Accelerated(v=math.nan),
        lambda: Accelerated(v=1.0, mu=-0.1),
        lambda: Accelerated(v=1.0, weight_decay=-0.1),
        lambda: Accelerated(v=1.0, ball=0.0),
        lambda: replace(Accelerated(v=1.0), ball=math.inf),
        lambda: Stage(0, Sgd()),
        lambda: Stages(()),
    ],
)
def test_impossible_servers_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(PlanError, match="server"):
        make()
