"""What is proved of models as people write them: the table of docs/privacy.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import private, train
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

WIDTH, EXPERTS, CLASSES = 8, 3, 3


class Block(nn.Module):
    """Two convolutions with GroupNorm, and what came in added."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(2, outside) for _ in range(3)])
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norms[0](self.first(x)))
        out = self.norms[1](self.second(out))
        beside = x if self.short is None else self.norms[2](self.short(x))
        return F.relu(out + beside)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1))
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))
        return out


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.out = nn.Embedding(9, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.read(self.embed(x))[0][:, -1])
        return out


class Experts(nn.Module):
    """A gate, experts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, CLASSES)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.mixed(x, torch.softmax(self.gate(x), 1)))
        return out

    def mixed(self, x: Tensor, shares: Tensor) -> Tensor:
        """Every expert, weighted."""
        return sum(shares[:, i, None] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[no-any-return]


class TopExperts(Experts):
    def mixed(self, x: Tensor, shares: Tensor) -> Tensor:
        """The best two of a record, gathered from what all say."""
        best, which = shares.topk(2, 1)
        said = torch.stack([expert(x) for expert in self.experts], 1)
        return (best[..., None] * said.gather(1, which[..., None].expand(-1, -1, WIDTH))).sum(1)


class MaskedExperts(Experts):
    def mixed(self, x: Tensor, shares: Tensor) -> Tensor:
        """Each expert for the records that chose it, by a mask over the batch: its shapes depend on all records."""
        chosen, out = shares.argmax(1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out[chosen == i] = expert(x[chosen == i])
        return out


class WhereExperts(Experts):
    def mixed(self, x: Tensor, shares: Tensor) -> Tensor:
        """The same with torch.where."""
        chosen, out = shares.argmax(1, keepdim=True), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = torch.where(chosen == i, expert(x), out)
        return out


IMAGE, WORDS = (3, 8, 8), (-6,)  # a negative length stands for words
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "ResNet with GroupNorm": (ResNet, IMAGE),
    "LSTM": (Reader, WORDS),
    "experts, all of them": (Experts, (WIDTH,)),
    "experts, the best two": (TopExperts, (WIDTH,)),
    "experts, by torch.where": (WhereExperts, (WIDTH,)),
    "experts, by a mask": (MaskedExperts, (WIDTH,)),
}


def dataset(shape: Any) -> TensorDataset:
    coins = torch.Generator().manual_seed(0)
    count = 40
    words = torch.randint(9, (count, -shape[0]), generator=coins) if shape[0] < 0 else None
    x = torch.randn(count, *shape, generator=coins) if words is None else words
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=coins))


@pytest.mark.parametrize("name", MODELS)
def test_the_grade_of_a_model(name: str) -> None:
    """A mask over the batch has shapes that depend on records: it runs for each record by itself."""
    build, shape = MODELS[name]
    masked = name == "experts, by a mask"
    parts = private(build(), dataset(shape))
    train(parts)
    assert parts[1].certificate()["own_code"]["grade"] == ("per record (vmap)" if masked else "by construction")
    way = parts[1].recording.graph_pass
    assert way is not None
    assert way.whole == masked
