"""Whatever the model computes in, a record moves the sum of a step by one clip at most."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import Parts, data, first_batch, private, train
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from sordino.dpsgd.optimizer import PrivateOptimizer
from sordino.errors import PlanError

FULL, HALVES = [torch.float64, torch.float32], [torch.bfloat16, torch.float16]


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3))


def deep() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def stepped(model: nn.Module, records: TensorDataset, clip: float, autocast: bool, patch: pytest.MonkeyPatch) -> Tensor:
    """The sum of one step over all records, in units of the clip, before its noise."""
    sums: list[Tensor] = []

    def kept(self: PrivateOptimizer, t: int) -> Tensor:
        sums.append(self.total.clone())
        return torch.zeros(len(self.total))

    patch.setattr(PrivateOptimizer, "_noised", kept)
    parts = private(model, records, batch=len(records), clip_norm=clip)
    for x, y in parts[2]:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = F.cross_entropy(parts[0](x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        parts[1].step()
    return sums[0]


def alike(kind: torch.dtype, count: int) -> TensorDataset:
    """Records that are almost the same: what rounding does to one, it does to all."""
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(5)).expand(count, -1).to(kind)
    return TensorDataset(x, torch.zeros(count, dtype=torch.int64))


@pytest.mark.parametrize("clip", [0.1, 10.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("kind", [*FULL, *HALVES, "autocast"], ids=str)
@pytest.mark.parametrize("build", [linear, deep])
def test_a_record_moves_the_sum_by_one_clip_in_every_precision(
    build: Callable[[], nn.Module], kind: Any, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In sums of half precision it was 2.59. The extra record is the like of the others, then another."""
    own = torch.float32 if kind == "autocast" else kind
    base = alike(own, 301)
    other = TensorDataset(
        torch.cat([base.tensors[0], -3 * base.tensors[0][:1]]), torch.cat([base.tensors[1], torch.ones(1).long()])
    )
    model = build().to(own)
    sums = [stepped(build().to(own), part, clip, kind == "autocast", monkeypatch) for part in (base, other)]
    more = alike(own, 302)
    sums.append(stepped(model, more, clip, kind == "autocast", monkeypatch))
    moved = [float((total - sums[0]).norm()) for total in sums[1:]]
    assert max(moved) <= 1.0 + 1e-4
    assert float(sums[0].norm()) > 5.0  # something was summed
    if clip < 1:
        assert min(moved) > 0.99


@pytest.mark.parametrize("kind", [*HALVES, "autocast"], ids=str)
def test_half_precision_trains_as_full_precision_does(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(60).tensors
    exact = stepped(deep(), TensorDataset(x, y), 1.0, False, monkeypatch)
    own = torch.float32 if kind == "autocast" else kind
    found = stepped(deep().to(own), TensorDataset(x.to(own), y), 1.0, kind == "autocast", monkeypatch)
    assert float((found - exact).norm()) < 0.03 * float(exact.norm())


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3),
            nn.GroupNorm(2, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 4, 3, groups=2),
            nn.Flatten(),
            nn.Linear(16, 3),
        ),
        (1, 10, 10),
    ),
    "recurrence": (lambda: Last(nn.LSTM(4, 8, batch_first=True)), (5, 4)),
    "attention": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(32, 3)),
        (4, 8),
    ),
    "own": (lambda: nn.Sequential(Scaled(), nn.Linear(4, 3)), (4,)),
}


class Last(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.out = body, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.body(x)[0][:, -1])
        return out


class Scaled(nn.Module):
    """A parameter of no known layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.mark.parametrize("kind", [torch.bfloat16, "autocast"], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_train_in_half_precision_and_under_autocast(name: str, kind: Any) -> None:
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    own = torch.float32 if kind == "autocast" else kind
    x, y = data(60, shape).tensors
    parts: Parts = private(build().to(own), TensorDataset(x.to(own), y))
    for some, labels in parts[2]:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = F.cross_entropy(parts[0](some), labels)
        parts[1].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        parts[1].step()
    assert parts[1].steps == 5
    assert parts[1].not_finite == 0
    assert {p.dtype for p in parts[0].parameters()} == {own}


def test_a_hook_inside_a_model_sees_no_record() -> None:
    """A loss that reached past the output would come back with the mean not undone."""
    seen: list[Tensor] = []
    model = deep().to(torch.bfloat16)
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))  # type: ignore[index]
    x, y = data().tensors
    parts = private(model, TensorDataset(x.bfloat16(), y))
    some, labels = first_batch(parts)
    out = parts[0](some)
    met = len(seen)
    F.cross_entropy(parts[0](some), labels).backward()  # type: ignore[no-untyped-call]
    assert met == len(seen)  # made-up records alone were shown to it, once
    assert out.requires_grad


def test_one_step_is_in_one_precision() -> None:
    parts = private()
    x, y = first_batch(parts)
    first = F.cross_entropy(parts[0](x), y)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanError, match="half and in full precision"):
        parts[0](x)
    first.backward()  # type: ignore[no-untyped-call]


def test_full_precision_is_as_it_was() -> None:
    parts = private()
    train(parts)
    assert parts[1].recording.mean_undone is None
