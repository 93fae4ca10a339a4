"""Paper 001, Theorem 3.1: the lower bound for silos that are alike, beside what noisy minibatch SGD reaches.

Least squares with a population loss of curvature 2/d in every direction, so the loss is mu-smooth and mu-strongly
convex as in the theorem's second part. Rounds are so many that every message is (1/n, delta_r)-private, as its
proof asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sordino.accounting.accountant import bound as priced
from sordino.accounting.calibration import calibrate
from sordino.accounting.events import GaussianNoise
from sordino.loop import run
from sordino.parts.record_samplers import AllRecords
from sordino.parts.samplers import Everyone
from sordino.parts.server_optimizers import Average
from sordino.plan import Plan
from sordino.recipes.record_level import noisy_minibatch_sgd
from sordino.rng import Seeded
from sordino.task import Task
from sordino_papers.panels import curves
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.theory import LowerBound, Rounds, lower_bound
from sordino_papers.verdicts import fact

RECORDS, DIMENSION, DELTA, RADIUS, DISTANCE, ROUNDS, NOISE = 10, 10, 1e-9, 1.2, 2.0, 160, 0.1
MU = 2 / DIMENSION
SETTINGS = ((400, 0.2), (400, 0.4), (400, 0.8), (800, 0.4))  # silos, epsilon
STEP = 0.25 / MU
START = 1 / DIMENSION  # the excess risk of w = 0


def best() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """w*, of length 1; the start is 0."""
    return np.full(DIMENSION, 1 / np.sqrt(DIMENSION))


def task(silos: int, seed: int) -> Task:
    """y = <w*, x> + 0.1 noise, x uniform in {-1, 1}^d / sqrt(d); ten records in a silo."""
    rng = np.random.default_rng(seed)
    x = (rng.integers(0, 2, (silos, RECORDS, DIMENSION)) * 2.0 - 1) / np.sqrt(DIMENSION)
    y = x @ best() + NOISE * rng.standard_normal((silos, RECORDS))
    layer = nn.Linear(DIMENSION, 1, bias=False)
    nn.init.zeros_(layer.weight)
    both = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32))
    return Task.of(layer, list(zip(*both, strict=True)), loss="mse")


def plan(silos: int, epsilon: float) -> Plan:
    """All records of all silos in every round, iterates averaged with growing weights."""
    shared: dict[str, Any] = {
        "rounds": ROUNDS,
        "clients": Everyone(silos),
        "clip_norm": RADIUS,
        "noise_multiplier": 1.0,
    }
    average = Average(growth=1 / (1 - MU * STEP))
    made = noisy_minibatch_sgd(
        **shared, records=AllRecords((RECORDS,) * silos), lr=STEP, ball=DISTANCE, average=average
    )
    return calibrate(made, epsilon=epsilon, delta=DELTA)


def each_round(silos: int, epsilon: float) -> Rounds:
    """The privacy of one message at delta/(2R), by the accountant, and what the messages are together."""
    noise_multiplier = float(plan(silos, epsilon).release.mechanism.noise_multiplier)  # type: ignore[attr-defined]
    delta = DELTA / (2 * ROUNDS)
    one = priced([(GaussianNoise(noise_multiplier), 1)], "replace_one", delta).value
    return Rounds(one, delta, DELTA / 2, max(1.0, math.sqrt(ROUNDS) * one / epsilon))


def bound(silos: int, epsilon: float) -> LowerBound:
    """Theorem 3.1, strongly convex; phi is the deviation of a record's gradient at w*, 2 * 0.1 * ||x||."""
    return lower_bound(
        records=RECORDS,
        silos=silos,
        dimension=DIMENSION,
        epsilon=epsilon,
        clip_norm=RADIUS,
        distance=DISTANCE,
        deviation=2 * NOISE,
        rounds=each_round(silos, epsilon),
        convexity=MU,
    )


def part(silos: int, epsilon: float, repeats: int) -> list[Row]:
    """Excess population risk (w - w*)^T (w - w*)/d, one data set and one noise per seed."""
    known, rows = bound(silos, epsilon), list[Row]()
    place = {"silos": silos, "epsilon": epsilon, "lower bound": float(f"{known.total:.4g}")}
    place["composition C"] = float(f"{each_round(silos, epsilon).composition:.3g}")
    for seed in range(repeats):
        rows.append({**place, "excess": excess(silos, epsilon, seed)})
    return rows


def excess(silos: int, epsilon: float, seed: int) -> float:
    """Of one run."""
    made = plan(silos, epsilon)
    *_, last = run(made, task(silos, seed), streams=Seeded(seed))
    w = made.server.result(last.state.memory).double().numpy()
    return float(np.sum((w - best()) ** 2) / DIMENSION)


def assembled(parts: Sequence[list[Row]]) -> list[Row]:
    """What the page shows."""
    keys = ("silos", "epsilon", "composition C", "lower bound")
    found = gathered([row for some in parts for row in some], keys, "excess")
    return [{**row, "reached / bound": float(f"{row['excess'] / row['lower bound']:.3g}")} for row in found]


def rows(repeats: int, workers: int) -> list[Row]:
    """Every setting."""
    return assembled(side_by_side(part, [(*setting, repeats) for setting in SETTINGS], workers))


def claims(found: list[Row]) -> list[Row]:
    """Above the bound, and in step with it."""
    ratios = [float(row["reached / bound"]) for row in found]
    seeds = found[0]["repeats"]
    shown = f"{min(ratios):.3g} to {max(ratios):.3g} times the bound (its constant and logarithms taken as 1)"
    alone = picked(found, silos=400)
    slope = np.polyfit(np.log([row["epsilon"] for row in alone]), np.log([row["excess"] for row in alone]), 1)[0]
    return [
        fact("001: Theorem 3.1, nothing we reach is below the lower bound", shown, min(ratios) >= 1, seeds),
        fact(
            "001: the excess risk we reach falls with epsilon like the lower bound (exponent -2, within 0.25)",
            f"log-log slope {slope:.2f}; the start has {START:.2g}, so here the noise hides the way to the optimum",
            abs(slope + 2) <= 0.25,
            seeds,
        ),
    ]


def draw(found: list[Row], path: Path) -> None:
    """Both against epsilon, 400 silos."""
    mine = picked(found, silos=400)
    lines = {
        "noisy minibatch SGD": mine,
        "lower bound (order)": [{"epsilon": row["epsilon"], "excess": row["lower bound"]} for row in mine],
    }
    label = "epsilon of every silo"
    curves(
        {"400 silos of 10 records": lines},
        "epsilon",
        "excess",
        path,
        xlabel=label,
        ylabel="excess risk",
        log=True,
        log_y=True,
    )


def _quick() -> Row:
    """Seed 0 of the first setting."""
    row = part(*SETTINGS[0], 1)[0]
    return {key: row[key] for key in ("silos", "epsilon", "excess")}


STUDIES = (
    Study(
        "001-lower-bound",
        "Theorem 3.1: the lower bound beside what is reached",
        "Least squares, d = 10, silos of 10 records that are alike, all in each of 160 rounds, delta = 1e-9: few "
        "records and many silos, for the theorem asks for messages of epsilon at most 1/n and N >= 16 ln(2/(delta_r "
        "n)). With so little epsilon 400 silos do not get below the start's risk of 0.1: the order of the bound is not "
        "reached here.",
        rows,
        claims,
        draw,
        repeats=5,
        chosen="nothing: step 1/4 of the inverse curvature",
        quick=_quick,
        measure="excess",
    ),
)
