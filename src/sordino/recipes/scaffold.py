"""SCAFFOLD (Karimireddy et al. 2020) under client-level privacy: control and update in one clipped, noised message."""

from __future__ import annotations

from sordino.parts.encode import Clip
from sordino.parts.mechanisms import Gaussian
from sordino.parts.release import CentralNoise, NoNoise
from sordino.parts.samplers import Sampler
from sordino.parts.scaffold import Scaffold
from sordino.parts.schedules import Schedule
from sordino.parts.server import Sgd
from sordino.plan import Plan


def scaffold(
    *,
    rounds: int,
    clients: Sampler,
    lr: float | Schedule,
    radius: float | Schedule,
    multiplier: float,
    steps: int = 5,
    batch: int | None = None,
    server_lr: float | Schedule = 1.0,
    server_momentum: float = 0.0,
) -> Plan:
    """w <- w - server_lr * first half, c <- c - rate / (steps lr) * second half of
    (sum_i clip((w - w_i, steps lr (c_i - c_i')), radius) + N(0, (multiplier * radius)^2)) / expected."""
    return Plan(
        rounds=rounds,
        clients=clients,
        local=Scaffold(lr=lr, steps=steps, batch=batch),
        encode=(Clip(radius),),
        release=CentralNoise(Gaussian(multiplier)) if multiplier else NoNoise(),
        server=Sgd(lr=server_lr, momentum=server_momentum),
    )
