"""Promises of the losses: the written slope is the value's, the envelope the prox's; a stranger's is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.silos import targets
from tests.tiny import noise, seeded
from torch import Tensor, nn

import sordino as so
from sordino import codec
from sordino.config import TaskSpec
from sordino.engines.dense_clients import has_written_gradient
from sordino.engines.inprocess import InProcess
from sordino.errors import ConfigError, DataError
from sordino.kernels import linear as kernel
from sordino.parts.losses import CODES, OURS, FunctionLoss, Loss, Quantile, is_record_wise, loss_of
from sordino.recipes import dp_fed_avg
from sordino.rng import Seeded
from sordino.task import Task

ALL = [loss() if loss is not Quantile else Quantile(0.3) for loss in OURS]


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.kind)
def test_a_written_slope_is_the_derivative_of_the_value(loss: Loss, outputs: int) -> None:
    scores, y = noise(7, outputs).requires_grad_(), targets(loss.kind, outputs, 7)
    wanted = torch.autograd.grad(loss(scores, y).sum(), scores)[0]
    found = loss.slope(scores.detach().view(1, 7, outputs), y[None])[0]
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("loss", [loss for loss in ALL if loss.has_envelope], ids=lambda loss: loss.kind)
def test_an_envelope_is_the_prox_of_one_score(loss: Loss) -> None:
    """z - envelope / pace is where value(v) + pace / 2 (z - v)^2 is least, found on a fine grid."""
    z, y, pace = noise(9, 1, seed=3), targets(loss.kind, 1, 9), 1.7
    grid = torch.linspace(-4, 4, 80_001, dtype=torch.float64)[:, None]
    for score, target in zip(z.double(), y.double(), strict=True):
        cost = loss(grid, target.expand(len(grid))) + pace / 2 * (score - grid[:, 0]).square()
        found = score - loss.envelope(score[None], target[None], torch.tensor(pace))[0] / pace
        assert float(found) == pytest.approx(float(grid[cost.argmin()]), abs=2e-4)


def test_convex_losses_are_convex_and_smooth_ones_have_no_kink() -> None:
    at = torch.linspace(-3, 3, 601, dtype=torch.float64)[:, None]
    for loss in ALL:
        other = torch.zeros_like(at) if loss.targets == "class" else torch.empty(601, 0, dtype=torch.float64)
        y = torch.zeros(601, dtype=torch.int64 if loss.targets == "class" else torch.float64)
        bends = loss(torch.cat([at, other], 1), y).diff().diff()
        assert loss.convex is bool((bends > -1e-12).all())
        assert loss.smooth is bool(bends.max() < 1e-3)


def test_machine_code_knows_the_losses_by_their_codes() -> None:
    names = ("CROSS_ENTROPY", "MSE", "LOGISTIC", "ABSOLUTE", "HINGE", "QUANTILE")
    assert [(loss.kind.upper(), code) for loss, code in CODES.items()] == [(n, getattr(kernel, n)) for n in names]


def test_a_loss_is_a_kind_a_part_or_a_function_in_python() -> None:
    def own(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs[:, 0] - y).square()

    assert loss_of("mse") == ALL[1]
    assert so.parts.Quantile(0.5) == loss_of(Quantile(0.5))
    given = loss_of(own)
    assert given == FunctionLoss(own)
    assert not given.has_slope
    assert not given.has_envelope
    assert not is_record_wise(given)
    with pytest.raises(ConfigError, match="did you mean 'hinge'"):
        loss_of("hing")
    with pytest.raises(ConfigError, match="a function"):
        loss_of(3)  # type: ignore[arg-type]


def test_a_loss_is_a_name_or_a_table_in_a_file() -> None:
    for written in ("quantile", "quantile(0.9)"):
        with pytest.raises(ConfigError, match="quantile"):
            codec.read(TaskSpec, {"loss": written})
    with pytest.raises(ConfigError, match=r"write loss = \{ kind = \"quantile\", tau = ... \}"):
        codec.read(TaskSpec, {"loss": "quantile"})
    with pytest.raises(ConfigError, match="in \\(0, 1\\)"):
        codec.read(TaskSpec, {"loss": {"kind": "quantile", "tau": 1.5}})
    for loss in ALL:
        assert codec.read(TaskSpec, codec.dump(TaskSpec(loss=loss))).loss == loss
    assert codec.read(TaskSpec, {"loss": "mse", "model": "linear"}).loss == loss_of("mse")


def huber(scores: Tensor, targets: Tensor) -> Tensor:
    return (scores - targets.reshape(scores.shape)).clamp(-1.0, 1.0) / scores.shape[-1]


@pytest.fixture
def strange() -> Iterator[dict[str, type[Loss]]]:
    """A stranger's losses; forgotten afterwards."""

    @dataclass(frozen=True)
    class Huber(Loss, kind="huber"):
        """Huber's loss."""

        def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.huber_loss(outputs[:, 0], targets, reduction="none")

        def slope(self, scores: Tensor, targets: Tensor) -> Tensor:
            return huber(scores, targets)

    @dataclass(frozen=True)
    class Mixed(Huber, kind="mixed"):
        """Whose slope is that of a mean over records."""

        def slope(self, scores: Tensor, targets: Tensor) -> Tensor:
            return huber(scores, targets) / scores.shape[1]

    @dataclass(frozen=True)
    class Steep(Huber, kind="steep"):
        """Whose envelope is not its own."""

        def envelope(self, scores: Tensor, targets: Tensor, pace: Tensor) -> Tensor:
            return 3 * huber(scores, targets)

    yield {"own": Huber, "mixed": Mixed, "steep": Steep}
    for kind in ("huber", "mixed", "steep"):
        Loss.members.pop(kind)


def federation(loss: Any) -> Task:
    clients = [(noise(6, 4, seed=i), noise(6, seed=9 + i)) for i in range(3)]
    return Task.of(seeded(nn.Linear(4, 1)), clients, loss=loss)


def test_a_strangers_written_slope_runs_on_the_written_path(strange: dict[str, type[Loss]]) -> None:
    plan = dp_fed_avg(clients=so.Everyone(3), batch=2, lr=0.1, clip_norm=1.0, noise_multiplier=1.0, rounds=2)
    assert has_written_gradient(federation("huber"), single=True)
    header = InProcess().prepare(plan, federation(strange["own"]()), Seeded(0)).header
    assert (header["gradient"], header["loops"]) == ("LinearClients", "torch")
    written, through_autograd = (so.train(plan, federation(loss)).model for loss in ("huber", strange["own"]().value))
    for one, other in zip(written.parameters(), through_autograd.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("which", "what"), [("mixed", "slope"), ("steep", "envelope")])
def test_a_written_slope_that_is_not_the_values_is_refused(
    strange: dict[str, type[Loss]], which: str, what: str
) -> None:
    """A record's clip would bound something else than what its loss says."""
    with pytest.raises(DataError, match=f"loss '{which}' whose method {what}"):
        federation(strange[which]())
