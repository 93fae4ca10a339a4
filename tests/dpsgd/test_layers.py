"""Every kind of layer: what a step hands over is the sum over records, each clipped by one norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.dpsgd.loops import QUIET, batch_of, clipped_sum, data, mlp, private
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sordino.models import DpMnistCnn

CLIP = 0.5


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.read, self.out = nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.embed(x))
        hidden = hidden + self.attend(hidden, hidden, hidden, need_weights=False)[0]
        out: Tensor = self.out(self.read(hidden)[0][:, -1])
        return out


class Own(nn.Module):
    """A parameter of the model itself, a layer used twice, and a table that has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer, self.out = nn.Parameter(torch.ones(4)), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.layer(torch.tanh(self.layer(x * self.scale)))) @ self.layer.weight)
        return out


class Viewed(nn.Module):
    """A `view` that images in channels-last order cannot give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.second(F.relu(self.first(x))).view(-1, 64))
        return out


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "dense": (mlp, (4,)),
    "one layer": (lambda: nn.Linear(4, 3), (4,)),
    "convolution": (images, (1, 8, 8)),
    "group norm": (lambda: images(nn.GroupNorm(2, 4)), (1, 8, 8)),
    "instance norm": (lambda: images(nn.InstanceNorm2d(4, affine=True)), (1, 8, 8)),
    "viewed": (Viewed, (1, 8, 8)),
    "tokens": (Tokens, (6,)),
    "its own parameter": (Own, (4,)),
    "tutorial": (lambda: DpMnistCnn().build((1, 28, 28), 3), (1, 28, 28)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_layer_is_clipped_as_in_a_loop_over_records(name: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(3)
    model, dataset = build(), data(30, shape)
    x, y = dataset.tensors
    x = torch.randint(9, x.shape) if name == "tokens" else x
    dataset.tensors = (x, y)
    parts = private(model, dataset, batch=10, noise_multiplier=QUIET, smoothing=0.0, clip_norm=CLIP)
    rows = batch_of(parts, 0)
    wanted = clipped_sum(model, x[rows], y[rows], CLIP)
    for a, b in parts[2]:
        F.cross_entropy(model(a), b).backward()  # type: ignore[no-untyped-call]
        parts[1].step()
        break
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double() * 10, wanted[key], rtol=1e-4, atol=1e-4)


def test_attention_without_weights_runs_by_layer_rules_not_record_by_record() -> None:
    model, dataset = Tokens(), data(30, (6,))
    dataset.tensors = (torch.randint(9, (30, 6)), dataset.tensors[1])
    parts = private(model, dataset, batch=10)
    x, y = next(iter(parts[2]))
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    parts[1].step()
    assert parts[1].recording.grade() == ("by construction", "")
    found = parts[1].recording.graph_pass
    assert found is not None
    assert not found.whole
