"""Paper 004, DP-LSSGD and DP-LSAdam: one holder of all the data, gradients clipped record by record."""

from __future__ import annotations

from sordino.parts.mechanisms import Gaussian
from sordino.parts.postprocess import LaplacianSmoothing, Postprocess
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.records import PoissonRecords
from sordino.parts.release import CentralNoise, NoNoise
from sordino.parts.samplers import Everyone
from sordino.parts.schedules import Schedule
from sordino.parts.server import Adam, Average, ServerOptimizer, Sgd
from sordino.plan import Plan


def dp_sgd(
    *,
    rounds: int,
    records: int,
    batch: int,
    lr: float | Schedule,
    radius: float | Schedule,
    multiplier: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    average: Average | None = None,
) -> Plan:
    """w <- w - lr (sum_j g_j min(1, radius / ||g_j||) + N(0, (multiplier * radius)^2)) / batch  (Abadi et al. 2016).

    `records` is the number of them, `batch` the expected size of a Poisson batch; one silo holds all the data.
    """
    server = Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay, average=average)
    return _plan(rounds, records, batch, radius, multiplier, 0.0, server)


def dp_ls_sgd(
    *,
    rounds: int,
    records: int,
    batch: int,
    lr: float | Schedule,
    radius: float | Schedule,
    multiplier: float,
    strength: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    average: Average | None = None,
) -> Plan:
    """w <- w - lr A_strength^-1 (sum_j g_j min(1, radius / ||g_j||) + N(0, (multiplier * radius)^2)) / batch.

    A = I + strength * L, L the Laplacian of a cycle: it works on what is noised already, so it costs no privacy.
    """
    server = Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay, average=average)
    return _plan(rounds, records, batch, radius, multiplier, strength, server)


def dp_adam(
    *,
    rounds: int,
    records: int,
    batch: int,
    lr: float | Schedule,
    radius: float | Schedule,
    multiplier: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    floor: float = 1e-8,
) -> Plan:
    """Adam on (sum_j g_j min(1, radius / ||g_j||) + N(0, (multiplier * radius)^2)) / batch, a Poisson batch of records.

    `floor` is added to the root of the second moment.
    """
    return _plan(rounds, records, batch, radius, multiplier, 0.0, Adam(lr, beta1, beta2, floor))


def dp_ls_adam(
    *,
    rounds: int,
    records: int,
    batch: int,
    lr: float | Schedule,
    radius: float | Schedule,
    multiplier: float,
    strength: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    floor: float = 1e-8,
) -> Plan:
    """Adam on A_strength^-1 (sum_j g_j min(1, radius / ||g_j||) + N(0, (multiplier * radius)^2)) / batch.

    The noised gradient is smoothed, then Adam takes both moments of it.
    """
    return _plan(rounds, records, batch, radius, multiplier, strength, Adam(lr, beta1, beta2, floor))


def _plan(
    rounds: int,
    records: int,
    batch: int,
    radius: float | Schedule,
    multiplier: float,
    strength: float,
    server: ServerOptimizer,
) -> Plan:
    smoothing: tuple[Postprocess, ...] = (LaplacianSmoothing(strength),) if strength else ()
    return Plan(
        rounds=rounds,
        clients=Everyone(1),
        local=BatchGradient(PoissonRecords(batch, (records,)), radius),
        release=CentralNoise(Gaussian(multiplier)) if multiplier else NoNoise(),
        postprocess=smoothing,
        server=server,
    )
