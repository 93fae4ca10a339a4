"""Paper 000, Tables H.8 to H.10 (scaled): what a search saw, and what its choice is worth where nothing was chosen.

A search has seeds of its own and reads validation records alone. The two settings of each sigma that validated best are
then run again, with the seeds of the other tables, and reported on the test records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sordino.data.clients import Records
from sordino.loop import run
from sordino.parts.encoding import LaplacianSmoothing
from sordino.rng import Seeded
from sordino_papers import paper_000_lstm, paper_000_small
from sordino_papers.choosing import only
from sordino_papers.once import once
from sordino_papers.panels import curves
from sordino_papers.paper_000_small import Knobs, small_plan, small_task
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import verdict

SIGMAS = (0.0, 1.0)
TRIAL = 100  # the first seed that searches; none of those reported
PLACES = {1: "best", 2: "second best"}  # in validation; what is reported of each sigma
Work = Callable[..., Row]


# ---- search, then report ---------------------------------------------------------------------------------------------


def finalists(rows: Sequence[Row]) -> list[tuple[int, Row]]:
    """The settings of each sigma that validated best, with their places."""
    ranked = [sorted(picked(rows, sigma=s), key=lambda row: -float(row["validation"])) for s in SIGMAS]
    return [one for rows in ranked for one in zip(PLACES, rows, strict=False)]


def reported(work: Work, seen: Sequence[Row], keys: Sequence[str], repeats: int, workers: int) -> list[Row]:
    """work(*setting, seed) of every finalist of what was seen, on the test records, by place and setting."""
    runs = [(place, row, seed) for place, row in finalists(seen) for seed in range(repeats)]
    found = side_by_side(once, [(work, *(row[key] for key in keys), seed) for _, row, seed in runs], workers)
    rows = [{"place": place, **row} for (place, *_), row in zip(runs, found, strict=True)]
    return gathered(rows, ("place", *keys), "test")


def settled(rows: list[Row], what: str, who: str, told: Callable[[Row], str]) -> list[Row]:
    """Smoothing against none on the test records, each at its own setting of the same place."""
    said = []
    for place, word in PLACES.items():
        none, smooth = (only(picked(rows, place=place, sigma=s)) for s in SIGMAS)
        text = f"000: {what}: smoothing (sigma 1) beats none on the test, each where it validated {word}"
        chosen = f"{who} (sigma 0: {told(none)}; sigma 1: {told(smooth)})"
        said.append(verdict(text, smooth["values"], none["values"], chosen))
    return said


def searched(rows: Sequence[Row]) -> list[Row]:
    """The rows of the search."""
    return [row for row in rows if "validation" in row]


# ---- Tables H.8 and H.9: the small CNN -------------------------------------------------------------------------------

AT = 2.0  # z
SETTING = ("clip_norm", "step", "epochs", "batch", "sigma")
TRIED = {
    "clip_norm": [Knobs(clip_norm=clip_norm, lr=0.3, batch=5) for clip_norm in (0.15, 0.3, 0.6, 1.0)],
    "step": [Knobs(lr=lr, batch=5) for lr in (0.05, 0.1, 0.3, 0.6)],
    "epochs, batch": [Knobs(epochs=e, batch=b) for e, b in ((1, 5), (2, 5), (2, 10), (4, 10))],
    "clip_norm again": [
        Knobs(clip_norm=0.6, epochs=e) for e in (2, 4)
    ],  # at step 0.3 it is the best one under smoothing
}


def judged(knobs: Knobs, sigma: float, seed: int, judges: Records) -> float:
    """Accuracy (percent) of the last model of one run; nobody but the judges is looked at."""
    plan = small_plan("poisson", AT, LaplacianSmoothing(sigma), knobs)
    *_, last = run(plan, small_task(seed, judges), streams=Seeded(seed), eval_every=plan.rounds)
    return 100 * last.metrics["accuracy"]


def cnn_tried(clip_norm: float, step: float, epochs: int, batch: int, sigma: float, seed: int) -> Row:
    """One run of the search, judged on validation images; its seeds are none of those reported."""
    setting = (clip_norm, step, epochs, batch, sigma)
    found = judged(Knobs(*setting[:4]), sigma, TRIAL + seed, paper_000_small.images()[1])
    return {**dict(zip(SETTING, setting, strict=True)), "validation": found}


def cnn_reported(clip_norm: float, step: float, epochs: int, batch: int, sigma: float, seed: int) -> Row:
    """One run that is reported, judged on the test images."""
    setting = (clip_norm, step, epochs, batch, sigma)
    found = judged(Knobs(*setting[:4]), sigma, seed, paper_000_small.images()[2])
    return {**dict(zip(SETTING, setting, strict=True)), "test": found}


def tables_h(repeats: int, workers: int) -> list[Row]:
    """Every setting with and without smoothing, and the finalists."""
    settings = dict.fromkeys((k.clip_norm, k.lr, k.epochs, k.batch) for group in TRIED.values() for k in group)
    jobs = [(cnn_tried, *one, s, seed) for one in settings for s in SIGMAS for seed in range(repeats)]
    seen = gathered(side_by_side(once, jobs, workers), SETTING, "validation")
    return [*seen, *reported(cnn_reported, seen, SETTING, repeats, workers)]


def tables_h_claims(rows: list[Row]) -> list[Row]:
    """The finalists on the test images; then every setting of the search, whichever way it went."""
    found = settled(
        rows, "Tables H.8, H.9 scaled, z = 2", "clip_norm, step, E, b: validation images, other seeds", _told
    )
    for none in picked(searched(rows), sigma=0.0):
        smooth = only(picked(searched(rows), **{key: none[key] for key in SETTING[:4]}, sigma=1.0))
        text = f"000: Tables H.8, H.9 scaled, z = 2, {_told(none)}: smoothing (sigma 1) beats none (validation)"
        found.append(verdict(text, smooth["values"], none["values"], "nothing: all settings of the search are here"))
    return found


def _told(row: Row) -> str:
    return f"clip_norm {row['clip_norm']:g}, step {row['step']:g}, E {row['epochs']}, b {row['batch']}"


def draw_tables_h(rows: list[Row], path: Path) -> None:
    """Validation accuracy against the clip norm (step 0.3), and against the step (clip norm 0.3)."""
    fixed = {"clip_norm": {"step": 0.3, "epochs": 2, "batch": 5}, "step": {"clip_norm": 0.3, "epochs": 2, "batch": 5}}
    seen = searched(rows)
    panels = {
        name: {f"sigma {s:g}": [{**row, "x": row[name]} for row in _along(seen, name, s, usual)] for s in SIGMAS}
        for name, usual in fixed.items()
    }
    words = {"clip_norm": "clip norm (step 0.3)", "step": "local step (clip norm 0.3)"}
    curves(panels, "x", "validation", path, xlabel=words, ylabel="validation accuracy, %")


def _along(rows: list[Row], name: str, s: float, usual: Row) -> list[Row]:
    return sorted(picked(rows, sigma=s, **usual), key=lambda row: float(row[name]))


# ---- Table H.10: the LSTM --------------------------------------------------------------------------------------------

STEPS = (0.5, 1.0, 1.47, 2.0, 3.0, 4.0)
SEARCH = 2  # seeds of the search: settings far off are told by one


def lstm_tried(step: float, sigma: float, seed: int) -> Row:
    """One run of the search, judged on windows of other roles."""
    _, held, _ = paper_000_lstm.windows()
    return {"step": step, "sigma": sigma, "validation": paper_000_lstm.ended(step, sigma, TRIAL + seed, held)}


def lstm_reported(step: float, sigma: float, seed: int) -> Row:
    """One run that is reported, judged on the clients' own held-out text."""
    *_, test = paper_000_lstm.windows()
    return {"step": step, "sigma": sigma, "test": paper_000_lstm.ended(step, sigma, seed, test)}


def table_h10(repeats: int, workers: int) -> list[Row]:
    """Every step with every sigma, and the finalists."""
    jobs = [(lstm_tried, lr, s, seed) for s in SIGMAS for lr in STEPS for seed in range(min(SEARCH, repeats))]
    seen = gathered(side_by_side(once, jobs, workers), ("sigma", "step"), "validation")
    return [*seen, *reported(lstm_reported, seen, ("step", "sigma"), repeats, workers)]


def table_h10_claims(rows: list[Row]) -> list[Row]:
    """The finalists on the test windows."""
    seeds = max(int(row["repeats"]) for row in searched(rows))
    who = f"step: windows of other roles, {seeds} other seeds"
    return settled(rows, "Table H.10 scaled, z = 1", who, lambda row: f"step {row['step']:g}")


def draw_table_h10(rows: list[Row], path: Path) -> None:
    """Validation accuracy by step."""
    lines = {f"sigma {s:g}": picked(searched(rows), sigma=s) for s in SIGMAS}
    curves({"z = 1, Poisson": lines}, "step", "validation", path, xlabel="local step", ylabel="validation accuracy, %")


# ---- what there is ---------------------------------------------------------------------------------------------------


def quick_tables_h() -> Row:
    """The first seed of the setting that the other tables of this task have."""
    usual = Knobs()
    return cnn_tried(usual.clip_norm, usual.lr, usual.epochs, usual.batch, 0.0, 0)


def quick_h10() -> Row:
    """The first seed of the paper's step without smoothing."""
    return lstm_tried(1.47, 0.0, 0)


FINAL = (
    f"Rows with a place are the two settings of each sigma that validated best (place 1 and 2), on the test records, "
    f"with seeds from 0 on; the seeds of the search begin at {TRIAL} and no other table has them."
)
STUDIES = (
    Study(
        "000-tables-h",
        "Tables H.8 and H.9: clip norm, step, local epochs and batch (scaled)",
        "The task of 000-small at z = 2, Poisson; validation accuracy is of 5,000 held-out training images. Clip norm "
        "at step 0.3, step at clip norm 0.3, then epochs and batch; then clip norm 0.6, the best under smoothing, "
        f"with the step and batch that are best at clip norm 0.3. {FINAL}",
        tables_h,
        tables_h_claims,
        draw_tables_h,
        5,
        "the validation images choose; the test images report",
        quick_tables_h,
        "validation",
    ),
    Study(
        "000-table-h10",
        "Table H.10: the local step of the LSTM (scaled)",
        f"{paper_000_lstm.SCALE}z = 1, Poisson; {paper_000_lstm.OTHERS} other roles validate, the end of the clients' "
        f"own texts tests. {FINAL}",
        table_h10,
        table_h10_claims,
        draw_table_h10,
        5,
        f"the validation windows choose ({SEARCH} seeds); the test windows report",
        quick_h10,
        "validation",
    ),
)
