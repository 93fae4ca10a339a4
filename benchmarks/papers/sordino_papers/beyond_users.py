"""Beyond the papers: the user as the unit, or records clipped one by one and a group of them paid for, at one epsilon.

FEMNIST, whose 105 writers are the users; logistic regression of images halved to 14 x 14 (12,214 parameters); T = 60
steps at rate .3. A seventh of each writer's images is held out: they choose clip norm and step size of every row.

    users           make_private(..., users=writers): 31.5 writers a step, each with all images, one clip each
    G per writer    make_private over the first G images of each writer: each image is drawn with probability .3 and
                    clipped alone. A writer moves a step's sum by k clip norms, k ~ Bin(G, .3), so a step is
                    P = sum_k Bin(G, p)(k) N(k, s^2) against Q = N(0, s^2), of which s is the noise that is solved for
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import log_ndtr, logsumexp
from scipy.stats import binom
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sordino.accounting import accountant
from sordino.accounting.accountant import largest_delta
from sordino.accounting.events import Event, GaussianNoise, PoissonSampled, Relation
from sordino.accounting.pairs import Array, Orders, Pair, Tails
from sordino.data.datasets import load
from sordino.dpsgd import make_private
from sordino.models import Logistic, build_seeded
from sordino_papers.correlated import PILOTS, climbed, values_of
from sordino_papers.once import once
from sordino_papers.panels import curves
from sordino_papers.paper_002_femnist import halved
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import verdict

USERS, STEPS, RATE = 105, 60, 0.3
EPSILONS, CAPS, CLIPS = (4.0, 8.0), (1, 4, 16, 64), (1.0, 4.0)
KINDS = {"users": 0, **{f"at most {cap} per writer": cap for cap in CAPS}}
CHOSEN = "clip norm (1 or 4) and step size: another seed on images held out from training, each row by itself"
QUICK = (1.0, 0.5)  # clip norm and step that were chosen for users at the largest epsilon
_FARTHEST = 40.0  # standard deviations of an outcome


@dataclass(frozen=True)
class GroupPair(Pair):
    """P = sum_k Bin(G, p)(k) N(k, s^2) against Q = N(0, s^2) or, with `reverse`, Q against P; the loss rises with x."""

    group: int
    rate: float
    noise: float
    reverse: bool = False
    slack = 1e-9

    @property
    def _logs(self) -> Array:
        return np.asarray(binom.logpmf(np.arange(self.group + 1), self.group, self.rate))

    def _loss(self, x: Array) -> tuple[Array, Array]:
        """log dP/dQ at x, and its slope."""
        k = np.arange(self.group + 1) / self.noise
        each = self._logs + k * x[:, None] - k * k / 2
        loss = logsumexp(each, axis=1)
        return loss, np.exp(each - loss[:, None]) @ k

    def _outcomes(self, losses: Array) -> Array:
        """x at which log dP/dQ is the loss: between two points of a table, and three steps of Newton's method."""
        table = np.linspace(-_FARTHEST, _FARTHEST + self.group / self.noise, 4001)
        known = self._loss(table)[0]
        x = np.interp(losses, known, table)
        inside = (losses > known[0]) & (losses < known[-1])
        for _ in range(3):
            loss, slope = self._loss(x)
            x = np.where(inside, x - (loss - losses) / slope, x)
        return np.where(losses <= self._logs[0], -np.inf, x)

    def tails(self, losses: Array) -> Tails:
        sign = -1.0 if self.reverse else 1.0
        x, k = self._outcomes(sign * np.asarray(losses)), np.arange(self.group + 1) / self.noise
        mixed = np.minimum(logsumexp(self._logs + log_ndtr(sign * (k - x[:, None])), axis=1), 0.0)
        plain = log_ndtr(-sign * x)
        return (plain, mixed) if self.reverse else (mixed, plain)


@dataclass(frozen=True)
class GroupSampled(Event):
    """A step over records sampled by Poisson, for a user with at most `group` of them; noise in clips of one record."""

    group: int
    rate: float
    noise: float

    def pairs(self, relation: Relation, share: float = 0.0) -> tuple[Orders, ...]:
        group = self.group, self.rate, self.noise
        return (Orders(GroupPair(*group), GroupPair(*group, reverse=True)),)

    def mu(self, relation: Relation) -> float:
        return self.group / self.noise


def spent(cap: int, noise: float, rate: float = RATE, steps: int = STEPS, delta: float = 0.0) -> float:
    """Epsilon for one user; `cap` 0: users are drawn."""
    event = GroupSampled(cap, rate, noise) if cap else PoissonSampled(rate, GaussianNoise(noise))
    return accountant.bound(((event, steps),), "add_remove", delta or largest_delta(USERS), rough=True).value


@cache
def noise_for(cap: int, epsilon: float, rate: float = RATE, steps: int = STEPS, delta: float = 0.0) -> float:
    """The least noise multiplier, to .3%, at which a user's epsilon is at most this."""
    low, high = 0.3, 1.0
    while spent(cap, high, rate, steps, delta) > epsilon:
        low, high = high, 2 * high
    while high > low * 1.003:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(cap, middle, rate, steps, delta) > epsilon else (low, middle)
    return high


@cache
def femnist() -> tuple[dict[str, Tensor], Tensor]:
    """Training, held-out and test images with their labels, and the writer of each training image."""
    data, rng = load("femnist"), np.random.default_rng(0)
    assert data.groups is not None
    own = [rng.permutation(np.flatnonzero(data.groups == writer)) for writer in np.unique(data.groups)]
    held, kept = (
        np.concatenate(parts) for parts in zip(*(np.split(rows, [len(rows) // 7]) for rows in own), strict=True)
    )
    x, y = halved(data.x), torch.from_numpy(data.y).long()
    parts = {"x": x[kept], "y": y[kept], "held x": x[held], "held y": y[held]}
    parts |= {"test x": halved(data.test_x), "test y": torch.from_numpy(data.test_y).long()}
    return parts, torch.from_numpy(data.groups[kept])


def first_of_each(writers: Tensor, cap: int) -> Tensor:
    """The first `cap` images of each writer: a cap that looks at no image."""
    rows = [(writers == writer).nonzero()[:cap, 0] for writer in torch.unique(writers)]
    return torch.cat(rows).sort().values


def _trained(kind: str, epsilon: float, clip_norm: float, step: float, seed: int, choose: bool) -> Row:
    (parts, writers), cap = femnist(), KINDS[kind]
    rows = first_of_each(writers, cap) if cap else torch.arange(len(writers))
    model: nn.Module = build_seeded(Logistic(), parts["x"].shape[1:], 62, 0)
    units, options = (len(rows), {}) if cap else (USERS, {"users": writers})
    loader = DataLoader(TensorDataset(parts["x"][rows], parts["y"][rows]), batch_size=round(RATE * units))
    settings: dict[str, Any] = {"steps": STEPS, "noise_multiplier": noise_for(cap, epsilon), "seed": seed, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=step / clip_norm)
    model, private, loader = make_private(model, optimizer, loader, clip_norm=clip_norm, **settings)
    while private.steps < STEPS:
        for x, y in loader:
            private.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            private.step()
            if private.steps == STEPS:
                break
    side = "held" if choose else "test"
    with torch.no_grad():
        right = model(parts[f"{side} x"]).argmax(1) == parts[f"{side} y"]
    return {"accuracy": 100 * float(right.double().mean())}


def trained(kind: str, epsilon: float, clip_norm: float, step: float, seed: int, choose: bool = False) -> float:
    """Accuracy of one loop; `step` in clip norms."""
    return float(once(_trained, kind, epsilon, clip_norm, step, seed, choose)["accuracy"])


def settings_for(kind: str, epsilon: float) -> tuple[float, float]:
    """Clip norm, and a step that is a power of 2, by a seed that is not reported, on images that nobody trains on."""

    def held(clip_norm: float, step: float) -> float:
        return trained(kind, epsilon, clip_norm, step, PILOTS[-1], choose=True)

    found = [(clip_norm, climbed(partial(held, clip_norm), start=0.5)) for clip_norm in CLIPS]
    return max(found, key=lambda one: held(*one))


def users_rows(repeats: int, workers: int) -> list[Row]:
    cells = [(kind, epsilon) for epsilon in EPSILONS for kind in KINDS]
    chosen = side_by_side(settings_for, cells, workers)
    jobs = [(*cell, *own, seed) for cell, own in zip(cells, chosen, strict=True) for seed in range(repeats)]
    found = side_by_side(trained, jobs, workers)
    rows = [{**_keys(*job[:4]), "accuracy": v} for job, v in zip(jobs, found, strict=True)]
    return gathered(rows, tuple(rows[0])[:-1], "accuracy")


def _keys(kind: str, epsilon: float, clip_norm: float, step: float) -> Row:
    noise = float(f"{noise_for(KINDS[kind], epsilon):.4g}")
    return {"clipped": kind, "epsilon": epsilon, "noise multiplier": noise, "clip norm": clip_norm, "step": step}


def users_claims(rows: list[Row]) -> list[Row]:
    return [
        verdict(
            f"FEMNIST by writer, epsilon {epsilon:g}: clipping users beats clipping records, {kind}",
            values_of(rows, clipped="users", epsilon=epsilon),
            values_of(rows, clipped=kind, epsilon=epsilon),
            CHOSEN,
        )
        for epsilon in EPSILONS
        for kind in KINDS
        if kind != "users"
    ]


def draw_users(rows: list[Row], path: Path) -> None:
    lines = {kind: picked(rows, clipped=kind) for kind in KINDS}
    curves({"FEMNIST, 105 writers": lines}, "epsilon", "accuracy", path, ylabel="test accuracy, %", log=True)


def quick() -> Row:
    """Seed 0 of users at the largest epsilon."""
    job = ("users", EPSILONS[-1], *QUICK)
    return {**_keys(*job), **_trained(*job, 0, choose=False)}


STUDIES = (
    Study(
        "beyond-users",
        "Beyond: the user as the unit, or records and a group of them, FEMNIST (105 writers), T = 60",
        "Logistic regression at one epsilon for a whole writer, delta = 105^-1.1. `users` clips the mean gradient of a "
        "writer's images; the others clip every image, of at most G per writer (the first), and pay for Bin(G, .3) "
        "of them in a step. Same rate and number of steps; the step size, in clip norms, is a power of 2.",
        users_rows,
        users_claims,
        draw_users,
        chosen=CHOSEN,
        quick=quick,
        measure="accuracy",
    ),
)
