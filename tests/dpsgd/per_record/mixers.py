"""Models whose forward mixes the records of a batch, as people write them, and models that only look as if they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH, CLASSES = 4, 3


class Own(nn.Module):
    """Two layers; what stands between and before them is the attack's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.relu(self.between(self.first(self.before(x)))))
        return out

    def before(self, x: Tensor) -> Tensor:
        return x

    def between(self, hidden: Tensor) -> Tensor:
        return hidden


class CentredInput(Own):
    def before(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Graph(Own):
    """(A X) W with edges between records that are alike."""

    def before(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.T, 1) @ x


class Detached(Own):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.detach().mean(0)


class FunctionalNorm(Own):
    """Only in training, as batch norm does."""

    def before(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, torch.zeros(WIDTH), torch.ones(WIDTH), training=self.training)


class Experts(Own):
    """An expert takes as many records as its capacity; those who come later pass it by."""

    def before(self, x: Tensor) -> Tensor:
        choice = x[:, :2].argmax(1)
        place = F.one_hot(choice, 2).cumsum(0).gather(1, choice[:, None])[:, 0]
        return x * (place <= max(1, len(x) // 4))[:, None]


class BehindZero(Own):
    """A batch mean through a layer that begins at zero: invisible until it has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def between(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.gate(hidden.mean(0, keepdim=True).expand_as(hidden))
        return hidden + mixed


class SlopesOnly(Own):
    """The values are right; the gradients of all records meet."""

    def between(self, hidden: Tensor) -> Tensor:
        mean = hidden.mean(0)
        return hidden + (mean - mean.detach())


class Shuffled(Own):
    """Mixup: every record with another."""

    def before(self, x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


class Later(Own):
    """Mixes from a later pass on; it counts where no look at the module's state comes."""

    passes: ClassVar[int] = 0

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, Later.passes = after, 0

    def before(self, x: Tensor) -> Tensor:
        Later.passes += 1
        return x - x.mean(0) if Later.passes > self.after else x


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "x minus its mean": CentredInput,
    "a graph of records": Graph,
    "a detached mean": Detached,
    "functional batch norm": FunctionalNorm,
    "experts of some capacity": Experts,
    "a mean behind a layer of zeros": BehindZero,
    "mixup": Shuffled,
}


class Residual(nn.Module):
    """Own code, with dropout both as a layer and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.drop, self.norm = nn.Dropout(0.5), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.drop(torch.relu(self.first(x))))
        hidden = hidden + F.dropout(torch.tanh(self.second(hidden)), 0.3, self.training)
        out: Tensor = self.out(hidden + 0.1 * torch.randn_like(hidden))
        return out


class Tokens(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed, self.batch_first = nn.Embedding(9, 8), batch_first
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=batch_first)
        self.encode, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        hidden = self.encode(hidden) if self.batch_first else self.encode(hidden.transpose(0, 1)).transpose(0, 1)
        out: Tensor = self.out(hidden.mean(1))
        return out


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(10, CLASSES)
        self.read = kind(6, 5, 2, batch_first=True, dropout=0.3, bidirectional=True)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.read(self.embed(x))[0][:, -1])
        return out


class OwnParameter(nn.Module):
    """Runs record by record: a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x * self.scale) @ torch.eye(CLASSES, dtype=x.dtype)
        return out


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES))


def dense(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), *layers, nn.Linear(8, CLASSES))


SQUARE, WORDS = (1, 8, 8), (-6,)  # a negative length stands for words
HONEST: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "own code with dropout and noise": (Residual, (WIDTH,)),
    "two layers": (Own, (WIDTH,)),
    "a parameter of its own": (OwnParameter, (WIDTH,)),
    "transformer": (Tokens, WORDS),
    "transformer, time first": (lambda: Tokens(batch_first=False), WORDS),
    "LSTM": (lambda: Recurrent(nn.LSTM), WORDS),
    "GRU": (lambda: Recurrent(nn.GRU), WORDS),
    "convolution": (images, SQUARE),
    "group norm": (lambda: images(nn.GroupNorm(2, 4)), SQUARE),
    "instance norm": (lambda: images(nn.InstanceNorm2d(4, affine=True)), SQUARE),
    "local response norm": (lambda: images(nn.LocalResponseNorm(2)), SQUARE),
    "dropped channels": (lambda: images(nn.Dropout2d(0.4)), SQUARE),
    "upsampled": (lambda: images(nn.Upsample(scale_factor=2), nn.AvgPool2d(2)), SQUARE),
    "dropout": (lambda: dense(nn.Dropout(0.5), nn.Tanh()), (WIDTH,)),
    "alpha dropout": (lambda: dense(nn.SELU(), nn.AlphaDropout(0.3)), (WIDTH,)),
    "random relu": (lambda: dense(nn.RReLU()), (WIDTH,)),
    "layer norm": (lambda: dense(nn.LayerNorm(8), nn.GELU()), (WIDTH,)),
    "rms norm": (lambda: dense(nn.RMSNorm(8), nn.SiLU()), (WIDTH,)),
    "softmax": (lambda: dense(nn.Softmax(dim=1)), (WIDTH,)),
}


def inputs(count: int, shape: Any, seed: int = 0) -> Tensor:
    coins = torch.Generator().manual_seed(seed)
    if shape[0] < 0:
        return torch.randint(9, (count, -shape[0]), generator=coins)
    return torch.randn(count, *shape, generator=coins)
