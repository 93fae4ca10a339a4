"""Promises of record-level solvers: each record is in a ball, one record moves a message by 1, noise is as stated."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.silos import LOSSES, SIZES, clipped_sum, planned, silos
from tests.tiny import clients, final, mlp, noise, seeded
from torch import Tensor, nn

from sordino.accounting.bounds import Norm
from sordino.data.clients import Clients, Records
from sordino.engines.dense_clients import LinearClients
from sordino.engines.inprocess import InProcess
from sordino.engines.objectives import ManyClients, OneClient
from sordino.errors import DataError, PlanError
from sordino.loop import check
from sordino.parts.encoding import Adaptive, Clip, ClipNorms, Public
from sordino.parts.gradients import Ball, Batch, Bounded, Moreau, Plain, Sam
from sordino.parts.losses import Loss, Quantile
from sordino.parts.record_samplers import AllRecords, FixedRecords, OnePass, PoissonRecords, RecordSampler
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import CentralNoise, Forward, NoNoise
from sordino.parts.schedules import Constant, Decay, Linear, Scaled, scaled
from sordino.parts.server_optimizers import Sgd
from sordino.rng import Seeded
from sordino.task import Task
from sordino_papers.grid import StackedClients

REAL = torch.tensor([[True] * 5, [True, False, True, False, False], [False] * 5])  # whole, ragged, nobody
M, B = REAL.shape


def conv_net() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 4, 3)))


def of_one_client(build: Any, data: Task, rows: Tensor, batch: Batch, ball: Ball) -> Tensor:
    """Client by client, each in the order of coordinates that its engine likes."""
    found = []
    for i, row in enumerate(rows):
        ours = build(data)
        own = Batch(batch.x[i : i + 1], batch.y[i : i + 1], None if batch.mask is None else batch.mask[i : i + 1])
        found.append(ours.outward(ours.clipped(ours.place(ours.inward(row), 1), own, ball))[0])
    return torch.stack(found)


# ---- the clipped sum is the sum of clipped records -------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, REAL], ids=["whole", "ragged"])
@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_a_linear_model_clips_as_a_loop_over_records(
    loss: str | Loss, outputs: int, norm: Norm, mask: Tensor | None
) -> None:
    for bias in (True, False):
        data = silos(loss, outputs, bias=bias)
        table, rows = data.clients.records, noise(M, data.layout.size, seed=1)
        where = torch.from_numpy(np.random.default_rng(3).integers(sum(SIZES), size=(M, B)))
        batch = Batch(table.x[where], table.y[where], mask)
        found = LinearClients(data).clipped(rows, batch, Ball(0.7, norm))
        for i in range(M):
            real = where[i] if mask is None else where[i][mask[i]]
            wanted = clipped_sum(data, rows[i], table.x[real], table.y[real], 0.7, norm)
            assert torch.allclose(found[i], wanted, atol=2e-5)


@pytest.mark.parametrize("mask", [None, REAL], ids=["whole", "ragged"])
@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize(("build", "shape"), [(mlp, (4,)), (conv_net, (1, 4, 4))], ids=["mlp", "conv"])
@pytest.mark.parametrize("engine", [ManyClients, OneClient])
def test_any_model_clips_as_a_loop_over_records(
    engine: Any, build: Any, shape: tuple[int, ...], norm: Norm, mask: Tensor | None
) -> None:
    data = Task.of(build(), clients((M * B,), shape))
    table, rows = data.clients.records, noise(M, data.layout.size, seed=1) * 0.3
    where = torch.arange(M * B).view(M, B)
    found = of_one_client(engine, data, rows, Batch(table.x[where], table.y[where], mask), Ball(0.3, norm))
    for i in range(M):
        real = where[i] if mask is None else where[i][mask[i]]
        wanted = clipped_sum(data, rows[i], table.x[real], table.y[real], 0.3, norm)
        assert torch.allclose(found[i], wanted, atol=1e-5)


def test_models_that_share_their_records_are_computed_in_one_product() -> None:
    for loss, outputs in LOSSES:
        data = silos(loss, outputs)
        table, rows = data.clients.records, noise(M, data.layout.size, seed=1)
        ours, many = StackedClients(data), (table.x.repeat(M, 1, 1), table.y.repeat(M, *[1] * table.y.dim()))
        wanted = ours.clipped(rows, Batch(*many), Ball(0.7)).clone()
        assert torch.allclose(ours.shared(rows, table.x, table.y, Ball(0.7)), wanted.double(), atol=1e-5)


def message(data: Task, sampler: RecordSampler, path: Literal["batched", "sequential"]) -> Tensor:
    """What each silo would send in round 1, before noise."""
    plan = planned(rounds=2, local=BatchGradient(sampler, 0.5), release=NoNoise())
    worker = InProcess(path=path).prepare(plan, data, Seeded(0))
    groups = [np.arange(len(SIZES))] if path == "batched" else [np.array([silo]) for silo in range(len(SIZES))]
    return torch.cat([worker.solve(group, Public(t=1), data.layout.flatten(data.model)) for group in groups])


@pytest.mark.parametrize("path", ["batched", "sequential"])
@pytest.mark.parametrize(
    "sampler", [AllRecords(SIZES), FixedRecords(3, SIZES), PoissonRecords(2.0, SIZES), OnePass(2, SIZES)], ids=str
)
@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 3), mlp], ids=["linear", "mlp"])
def test_a_message_is_the_clipped_sum_over_what_was_drawn_in_radii(
    build: Any, sampler: RecordSampler, path: Literal["batched", "sequential"]
) -> None:
    data = Task.of(seeded(build()), clients(SIZES))
    start = data.layout.flatten(data.model)
    found = message(data, sampler, path)
    for silo, size in enumerate(SIZES):
        picks = sampler.draw(1, silo, size, Seeded(0).at(1, "batches", silo))
        own = torch.from_numpy(data.clients.rows(silo)[picks])
        wanted = clipped_sum(data, start, data.clients.records.x[own], data.clients.records.y[own], 0.5) / 0.5
        assert torch.allclose(found[silo], wanted, atol=5e-5)


# ---- one record moves a message by at most 1 -------------------------------------------------------------------------

HARD = [0.0, 1.0, -1.0, 3e-39, 1e-25, -1e-22, 1e-12, 1e9, -1e18, 2e19, 1e30, -3e38, math.inf, -math.inf, math.nan]
numbers = st.sampled_from(HARD) | st.floats(-3, 3, width=32)
records = st.tuples(st.lists(numbers, min_size=4, max_size=4), numbers, numbers)


def moved(ours: Any, w: Tensor, rows: list[Any], ball: Ball, labels: bool) -> Tensor:
    """The message of a batch of (x, y0, y1)."""
    x = torch.tensor([row[0] for row in rows], dtype=torch.float32).reshape(1, len(rows), 4)
    y = torch.tensor([[row[1], row[2]] for row in rows], dtype=torch.float32).reshape(1, len(rows), 2)
    y = (y[..., 0].nan_to_num(0, 0, 0) > 0).long() if labels else y
    out: Tensor = ours.clipped(w, Batch(x, y), ball)[0].clone().double() / ball.clip_norm
    assert bool(out.isfinite().all())
    return out


def check_movement(ours: Any, w: Tensor, own: list[Any], first: Any, other: Any, ball: Ball, labels: bool) -> None:
    without, with_it, instead = (moved(ours, w, rows, ball, labels) for rows in (own, [*own, first], [*own, other]))
    assert float((with_it - without).norm(p=ball.norm)) <= 1.0
    assert float((with_it - instead).norm(p=ball.norm)) <= 2.0


@given(
    own=st.lists(records, min_size=1, max_size=4),
    first=records,
    other=records,
    loss=st.sampled_from(["mse", "logistic", "absolute", "hinge", Quantile(0.9), "cross_entropy"]),
    norm=st.sampled_from([1, 2]),
    clip_norm=st.sampled_from([1e-3, 1.0, 50.0]),
    bias=st.booleans(),
    scale=st.sampled_from([0.0, 1.0, 1e6]),
    beta=st.sampled_from([None, 0.1, 1e6]),
)
@settings(max_examples=250, deadline=None)
def test_one_record_moves_a_linear_message_by_at_most_one(
    own: Any,
    first: Any,
    other: Any,
    loss: str | Loss,
    norm: Norm,
    clip_norm: float,
    bias: bool,
    scale: float,
    beta: float | None,
) -> None:
    data = silos(loss, 2, bias=bias)
    w = noise(1, data.layout.size, seed=2) * scale
    ball = Ball(clip_norm, norm, Moreau(beta) if beta and data.losses.has_envelope else None)
    check_movement(LinearClients(data), w, own, first, other, ball, loss == "cross_entropy")


@given(own=st.lists(records, min_size=1, max_size=3), first=records, other=records, norm=st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_one_record_moves_a_networks_message_by_at_most_one(own: Any, first: Any, other: Any, norm: Norm) -> None:
    for labels, outputs in ((True, 3), (False, 2)):
        y = torch.tensor([0, 1]) if labels else torch.zeros(2, 2)
        model = seeded(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs)))
        data = Task.of(model, [(noise(2, 4), y)], loss="cross_entropy" if labels else "mse")
        ours = OneClient(data)
        w = ours.place(data.layout.flatten(data.model), 1)
        check_movement(ours, w, own, first, other, Ball(1.0, norm), labels)


def test_a_tiny_input_with_a_huge_slope_is_measured_though_its_squares_vanish() -> None:
    data = silos("mse", 1, bias=False)
    x, y = torch.full((1, 1, 4), 1e-25), torch.full((1, 1), 1e30)
    found = LinearClients(data).clipped(torch.zeros(1, 4), Batch(x, y), Ball(1.0))
    assert 0.99 < float(found.norm()) <= 1.0


def test_a_record_without_a_finite_gradient_counts_as_nothing() -> None:
    data = silos("mse", 1)
    x, y = noise(1, 3, 4), noise(1, 3, seed=3)
    w, ours = noise(1, 5, seed=6), LinearClients(data)
    clean = ours.clipped(w, Batch(x[:, :2], y[:, :2]), Ball(1.0)).clone()
    x[0, 2, 1] = math.inf
    assert torch.allclose(ours.clipped(w, Batch(x, y), Ball(1.0)), clean)


# ---- noise in every local step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [AllRecords(SIZES), FixedRecords(2, SIZES), PoissonRecords(2.0, SIZES)], ids=str)
@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 3), mlp], ids=["linear", "mlp"])
def test_with_hardly_any_noise_it_is_clipped_local_sgd(build: Any, sampler: RecordSampler) -> None:
    data = Task.of(seeded(build()), clients(SIZES))
    local = NoisyLocalSgd(sampler, Decay(0.4, 0.5), 1e-9, Decay(0.8, 0.5), steps=3)
    plan = planned(rounds=2, local=local, release=Forward(), server=Sgd())
    w = data.layout.flatten(data.model)
    for t in range(2):
        w = torch.stack([by_hand(data, local, w, t, silo) for silo in range(len(SIZES))]).mean(0)
    assert torch.allclose(final(plan, data), w, atol=1e-5)


def by_hand(data: Task, local: NoisyLocalSgd, w: Tensor, t: int, silo: int) -> Tensor:
    """Where one silo ends: w <- w - lr / batch * clipped sum."""
    w, clip_norm, lr = w.clone(), 0.4 * 0.5**t, 0.8 * 0.5**t
    for picks in local.indices(SIZES[silo], Seeded(0).at(t, "batches", silo), t, silo):
        own = torch.from_numpy(data.clients.rows(silo)[picks[picks >= 0]])
        records = data.clients.records
        w -= lr / local.records.count * clipped_sum(data, w, records.x[own], records.y[own], clip_norm)
    return w


def constant_slopes(features: int, sizes: tuple[int, ...]) -> Task:
    """Targets so far away that the slope is the same wherever the model stands."""
    pairs = [Records(noise(size, features, seed=size), torch.full((size,), 1e9)) for size in sizes]
    return Task(seeded(nn.Linear(features, 1)), Clients.of(pairs), loss="absolute")


@pytest.mark.parametrize(("steps", "noise_multipliers"), [(1, ()), (4, ()), (3, (0.5, 2.0, 8.0))])
def test_its_noise_has_the_stated_size_in_every_step_and_silo(steps: int, noise_multipliers: tuple[float, ...]) -> None:
    data, lr, clip_norm = constant_slopes(8000, SIZES), 0.3, 0.7
    local = NoisyLocalSgd(FixedRecords(2, SIZES), clip_norm, 1.5, lr, steps, noise_multipliers)
    worker = InProcess(path="batched").prepare(planned(local=local, release=Forward()), data, Seeded(0))
    start = data.layout.flatten(data.model)
    found = worker.solve(np.arange(3), Public(t=0), start)
    for silo in range(3):
        own = noise_multipliers[silo] if noise_multipliers else 1.5
        wanted = math.sqrt(steps) * lr * own * clip_norm / 2  # batch of two
        assert abs(float(found[silo].std()) / wanted - 1) < 0.04
    assert abs(float(torch.corrcoef(found[:2])[0, 1])) < 0.05  # silos draw each for itself


def test_noise_in_small_blocks_is_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(local=NoisyLocalSgd(FixedRecords(2, SIZES), 1.0, 1.0, 0.1, 5), release=Forward())
    whole = final(plan, silos())
    monkeypatch.setattr("sordino.parts.record_solvers.NOISE_BLOCK", 1)
    assert torch.allclose(final(plan, silos()), whole)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(rule: str, build: Any) -> str:
    with pytest.raises(PlanError) as caught:
        build()
    assert caught.value.rule == rule
    return str(caught.value)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.inf, math.nan])
def test_a_radius_that_bounds_nothing_is_refused(clip_norm: Any) -> None:
    refused("clip", lambda: BatchGradient(FixedRecords(2, SIZES), clip_norm))
    refused("clip", lambda: NoisyLocalSgd(FixedRecords(2, SIZES), clip_norm, 1.0, 0.1, 2))


@pytest.mark.parametrize("clip_norm", [Adaptive(1.0), ClipNorms(("a", "b"), (1.0, 2.0))])
def test_a_clip_of_records_that_only_a_loop_runs_is_refused_elsewhere(clip_norm: Any) -> None:
    refused("clip", lambda: NoisyLocalSgd(FixedRecords(2, SIZES), clip_norm, 1.0, 0.1, 2))
    refused("clip", lambda: BatchGradient(FixedRecords(2, SIZES), clip_norm, norm=1))
    assert BatchGradient(FixedRecords(2, SIZES), clip_norm).needs_loop


@pytest.mark.parametrize("clip_norm", [Linear(1.0, 0.0, 2), Constant(-1.0), Decay(1.0, 1e200), Decay(1.0, 1e-300)])
def test_a_schedule_that_reaches_no_radius_in_some_round_is_refused(clip_norm: Any) -> None:
    said = refused("clip", lambda: planned(local=BatchGradient(FixedRecords(2, SIZES), clip_norm)))
    assert "in 3 rounds" in said


@pytest.mark.parametrize("gradient", [Sam(0.1), Bounded(1.0)])
def test_a_gradient_that_mixes_records_is_refused(gradient: Any) -> None:
    refused("records", lambda: BatchGradient(FixedRecords(2, SIZES), 1.0, gradient=gradient))
    assert BatchGradient(FixedRecords(2, SIZES), 1.0, gradient=Plain()).bound()


def test_noise_of_their_own_needs_one_multiplier_per_silo_and_no_zero() -> None:
    refused("noise", lambda: NoisyLocalSgd(FixedRecords(2, SIZES), 1.0, 0.0, 0.1, 2))
    refused("noise", lambda: NoisyLocalSgd(FixedRecords(2, SIZES), 1.0, 1.0, 0.1, 2, (1.0, -1.0, 1.0)))
    refused("local work", lambda: NoisyLocalSgd(FixedRecords(2, SIZES), 1.0, 1.0, 0.1, 0))
    for count in (2, 4):
        local = NoisyLocalSgd(FixedRecords(2, SIZES), 1.0, 1.0, 0.1, 2, (1.0,) * count)
        said = refused("local noise", lambda local=local: planned(local=local, release=Forward()))
        assert f"{count} noise multipliers for 3 silos" in said


def test_what_is_private_already_is_forwarded_and_nothing_else_is() -> None:
    from sordino.parts.mechanisms import Gaussian

    local = NoisyLocalSgd(FixedRecords(2, SIZES), 1.0, 1.0, 0.1, 2)
    refused("spent", lambda: planned(local=local, release=CentralNoise(Gaussian(1.0))))
    refused("forward", lambda: planned(release=Forward()))


def test_a_second_clip_after_records_were_clipped_is_refused() -> None:
    with pytest.raises(PlanError):
        planned(encode=(Clip(1.0),))


def test_declared_sizes_must_be_those_of_the_silos() -> None:
    for sampler in (FixedRecords(2, (6, 4, 8)), OnePass(1, (6, 4, 8)), AllRecords((6, 4, 8))):
        with pytest.raises(DataError, match=r"silo 2 with 9 records, while the plan declares 8.*sizes = \[6, 4, 9\]"):
            check(planned(local=BatchGradient(sampler, 1.0)), silos(), InProcess())
    check(planned(local=BatchGradient(PoissonRecords(2.0, (6, 4, 8)), 1.0)), silos(), InProcess())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4, track_running_stats=False)])
def test_a_layer_that_mixes_records_is_refused_with_one_that_does_not(norm: nn.Module) -> None:
    data = Task.of(nn.Sequential(norm, nn.Linear(4, 3)), clients(SIZES))
    assert "use GroupNorm" in refused("records", lambda: check(planned(), data, InProcess()))


def test_a_float_buffer_is_refused_and_group_norm_is_not() -> None:
    layer = nn.Linear(4, 3)
    layer.register_buffer("mean", torch.zeros(4))
    remembering = Task.of(nn.Sequential(layer), clients(SIZES))
    assert "'0.mean'" in refused("records", lambda: check(planned(), remembering, InProcess()))
    check(planned(), Task.of(nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 3)), clients(SIZES)), InProcess())


def test_targets_that_the_radius_cannot_reach_are_refused_from_public_records_alone() -> None:
    far = [(noise(size, 4), 1e4 + noise(size)) for size in SIZES]
    model, plan = seeded(nn.Linear(4, 1)), planned(local=BatchGradient(FixedRecords(2, SIZES), 1.0))
    with pytest.raises(DataError, match=r"median gradient norm.*scale the target"):
        check(plan, Task.of(model, far, test=far[0], loss="mse"), InProcess())
    check(plan, Task.of(model, far, loss="mse"), InProcess())  # nothing public to look at
    near = Records(noise(20, 4), noise(20, seed=1))
    check(plan, Task.of(model, far, test=near, loss="mse"), InProcess())  # private records are never asked


def test_a_scaled_schedule_is_its_schedule_times_a_number() -> None:
    assert Scaled(Decay(2.0, 0.5), 3.0).at(2) == 1.5
    assert scaled(2.0, 3.0) == 6.0
    assert scaled(Decay(2.0, 0.5), 3.0) == Scaled(Decay(2.0, 0.5), 3.0)
