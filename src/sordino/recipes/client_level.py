"""Recipes whose privacy unit is a client: baselines, and the methods of papers 000, 002 and 003.

DP-FedAvg (McMahan et al. 2018), SCAFFOLD (Karimireddy et al. 2020), DP-FTRL (Kairouz 2021), BandMF (Choquette-Choo
2023); DP-Fed-LS (paper 000), DP-FedSAM and the methods it is compared with (paper 003), client-side noise (paper 002).
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
NOISE_GROWTH = {"laplace": 2.0, "gaussian": 1.0}  # z: the noise variance grows like rounds^z


@shares()
def dp_fed_avg(*, gradient: Gradient = Plain(), **shared: Unpack[Federated]) -> Plan:
    """w <- w - server step of (sum_i clip(w - w_i, clip norm) + N(0, (noise multiplier * clip norm)^2)) / expected.

    `server` may be FedAdam, FedYogi or FedAdagrad, `gradient` the pull of FedProx.
    """
    return federated(gradient=gradient, **shared)


@shares()
def dp_ftrl(
    *, clients: Sampler, noise_multiplier: float, strategy: Strategy = BufferedToeplitz(3), **work: Unpack[Correlated]
) -> Plan:
    """w <- w - server step of (sum_i clip(w - w_i, clip norm) + z * clip norm * (row t of C^-1 Z)) / expected.

    Nothing is amplified: `clients` come in turn (roundrobin) or rest (min_separation); cohorts need not be secret.
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
    """w <- w - server step of (sum_i clip(w - w_i, clip norm) + z * clip norm * (row t of C^-1 Z)) / cohort.

    `groups` of clients come in turn; each client of the round's group is sampled in secret, `cohort` of them on
    average: the cost is amplified. C has `bands` optimised bands, at most (and by default) as many as groups.
    """
    clients = CyclicPoisson(population, groups, cohort * groups / population)
    strategy = Banded(groups if bands is None else bands)
    return dp_ftrl(clients=clients, noise_multiplier=noise_multiplier, strategy=strategy, **work)


@shares()
def scaffold(*, lr: float | Schedule, steps: int = 5, batch: int | None = None, **shared: Unpack[Messages]) -> Plan:
    """w <- w - server step of first half, c <- c - rate / (steps lr) * second half of
    (sum_i clip((w - w_i, steps lr (c_i - c_i')), clip norm) + N(0, (noise multiplier * clip norm)^2)) / expected."""
    return plan_of(Scaffold(lr=lr, steps=steps, batch=batch), {**shared}, (Clip(shared["clip_norm"]),))


# ---- paper 000, DP-Fed-LS: Laplacian smoothing of the noised mean ----------------------------------------------------


@shares(denoiser=WhenNoisy(LaplacianSmoothing(1.0)))
def dp_fed_ls(**shared: Unpack[Federated]) -> Plan:
    """w <- w - A_strength^-1 (sum_i clip(w - w_i, clip norm) + N(0, (noise multiplier * clip norm)^2)) / expected.

    Clients project w_i - w on the ball after every step (Algorithm 1); A = I + strength * L. By default a round is
    smoothed where its noise-to-signal ratio z sqrt(d) / S is above 15, where smoothing wins; LaplacianSmoothing(1.0)
    always smooths. Another `denoiser` takes its place (Table 6), another `order` flattens convolutions otherwise
    (Table 5).
    """
    return federated(project=True, **shared)


# ---- paper 003, DP-FedSAM: sharpness-aware local steps, its sound top-k forms, the methods it is compared with -------


@shares(**USUAL)
def dp_fed_sam(*, rho: float = 0.5, adaptive: bool = False, **shared: Unpack[Federated]) -> Plan:
    """w <- w - (sum_i clip(w - w_i, clip norm) + noise) / expected; local steps follow grad f(w + rho g / ||g||).

    With `denoiser` = SparsifyMean(keep): top-k of the noised mean, a sound form of the paper's.
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
    """DP-FedSAM that keeps a share of the coordinates, in a sound form.

    PublicMask: a mask from what was released before; noise on the mask only. SparsifyUpdate: each client's own top-k
    before the clip, noise on all coordinates. The published form masks the noise itself: `MaskedNoise` has the reason.
    """
    return federated(gradient=Sam(rho, adaptive), sparsify=sparsify, **shared)


@shares(**USUAL)
def fed_smp(*, mask: MaskSource = RandomMask(), keep: float = 0.4, **shared: Unpack[Federated]) -> Plan:
    """Fed-SMP (Hu et al. 2022): one public mask per round for all; random (rand_k), or top-k on public data (top_k)."""
    return federated(sparsify=PublicMask(keep, mask), **shared)


@shares(**USUAL)
def blur(*, strength: float = 0.1, sparsify: Step | None = None, **shared: Unpack[Federated]) -> Plan:
    """BLUR (Cheng et al. 2022): a pull back into the clip ball; SparsifyUpdate adds LUS, a client's own top-k."""
    return federated(gradient=Blur(strength), sparsify=sparsify, **shared)


# ---- paper 002, tuning local and global iterations: every client adds Laplace or Gaussian noise to its upload --------


def local_steps(total: int, mechanism: str) -> int:
    """E = total^(z/(z+1)) to the nearest whole number: total^(2/3) for Laplace, total^(1/2) for Gaussian noise.

    It minimises E^2/T + E^(1-z) T^(z-1) where z > 1. At z = 1 the second term does not depend on E: T^(1/2) is then
    the most local steps (fewest rounds) that keep the order of the bound, and fewer steps lower its value. Below 1
    (no mechanism here) one step is best, against the paper. Paper 002, Theorems 4 and 5.
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
    """`steps` full-batch steps with gradients clipped to `clip_norm` (zeta), then noise on the upload; public cohorts.

    An upload moves by at most lr * steps * clip norm (L1 for Laplace, L2 for Gaussian), so that is the clip of the
    whole message; neighbours replace a client's data, which moves it by twice that (the paper counts it once). With a
    `PerStep` lr (Theorem 3) lr * steps is the sum over the round's steps. `turns_seed` shuffles the public order of
    turns.
    """
    way = Travelled(lr.schedule, steps) if isinstance(lr, PerStep) else None
    clip = Clip(scaled(way or lr, clip_norm if way else steps * clip_norm), mechanism.norm)
    local = LocalSgd(lr=lr, steps=steps, gradient=Bounded(clip_norm, mechanism.norm))
    clients, release = RoundRobin(population, cohort, turns_seed), LocalNoise(mechanism)
    return Plan(rounds=rounds, clients=clients, local=local, encode=(clip,), release=release, server=Sgd())
