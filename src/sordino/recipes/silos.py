"""Paper 001, private learning without a trusted server: every silo clips records, noises and sends its own gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from sordino.accounting.accountant import default_delta
from sordino.accounting.calibration import Budget, calibrate_silos
from sordino.errors import ConfigError
from sordino.parts.accelerated import Accelerated
from sordino.parts.preparation import Preparation
from sordino.parts.record_samplers import AllRecords, RecordSampler
from sordino.parts.record_solvers import NoisyLocalSgd
from sordino.parts.releases import Forward
from sordino.parts.samplers import Everyone, Sampler
from sordino.parts.schedules import Linear, Schedule
from sordino.parts.server_optimizers import Average, Sgd
from sordino.plan import Plan
from sordino.recipes.arguments import Silos, shares, silos


@shares(silos)
def noisy_minibatch_sgd(
    *,
    lr: float | Schedule,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    ball: float | None = None,
    average: Average | None = None,
    **shared: Unpack[Silos],
) -> Plan:
    """w <- P(w - lr * (1 / M) sum_i (1 / batch) (sum_j clip(g_ij, clip norm) + N(0, (z_i clip norm)^2))), M silos.

    P projects on a ball around the start; `average` returns a mean of iterates; `weight_decay` is the regularised
    variant. Whoever else may add the noise is a `release`: ShuffledNoise, NoiseShares, CentralNoise, or LocalNoise with
    a noise multiplier per silo. `gradient` = Moreau(beta) smooths a loss that is not.
    """
    server = Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay, ball=ball, average=average)
    return silos(server, **shared)


@shares(silos)
def accelerated_minibatch_sgd(*, v: float, mu: float = 0.0, ball: float | None = None, **shared: Unpack[Silos]) -> Plan:
    """AC-SA on the same noised gradients: three sequences, alpha_r = 2 / (r + 1), eta_r = 4 v / (r (r + 1))."""
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
    """w <- mean of w_i;  `steps` times in a silo  w_i <- w_i - lr / batch (sum_j clip(g_ij) + N(0, (z_i C)^2))."""
    return Plan(
        rounds=rounds,
        clients=clients,
        local=NoisyLocalSgd(records, clip_norm, noise_multiplier, lr, steps, noise_multipliers),
        release=Forward(),
        server=Sgd(),
    )


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
    """A federation of silos in which nobody trusts anybody: every silo's own epsilon is met exactly.

    All records in every round (less noise than random batches under the same relation), momentum, and a server step
    that falls in a straight line to `final` of its start. `epsilons` and `deltas` have one entry per silo, or one for
    all; a delta defaults to min(size^-1.1, 1e-3) of its silo. Neighbours replace one record; everybody may see every
    message. What columns cost before the first round (`prepare`, taken from the data's) is part of each epsilon.
    """
    step = lr * (1 - momentum)
    server = Sgd(lr=Linear(step, final * step, rounds), momentum=momentum, ball=ball)
    records, clients = AllRecords(sizes), Everyone(len(sizes))
    plan = silos(server, rounds=rounds, clients=clients, records=records, clip_norm=clip_norm, noise_multiplier=1.0)
    return calibrate_silos(replace(plan, prepare=prepare), budgets(sizes, epsilons, deltas))


def budgets(sizes: Sequence[int], epsilons: Sequence[float], deltas: Sequence[float] = ()) -> list[Budget]:
    """One budget per silo from lists with one entry per silo, or one for all."""
    given = deltas or [default_delta(size) for size in sizes]
    each = [values if len(values) > 1 else [*values] * len(sizes) for values in (epsilons, given)]
    for values, name in zip(each, ("epsilons", "deltas"), strict=True):
        if len(values) != len(sizes):
            raise ConfigError(f"{len(values)} {name} for {len(sizes)} silos", "one per silo, or one for all")
    return [Budget(epsilon, delta) for epsilon, delta in zip(*each, strict=True)]
