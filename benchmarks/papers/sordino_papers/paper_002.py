"""Paper 002 on loans: how many local and global iterations, under Laplace noise of every client on its own upload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from sordino.accounting.calibration import calibrate
from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.data.records import SortedTarget
from sordino.loop import run
from sordino.parts.mechanisms import Laplace
from sordino.parts.releases import NoNoise
from sordino.plan import Plan
from sordino.recipes.client_level import client_side_fed_avg
from sordino.rng import Seeded
from sordino.task import Task
from sordino_papers.choosing import judged
from sordino_papers.grid import run_grid
from sordino_papers.once import once
from sordino_papers.studies import Row, gathered, side_by_side

EPSILONS = (1.0, 3.0, 5.0, math.inf)
CLIENTS, TURN = 1000, 100  # the paper: 5000 and 500
TOTALS = (2, 5, 10, 20, 30, 50, 70, 100, 150)
LOCAL_STEPS = (1, 2, 3, 4, 6, 12, 24)
RULES = {"E = 1": 0.0, "E = T^(1/3)": 1 / 3, "E = T^(1/2)": 1 / 2, "E = T^(2/3)": 2 / 3, "E = T": 1.0}
SEEN = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100)  # iterations k of Figure 1
LR, ZETA = 0.05, 1.0
ORDER = 0  # the seed of the public order in which clients take turns


# ---- the task and the plans ------------------------------------------------------------------------------------------


@cache
def loans(population: int = CLIENTS) -> tuple[Task, Records]:
    """8,000 loans in silos by sorted interest rate, 11 parameters; 1,000 loans to choose on, 1,000 to report."""
    data = load("lending_club")
    split = SortedTarget(population).split(data.y, None, Seeded(0).at(0, "partition"))
    layer = nn.Linear(data.x.shape[1], 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    rest = Records(torch.from_numpy(data.test_x), torch.from_numpy(data.test_y))
    held, test = (Records(rest.x[part::2], rest.y[part::2]) for part in (0, 1))
    clients = Clients(Records(torch.from_numpy(data.x), torch.from_numpy(data.y)), split.index, split.offsets)
    return Task(layer, clients, test, "mse"), held


def loans_plan(epsilon: float, total: int, steps: int, cohort: int, population: int = CLIENTS) -> Plan:
    """T = total iterations in rounds of E = steps; Laplace noise for pure epsilon over all rounds a client is in.

    All clients in every round, or `cohort` of them in turns, in a public random order: silos are sorted by target,
    and neighbours in that order would let a round see one kind of loan only.
    """
    plan = client_side_fed_avg(
        rounds=max(1, round(total / steps)),
        population=population,
        cohort=cohort,
        lr=LR,
        steps=steps,
        clip_norm=ZETA,
        mechanism=Laplace(1.0),
        turns_seed=ORDER,
    )
    return noised(plan, epsilon, 0.0)


def noised(plan: Plan, epsilon: float, delta: float) -> Plan:
    """Calibrated to epsilon; without noise where it is infinite."""
    if math.isinf(epsilon):
        return replace(plan, release=NoNoise())
    return calibrate(plan, epsilon=epsilon, delta=delta)


def losses(w: Tensor, records: Records) -> list[float]:
    """Mean square error of every row of w."""
    residual = records.x @ w[:, :-1].T + w[:, -1] - records.y[:, None]
    return [float(one) for one in residual.square().mean(0)]


def repeated(epsilon: float, repeats: int) -> int:
    """Without noise all seeds are one run: turns, batches and start are fixed."""
    return repeats if math.isfinite(epsilon) else 1


def named(epsilon: float) -> float | None:
    """As a row keeps it: None for no noise."""
    return epsilon if math.isfinite(epsilon) else None


# ---- Figures 1, 3, 5, 7 ----------------------------------------------------------------------------------------------


def settings(rule: str) -> list[tuple[int, int]]:
    """(T, E) of every point of one curve."""
    if rule == "T = 120":
        return [(120, steps) for steps in LOCAL_STEPS]
    return [(total, max(1, round(total ** RULES[rule]))) for total in TOTALS]


def point(place: Row, epsilon: float, repeats: int, population: int = CLIENTS) -> list[Row]:
    """Losses after T iterations, a row per seed; `place` says figure, cohort, rule, T and E."""
    task, held = loans(population)
    assert task.test is not None
    plan = loans_plan(epsilon, place["T"], place["E"], place["cohort"], population)
    w = run_grid([plan] * repeats, task, range(repeats))
    pairs = zip(losses(w, task.test), losses(w, held), strict=True)
    return [{**place, "epsilon": named(epsilon), "loss": loss, "validation": other} for loss, other in pairs]


def part(figure: str, rule: str, epsilon: float, cohort: int, repeats: int) -> list[Row]:
    """Every point of one curve."""
    places = [{"figure": figure, "cohort": cohort, "rule": rule, "T": total, "E": e} for total, e in settings(rule)]
    return [row for place in places for row in point(place, epsilon, repeated(epsilon, repeats))]


def path(epsilon: float, repeats: int) -> list[Row]:
    """Figure 1: losses after each iteration k of T = 100, one local iteration in each round."""
    (task, _), rows = loans(), list[Row]()
    for seed in range(repeated(epsilon, repeats)):
        for done in run(loans_plan(epsilon, 100, 1, TURN), task, streams=Seeded(seed)):
            row = {"figure": "1", "epsilon": named(epsilon), "k": done.t + 1, "loss": done.metrics["loss"]}
            rows += [row] if done.t + 1 in SEEN else []
    return rows


def jobs(repeats: int) -> list[tuple[str, str, float, int, int]]:
    """The curves of Figures 3 and 5 (a tenth of the clients in each round) and of Figure 7 (all; and in turns too)."""
    curves, few = [("3", "E = 1"), ("5", "T = 120")], max(1, repeats // 2)
    turns = [(figure, rule, epsilon, TURN, few) for figure, rule in curves for epsilon in EPSILONS]
    everybody = [("7", rule, 3.0, CLIENTS, repeats) for rule in RULES]
    return turns + everybody + [("7", rule, 3.0, TURN, few) for rule in RULES]


def assembled(parts: Sequence[list[Row]], paths: Sequence[list[Row]]) -> list[Row]:
    """What the page shows."""
    ends = judged([row for some in parts for row in some], ("figure", "cohort", "rule", "epsilon", "T", "E"), "loss")
    return ends + gathered([row for some in paths for row in some], ("figure", "epsilon", "k"), "loss")


def figure_loans(repeats: int, workers: int) -> list[Row]:
    """Loss along the iterations, against T, against E at T = 120, and against T under rules for E."""
    parts = side_by_side(part, jobs(repeats), workers)
    return assembled(parts, side_by_side(path, [(epsilon, max(1, repeats // 2)) for epsilon in EPSILONS], workers))


# ---- the paper's number of clients: 500 of 5,000 ---------------------------------------------------------------------

MANY, MANY_TURN, MANY_REPEATS = 5000, 500, 10


def many_point(place: Row, epsilon: float, repeats: int) -> Row:
    """`point` of 5,000 silos, as one row that can be kept."""
    return {"rows": point(place, epsilon, repeated(epsilon, repeats), MANY)}


def many_part(figure: str, rule: str, epsilon: float, cohort: int, repeats: int) -> list[Row]:
    """Every point of one curve."""
    places = [{"figure": figure, "cohort": cohort, "rule": rule, "T": total, "E": e} for total, e in settings(rule)]
    return [row for place in places for row in once(many_point, place, epsilon, repeats)["rows"]]


def figure_many(repeats: int, workers: int) -> list[Row]:
    """Figures 3 and 5 (a tenth of the silos in each round) and 7 (all)."""
    curves = [("3", "E = 1"), ("5", "T = 120")]
    asked = [(figure, rule, epsilon, MANY_TURN, repeats) for figure, rule in curves for epsilon in EPSILONS]
    asked += [("7", rule, 3.0, MANY, max(1, repeats // 2)) for rule in RULES]
    return assembled(side_by_side(many_part, asked, workers), [])
