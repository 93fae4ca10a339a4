"""Paper 001: Figures 3 and 6 (odd against even digits, 25 heterogeneous silos) and Figure 5 (the same, silos alike)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from sordino.accounting.calibration import calibrate, noisier
from sordino.certificate.build import headline
from sordino.data.clients import Records
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.record_samplers import AllRecords, FixedRecords
from sordino.parts.record_solvers import NoisyLocalSgd
from sordino.parts.releases import NoNoise
from sordino.parts.samplers import Everyone, FixedSize, Sampler
from sordino.plan import Plan
from sordino.recipes.record_level import accelerated_minibatch_sgd, noisy_local_sgd, noisy_minibatch_sgd
from sordino.task import Task
from sordino_papers.grid import run_grid
from sordino_papers.paper_001_silos import PER_SILO, SILOS, differences, errors, odd_even
from sordino_papers.studies import Row, gathered, side_by_side

ROUNDS = 35
DELTA = PER_SILO**-2.0
EPSILONS = (0.75, 3.0, 12.0)
COHORTS = (25, 12)
CENTRAL = ("minibatch", "accelerated")
ALIKE = ("minibatch", "local", "local, large batches")
ALIKE_EPSILONS = (0.75, 1.5, 3.0, 12.0)
WHOLE = AllRecords((PER_SILO,))
LOCAL = {  # local steps, and records in each
    "local": (100, FixedRecords(1, (PER_SILO,))),
    "local, large batches": (10, FixedRecords(PER_SILO // 10, (PER_SILO,))),
}
GRIDS: dict[str, tuple[float, float]] = {  # least and largest step size (accelerated: of 1/v)
    "minibatch": (1.5, 40),
    "accelerated": (1.5, 40),
    "local": (0.004, 0.25),
    "local, large batches": (0.3, 9),
}
FREE: dict[str, tuple[float, float]] = {"local": (0.03, 2), "local, large batches": (1, 30)}  # without noise


def rates(algorithm: str, epsilon: float) -> list[float]:
    """Five step sizes, evenly spread on a log scale."""
    ends = FREE.get(algorithm, GRIDS[algorithm]) if math.isinf(epsilon) else GRIDS[algorithm]
    return [float(rate) for rate in np.geomspace(*ends, 5)]


def silos_of(cohort: int) -> Sampler:
    """All silos, or a random `cohort` of them in each round."""
    return Everyone(SILOS) if cohort == SILOS else FixedSize(SILOS, cohort)


def plan_of(algorithm: str, clients: Sampler, rate: float, rounds: int = ROUNDS) -> Plan:
    """One algorithm with any noise: it is solved for later."""
    shared: dict[str, Any] = {"rounds": rounds, "clients": clients, "clip_norm": 1.0, "noise_multiplier": 1.0}
    if algorithm in LOCAL:
        steps, reads = LOCAL[algorithm]
        return noisy_local_sgd(**shared, records=reads, steps=steps, lr=rate)
    if algorithm == "accelerated":
        return accelerated_minibatch_sgd(**shared, records=WHOLE, v=1 / rate)
    return noisy_minibatch_sgd(**shared, records=WHOLE, lr=rate)


def plans(algorithm: str, cohort: int, epsilon: float, rounds: int = ROUNDS) -> list[Plan]:
    """One plan per step size, calibrated to epsilon (infinite: no noise)."""
    some = [plan_of(algorithm, silos_of(cohort), rate, rounds) for rate in rates(algorithm, epsilon)]
    if math.isinf(epsilon):
        return [bare(plan) for plan in some]
    return [noisier(plan, noise(algorithm, epsilon, rounds)) for plan in some]


def bare(plan: Plan) -> Plan:
    """The same without noise; Local SGD also without clip."""
    if not isinstance(plan.local, NoisyLocalSgd):
        return replace(plan, release=NoNoise())
    local = LocalSgd(lr=plan.local.lr, steps=plan.local.steps, batch=plan.local.batch)
    return Plan(rounds=plan.rounds, clients=plan.clients, local=local, release=NoNoise(), server=plan.server)


@cache
def noise(algorithm: str, epsilon: float, rounds: int) -> float:
    """The noise multiplier with which a silo that is in every round spends epsilon."""
    solved = calibrate(plan_of(algorithm, Everyone(SILOS), 1.0, rounds), epsilon=epsilon, delta=DELTA)
    return float(getattr(solved.local, "noise_multiplier", 0) or solved.release.mechanism.noise_multiplier)  # type: ignore[attr-defined]


def best_of(some: list[Plan], task: Task, held: Records, split: int) -> tuple[float, int]:
    """Test error of the step size with the least error on held-out training images."""
    found = run_grid(some, task, [split] * len(some))
    assert task.test is not None
    choice, test = (errors(found, part) for part in (held, task.test))
    chosen = int(choice.argmin())
    return float(test[chosen]), chosen


def cells(figure: str, algorithm: str) -> list[tuple[int, float]]:
    """(cohort, epsilon) of one algorithm in one figure; at epsilon 18 the paper speaks of minibatch SGD only."""
    if figure == "5":
        return [(12, epsilon) for epsilon in (*ALIKE_EPSILONS, math.inf)]
    more = (18.0,) if algorithm in CENTRAL else ()
    return [(cohort, epsilon) for cohort in COHORTS for epsilon in (*EPSILONS, *more, math.inf)]


def part(figure: str, algorithm: str, split: int) -> list[Row]:
    """One algorithm at all cohorts and epsilons on one split."""
    (task, held), rows = odd_even(split, alike=figure == "5"), list[Row]()
    for cohort, epsilon in cells(figure, algorithm):
        error, chosen = best_of(plans(algorithm, cohort, epsilon), task, held, split)
        name = epsilon if math.isfinite(epsilon) else None
        rows.append({"algorithm": algorithm, "cohort": cohort, "epsilon": name, "error": error, "rate": chosen})
    return rows


def jobs(figure: str, repeats: int) -> list[tuple[str, str, int]]:
    """One per algorithm and split."""
    algorithms = ALIKE if figure == "5" else (*CENTRAL, *LOCAL)
    return [(figure, algorithm, split) for algorithm in algorithms for split in range(repeats)]


def assembled(parts: Sequence[list[Row]]) -> list[Row]:
    """Mean, spread and every split's error; and how often each step size was chosen (least first)."""
    flat = [row for some in parts for row in some]
    rows = gathered(flat, keys := ("algorithm", "cohort", "epsilon"), "error")
    for row in rows:
        mine = [one["rate"] for one in flat if all(one[key] == row[key] for key in keys)]
        row["steps chosen"] = " ".join(str(mine.count(place)) for place in range(5))
    return rows


def figure3(repeats: int, workers: int) -> list[Row]:
    """Test error against epsilon; what each epsilon's noise is beside the paper's; how unlike the silos are."""
    rows = assembled(side_by_side(part, jobs("3", repeats), workers))
    return rows + noise_rows() + side_by_side(differences, [(0,)], 1)[0]


def figure5(repeats: int, workers: int) -> list[Row]:
    """The same with silos that are alike."""
    return assembled(side_by_side(part, jobs("5", repeats), workers))


def noise_rows() -> list[Row]:
    """Noise on a silo's mean gradient over the clip norm: ours, the paper's formula, and the epsilon we certify."""
    rows = []
    for epsilon in (*EPSILONS, 18.0):
        z = noise("minibatch", epsilon, ROUNDS)
        theirs = 2 * math.sqrt(8 * math.log(1 / DELTA) * ROUNDS) / (PER_SILO * epsilon)
        line = headline(noisier(plan_of("minibatch", Everyone(SILOS), 1.0), z).cost().of("messages"), DELTA)
        ours = {"certified": line["epsilon"], "ours": z / PER_SILO, "paper": theirs}
        rows.append({"algorithm": "noise", "epsilon": epsilon, **ours})
    return rows
