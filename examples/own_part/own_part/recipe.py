"""A recipe: a function of keyword arguments with declared types that returns a plan."""

from __future__ import annotations

from own_part.parts import Halves, Mirror, Wiener
from sordino import Plan, add_recipe
from sordino.parts import CentralNoise, Clip, Gaussian, LocalSgd, Sgd


@add_recipe
def own_fed_avg(
    *, rounds: int, population: int, lr: float, clip_norm: float, noise_multiplier: float, epochs: int = 1
) -> Plan:
    """w <- w - wiener(mean of clipped updates + noise), even and odd clients in turns."""
    return Plan(
        rounds=rounds,
        clients=Halves(population),
        local=LocalSgd(lr=lr, epochs=epochs),
        encode=(Clip(clip_norm), Mirror()),
        release=CentralNoise(Gaussian(noise_multiplier)),
        postprocess=(Wiener(),),
        server=Sgd(),
    )
