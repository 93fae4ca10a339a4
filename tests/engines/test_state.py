"""Nothing passes from one client to the next, and what would mislead a training is said before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.tiny import clients, final, mlp, noise, plan, seeded, task
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sordino.engines.inprocess import InProcess
from sordino.errors import DataError, PlanError
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.releases import NoNoise
from sordino.parts.samplers import Everyone
from sordino.task import Task


class Relay(nn.Module):
    """Adds what it saw of earlier clients to the scores: `act` puts it somewhere."""

    count: Tensor

    def __init__(self, act: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.out, self.act = nn.Linear(4, 3), act
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("count", torch.zeros(4, dtype=torch.int64))
        self.memory, self.heap, self.total = torch.zeros(4), [torch.zeros(4)], 0.0

    def forward(self, x: Tensor) -> Tensor:
        seen = self.frozen + self.count + self.memory + self.heap[-1] + self.total
        scores: Tensor = self.out(x + seen)
        if self.training:
            with torch.no_grad():
                self.act(self, 1e3 * x.detach().abs().mean(0))
        return scores


ACTS: dict[str, tuple[str, Callable[[Any, Tensor], Any]]] = {
    "frozen parameter": ("parameter 'frozen'", lambda m, x: m.frozen.add_(x)),
    "frozen through .data": ("parameter 'frozen'", lambda m, x: m.frozen.data.add_(x)),
    "integer buffer": ("buffer 'count'", lambda m, x: m.count.add_(x.long())),
    "attribute": ("attribute 'memory'", lambda m, x: setattr(m, "memory", x)),
    "list": ("attribute 'heap'", lambda m, x: m.heap.append(x)),
    "number": ("attribute 'total'", lambda m, x: setattr(m, "total", float(x.sum()))),
    "weights elsewhere": ("parameter 'out.weight'", lambda m, x: setattr(m.out.weight, "data", m.out.weight + x)),
}


@pytest.mark.parametrize("name", ACTS)
def test_nothing_passes_from_one_client_to_the_next(name: str) -> None:
    """Trusted code is compared by content. A first client that is left out would change all others' messages by 24."""
    found, act = ACTS[name]
    data = Task.of(seeded(Relay(act)), clients(), own_code="trusted")
    with pytest.raises(PlanError, match=r"\[state\].*the next client would see it") as refusal:
        final(plan(local=LocalSgd(lr=0.3, epochs=1)), data)
    assert found in str(refusal.value)


class Balanced(nn.Module):
    """A loss that weighs a class by how seldom it came so far."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3))

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        self.seen += torch.bincount(labels, minlength=3)
        return F.cross_entropy(scores, labels, reduction="none") * (self.seen.sum() / self.seen)[labels]


QUEUE: list[float] = []


def queued(scores: Tensor, labels: Tensor) -> Tensor:
    """The memory of a loss that is in the script."""
    QUEUE.append(float(scores.detach().mean()))
    return F.cross_entropy(scores - sum(QUEUE), labels, reduction="none") * (1 + abs(sum(QUEUE)))


class Shared(nn.Module):
    """The memory of a model that is its class's."""

    centre: ClassVar[Tensor | float] = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(x - Shared.centre)
        if self.training:
            Shared.centre = 0.9 * Shared.centre + 0.1 * x.detach().mean(0)
        return scores


@pytest.mark.parametrize(("model", "loss"), [(mlp, Balanced()), (mlp, queued), (Shared, "cross_entropy")])
def test_nothing_passes_by_a_loss_a_script_or_a_class(model: Callable[[], nn.Module], loss: Any) -> None:
    """Where a module's own tensors and attributes are as they were, trusted code is asked about a made-up record."""
    data = Task.of(seeded(model()), clients((5, 3, 4, 2, 7, 4)), loss=loss, own_code="trusted")
    with pytest.raises(PlanError, match=r"\[state\].*stores no records"):
        final(plan(local=LocalSgd(lr=0.3, epochs=1)), data, InProcess(path="sequential"))


def noisy(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores + float(np.random.rand() + random.random()), labels, reduction="none")


def test_coins_of_numpy_and_python_are_no_memory_and_go_on_as_they_would() -> None:
    model = seeded(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    data = Task.of(model, clients(), loss=noisy, own_code="trusted")
    results = []
    for _ in range(2):
        np.random.seed(3)
        random.seed(3)
        final(plan(local=LocalSgd(lr=0.3, epochs=1)), data, InProcess(path="sequential"))
        results.append((np.random.rand(), random.random()))
    assert results[0] == results[1]


def test_a_client_more_moves_the_sum_by_its_own_message_alone() -> None:
    """With models that keep nothing, on either path: the messages of the others are as they were."""
    model = seeded(Relay(lambda model, x: None))
    some = clients((5, 3, 4))
    for path in ("batched", "sequential"):
        worker = InProcess(path=path)
        free = plan(rounds=1, encode=(Clip(1.0),), release=NoNoise(), local=LocalSgd(lr=0.3, epochs=1))
        totals = []
        for who in (some, some[1:]):
            data = Task.of(model, who)
            moved = final(plan_of(free, len(who)), data, worker) - data.layout.flatten(model)
            totals.append(moved * len(who))
        assert float((totals[0] - totals[1]).norm()) <= 1.0 + 1e-4


def plan_of(base: Any, count: int) -> Any:
    return plan(rounds=1, clients=Everyone(count), encode=base.encode, release=base.release, local=base.local)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(8), nn.SyncBatchNorm(8), nn.InstanceNorm1d(8, track_running_stats=True)]
)
def test_running_statistics_are_refused_naming_group_norm(norm: nn.Module) -> None:
    """Noise drives a running variance below zero (-.12), and the model to NaN with the budget spent."""
    with pytest.raises(PlanError, match=r"layer '1', .*nn\.GroupNorm\(8, 8\)"):
        task(model=nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 3)))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, nn.CrossEntropyLoss(reduction="sum")])
def test_a_loss_without_a_value_for_each_record_is_refused(loss: Any) -> None:
    with pytest.raises(DataError, match=r'a loss of shape \[\] for 2 records; needed one value per record.*"none"'):
        Task.of(seeded(nn.Linear(4, 3)), clients(), loss=loss)
    Task.of(seeded(nn.Linear(4, 3)), clients(), loss=nn.CrossEntropyLoss(reduction="none"))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "dense": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
    "by autograd": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
}


@pytest.mark.parametrize("label", [-100, -1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_label_that_no_class_stands_for_is_refused_on_every_path(name: str, label: int) -> None:
    wrong, right = clients(), clients()
    wrong[1][1][2] = label
    with pytest.raises(DataError, match=rf"label {label} in record 7 of the clients' data; needed labels from 0 to 2"):
        Task.of(MODELS[name](), wrong)
    with pytest.raises(DataError, match="of the test data"):
        Task.of(MODELS[name](), right, test=wrong[1])
    with pytest.raises(DataError, match="labels from 0 to 1"):
        Task.of(nn.Linear(4, 1), right, loss="logistic")


def test_a_model_that_does_not_fit_its_records_is_refused_in_a_sentence() -> None:
    with pytest.raises(DataError, match=r"a model that fails on records of shape \[4\]"):
        Task.of(nn.Linear(5, 3), clients())
    with pytest.raises(DataError, match="loss 'cross_entropy' that fails on outputs"):
        Task.of(nn.Linear(4, 3), [(noise(3, 4), noise(3))])


@pytest.mark.parametrize("path", [None, "batched", "sequential"])
def test_a_single_layer_may_be_the_model_whatever_the_loss(path: Any) -> None:
    """It was a KeyError: '.bias'."""
    named, own = (
        Task.of(seeded(nn.Linear(4, 3)), clients(), loss=loss)
        for loss in ("cross_entropy", nn.CrossEntropyLoss(reduction="none"))
    )
    free = plan(release=NoNoise(), local=LocalSgd(lr=0.3, epochs=1))
    assert torch.allclose(final(free, named), final(free, own, InProcess(path=path)), atol=1e-5)
