"""Paper 002, tuning local and global iterations: every client adds Laplace or Gaussian noise to its own upload."""

from __future__ import annotations

from typing import Literal

from sordino.parts.encode import Clip
from sordino.parts.gradients import Bounded
from sordino.parts.local import LocalSgd
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.release import LocalNoise, NoNoise
from sordino.parts.samplers import RoundRobin
from sordino.parts.schedules import Schedule, scaled
from sordino.parts.server import Sgd
from sordino.plan import Plan


def client_side_fed_avg(
    *,
    rounds: int,
    population: int,
    cohort: int,
    lr: float | Schedule,
    steps: int,
    radius: float,
    multiplier: float,
    mechanism: Literal["laplace", "gaussian"] = "laplace",
) -> Plan:
    """`steps` full-batch steps with gradients clipped to `radius` (zeta), then noise on the upload; cohorts take turns.

    An upload moves by at most lr * steps * radius (L1 for Laplace, L2 for Gaussian), so that is the clip of the whole
    message; neighbours replace a client's data, which moves it by twice that (the paper bills once).
    """
    norm: Literal[1, 2] = 1 if mechanism == "laplace" else 2
    noise = (Laplace if mechanism == "laplace" else Gaussian)(multiplier) if multiplier else None
    return Plan(
        rounds=rounds,
        clients=RoundRobin(population, cohort),
        local=LocalSgd(lr=lr, steps=steps, gradient=Bounded(radius, norm)),
        encode=(Clip(scaled(lr, steps * radius), norm),),
        release=LocalNoise(noise) if noise else NoNoise(),
        server=Sgd(),
    )
