"""Paper 003, Table 1 at the paper's ratio of noise to signal: CIFAR-10, four methods, each with a search of its own.

The ratio is z sqrt(d) / S: the paper has 0.95 sqrt(11.2 million) / 50 = 64. Here d = 464,170 and S = 10 give 65;
003-mnist has 6, where the paper's claim is not tested.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev

import torch
from torch.nn.functional import avg_pool2d

from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.data.records import Dirichlet
from sordino.loop import run
from sordino.models import SmallCnn, build_seeded
from sordino.outcome import final_model
from sordino.rng import Seeded
from sordino.task import Task, evaluate
from sordino_papers import kept
from sordino_papers.once import once
from sordino_papers.panels import curves
from sordino_papers.paper_003 import SOUND_TOP_K, Judge, Row, Setting, flatness, norms, plan
from sordino_papers.paper_003_fair import epsilon
from sordino_papers.studies import Study, picked, side_by_side
from sordino_papers.verdicts import verdict

AVG, SAM, SMP = "DP-FedAvg", "DP-FedSAM", "Fed-SMP-rand_k"
CLIENTS, HELD, ROUNDS, TRIED, EVERY = 100, 45_000, 60, 20, 10  # clients' images; rounds that report, of the search
TRIAL = 100  # the seed of the search; none of those reported
RATES, RADII, RHO, KEPT = (0.03, 0.1), (0.1, 0.2, 0.4), (0.05, 0.1, 0.5), (0.1, 0.4)
NET = SmallCnn(channels=(16,), hidden=448, groups=8)
FIGURES = ("test", "train", "gap", "norm", "median norm", "clipped", "rise")
TUNED = "lr, C, rho, share kept, form of top_k: the last 5,000 training images, by one run of another seed, 20 rounds"


@cache
def images() -> tuple[Records, Records, Records]:
    """CIFAR-10 averaged to 16x16: the clients' 45,000 images, 5,000 to choose by, 10,000 to test on."""
    data = load("cifar10", sheets=5)
    x, y, test_x, test_y = (torch.as_tensor(one) for one in (data.x, data.y, data.test_x, data.test_y))
    x, test_x = ((avg_pool2d(one, 2) - 0.473) / 0.22 for one in (x, test_x))
    return Records(x[:HELD], y[:HELD]), Records(x[HELD:], y[HELD:]), Records(test_x, test_y)


def task(seed: int, judge: Judge) -> Task:
    """The clients' images dealt by Dirichlet 0.6, and a CNN with group norm."""
    held, validation, test = images()
    split = Dirichlet(CLIENTS, 0.6).split(held.y.numpy(), None, Seeded(seed).at(0, "partition"))
    net = build_seeded(NET, tuple(held.x.shape[1:]), 10, seed)
    return Task(net, Clients(held, split.index, split.offsets), test if judge == "test" else validation)


def begun(method: str) -> Setting:
    """Where the search of a method begins: five local steps of 50 images, z = 0.95."""
    own = KEPT[1] if method == SMP else RHO[1]
    return Setting(method, 0.1, 0.2, own, rounds=TRIED, population=CLIENTS, batch=50, steps=5)


def measured(setting: Setting, seed: int, judge: Judge) -> Row:
    """One run: accuracy on what judges; of a run that reports also the way there, update norms and flatness."""
    began, ours, held = time.perf_counter(), plan(setting, seed), task(seed, judge)
    every = EVERY if judge == "test" else setting.rounds
    done = list(run(ours, held, streams=Seeded(seed), eval_every=every))
    found: Row = {judge: round(100 * done[-1].metrics["accuracy"], 2), "code": kept.code()}
    if judge == "test":
        model, some = final_model(ours, held, done[-1].state), held.clients.records
        train = 100 * evaluate(model, Records(some.x[:10_000], some.y[:10_000]), held.losses)["accuracy"]
        found |= {"train": round(train, 2), "gap": round(train - found[judge], 2)}
        found |= {**norms([one.diagnostics for one in done]), "rise": flatness(model, held)}
        found["curve"] = [(one.t + 1, round(100 * one.metrics["accuracy"], 2)) for one in done if one.metrics]
        found["norms"] = [round(one.diagnostics.get("update_norm_mean", 0.0), 4) for one in done][EVERY - 1 :: EVERY]
    return {**found, "seconds": round(time.perf_counter() - began, 1)}


def one_run(setting: Setting, seed: int, judge: Judge) -> Row:
    """`measured`, kept where runs are kept one by one."""
    return once(measured, setting, seed, judge)


# ---- the search, on images that no client holds and no figure reports ------------------------------------------------


def pairs(best: Setting) -> list[Setting]:
    """Every lr with every C."""
    return [replace(best, lr=lr, clip_norm=c) for lr in RATES for c in RADII]


def own_numbers(best: Setting) -> list[Setting]:
    """The best so far with every number of the method's own."""
    return [replace(best, own=own) for own in {AVG: (), SAM: RHO, SMP: KEPT}[best.method]]


def top_k_forms(best: Setting) -> list[Setting]:
    """DP-FedSAM's numbers in every sound form of top_k."""
    return [replace(best, method=form) for form in SOUND_TOP_K] if best.method == SAM else []


def searched(workers: int) -> dict[Setting, float]:
    """Everything that was tried, with its accuracy on the held-out images."""
    tried: dict[Setting, float] = {}
    for stage in (pairs, own_numbers, top_k_forms):
        wanted = [one for method in (AVG, SAM, SMP) for one in stage(best_of(tried, method))]
        jobs = [(one, TRIAL, "validation") for one in wanted if one not in tried]
        found = side_by_side(one_run, jobs, workers)
        tried |= {job[0]: float(row["validation"]) for job, row in zip(jobs, found, strict=True)}
    return tried


def best_of(tried: Mapping[Setting, float], *methods: str) -> Setting:
    """The best setting so far of these methods."""
    mine = [one for one in tried if one.method in methods]
    return max(mine, key=lambda one: tried[one], default=begun(methods[0]))


def chosen(tried: Mapping[Setting, float]) -> list[Setting]:
    """The four settings that report."""
    return [best_of(tried, *methods) for methods in ((AVG,), (SAM,), SOUND_TOP_K, (SMP,))]


def _tried(tried: Mapping[Setting, float]) -> list[Row]:
    best = chosen(tried)
    return [
        {"tried": one.method, "lr": one.lr, "C": one.clip_norm, "own": one.own, "validation": score,
         "chosen": "*" if one in best else ""}
        for one, score in tried.items()
    ]  # fmt: skip


# ---- what reports ----------------------------------------------------------------------------------------------------


def rows(repeats: int, workers: int) -> list[Row]:
    """The four methods over the seeds, their courses, then what was tried."""
    tried = searched(workers)
    settings = [replace(one, rounds=ROUNDS) for one in chosen(tried)]
    jobs = [(one, seed, "test") for seed in range(repeats) for one in settings]
    runs = dict(zip(jobs, side_by_side(one_run, jobs, workers), strict=True))
    each = {one: [runs[one, seed, "test"] for seed in range(repeats)] for one in settings}
    ends = [_row(one, found) for one, found in each.items()]
    return [*ends, *(row for one, found in each.items() for row in _course(one, found)), *_tried(tried)]


def _row(setting: Setting, runs: Sequence[Row]) -> Row:
    means = {name: float(f"{mean(one[name] for one in runs):.4g}") for name in FIGURES}
    values = [one["test"] for one in runs]
    return {
        "method": setting.method,
        "round": None,
        **means,
        "spread": float(f"{stdev(values):.3g}") if len(values) > 1 else None,
        "ratio": round(ratio(setting), 1),
        "epsilon": epsilon(setting),
        "repeats": len(values),
        "values": values,
        "figures": {name: [one[name] for one in runs] for name in FIGURES},
    }


def ratio(setting: Setting) -> float:
    """z sqrt(d) / S of the setting."""
    parameters = sum(p.numel() for p in build_seeded(NET, (3, 16, 16), 10, 0).parameters())
    return setting.noise_multiplier * math.sqrt(parameters) / (0.1 * setting.population)


def _course(setting: Setting, runs: Sequence[Row]) -> list[Row]:
    """Test accuracy and mean update norm every ten rounds: Figures 2 and 4 of the paper."""
    return [
        {
            "method": setting.method,
            "round": t,
            "test": float(f"{mean(run['curve'][place][1] for run in runs):.4g}"),
            "norm": float(f"{mean(run['norms'][place] for run in runs):.4g}"),
        }
        for place, (t, _) in enumerate(runs[0]["curve"])
    ]


def quick() -> Row:
    """Ten rounds are no row of the study: the first trial of DP-FedAvg is, and it is the cheapest."""
    first = replace(begun(AVG), lr=RATES[0], clip_norm=RADII[0])
    score = measured(first, TRIAL, "validation")["validation"]
    return {"tried": AVG, "lr": first.lr, "C": first.clip_norm, "validation": score}


def claims(found: list[Row]) -> list[Row]:
    """The paper's sentences about its Table 1 and Figures 3 and 4, and the sound top_k and Fed-SMP beside DP-FedSAM."""

    def of(method: str, figure: str) -> list[float]:
        (row,) = picked(found, method=method, round=None)
        return [float(value) for value in row["figures"][figure]]

    def said(text: str, better: str, worse: str, figure: str = "test", unit: str = "points") -> Row:
        up, down = of(better, figure), of(worse, figure)
        return verdict(f"003: CIFAR-10 at the paper's ratio, {text}", up, down, TUNED, unit=unit)

    (top_k,) = [row["method"] for row in picked(found, round=None) if row.get("method") in SOUND_TOP_K]
    return [
        said("DP-FedSAM beats DP-FedAvg in test accuracy", SAM, AVG),
        said(f"top_k (sound: {top_k}) beats DP-FedSAM", top_k, SAM),
        said("DP-FedSAM beats Fed-SMP-rand_k", SAM, SMP),
        said("DP-FedSAM has the smaller updates before the clip", AVG, SAM, "norm", "of the norm"),
        said("DP-FedSAM lies flatter (mean rise of the loss)", AVG, SAM, "rise", "of the loss"),
        said("DP-FedSAM has the smaller gap between train and test", AVG, SAM, "gap"),
    ]


def draw(found: list[Row], path: Path) -> None:
    """Test accuracy by round."""
    steps = [row for row in found if row.get("round")]
    names = dict.fromkeys(row["method"] for row in steps)
    lines = {method: picked(steps, method=method) for method in names}
    curves({"CIFAR-10, ratio 65": lines}, "round", "test", path, xlabel="rounds", ylabel="test accuracy, %")
    curves({"CIFAR-10, ratio 65": lines}, "round", "norm", path.with_stem(f"{path.stem}-norms"), xlabel="rounds",
           ylabel="mean norm of updates before the clip")  # fmt: skip


STUDIES = (
    Study(
        "003-cifar10-regime",
        "Table 1 on CIFAR-10 at the paper's noise-to-signal ratio (scaled)",
        "z = 0.95, z sqrt(d) / S = 65 (the paper: 64): 45,000 images averaged to 16x16 over 100 clients by Dirichlet "
        f"0.6, Poisson cohorts of 10, a CNN with group norm (464,170 parameters), T = {ROUNDS}, five local steps of 50 "
        "images (the paper: 32x32, ResNet-18, 500 clients, 30 epochs, T = 300). Rows with a round: the way there "
        "(Figures 2 and 4); rows with `tried`: the search. "
        "[Norms over rounds](../figures/003-cifar10-regime-norms.png).",
        rows,
        claims,
        draw,
        3,
        TUNED,
        quick,
        "validation",
    ),
)
