"""Small versions of what Sordino must be fast at: each entry of WORK sets up once, and gives what is timed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sordino.cli.planning import epsilon_of
from sordino.data.clients import Clients, Records
from sordino.dpsgd import make_private
from sordino.loop import run
from sordino.models import Architecture, CharLstm, DpMnistCnn, EmnistCnn, Linear, Logistic, Mlp, build_seeded
from sordino.parts.encoding import smooth_cycle
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.samplers import Everyone, FixedSize
from sordino.recipes import dp_fed_avg, noisy_minibatch_sgd
from sordino.task import Task
from sordino_papers.grid import run_grid

Once = Callable[[], object]


def task(spec: Architecture, outputs: int, x: Tensor, clients: int, loss: str = "cross_entropy") -> Task:
    """Random labels; the records are dealt out in order."""
    y = torch.rand(len(x)).round() if loss == "logistic" else torch.randint(outputs, (len(x),))
    offsets = np.arange(clients + 1, dtype=np.int64) * (len(x) // clients)
    model = build_seeded(spec, tuple(x.shape[1:]), outputs, 0)
    return Task(model, Clients(Records(x, y), np.arange(len(x), dtype=np.int64), offsets), loss=loss)


def fed_avg(own: Task, cohort: int, rounds: int, epochs: int, batch: int) -> Once:
    sampler = FixedSize(own.clients.population, cohort)
    plan = dp_fed_avg(
        rounds=rounds, clients=sampler, lr=0.05, clip_norm=1.0, noise_multiplier=1.0, epochs=epochs, batch=batch
    )
    return lambda: [done.t for done in run(plan, own)]


def logistic() -> Once:
    return fed_avg(task(Logistic(), 10, torch.randn(5000, 1, 28, 28), 100), 50, rounds=8, epochs=5, batch=10)


def mlp() -> Once:
    return fed_avg(task(Mlp(), 10, torch.randn(5000, 1, 28, 28), 100), 50, rounds=4, epochs=2, batch=10)


def cnn() -> Once:
    return fed_avg(task(EmnistCnn(), 62, torch.randn(4 * 178, 1, 28, 28), 4), 1, rounds=1, epochs=1, batch=32)


def lstm() -> Once:
    return fed_avg(task(CharLstm(), 80, torch.randint(80, (200, 80)), 4), 1, rounds=1, epochs=1, batch=50)


def grid() -> Once:
    own = task(Linear(), 1, torch.randn(25 * 200, 50), 25, "logistic")
    plan = noisy_minibatch_sgd(
        rounds=8, clients=Everyone(25), records=FixedRecords(35, (200,)), clip_norm=1.0, noise_multiplier=1.0, lr=0.1
    )
    return lambda: run_grid([plan] * 18, own, range(18))


def dp_sgd() -> Once:
    model, data = build_seeded(DpMnistCnn(), (1, 28, 28), 10, 0), torch.randn(1024, 1, 28, 28)
    loader = DataLoader(TensorDataset(data, torch.randint(10, (1024,))), batch_size=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    private, stepper, batches = make_private(model, optimizer, loader, epochs=1000, noise_multiplier=1.0, clip_norm=1.0)

    def epoch() -> None:
        for x, y in batches:
            stepper.zero_grad()
            nn.functional.cross_entropy(private(x), y).backward()
            stepper.step()

    return epoch


def smoothing() -> Once:
    signal = torch.randn(3_431_754)
    return lambda: [smooth_cycle(signal, 1.0) for _ in range(3)]


def accounting() -> Once:
    """A new question each time, so that no cache answers."""
    times = count()

    def ask() -> object:
        noise_multiplier = 1.0 + 1e-3 * next(times)
        return epsilon_of("poisson", 10000, 1000, 1e-5, cohort=100, noise_multiplier=noise_multiplier)

    return ask


WORK: dict[str, Callable[[], Once]] = {
    "W1 logistic": logistic,
    "MLP": mlp,
    "W2 CNN": cnn,
    "W4 LSTM": lstm,
    "W6 grid": grid,
    "DP-SGD CNN": dp_sgd,
    "smoothing": smoothing,
    "accounting": accounting,
}
