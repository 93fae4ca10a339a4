"""Promises of the Moreau envelope: its closed forms are the prox, its solver is as close as it says, it is smooth."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from tests.silos import silos, targets
from tests.tiny import noise, seeded
from torch import Tensor, nn

from sordino.data.clients import Clients, Records
from sordino.engines.dense_clients import LinearClients
from sordino.engines.inprocess import InProcess
from sordino.engines.objectives import ManyClients
from sordino.errors import PlanError
from sordino.parts.gradients import Ball, Batch, Bounded, Moreau
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.losses import Loss, Quantile
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.record_solvers import BatchGradient
from sordino.rng import Seeded
from sordino.task import Task

CLOSED: list[str | Loss] = ["absolute", "hinge", Quantile(0.8)]


@cache
def pair(loss: str | Loss, outputs: int = 1, bias: bool = True) -> Task:
    """One silo of twelve records with two features."""
    y = targets(loss, outputs, 12, seed=9)
    return Task(seeded(nn.Linear(2, outputs, bias=bias)), Clients.of([Records(noise(12, 2, seed=8), y)]), loss=loss)


def envelope(ours: Any, w: Tensor, x: Tensor, y: Tensor, beta: float, steps: int = 200) -> Tensor:
    """The gradient of one record's envelope at w [d]."""
    found: Tensor = ours.clipped(w[None], Batch(x[None, None], y[None, None]), Ball(envelope=Moreau(beta, steps)))
    return found[0].clone()


def brute(loss: str | Loss, w: Tensor, x: Tensor, y: Tensor, beta: float) -> Tensor:
    """beta (w - argmin_v f(v) + beta / 2 ||w - v||^2), found by a search that knows nothing of the loss."""
    task, start = pair(loss), w.double().numpy()
    one, target = torch.cat([x, torch.ones(1)]).double().numpy(), y.double()[None]

    def cost(v: Any) -> float:
        value = float(task.losses(torch.tensor([[float(v @ one)]], dtype=torch.float64), target)[0])
        return value + beta / 2 * float(np.square(start - v).sum())

    options = {"xatol": 1e-9, "fatol": 1e-15, "maxiter": 4000, "maxfev": 4000}
    found = minimize(cost, start - 0.3 / beta * one, method="Nelder-Mead", options=options)
    again = minimize(cost, found.x, method="Nelder-Mead", options=options)
    return torch.from_numpy(beta * (start - again.x)).float()


@pytest.mark.parametrize("beta", [0.3, 2.0, 20.0])
@pytest.mark.parametrize("loss", CLOSED)
def test_the_closed_form_is_the_prox_that_a_search_finds(loss: str | Loss, beta: float) -> None:
    task = pair(loss)
    ours, table = LinearClients(task), task.clients.records
    for i in range(4):
        w = noise(3, seed=20 + i)
        found = envelope(ours, w, table.x[i], table.y[i], beta)
        assert torch.allclose(found, brute(loss, w, table.x[i], table.y[i], beta), atol=2e-3)


def test_the_closed_form_meets_the_linear_piece_and_the_flat_ones() -> None:
    """A check that the cases above visit both: slopes inside their range and at its ends."""
    sizes = {}
    for loss in CLOSED:
        task, slopes = pair(loss), []
        for i in range(12):
            x, y = task.clients.records.x[i], task.clients.records.y[i]
            found = envelope(LinearClients(task), noise(3, seed=20 + i), x, y, 0.3)
            slopes.append(round(float(found[-1]), 6))  # the bias: d f_beta / d z itself
        sizes[loss] = slopes
    assert any(-1 < slope < 1 and slope != 0 for slope in sizes["absolute"])
    assert all(-1.000001 <= slope <= 1.000001 for slope in sizes["absolute"])
    assert 0.0 in sizes["hinge"]
    assert all(-0.800001 <= slope <= 0.200001 for slope in sizes[Quantile(0.8)])


@pytest.mark.parametrize(
    ("loss", "outputs", "steps"),
    [*((loss, outputs, steps) for loss in CLOSED for outputs in (1, 2) for steps in (5, 40)), ("absolute", 2, 500)],
)
def test_the_inner_solver_is_as_close_as_it_says(loss: str | Loss, outputs: int, steps: int) -> None:
    """||v - prox||^2 <= 4 G^2 / (beta^2 (steps + 1)); a step never leaves L / beta of w, so G <= 2 L."""
    task, beta = pair(loss, outputs), 1.5
    exact, solver, table = LinearClients(task), ManyClients(task), task.clients.records
    for i in range(2):
        w, x, y = noise(task.layout.size, seed=40 + i), table.x[i], table.y[i]
        wanted, found = envelope(exact, w, x, y, beta), envelope(solver, w, x, y, beta, steps)
        steepest = float(torch.cat([x, torch.ones(1)]).norm())
        assert float((found - wanted).square().sum()) <= 16 * steepest**2 / (steps + 1)
        if steps == 500:
            assert float((found - wanted).norm()) < 0.06 * max(1.0, steepest)


@given(loss=st.sampled_from(CLOSED), beta=st.floats(0.05, 50), seed=st.integers(0, 500), far=st.floats(1e-3, 3))
@settings(max_examples=80, deadline=None)
def test_the_gradient_of_the_envelope_is_beta_lipschitz(loss: str | Loss, beta: float, seed: int, far: float) -> None:
    task = pair(loss)
    ours, i, table = LinearClients(task), seed % 12, task.clients.records
    one = noise(3, seed=seed)
    other = one + far * noise(3, seed=seed + 1)
    slopes = [envelope(ours, w, table.x[i], table.y[i], beta) for w in (one, other)]
    assert float((slopes[0] - slopes[1]).norm()) <= beta * float((one - other).norm()) * (1 + 1e-4) + 1e-5


def test_a_large_beta_leaves_the_loss_as_it_was() -> None:
    for loss in CLOSED:
        task = pair(loss)
        ours, table, w = LinearClients(task), task.clients.records, noise(1, 3, seed=3)
        batch = Batch(table.x[None], table.y[None])
        plain = ours.clipped(w, batch, Ball(0.8)).clone()
        assert torch.allclose(ours.clipped(w, batch, Ball(0.8, envelope=Moreau(1e6))), plain, atol=1e-3)


def test_the_envelope_does_not_depend_on_the_norm_of_the_clip() -> None:
    task = pair("absolute")
    ours, table, w = LinearClients(task), task.clients.records, noise(1, 3, seed=3)
    found = [
        ours.clipped(w, Batch(table.x[None], table.y[None]), Ball(1e9, norm, Moreau(0.5))).clone() for norm in (1, 2)
    ]
    assert torch.allclose(found[0], found[1], atol=1e-5)


@pytest.mark.parametrize(("loss", "gradient"), [("absolute", "LinearClients"), ("mse", "ManyClients")])
def test_the_engine_takes_the_closed_form_where_there_is_one(loss: str | Loss, gradient: str) -> None:
    from tests.silos import SIZES, planned

    plan = planned(local=BatchGradient(FixedRecords(2, SIZES), 1.0, gradient=Moreau(1.0)))
    assert InProcess(path="batched").prepare(plan, silos(loss, 1), Seeded(0)).header["gradient"] == gradient


def test_as_the_gradient_of_local_sgd_it_is_the_mean_over_records() -> None:
    task = pair("absolute")
    ours, table, w = LinearClients(task), task.clients.records, noise(2, 3, seed=3)
    mask = torch.tensor([[True] * 12, [True] * 4 + [False] * 8])
    batch = Batch(table.x.repeat(2, 1, 1), table.y.repeat(2, 1), mask)
    found = Moreau(0.7).at(ours, w, batch, None)  # type: ignore[arg-type]
    for row, count in ((0, 12), (1, 4)):
        each = [envelope(ours, w[row], table.x[i], table.y[i], 0.7) for i in range(count)]
        assert torch.allclose(found[row], torch.stack(each).mean(0), atol=1e-5)


def test_a_bounded_gradient_is_in_its_ball_and_not_touched_inside() -> None:
    from sordino.parts.gradients import Anchor

    task = pair("absolute")
    ours, table, w = LinearClients(task), task.clients.records, noise(2, 3, seed=3)
    batch, anchor = Batch(table.x.repeat(2, 1, 1), table.y.repeat(2, 1)), Anchor(w[0])
    plain = ours.gradient(w, batch).clone()
    for norm in (1, 2):
        found = Bounded(0.05, norm).at(ours, w, batch, anchor)
        assert torch.allclose(found.norm(p=norm, dim=1), torch.full((2,), 0.05), rtol=1e-5)
        assert torch.allclose(found / found.norm(dim=1, keepdim=True), plain / plain.norm(dim=1, keepdim=True))
        assert torch.allclose(Bounded(1e3, norm).at(ours, w, batch, anchor), plain)


@pytest.mark.parametrize("build", [lambda: Moreau(0.0), lambda: Moreau(1.0, 0), lambda: Bounded(0.0)])
def test_a_smoothing_or_a_ball_that_means_nothing_is_refused(build: Any) -> None:
    with pytest.raises(PlanError) as refused:
        build()
    assert refused.value.rule == "gradient"
    assert LocalSgd(lr=0.1, steps=1, gradient=Moreau(1.0)).gradient == Moreau(1.0)
