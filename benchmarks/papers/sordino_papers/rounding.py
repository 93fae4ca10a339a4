"""Why a net's cell may move where a linear model's does not: a millionth of every initial weight, and no more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from sordino.loop import run
from sordino.parts.encoding import LaplacianSmoothing
from sordino.rng import Seeded
from sordino_papers.cells import Job
from sordino_papers.panels import curves
from sordino_papers.paper_000 import table2_job
from sordino_papers.paper_000_small import small_job
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import fact

BUILT: dict[str, Callable[[int], Job]] = {
    "logistic regression (000-table2)": partial(table2_job, "poisson", 7.0, 1.0, False),
    "small CNN (000-small)": partial(small_job, "poisson", 2.0, LaplacianSmoothing(1.0)),
}
MARKS = (1, 2, 5, 10, 20)  # rounds
PART = 1e-6  # what another inner loop or instruction set changes at least


def started(job: Job, seed: int) -> Job:
    """The same job; a model that starts at zero starts at small random weights, for a part of zero is zero."""
    coins = torch.Generator().manual_seed(1000 + seed)
    parameters = [one.data for one in job.task.model.parameters()]
    if all(not bool(values.any()) for values in parameters):
        for values in parameters:
            values.copy_(0.01 * torch.randn(values.shape, generator=coins))
    return job


def nudged(job: Job) -> Job:
    """The same job, every weight of the model moved by up to a millionth of itself."""
    coins = torch.Generator().manual_seed(0)
    for values in (one.data for one in job.task.model.parameters()):
        values *= 1 + PART * (2 * torch.rand(values.shape, generator=coins) - 1)
    return job


def weights(job: Job, seed: int) -> tuple[dict[int, torch.Tensor], float]:
    """The models of the marked rounds, and the test accuracy (percent) of the last."""
    found, plan, last = {}, job.plan, None
    for last in run(plan, job.task, streams=Seeded(seed), eval_every=plan.rounds):
        if last.t + 1 in MARKS:
            found[last.t + 1] = plan.server.result(last.state.memory).double().clone()
    assert last is not None
    return found, 100 * last.metrics["accuracy"]


def moved(model: str, seed: int) -> list[Row]:
    """How far apart the two runs are, round by round, and at the end in accuracy (round None)."""
    build = BUILT[model]
    first, second = started(build(seed), seed), nudged(started(build(seed), seed))
    (one, right), (two, other) = weights(first, seed), weights(second, seed)
    rows = [{"model": model, "round": t, "apart": float((one[t] - two[t]).abs().max())} for t in one]
    return [*rows, {"model": model, "round": None, "apart": abs(right - other)}]


def measured(repeats: int, workers: int) -> list[Row]:
    """Both models, the same seeds."""
    jobs = [(model, seed) for model in BUILT for seed in range(repeats)]
    rows = [row for one in side_by_side(moved, jobs, workers) for row in one]
    return gathered(rows, ("model", "round"), "apart")


def claims(rows: list[Row]) -> list[Row]:
    """The largest change of accuracy over seeds: at most a hundredth of a point, which is one test image, or more."""
    found = []
    for model in BUILT:
        (end,) = picked(rows, model=model, round=None)
        most = max(float(one) for one in end["values"])
        text = f"000: {model}: a millionth of the initial weights leaves the accuracy within 0.01 points"
        found.append(fact(text, f"at most {most:.2f} points", most <= 0.0101, len(end["values"])))
    return found


def draw(rows: list[Row], path: Path) -> None:
    """Largest difference between weights, by round."""
    lines = {model: [row for row in picked(rows, model=model) if row["round"] is not None] for model in BUILT}
    lines = {model: [{**row, "spread": None} for row in line] for model, line in lines.items()}
    curves({"initial weights moved by a millionth": lines}, "round", "apart", path,
           xlabel="round", ylabel="largest difference of a weight", log=True, log_y=True)  # fmt: skip


def quick() -> Row:
    """Seed 0 of the small CNN after the first round."""
    return moved("small CNN (000-small)", 0)[0]


STUDIES = (
    Study(
        "000-rounding",
        "Rounding: what a millionth of the weights does to a cell",
        "Each run twice with the same coins, the second time with every initial weight moved by up to a millionth of "
        "itself, more than a rewritten inner loop does in a round. The logistic model, which starts at zero in "
        "000-table2, starts at random weights of 0.01 here. The small CNN is moved after its training on "
        "public digits, which is plain SGD and takes rounding much further (papers/digits.md). Rows with a "
        "round: largest difference between two weights of the models; without: between the two "
        "test accuracies, in points.",
        measured,
        claims,
        draw,
        5,
        "nothing",
        quick,
        "apart",
    ),
)
