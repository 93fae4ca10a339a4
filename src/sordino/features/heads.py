"""Private linear classifier on fixed features (`fit_head`), at record level; `recipes.head` is that at client level.

    W <- W - step_t / C ( sum_{i in batch} clip(grad_i, C) + N(0, (z C)^2 I) ) / b        W = 0 at first, no bias

The weights W are trained by DP-SGD with momentum, on Poisson batches of b records on average, a fifth of all. C is the
clip norm, and step_t decreases linearly to 0. Number of steps and step size are functions of epsilon alone; the noise
multiplier z is calibrated to (epsilon, delta).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sordino.accounting.accountant import default_delta
from sordino.certificate.facts import Declared
from sordino.data.lineage import PUBLIC
from sordino.dpsgd.optimizer import PrivateOptimizer
from sordino.dpsgd.private_loop import make_private
from sordino.dpsgd.standardise import Standardise
from sordino.errors import DataError
from sordino.ledger.ledger import Ledger
from sordino.rng import Mode

DELTA = 1e-5  # usual in the literature at record level
SHARE = 0.2  # expected batch size over number of records


class Head(nn.Module):
    """Linear classifier with scores W ((x - mean) / scale) of features x; optimizer `private` has trained it."""

    mean: Tensor
    inverse: Tensor

    def __init__(self, linear: nn.Linear, mean: Tensor, inverse: Tensor, private: PrivateOptimizer) -> None:
        super().__init__()
        self.linear, self.private = linear, private
        self.register_buffer("mean", mean)
        self.register_buffer("inverse", inverse)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of features x."""
        found: Tensor = self.linear((x - self.mean) * self.inverse)
        return found

    def accuracy(self, x: Tensor, y: Any) -> float:
        """Return the share of records whose largest score is that of their label; use it on public records only."""
        with torch.no_grad():
            return float((self(x).argmax(1) == torch.as_tensor(np.asarray(y))).double().mean())

    def certificate(self) -> dict[str, Any]:
        """Return the certificate of everything that was released: W, and mean and scale if computed privately."""
        return self.private.certificate()

    def save_certificate(self, path: str | Path) -> dict[str, Any]:
        """Write the certificate to a file, which `sordino certify` can check."""
        return self.private.save_certificate(path)


def record_delta(count: int) -> float:
    """Return the default delta for `count` records: 1e-5 if that is below 1 / count, else count^-1.1."""
    return DELTA if count * DELTA < 1 else default_delta(count)


def fit_head(
    features: Tensor,
    labels: Any,
    *,
    epsilon: float,
    delta: float | None = None,
    classes: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    step: float | None = None,
    clip_norm: float = 0.05,
    momentum: float = 0.9,
    prepare: Standardise | None = None,
    public: Iterable[Declared] = (),
    noise: Mode = "simulation",
    seed: int = 0,
    max_physical_batch_size: int | None = None,
    ledger: Ledger | str | Path | None = None,
    dataset: str | None = None,
) -> Head:
    """Train a linear head on features [n, d] and labels [n] with (epsilon, delta)-DP, add or remove one record.

    `delta` is by default 1e-5 as long as n * delta < 1, as in the literature. A mechanism that publishes each record
    with probability delta satisfies this guarantee, and publishes n * delta records on average: 0.6 of 60,000. Pass a
    smaller delta if that is too many.

    `classes` is taken as public; its default is the largest label plus one. `prepare=Standardise(channels=...)`
    releases mean and scale of the features, whose cost is part of epsilon; those of public images (`normalise` of an
    extractor) cost nothing. The certificate declares `public` data in addition to those of the features
    (`Extractor.declared`). `step` is the step size per unit of clip norm. The default numbers of steps and step sizes
    follow power laws in epsilon that were fitted to test accuracy on MNIST and CIFAR-10: results with these defaults
    on these two data sets are optimistic.
    """
    x, y = features.detach(), torch.as_tensor(np.asarray(labels)).long()
    if x.dim() != 2 or y.shape != (len(x),) or not len(x):
        found = f"features of shape {list(x.shape)} and labels of shape {list(y.shape)}"
        raise DataError(found, "features [n, d] and labels [n]", "use the features that extractor(images) returns")
    count = len(x)
    steps = max(1, round(150 * epsilon**0.43)) if steps is None else steps
    step = 12.0 * epsilon**0.63 if step is None else step
    model = nn.Linear(x.shape[1], int(y.max()) + 1 if classes is None else classes, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=step / clip_norm, momentum=momentum)
    held: Tensor = x.float()
    setattr(held, PUBLIC, (*getattr(features, PUBLIC, ()), *public))
    rows = DataLoader(TensorDataset(held, y), batch_size=max(1, round(SHARE * count)) if batch is None else batch)
    _, private, loader = make_private(
        model, inner, rows, steps=steps, epsilon=epsilon, delta=record_delta(count) if delta is None else delta,
        clip_norm=clip_norm, noise=noise, seed=seed, loss="cross_entropy", ledger=ledger, dataset=dataset,
        prepare=prepare, max_physical_batch_size=max_physical_batch_size,
    )  # fmt: skip
    falling = torch.optim.lr_scheduler.LambdaLR(private, lambda t: max(0.0, 1 - t / steps))
    while private.steps < steps:
        for inputs, targets in loader:
            before = private.steps
            private.zero_grad()
            private.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            private.step()
            if private.steps > before:
                falling.step()
            if private.steps >= steps:
                break
    moments = (torch.zeros(()), torch.ones(())) if loader.scaler is None else loader.scaler.moments()
    return Head(model, moments[0].float(), moments[1].float(), private)
