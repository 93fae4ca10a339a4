"""Promises of written-out gradients: they are autograd's, only where they hold, and convolutions lose no entry."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import clients, mlp, noise, plan, seeded, task
from torch import Tensor, nn

from sordino.data.clients import Clients, Records
from sordino.engines.dense_clients import LinearClients, dense_stages, has_written_gradient
from sordino.engines.inprocess import InProcess
from sordino.engines.objectives import ManyClients, OneClient
from sordino.layout import Layout
from sordino.parts.gradients import Batch
from sordino.rng import Seeded
from sordino.task import Task

REAL = torch.tensor([[True] * 5, [True, False, True, False, False], [False] * 5])  # whole, ragged, nobody
M, B = REAL.shape


def autograd(data: Task, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The slope of the mean loss by an ordinary backward pass; zero where there is no record."""
    if not len(x):
        return torch.zeros_like(row)
    model = copy.deepcopy(data.model)
    data.layout.load(model, row)
    data.losses(model(x), y).mean().backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def linear_task(loss: str, bias: bool, outputs: int, labels: bool) -> Task:
    model = seeded(nn.Sequential(nn.Flatten(), nn.Linear(6, outputs, bias=bias)))
    y = torch.arange(B) % outputs if labels else noise(B, outputs, seed=2).squeeze(-1)
    return Task(model, Clients.of([(noise(B, 2, 3), y)]), loss=loss)


CASES = [("cross_entropy", 3, True), ("mse", 1, False), ("mse", 4, False), ("mse", 1, True)]


@pytest.mark.parametrize("mask", [None, REAL], ids=["whole", "ragged"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("loss", "outputs", "labels"), CASES)
def test_the_written_gradient_is_autograds(
    loss: str, outputs: int, labels: bool, bias: bool, mask: Tensor | None
) -> None:
    data = linear_task(loss, bias, outputs, labels)
    assert has_written_gradient(data, single=True)
    table = data.clients.records
    where = torch.from_numpy(np.random.default_rng(3).integers(B, size=(M, B)))
    rows = noise(M, data.layout.size, seed=4)
    found = LinearClients(data).gradient(rows, Batch(table.x[where], table.y[where], mask))
    for i in range(M):
        real = where[i] if mask is None else where[i][mask[i]]
        assert torch.allclose(found[i], autograd(data, rows[i], table.x[real], table.y[real]), atol=1e-5)


def test_scores_that_overflow_an_exponential_are_no_trouble() -> None:
    data = linear_task("cross_entropy", True, 3, True)
    rows, table = noise(1, data.layout.size) * 1e4, data.clients.records
    found = LinearClients(data).gradient(rows, Batch(table.x[None], table.y[None]))
    assert torch.allclose(found[0], autograd(data, rows[0], table.x, table.y), atol=1e-5)


def test_targets_in_double_precision_are_taken() -> None:
    """As numpy hands them over, and as the other path takes them."""
    x, y = noise(B, 6), noise(B, 2, seed=1)
    single, double = (Task(seeded(nn.Linear(6, 2)), Clients.of([Records(x, t)]), loss="mse") for t in (y, y.double()))
    rows = noise(1, single.layout.size)
    slopes = [
        LinearClients(data).gradient(rows, Batch(x[None], data.clients.records.y[None])) for data in (single, double)
    ]
    assert torch.allclose(slopes[0], slopes[1])


def test_a_second_call_overwrites_the_first_and_another_shape_does_not_fail() -> None:
    data = linear_task("cross_entropy", True, 3, True)
    table, ours = data.clients.records, LinearClients(data)
    first = ours.gradient(noise(1, data.layout.size), Batch(table.x[None], table.y[None])).clone()
    ours.gradient(noise(2, data.layout.size), Batch(table.x.repeat(2, 1, 1, 1), table.y.repeat(2, 1)))
    again = ours.gradient(noise(1, data.layout.size), Batch(table.x[None], table.y[None]))
    assert torch.equal(again, first)


# ---- where it holds, and where it does not --------------------------------------------------------------------------


def frozen_bias() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.bias.requires_grad_(False)
    return layer


class Doubled(nn.Sequential):
    """A Sequential that does more than its parts."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return 2 * out


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, layer)


class Wrapped(nn.Module):
    """As people write a linear model: the fast path reads its graph."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.view(len(x), -1))
        return out


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)),
    "two layers": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
    "an activation after it": lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
    "a flatten after it": lambda: nn.Sequential(nn.Linear(4, 3), nn.Flatten()),
    "a frozen bias": frozen_bias,
    "the same layer twice": twice,
    "a sequential with its own forward": lambda: Doubled(nn.Linear(4, 3)),
    "the same inside a plain one": lambda: nn.Sequential(Doubled(nn.Linear(4, 3))),
    "a linear with its own forward": lambda: nn.Sequential(Shifted(4, 3)),
    "a norm": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 3)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_model_is_not_written_out(name: str) -> None:
    assert len(dense_stages(task(model=OTHERS[name]()))) != 1


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_model_is_left_to_autograd(name: str) -> None:
    data = task(model=OTHERS[name]())
    assert not has_written_gradient(data, single=True)
    assert InProcess().prepare(plan(), data, Seeded(0)).header["gradient"] in ("ManyClients", "OneClient")


def test_a_linear_model_is_written_out_however_it_is_wrapped() -> None:
    layer = nn.Linear(4, 3)
    for model in (layer, nn.Sequential(layer), nn.Sequential(nn.Flatten(), nn.Sequential(layer)), Wrapped(layer)):
        assert len(dense_stages(task(model=model))) == 1
        assert InProcess().prepare(plan(), task(model=model), Seeded(0)).header["gradient"] == "LinearClients"


def written(model: nn.Module, held: Any, loss: Any = "cross_entropy") -> bool:
    return has_written_gradient(Task.of(model, held, loss=loss), single=True)


def test_other_losses_targets_and_widths_are_left_to_autograd() -> None:
    layer = nn.Linear(4, 3)
    assert written(layer, clients())
    assert not written(layer, [(x, torch.softmax(noise(len(x), 3), 1)) for x, _ in clients()])  # of probabilities
    assert written(nn.Linear(4, 1), [(x, y % 2) for x, y in clients()], "logistic")
    assert not written(layer, clients(), lambda out, y: (out - 1).square().mean(1))
    rows = [(x, y[:, None].expand(-1, 2)) for x, y in clients(shape=(2, 4))]  # one row of scores per row of x
    assert not written(layer, rows, lambda out, y: (out - y[..., None]).square().mean((1, 2)))


# ---- convolutions lie channels last ---------------------------------------------------------------------------------


def conv_net() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(2, 3, (2, 3)), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3)))


def norm_net() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)))


@pytest.mark.parametrize("build", [conv_net, norm_net, mlp])
def test_channels_first_undoes_channels_last(build: Any) -> None:
    layout = Layout.of(build())
    rows = noise(3, layout.size)
    last = layout.channels_last(rows)
    assert torch.equal(layout.channels_first(last), rows)
    assert torch.equal(layout.channels_last(layout.channels_first(rows)), rows)
    assert torch.equal(last, rows) == (build is mlp)
    first = layout.slots[0]
    if len(first.shape) == 4:
        part, shape = rows[1, : first.stop].view(first.shape), first.shape
        assert torch.equal(last[1, : first.stop].view(shape[0], shape[2], shape[3], shape[1]), part.permute(0, 2, 3, 1))


@pytest.mark.parametrize("build", [conv_net, norm_net])
@pytest.mark.parametrize("objective", [OneClient, ManyClients])
def test_the_gradient_of_a_conv_net_is_autograds_in_the_layouts_order(objective: Any, build: Any) -> None:
    data = task((B,), build(), (2, 5, 6))
    table, ours = data.clients.records, objective(data)
    start = noise(data.layout.size, seed=9) * 0.3
    mask = torch.tensor([[True, False, True, True, False]])
    w = ours.place(ours.inward(start), 1)
    found = ours.outward(ours.gradient(w, Batch(table.x[None], table.y[None], mask)))
    wanted = autograd(data, start, table.x[mask[0]], table.y[mask[0]])
    assert float(wanted.norm()) > 0.1
    assert torch.allclose(found[0], wanted, atol=1e-5)
    elsewhere = ours.outward(ours.gradient(ours.inward(start)[None] + 0.1, Batch(table.x[None], table.y[None], mask)))
    assert torch.allclose(elsewhere[0], autograd(data, start + 0.1, table.x[mask[0]], table.y[mask[0]]), atol=1e-5)
    assert torch.equal(ours.outward(w)[0], start)  # looking elsewhere does not move the client
