"""A task's model and loss as they run: graphs that answer as the modules do, with the same gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.tiny import clients, final, noise, plan, seeded
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

import sordino as so
from sordino.engines.dense_clients import has_written_gradient
from sordino.engines.inprocess import InProcess
from sordino.engines.objectives import Path
from sordino.errors import ConfigError, PlanError
from sordino.graph import Tracing
from sordino.models import ARCHITECTURES, build_seeded
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.losses import Loss
from sordino.parts.releases import NoNoise
from sordino.parts.samplers import Everyone
from sordino.task import Task

SHAPES: dict[str, tuple[int, ...]] = {"char_lstm": (12,), "resnet18": (3, 8, 8), "svhn_cnn": (3, 32, 32)}
OPTIONS: dict[str, dict[str, Any]] = {"resnet18": {"width": 32}, "char_lstm": {"hidden": 16}}


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
@pytest.mark.parametrize("training", [True, False])
def test_every_net_of_sordino_is_its_graph(kind: str, training: bool) -> None:
    """Equal to 1e-6 of the largest score, and so are the gradients; no record reaches another in any of them."""
    shape = SHAPES.get(kind, (1, 28, 28))
    model = build_seeded(ARCHITECTURES[kind](**OPTIONS.get(kind, {})), shape, 10, 0).train(training)
    x = noise(3, *shape) if kind != "char_lstm" else torch.randint(10, (3, *shape))
    traced = Tracing(model).of((x,), {}, [True])
    assert traced.reason is None
    named: dict[str, Tensor] = dict(model.named_parameters())
    own, graph = functional_call(model, named, (x,)), traced.graph(model, x)
    assert float((own - graph).detach().abs().max()) <= 1e-6 * float(own.detach().abs().max())
    for a, b in zip(
        *(torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in (own, graph)), strict=True
    ):
        assert float((a - b).abs().max()) <= 1e-6 * max(float(a.abs().max()), 1e-3)


class Written(nn.Module):
    """As people write it: len, views, functions, a buffer, a parameter of its own."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.shift = nn.Linear(4, 6), nn.Linear(6, 3), nn.Parameter(torch.zeros(6))
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.first(x.view(len(x), -1))) * self.scale + self.shift
        out: Tensor = self.out(F.dropout(hidden, 0.0, self.training))
        return out


def test_a_run_of_the_graph_is_the_run_of_the_module() -> None:
    asked = plan(release=NoNoise(), local=LocalSgd(lr=0.3, epochs=2))
    paths: tuple[Path, ...] = ("batched", "sequential")
    for path in paths:
        graph, own = Task.of(seeded(Written()), clients()), Task.of(seeded(Written()), clients(), own_code="trusted")
        found, wanted = (final(asked, data, InProcess(path=path)) for data in (graph, own))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert so.train(asked, graph).certificate["own_code"]["grade"] == "by construction"


def test_the_model_that_is_handed_over_is_the_users_own() -> None:
    done = so.train(plan(), Task.of(seeded(Written()), clients()))
    assert type(done.model) is Written
    assert "forward" not in vars(done.model)


@dataclass(frozen=True)
class Squares(Loss, kind="test_program_squares"):
    """A loss of the user's own with a slope that is written out."""

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).square()

    def slope(self, scores: Tensor, targets: Tensor) -> Tensor:
        return 2 * (scores - targets[..., None])


def test_a_written_slope_of_the_users_own_runs_by_its_graph_on_the_fast_path() -> None:
    held = [(x, y.float()) for x, y in clients()]
    fast = Task.of(seeded(nn.Linear(4, 1)), held, loss=Squares())
    slow = Task.of(seeded(nn.Linear(4, 1)), held, loss=lambda out, y: (out[:, 0] - y).square())
    assert has_written_gradient(fast, single=True)
    asked = plan(release=NoNoise())
    torch.testing.assert_close(final(asked, fast), final(asked, slow), rtol=1e-5, atol=1e-6)
    assert so.train(asked, fast).certificate["own_code"]["why"].startswith("the loss captured as a graph")


def test_a_loss_that_a_schedule_changes_between_rounds_is_no_graph() -> None:
    """The graph would train on with what was captured: said, not done silently."""
    rate = {"sharpness": 1.0}

    def sharpened(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(rate["sharpness"] * out, y, reduction="none")

    def anneal(_: Any) -> None:
        rate["sharpness"] *= 2

    held = [(noise(4, 4, seed=c), torch.arange(4) % 3) for c in range(3)]
    asked = plan(rounds=3, clients=Everyone(3))
    with pytest.raises(PlanError, match=r"\[state\].*remove counters"):
        so.train(asked, Task.of(seeded(Written()), held, loss=sharpened), on_round=anneal)
    trusted = Task.of(seeded(Written()), held, loss=sharpened, own_code="trusted")
    assert so.train(asked, trusted, on_round=anneal).certificate["own_code"]["grade"] == "own code, trusted"


def test_a_model_that_was_changed_after_the_task_was_made_is_captured_anew() -> None:
    model = Written()
    data = Task.of(seeded(model), clients())
    model.out = nn.Linear(6, 3)
    model.scale.mul_(3)
    asked = plan(release=NoNoise())
    wanted = final(asked, Task.of(model, clients(), own_code="trusted"))
    torch.testing.assert_close(final(asked, data), wanted, rtol=1e-5, atol=1e-6)


def test_another_word_than_trusted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"own_code = 'yes'; needed \"trusted\" or None"):
        Task.of(seeded(Written()), clients(), own_code="yes")  # type: ignore[arg-type]
