"""Paper 003 as its authors ran it. NOT PRIVATE: every client masks its own noised update by its own top_k.

    message_i = top_k(clip(w_t - w_i, C) + N(0, (z C)^2 / m)),   w <- w - mean of messages;   the BEST round is reported

The mask is read off the data and takes noise away, cohorts are of exactly m clients, and the best round is chosen on
the test images: no epsilon follows (docs/privacy.md#mask-after-noise). These rows stand beside 003-cifar10-regime to
show what the published ordering measures. `signal` and `noise` are the shares of both that are left in the mean:

    signal = <mean with noise and mask, clean mean> / ||clean mean||^2,    noise = the same of the noise's energy

Where a client's noise is far above its signal, a top_k of 40% leaves .87 of the signal and of the noise's energy
(t = .84: P(|n| > t) + 2 t phi(t)), so .93 of the noise's size: it takes more of the signal than of the noise. The row
"DP-FedSAM, C x .93" has the same noise soundly, and .93 of the signal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch import Tensor

from sordino.parts.clipping import row_norms
from sordino.parts.encoding import Public
from sordino.parts.sparsify import keep_largest
from sordino.rng import Seeded
from sordino.task import evaluate
from sordino_papers.once import once
from sordino_papers.panels import curves
from sordino_papers.paper_003 import Row, Setting, plan, task
from sordino_papers.span import InSpan
from sordino_papers.studies import Study, gathered, picked, side_by_side
from sordino_papers.verdicts import verdict

CLIENTS, COHORT, ROUNDS, EVERY, KEEP = 50, 5, 60, 5, 0.4
Z = 0.95
SHORTER = 0.93  # of C: the noise that a top_k of 40% leaves, sqrt(.87)


@dataclass(frozen=True)
class Way:
    """How one row is run: the local solver's method, the clip norm, and where the mask stands."""

    method: str = "DP-FedSAM"
    clip_norm: float = 0.2
    mask: str = ""  # "after" the noise, as published; "before" it, which is sound; "" is none


WAYS = {
    "DP-FedAvg": Way("DP-FedAvg"),
    "DP-FedSAM": Way(),
    "DP-FedSAM-top_k as published": Way(mask="after"),
    "top_k before the noise (sound)": Way(mask="before"),
    "DP-FedSAM, C x .93": Way(clip_norm=0.2 * SHORTER),
}
PUBLISHED = "DP-FedSAM-top_k as published"


def messages(rows: Tensor, way: Way, coins: torch.Generator) -> tuple[Tensor, Tensor]:
    """What the clients of a cohort [m, d] send, and the same without noise and mask."""
    masked = keep_largest(rows, rows.abs(), KEEP) if way.mask == "before" else rows
    clean = masked * (way.clip_norm / row_norms(masked)).clamp(max=1.0)[:, None].to(masked)
    std = Z * way.clip_norm / len(rows) ** 0.5
    sent = clean + std * torch.randn(clean.shape, generator=coins)
    return (keep_largest(sent, sent.abs(), KEEP) if way.mask == "after" else sent), clean


def setting_of(way: Way) -> Setting:
    """50 clients of 200 images, 20 local steps of 32, lr 0.1 and rho 0.5."""
    return Setting(way.method, clip_norm=way.clip_norm, own=0.5, population=CLIENTS, steps=20)


def rounds(way: Way, seed: int) -> Iterator[tuple[int, Tensor, Row]]:
    """The model after every round, with the shares of signal and noise in its mean."""
    setting = setting_of(way)
    streams, held = Seeded(seed), task(setting, seed)
    worker = InSpan(chunk=16).prepare(plan(setting, seed), held, streams)
    w, coins = held.layout.flatten(held.model), torch.Generator().manual_seed(seed)
    for t in range(ROUNDS):
        cohort = np.sort(streams.at(t, "cohort").permutation(setting.population)[:COHORT])
        sent, clean = messages(worker.solve(cohort, Public(t=t, size=len(w)), w), way, coins)
        moved, ideal = sent.mean(0), clean.mean(0)
        signal = float(moved @ ideal / (ideal @ ideal))
        full = (Z * way.clip_norm / COHORT) ** 2 * len(w)
        w = w - moved
        yield t + 1, w, {"signal": signal, "noise": float((moved - signal * ideal).square().sum()) / full}


def course(name: str, seed: int) -> Row:
    """Test accuracy every five rounds: the last, the best, and the shares' means."""
    held = task(setting_of(WAYS[name]), seed)
    curve, shares = [], []
    for t, w, found in rounds(WAYS[name], seed):
        shares.append(found)
        if t % EVERY == 0:
            held.layout.load(held.model, w)
            assert held.test is not None
            curve.append((t, round(100 * evaluate(held.model, held.test, held.losses)["accuracy"], 2)))
    ends = {"best": max(value for _, value in curve), "accuracy": curve[-1][1]}
    return {
        "method": name,
        "seed": seed,
        **ends,
        **{k: mean(one[k] for one in shares) for k in shares[0]},
        "curve": curve,
    }


def one_run(name: str, seed: int) -> Row:
    """`course`, kept where runs are kept one by one."""
    return once(course, name, seed)


def measured(repeats: int, workers: int) -> list[Row]:
    """Every way over the seeds: the last round, the best, and the way there."""
    runs = side_by_side(one_run, [(name, seed) for seed in range(repeats) for name in WAYS], workers)
    beside = {
        name: {key: float(f"{mean(run[key] for run in picked(runs, method=name)):.4g}") for key in ("signal", "noise")}
        for name in WAYS
    }
    ends = [
        {**run, "reported": r, "accuracy": run[key]}
        for r, key in (("last", "accuracy"), ("best", "best"))
        for run in runs
    ]
    along = [{**run, "reported": t, "accuracy": value} for run in runs for t, value in run["curve"]]
    found = gathered([*ends, *along], ("method", "reported"), "accuracy")
    return [{**row, **(beside[row["method"]] if isinstance(row["reported"], str) else {})} for row in found]


def claims(found: list[Row]) -> list[Row]:
    """The published ordering by the paper's protocol, and what it is made of."""

    def of(name: str, reported: str = "best") -> list[float]:
        (row,) = picked(found, method=name, reported=reported)
        return list(row["values"])

    def said(text: str, better: list[float], worse: list[float]) -> Row:
        return verdict(
            f"003: its protocol (not private), {text}", better, worse, "C, rho, lr: the paper", unit="points"
        )

    sam = of("DP-FedSAM")
    return [
        said("best round: DP-FedSAM beats DP-FedAvg", sam, of("DP-FedAvg")),
        said("best round: top_k as published beats DP-FedSAM", of(PUBLISHED), sam),
        said("best round: the sound top_k beats DP-FedSAM", of("top_k before the noise (sound)"), sam),
        said("best round: a C smaller by .93 beats DP-FedSAM", of("DP-FedSAM, C x .93"), sam),
        said("the best round is above the last (DP-FedAvg)", of("DP-FedAvg"), of("DP-FedAvg", "last")),
        said("the best round is above the last (top_k as published)", of(PUBLISHED), of(PUBLISHED, "last")),
    ]


def draw(found: list[Row], path: Path) -> None:
    """Test accuracy by round."""
    steps = [row for row in found if not isinstance(row["reported"], str)]
    lines = {name: picked(steps, method=name) for name in WAYS}
    curves({"NOT private: C 0.2, rho 0.5": lines}, "reported", "accuracy", path, xlabel="rounds",
           ylabel="test accuracy, %")  # fmt: skip


def quick() -> Row:
    """Seed 0 of DP-FedAvg, last round."""
    return {"method": "DP-FedAvg", "reported": "last", "accuracy": course("DP-FedAvg", 0)["accuracy"]}


STUDIES = (
    Study(
        "003-protocol",
        "Table 1 by the paper's own protocol (NOT private, MNIST)",
        "MNIST over 50 clients by Dirichlet 0.6, 784-128-10, z sqrt(d) / S = 61 (the paper: 64), T = 60, 20 local "
        "steps of 32 images; the paper's C = 0.2, rho = 0.5, keep = 0.4, cohorts of exactly a tenth, each client's "
        "own noise, and the best of rounds 5, 10, .. by TEST images. `as published`: a client's noised update is "
        "masked by its own top_k, so no epsilon follows. signal, noise: shares of both that are left in the mean. "
        "Rows with a number in `reported` are rounds.",
        measured,
        claims,
        draw,
        5,
        "C, rho, lr, share kept: the paper; the round: test images, which is why it is no result of ours",
        quick,
        "accuracy",
    ),
)
