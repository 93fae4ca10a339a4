"""Promises of LocalSgd: torch's own SGD on the same batches, and every record once per epoch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.tiny import mlp, noise, task
from torch import Tensor, nn

from sordino.accounting.bounds import Bound
from sordino.engines.objectives import OneClient
from sordino.errors import PlanError
from sordino.parts.encoding import Public
from sordino.parts.gradients import Batch
from sordino.parts.local_solvers import LocalSgd, Work, project_
from sordino.parts.schedules import Decay
from sordino.rng import Seeded

SIZE = 7


def picks(local: LocalSgd, size: int = SIZE, client: int = 0) -> list[list[int]]:
    """The records of each step, without the padding."""
    table = local.indices(size, Seeded(0).at(0, "batches", client))
    return [[int(i) for i in row if i >= 0] for row in table]


def message(local: LocalSgd, t: int = 0, clip_norm: float = math.inf) -> Tensor:
    """What LocalSgd sends for a client with SIZE records."""
    data = task((SIZE,))
    records = data.clients.records

    def batches() -> Iterator[Batch]:
        for step in picks(local):
            yield Batch(records.x[step][None], records.y[step][None])

    start = data.layout.flatten(data.model)
    return local.solve(Work(OneClient(data), start, batches(), 1, Public(t, clip_norm)))[0]


def plain(local: LocalSgd, lr: float, after: Callable[[nn.Module, nn.Module], None] | None = None) -> Tensor:
    """Start minus end of an ordinary torch loop."""
    data = task((SIZE,))
    model, start = copy.deepcopy(data.model), data.model
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=local.momentum, weight_decay=local.weight_decay, dampening=0
    )
    for step in picks(local):
        optimizer.zero_grad()
        F.cross_entropy(model(data.clients.records.x[step]), data.clients.records.y[step]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if after:
            after(model, start)
    return data.layout.flatten(start) - data.layout.flatten(model)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("work", [{"epochs": 3}, {"epochs": 3, "batch": 3}, {"steps": 5, "batch": 2}, {"steps": 2}])
def test_local_sgd_is_torch_sgd_on_the_same_batches(momentum: float, weight_decay: float, work: dict[str, Any]) -> None:
    local = LocalSgd(lr=0.3, momentum=momentum, weight_decay=weight_decay, **work)
    sent = message(local)
    assert float(sent.norm()) > 0.1
    assert torch.allclose(sent, plain(local, 0.3), rtol=1e-4, atol=1e-6)


def test_the_learning_rate_is_the_rounds_own() -> None:
    local = LocalSgd(lr=Decay(0.4, 0.5), epochs=2)
    assert torch.allclose(message(local, t=2), plain(local, 0.1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_projection_happens_after_every_step(momentum: float) -> None:
    clip_norm, layout = 0.2, task((SIZE,)).layout
    local = LocalSgd(lr=0.5, epochs=3, batch=3, momentum=momentum, project=True)

    def pull_back(model: nn.Module, start: nn.Module) -> None:
        offset = layout.flatten(model) - layout.flatten(start)
        layout.load(model, layout.flatten(start) + offset * min(1.0, clip_norm / float(offset.norm())))

    wanted = plain(local, 0.5, pull_back)
    at_the_end = plain(LocalSgd(lr=0.5, epochs=3, batch=3, momentum=momentum), 0.5)
    at_the_end = at_the_end * (clip_norm / float(at_the_end.norm()))
    sent = message(local, clip_norm=clip_norm)
    assert torch.allclose(sent, wanted, rtol=1e-4, atol=1e-6)
    assert float(sent.norm()) <= clip_norm * (1 + 1e-5)
    assert not torch.allclose(sent, at_the_end, atol=1e-3)  # projecting once, at the end, is another algorithm


def test_an_infinite_radius_projects_nothing() -> None:
    free = message(LocalSgd(lr=0.3, epochs=2))
    assert torch.equal(message(LocalSgd(lr=0.3, epochs=2, project=True)), free)


def test_project_leaves_rows_inside_the_ball_and_pulls_the_others_onto_it() -> None:
    start, w = noise(5), noise(5) + torch.tensor([[0.0], [0.01], [3.0]]) * noise(5, seed=1)
    kept = w.clone()
    project_(w, start, 1.0)
    assert torch.allclose(w[:2], kept[:2], atol=1e-6)
    assert float((w[2] - start).norm()) == pytest.approx(1.0, rel=1e-5)
    assert torch.allclose(F.normalize(w[2] - start, dim=0), F.normalize(kept[2] - start, dim=0), atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 5, 12])
@pytest.mark.parametrize("batch", [None, 1, 5, 100])
def test_every_epoch_reads_each_record_once(size: int, batch: int | None) -> None:
    steps = picks(LocalSgd(lr=1.0, epochs=3, batch=batch), size)
    width = min(batch or size, size)
    per_epoch = math.ceil(size / width)
    assert len(steps) == 3 * per_epoch
    for epoch in range(3):
        mine = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(i for step in mine for i in step) == list(range(size))
        assert [len(step) for step in mine[:-1]] == [width] * (per_epoch - 1)
        assert len(mine[-1]) == size - width * (per_epoch - 1)  # the short last batch


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_steps_count_minibatches_across_epochs(count: int) -> None:
    steps = picks(LocalSgd(lr=1.0, steps=count, batch=2), 5)
    assert [len(step) for step in steps] == [2, 2, 1, 2, 2, 1, 2][:count]
    first_epoch = [i for step in steps[:3] for i in step]
    assert len(set(first_epoch)) == len(first_epoch)


def test_epochs_and_clients_are_shuffled_differently_and_uniformly() -> None:
    local = LocalSgd(lr=1.0, epochs=2, batch=1)
    first, second = np.split(np.array(picks(local, 20)).ravel(), 2)
    assert not np.array_equal(first, second)
    assert picks(local, 20, client=1) != picks(local, 20, client=0)
    heads = np.bincount([picks(local, 3, client=c)[0][0] for c in range(600)], minlength=3)
    assert np.all(np.abs(heads - 200) < 60)


def test_a_client_with_no_records_takes_no_step() -> None:
    local = LocalSgd(lr=1.0, epochs=3, batch=2)
    assert picks(local, 0) == []
    data = task((SIZE,))
    start = data.layout.flatten(data.model)
    assert torch.equal(local.solve(Work(OneClient(data), start, [], 1, Public(0))), torch.zeros(1, len(start)))


def test_inactive_clients_stay_where_they_are_under_momentum_and_decay() -> None:
    class Slope:
        trainable = 3

        def place(self, start: Tensor, clients: int) -> Tensor:
            return start.repeat(clients, 1)

        def gradient(self, w: Tensor, batch: Batch) -> Tensor:
            return torch.ones_like(w)

    x = torch.zeros(2, 1, 1)
    batches = [Batch(x, x), Batch(x, x, active=torch.tensor([1.0, 0.0]))]
    local = LocalSgd(lr=1.0, steps=2, momentum=0.5, weight_decay=0.1)
    both = local.solve(Work(cast(Any, Slope()), torch.zeros(3), batches, 2, Public(0)))
    assert torch.allclose(both[1], torch.ones(3))
    assert torch.allclose(both[0], torch.full((3,), 1.0 + 0.5 + 1.0 - 0.1))


def test_local_sgd_bounds_nothing_by_itself() -> None:
    assert LocalSgd(lr=1.0, epochs=1, project=True).bound() == Bound("client", finite=False)


def test_the_model_of_the_task_is_never_touched() -> None:
    data = task((SIZE,))
    before = data.layout.flatten(data.model)
    objective = OneClient(data)
    x, y = data.clients.records.x[None], data.clients.records.y[None]
    LocalSgd(lr=1.0, epochs=1).solve(Work(objective, before, [Batch(x, y)], 1, Public(0)))
    assert torch.equal(data.layout.flatten(data.model), before)
    assert torch.equal(before, data.layout.flatten(mlp()))


@pytest.mark.parametrize(
    "work", [{}, {"epochs": 1, "steps": 1}, {"epochs": 0}, {"steps": 0}, {"epochs": 1, "batch": 0}, {"epochs": -1}]
)
def test_unclear_local_work_is_refused(work: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="local work"):
        LocalSgd(lr=0.1, **work)
