"""Paper 000, Figures 3, 4 and 6 and Table H.11 (scaled): training curves."""

from __future__ import annotations

from pathlib import Path

from sordino.data.clients import Records
from sordino.loop import Round, run
from sordino.outcome import final_model
from sordino.parts.encoding import LaplacianSmoothing
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task, evaluate
from sordino_papers import paper_000, paper_000_small
from sordino_papers.panels import curves
from sordino_papers.paper_000_small import ROUNDS, WAYS, How, Knobs, small_plan, small_task
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import in_all, verdict

PART = 2000  # validation and training images that a curve is measured on

# ---- Figure 6 and Table H.11: large noise, several steps -------------------------------------------------------------

NOISES, STEPS = (3.0, 3.5, 4.0), (0.05, 0.125)


def fragile(noise_multiplier: float, lr: float, strength: float, seed: int) -> list[Row]:
    """Validation accuracy every other round, test accuracy at the end (round None)."""
    plan = small_plan("poisson", noise_multiplier, LaplacianSmoothing(strength), Knobs(lr=lr))
    keys = {"z": noise_multiplier, "step": lr, "sigma": strength}
    rows = curve(plan, small_task(seed), paper_000_small.images()[1], seed, train=False)
    return [{**keys, "round": row["round"], "accuracy": row["accuracy"]} for row in rows]


def figure6(repeats: int, workers: int) -> list[Row]:
    """Every noise and step, with and without smoothing."""
    jobs = [(z, lr, s, seed) for z in NOISES for lr in STEPS for s in (0.0, 1.0) for seed in range(repeats)]
    rows = [row for one in side_by_side(fragile, jobs, workers) for row in one]
    return gathered(rows, ("z", "step", "sigma", "round"), "accuracy")


def figure6_claims(rows: list[Row]) -> list[Row]:
    """Smoothing against none at the same step, noise by noise; and whether it suffers less from a larger step."""
    found = []
    for z in NOISES:
        pairs = {f"step {lr:g}": (_end(rows, z, lr, 1.0), _end(rows, z, lr, 0.0)) for lr in STEPS}
        text = f"000: Figure 6 scaled, z = {z:g}: smoothing (sigma 1) beats none at every step"
        found.append(in_all(text, pairs, paper_000_small.TUNED))
    return found


def _end(rows: list[Row], z: float, lr: float, s: float) -> list[float]:
    (row,) = picked(rows, z=z, step=lr, sigma=s, round=None)
    return [float(value) for value in row["values"]]


def draw_figure6(rows: list[Row], path: Path) -> None:
    """Validation accuracy by round, one panel per noise, at the smallest and the largest step."""
    panels = {
        f"z = {z:g}": {
            f"sigma {s:g}, step {lr:g}": [r for r in picked(rows, z=z, step=lr, sigma=s) if r["round"] is not None]
            for lr in (STEPS[0], STEPS[-1])
            for s in (0.0, 1.0)
        }
        for z in NOISES
    }
    curves(panels, "round", "accuracy", path, ylabel="validation accuracy, %")


# ---- Figures 3 and 4: training curves --------------------------------------------------------------------------------


def curve(plan: Plan, task: Task, held: Records, seed: int, train: bool = True, every: int = 2) -> list[Row]:
    """Validation accuracy and training loss every other round; the last row (round None) has the test accuracy."""
    rows, last = [], None
    for last in run(plan, task, streams=Seeded(seed), eval_every=plan.rounds):
        if (last.t + 1) % every == 0:
            rows.append(point(plan, task, held, last, train))
    assert last is not None
    return [*rows, {"round": None, "accuracy": 100 * last.metrics["accuracy"], "train loss": None}]


def point(plan: Plan, task: Task, held: Records, done: Round, train: bool) -> Row:
    """One point of a curve; its training loss is seen by nobody who is promised privacy."""
    model, clients = final_model(plan, task, done.state), task.clients.records
    score = evaluate(model, Records(held.x[:PART], held.y[:PART]), task.losses)["accuracy"]
    seen = Records(clients.x[:PART], clients.y[:PART])
    loss = evaluate(model, seen, task.losses)["loss"] if train else None
    return {"round": done.t + 1, "accuracy": 100 * score, "train loss": loss}


MODELS = {"logistic": (0.0, 1.0), "CNN": (0.0, 1.0)}  # the strengths of each
EPSILON, NOISE = 7, 2.0  # claimed epsilon of Figure 3, z of Figure 4


def trained(model: str, how: How, strength: float, seed: int) -> list[Row]:
    """One curve of Figure 3 (logistic regression, epsilon 7) or of Figure 4 (the small CNN, z = 2)."""
    if model == "logistic":
        job = paper_000.table2_job(how, EPSILON, strength, tight=False, seed=seed)
        rows = curve(job.plan, job.task, paper_000.mnist_validation(), seed)
    else:
        plan = small_plan(how, NOISE, LaplacianSmoothing(strength))
        rows = curve(plan, small_task(seed), paper_000_small.images()[1], seed)
    return [{"model": model, "sampling": how, "sigma": strength, **row} for row in rows]


def figures34(repeats: int, workers: int) -> list[Row]:
    """Both models, both ways of sampling, every sigma; train losses of the same rounds in rows of their own."""
    jobs = [(m, how, s, seed) for m, all_s in MODELS.items() for how in WAYS for s in all_s for seed in range(repeats)]
    rows = [row for one in side_by_side(trained, jobs, workers) for row in one]
    keys = ("model", "sampling", "sigma", "round")
    losses = [row for row in rows if row["train loss"] is not None]
    return [*gathered(rows, keys, "accuracy"), *gathered(losses, keys, "train loss")]


def figures34_claims(rows: list[Row]) -> list[Row]:
    """Slower at first, better at the end: sigma 1 against none at the first and at the last point of validation."""
    inside = [row for row in rows if row["round"] is not None and "accuracy" in row]
    return [row for model in MODELS for how in WAYS for row in _slow_then_better(inside, model, how)]


def _slow_then_better(rows: list[Row], model: str, how: How) -> list[Row]:
    points = picked(rows, model=model, sampling=how)
    first, last = min(row["round"] for row in points), max(row["round"] for row in points)

    def at(t: int, s: float) -> list[float]:
        return list(picked(points, round=t, sigma=s)[0]["values"])

    who = f"000: Figures 3, 4, {model}, {how}: smoothing (sigma 1)"
    return [
        verdict(f"{who} is behind none at round {first} (validation)", at(first, 0.0), at(first, 1.0), "nothing"),
        verdict(f"{who} is ahead of none at round {last} (validation)", at(last, 1.0), at(last, 0.0), "nothing"),
    ]


def draw_figures34(rows: list[Row], path: Path) -> None:
    """Validation accuracy by round."""
    inside = [row for row in rows if row["round"] is not None and "accuracy" in row]
    panels = {
        f"{model}, {how}": {f"sigma {s:g}": picked(inside, model=model, sampling=how, sigma=s) for s in strengths}
        for model, strengths in MODELS.items()
        for how in WAYS
    }
    curves(panels, "round", "accuracy", path, ylabel="validation accuracy, %")


# ---- one cheap row of each, computed again ---------------------------------------------------------------------------


def quick_figure6() -> Row:
    """Seed 0 at the end of the first curve."""
    return fragile(NOISES[0], STEPS[0], 0.0, 0)[-1]


def quick_figures34() -> Row:
    """Seed 0 at the end of a curve of the CNN."""
    row = trained("CNN", "poisson", 0.0, 0)[-1]
    return {key: value for key, value in row.items() if key != "train loss"}


# ---- what there is ---------------------------------------------------------------------------------------------------

STUDIES = (
    Study(
        "000-figure6",
        "Figure 6 and Table H.11: large noise and several steps (scaled)",
        f"The task of 000-small, Poisson, T = {ROUNDS}, pre-trained (the paper: from scratch, one run); validation "
        "accuracy by round, and rows without a round: test accuracy at the end. Half and 5/4 of the default step, two "
        "of the paper's four.",
        figure6,
        figure6_claims,
        draw_figure6,
        5,
        paper_000_small.TUNED,
        quick_figure6,
        "accuracy",
    ),
    Study(
        "000-figures34",
        "Figures 3 and 4: training curves (Figure 4 scaled)",
        "Logistic regression as in Table 2 at claimed epsilon 7; the small CNN of 000-small at z = 2. Accuracy on "
        "2,000 validation images, loss on 2,000 training images (not private), every other round; rows without a "
        "round: test accuracy at the end.",
        figures34,
        figures34_claims,
        draw_figures34,
        5,
        paper_000_small.TUNED,
        quick_figures34,
        "accuracy",
    ),
)
