"""Paper 001, Figures 3 and 6 in the setting of its Appendix H.1: unscaled components, its batches, grids and noise.

    K = n sqrt(epsilon) / (2 sqrt(R)) records of n (without replacement) in each of R = 35 rounds, delta = n^-2
    std of the noise on a silo's mean gradient = L sqrt(8 ln(1 / delta) R) / (n epsilon), L = 2 max ||x||
    steps: minibatch SGD ten from e^-6 to 1, Local SGD (K steps of one record) ten from e^-8 to e^-1, log scale

Two noises are run: that formula, with its true epsilon beside it, and the noise that makes epsilon true. A grid
whose edge wins on the held-out images is continued beyond it. Changed: records are split before the silos draw (the
authors' train and test parts overlap), each record is clipped at the largest ||(x, 1)|| of public images, steps are
chosen on held-out images, one run each (the authors: three), scores are not cut at 15.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from sordino.accounting.calibration import calibrate, noisier
from sordino.certificate.build import headline
from sordino.data.clients import Clients, Records
from sordino.data.datasets import load
from sordino.parts.record_samplers import AllRecords, FixedRecords, RecordSampler
from sordino.parts.samplers import Everyone
from sordino.plan import Plan
from sordino.recipes.record_level import noisy_local_sgd, noisy_minibatch_sgd
from sordino.task import Task
from sordino_papers.choosing import only, turned, within
from sordino_papers.claims import settled
from sordino_papers.grid import run_grid
from sordino_papers.once import once
from sordino_papers.panels import curves
from sordino_papers.paper_001 import DELTA, ROUNDS, bare, silos_of
from sordino_papers.paper_001_silos import FEATURES, PER_SILO, SILOS, errors, odd_even, principal
from sordino_papers.studies import Row, Study, gathered, picked, side_by_side
from sordino_papers.verdicts import in_all

Place = tuple[str, int, float]  # kind, cohort, epsilon
EPSILONS = (0.75, 1.5, 3.0, 6.0, 12.0, 18.0)
COHORTS = (25, 18, 12)
GRIDS = {"minibatch": (-6.0, 0.0), "local": (-8.0, -1.0)}  # natural logarithms of the paper's ends
POINTS, WIDER = 10, 3  # steps of a grid; how often it may be continued, by three steps each
KINDS = ("minibatch, the paper's noise", "minibatch, epsilon true", "local, epsilon true", "local, no noise")


def batch_of(epsilon: float) -> int:
    """K of Appendix H.1."""
    return round(PER_SILO * math.sqrt(epsilon) / (2 * math.sqrt(ROUNDS)))


@cache
def clip_norm() -> float:
    """The largest ||(x, 1)|| of the public images: no gradient of logistic loss on one of them is longer."""
    centre, axes, _ = principal(FEATURES)
    x = (load("mnist").test_x.reshape(-1, 784) - centre) @ axes.T
    return float(np.sqrt(1 + np.square(x).sum(1).max()))


def published_multiplier(epsilon: float) -> float:
    """The paper's noise over `clip_norm`, on the sum over K records; its L is twice the Lipschitz constant."""
    return 2 * math.sqrt(8 * math.log(1 / DELTA) * ROUNDS) * batch_of(epsilon) / (PER_SILO * epsilon)


def task_of(split: int) -> tuple[Task, Records]:
    """The task of Figure 3 with components in units of pixels."""
    (task, held), scale = odd_even(split), principal(FEATURES)[2]
    assert task.test is not None
    clients, records = task.clients, task.clients.records
    longer = Clients(Records(records.x * scale, records.y), clients.index, clients.offsets)
    return (
        Task(task.model, longer, Records(task.test.x * scale, task.test.y), "logistic"),
        Records(held.x * scale, held.y),
    )


# ---- plans -----------------------------------------------------------------------------------------------------------


def _plan(algorithm: str, cohort: int, epsilon: float, rate: float, clip: float | None = None) -> Plan:
    radius = clip_norm() if clip is None else clip
    shared = {"rounds": ROUNDS, "clients": silos_of(cohort), "clip_norm": radius, "noise_multiplier": 1.0}
    if algorithm == "minibatch":
        reads = FixedRecords(batch_of(epsilon), (PER_SILO,))
        return noisy_minibatch_sgd(**shared, records=reads, lr=rate)  # type: ignore[arg-type]
    reads = FixedRecords(1, (PER_SILO,))
    return noisy_local_sgd(**shared, records=reads, lr=rate, steps=batch_of(epsilon))  # type: ignore[arg-type]


@cache
def true_multiplier(algorithm: str, epsilon: float) -> float:
    """The noise multiplier with which a silo that is in every round spends epsilon, whatever the clip norm."""
    solved = calibrate(_plan(algorithm, SILOS, epsilon, 1.0, clip=1.0), epsilon=epsilon, delta=DELTA)
    return float(getattr(solved.local, "noise_multiplier", 0) or solved.release.mechanism.noise_multiplier)  # type: ignore[attr-defined]


def plan_of(kind: str, cohort: int, epsilon: float, rate: float) -> Plan:
    """One kind of run at one step size."""
    algorithm, _, noise = kind.partition(", ")
    plan = _plan(algorithm, cohort, epsilon, rate)
    if noise == "no noise":
        return bare(plan)
    z = published_multiplier(epsilon) if noise == "the paper's noise" else true_multiplier(algorithm, epsilon)
    return noisier(plan, z)


# ---- runs ------------------------------------------------------------------------------------------------------------


def wider(tried: Callable[[list[float]], list[tuple[float, float]]], ends: tuple[float, float]) -> tuple[float, float]:
    """(test error, log of the step) of the step with the least held-out error; an edge that wins is moved outwards.

    `tried(logs)` gives (held-out error, test error) of each step; equal errors: the middle one of those steps.
    """
    logs = [float(one) for one in np.linspace(*ends, POINTS)]
    found, gap = dict(zip(logs, tried(logs), strict=True)), logs[1] - logs[0]
    for _ in range(WIDER):
        best = _best(found)
        if min(found) < best < max(found):
            break
        edge, sign = (min(found), -1) if best == min(found) else (max(found), 1)
        more = [edge + sign * gap * step for step in (1, 2, 3)]
        found |= dict(zip(more, tried(more), strict=True))
    best = _best(found)
    return found[best][1], best


def _best(found: dict[float, tuple[float, float]]) -> float:
    least = min(held for held, _ in found.values())
    there = sorted(step for step, (held, _) in found.items() if held == least)
    return there[len(there) // 2]


def part(kind: str, cohort: int, epsilon: float, split: int) -> Row:
    """One kind of run on one split, at the step that was best on the held-out images."""
    task, held = task_of(split)
    assert task.test is not None
    test = task.test

    def tried(logs: list[float]) -> list[tuple[float, float]]:
        plans = [plan_of(kind, cohort, epsilon, math.exp(log)) for log in logs]
        w = torch.nan_to_num(run_grid(plans, task, [split] * len(plans), exact=False))
        return list(zip(errors(w, held).tolist(), errors(w, test).tolist(), strict=True))

    error, log = wider(tried, GRIDS[kind.partition(",")[0]])
    return {"kind": kind, "cohort": cohort, "epsilon": epsilon, "error": error, "log": log}


def cell(kind: str, cohort: int, epsilon: float, split: int) -> Row:
    """`part`, kept where runs are kept one by one."""
    return once(part, kind, cohort, epsilon, split)


FEWER = 5  # splits of noisy Local SGD, which is far off and takes longest


def jobs(repeats: int) -> list[tuple[str, int, float, int]]:
    """What decides first: epsilon 18 and 12 of minibatch SGD and of non-private Local SGD; then the others."""
    late, early = EPSILONS[:3:-1], EPSILONS[:4]
    free = [(kind, m, e) for kind in (*KINDS[:2], KINDS[3]) for m in COHORTS for e in late]
    free += [("minibatch, no noise", m, EPSILONS[-1]) for m in COHORTS]
    local = [(KINDS[2], m, e) for m in COHORTS for e in EPSILONS]
    rest = [(kind, m, e) for kind in (*KINDS[:2], KINDS[3]) for m in COHORTS for e in early]
    first = [(*one, split) for one in free for split in range(repeats)]
    return [
        *first,
        *((*one, split) for one in local for split in range(min(repeats, FEWER))),
        *((*one, split) for one in rest for split in range(repeats)),
    ]


def assembled(parts: Sequence[Row]) -> list[Row]:
    """Mean, spread and every split's error, with the least and the largest step that was chosen (natural log)."""
    rows = gathered(parts, keys := ("kind", "cohort", "epsilon"), "error")
    for row in rows:
        mine = [one["log"] for one in parts if all(one[key] == row[key] for key in keys)]
        row["log of steps chosen"] = f"{min(mine):.2f} to {max(mine):.2f}"
    return rows


def figure(repeats: int, workers: int) -> list[Row]:
    """Test error against epsilon, and the noise of both kinds."""
    return assembled(side_by_side(cell, jobs(repeats), workers)) + noise_rows()


def noise_rows() -> list[Row]:
    """K, the paper's noise as it is written and its true epsilon, and the noise with which epsilon is true.

    `if L is Lipschitz`: the true epsilon of the formula for whoever takes its L for the Lipschitz constant itself, with
    batches of K and with all records.
    """
    rows = []
    for epsilon in EPSILONS:
        z, k = published_multiplier(epsilon), batch_of(epsilon)
        of_k, of_all = FixedRecords(k, (PER_SILO,)), AllRecords((PER_SILO,))
        rows.append(
            {
                "noise at epsilon": epsilon,
                "K": k,
                "z of the formula": round(z, 3),
                "its true epsilon": _epsilon(of_k, z),
                "if L is Lipschitz": _epsilon(of_k, z / 2),
                "and all records": _epsilon(of_all, z / 2 * PER_SILO / k),
                "z for a true epsilon": round(true_multiplier("minibatch", epsilon), 3),
            }
        )
    return rows


def _epsilon(reads: RecordSampler, z: float) -> float:
    plan = noisy_minibatch_sgd(
        rounds=ROUNDS, clients=Everyone(SILOS), clip_norm=1.0, records=reads, lr=1.0, noise_multiplier=z
    )
    return float(headline(plan.cost().of("messages"), DELTA)["epsilon"])


# ---- claims ----------------------------------------------------------------------------------------------------------

HELD = "step size: 7,750 other training images, for each split, epsilon and algorithm"


def claims(rows: list[Row]) -> list[Row]:
    """Below private Local SGD at every epsilon; below NON-private Local SGD from 12 on; the price at 18."""
    return [
        row
        for check in (
            *(partial(against_local, cohort) for cohort in COHORTS),
            *(partial(against_free, kind, cohort) for cohort in COHORTS for kind in KINDS[:2]),
            *(partial(price, cohort) for cohort in COHORTS),
        )
        for row in settled(check, rows)
    ]


def _pair(rows: list[Row], better: Place, worse: Place) -> tuple[list[float], list[float]]:
    one, other = (
        turned(only(picked(rows, kind=kind, cohort=m, epsilon=e))) for kind, m, e in (better, worse)
    )  # errors: less is better
    least = min(len(one), len(other))
    return one[:least], other[:least]


def against_local(cohort: int, rows: list[Row]) -> list[Row]:
    """Every epsilon, both by tight accounting."""
    pairs = {f"epsilon {e:g}": _pair(rows, (KINDS[1], cohort, e), (KINDS[2], cohort, e)) for e in EPSILONS}
    text = f"001: Figure 3 under H.1, M = {cohort}: noisy minibatch SGD is below noisy Local SGD at every epsilon"
    return [in_all(text, pairs, HELD, unit="of error")]


def against_free(kind: str, cohort: int, rows: list[Row]) -> list[Row]:
    """Epsilon 12 and 18 together."""
    noise = "the paper's noise" if kind == KINDS[0] else "the noise of a true epsilon"
    pairs = {f"epsilon {e:g}": _pair(rows, (kind, cohort, e), (KINDS[3], cohort, e)) for e in (12.0, 18.0)}
    text = f"001: Figure 3 under H.1, M = {cohort}, {noise}: below NON-private Local SGD at epsilon 12 and 18"
    return [in_all(text, pairs, HELD, unit="of error")]


def price(cohort: int, rows: list[Row]) -> list[Row]:
    """Minibatch SGD with and without noise at epsilon 18."""
    loud, quiet = _pair(rows, (KINDS[1], cohort, 18.0), ("minibatch, no noise", cohort, 18.0))
    gaps = [b - a for a, b in zip(loud, quiet, strict=True)]
    text = f"001: Figure 3 under H.1, M = {cohort}: at epsilon 18 minibatch SGD is as good as without noise"
    return [within(text, gaps, 0.005, HELD, "of error")]


def _epsilon_of(row: Row) -> float:
    return float(row["epsilon"])


def draw(rows: list[Row], path: Path) -> None:
    """One panel per cohort."""
    panels = {
        f"M = {m}": {kind: sorted(picked(rows, kind=kind, cohort=m), key=_epsilon_of) for kind in KINDS}
        for m in COHORTS
        if picked(rows, cohort=m)
    }
    curves(panels, "epsilon", "error", path, xlabel="epsilon of every silo", ylabel="test error", log=True)


def _quick() -> Row:
    """Split 0 of minibatch SGD with the paper's noise, M = 12, epsilon 12."""
    row = part(KINDS[0], 12, 12.0, 0)
    return {name: row[name] for name in ("kind", "cohort", "epsilon", "error")}


STUDIES = (
    Study(
        "001-figure3-h1",
        "Figures 3 and 6 in the setting of Appendix H.1",
        "n = 1238, R = 35, delta = n^-2, K = n sqrt(epsilon) / (2 sqrt(R)), unscaled components, grids of ten steps, "
        "continued where an edge wins. Changed: records are split before silos draw, each record is clipped, the "
        "step is chosen on held-out images, scores are not cut at 15. No epsilon here accounts for the choice.",
        figure,
        claims,
        draw,
        repeats=20,
        chosen=HELD,
        quick=_quick,
        measure="error",
    ),
)
