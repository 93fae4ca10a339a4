"""`fit_head`: a private linear classifier on fixed features, record level; the twin of `recipes.head` at client level.

    W <- W - step_t / C ( sum_{i in batch} clip(grad_i, C) + N(0, (z C)^2 I) ) / batch        W = 0 at first, no bias

Poisson batches of a fifth of the records, momentum, a step that falls linearly to 0. Steps and step size follow from
epsilon alone; the noise multiplier z is solved for (epsilon, delta).
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

DELTA = 1e-5  # of the literature at record level
SHARE = 0.2  # of the records, in a batch


class Head(nn.Module):
    """Scores W ((x - mean) / scale) of features x [n, d]; `private` is the optimizer that has the certificate."""

    mean: Tensor
    inverse: Tensor

    def __init__(self, linear: nn.Linear, mean: Tensor, inverse: Tensor, private: PrivateOptimizer) -> None:
        super().__init__()
        self.linear, self.private = linear, private
        self.register_buffer("mean", mean)
        self.register_buffer("inverse", inverse)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of features."""
        found: Tensor = self.linear((x - self.mean) * self.inverse)
        return found

    def accuracy(self, x: Tensor, y: Any) -> float:
        """Return the share of records whose largest score is their label; a figure of public records only."""
        with torch.no_grad():
            return float((self(x).argmax(1) == torch.as_tensor(np.asarray(y))).double().mean())

    def certificate(self) -> dict[str, Any]:
        """Return the certificate of what was released: W, and mean and scale where they are private."""
        return self.private.certificate()

    def save_certificate(self, path: str | Path) -> dict[str, Any]:
        """Write the certificate to a file, which `sordino certify` can check."""
        return self.private.save_certificate(path)


def record_delta(count: int) -> float:
    """Return 1e-5 where it stays below 1 / count, and count^-1.1 for more records."""
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
    """Train a private linear head on features [n, d] and labels [n]: (epsilon, delta), add or remove one record.

    `delta` is 1e-5 as long as n * delta < 1, as in the literature. It means: for each record, the guarantee of epsilon
    may fail with probability delta. A mechanism that publishes each record outright with probability delta is within
    it, and publishes n * delta records on average: .6 at 60,000. Where that is too much, pass a smaller delta.

    `classes` is public: without it, it is the largest label plus one. `prepare=Standardise(channels=...)` releases a
    mean and a scale of the features, which are part of epsilon; public ones (`normalise=` of an extractor) are free.
    `public` is what the certificate declares beside what the features say of themselves (`Extractor.declared`). `step`
    is the step size per unit of clip norm. The default numbers of steps and step sizes follow power laws in epsilon
    that were found on MNIST and CIFAR-10 with test accuracy in sight: for these two data sets they are not neutral.
    """
    x, y = features.detach(), torch.as_tensor(np.asarray(labels)).long()
    if x.dim() != 2 or y.shape != (len(x),) or not len(x):
        found = f"features of shape {list(x.shape)} and labels of shape {list(y.shape)}"
        raise DataError(found, "features [n, d] and labels [n]", "extractor(images) returns such features")
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
