"""Paper 003, DP-FedSAM: sharpness-aware local steps, with its sound top-k forms and the methods it is compared with."""

from __future__ import annotations

from typing import Literal

from sordino.parts.denoise import SparsifyMean
from sordino.parts.encode import Clip, Step
from sordino.parts.gradients import Blur, Gradient, Plain, Sam
from sordino.parts.local import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.postprocess import Postprocess
from sordino.parts.release import CentralNoise, MaskedNoise, NoiseShares, NoNoise, Release
from sordino.parts.samplers import FixedSize, Sampler
from sordino.parts.schedules import Schedule
from sordino.parts.server import Sgd
from sordino.parts.sparsify import MaskSource, PublicDataMask, PublicMask, RandomMask, ReleasedMask, SparsifyUpdate
from sordino.plan import Plan

Trust = Literal["server", "secure_sum"]


def _release(trust: Trust, multiplier: float, clients: Sampler) -> Release:
    """The same noise on the sum, added by the server, or in shares by the clients of a fixed cohort."""
    if not multiplier:
        return NoNoise()
    if trust == "server":
        return CentralNoise(Gaussian(multiplier))
    return NoiseShares(
        multiplier, clients.cohort if isinstance(clients, FixedSize) else max(1, int(clients.expected / 2))
    )


def dp_fed_sam(
    *,
    rounds: int,
    clients: Sampler,
    lr: float | Schedule,
    radius: float | Schedule,
    multiplier: float,
    rho: float = 0.5,
    adaptive: bool = False,
    epochs: int = 1,
    batch: int | None = None,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    trust: Trust = "server",
    server_lr: float | Schedule = 1.0,
) -> Plan:
    """w <- w - (sum_i clip(w - w_i, radius) + noise) / expected; local steps follow grad f(w + rho g / ||g||)."""
    return _plan(
        rounds, clients, lr, radius, Sam(rho, adaptive), epochs, batch, momentum, weight_decay,
        _release(trust, multiplier, clients), server_lr,
    )  # fmt: skip


def dp_fed_sam_top_k(
    *,
    rounds: int,
    clients: Sampler,
    lr: float | Schedule,
    radius: float | Schedule,
    multiplier: float,
    form: Literal["update", "mean", "mask", "published"] = "mask",
    keep: float = 0.4,
    rho: float = 0.5,
    adaptive: bool = False,
    epochs: int = 1,
    batch: int | None = None,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    trust: Trust = "server",
    server_lr: float | Schedule = 1.0,
) -> Plan:
    """DP-FedSAM that keeps a share `keep` of the coordinates, in a sound form.

    update: each client's own top-k before the clip, noise on all coordinates. mean: top-k of the noised mean.
    mask: a public mask from what was released before; noise on the mask only. published: refused, see the error.
    """
    steps: dict[str, tuple[Step, ...]] = {
        "update": (SparsifyUpdate(keep),),
        "mask": (PublicMask(keep, ReleasedMask()),),
    }
    after: tuple[Postprocess, ...] = (SparsifyMean(keep),) if form == "mean" else ()
    release = MaskedNoise(multiplier, keep) if form == "published" else _release(trust, multiplier, clients)
    return _plan(
        rounds, clients, lr, radius, Sam(rho, adaptive), epochs, batch, momentum, weight_decay, release, server_lr,
        before=steps.get(form, ()), after=after,
    )  # fmt: skip


def fed_smp(
    *,
    rounds: int,
    clients: Sampler,
    lr: float | Schedule,
    radius: float | Schedule,
    multiplier: float,
    mask: Literal["random", "public_data", "released"] = "random",
    keep: float = 0.4,
    epochs: int = 1,
    batch: int | None = None,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    trust: Trust = "server",
    server_lr: float | Schedule = 1.0,
) -> Plan:
    """Fed-SMP (Hu et al. 2022): one public mask per round for all; random (rand_k), or top-k on public data (top_k)."""
    sources: dict[str, MaskSource] = {
        "random": RandomMask(),
        "public_data": PublicDataMask(),
        "released": ReleasedMask(),
    }
    return _plan(
        rounds, clients, lr, radius, Plain(), epochs, batch, momentum, weight_decay,
        _release(trust, multiplier, clients), server_lr, before=(PublicMask(keep, sources[mask]),),
    )  # fmt: skip


def blur(
    *,
    rounds: int,
    clients: Sampler,
    lr: float | Schedule,
    radius: float | Schedule,
    multiplier: float,
    strength: float = 0.1,
    keep: float = 1.0,
    by: Literal["magnitude", "influence"] = "magnitude",
    epochs: int = 1,
    batch: int | None = None,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    trust: Trust = "server",
    server_lr: float | Schedule = 1.0,
) -> Plan:
    """BLUR (Cheng et al. 2022): a pull back into the clip ball; keep below 1 adds LUS, a client's own top-k."""
    return _plan(
        rounds, clients, lr, radius, Blur(strength), epochs, batch, momentum, weight_decay,
        _release(trust, multiplier, clients), server_lr, before=(SparsifyUpdate(keep, by),) if keep < 1 else (),
    )  # fmt: skip


def _plan(
    rounds: int,
    clients: Sampler,
    lr: float | Schedule,
    radius: float | Schedule,
    gradient: Gradient,
    epochs: int,
    batch: int | None,
    momentum: float,
    weight_decay: float,
    release: Release,
    server_lr: float | Schedule,
    before: tuple[Step, ...] = (),
    after: tuple[Postprocess, ...] = (),
) -> Plan:
    local = LocalSgd(lr=lr, epochs=epochs, batch=batch, momentum=momentum, weight_decay=weight_decay, gradient=gradient)
    return Plan(
        rounds=rounds,
        clients=clients,
        local=local,
        encode=(*before, Clip(radius)),
        release=release,
        postprocess=after,
        server=Sgd(lr=server_lr),
    )
