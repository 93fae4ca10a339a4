"""Recipes whose privacy unit is a client; configuration files and scripts call them.

DP-FedAvg (McMahan et al. 2018), SCAFFOLD (Karimireddy et al. 2020), DP-FTRL (Kairouz 2021), BandMF (Choquette-Choo
2023), DP-Fed-LS (paper 000 of docs/papers.md), client-side noise (002), DP-FedSAM and its baselines (003).
"""

from __future__ import annotations

import math
from typing import Any, Unpack

from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.encoding import Clip, LaplacianSmoothing, Step, WhenNoisy
from sordino.parts.gradients import Blur, Bounded, Gradient, Plain, Sam
from sordino.parts.local_solvers import LocalSgd, Scaffold
from sordino.parts.mechanisms import Gaussian, Mechanism
from sordino.parts.releases import LocalNoise
from sordino.parts.samplers import CyclicPoisson, RoundRobin, Sampler
from sordino.parts.schedules import PerStep, Schedule, Travelled, scaled
from sordino.parts.server_optimizers import Sgd
from sordino.parts.sparsify import MaskSource, PublicMask, RandomMask, ReleasedMask
from sordino.parts.strategies import Banded, BufferedToeplitz, Strategy
from sordino.plan import Plan
from sordino.recipes.arguments import Correlated, Federated, Messages, federated, plan_of, shares

USUAL: dict[str, Any] = {"momentum": 0.5, "weight_decay": 5e-4}  # of all methods in paper 003
NOISE_GROWTH = {"laplace": 2.0, "gaussian": 1.0}  # z, where the noise variance grows like rounds^z


@shares()
def dp_fed_avg(*, gradient: Gradient = Plain(), **shared: Unpack[Federated]) -> Plan:
    """DP-FedAvg: w <- w - server step of (sum_i clip(w - w_i, C) + N(0, (z C)^2)) / expected cohort.

    w_i is the model of client i after local SGD from w, C the clip norm and z the noise multiplier. `server` may be
    FedAdam, FedYogi or FedAdagrad, `gradient` FedProx.
    """
    return federated(gradient=gradient, **shared)


@shares()
def dp_ftrl(
    *, clients: Sampler, noise_multiplier: float, strategy: Strategy = BufferedToeplitz(3), **work: Unpack[Correlated]
) -> Plan:
    """DP-FTRL: DP-FedAvg in which the noise of round t is row t of C^-1 Z, with Z ~ N(0, (z * clip norm)^2).

    C is the matrix of `strategy` and z the noise multiplier. With the samplers roundrobin and min_separation nothing is
    amplified, and cohorts may be public; with kept_bins each client's bin is secret, which amplifies.
    """

    def correlated(noise: Mechanism) -> CorrelatedNoise:
        return CorrelatedNoise(Gaussian(noise.noise_multiplier), strategy)

    return federated(clients=clients, noise_multiplier=noise_multiplier, noise=correlated, **work)


@shares()
def band_mf(
    *,
    population: int,
    groups: int,
    cohort: float,
    noise_multiplier: float,
    bands: int | None = None,
    **work: Unpack[Correlated],
) -> Plan:
    """BandMF: DP-FedAvg in which the noise of round t is row t of C^-1 Z, with Z ~ N(0, (z * clip norm)^2).

    z is the noise multiplier. Groups of clients take turns; each client of the round's group is sampled secretly,
    `cohort` of them on average, which amplifies privacy. C has `bands` optimised bands, at most (and by default) as
    many as groups.
    """
    clients = CyclicPoisson(population, groups, cohort * groups / population)
    strategy = Banded(groups if bands is None else bands)
    return dp_ftrl(clients=clients, noise_multiplier=noise_multiplier, strategy=strategy, **work)


@shares()
def scaffold(*, lr: float | Schedule, steps: int = 5, batch: int | None = None, **shared: Unpack[Messages]) -> Plan:
    """SCAFFOLD with DP: clients send clip((w - w_i, steps lr (c_i - c_i')), C) under noise N(0, (z C)^2).

    w_i is the model of client i after local SGD from w, with control variate c_i before and c_i' after; C is the clip
    norm and z the noise multiplier. The server steps by the first half of the noised mean, and c <- c - rate /
    (steps lr) * second half, rate the expected share of clients in a round.
    """
    return plan_of(Scaffold(lr=lr, steps=steps, batch=batch), {**shared}, (Clip(shared["clip_norm"]),))


# ---- paper 000, DP-Fed-LS: Laplacian smoothing of the noised mean ----------------------------------------------------


@shares(denoiser=WhenNoisy(LaplacianSmoothing(1.0)))
def dp_fed_ls(**shared: Unpack[Federated]) -> Plan:
    """DP-Fed-LS: w <- w - A^-1 (sum_i clip(w - w_i, C) + N(0, (z C)^2)) / expected cohort, A = I + strength * L.

    w_i is the model of client i, C the clip norm, z the noise multiplier and L the Laplacian of a cycle. Clients
    project w_i - w on the ball of radius C after every step (Algorithm 1). By default a round is smoothed if z sqrt(d)
    / S is above 18 for d parameters and S expected clients, where smoothing helps; LaplacianSmoothing(1.0) always
    smooths, and its `order` sets how convolutions are flattened (Table 5). `denoiser` may be another one (Table 6).
    """
    return federated(project=True, **shared)


# ---- paper 003, DP-FedSAM: sharpness-aware local steps, its sound top-k forms, the methods it is compared with -------


@shares(**USUAL)
def dp_fed_sam(*, rho: float = 0.5, adaptive: bool = False, **shared: Unpack[Federated]) -> Plan:
    """DP-FedSAM: DP-FedAvg whose local steps follow the sharpness-aware gradient grad f(w + rho g / ||g||).

    g is the gradient of the local loss f at w. `denoiser` = SparsifyMean(keep) adds a top-k of the noised mean, which
    is a sound form of the paper's top-k.
    """
    return federated(gradient=Sam(rho, adaptive), **shared)


@shares(**USUAL)
def dp_fed_sam_top_k(
    *,
    sparsify: Step = PublicMask(0.4, ReleasedMask()),
    rho: float = 0.5,
    adaptive: bool = False,
    **shared: Unpack[Federated],
) -> Plan:
    """DP-FedSAM-top_k in a sound form: DP-FedSAM that sends or keeps a share of the coordinates.

    `sparsify` = PublicMask sends the coordinates of a mask computed from earlier releases, and noises these alone.
    SparsifyUpdate takes each client's own top-k before the clip, and noises all coordinates. The published form also
    masks the noise, which is unsound (`MaskedNoise`).
    """
    return federated(gradient=Sam(rho, adaptive), sparsify=sparsify, **shared)


@shares(**USUAL)
def fed_smp(*, mask: MaskSource = RandomMask(), keep: float = 0.4, **shared: Unpack[Federated]) -> Plan:
    """Fed-SMP (Hu et al. 2022): DP-FedAvg in which all clients send the coordinates of one public mask per round.

    The mask is random (rand_k), or has the largest entries of an update on public data (top_k)."""
    return federated(sparsify=PublicMask(keep, mask), **shared)


@shares(**USUAL)
def blur(*, strength: float = 0.1, sparsify: Step | None = None, **shared: Unpack[Federated]) -> Plan:
    """BLUR (Cheng et al. 2022): DP-FedAvg with a local penalty on updates longer than the clip norm.

    `sparsify` = SparsifyUpdate adds LUS, a client's own top-k."""
    return federated(gradient=Blur(strength), sparsify=sparsify, **shared)


# ---- paper 002, tuning local and global iterations: every client adds Laplace or Gaussian noise to its upload --------


def local_steps(total: int, mechanism: str) -> int:
    """Return the best number of local steps E, T^(2/3) for Laplace and T^(1/2) for Gaussian noise, T = `total` steps.

    E = T^(z/(z+1)) minimises the bound E^2/T + E^(1-z) T^(z-1) for z > 1, where the noise variance grows like rounds^z.
    At z = 1 the second term does not depend on E: T^(1/2) is then the largest number of local steps (fewest rounds)
    with that order of the bound. Below 1 (no mechanism here) one step is best, contrary to the paper
    (002 of docs/papers.md, Theorems 4 and 5).
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
    """Client-side DP-FedAvg: each client takes `steps` full-batch steps with clipped gradients and noises its upload.

    An update is at most lr * steps * clip_norm long (L1 for Laplace, L2 for Gaussian), which is the clip norm of the
    whole message; replacing a client's data changes it by twice that (the paper counts it once). With a `PerStep` lr
    (Theorem 3) lr * steps is the sum over the round's steps. Cohorts are public; `turns_seed` shuffles their order.
    """
    total = Travelled(lr.schedule, steps) if isinstance(lr, PerStep) else None
    clip = Clip(scaled(total or lr, clip_norm if total else steps * clip_norm), mechanism.norm)
    local = LocalSgd(lr=lr, steps=steps, gradient=Bounded(clip_norm, mechanism.norm))
    clients, release = RoundRobin(population, cohort, turns_seed), LocalNoise(mechanism)
    return Plan(rounds=rounds, clients=clients, local=local, encode=(clip,), release=release, server=Sgd())
