"""Paper 003: every method's numbers, found on held-out training images with about as many runs for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sordino_papers.once import once
from sordino_papers.panels import curves
from sordino_papers.paper_003 import METHODS, Row, Setting, measured
from sordino_papers.studies import Study, picked, side_by_side

SEED = 100  # of the split, the model and the coins of the search: none of those that report
ROUNDS = 50  # half of those that report
SEARCHES = tuple(METHODS)
RATES, RADII = (0.03, 0.1, 0.3), (0.1, 0.2, 0.5)
RHO, PULL, KEPT = (0.01, 0.05, 0.1, 0.3), (0.03, 0.1, 0.3, 1.0), (0.2, 0.4, 0.6, 0.8)


def own_numbers(method: str) -> tuple[float, ...]:
    """What the last runs of the search look at."""
    if "Fed-SMP" in method:
        return KEPT
    return PULL if "BLUR" in method else RHO


def started(method: str) -> Setting:
    """Where the search begins."""
    return Setting(method, own=own_numbers(method)[1], rounds=ROUNDS)


def search(method: str, score: Callable[[Setting], Row]) -> list[Row]:
    """One number after the other: step, clip norm, its own, step; pairs of step and clip norm, and its own again."""
    best = started(method)
    tried = {best: score(best)}
    for stage in (by_rate, by_clip_norm, by_own, by_rate, by_pair, by_own):
        tried |= {one: score(one) for one in stage(best) if one not in tried}
        best = max(tried, key=lambda one: tried[one]["validation"])
    return [_row(setting, found, setting == best) for setting, found in tried.items()]


def by_rate(best: Setting) -> list[Setting]:
    """The best so far with every step."""
    return [replace(best, lr=lr) for lr in RATES]


def by_clip_norm(best: Setting) -> list[Setting]:
    """The best so far with every clip norm."""
    return [replace(best, clip_norm=clip_norm) for clip_norm in RADII]


def by_pair(best: Setting) -> list[Setting]:
    """The best so far with every pair of step and clip norm: the two depend on each other."""
    return [one for other in by_rate(best) for one in by_clip_norm(other)]


def by_own(best: Setting) -> list[Setting]:
    """The best so far with every number of the method's own, if it has any."""
    if best.method == "DP-FedAvg":
        return []
    return [replace(best, own=own) for own in own_numbers(best.method)]


def _row(setting: Setting, found: Row, chosen: bool) -> Row:
    named: dict[str, Any] = {"method": setting.method, "lr": setting.lr, "clip_norm": setting.clip_norm}
    own = None if setting.method == "DP-FedAvg" else setting.own
    return {**named, "own": own, "validation": found["validation"], "chosen": "*" if chosen else ""}


def searched(method: str) -> list[Row]:
    """The search of one method, judged on validation images."""
    return search(method, lambda setting: once(measured, setting, SEED, "validation"))


def rows(repeats: int, workers: int) -> list[Row]:
    """There is one seed, whatever `repeats` says."""
    return [row for found in side_by_side(searched, [(method,) for method in SEARCHES], workers) for row in found]


def quick() -> Row:
    """Where the search of DP-FedAvg begins."""
    first = started("DP-FedAvg")
    named: Row = {"method": first.method, "lr": first.lr, "clip_norm": first.clip_norm}
    return {**named, "validation": measured(first, SEED, "validation")["validation"]}


def draw(found: list[Row], path: Path) -> None:
    """Validation accuracy over the step, at the method's own number that was chosen."""
    chosen = {row["method"]: row["own"] for row in found if row["chosen"]}
    inside = [row for row in found if row["own"] == chosen[row["method"]]]
    inside.sort(key=lambda row: float(row["lr"]))
    panels = {
        f"C {clip_norm:g}": {m: picked(inside, method=m, clip_norm=clip_norm) for m in SEARCHES} for clip_norm in RADII
    }
    curves(panels, "lr", "validation", path, xlabel="local step", ylabel="validation accuracy, %", log=True)


STUDIES = (
    Study(
        "003-tuning",
        "DP-FedSAM: what was tried, and what was chosen (*)",
        "MNIST, Dirichlet 0.6, T = 50 (half of what reports), judged on the last 10,000 TRAINING images, which no "
        "client holds, with a seed that reports nothing. For each: lr, then the clip norm C, then the method's own "
        "number (rho, pull or share kept), then lr again, all nine pairs of lr and C, its own number again. "
        "The same numbers serve on Dirichlet 0.3 and iid. In a deployment these runs would be billed.",
        rows,
        lambda rows: [],
        draw,
        1,
        "validation images; test images are not read",
        quick,
        "validation",
    ),
)
