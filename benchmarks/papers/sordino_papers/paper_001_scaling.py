"""Paper 001, Theorem 2.3: one pass, multi-stage acceleration; the excess risk against n, M and epsilon."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sordino.accounting import calibration
from sordino.accounting.calibration import calibrate
from sordino.accounting.composition import Line
from sordino.accounting.events import GaussianNoise
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import OnePass
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.releases import LocalNoise
from sordino.parts.samplers import Everyone
from sordino.parts.server_optimizers import Stage, Stages
from sordino.plan import Plan
from sordino.task import Task
from sordino_papers.choosing import within
from sordino_papers.grid import run_grid
from sordino_papers.panels import curves
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.theory import Federation, multi_stage

DIMENSION, ROUNDS, DELTA, RADIUS, NOISES = 10, 100, 1e-6, 1.2, 8
GAP = 0.2  # twice the excess risk of the model that a run begins with
BASE = {"n": 16000, "M": 8, "epsilon": 0.5}
PRESCRIBED = 2.0  # the epsilon that the stages are for
GRID: dict[str, tuple[float, ...]] = {
    "n": (4000, 8000, 16000, 32000),
    "M": (4, 8, 16, 32),
    "epsilon": (0.25, 0.5, 1.0),
}
EXPONENTS = {"n": -2.0, "M": -1.0, "epsilon": -2.0}  # of d L^2 log(1/delta) / (mu M n^2 epsilon^2)


def task(n: int, silos: int, seed: int) -> Task:
    """y = <w*, x> + 0.1 noise, x uniform in {-1, 1}^d / sqrt(d): strongly convex least squares with w* of length 1."""
    rng = np.random.default_rng(seed)
    x = (rng.integers(0, 2, (silos, n, DIMENSION)) * 2.0 - 1) / np.sqrt(DIMENSION)
    y = x @ best() + 0.1 * rng.standard_normal((silos, n))
    layer = nn.Linear(DIMENSION, 1, bias=False)
    nn.init.zeros_(layer.weight)
    both = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32))
    return Task.of(layer, list(zip(*both, strict=True)), loss="mse")


def best() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """w*."""
    return np.full(DIMENSION, 1 / np.sqrt(DIMENSION))


def plan(n: int, silos: int, epsilon: float) -> Plan:
    """R = 100 disjoint batches, noise for one release of each record; the same stages for all settings."""
    local = BatchGradient(OnePass(n // ROUNDS, (n,)), RADIUS)
    noise, clients = LocalNoise(Gaussian(1.0)), Everyone(silos)
    made = Plan(rounds=ROUNDS, clients=clients, local=local, release=noise, server=server())
    return calibrate(made, epsilon=epsilon, delta=DELTA)


@cache
def server() -> Stages:
    """What Appendix E.5.1 prescribes for the base at epsilon 2, its noise calibrated; without the ball."""
    n, silos, epsilon, curvature = int(BASE["n"]), int(BASE["M"]), PRESCRIBED, 2 / DIMENSION
    f = Federation(
        records=n, population=silos, cohort=silos, dimension=DIMENSION, epsilon=epsilon, delta=DELTA, clip_norm=RADIUS,
        distance=GAP / RADIUS, smoothness=curvature, convexity=curvature,
    )  # fmt: skip
    z = calibration.noise_multiplier(lambda z: Line("models", "replace_one", ((GaussianNoise(z), 1),)), epsilon, DELTA)
    staged = multi_stage(f, ROUNDS, DIMENSION * (z * RADIUS / (n // ROUNDS)) ** 2 / silos)
    return Stages(tuple(Stage(one.rounds, replace(one.server, ball=None)) for one in staged.stages))  # type: ignore[type-var]


def part(axis: str, size: float, seed: int) -> list[Row]:
    """Excess population risk at one setting on one data set: (w - w*)^T Sigma (w - w*), Sigma = I / d."""
    setting = {**BASE, axis: size}
    n, silos, epsilon = int(setting["n"]), int(setting["M"]), float(setting["epsilon"])
    found = run_grid([plan(n, silos, epsilon)] * NOISES, task(n, silos, seed), [seed * 100 + i for i in range(NOISES)])
    excess = (found.double() - torch.from_numpy(best())).square().sum(1) / DIMENSION
    return [{"axis": axis, "size": float(size), "excess": float(value)} for value in excess]


def scaling(repeats: int, workers: int) -> list[Row]:
    """Excess risk along three axes."""
    jobs = [(axis, size, seed) for axis, sizes in GRID.items() for size in sizes for seed in range(repeats)]
    found = side_by_side(part, jobs, workers)
    return gathered([row for some in found for row in some], ("axis", "size"), "excess")


def slope(rows: list[Row], axis: str) -> float:
    """Of log excess against log size, by least squares."""
    points = np.log([[row["size"], row["excess"]] for row in picked(rows, axis=axis)])
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0])


def slopes(rows: list[Row], axis: str) -> list[float]:
    """The same for every data set: the mean over its noises at each size, and one line through them."""
    found = picked(rows, axis=axis)
    each = np.log([np.reshape(row["values"], (-1, NOISES)).mean(1) for row in found])
    return [float(one) for one in np.polyfit(np.log([row["size"] for row in found]), each, 1)[0]]


def scaling_claims(rows: list[Row]) -> list[Row]:
    """One claim per axis, over data sets."""
    return [
        within(
            f"001: one pass, multi-stage: the excess risk falls with {axis} as the theorem says (log-log slope "
            f"{wanted:g}, within 0.25)",
            [one - wanted for one in slopes(rows, axis)],
            0.25,
            "nothing",
            "of the slope",
        )
        for axis, wanted in EXPONENTS.items()
    ]


def draw_scaling(rows: list[Row], path: Path) -> None:
    """Three panels."""
    words = {"n": "records of a silo", "M": "silos", "epsilon": "epsilon of every silo"}
    panels = {words[axis]: {f"slope {slope(rows, axis):.2f}": picked(rows, axis=axis)} for axis in EXPONENTS}
    names = {word: f"{word}{'' if axis == 'epsilon' else f' ({axis})'}" for axis, word in words.items()}
    curves(panels, "size", "excess", path, xlabel=names, ylabel="excess risk", log=True, log_y=True)


def _quick() -> Row:
    """All noises of the first data set at the smallest n."""
    return gathered(part("n", GRID["n"][0], 0), ("axis", "size"), "excess")[0]


STUDIES = (
    Study(
        "001-scaling",
        "One pass, multi-stage: excess risk on a strongly convex task",
        "Least squares, d = 10, 100 disjoint batches, delta = 1e-6; base n = 16000, M = 8, epsilon = 0.5, where the "
        "noise is the largest term of the bound; the stages are prescribed once (n = 16000, M = 8, epsilon = 2).",
        scaling,
        scaling_claims,
        draw_scaling,
        chosen="nothing: the stages are the theorem's",
        quick=_quick,
        measure="excess",
    ),
)
