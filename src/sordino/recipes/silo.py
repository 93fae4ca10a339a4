"""Paper 001, private learning without a trusted server: every silo clips records, noises and sends its own gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sordino.errors import ConfigError, PlanError
from sordino.parts.accelerated import Accelerated
from sordino.parts.gradients import Gradient, Moreau, Plain
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.records import AllRecords, FixedRecords, OnePass, PoissonRecords, RecordSampler
from sordino.parts.release import CentralNoise, Forward, LocalNoise, NoiseShares, NoNoise, Release, ShuffledNoise
from sordino.parts.samplers import Everyone, Sampler
from sordino.parts.schedules import Linear, Schedule
from sordino.parts.server import Average, ServerOptimizer, Sgd
from sordino.plan import Plan
from sordino.privacy.budget import Budget
from sordino.privacy.certificate import default_delta

Sampling = Literal["poisson", "fixed", "one_pass", "all"]
Trust = Literal["nobody", "shuffler", "secure_sum", "server"]


def _records(sampling: Sampling, batch: int, sizes: tuple[int, ...]) -> RecordSampler:
    if sampling == "all":
        return AllRecords(sizes)
    if sampling == "poisson":
        return PoissonRecords(batch, sizes)
    return FixedRecords(batch, sizes) if sampling == "fixed" else OnePass(batch, sizes)


def _release(trust: Trust, multiplier: float, multipliers: tuple[float, ...], clients: Sampler) -> Release:
    """Whom the silos trust decides who adds the noise: themselves, or the server that sums."""
    if not multiplier and not multipliers:
        return NoNoise()
    if multipliers and trust != "nobody":
        found = f"multipliers of the silos' own where trust is {trust!r}"
        raise PlanError("local noise", found, 'trust = "nobody"', "give one multiplier")
    if trust == "nobody":
        return LocalNoise(Gaussian(multiplier or max(multipliers)), multipliers)
    least = max(1, int(clients.expected))
    releases: dict[str, Release] = {
        "shuffler": ShuffledNoise(Gaussian(multiplier), least),
        "secure_sum": NoiseShares(multiplier, least),
        "server": CentralNoise(Gaussian(multiplier)),
    }
    return releases[trust]


def _oracle(smoothing: float | None) -> Gradient:
    return Plain() if smoothing is None else Moreau(smoothing)


def noisy_minibatch_sgd(
    *,
    rounds: int,
    clients: Sampler,
    sizes: tuple[int, ...],
    batch: int,
    radius: float | Schedule,
    multiplier: float,
    lr: float | Schedule,
    multipliers: tuple[float, ...] = (),
    sampling: Sampling = "fixed",
    trust: Trust = "nobody",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    ball: float | None = None,
    average: Average | None = None,
    smoothing: float | None = None,
) -> Plan:
    """w <- P(w - lr * (1 / M) sum_i (1 / batch) (sum_j clip(g_ij, radius) + N(0, (z_i radius)^2))), M silos that came.

    P projects on a ball around the start; `average` returns a mean of iterates; `smoothing` puts the Moreau envelope
    with that beta in the place of a loss that is not smooth; `weight_decay` is the regularised variant.
    """
    server = Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay, ball=ball, average=average)
    records = _records(sampling, batch, sizes)
    return _plan(rounds, clients, records, radius, _release(trust, multiplier, multipliers, clients), server, smoothing)


def accelerated_minibatch_sgd(
    *,
    rounds: int,
    clients: Sampler,
    sizes: tuple[int, ...],
    batch: int,
    radius: float | Schedule,
    multiplier: float,
    v: float,
    mu: float = 0.0,
    multipliers: tuple[float, ...] = (),
    sampling: Sampling = "fixed",
    trust: Trust = "nobody",
    ball: float | None = None,
    smoothing: float | None = None,
) -> Plan:
    """AC-SA on the same noised gradients: three sequences, alpha_r = 2 / (r + 1), eta_r = 4 v / (r (r + 1))."""
    records = _records(sampling, batch, sizes)
    release = _release(trust, multiplier, multipliers, clients)
    return _plan(rounds, clients, records, radius, release, Accelerated(v=v, mu=mu, ball=ball), smoothing)


def noisy_local_sgd(
    *,
    rounds: int,
    clients: Sampler,
    sizes: tuple[int, ...],
    batch: int,
    radius: float | Schedule,
    multiplier: float,
    lr: float | Schedule,
    steps: int,
    multipliers: tuple[float, ...] = (),
    sampling: Sampling = "fixed",
) -> Plan:
    """w <- mean of w_i;  `steps` times in a silo  w_i <- w_i - lr / batch (sum_j clip(g_ij) + N(0, (z_i radius)^2))."""
    records = _records(sampling, batch, sizes)
    return Plan(
        rounds=rounds,
        clients=clients,
        local=NoisyLocalSgd(records, radius, multiplier, lr, steps, multipliers),
        release=Forward(),
        server=Sgd(),
    )


def silo(
    *,
    sizes: tuple[int, ...],
    epsilons: tuple[float, ...],
    deltas: tuple[float, ...] = (),
    rounds: int = 60,
    radius: float | Schedule = 1.0,
    lr: float = 0.5,
    momentum: float = 0.5,
    final: float = 0.1,
    ball: float | None = None,
) -> Plan:
    """A federation of silos in which nobody trusts anybody: every silo's own epsilon is met exactly.

    All records in every round (less noise than random batches under the same relation), momentum, and a server step
    that falls in a straight line to `final` of its start. `epsilons` and `deltas` have one entry per silo, or one for
    all; a delta defaults to size^-1.1 of its silo. Neighbours replace one record; everybody may see every message.
    """
    step = lr * (1 - momentum)
    server = Sgd(lr=Linear(step, final * step, rounds), momentum=momentum, ball=ball)
    plan = _plan(rounds, Everyone(len(sizes)), AllRecords(sizes), radius, LocalNoise(Gaussian(1.0)), server, None)
    from sordino.privacy.calibrated import calibrated_silos

    return calibrated_silos(plan, budgets(sizes, epsilons, deltas))


def budgets(sizes: Sequence[int], epsilons: Sequence[float], deltas: Sequence[float] = ()) -> list[Budget]:
    """One budget per silo from lists with one entry per silo, or one for all."""
    given = deltas or [default_delta(size) for size in sizes]
    each = [values if len(values) > 1 else [*values] * len(sizes) for values in (epsilons, given)]
    for values, name in zip(each, ("epsilons", "deltas"), strict=True):
        if len(values) != len(sizes):
            raise ConfigError(f"{len(values)} {name} for {len(sizes)} silos", "one per silo, or one for all")
    return [Budget(epsilon, delta) for epsilon, delta in zip(*each, strict=True)]


def _plan(
    rounds: int,
    clients: Sampler,
    records: RecordSampler,
    radius: float | Schedule,
    release: Release,
    server: ServerOptimizer,
    smoothing: float | None,
) -> Plan:
    local = BatchGradient(records, radius, gradient=_oracle(smoothing))
    return Plan(rounds=rounds, clients=clients, local=local, release=release, server=server)
