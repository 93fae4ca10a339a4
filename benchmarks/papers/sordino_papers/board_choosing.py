"""Settings of the board's rows, chosen on stand-ins: other data sets, by accuracy on held-out training records.

A stand-in is as large as the row's data and has as many classes and about as many features; its records are taken as
public, and its test records are not read. Noise is repeatable here, one seed for each try. `choose` keeps all tries in
chosen.json; `settings` reads the best of them. Clip norm (.05), momentum (.9) and batch (a fifth of the records) are
the same in all rows and were not chosen here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sordino as so
from sordino.data.records import Dirichlet, Iid, Natural
from sordino_papers.board import Problem, Settings, run

KEPT = Path("benchmarks/board")
FILE = "chosen.json"


class WithConstant(nn.Module):
    """A record [n, d] scaled to norm 1, and a constant for the bias: of norm 1 together."""

    def forward(self, x: Tensor) -> Tensor:
        long = nn.functional.normalize(x)
        return torch.cat([long, torch.ones_like(long[:, :1])], dim=1) / math.sqrt(2)


TABLE = so.features.of(WithConstant(), by="the board: records scaled to norm 1")
CLOTHES = so.features.scattering(2, 27, "photos")
DIGITS = so.features.scattering(2, 27, "digits")
SMALL = so.features.random_convolutions(78, 5, 2, normalise="photos")  # 624 numbers, as many as lite0 has
STAND_INS = {
    "fashion-scattering": Problem("fashion_mnist", CLOTHES, held=10_000),
    "mnist-scattering": Problem("mnist", DIGITS, held=10_000),
    "fashion-539-clients": Problem("fashion_mnist", CLOTHES, Iid(539), held=10_000),
    "mnist-105-writers": Problem("mnist_writers", DIGITS, Natural(105), held=10_000),
    "fashion-624": Problem("fashion_mnist", SMALL, held=10_000),
    "fashion-624-clients": Problem("fashion_mnist", SMALL, Dirichlet(500, 0.3), held=10_000),
    "adult-record": Problem("adult", TABLE, held=6_000),
    "adult-1000": Problem("adult", TABLE, Iid(1000), held=6_000),
    "loans-record": Problem("dear_loans", TABLE, held=2_000),
    "loans-1000": Problem("dear_loans", TABLE, Iid(1000), held=2_000),
}
Grid = tuple[tuple[int, ...], tuple[float, ...]]  # steps (rounds), step sizes
GRIDS: dict[str, dict[float, Grid]] = {
    "fashion-scattering": {1.0: ((100,), (50, 100, 200)), 3.0: ((100,), (100, 200, 400))},
    "mnist-scattering": {3.0: ((100,), (100, 200, 400))},
    "fashion-539-clients": {1.0: ((3, 6), (30, 60)), 2.0: ((5, 10), (30, 60)), 8.0: ((14, 28), (30, 60))},
    "mnist-105-writers": {8.0: ((4, 8), (30, 60))},
    "fashion-624": {1.0: ((75,), (15, 30, 60)), 2.0: ((75,), (30, 60, 120)), 8.0: ((75, 150), (60, 120, 240))},
    "fashion-624-clients": {1.0: ((3, 6), (30, 60)), 2.0: ((5, 10), (30, 60)), 8.0: ((14, 28), (30, 60))},
    "adult-record": {1.0: ((75, 150), (5, 15, 50, 150, 500))},
    "adult-1000": {1.0: ((4, 8, 16, 32), (15, 50, 150, 500))},
    "loans-record": {1.0: ((75, 150), (5, 15, 50, 150, 500))},
    "loans-1000": {1.0: ((4, 8, 16, 32), (15, 50, 150, 500))},
}


def key(stand_in: str, epsilon: float) -> str:
    return f"{stand_in}-eps{epsilon:g}"


def stored(folder: Path = KEPT) -> dict[str, list[dict[str, Any]]]:
    """All tries kept so far, by stand-in and epsilon."""
    path = folder / FILE
    found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


def settings(stand_in: str, epsilon: float, folder: Path = KEPT) -> Settings:
    """The settings with the best held-out accuracy on a stand-in; a KeyError where none was tried."""
    best = max(stored(folder)[key(stand_in, epsilon)], key=lambda one: float(one["accuracy"]))
    return Settings(**best["settings"])


def candidates(stand_in: str) -> Iterator[tuple[float, Settings]]:
    """Every epsilon with every setting of the grid."""
    for epsilon, (steps, sizes) in GRIDS[stand_in].items():
        yield from ((epsilon, Settings(t, s)) for t in steps for s in sizes)


def choose(stand_in: str, folder: Path = KEPT) -> Iterator[str]:
    """Try what is not kept yet, and keep it; yields a line for each try."""
    for epsilon, tried in candidates(stand_in):
        name, every = key(stand_in, epsilon), stored(folder)
        if any(one["settings"] == asdict(tried) for one in every.get(name, [])):
            continue
        found = run(STAND_INS[stand_in], epsilon, tried, seed=1, noise="simulation")
        every = stored(folder)
        every.setdefault(name, []).append({"settings": asdict(tried), "accuracy": round(found.accuracy, 3)})
        folder.mkdir(parents=True, exist_ok=True)
        text = ",\n".join(
            f' "{k}": [\n' + ",\n".join(f"  {json.dumps(one)}" for one in tries) + "\n ]"
            for k, tries in sorted(every.items())
        )
        (folder / FILE).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
        yield f"{name}: {found.accuracy:.2f} with {asdict(tried)}, {found.seconds:.0f} s"
