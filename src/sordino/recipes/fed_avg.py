"""DP-FedAvg (McMahan et al. 2018): clip each client's update, add noise to the sum."""

from __future__ import annotations

from sordino.parts.encode import Clip
from sordino.parts.local import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.release import CentralNoise, NoNoise
from sordino.parts.samplers import Sampler
from sordino.parts.schedules import Schedule
from sordino.parts.server import Sgd
from sordino.plan import Plan


def dp_fed_avg(
    *,
    rounds: int,
    clients: Sampler,
    lr: float | Schedule,
    radius: float | Schedule,
    multiplier: float,
    epochs: int = 1,
    batch: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    server_lr: float | Schedule = 1.0,
    server_momentum: float = 0.0,
) -> Plan:
    """w <- w - server_lr * (sum_i clip(w - w_i, radius) + N(0, (multiplier * radius)^2)) / expected."""
    return Plan(
        rounds=rounds,
        clients=clients,
        local=LocalSgd(lr=lr, epochs=epochs, batch=batch, momentum=momentum, weight_decay=weight_decay),
        encode=(Clip(radius),),
        release=CentralNoise(Gaussian(multiplier)) if multiplier else NoNoise(),
        server=Sgd(lr=server_lr, momentum=server_momentum),
    )
