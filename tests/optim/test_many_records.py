"""Promise: one record more moves a clipped sum by one clip norm, however many records there are beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.optim.loops import private, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sordino.optim.woven import Memory
from sordino.parts.bounds import Norm
from sordino.parts.clipping import FEW, MANY
from sordino.per_record import ClippedGradient

MOST = 1 + 1e-5  # clip norms


def loop_total(records: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Tensor:
    """The sum of one step of make_private over so many equal records, in clip norms, before its noise."""
    seen: list[Tensor] = []

    def spied(self: Memory, total: Tensor, t: int, coins: Any) -> Tensor:
        seen.append(total.clone())
        return total

    monkeypatch.setattr(Memory, "noised", spied)
    torch.manual_seed(0)
    rows = TensorDataset(torch.full((records, 3), 0.7), torch.full((records, 1), 40.0))
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    train(private(model, rows, batch=records, **settings), nn.functional.mse_loss)
    return seen[0]


@pytest.mark.parametrize("settings", [{}, {"physical_batch": 50_000}], ids=["at once", "in pieces"])
def test_one_record_more_than_200_000_moves_a_loops_sum_by_one_clip(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = loop_total(200_001, monkeypatch, **settings) - loop_total(200_000, monkeypatch, **settings)
    assert 0.9999 < float(moved.norm()) < MOST


class Words(nn.Module):
    """A table that is looked up; few words, so that all records meet in one row."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(words, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.table((x[:, :2] > 0).long()).mean(1))
        return scores


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.cell(x.view(-1, 4, 4))[0][:, -1])
        return scores


class Outside(nn.Module):
    """A parameter of the model's own: every record has a row of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.out = nn.Parameter(torch.ones(16)), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(x * self.gain)
        return scores


FORMS: dict[str, Callable[[], nn.Module]] = {
    "products": lambda: nn.Linear(16, 1),
    "products over positions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(36, 1)
    ),
    "kept gradients of windows": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 16, 1), nn.Conv2d(16, 16, 2), nn.Flatten(), nn.Linear(144, 1)
    ),
    "rows": lambda: nn.Sequential(nn.Linear(16, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)),
    "few words": lambda: Words(5),
    "many words": lambda: Words(FEW * 2 + 1),
    "steps of a recurrence": Recurrent,
    "records one by one": Outside,
}


def total(model: nn.Module, records: int, norm: Norm) -> Tensor:
    x, y = torch.linspace(-1, 1, 16).expand(records, 16).contiguous(), torch.full((records, 1), 50.0)
    found = ClippedGradient(model, lambda out, target: (out * target).sum(1)).sum(x, y, 1.0, norm=norm).total
    return torch.cat([part.reshape(-1).double() for part in found.values()])


@pytest.mark.parametrize("records", [FEW, 1000, MANY + 900])
@pytest.mark.parametrize("name", FORMS)
def test_one_record_more_moves_the_sum_of_every_form_by_one_clip(name: str, records: int) -> None:
    torch.manual_seed(1)
    model = FORMS[name]()
    assert 0.9999 < float((total(model, records + 1, 2) - total(model, records, 2)).norm()) < MOST


def test_one_record_more_moves_a_sum_of_l1_clips_by_one_clip() -> None:
    torch.manual_seed(1)
    model = FORMS["products"]()
    moved = total(model, MANY + 901, 1) - total(model, MANY + 900, 1)
    assert 0.9999 < float(moved.abs().sum()) < MOST
