"""Recipes whose privacy unit is a record: silos without a trusted server, and DP-SGD with one data holder.

Configuration files and scripts call them. Silos that noise their own gradients are paper 001 of docs/papers.md,
DP-LSSGD and DP-LSAdam paper 004.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from sordino.accounting.accountant import default_delta
from sordino.accounting.calibration import Budget, calibrate_silos
from sordino.errors import ConfigError
from sordino.parts.encoding import LaplacianSmoothing
from sordino.parts.mechanisms import Preparation
from sordino.parts.record_samplers import AllRecords, RecordSampler
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import Forward, LocalNoise
from sordino.parts.samplers import Everyone, Sampler
from sordino.parts.schedules import Linear, Schedule
from sordino.parts.server_optimizers import Accelerated, Adam, Average, ServerOptimizer, Sgd
from sordino.plan import Plan
from sordino.recipes.arguments import DEFAULTS, Silos, SingleSilo, plan_of, shares


def silos(server: ServerOptimizer, **shared: Unpack[Silos]) -> Plan:
    """Return the plan of silos that send sums of clipped record gradients; with a noise multiplier each adds noise."""
    given: dict[str, Any] = {**DEFAULTS, **shared, "server": server}
    local = BatchGradient(given["records"], given["clip_norm"], gradient=given["gradient"])
    return plan_of(local, given, noise=LocalNoise)


@shares()
def noisy_minibatch_sgd(
    *,
    lr: float | Schedule,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    ball: float | None = None,
    average: Average | None = None,
    **shared: Unpack[Silos],
) -> Plan:
    """Noisy minibatch SGD: w <- P(w - lr / M sum_i (sum_j clip(g_ij, C) + N(0, (z_i C)^2)) / batch) over M silos i.

    g_ij is the gradient of record j of silo i, C the clip norm, z_i the silo's noise multiplier; P projects on the L2
    ball of radius `ball` around the initial model. `average` returns an average of the models. By default every silo
    adds noise; other choices are the `release` ShuffledNoise, NoiseShares, CentralNoise, or LocalNoise with a noise
    multiplier per silo. `gradient` = Moreau(beta) smooths a non-smooth loss.
    """
    return silos(Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay, ball=ball, average=average), **shared)


@shares()
def accelerated_minibatch_sgd(*, v: float, mu: float = 0.0, ball: float | None = None, **shared: Unpack[Silos]) -> Plan:
    """Accelerated noisy minibatch SGD: every silo noises its gradient, and the server is `Accelerated` (AC-SA)."""
    return silos(Accelerated(v=v, mu=mu, ball=ball), **shared)


def noisy_local_sgd(
    *,
    rounds: int,
    clients: Sampler,
    records: RecordSampler,
    clip_norm: float | Schedule,
    noise_multiplier: float,
    lr: float | Schedule,
    steps: int,
    noise_multipliers: tuple[float, ...] = (),
) -> Plan:
    """Noisy local SGD: silos run `steps` steps w_i <- w_i - lr / batch (sum_j clip(g_ij, C) + N(0, (z_i C)^2)).

    g_ij is the gradient of record j of silo i, C the clip norm, z_i the noise multiplier; the server averages the w_i.
    """
    local = NoisyLocalSgd(records, clip_norm, noise_multiplier, lr, steps, noise_multipliers)
    return Plan(rounds=rounds, clients=clients, local=local, release=Forward(), server=Sgd())


def silo(
    *,
    sizes: tuple[int, ...],
    epsilons: tuple[float, ...],
    deltas: tuple[float, ...] = (),
    rounds: int = 60,
    clip_norm: float | Schedule = 1.0,
    lr: float = 0.5,
    momentum: float = 0.5,
    final: float = 0.1,
    ball: float | None = None,
    prepare: tuple[Preparation, ...] = (),
) -> Plan:
    """Full-batch gradient descent of silos that trust neither the server nor each other, each with its own epsilon.

    All records are read in every round (less noise than random batches under the same relation); the server's step size
    falls linearly to `final` times its start. `epsilons` and `deltas` have one entry per silo, or one for all; a delta
    defaults to min(size^-1.1, 1e-3) of its silo. Neighbours replace one record, and messages may be public. Histograms
    of columns that are released before the first round (`prepare`) are part of each epsilon.
    """
    step = lr * (1 - momentum)
    server = Sgd(lr=Linear(step, final * step, rounds), momentum=momentum, ball=ball)
    records, clients = AllRecords(sizes), Everyone(len(sizes))
    plan = silos(server, rounds=rounds, clients=clients, records=records, clip_norm=clip_norm, noise_multiplier=1.0)
    return calibrate_silos(replace(plan, prepare=prepare), budgets(sizes, epsilons, deltas))


def budgets(sizes: Sequence[int], epsilons: Sequence[float], deltas: Sequence[float] = ()) -> list[Budget]:
    """Return one budget per silo, from lists with one entry per silo or one entry for all."""
    chosen = deltas or [default_delta(size) for size in sizes]
    each = [values if len(values) > 1 else [*values] * len(sizes) for values in (epsilons, chosen)]
    for values, name in zip(each, ("epsilons", "deltas"), strict=True):
        if len(values) != len(sizes):
            found, needed = f"{len(values)} {name} for {len(sizes)} silos", "one entry per silo, or one for all"
            raise ConfigError(found, needed, f"change the number of {name}")
    return [Budget(epsilon, delta) for epsilon, delta in zip(*each, strict=True)]


# ---- one holder of all the data, gradients clipped record by record --------------------------------------------------


def single_silo(server: ServerOptimizer, **shared: Unpack[SingleSilo]) -> Plan:
    """Return the plan of one data holder (one silo), in which every round is one training step."""
    local = BatchGradient(shared["records"], shared["clip_norm"])
    return plan_of(local, {**shared, "clients": Everyone(1), "server": server})


@shares()
def dp_sgd(
    *,
    lr: float | Schedule,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    average: Average | None = None,
    **shared: Unpack[SingleSilo],
) -> Plan:
    """DP-SGD (Abadi et al. 2016): w <- w - lr (sum_j g_j min(1, C / ||g_j||) + N(0, (z C)^2)) / batch.

    g_j is the gradient of record j, C the clip norm, z the noise multiplier. `records` draws the batches:
    PoissonRecords(batch, (n,)) takes each of n records with probability batch / n. With RecordsInTurn (fixed cyclic
    batches) `release` may be CorrelatedNoise; nothing is amplified then.
    """
    return single_silo(Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay, average=average), **shared)


@shares(denoiser=LaplacianSmoothing(1.0))
def dp_ls_sgd(
    *,
    lr: float | Schedule,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    average: Average | None = None,
    **shared: Unpack[SingleSilo],
) -> Plan:
    """DP-LSSGD: w <- w - lr A^-1 (sum_j g_j min(1, C / ||g_j||) + N(0, (z C)^2)) / batch, A = I + strength * L.

    g_j is the gradient of record j, C the clip norm, z the noise multiplier, L the Laplacian of a cycle. Smoothing by
    A^-1 is post-processing, so it has no privacy cost.
    """
    return dp_sgd(lr=lr, momentum=momentum, weight_decay=weight_decay, average=average, **shared)


@shares()
def dp_adam(
    *, lr: float | Schedule, beta1: float = 0.9, beta2: float = 0.999, floor: float = 1e-8, **shared: Unpack[SingleSilo]
) -> Plan:
    """DP-Adam: Adam on the noised gradient (sum_j g_j min(1, C / ||g_j||) + N(0, (z C)^2)) / batch.

    g_j is the gradient of record j, C the clip norm, z the noise multiplier; `floor` is Adam's epsilon.
    """
    return single_silo(Adam(lr, beta1, beta2, floor), **shared)


@shares(denoiser=LaplacianSmoothing(1.0))
def dp_ls_adam(
    *, lr: float | Schedule, beta1: float = 0.9, beta2: float = 0.999, floor: float = 1e-8, **shared: Unpack[SingleSilo]
) -> Plan:
    """DP-LSAdam: Adam on the smoothed noised gradient A^-1 (sum_j g_j min(1, C / ||g_j||) + N(0, (z C)^2)) / batch.

    A = I + strength * L, L the Laplacian of a cycle; g_j is the gradient of record j, C the clip norm, z the noise
    multiplier, and `floor` is Adam's epsilon.
    """
    return dp_adam(lr=lr, beta1=beta1, beta2=beta2, floor=floor, **shared)
