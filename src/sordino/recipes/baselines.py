"""Baselines: DP-FedAvg (McMahan et al. 2018), and SCAFFOLD (Karimireddy et al. 2020) under client-level privacy."""

from __future__ import annotations

from typing import Unpack

from sordino.parts.gradients import Gradient, Plain
from sordino.parts.local_solvers import Scaffold
from sordino.parts.schedules import Schedule
from sordino.plan import Plan
from sordino.recipes.arguments import Federated, Messages, federated, messages, shares


@shares(federated)
def dp_fed_avg(*, gradient: Gradient = Plain(), **shared: Unpack[Federated]) -> Plan:
    """w <- w - server step of (sum_i clip(w - w_i, clip norm) + N(0, (noise multiplier * clip norm)^2)) / expected.

    `server` may be FedAdam, FedYogi or FedAdagrad, `gradient` the pull of FedProx.
    """
    return federated(gradient=gradient, **shared)


@shares(messages)
def scaffold(*, lr: float | Schedule, steps: int = 5, batch: int | None = None, **shared: Unpack[Messages]) -> Plan:
    """w <- w - server step of first half, c <- c - rate / (steps lr) * second half of
    (sum_i clip((w - w_i, steps lr (c_i - c_i')), clip norm) + N(0, (noise multiplier * clip norm)^2)) / expected."""
    return messages(Scaffold(lr=lr, steps=steps, batch=batch), **shared)
