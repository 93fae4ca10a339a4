"""Noise that rounds share, ours beside pfl's banded matrix mechanism: accuracy on MNIST at the same epsilon.

python benchmarks/peers/banded.py [--seeds 3] [--mu 0.5]

The first 50,000 training images dealt to 1,000 clients, 50 of them a round in turn (20 rounds between two of one's
own), T = 100, one local epoch in batches of 10, lr .1, clip .8, logistic regression. Each side has bands of its own
making and the server's step that is best for it, by a run of another seed on the last 10,000 training images. Noise is
that of mu-GDP by each library's own sensitivity; what pfl's matrix moves by in truth is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
from federated import HERE, spoken

from sordino.accounting.calibration import noisier
from sordino.parts.strategies import Banded
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.samplers import RoundRobin
from sordino.parts.server_optimizers import Sgd
from sordino.recipes import dp_ftrl
from sordino_papers.correlated import accuracy, climbed
from sordino_papers.paper_000 import mnist_logistic, mnist_validation
from sordino_papers.verdicts import paired

CLIENTS, COHORT, ROUNDS, PILOT = 1000, 50, 100, 99


def ours(mu: float, step: float, seed: int, choose: bool = False) -> float:
    work = {"rounds": ROUNDS, "clients": RoundRobin(CLIENTS, COHORT), "lr": 0.1, "clip_norm": 0.8, "batch": 10}
    bare = dp_ftrl(**work, noise_multiplier=1.0, strategy=Banded(CLIENTS // COHORT), server=Sgd(lr=step))
    assert isinstance(bare.release, CorrelatedNoise)
    plan = noisier(bare, bare.release.strategy.sensitivity(bare.patterns) / mu)
    return accuracy(plan, mnist_logistic(CLIENTS, seed), mnist_validation() if choose else None, seed)


def theirs(folder: Path, mu: float, step: float, seed: int, choose: bool = False) -> float:
    """In pfl's own environment, on the same clients."""
    task, file = mnist_logistic(CLIENTS, seed), folder / f"{seed}.npz"
    if not file.exists():
        test = mnist_validation() if seed == PILOT else task.test
        rows = task.clients.index.reshape(CLIENTS, -1)
        x, y = task.clients.records.x.numpy(), task.clients.records.y.numpy()
        np.savez(file, x=x[rows], y=y[rows], test_x=test.x.numpy(), test_y=test.y.numpy())
    python = str(HERE / ".venv-pfl" / "bin" / "python")
    found = spoken([python, "banded_pfl.py", str(file), str(mu), str(step), str(seed)], 600)
    if "accuracy" not in found:
        raise SystemExit(str(found))
    print(json.dumps(found), file=sys.stderr, flush=True)
    return float(found["accuracy"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--mu", type=float, default=0.5)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = {"sordino": ours, "pfl": partial(theirs, Path(folder))}
        found = {}
        for name, side in sides.items():
            step = climbed(lambda step, side=side: side(given.mu, step, PILOT, choose=True))
            found[name] = [side(given.mu, step, seed) for seed in range(given.seeds)]
            print(
                f"{name}: step {step:g}, {mean(found[name]):.2f} {[round(one, 2) for one in found[name]]}", flush=True
            )
    print(f"ours minus pfl's: {paired(found['sordino'], found['pfl'])} points")


if __name__ == "__main__":
    main()
