"""Paper 002, Theorem 3: the bound on the distance to the optimum beside what runs reach, all constants known.

Client l has f_l(w) = 1/2 sum_i q_i (w_i - c_li)^2: lambda and mu are the extreme q, Gamma is f*, for no client has a
loss at its own optimum. The steps are the theorem's, 2/(mu (k + gamma)) over local steps. zeta is so large that no
gradient is clipped, and bounds G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sordino.accounting.calibration import calibrate
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.schedules import InverseTime, PerStep
from sordino.plan import Plan
from sordino.recipes.client_level import client_side_fed_avg
from sordino_papers.bounds import Quadratic
from sordino_papers.grid import run_grid
from sordino_papers.panels import curves
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.theory import Mechanism, Upload, best_rounds
from sordino_papers.theory.local_noise import Objective
from sordino_papers.verdicts import in_all

CLIENTS, TURN, DIMENSION, DELTA = 200, 100, 10, 1e-5
EPSILON: dict[Mechanism, float] = {"laplace": 100.0, "gaussian": 30.0}
ROUNDS, STEPS = (4, 10, 30, 100), (1, 5)
PROBLEM = Quadratic(CLIENTS, DIMENSION, seed=2)


def zeta(mechanism: Mechanism) -> float:
    """Above every gradient (L1 for Laplace, L2 for Gaussian noise) on the ball of the start's distance around w*."""
    norm = 1 if mechanism == "laplace" else 2
    away = np.abs(PROBLEM.centres - PROBLEM.best)
    reach = float(np.linalg.norm(PROBLEM.best)) * (math.sqrt(DIMENSION) if norm == 1 else 1.0)
    return float(np.linalg.norm(away, norm, axis=1).max()) + reach


def objective(mechanism: Mechanism) -> Objective:
    """The constants of Theorem 3."""
    spread = PROBLEM.centres - PROBLEM.best
    return Objective(
        smoothness=float(PROBLEM.curvature.max()),
        convexity=float(PROBLEM.curvature.min()),
        gradient=zeta(mechanism),
        heterogeneity=float(0.5 * np.mean(np.sum(PROBLEM.curvature * spread**2, axis=1))),
        distance=float(PROBLEM.best @ PROBLEM.best),
    )


def upload(mechanism: Mechanism) -> Upload:
    """The noise of the theorem, at the sound sensitivity 2 zeta of one gradient."""
    return Upload(mechanism, EPSILON[mechanism], DIMENSION, CLIENTS, TURN, 2 * zeta(mechanism), DELTA)


def plan(mechanism: Mechanism, rounds: int, steps: int) -> Plan:
    """The algorithm with the theorem's step sizes and calibrated noise, which is at most the theorem's."""
    known = objective(mechanism)
    gamma = max(8 * known.smoothness / known.convexity, float(steps))
    made = client_side_fed_avg(
        rounds=rounds,
        population=CLIENTS,
        cohort=TURN,
        lr=PerStep(InverseTime(2 / known.convexity, gamma)),
        steps=steps,
        clip_norm=zeta(mechanism),
        mechanism=Laplace(1.0) if mechanism == "laplace" else Gaussian(1.0),
        turns_seed=0,
    )
    return calibrate(made, epsilon=EPSILON[mechanism], delta=0.0 if mechanism == "laplace" else DELTA)


def part(mechanism: Mechanism, steps: int, repeats: int) -> list[Row]:
    """||w - w*||^2 after each number of rounds."""
    rows, task = list[Row](), PROBLEM.task()
    for rounds in ROUNDS:
        w = run_grid([plan(mechanism, rounds, steps)] * repeats, task, range(repeats))
        bound = upload(mechanism).bound(objective(mechanism), steps=steps, rounds=rounds)
        place = {"mechanism": mechanism, "E": steps, "rounds": rounds, "bound": float(f"{bound:.5g}")}
        away = (w.double().numpy() - PROBLEM.best) ** 2
        rows += [{**place, "distance": float(one)} for one in away.sum(1)]
    return rows


def assembled(parts: Sequence[list[Row]]) -> list[Row]:
    """What the page shows."""
    return gathered([row for some in parts for row in some], ("mechanism", "E", "rounds", "bound"), "distance")


def rows(repeats: int, workers: int) -> list[Row]:
    """Both mechanisms, one local step and five."""
    return assembled(side_by_side(part, [(m, steps, repeats) for m in EPSILON for steps in STEPS], workers))


def claims(found: list[Row]) -> list[Row]:
    """No mean above its bound; where the bound is least, and what the rules for E say there."""
    shares = {
        f"{row['mechanism']}, E = {row['E']}, {row['rounds']} rounds": [one / row["bound"] for one in row["values"]]
        for row in found
    }
    pairs = {name: ([1.0] * len(share), share) for name, share in shares.items()}
    text = "002: Theorem 3, no mean distance is above the bound (1 less measured over bound)"
    return [in_all(text, pairs, "nothing", unit="of the bound"), *(_finite(found, steps) for steps in STEPS)]


def _finite(found: list[Row], steps: int) -> Row:
    """Corollary 5.1: some number of rounds between the ends is better than either."""
    first, *inside, last = picked(found, mechanism="laplace", E=steps)
    best = min(inside, key=lambda row: float(row["distance"]))
    pairs = {f"against {row['rounds']} rounds": (_fewer(best), _fewer(row)) for row in (first, last)}
    said = best_rounds(objective("laplace"), upload("laplace"), steps=steps)
    text = f"002: Corollary 5.1, Laplace noise, E = {steps}: some finite T* is best ({best['rounds']} of {ROUNDS})"
    row = in_all(text, pairs, "T*: the same runs", unit="(log of the squared distance)")
    return {**row, "measured": f"{row['measured']}; the bound's least at {said}"}


def _fewer(row: Row) -> list[float]:
    return [-math.log(float(one)) for one in row["values"]]


def draw(found: list[Row], path: Path) -> None:
    """Bound and measurement against the rounds."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for mechanism, epsilon in EPSILON.items():
        lines = panels[f"{mechanism.capitalize()} noise, epsilon {epsilon:g}"] = {}
        for steps in STEPS:
            mine = picked(found, mechanism=mechanism, E=steps)
            lines[f"Theorem 3, E = {steps}"] = [{"rounds": row["rounds"], "distance": row["bound"]} for row in mine]
            lines[f"measured, E = {steps}"] = mine
    label = "global iterations (rounds)"
    curves(
        panels, "rounds", "distance", path, xlabel=label, ylabel="squared distance to the optimum", log=True, log_y=True
    )


def _quick() -> Row:
    """Seed 0 of the cheapest point."""
    row = next(row for row in _short() if row["rounds"] == ROUNDS[0])
    return {key: row[key] for key in ("mechanism", "E", "rounds", "distance")}


def _short() -> list[Row]:
    w = run_grid([plan("laplace", ROUNDS[0], 1)], PROBLEM.task(), [0])
    away = float(((w[0].double().numpy() - PROBLEM.best) ** 2).sum())
    return [{"mechanism": "laplace", "E": 1, "rounds": ROUNDS[0], "distance": away}]


STUDIES = (
    Study(
        "002-theorem3",
        "Theorem 3: bound beside measurement",
        "200 clients with quadratic losses (10 parameters, least over largest curvature 0.5), 100 a round in turns; "
        "Laplace noise at epsilon 100, Gaussian at 30, sensitivity twice the clip; E is the number of local "
        "iterations.",
        rows,
        claims,
        draw,
        repeats=5,
        chosen="nothing: the steps are the theorem's",
        quick=_quick,
        measure="distance",
    ),
)
