"""Paper 002, tuning local and global iterations: every client adds Laplace or Gaussian noise to its own upload."""

from __future__ import annotations

from sordino.parts.encode import Clip
from sordino.parts.gradients import Bounded
from sordino.parts.local import LocalSgd
from sordino.parts.mechanisms import Mechanism
from sordino.parts.releases import LocalNoise
from sordino.parts.samplers import RoundRobin
from sordino.parts.schedules import PerStep, Schedule, Travelled, scaled
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
    mechanism: Mechanism,
    turns_seed: int | None = None,
) -> Plan:
    """`steps` full-batch steps with gradients clipped to `radius` (zeta), then noise on the upload; cohorts take turns.

    An upload moves by at most lr * steps * radius (L1 for Laplace, L2 for Gaussian), so that is the clip of the whole
    message; neighbours replace a client's data, which moves it by twice that (the paper bills once). With a `PerStep`
    lr (Theorem 3) lr * steps is the sum over the round's steps. `turns_seed` shuffles the public order of turns.
    """
    way = Travelled(lr.schedule, steps) if isinstance(lr, PerStep) else None
    return Plan(
        rounds=rounds,
        clients=RoundRobin(population, cohort, turns_seed),
        local=LocalSgd(lr=lr, steps=steps, gradient=Bounded(radius, mechanism.norm)),
        encode=(Clip(scaled(way or lr, radius if way else steps * radius), mechanism.norm),),
        release=LocalNoise(mechanism),
        server=Sgd(),
    )
