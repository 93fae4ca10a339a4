"""Promises of the compiled loops: what torch computes, to rounding; nothing read or written out of place."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import seeded
from torch import Tensor, nn

pytest.importorskip("numba")

from sordino import kernels
from sordino.data.clients import Clients
from sordino.engines.batches import Reader
from sordino.engines.dense_clients import LinearClients
from sordino.engines.inprocess import InProcess
from sordino.errors import DataError
from sordino.loop import run
from sordino.parts.gradients import Ball, Batch
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.losses import Loss, Quantile
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.samplers import Everyone
from sordino.recipes import dp_fed_avg, noisy_minibatch_sgd
from sordino.rng import Seeded
from sordino.task import Task
from sordino_papers.grid import StackedClients, run_grid

LOSSES = ("cross_entropy", "mse", "logistic", "absolute", "hinge", Quantile(0.3))
SIZES = (7, 1, 0, 12)


def federation(loss: str | Loss = "cross_entropy", outputs: int = 3, inputs: int = 19, bias: bool = True) -> Task:
    torch.manual_seed(0)
    model = seeded(nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs, bias=bias)))
    y = torch.randint(outputs, (64,)) if loss == "cross_entropy" else torch.randint(2, (64, outputs)).float()
    x, edges = torch.randn(64, 1, inputs), np.cumsum((0, *SIZES))
    parts = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(edges)]
    return Task(model, Clients.of(parts), loss=loss)


def objective(task: Task, kernel: bool, kind: type[Any]) -> Any:
    made = kind(task)
    assert made.kernel
    made.kernel = kernel
    return made


def descended(task: Task, kernel: bool, local: LocalSgd, seed: int = 3) -> Tensor:
    """Where the clients of a task end; some have fewer steps, some fewer records in the last, one has none."""
    coins = [np.random.default_rng((seed, c)) for c in range(len(SIZES))]
    drawn = [local.indices(size, rng) for size, rng in zip(SIZES, coins, strict=True)]
    batches = Reader(task.clients, torch.device("cpu")).batches(np.arange(len(SIZES)), drawn)
    start = task.layout.flatten(task.model)
    made, lr = objective(task, kernel, LinearClients), float(local.lr)  # type: ignore[arg-type]
    found: Tensor | None = made.descend(start, batches, len(SIZES), lr, local.weight_decay)
    assert found is not None
    return found


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize(("outputs", "bias"), [(1, True), (3, False), (5, True), (12, True)])
@pytest.mark.parametrize("loss", LOSSES)
def test_local_steps_are_those_of_torch(loss: str | Loss, outputs: int, bias: bool, decay: float) -> None:
    task = federation(loss, outputs, bias=bias)
    local = LocalSgd(lr=0.1, epochs=3, batch=4, weight_decay=decay)
    compiled, torchs = descended(task, True, local), descended(task, False, local)
    start = task.layout.flatten(task.model)
    assert torch.allclose(compiled, torchs, atol=2e-6)
    assert torch.equal(compiled[2], start), "a client without records does not move"
    assert (outputs == 1 and loss == "cross_entropy") or float((compiled[0] - start).abs().max()) > 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_record_that_is_not_finite_spoils_its_own_client_only(bad: float) -> None:
    task = federation()
    task.clients.records.x[0, 0, 3] = bad
    found = descended(task, True, LocalSgd(lr=0.1, epochs=1, batch=4))
    assert not bool(found[0].isfinite().all())
    assert bool(found[1:].isfinite().all())


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_without_a_score_is_refused_before_memory_is_touched(label: int) -> None:
    task = federation()
    task.clients.records.y[2] = label
    with pytest.raises(DataError, match="a model of 3 classes"):
        descended(task, True, LocalSgd(lr=0.1, epochs=1))


def pulled(task: Task, rows: Any, ball: Ball, kernel: bool) -> Tensor:
    made: StackedClients = objective(task, kernel, StackedClients)
    w = task.layout.flatten(task.model) * torch.linspace(0.5, 2, len(rows))[:, None]
    records = task.clients.records
    sizes = made.stages[0].sizes(records.x.flatten(1), ball.norm)
    if kernel:
        return made.pulled(w, rows, records, sizes, ball, np.arange(len(rows))[::-1].copy())
    where = torch.from_numpy(rows)
    return made.clipped(w, Batch(records.x[where], records.y[where]), ball).clone()


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize(("outputs", "bias"), [(1, True), (4, False), (6, True)])
@pytest.mark.parametrize("loss", LOSSES)
def test_clipped_sums_are_those_of_torch(loss: str | Loss, outputs: int, bias: bool, norm: Any) -> None:
    task, rows = federation(loss, outputs, bias=bias), np.random.default_rng(0).integers(20, size=(5, 6))
    for clip_norm in (0.3, 5.0, 1e4):
        compiled, torchs = (pulled(task, rows, Ball(clip_norm, norm), kernel) for kernel in (True, False))
        assert torch.allclose(compiled, torchs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("norm", [1, 2])
def test_one_record_moves_a_clipped_sum_by_the_radius_at_most(norm: Any) -> None:
    task = federation(outputs=4)
    task.clients.records.x.mul_(torch.logspace(-30, 18, 20)[:, None, None])
    found = pulled(task, np.arange(20)[:, None], Ball(0.3, norm), True).double()
    lengths = torch.linalg.vector_norm(found, ord=norm, dim=1)
    assert float(lengths.max()) <= 0.3
    assert float(lengths.max()) > 0.299


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_record_that_is_not_finite_counts_as_zero(bad: float) -> None:
    task, ball = federation(), Ball(0.3)
    rows = np.array([[1, 2, 4]])
    alone = pulled(task, rows, ball, True)
    task.clients.records.x[3, 0, :] = bad
    assert torch.equal(pulled(task, np.array([[1, 2, 3, 4]]), ball, True), alone)


def test_a_run_and_a_grid_are_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    data = federation()
    fed = dp_fed_avg(rounds=3, clients=Everyone(4), lr=0.1, clip_norm=0.5, noise_multiplier=0.1, epochs=2, batch=4)
    silos = federation("logistic", 1)
    silos = Task(silos.model, Clients.of([(torch.randn(9, 19), torch.randint(2, (9, 1)).float())] * 3), loss="logistic")
    reads = FixedRecords(4, (9,))
    noisy = noisy_minibatch_sgd(
        rounds=3, clients=Everyone(3), records=reads, clip_norm=0.5, noise_multiplier=0.1, lr=0.3
    )
    found = []
    for on in (True, False):
        monkeypatch.setattr(kernels, "AVAILABLE", on)
        header = InProcess().prepare(fed, data, Seeded(0)).header
        assert header["loops"] == ("compiled" if on else "torch")
        state = [one.state for one in run(fed, data, streams=Seeded(5))][-1]
        found.append((fed.server.result(state.memory), run_grid([noisy] * 2, silos, [1, 2], exact=False)))
    (fed_on, grid_on), (fed_off, grid_off) = found
    assert torch.allclose(fed_on, fed_off, atol=1e-5)
    assert torch.allclose(grid_on, grid_off, atol=1e-5)


def test_records_that_lie_otherwise_are_left_to_torch() -> None:
    task = federation()
    turned = torch.randn(19, 20).T
    table = Task(task.model, Clients(type(task.clients.records)(turned, task.clients.records.y), *_index()))
    assert not LinearClients(table).kernel


def _index() -> tuple[Any, Any]:
    return np.arange(20, dtype=np.int64), np.array([0, 20], dtype=np.int64)


def test_a_folder_that_cannot_be_written_to_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    def njit(cache: bool = False, **settings: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", njit)
    assert kernels.compiled(math.sqrt)(4.0) == 2.0


def test_kernels_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.AVAILABLE
    monkeypatch.setenv("SORDINO_KERNELS", "off")
    try:
        assert not importlib.reload(kernels).AVAILABLE
        assert not LinearClients(federation()).kernel
    finally:
        monkeypatch.undo()
        assert importlib.reload(kernels).AVAILABLE
