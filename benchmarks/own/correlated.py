"""What noise that rounds share costs at 3.4M parameters and 32 bands; the aim is 5% of a round of W3 at most.

python benchmarks/own/correlated.py

W3 is the SVHN CNN with 300 images a client in batches of 64 (benchmarks/peers/federations.py; PERFORMANCE has the same
work with more clients a round). CPU seconds of noise and of one client's training, in turn in one process, the least of
several; then their ratio for rounds of 2 clients (as `make bench-peers` runs W3), 10 and 50. Memory is what the noise
holds between rounds, and what one draw needs besides.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import numpy as np
import torch

from sordino.data.clients import Clients, Records
from sordino.loop import run
from sordino.models import SvhnCnn, build_seeded
from sordino.parts.strategies import BandedSquareRoot
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import Release
from sordino.parts.releases import CentralNoise
from sordino.parts.samplers import FixedSize
from sordino.parts.strategies import BufferedToeplitz
from sordino.recipes import dp_fed_avg
from sordino.rng import Seeded
from sordino.task import Task

BANDS, TURNS, NOBODY = 32, 5, np.zeros(0, dtype=np.int64)


def seconds(once: Callable[[], object]) -> float:
    began = time.process_time()
    once()
    return time.process_time() - began


def client() -> tuple[Callable[[], object], int]:
    """One client's round; and how many parameters there are."""
    x, y = torch.randn(4 * 300, 3, 32, 32), torch.randint(10, (4 * 300,))
    model = build_seeded(SvhnCnn(), (3, 32, 32), 10, 0)
    task = Task(model, Clients(Records(x, y), np.arange(1200), np.arange(5) * 300))
    plan = dp_fed_avg(
        rounds=1, clients=FixedSize(4, 1), lr=0.05, clip_norm=1.0, noise_multiplier=1.0, epochs=1, batch=64
    )
    return lambda: list(run(plan, task)), sum(p.numel() for p in model.parameters())


class Noise:
    """The rounds of one release, one call each."""

    def __init__(self, release: Release, length: int) -> None:
        self.release, self.memory, self.t = release, release.init(length), 0
        self.total = torch.zeros(length, dtype=torch.float64)

    def __call__(self) -> None:
        coins = Seeded(0)
        _, self.memory = self.release.noised(self.total, NOBODY, lambda name: coins.at(self.t, name), self.memory)
        self.t += 1

    @property
    def megabytes(self) -> float:
        return sum(held.nbytes for held in self.memory.values()) / 1e6


def main() -> None:
    torch.set_num_threads(1)
    train, length = client()
    shared = {
        "independent": CentralNoise(Gaussian(1.0)),
        f"{BANDS} bands": CorrelatedNoise(Gaussian(1.0), BandedSquareRoot(BANDS)),
        "3 buffers": CorrelatedNoise(Gaussian(1.0), BufferedToeplitz(3, (0.1, 0.2, 0.2), (0.5, 0.9, 0.99))),
    }
    noises = {name: Noise(release, length) for name, release in shared.items()}
    train()
    for noise in noises.values():
        noise()
    turns = [(seconds(train), *(seconds(noise) for noise in noises.values())) for _ in range(TURNS)]
    one, *found = (min(column) for column in zip(*turns, strict=True))
    print(f"{length:,} parameters; one client {one:.3f} s CPU (its round with independent noise)")
    for (name, noise), cost in zip(noises.items(), found, strict=True):
        parts = ", ".join(f"{100 * cost / (n * (one - found[0]) + cost):.2f}% of {n}" for n in (2, 10, 50))
        print(f"{name}: {cost:.3f} s CPU, of a round with so many clients {parts}; holds {noise.megabytes:.0f} MB")
    print(f"peak of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
