"""Baselines: DP-FedAvg (McMahan et al. 2018), SCAFFOLD (Karimireddy et al. 2020) under client-level privacy; with
correlated noise, which later rounds take back, DP-FTRL (Kairouz 2021) and BandMF (Choquette-Choo 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Required, TypedDict, Unpack

from sordino.parts.banded import Banded
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.gradients import Gradient, Plain
from sordino.parts.local_solvers import Scaffold
from sordino.parts.mechanisms import Gaussian, Mechanism
from sordino.parts.postprocess import Postprocess
from sordino.parts.release_base import Release
from sordino.parts.samplers import Sampler
from sordino.parts.schedules import Schedule
from sordino.parts.separation import CyclicPoisson
from sordino.parts.server_optimizers import ServerOptimizer
from sordino.parts.strategies import BufferedToeplitz, Strategy
from sordino.plan import Plan
from sordino.recipes.arguments import Federated, Messages, federated, messages, released, shares


class Work(TypedDict, total=False):
    """What clients and server do, whoever takes part and whatever the noise."""

    rounds: Required[int]
    clip_norm: Required[float | Schedule]
    lr: Required[float | Schedule]
    epochs: int
    batch: int | None
    momentum: float
    weight_decay: float
    denoiser: Postprocess | None
    server: ServerOptimizer
    gradient: Gradient


@shares(federated, gradient=Plain())
def dp_ftrl(
    *, clients: Sampler, noise_multiplier: float, strategy: Strategy = BufferedToeplitz(3), **work: Unpack[Work]
) -> Plan:
    """w <- w - server step of (sum_i clip(w - w_i, clip norm) + z * clip norm * (row t of C^-1 Z)) / expected.

    Nothing is amplified: `clients` come in turn (roundrobin) or rest (min_separation); cohorts need not be secret.
    """
    return federated(clients=clients, release=released(noise_multiplier, None, _correlated(strategy)), **work)


@shares(federated, gradient=Plain())
def band_mf(
    *,
    population: int,
    groups: int,
    cohort: float,
    noise_multiplier: float,
    bands: int | None = None,
    **work: Unpack[Work],
) -> Plan:
    """w <- w - server step of (sum_i clip(w - w_i, clip norm) + z * clip norm * (row t of C^-1 Z)) / cohort.

    `groups` of clients come in turn, and each client of the round's group by a secret coin, `cohort` of them on
    average: the cost is amplified. C has `bands` optimised bands, at most (and by default) as many as groups.
    """
    turns = CyclicPoisson(population, groups, cohort * groups / population)
    strategy = Banded(groups if bands is None else bands)
    return federated(clients=turns, release=released(noise_multiplier, None, _correlated(strategy)), **work)


def _correlated(strategy: Strategy) -> Callable[[Mechanism], Release]:
    return lambda noise: CorrelatedNoise(Gaussian(noise.noise_multiplier), strategy)


@shares(federated)
def dp_fed_avg(*, gradient: Gradient = Plain(), **shared: Unpack[Federated]) -> Plan:
    """w <- w - server step of (sum_i clip(w - w_i, clip norm) + N(0, (noise multiplier * clip norm)^2)) / expected.

    `server` may be FedAdam, FedYogi or FedAdagrad, `gradient` the pull of FedProx.
    """
    return federated(gradient=gradient, **shared)


@shares(messages)
def scaffold(*, lr: float | Schedule, steps: int = 5, batch: int | None = None, **shared: Unpack[Messages]) -> Plan:
    """w <- w - server step of first half, c <- c - rate / (steps lr) * second half of
    (sum_i clip((w - w_i, steps lr (c_i - c_i')), clip norm) + N(0, (noise multiplier * clip norm)^2)) / expected."""
    return messages(Scaffold(lr=lr, steps=steps, batch=batch), **shared)
