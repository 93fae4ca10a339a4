"""Beyond the papers: noise that later rounds take back, beside independent noise, at equal privacy.

MNIST's first 50,000 training images dealt to 1,000 clients, logistic regression, T = 200 rounds of about 100 clients,
one local epoch in batches of 10, clip .8. The server's step size is chosen, for every row by itself, on the last 10,000
training images; accuracies are those of the 10,000 test images.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

from sordino.data.task import Task, evaluate
from sordino.parts.correlated import CorrelatedNoise, noise_of_models
from sordino.parts.mechanisms import Gaussian
from sordino.parts.postprocess import LaplacianSmoothing, Postprocess
from sordino.parts.release import CentralNoise
from sordino.parts.samplers import Poisson, RoundRobin, Sampler, Turns
from sordino.parts.server import Sgd
from sordino.parts.strategies import Banded, BandedSquareRoot, Identity, Strategy
from sordino.plan import Plan
from sordino.privacy.bill import Participation
from sordino.privacy.calibrated import calibrated
from sordino.privacy.certificate import default_delta
from sordino.recipes.shared import federated
from sordino.report.figures import curves
from sordino.rng import Seeded
from sordino.run import run
from sordino_papers.paper_000 import mnist_logistic, mnist_validation
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import verdict

POPULATION, COHORT, ROUNDS = 1000, 100, 200
IN_TURN = RoundRobin(POPULATION, COHORT)
STRATEGIES: dict[str, Strategy] = {
    "independent": Identity(),
    "square root, 10 bands": BandedSquareRoot(10),
    "optimised, 10 bands": Banded(10),
}
MUS, STEPS = (0.5, 2.0), (0.0625, 0.125, 0.25, 0.5)
EPSILONS, FEW = (0.5, 1.0, 2.0, 4.0, 8.0), (0.125, 0.25, 0.5)
SMOOTHED = "optimised, 10 bands, smoothing"
CHOSEN = "the server's step on the last 10,000 training images, every row by itself; local step and clip taken over"


def planned(clients: Sampler, strategy: Strategy | None, step: float = 1.0, after: Postprocess | None = None) -> Plan:
    """The run, with noise of multiplier 1."""
    noise = CentralNoise(Gaussian(1.0)) if strategy is None else CorrelatedNoise(Gaussian(1.0), strategy)
    return federated(
        rounds=ROUNDS, clients=clients, lr=0.1, batch=10, radius=0.8, release=noise, denoiser=after, server=Sgd(lr=step)
    )


def at_mu(strategy: Strategy, mu: float, step: float, after: Postprocess | None = None) -> Plan:
    """Clients in turn; the whole run is mu-GDP, zero out one client."""
    bare = planned(IN_TURN, strategy, step, after)
    assert isinstance(bare.release, CorrelatedNoise)
    allowed = Participation.planned(IN_TURN, ROUNDS).patterns(IN_TURN)
    return replace(bare, release=bare.release.with_multiplier(bare.release.strategy.sensitivity(allowed) / mu))


@lru_cache(maxsize=1)
def _task(seed: int) -> Task:
    return mnist_logistic(POPULATION, seed)


def accuracies(plan: Plan, seed: int) -> tuple[float, float]:
    """Of the last model: on validation, on test, in percent."""
    task = _task(seed)
    *_, last = run(plan, task, streams=Seeded(seed), eval_every=ROUNDS)
    model = copy.deepcopy(task.model)
    task.layout.load(model, plan.server.result(last.state.memory))
    held = evaluate(model.eval(), mnist_validation(), task.losses)
    return 100 * held["accuracy"], 100 * last.metrics["accuracy"]


def in_turn(name: str, mu: float, step: float, seed: int) -> Row:
    """One run at a mu."""
    smoothed = name == SMOOTHED
    strategy = STRATEGIES[name.removesuffix(", smoothing")]
    held, test = accuracies(at_mu(strategy, mu, step, LaplacianSmoothing(1.0) if smoothed else None), seed)
    return {"noise": name, "mu": mu, "step": step, "validation": held, "accuracy": test}


def chosen(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Of every row its best step by validation, with the test figures of that step alone."""
    held, tested = (gathered(rows, [*keys, "step"], name) for name in ("validation", "accuracy"))
    best: dict[tuple[Any, ...], tuple[float, Row]] = {}
    for one, row in zip(held, tested, strict=True):
        key = tuple(row[name] for name in keys)
        if key not in best or one["validation"] > best[key][0]:
            best[key] = (one["validation"], row)
    return [row for _, row in best.values()]


def in_turn_jobs(repeats: int) -> list[tuple[Any, ...]]:
    names = [*STRATEGIES, SMOOTHED]
    return [(n, mu, step, seed) for seed in range(repeats) for mu in MUS for n in names for step in STEPS]


def in_turn_rows(repeats: int, workers: int) -> list[Row]:
    return chosen(side_by_side(in_turn, in_turn_jobs(repeats), workers), ("noise", "mu"))


def _values(rows: Sequence[Row], **wanted: Any) -> list[float]:
    (row,) = picked(rows, **wanted)
    return list(row["values"])


def in_turn_claims(rows: list[Row]) -> list[Row]:
    names, found = list(STRATEGIES), []
    for mu, margin in zip(MUS, (2.0, 0.5), strict=True):
        base, root, best = (_values(rows, noise=name, mu=mu) for name in names)
        text = f"at mu = {mu:g} optimised bands beat independent noise by {margin:g} points or more"
        found.append(verdict(text, best, base, CHOSEN, margin))
        found.append(
            verdict(f"at mu = {mu:g} optimised bands are no worse than the square root", best, root, CHOSEN, -0.1)
        )
        smoothed = _values(rows, noise=SMOOTHED, mu=mu)
        found.append(verdict(f"at mu = {mu:g} smoothing adds to correlated noise", smoothed, best, CHOSEN))
    return found


def draw_in_turn(rows: list[Row], path: Path) -> None:
    lines = {name: picked(rows, noise=name) for name in [*STRATEGIES, SMOOTHED]}
    curves({"clients in turn, no amplification": lines}, "mu", "accuracy", path, ylabel="test accuracy, %", log=True)


# ---- coins, correlation, or both -------------------------------------------------------------------------------------


def _turns(groups: int) -> Sampler:
    return Turns(POPULATION, groups, groups * COHORT / POPULATION)


KINDS: dict[str, Callable[[], tuple[Sampler, Strategy | None]]] = {
    "Poisson, independent": lambda: (Poisson(POPULATION, COHORT / POPULATION), None),
    "in turn, 10 bands": lambda: (IN_TURN, Banded(10)),
    "3 sampled groups, 3 bands": lambda: (_turns(3), Banded(3)),
}


@cache
def multiplier(kind: str, epsilon: float) -> float:
    """Of the noise at epsilon, delta = 1000^-1.1."""
    solved = calibrated(planned(*KINDS[kind]()), epsilon=epsilon, delta=default_delta(POPULATION))
    assert isinstance(solved.release, CentralNoise | CorrelatedNoise)
    return solved.release.mechanism.multiplier


def crossing(kind: str, epsilon: float, step: float, seed: int) -> Row:
    """One run at an epsilon."""
    bare = planned(*KINDS[kind](), step)
    held, test = accuracies(replace(bare, release=bare.release.with_multiplier(multiplier(kind, epsilon))), seed)
    return {"noise": kind, "epsilon": epsilon, "step": step, "validation": held, "accuracy": test}


def crossing_jobs(repeats: int) -> list[tuple[Any, ...]]:
    return [(kind, e, step, seed) for seed in range(repeats) for e in EPSILONS for kind in KINDS for step in FEW]


def crossing_rows(repeats: int, workers: int) -> list[Row]:
    return chosen(side_by_side(crossing, crossing_jobs(repeats), workers), ("noise", "epsilon"))


def crossing_claims(rows: list[Row]) -> list[Row]:
    coins, turn, both = KINDS
    found = []
    for epsilon in EPSILONS:
        one, other, third = (_values(rows, noise=kind, epsilon=epsilon) for kind in (coins, turn, both))
        text = f"at epsilon {epsilon:g} correlated noise in turn beats Poisson sampling with independent noise"
        found.append(verdict(text, other, one, CHOSEN))
        better = max(one, other, key=mean)
        found.append(verdict(f"at epsilon {epsilon:g} both together beat the better of the two", third, better, CHOSEN))
    return found


def draw_crossing(rows: list[Row], path: Path) -> None:
    lines = {kind: picked(rows, noise=kind) for kind in KINDS}
    curves({"coins, correlation, or both": lines}, "epsilon", "accuracy", path, ylabel="test accuracy, %", log=True)


def forecast_rows() -> list[Row]:
    """No data: the noise of the models at equal epsilon, in clips."""
    found = []
    for kind, epsilon in [(kind, epsilon) for kind in KINDS for epsilon in EPSILONS]:
        bare = planned(*KINDS[kind]())
        release = bare.release.with_multiplier(multiplier(kind, epsilon))
        noise = (noise_of_models(release, bare.server.workload(ROUNDS)) or 0.0) / bare.clients.expected
        found.append({"noise": kind, "epsilon": epsilon, "rms": noise})
    return found


def draw_forecast(rows: list[Row], path: Path) -> None:
    """The figure of docs/correlated-noise.md."""
    lines = {kind: picked(rows, noise=kind) for kind in KINDS}
    title = "N = 1000, T = 200, 100 a round"
    curves({title: lines}, "epsilon", "rms", path, ylabel="noise of the models, clips", log=True, log_y=True)


STUDIES = (
    Study(
        "beyond-correlated",
        "Beyond: correlated noise, clients in turn, MNIST, N = 1000, T = 200",
        "Logistic regression, 100 clients a round, each in every tenth round; the same mu for the whole run. The "
        "server's step is one of 1/16, 1/8, 1/4, 1/2.",
        in_turn_rows,
        in_turn_claims,
        draw_in_turn,
        chosen=CHOSEN,
    ),
    Study(
        "beyond-crossing",
        "Beyond: coins, correlation, or both, MNIST, N = 1000, T = 200",
        "Poisson cohorts of about 100 with independent noise, clients in turn with optimised bands, and both: three "
        "groups in turn, sampled at rate .3, three bands. One who sees the models; delta = 1000^-1.1. The server's "
        "step is one of 1/8, 1/4, 1/2.",
        crossing_rows,
        crossing_claims,
        draw_crossing,
        repeats=3,
        chosen=CHOSEN,
    ),
)
