"""Paper 000, DP-Fed-LS: Laplacian smoothing of the noised mean."""

from __future__ import annotations

from typing import Literal

from sordino.parts.denoise import JamesStein, SoftThreshold
from sordino.parts.encode import Clip
from sordino.parts.local import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.postprocess import LaplacianSmoothing, Postprocess
from sordino.parts.release import CentralNoise, NoNoise
from sordino.parts.samplers import Sampler
from sordino.parts.schedules import Schedule
from sordino.parts.server import Sgd
from sordino.plan import Plan


def dp_fed_ls(
    *,
    rounds: int,
    clients: Sampler,
    lr: float | Schedule,
    radius: float | Schedule,
    multiplier: float,
    strength: float = 1.0,
    epochs: int = 1,
    batch: int | None = None,
    weight_decay: float = 0.0,
    server_lr: float | Schedule = 1.0,
    server_momentum: float = 0.0,
    denoiser: Literal["smoothing", "james_stein", "james_stein_plain", "soft_threshold", "none"] = "smoothing",
    order: tuple[int, ...] = (),
) -> Plan:
    """w <- w - A_strength^-1 (sum_i clip(w - w_i, radius) + N(0, (multiplier * radius)^2)) / expected.

    Clients project w_i - w on the ball after every step (Algorithm 1); A = I + strength * L. `denoiser` puts another
    post-processing in the place of smoothing (Table 6), `order` another flattening of convolutions (Table 5).
    """
    denoisers: dict[str, tuple[Postprocess, ...]] = {
        "smoothing": (LaplacianSmoothing(strength, order),),
        "james_stein": (JamesStein(positive=True),),
        "james_stein_plain": (JamesStein(positive=False),),
        "soft_threshold": (SoftThreshold(),),
        "none": (),
    }
    return Plan(
        rounds=rounds,
        clients=clients,
        local=LocalSgd(lr=lr, epochs=epochs, batch=batch, weight_decay=weight_decay, project=True),
        encode=(Clip(radius),),
        release=CentralNoise(Gaussian(multiplier)) if multiplier else NoNoise(),
        postprocess=denoisers[denoiser],
        server=Sgd(lr=server_lr, momentum=server_momentum),
    )
