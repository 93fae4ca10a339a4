"""Paper 003, DP-FedSAM: sharpness-aware local steps, with its sound top-k forms and the methods it is compared with."""

from __future__ import annotations

from typing import Any, Unpack

from sordino.parts.encoding import Step
from sordino.parts.gradients import Blur, Sam
from sordino.parts.sparsify import MaskSource, PublicMask, RandomMask, ReleasedMask
from sordino.plan import Plan
from sordino.recipes.arguments import Federated, federated, shares

USUAL: dict[str, Any] = {"momentum": 0.5, "weight_decay": 5e-4}  # of all methods in the paper


@shares(federated, **USUAL)
def dp_fed_sam(*, rho: float = 0.5, adaptive: bool = False, **shared: Unpack[Federated]) -> Plan:
    """w <- w - (sum_i clip(w - w_i, clip norm) + noise) / expected; local steps follow grad f(w + rho g / ||g||).

    With `denoiser` = SparsifyMean(keep): top-k of the noised mean, a sound form of the paper's.
    """
    return federated(gradient=Sam(rho, adaptive), **shared)


@shares(federated, **USUAL)
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


@shares(federated, **USUAL)
def fed_smp(*, mask: MaskSource = RandomMask(), keep: float = 0.4, **shared: Unpack[Federated]) -> Plan:
    """Fed-SMP (Hu et al. 2022): one public mask per round for all; random (rand_k), or top-k on public data (top_k)."""
    return federated(sparsify=PublicMask(keep, mask), **shared)


@shares(federated, **USUAL)
def blur(*, strength: float = 0.1, sparsify: Step | None = None, **shared: Unpack[Federated]) -> Plan:
    """BLUR (Cheng et al. 2022): a pull back into the clip ball; SparsifyUpdate adds LUS, a client's own top-k."""
    return federated(gradient=Blur(strength), sparsify=sparsify, **shared)
