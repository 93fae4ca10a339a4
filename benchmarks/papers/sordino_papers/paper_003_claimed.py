"""Paper 003: the epsilon that its Eq. 16 gives to its protocol and its code, beside what holds of the same noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from sordino.accounting.rounding import upto
from sordino.certificate.build import headline
from sordino.parts.samplers import FixedSize, Poisson, Sampler
from sordino.recipes import dp_fed_avg
from sordino_papers.panels import curves
from sordino_papers.paper_003 import Row
from sordino_papers.studies import Study
from sordino_papers.verdicts import fact

FORMULA = "epsilon of Eq. 16"
RUNS = {  # rounds: epsilon by the paper's Eq. 16 (it prints none), and the tensors of the net that they train
    100: (None, 4, "our 784-128-10"),
    200: (8.51, 8, "the paper's EMNIST net"),
    300: (10.79, 62, "ResNet-18 with group norms"),
}


def price(rounds: int, clients: Sampler, noise_multiplier: float) -> float:
    """Epsilon of so many rounds at delta 1/500 to who sees the released models, as our certificate has it."""
    plan = dp_fed_avg(rounds=rounds, clients=clients, clip_norm=1.0, noise_multiplier=noise_multiplier, lr=0.1)
    return float(headline(plan.cost().of("models"), 1 / 500)["epsilon"])


def rows(repeats: int, workers: int) -> list[Row]:
    """z = 0.95, M = 500, a tenth of them a round; nothing is drawn, so there is nothing to repeat."""
    return [row for rounds in RUNS for row in protocols(rounds)]


def protocols(rounds: int) -> Iterator[Row]:
    """What we run, and two steps of the paper's protocol, each alone."""
    formula, tensors, net = RUNS[rounds]
    poisson, z = Poisson(500, 0.1), 0.95
    for protocol, epsilon in (
        ("Poisson cohorts, one clip of the whole update (ours)", price(rounds, poisson, z)),
        ("cohorts of exactly 50, billed as if Poisson", price(rounds, FixedSize(500, 50), z)),
        (f"each tensor clipped to C: {tensors} of {net}", price(rounds, poisson, z / math.sqrt(tensors))),
    ):
        yield {"rounds": rounds, "protocol": protocol, FORMULA: formula, "epsilon": epsilon}


def claims(found: list[Row]) -> list[Row]:
    """Whether the epsilon of the paper's formula holds of the paper's protocol."""
    said = [row for row in found if row[FORMULA] is not None]
    return [
        fact(
            f"003: T = {row['rounds']}, {row['protocol']}: the epsilon of Eq. 16 is true",
            f"Eq. 16 {row[FORMULA]:.2f}, certified {upto(row['epsilon'], 4)}",
            row["epsilon"] <= row[FORMULA],
        )
        for row in said
    ]


def draw(found: list[Row], path: Path) -> None:
    """Epsilon over the rounds, one line per protocol."""
    kinds = {"Poisson": "Poisson, one clip", "cohorts of exactly": "cohorts of 50", "each tensor": "a clip per tensor"}
    lines = {label: [row for row in found if row["protocol"].startswith(kind)] for kind, label in kinds.items()}
    first = lines[kinds["Poisson"]]
    formula = [{**row, "epsilon": row[FORMULA]} for row in first if row[FORMULA]]
    curves({"delta 1/500": {**lines, "Eq. 16": formula}}, "rounds", "epsilon", path,
           xlabel="rounds T", ylabel="epsilon", log_y=True)  # fmt: skip


STUDIES = (
    Study(
        "003-claimed",
        "DP-FedSAM: the epsilon of its Eq. 16, and the protocol it is said of",
        "z = 0.95, 500 clients, a tenth of them a round, delta 1/500. A clip of every tensor to C lets one client move "
        "the sum by C sqrt(tensors), so the noise multiplier is z / sqrt(tensors): exact. A cohort of exactly 50 is "
        "sampling without replacement, where a client can only be replaced (2C): the figure is the least that we "
        "can certify (tests hold that the truth is at least 36.9 and 48.4 at T = 200 and 300).",
        rows,
        claims,
        draw,
        1,
        "nothing",
        lambda: next(protocols(100)),
        "epsilon",
    ),
)
