"""Promises of chains of dense layers: gradients are autograd's, a record's is pulled as a whole, others are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.test_linear import autograd as gradient
from tests.tiny import clients, final, noise, plan, seeded, task
from torch import Tensor, nn

from sordino.data.clients import Clients
from sordino.engines.batches import Reader
from sordino.engines.dense_clients import DenseClients, has_written_gradient
from sordino.engines.inprocess import InProcess
from sordino.engines.objectives import ManyClients, OneClient
from sordino.parts.gradients import Ball, Batch, Moreau
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.record_samplers import AllRecords
from sordino.parts.record_solvers import BatchGradient
from sordino.rng import Seeded
from sordino.task import Task

MASK = torch.tensor([[True] * 5, [True, False, True, False, False], [False] * 5])  # whole, ragged, nobody
M, B = MASK.shape
CURVES = (nn.ReLU, nn.Tanh, nn.Sigmoid)


def net(curve: type[nn.Module] = nn.Tanh, outputs: int = 3, bias: bool = True) -> nn.Module:
    layers = nn.Flatten(), nn.Linear(6, 5, bias=bias), curve(), nn.Sequential(nn.Linear(5, 7), curve())
    return seeded(nn.Sequential(*layers, nn.Linear(7, outputs, bias=bias)))


def federation(model: nn.Module, loss: str = "cross_entropy", outputs: int = 3) -> Task:
    y = torch.arange(B) % outputs if loss == "cross_entropy" else (noise(B, outputs, seed=2) > 0).float()
    return Task(model, Clients.of([(noise(B, 2, 3), y)]), loss=loss)


def batch_of(data: Task, mask: Tensor | None = None) -> Batch:
    where = torch.from_numpy(np.random.default_rng(3).integers(B, size=(M, B)))
    return Batch(data.clients.records.x[where], data.clients.records.y[where], mask)


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "ragged"])
@pytest.mark.parametrize(("loss", "outputs"), [("cross_entropy", 3), ("mse", 2), ("logistic", 1), ("hinge", 1)])
@pytest.mark.parametrize("curve", CURVES)
def test_the_written_gradient_is_autograds(curve: Any, loss: str, outputs: int, mask: Tensor | None) -> None:
    data = federation(net(curve, outputs, bias=loss != "mse"), loss, outputs)
    assert has_written_gradient(data, single=False)
    rows, batch = noise(M, data.layout.size, seed=4), batch_of(data, mask)
    found = DenseClients(data).gradient(rows, batch)
    for i in range(M):
        keep = slice(None) if mask is None else mask[i]
        assert torch.allclose(found[i], gradient(data, rows[i], batch.x[i][keep], batch.y[i][keep]), atol=1e-5)


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("curve", CURVES)
def test_every_record_is_pulled_as_a_whole(curve: Any, norm: Any) -> None:
    data = federation(net(curve))
    rows, batch = noise(M, data.layout.size, seed=4), batch_of(data, MASK)
    for clip_norm in (0.05, 1.0, 1e3):
        found = DenseClients(data).clipped(rows, batch, Ball(clip_norm, norm))
        for i in range(M):
            alone = [gradient(data, rows[i], batch.x[i][j : j + 1], batch.y[i][j : j + 1]) for j in range(B)]
            kept = [g for g, real in zip(alone, MASK[i], strict=True) if real]
            sizes = [float(torch.linalg.vector_norm(g, ord=norm)) for g in kept]
            exact = sum((g * min(1, clip_norm / size) for g, size in zip(kept, sizes, strict=True)), torch.zeros(()))
            assert torch.allclose(found[i], exact.expand_as(found[i]), atol=1e-5 + 3e-5 * clip_norm * len(kept))


def test_no_record_moves_the_sum_by_more_than_the_radius() -> None:
    data = federation(net(nn.ReLU))
    data.clients.records.x.mul_(torch.logspace(-20, 15, B)[:, None, None])
    rows = noise(1, data.layout.size, seed=4).repeat(B, 1)
    batch = Batch(data.clients.records.x[:, None], data.clients.records.y[:, None])
    lengths = DenseClients(data).clipped(rows, batch, Ball(0.3)).double().norm(dim=1)
    assert 0.299 < float(lengths.max()) <= 0.3


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_record_that_is_not_finite_counts_as_zero(bad: float) -> None:
    data = federation(net(nn.ReLU))
    x, y = data.clients.records.x[None].clone(), data.clients.records.y[None]
    w, ball, dense = noise(1, data.layout.size, seed=4), Ball(0.3), DenseClients(data)
    x[0, 3, 0, 0] = bad
    left = [0, 1, 2, 4]
    without = dense.clipped(w, Batch(x[:, left], y[:, left]), ball).clone()
    assert torch.allclose(dense.clipped(w, Batch(x, y), ball), without, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_plain_steps_are_single_steps(decay: float) -> None:
    """The fused loop against one gradient at a time; the clients differ in their number of steps."""
    data = task(model=net(), shape=(2, 3))
    local = LocalSgd(lr=0.2, epochs=2, batch=2, weight_decay=decay)
    who, start = np.arange(data.clients.population), data.layout.flatten(data.model)
    drawn = [local.indices(data.clients.size(c), np.random.default_rng(c)) for c in who.tolist()]
    batches, dense = Reader(data.clients, torch.device("cpu")).batches(who, drawn), DenseClients(data)
    w = dense.place(start, len(who))
    for batch in batches:
        step = dense.gradient(w, batch) + decay * w
        w = w - 0.2 * (step if batch.active is None else step * batch.active[:, None])
    found = dense.descend(start, batches, len(who), 0.2, decay)
    assert found is not None
    assert torch.allclose(found, w, atol=1e-6)
    assert torch.equal(found[2], start), "a client without a record does not move"


@pytest.mark.parametrize("local", [LocalSgd(lr=0.3, epochs=2, batch=2), LocalSgd(lr=0.3, epochs=1, momentum=0.9)])
def test_a_run_is_that_of_one_client_at_a_time(local: LocalSgd) -> None:
    data, same = task(model=net(), shape=(2, 3)), plan(rounds=3, local=local)
    assert torch.allclose(final(same, data), final(same, data, InProcess(path="sequential")), atol=1e-5)


def test_the_header_says_who_computed() -> None:
    data = task(model=net(), shape=(2, 3))
    header = InProcess().prepare(plan(), data, Seeded(0)).header
    assert (header["path"], header["gradient"]) == ("batched", "DenseClients")
    smooth = plan(local=BatchGradient(AllRecords((5, 3, 1, 1, 7, 4)), 1.0, gradient=Moreau(1.0)), encode=())
    worker = InProcess(path="batched").prepare(smooth, data, Seeded(0))
    assert isinstance(worker.objective, ManyClients), "no closed form of the envelope of a net"


def shared() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(6, 3))


def frozen() -> nn.Module:
    model = net()
    next(model.parameters()).requires_grad_(False)
    return model


class Own(nn.Sequential):
    """A Sequential that may do anything."""


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)),
    "a layer used twice": shared,
    "a frozen layer": frozen,
    "another curve": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)),
    "no curve": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 3)),
    "a curve at the end": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU()),
    "a norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_model_is_left_to_autograd(name: str) -> None:
    assert not has_written_gradient(federation(OTHERS[name]()), single=False)


class Written(nn.Module):
    """As people write it, with functions between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 4), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.relu(self.first(torch.flatten(x, 1)))
        out: Tensor = self.out(torch.tanh(self.second(hidden)))
        return out


def test_a_module_of_the_users_own_that_is_a_chain_takes_the_same_path() -> None:
    """Its graph is read, so a class of one's own costs nothing: the same gradient as by autograd."""
    for model in (seeded(Written()), Own(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))):
        data = federation(model)
        assert has_written_gradient(data, single=False)
        dense, many = DenseClients(data), ManyClients(data)
        x, y = data.clients.records.x[None], data.clients.records.y[None]
        w = dense.place(data.layout.flatten(model), 1)
        torch.testing.assert_close(dense.gradient(w, Batch(x, y)), many.gradient(w, Batch(x, y)), rtol=1e-4, atol=1e-6)


def test_a_loss_of_the_users_own_is_left_to_autograd() -> None:
    data = Task(net(), Clients.of(clients(shape=(2, 3))), loss=lambda out, y: (out.sum(1) - y) ** 2)
    assert not has_written_gradient(data, single=False)
    assert isinstance(InProcess(path="sequential").prepare(plan(), data, Seeded(0)).objective, OneClient)
