"""Paper 004, Figures 5 and 7: the CNN on MNIST at the paper's ratio of noise to signal, over thousands of steps.

The ratio of a batch is z sqrt(d) / b: noise multiplier z, d parameters, expected batch b. The paper has z = 10, d =
26,010, b = 256: 6.3, and 14,000 steps of 0.15 at clip norm 1. Here images of 14x14 give d = 10,650, and b = 164 gives
6.3 again, for 3,000 steps. 004-cnn has 0.2 to 0.54 and 120 steps: the paper's claim is not tested there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.loop import run
from sordino.models import DpMnistCnn, build_seeded
from sordino.outcome import final_model
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.record_samplers import PoissonRecords
from sordino.plan import Plan
from sordino.recipes import dp_ls_sgd
from sordino.rng import Seeded
from sordino.task import Task, evaluate
from sordino_papers.claims import settled
from sordino_papers.once import once
from sordino_papers.panels import curves
from sordino_papers.paper_004_cnn import halved, mnist_test
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import verdict

RECORDS, BATCH, Z, CLIP, STEPS, EVERY = 50_000, 164, 10.0, 1.0, 3_000, 250
PUBLISHED_STEP = 0.15
RATES = (0.017, 0.05, 0.15, 0.45)  # steps tried on validation images; the paper's is 0.15
SIGMAS = (0.0, 1.0)
TRIAL = 100  # the seed that tries steps; none of those reported


@cache
def parts() -> tuple[Records, Records]:
    """The first 50,000 training images at 14x14, and the last 10,000 to validate on."""
    data = load("mnist")
    return halved(data.x[:RECORDS], data.y[:RECORDS]), halved(data.x[RECORDS:], data.y[RECORDS:])


def plan_of(sigma: float, rate: float) -> Plan:
    """DP-SGD (sigma 0) or DP-LSSGD with the paper's constant step."""
    return dp_ls_sgd(
        rounds=STEPS,
        records=PoissonRecords(BATCH, (RECORDS,)),
        lr=rate,
        clip_norm=CLIP,
        noise_multiplier=Z,
        denoiser=LaplacianSmoothing(sigma) if sigma else None,
    )


def course(sigma: float, rate: float, seed: int) -> Row:
    """Validation accuracy every 250 steps, and the test accuracy of the last model if the seed is a reported one."""
    (train, held), plan = parts(), plan_of(sigma, rate)
    task = Task(build_seeded(DpMnistCnn(), tuple(train.x.shape[1:]), 10, seed), Clients.of([train]), held)
    kept = [done for done in run(plan, task, streams=Seeded(seed), eval_every=EVERY) if done.metrics]
    found: Row = {
        "sigma": sigma,
        "rate": rate,
        "seed": seed,
        "curve": [(done.t + 1, 100 * done.metrics["accuracy"]) for done in kept],
    }
    if seed != TRIAL:
        model = final_model(plan, task, kept[-1].state)
        found["test"] = 100 * evaluate(model, mnist_test(), task.losses)["accuracy"]
    return found


def quick() -> Row:
    """Seed 0 of DP-SGD at the paper's step, its first 250 steps."""
    (train, held), plan = parts(), plan_of(0.0, PUBLISHED_STEP)
    task = Task(build_seeded(DpMnistCnn(), tuple(train.x.shape[1:]), 10, 0), Clients.of([train]), held)
    rounds = run(plan, task, streams=Seeded(0), eval_every=EVERY)
    first = next(done for done in rounds if done.metrics)
    named = {"sigma": 0.0, "rate": PUBLISHED_STEP, "steps": first.t + 1}
    return {**named, "accuracy": 100 * first.metrics["accuracy"]}


def cell(sigma: float, rate: float, seed: int) -> Row:
    """`course`, kept where runs are kept one by one."""
    return once(course, sigma, rate, seed)


def tuned(trials: Sequence[Row], sigma: float) -> float:
    """The step whose last model validated best."""
    return float(max(picked(trials, sigma=sigma), key=lambda row: float(row["curve"][-1][1]))["rate"])


def measured(repeats: int, workers: int) -> list[Row]:
    """Sigma 0 and 1 at the paper's step; what every step had on validation images; both at their best."""
    at_paper = [(s, PUBLISHED_STEP, seed) for seed in range(repeats) for s in SIGMAS]
    runs = side_by_side(cell, at_paper, workers)
    trials = side_by_side(cell, [(s, rate, TRIAL) for rate in RATES for s in SIGMAS], workers)
    best = {s: tuned(trials, s) for s in SIGMAS}
    more = [(s, rate, seed) for s, rate in best.items() for seed in range(repeats) if rate != PUBLISHED_STEP]
    runs += side_by_side(cell, more, workers)
    return assembled(trials, runs)


def assembled(trials: Sequence[Row], runs: Sequence[Row]) -> list[Row]:
    """Trials by their last validation accuracy; test accuracies; curves."""
    tried = [{**_named(row), "validation": row["curve"][-1][1]} for row in trials]
    ends = [{**_named(row), "steps": None, "accuracy": row["test"]} for row in runs]
    along = [{**_named(row), "steps": t, "accuracy": a} for row in runs for t, a in row["curve"]]
    return [*tried, *gathered([*ends, *along], ("sigma", "rate", "steps"), "accuracy")]


def _named(row: Row) -> Row:
    return {"sigma": row["sigma"], "rate": row["rate"]}


CHOSEN = "step: the paper (0.15), or validation images, each method its own, by one run of another seed"


def claims(rows: list[Row]) -> list[Row]:
    """Smoothing against none: after 3,000 steps at the paper's step, each at its own, and early."""
    own = {s: max(found, key=lambda row: float(row["validation"]))["rate"]
           for s in SIGMAS if (found := [r for r in picked(rows, sigma=s) if "validation" in r])}  # fmt: skip

    def values(sigma: float, rate: float, steps: int | None = None) -> list[float]:
        found = [row for row in picked(rows, sigma=sigma, rate=rate, steps=steps) if "accuracy" in row]
        if not found:
            raise KeyError(sigma)
        return list(found[0]["values"])

    def late(_: list[Row]) -> list[Row]:
        text = "004: MNIST CNN at z = 10, step 0.15, after 3,000 steps: DP-LSSGD (sigma 1) beats DP-SGD"
        return [verdict(text, values(1.0, PUBLISHED_STEP), values(0.0, PUBLISHED_STEP), CHOSEN)]

    def best(_: list[Row]) -> list[Row]:
        text = f"004: MNIST CNN at z = 10, each at the step that validated best ({own[1.0]:g} and {own[0.0]:g})"
        return [verdict(text, values(1.0, own[1.0]), values(0.0, own[0.0]), CHOSEN)]

    def early(_: list[Row]) -> list[Row]:
        text = "004: MNIST CNN at z = 10, step 0.15, after 250 steps: DP-SGD is ahead (validation images)"
        return [verdict(text, values(0.0, PUBLISHED_STEP, EVERY), values(1.0, PUBLISHED_STEP, EVERY), CHOSEN)]

    checks = (late, best, early)
    return [row for check in checks for row in settled(check, rows)]


def draw(rows: list[Row], path: Path) -> None:
    """Validation accuracy by step at the paper's step."""
    lines = {
        "DP-SGD" if not s else f"DP-LSSGD, sigma {s:g}": found
        for s in SIGMAS
        if (found := [r for r in picked(rows, sigma=s, rate=PUBLISHED_STEP) if r.get("steps")])
    }
    curves({"z = 10, step 0.15": lines}, "steps", "accuracy", path, xlabel="steps taken",
           ylabel="validation accuracy, %")  # fmt: skip


STUDIES = (
    Study(
        "004-regime",
        "Figures 5, 7: the MNIST CNN at the paper's noise-to-signal ratio (scaled)",
        "z = 10, z sqrt(d) / b = 6.3 as in the paper; 50,000 images averaged to 14x14, 10,650 parameters, Poisson "
        "batches of 164, clip norm 1, constant step, 3,000 steps of the paper's 14,000 (epsilon 0.0524 at delta 1e-5). "
        "Rows with steps: validation "
        "accuracy; without: the 10,000 test images at the end; rows with a rate alone: what chose it.",
        measured,
        claims,
        draw,
        5,
        CHOSEN,
        quick,
        "accuracy",
    ),
)
