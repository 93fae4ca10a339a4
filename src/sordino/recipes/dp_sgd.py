"""Paper 004, DP-LSSGD and DP-LSAdam: one holder of all the data, gradients clipped record by record."""

from __future__ import annotations

from typing import Required, TypedDict, Unpack

from sordino.parts.postprocess import LaplacianSmoothing, Postprocess
from sordino.parts.record_samplers import RecordSampler
from sordino.parts.record_solvers import BatchGradient
from sordino.parts.release_base import Release
from sordino.parts.samplers import Everyone
from sordino.parts.schedules import Schedule
from sordino.parts.server_optimizers import Adam, Average, ServerOptimizer, Sgd
from sordino.plan import Plan
from sordino.recipes.arguments import released, shares


class Alone(TypedDict, total=False):
    """One silo that holds all the records, and trusts itself with the noise."""

    rounds: Required[int]
    records: Required[RecordSampler]
    clip_norm: Required[float | Schedule]
    noise_multiplier: float | None
    release: Release | None
    denoiser: Postprocess | None


def alone(
    server: ServerOptimizer,
    *,
    rounds: int,
    records: RecordSampler,
    clip_norm: float | Schedule,
    noise_multiplier: float | None = None,
    release: Release | None = None,
    denoiser: Postprocess | None = None,
) -> Plan:
    """Its plan: every step of the server is a step of the training."""
    return Plan(
        rounds=rounds,
        clients=Everyone(1),
        local=BatchGradient(records, clip_norm),
        release=released(noise_multiplier, release),
        postprocess=(denoiser,) if denoiser else (),
        server=server,
    ).fitted()


class Descent(Alone, total=False):
    """The arguments of `dp_sgd`."""

    lr: Required[float | Schedule]
    momentum: float
    weight_decay: float
    average: Average | None


class Moments(Alone, total=False):
    """The arguments of `dp_adam`."""

    lr: Required[float | Schedule]
    beta1: float
    beta2: float
    floor: float


@shares(alone)
def dp_sgd(
    *,
    lr: float | Schedule,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    average: Average | None = None,
    **shared: Unpack[Alone],
) -> Plan:
    """w <- w - lr (sum_j g_j min(1, clip norm / ||g_j||) + N(0, (z clip norm)^2)) / batch  (Abadi et al. 2016).

    `records` draws the batches: PoissonRecords(batch, (n,)) takes each of n records with probability batch / n. With
    RecordsInTurn, a loader that was shuffled once, `release` may be CorrelatedNoise; nothing is amplified there.
    """
    return alone(Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay, average=average), **shared)


@shares(dp_sgd, denoiser=LaplacianSmoothing(1.0))
def dp_ls_sgd(**shared: Unpack[Descent]) -> Plan:
    """w <- w - lr A_strength^-1 (sum_j g_j min(1, clip norm / ||g_j||) + N(0, (z clip norm)^2)) / batch.

    A = I + strength * L, L the Laplacian of a cycle: it works on what is noised already, so it costs no privacy.
    """
    return dp_sgd(**shared)


@shares(alone)
def dp_adam(
    *, lr: float | Schedule, beta1: float = 0.9, beta2: float = 0.999, floor: float = 1e-8, **shared: Unpack[Alone]
) -> Plan:
    """Adam on (sum_j g_j min(1, clip norm / ||g_j||) + N(0, (z clip norm)^2)) / batch, a batch of records.

    `floor` is added to the root of the second moment.
    """
    return alone(Adam(lr, beta1, beta2, floor), **shared)


@shares(dp_adam, denoiser=LaplacianSmoothing(1.0))
def dp_ls_adam(**shared: Unpack[Moments]) -> Plan:
    """Adam on A_strength^-1 (sum_j g_j min(1, clip norm / ||g_j||) + N(0, (z clip norm)^2)) / batch.

    The noised gradient is smoothed, then Adam takes both moments of it.
    """
    return dp_adam(**shared)
