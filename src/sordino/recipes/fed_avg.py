"""DP-FedAvg (McMahan et al. 2018): clip each client's update, add noise to the sum."""

from __future__ import annotations

from typing import Unpack

from sordino.parts.gradients import Gradient, Plain
from sordino.plan import Plan
from sordino.recipes.shared import Federated, federated, shares


@shares(federated)
def dp_fed_avg(*, gradient: Gradient = Plain(), **shared: Unpack[Federated]) -> Plan:
    """w <- w - server step of (sum_i clip(w - w_i, radius) + N(0, (multiplier * radius)^2)) / expected.

    `server` may be FedAdam, FedYogi or FedAdagrad, `gradient` the pull of FedProx.
    """
    return federated(gradient=gradient, **shared)
