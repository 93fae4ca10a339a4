"""Paper 000, DP-Fed-LS: Laplacian smoothing of the noised mean."""

from __future__ import annotations

from typing import Unpack

from sordino.parts.postprocess import LaplacianSmoothing, WhenNoisy
from sordino.plan import Plan
from sordino.recipes.arguments import Federated, federated, shares


@shares(federated, denoiser=WhenNoisy(LaplacianSmoothing(1.0)))
def dp_fed_ls(**shared: Unpack[Federated]) -> Plan:
    """w <- w - A_strength^-1 (sum_i clip(w - w_i, clip norm) + N(0, (noise multiplier * clip norm)^2)) / expected.

    Clients project w_i - w on the ball after every step (Algorithm 1); A = I + strength * L. By default a round is
    smoothed where its noise-to-signal ratio z sqrt(d) / S is above 15, where smoothing wins; LaplacianSmoothing(1.0)
    always smooths. Another `denoiser` takes its place (Table 6), another `order` flattens convolutions otherwise
    (Table 5).
    """
    return federated(project=True, **shared)
