"""Promises of the gradient oracles: the slope at the worst point nearby, a pull into the ball, one on every path."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.tiny import final, mlp, noise, plan, rounds, seeded, task
from torch import Tensor, nn

from sordino.engines.dense_clients import LinearClients
from sordino.engines.inprocess import InProcess
from sordino.engines.objectives import ManyClients, OneClient
from sordino.errors import PlanError
from sordino.parts.encoding import Clip
from sordino.parts.gradients import Anchor, Batch, Blur, Gradient, Plain, Proximal, Sam
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.releases import NoNoise

NOTHING = Batch(torch.empty(0), torch.empty(0))
HERE = Anchor(torch.zeros(2))


class Bowl:
    """f(w) = w1^2 / 2 + 2 w2^2, whose slope is (w1, 4 w2); counts how often it is asked."""

    trainable = 2

    def __init__(self) -> None:
        self.asked: list[Tensor] = []

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        self.asked.append(w.clone())
        return w * torch.tensor([1.0, 4.0])


def slope(gradient: Gradient, w: list[list[float]], anchor: Anchor = HERE) -> Tensor:
    return gradient.at(cast(Any, Bowl()), torch.tensor(w), NOTHING, anchor)


# ---- sharpness ------------------------------------------------------------------------------------------------------


def test_sam_takes_the_slope_at_the_top_of_a_ball_around_each_client() -> None:
    """At (3, 1): g = (3, 4), g / ||g|| = (.6, .8), so with rho = .5 the slope is taken at (3.3, 1.4)."""
    found = slope(Sam(0.5), [[3.0, 1.0], [-3.0, -1.0], [0.0, 2.0]])
    assert torch.allclose(found, torch.tensor([[3.3, 5.6], [-3.3, -5.6], [0.0, 10.0]]), atol=1e-6)


def test_sam_where_the_slope_is_zero_is_zero_and_finite() -> None:
    assert torch.equal(slope(Sam(0.5), [[0.0, 0.0]]), torch.zeros(1, 2))
    assert torch.equal(slope(Sam(0.5, adaptive=True), [[0.0, 0.0]]), torch.zeros(1, 2))


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_with_rho_zero_is_plain_and_asks_once(adaptive: bool) -> None:
    bowl, w = Bowl(), torch.tensor([[3.0, 1.0], [0.0, 0.0]])
    assert torch.equal(Sam(0.0, adaptive).at(cast(Any, bowl), w, NOTHING, HERE), slope(Plain(), w.tolist()))
    assert len(bowl.asked) == 1


def test_asam_climbs_by_the_square_of_each_weight() -> None:
    """At (3, 1): T = (3.01, 1.01), T g = (9.03, 4.04), and the step is .5 T^2 g / ||T g||."""
    length = math.hypot(9.03, 4.04)
    top = [3 + 0.5 * 3.01**2 * 3 / length, 1 + 0.5 * 1.01**2 * 4 / length]
    assert torch.allclose(slope(Sam(0.5, adaptive=True), [[3.0, 1.0]]), torch.tensor([[top[0], 4 * top[1]]]))
    assert torch.allclose(slope(Sam(0.5, adaptive=True), [[-3.0, -1.0]]), torch.tensor([[-top[0], -4 * top[1]]]))


def test_asam_does_not_see_the_scale_of_the_weights_and_sam_does() -> None:
    """w -> A w with f(A^-1 w): the slope becomes A^-1 g, and the step must become A times the step (0.01 aside)."""
    w, g, a = 100 * noise(1, 6, seed=1), noise(1, 6, seed=2), torch.tensor([[3.0, 7.0, 20.0, 2.0, 9.0, 5.0]])
    adaptive, plain = Sam(0.5, adaptive=True), Sam(0.5)
    assert torch.allclose(adaptive.ascent(a * w, g / a), a * adaptive.ascent(w, g), rtol=1e-2)
    assert not torch.allclose(plain.ascent(a * w, g / a), a * plain.ascent(w, g), rtol=0.5)


def logistic(w: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Slope of the mean cross entropy of Linear(4, 3) by its formula, in float64: first weights, then biases."""
    scores = x @ w[:12].reshape(3, 4).T + w[12:]
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    residual = (chances - np.eye(3)[y]) / len(y)
    return np.concatenate([(residual.T @ x).ravel(), residual.sum(0)])


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("objective", [LinearClients, ManyClients, OneClient])
def test_sam_of_a_logistic_model_is_the_formula_on_every_objective(objective: Any, adaptive: bool) -> None:
    data = task((5,), seeded(nn.Linear(4, 3)))
    records, start = data.clients.records, data.layout.flatten(data.model)
    ours = objective(data)
    batch = Batch(records.x[None], records.y[None])
    found = Sam(0.3, adaptive).at(ours, ours.place(start, 1), batch, Anchor(start))
    w, x, y = start.double().numpy(), records.x.double().numpy(), records.y.numpy()
    g = logistic(w, x, y)
    scale = np.abs(w) + 0.01 if adaptive else np.ones_like(w)
    wanted = logistic(w + 0.3 * scale**2 * g / np.linalg.norm(scale * g), x, y)
    assert np.allclose(found[0].numpy(), wanted, atol=1e-5)
    assert not np.allclose(wanted, g, atol=1e-3)


@pytest.mark.parametrize("rho", [-0.1, math.nan, math.inf])
def test_a_rho_that_is_not_a_finite_number_from_zero_up_is_refused(rho: float) -> None:
    with pytest.raises(PlanError, match="rho"):
        Sam(rho)


# ---- the pull into the ball -----------------------------------------------------------------------------------------


def penalty(w: Tensor, start: Tensor, strength: float, clip_norm: float) -> Tensor:
    return strength / 2 * ((w - start).square().sum() - clip_norm**2).clamp(min=0)


def test_blur_adds_the_slope_of_its_penalty() -> None:
    start, clip_norm, strength = noise(2, seed=3), 1.0, 0.7
    rows = start + torch.tensor([[0.1, 0.2], [0.6, -0.7], [0.9, 0.9], [-3.0, 1.0], [0.0, 0.0]])
    found = Blur(strength).at(cast(Any, Bowl()), rows, NOTHING, Anchor(start, clip_norm)) - slope(
        Plain(), rows.tolist()
    )
    leaves = rows.clone().requires_grad_()
    total = sum((penalty(row, start, strength, clip_norm) for row in leaves), torch.zeros(()))
    (wanted,) = torch.autograd.grad(total, leaves)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert [bool(row.any()) for row in wanted] == [False, False, True, True, False]


def test_blur_inside_the_ball_is_its_own_oracle_exactly() -> None:
    inside, anchor = [[3.0, 1.0], [2.9, 1.2]], Anchor(torch.tensor([3.0, 1.0]), 0.5)
    assert torch.equal(slope(Blur(5.0), inside, anchor), slope(Plain(), inside))
    assert torch.equal(slope(Blur(5.0, Sam(0.5)), inside, anchor), slope(Sam(0.5), inside))
    assert torch.equal(slope(Blur(5.0), [[9.0, 9.0]], HERE), slope(Plain(), [[9.0, 9.0]]))  # no clip norm: no outside


def test_blur_pulls_on_top_of_another_oracle() -> None:
    found = slope(Blur(2.0, Sam(0.5)), [[3.0, 1.0]], Anchor(torch.tensor([1.0, 1.0]), 1.0))
    assert torch.allclose(found, torch.tensor([[3.3 + 4.0, 5.6]]), atol=1e-6)


def test_fedprox_adds_the_slope_of_half_its_strength_times_the_squared_distance() -> None:
    start, rows = noise(2, seed=3), [[0.5, 1.0], [-3.0, 2.0]]
    found = slope(Proximal(0.7), rows, Anchor(start)) - slope(Plain(), rows)
    assert torch.allclose(found, 0.7 * (torch.tensor(rows) - start), atol=1e-5)
    assert torch.equal(slope(Proximal(0.0), rows, Anchor(start)), slope(Plain(), rows))
    pulled = slope(Proximal(0.7, Sam(0.5)), rows, Anchor(start)) - slope(Sam(0.5), rows)
    assert torch.allclose(pulled, found, atol=1e-5)


def test_the_stronger_the_pull_of_fedprox_the_nearer_clients_stay() -> None:
    def length(strength: float) -> float:
        local = LocalSgd(lr=0.1, epochs=5, gradient=Proximal(strength))
        free = plan(rounds=1, local=local, encode=(Clip(50.0),), release=NoNoise())
        return rounds(free, task())[0].diagnostics["update_norm_mean"]

    assert length(5.0) < 0.7 * length(0.5) < 0.7 * length(0.0)


@pytest.mark.parametrize("strength", [-1.0, math.nan, math.inf])
def test_a_pull_that_is_not_a_finite_number_from_zero_up_is_refused(strength: float) -> None:
    with pytest.raises(PlanError, match="strength"):
        Blur(strength)
    with pytest.raises(PlanError, match="strength"):
        Proximal(strength)


def test_blur_pulls_with_the_radius_of_the_plans_clip() -> None:
    def length(clip_norm: float, strength: float) -> float:
        local = LocalSgd(lr=0.3, epochs=5, gradient=Blur(strength))
        free = plan(rounds=1, local=local, encode=(Clip(clip_norm),), release=NoNoise())
        return rounds(free, task())[0].diagnostics["update_norm_mean"]

    assert length(0.2, 1.0) < 0.8 * length(0.2, 0.0)
    assert length(50.0, 1.0) == length(50.0, 0.0)  # nobody leaves a ball as large as that


# ---- both paths of the engine ---------------------------------------------------------------------------------------

ORACLES: dict[str, Gradient] = {
    "sam": Sam(0.2),
    "asam": Sam(0.5, adaptive=True),
    "blur": Blur(0.8),
    "blur and sam": Blur(0.8, Sam(0.2)),
    "proximal": Proximal(0.8),
}


def conv_net() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: seeded(nn.Linear(4, 3)), (4,)),
    "mlp": (mlp, (4,)),
    "conv": (conv_net, (2, 6, 6)),
}


@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("model", MODELS)
def test_ragged_clients_give_one_result_on_both_paths_with_momentum_and_decay(model: str, oracle: str) -> None:
    build, shape = MODELS[model]
    data = task(model=build(), shape=shape)
    local = LocalSgd(lr=0.3, epochs=2, batch=2, momentum=0.5, weight_decay=0.1, gradient=ORACLES[oracle])
    same = plan(rounds=2, local=local, encode=(Clip(0.3),), release=NoNoise())
    batched, sequential = (final(same, data, InProcess(path=path)) for path in ("batched", "sequential"))
    assert torch.allclose(batched, sequential, rtol=0.0, atol=1e-5)
    plain = LocalSgd(lr=0.3, epochs=2, batch=2, momentum=0.5, weight_decay=0.1)
    other = final(plan(rounds=2, local=plain, encode=same.encode, release=NoNoise()), data, InProcess(path="batched"))
    assert not torch.allclose(batched, other, rtol=0.0, atol=1e-4)  # the oracle was really asked
