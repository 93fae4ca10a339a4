"""Paper 000, Table 4 and Figure 5 on a small scale: an LSTM, both ways of sampling, and its curves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from sordino.accounting.accountant import largest_delta
from sordino.certificate.build import headline
from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.data.records import Natural
from sordino.data.shakespeare import ALPHABET
from sordino.models import CharLstm, build_seeded
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.samplers import FixedSize, Poisson, Sampler
from sordino.parts.schedules import Decay
from sordino.plan import Plan
from sordino.recipes import dp_fed_ls
from sordino.rng import Seeded
from sordino.task import Task
from sordino_papers.panels import curves
from sordino_papers.paper_000_curves import curve
from sordino_papers.paper_000_small import WAYS, How
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import verdict

ROLES, OTHERS, EACH, ROUNDS = 100, 50, 60, 20  # clients; roles to validate on; windows of each
MULTIPLIERS, STRENGTHS = (1.0, 0.4), (0.0, 1.0)  # of the table


@dataclass(frozen=True)
class Knobs:
    """Step and clip norm, the same with and without smoothing."""

    lr: float = 1.47
    clip_norm: float = 5.0


# ---- the task --------------------------------------------------------------------------------------------------------


@cache
def windows() -> tuple[Clients, Records, Records]:
    """100 roles as clients, windows of 50 other roles to validate on, the end of the clients' own texts to test on."""
    data = load("shakespeare", roles=ROLES + OTHERS, per_role=EACH, least=EACH)
    assert data.groups is not None
    assert data.test_groups is not None
    own, test = data.groups < ROLES, data.test_groups < ROLES
    split = Natural().split(data.y[own], data.groups[own], Seeded(0).at(0, "partition"))
    clients = Clients(_records(data.x[own], data.y[own]), split.index, split.offsets)
    return clients, _records(data.x[~own], data.y[~own]), _records(data.test_x[test], data.test_y[test])


def _records(x: np.ndarray, y: np.ndarray) -> Records:
    return Records(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(np.ascontiguousarray(y)))


def task(seed: int, judges: Records) -> Task:
    """One layer of 32; the seed draws the initial weights."""
    clients = windows()[0]
    net = build_seeded(CharLstm(embed=8, hidden=32, layers=1), tuple(clients.records.x.shape[1:]), len(ALPHABET), seed)
    return Task(net, clients, judges)


# ---- the plan --------------------------------------------------------------------------------------------------------


def sampler(how: How) -> Sampler:
    """A fifth of the roles, as a fixed number or by coins."""
    return FixedSize(ROLES, ROLES // 5) if how == "uniform" else Poisson(ROLES, 0.2)


def plan(how: How, noise_multiplier: float, strength: float, knobs: Knobs | None = None) -> Plan:
    """Scaled: N = 100, T = 20, E = 1, b = 10; the paper has N = 975, T = 100, E = 5, b = 50, two layers of 256."""
    knobs = knobs or Knobs()
    return dp_fed_ls(
        rounds=ROUNDS,
        clients=sampler(how),
        lr=Decay(knobs.lr, 0.99),
        clip_norm=knobs.clip_norm,
        noise_multiplier=noise_multiplier,
        denoiser=LaplacianSmoothing(strength),
        epochs=1,
        batch=10,
        weight_decay=4e-5,
    )


def epsilon(how: How, noise_multiplier: float) -> float:
    """To who sees the released models, at delta 100^-1.1."""
    return float(headline(plan(how, noise_multiplier, 0.0).cost().of("models"), largest_delta(ROLES))["epsilon"])


# ---- Table 4 and Figure 5 --------------------------------------------------------------------------------------------


def trained(how: How, noise_multiplier: float, strength: float, seed: int) -> list[Row]:
    """Validation accuracy and training loss every fourth round; round None: the accuracy on the test windows."""
    _, held, test = windows()
    rows = curve(plan(how, noise_multiplier, strength), task(seed, test), held, seed, every=4)
    return [{"sampling": how, "z": noise_multiplier, "sigma": strength, **row} for row in rows]


def figure5(repeats: int, workers: int) -> list[Row]:
    """Both ways of sampling, both noises, with and without smoothing; train losses in rows of their own."""
    jobs = [(how, z, s, seed) for how in WAYS for z in MULTIPLIERS for s in STRENGTHS for seed in range(repeats)]
    rows = [row for one in side_by_side(trained, jobs, workers) for row in one]
    keys = ("sampling", "z", "sigma", "round")
    losses = [row for row in rows if row["train loss"] is not None]
    spent = {(how, z): round(epsilon(how, z), 4) for how in WAYS for z in MULTIPLIERS}
    found = [*gathered(rows, keys, "accuracy"), *gathered(losses, keys, "train loss")]
    return [row | ({"epsilon": spent[row["sampling"], row["z"]]} if row["round"] is None else {}) for row in found]


def figure5_claims(rows: list[Row]) -> list[Row]:
    """Table 4: sigma 1 against none at the end, on the test windows."""
    found = []
    for how in WAYS:
        for z in MULTIPLIERS:
            up, down = (picked(rows, sampling=how, z=z, sigma=s, round=None)[0]["values"] for s in (1.0, 0.0))
            text = f"000: Table 4 scaled, {how}, z = {z:g}: smoothing (sigma 1) beats none"
            found.append(verdict(text, up, down, CHOSEN))
    return found


def draw_figure5(rows: list[Row], path: Path) -> None:
    """Validation accuracy by round."""
    inside = [row for row in rows if row["round"] is not None and "accuracy" in row]
    panels = {
        f"{how}, z = {z:g}": {f"sigma {s:g}": picked(inside, sampling=how, z=z, sigma=s) for s in STRENGTHS}
        for how in WAYS
        for z in MULTIPLIERS
    }
    curves(panels, "round", "accuracy", path, ylabel="validation accuracy, %")


# ---- one run for Table H.10 (paper_000_tuning) -----------------------------------------------------------------------


def ended(lr: float, strength: float, seed: int, judges: Records) -> float:
    """Accuracy (percent) after one run at the larger noise, Poisson; nobody but the judges is looked at."""
    asked = plan("poisson", MULTIPLIERS[0], strength, Knobs(lr=lr))
    rows = curve(asked, task(seed, judges), judges, seed, train=False, every=2 * ROUNDS)  # the end alone
    return float(rows[-1]["accuracy"])


# ---- what there is ---------------------------------------------------------------------------------------------------

CHOSEN = "step and clip norm: the paper's (1.47 and 5), not tuned here; 000-table-h10 shows other steps"
SCALE = (
    f"Next character from 80, {ROLES} roles with {EACH} windows each, a fifth of them in a round, one layer of 32, "
    f"T = {ROUNDS}, E = 1, b = 10 (the paper: 975 roles, two layers of 256, T = 100, E = 5, b = 50). "
)


def _quick5() -> Row:
    """Seed 0 at the end of the first curve."""
    row = trained("poisson", MULTIPLIERS[0], 0.0, 0)[-1]
    return {key: row[key] for key in ("sampling", "z", "sigma", "round", "accuracy")}


STUDIES = (
    Study(
        "000-figure5",
        "Figure 5 and Table 4: an LSTM, both ways of sampling (scaled)",
        f"{SCALE}Accuracy on 2,000 windows of {OTHERS} other roles and loss on 2,000 training windows (not private) "
        "every fourth round; rows without a round: the clients' own held-out text at the end.",
        figure5,
        figure5_claims,
        draw_figure5,
        5,
        CHOSEN,
        _quick5,
        "accuracy",
    ),
)
