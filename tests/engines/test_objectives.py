"""Promise: a silo's clipped gradient from one backward pass is the one from a row per record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import clients, mlp, noise, seeded
from torch import Tensor, nn

from sordino.engines.objectives import OneClient
from sordino.errors import PlanError
from sordino.parts.gradients import Ball, Batch, Moreau
from sordino.task import Task


def convolution() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3)))


def grouped() -> nn.Module:
    return seeded(nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x * self.scale)
        return out


class Centred(nn.Module):
    """Mixes the records of a batch: only the row per record keeps them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.out(x)
        return hidden - 0.5 * hidden.mean(0)


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "dense": (mlp, (4,)),
    "convolution": (convolution, (2, 6, 6)),
    "group norm": (grouped, (2, 6, 6)),
    "its own parameter": (lambda: seeded(Scaled()), (4,)),
}


def both(name: str, ball: Ball, mask: Tensor | None = None, away: bool = False) -> tuple[Tensor, Tensor, OneClient]:
    """The sum by the fast way and by the slow one, at the row itself or at another point."""
    build, shape = MODELS[name]
    task = Task.of(build(), clients((9,), shape))
    one, start = OneClient(task), task.layout.flatten(task.model)
    row = one.place(one.inward(start), 1)
    w = row + 0.1 * noise(*row.shape, seed=5) if away else row
    x, y = task.clients.records.x, task.clients.records.y
    batch = Batch(x[None], y[None], None if mask is None else mask[None])
    fast = one.clipped(w, batch, ball)
    used = one.fast
    one.fast = None
    slow = one.clipped(w, batch, ball)
    assert torch.equal(one.row, row)
    one.fast = used
    return fast, slow, one


@pytest.mark.parametrize("clip_norm", [0.3, 1e3])
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_one_backward_pass_gives_the_sum_of_clipped_rows(name: str, away: bool, clip_norm: float) -> None:
    fast, slow, one = both(name, Ball(clip_norm), away=away)
    assert one.fast is not None
    assert float(slow.norm()) > 0.1
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=2e-5)


def test_a_model_that_mixes_records_is_refused() -> None:
    MODELS["mixing"] = (lambda: seeded(Centred()), (4,))
    try:
        with pytest.raises(PlanError, match="other records"):
            both("mixing", Ball(0.3))
    finally:
        del MODELS["mixing"]


def test_masked_records_are_left_out() -> None:
    mask = torch.tensor([True] * 4 + [False] * 5)
    fast, slow, _ = both("convolution", Ball(0.3), mask)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=2e-5)
    nothing, _, _ = both("convolution", Ball(0.3), mask & False)
    assert not nothing.any()


@pytest.mark.parametrize("ball", [Ball(0.3, norm=1), Ball(), Ball(0.3, envelope=Moreau(2.0, steps=3))], ids=str)
def test_what_the_fast_way_does_not_cover_goes_the_old_way(ball: Ball) -> None:
    fast, slow, one = both("dense", ball)
    assert one.fast is not None
    assert torch.equal(fast, slow)
