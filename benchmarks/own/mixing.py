"""What looking whether records are kept apart costs in a training of 100 steps; the aim is 3% at most.

python benchmarks/own/mixing.py

Printed are the part of the CPU time that is spent inside looks (median of several trainings: the steadier figure), and
the CPU time with looks over that without (interleaved pairs, median and quartiles: it holds the machine's noise too).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sordino.dpsgd import make_private
from sordino.dpsgd.batch_independence import Lookout
from sordino.dpsgd.recording import Recording
from sordino.models import CharLstm, DpMnistCnn, build_seeded

STEPS, TIMES = 100, 15


class Wrapped(nn.Module):
    """Own code around a model, so that it is looked at again and again."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def images(batch: int) -> tuple[nn.Module, Tensor, int]:
    return Wrapped(build_seeded(DpMnistCnn(), (1, 28, 28), 10, 0)), torch.randn(4 * batch, 1, 28, 28), 10


def texts(batch: int) -> tuple[nn.Module, Tensor, int]:
    return build_seeded(CharLstm(hidden=64), (20,), 40, 0), torch.randint(40, (4 * batch, 20)), 40


WORK: dict[str, tuple[Callable[[int], Any], int]] = {
    "CNN, batch 64": (images, 64),
    "CNN, batch 256": (images, 256),
    "LSTM, batch 64": (texts, 64),
}


def seconds(make: Callable[[int], Any], batch: int) -> float:
    """CPU time of 100 steps and the certificate's look."""
    torch.manual_seed(0)
    model, x, classes = make(batch)
    loader = DataLoader(TensorDataset(x, torch.randint(classes, (len(x),))), batch_size=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    private, stepper, batches = make_private(model, optimizer, loader, epochs=STEPS // 4, noise_multiplier=1.0)
    began = time.process_time()
    for _ in range(STEPS // 4):
        for xs, ys in batches:
            stepper.zero_grad()
            nn.functional.cross_entropy(private(xs), ys).backward()
            stepper.step()
    stepper.recording.vouch()
    return time.process_time() - began


def without(make: Callable[[int], Any], batch: int) -> float:
    """The same with the looks switched off."""
    kept = Lookout.start, Lookout.wants, Recording._look
    Lookout.start = lambda *_: None  # type: ignore[method-assign]
    Lookout.wants = lambda *_: False  # type: ignore[method-assign]
    Recording._look = lambda *_: None  # type: ignore[method-assign]
    try:
        return seconds(make, batch)
    finally:
        Lookout.start, Lookout.wants, Recording._look = kept  # type: ignore[method-assign]


def inside(make: Callable[[int], Any], batch: int) -> tuple[float, float]:
    """CPU time with looks, and the part of it that is spent in them."""
    kept, spent = (Lookout.start, Lookout.again), [0.0]

    def timed(look: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            began = time.process_time()
            look(*args)
            spent[0] += time.process_time() - began

        return run

    Lookout.start, Lookout.again = (timed(look) for look in kept)  # type: ignore[method-assign, assignment]
    try:
        total = seconds(make, batch)
    finally:
        Lookout.start, Lookout.again = kept  # type: ignore[method-assign]
    return total, spent[0] / total


def main() -> None:
    torch.set_num_threads(1)
    for name, (make, batch) in WORK.items():
        seconds(make, batch)  # kernels are compiled, caches filled
        looked = [(*inside(make, batch), without(make, batch)) for _ in range(TIMES)]
        low, middle, high = statistics.quantiles([total / plain for total, _, plain in looked], n=4)
        share = statistics.median(part for _, part, _ in looked)
        print(f"{name}: {share:.2%} in looks; with over without {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
