"""Promise: one record more moves a clipped sum by one clip norm, however many records there are beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import private, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sordino.accounting.bounds import Norm
from sordino.dpsgd import ClippedGradient
from sordino.dpsgd.recording import clip_margin
from sordino.dpsgd.settings import NoiseState
from sordino.errors import PlanError
from sordino.parts.clipping import FEW, MANY

MOST = 1 + 1e-5  # clip norms


def loop_total(records: int, seed: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Tensor:
    """The sum of one step of make_private over so many equal records, in clip norms, before its noise."""
    seen: list[Tensor] = []
    how = settings.get("reduction", "mean")

    def spied(self: NoiseState, total: Tensor, t: int, coins: Any) -> Tensor:
        seen.append(total.clone())
        return total

    monkeypatch.setattr(NoiseState, "noised", spied)
    torch.manual_seed(seed)
    x, y = torch.randn(3).expand(records, 3), torch.randint(4, (1,)).expand(records)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    loop = private(model, TensorDataset(x.contiguous(), y.contiguous()), batch=records, clip_norm=0.01, **settings)
    train(loop, lambda out, target: nn.functional.cross_entropy(out, target, reduction=how))
    return seen[0]


@pytest.mark.parametrize("seed", [0, 4, 5])
def test_one_record_more_than_200_000_moves_the_sum_of_a_loop_by_one_clip(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = loop_total(200_001, seed, monkeypatch) - loop_total(200_000, seed, monkeypatch)
    assert 0.9 < float(moved.norm()) < MOST


@pytest.mark.parametrize(
    "settings", [{"max_physical_batch_size": 50_000}, {"reduction": "sum"}], ids=["in pieces", "a sum"]
)
def test_nothing_of_the_clip_is_kept_free_for_a_mean_where_there_is_none_or_over_few(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = loop_total(200_001, 4, monkeypatch, **settings) - loop_total(200_000, 4, monkeypatch, **settings)
    assert 1 - 0.013 < float(moved.norm()) < MOST


def test_a_mean_over_a_tiny_batch_keeps_next_to_nothing_free() -> None:
    assert clip_margin("mean", 64.0, double=False) < 4e-5
    assert clip_margin("mean", 1e6, double=True) == clip_margin("sum", 1e9, double=False) == 0.0
    with pytest.raises(PlanError, match="max_physical_batch_size"):
        clip_margin("mean", 3e6, double=False)


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


@pytest.mark.parametrize("records", [FEW, 1000, 30_000])
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
