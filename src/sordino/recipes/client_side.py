"""Paper 002, tuning local and global iterations: every client adds Laplace or Gaussian noise to its own upload."""

from __future__ import annotations

import math

from sordino.parts.encoding import Clip
from sordino.parts.gradients import Bounded
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Mechanism
from sordino.parts.releases import LocalNoise
from sordino.parts.samplers import RoundRobin
from sordino.parts.schedules import PerStep, Schedule, Travelled, scaled
from sordino.parts.server_optimizers import Sgd
from sordino.plan import Plan

NOISE_GROWTH = {"laplace": 2.0, "gaussian": 1.0}  # z: the noise variance grows like rounds^z


def local_steps(total: int, mechanism: str) -> int:
    """E = total^(z/(z+1)) to the nearest whole number: total^(2/3) for Laplace, total^(1/2) for Gaussian noise.

    It minimises E^2/T + E^(1-z) T^(z-1) where z > 1. At z = 1 the second term does not depend on E: T^(1/2) is then
    the most local steps (fewest rounds) that keep the order of the bound, and fewer steps lower its value. Below 1
    (no mechanism here) one step is best, against the paper. Paper 002, Theorems 4 and 5.
    """
    z = NOISE_GROWTH[mechanism]
    return max(1, round(math.pow(total, z / (z + 1))))


def client_side_fed_avg(
    *,
    rounds: int,
    population: int,
    cohort: int,
    lr: float | Schedule,
    steps: int,
    clip_norm: float,
    mechanism: Mechanism,
    turns_seed: int | None = None,
) -> Plan:
    """`steps` full-batch steps with gradients clipped to `clip_norm` (zeta), then noise on the upload; public cohorts.

    An upload moves by at most lr * steps * clip norm (L1 for Laplace, L2 for Gaussian), so that is the clip of the
    whole message; neighbours replace a client's data, which moves it by twice that (the paper counts it once). With a
    `PerStep` lr (Theorem 3) lr * steps is the sum over the round's steps. `turns_seed` shuffles the public order of
    turns.
    """
    way = Travelled(lr.schedule, steps) if isinstance(lr, PerStep) else None
    return Plan(
        rounds=rounds,
        clients=RoundRobin(population, cohort, turns_seed),
        local=LocalSgd(lr=lr, steps=steps, gradient=Bounded(clip_norm, mechanism.norm)),
        encode=(Clip(scaled(way or lr, clip_norm if way else steps * clip_norm), mechanism.norm),),
        release=LocalNoise(mechanism),
        server=Sgd(),
    )
