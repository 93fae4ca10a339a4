"""The convergence theorems of papers 000 and 004: bound beside measurement, on tasks whose constants are known.

DP-Fed-LS: client j has f_j(w) = 1/2 sum_i q_i (w_i - c_ji)^2, so beta and mu are the extreme eigenvalues of
A^-1/2 Q A^-1/2, G^2 is the mean of ||Q (c_j - c)||^2 in the norm of A^-1, and B = 1. DP-LSSGD: logistic regression on
records of length at most 1, so every loss is 1-Lipschitz and 1/4-smooth. Both are run by Sordino's own loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sordino.loop import run
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.samplers import FixedSize
from sordino.parts.server_optimizers import Sgd
from sordino.recipes import dp_fed_ls, dp_ls_sgd
from sordino.rng import Seeded
from sordino.task import Task
from sordino_papers.panels import curves
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.theory.convergence import (
    Landscape,
    SmoothedFederation,
    SmoothedSgd,
    Theorem,
    convex_error,
    lssgd_convex_error,
    lssgd_nonconvex_error,
    nonconvex_error,
    strongly_convex_error,
)
from sordino_papers.verdicts import fact

Floats = NDArray[np.float64]


def smoothing_matrix(strength: float, dimension: int) -> Floats:
    """A = I + strength L, L the Laplacian of a cycle."""
    one = np.eye(dimension)
    return np.asarray(one + strength * (2 * one - np.roll(one, 1, 0) - np.roll(one, -1, 0)))


@dataclass(frozen=True)
class Quadratic:
    """Clients with quadratic losses around centres of their own; the start is 0."""

    population: int
    dimension: int
    seed: int = 0
    spread: float = 0.1  # of the centres
    flattest: float = 0.5  # the least q

    @cached_property
    def curvature(self) -> Floats:
        return np.linspace(1.0, self.flattest, self.dimension)

    @cached_property
    def centres(self) -> Floats:
        rng = np.random.default_rng(self.seed)
        common = np.sin(2 * np.pi * np.arange(self.dimension) / self.dimension) / math.sqrt(self.dimension / 2)
        return np.asarray(common + self.spread * rng.standard_normal((self.population, self.dimension)))

    @property
    def best(self) -> Floats:
        return np.asarray(self.centres.mean(0))

    @property
    def steepest(self) -> float:
        """Above every client's gradient on the ball of twice the start's distance: no update is clipped there."""
        reach = 2 * np.linalg.norm(self.best)
        return float(np.max(np.linalg.norm(self.centres, axis=1)) + reach)

    def landscape(self, strength: float) -> Landscape:
        """The constants in the norm of A."""
        matrix = smoothing_matrix(strength, self.dimension)
        inverse = np.linalg.inv(matrix)
        bent = np.linalg.eigvals(inverse @ np.diag(self.curvature)).real
        away = (self.centres - self.best) * self.curvature
        return Landscape(
            smooth=float(bent.max()),
            convex=float(bent.min()),
            dissimilar=float(np.mean(np.einsum("ni,ij,nj->n", away, inverse, away))),
            distance=float(self.best @ matrix @ self.best),
            gap=self.excess(np.zeros(self.dimension)),
        )

    def excess(self, w: Floats) -> float:
        """f(w) - f*."""
        return float(0.5 * np.sum(self.curvature * (w - self.best) ** 2))

    def slope(self, w: Floats, strength: float) -> float:
        """||grad f(w)||^2 in the norm of A^-1."""
        gradient = self.curvature * (w - self.best)
        return float(gradient @ np.linalg.solve(smoothing_matrix(strength, self.dimension), gradient))

    def task(self) -> Task:
        """One record per coordinate: the mean of (a_i w_i - a_i c_i)^2 is f_j with a_i^2 = d q_i / 2."""
        scale = np.sqrt(self.dimension * self.curvature / 2)
        x = torch.from_numpy(np.diag(scale).astype(np.float32))
        targets = torch.from_numpy((self.centres * scale).astype(np.float32))
        layer = nn.Linear(self.dimension, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return Task.of(layer, [(x, y[:, None]) for y in targets], loss="mse")


@dataclass(frozen=True)
class Measured:
    """Excess of the weighted mean (Theorem 4) and of the plain mean (5), mean of squared gradients (6)."""

    weighted: float
    mean: float
    slopes: float
    distance: float = 0.0
    gap: float = 0.0


def measured_federation(problem: Quadratic, fed: SmoothedFederation, step: float, seed: int) -> Measured:
    """One run of DP-Fed-LS at the step eta~ = eta_l eta_g of a theorem."""
    local = step / fed.server
    plan = dp_fed_ls(
        rounds=fed.rounds,
        clients=FixedSize(fed.population, fed.cohort),
        lr=local,
        epochs=fed.steps,
        clip_norm=local * fed.steps * fed.lipschitz,
        noise_multiplier=fed.ratio,
        denoiser=LaplacianSmoothing(fed.strength),
        server=Sgd(lr=fed.server),
    )
    visited = [np.zeros(problem.dimension)]
    visited += [
        _weights(done.state.memory["params"].clone()) for done in run(plan, problem.task(), streams=Seeded(seed))
    ]
    shrink = 1.0 - problem.landscape(fed.strength).convex * step * fed.steps / 2.0
    path = np.stack(visited[:-1])
    weights = shrink ** -np.arange(len(path), dtype=np.float64)
    middle = np.average(path, axis=0, weights=weights / weights.max())
    slopes = float(np.mean([problem.slope(w, fed.strength) for w in path]))
    return Measured(problem.excess(middle), problem.excess(path.mean(0)), slopes)


def _weights(w: torch.Tensor) -> Floats:
    return np.asarray(w.detach().double().numpy())


@dataclass(frozen=True)
class Separation:
    """Logistic regression: records on the unit sphere, labels by a noisy plane."""

    records: int
    dimension: int
    seed: int = 0

    @cached_property
    def data(self) -> tuple[Floats, Floats]:
        rng = np.random.default_rng(self.seed)
        x = rng.standard_normal((self.records, self.dimension))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        clean = x[:, 0] > 0
        return x, np.where(rng.random(self.records) < 0.2, ~clean, clean).astype(np.float64)

    def loss(self, w: Floats) -> float:
        x, y = self.data
        return float(np.mean(np.logaddexp(0.0, x @ w) - y * (x @ w)))

    def gradient(self, w: Floats) -> Floats:
        x, y = self.data
        return np.asarray(x.T @ (1 / (1 + np.exp(-(x @ w))) - y) / self.records)

    @cached_property
    def best(self) -> Floats:
        from scipy.optimize import minimize

        found = minimize(self.loss, np.zeros(self.dimension), jac=self.gradient, method="BFGS", tol=1e-10)
        return np.asarray(found.x)

    def task(self) -> Task:
        x, y = (torch.from_numpy(a.astype(np.float32)) for a in self.data)
        layer = nn.Linear(self.dimension, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return Task.of(layer, [(x, y[:, None])], loss="logistic")


def measured_sgd(sgd: SmoothedSgd, seed: int, records: int = 500) -> Measured:
    """One run of DP-LSSGD; `std` is on the mean gradient of a batch."""
    problem = Separation(records, sgd.dimension)
    plan = dp_ls_sgd(
        rounds=sgd.rounds,
        records=FixedRecords(sgd.batch, (records,)),
        clip_norm=1.0,
        noise_multiplier=sgd.std * sgd.batch,
        lr=sgd.step,
        denoiser=LaplacianSmoothing(sgd.strength),
    )
    visited = [np.zeros(sgd.dimension)]
    visited += [
        _weights(done.state.memory["params"].clone()) for done in run(plan, problem.task(), streams=Seeded(seed))
    ]
    path, matrix = np.stack(visited[:-1]), smoothing_matrix(sgd.strength, sgd.dimension)
    slopes = [g @ np.linalg.solve(matrix, g) for g in map(problem.gradient, path)]
    least, start = problem.loss(problem.best), problem.best
    return Measured(
        weighted=problem.loss(path.mean(0)) - least,
        mean=problem.loss(path.mean(0)) - least,
        slopes=float(np.mean(slopes)),
        distance=float(start @ matrix @ start),
        gap=problem.loss(np.zeros(sgd.dimension)) - least,
    )


# ---- the study -------------------------------------------------------------------------------------------------------

ROUNDS = (100, 400, 1600)
STRENGTHS = (0.0, 0.25, 1.0)
FEDERATED: dict[str, tuple[Theorem, str]] = {
    "000 Theorem 4, strongly convex": (strongly_convex_error, "weighted"),
    "000 Theorem 5, convex": (convex_error, "mean"),
    "000 Theorem 6, gradients": (nonconvex_error, "slopes"),
}
ALONE = ("004 Theorem 4, convex", "004 Theorem 7, gradients")


def federation(rounds: int, strength: float, problem: Quadratic) -> SmoothedFederation:
    """20 clients, 10 a round, 3 local steps, noise of 10 clip norms on the sum."""
    return SmoothedFederation(20, 10, 3, rounds, problem.dimension, strength, 4.0, problem.steepest, 10.0)


def part(theorem: str, rounds: int, strength: float, seed: int) -> Row:
    """Bound and measurement of one setting and one seed."""
    bound, found = (
        _federated(theorem, rounds, strength, seed) if theorem in FEDERATED else _alone(theorem, rounds, strength, seed)
    )
    return {"theorem": theorem, "strength": strength, "rounds": rounds, "bound": bound, "measured": found}


def _federated(theorem: str, rounds: int, strength: float, seed: int) -> tuple[float, float]:
    problem = Quadratic(20, 12, seed=1)
    prove, what = FEDERATED[theorem]
    fed = federation(rounds, strength, problem)
    error = prove(fed, problem.landscape(strength))
    return error.total, float(getattr(measured_federation(problem, fed, error.step, seed), what))


def _alone(theorem: str, rounds: int, strength: float, seed: int) -> tuple[float, float]:
    sgd = SmoothedSgd(rounds, 1 / math.sqrt(rounds), 20, 0.05, 10, strength)
    found = measured_sgd(sgd, seed)
    if theorem == ALONE[0]:
        return lssgd_convex_error(sgd, smooth=0.25, distance=found.distance), found.mean
    return lssgd_nonconvex_error(sgd, smooth=0.25, gap=found.gap), found.slopes


def _possible(theorem: str, rounds: int, strength: float) -> bool:
    """Theorem 4 of paper 000 asks for a number of rounds that grows with the smoothing."""
    from sordino.errors import SideConditionError

    try:
        if theorem in FEDERATED:
            problem = Quadratic(20, 12, seed=1)
            FEDERATED[theorem][0](federation(rounds, strength, problem), problem.landscape(strength))
    except SideConditionError:
        return False
    return True


def rows(repeats: int, workers: int) -> list[Row]:
    """Every theorem at every number of rounds that its side conditions allow."""
    settings = [(t, r, s) for t in (*FEDERATED, *ALONE) for s in STRENGTHS for r in ROUNDS if _possible(t, r, s)]
    jobs = [(*setting, seed) for setting in settings for seed in range(repeats)]
    found = side_by_side(part, jobs, workers)
    bounds = {(row["theorem"], row["strength"], row["rounds"]): row["bound"] for row in found}
    kept = gathered(found, ("theorem", "strength", "rounds"), "measured")
    return [_beside(row, bounds[row["theorem"], row["strength"], row["rounds"]]) for row in kept]


def _beside(row: Row, bound: float) -> Row:
    return {**row, "bound": float(f"{bound:.6g}"), "bound / measured": float(f"{bound / row['measured']:.3g}")}


def claims(found: list[Row]) -> list[Row]:
    """Whether any mean is above its bound."""
    judged = []
    for theorem in dict.fromkeys(row["theorem"] for row in found):
        mine = picked(found, theorem=theorem)
        ratios = [float(row["bound / measured"]) for row in mine]
        said = f"bound over measured {min(ratios):.3g} to {max(ratios):.3g} in {len(mine)} settings"
        judged.append(fact(f"{theorem}: no run is above the bound", said, min(ratios) >= 1.0, mine[0]["repeats"]))
    return judged


def draw(found: list[Row], path: Path) -> None:
    """Bound and measurement against the rounds, one panel per theorem."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for theorem in dict.fromkeys(row["theorem"] for row in found):
        mine = picked(found, theorem=theorem)
        lines = {f"{what}, sigma {s:g}": _line(mine, s, what) for what in ("bound", "measured") for s in STRENGTHS}
        panels[theorem] = {label: line for label, line in lines.items() if line}
    curves(panels, "rounds", "error", path, xlabel="rounds T", ylabel="error, or mean squared gradient",
           log=True, log_y=True)  # fmt: skip


def _line(mine: list[Row], strength: float, what: str) -> list[Row]:
    return [{"rounds": row["rounds"], "error": row[what]} for row in picked(mine, strength=strength)]


def _quick() -> Row:
    """The cheapest setting again, seeds as kept."""
    setting = ("000 Theorem 5, convex", ROUNDS[0], 0.0)
    found = [part(*setting, seed) for seed in range(3)]
    return gathered(found, ("theorem", "strength", "rounds"), "measured")[0]


STUDIES = (
    Study(
        "theory-bounds",
        "Convergence theorems: bound beside measurement",
        "DP-Fed-LS on quadratic losses of 20 clients (12 parameters, noise of 10 clip norms on the sum), DP-LSSGD on "
        "logistic regression (500 records, 10 parameters), where every "
        "constant of the theorems is known; steps as prescribed.",
        rows,
        claims,
        draw,
        repeats=3,
        chosen="nothing: every step is the theorem's",
        quick=_quick,
        measure="measured",
    ),
)
