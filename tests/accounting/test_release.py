"""Promises of a release: every noise it names is in the sum, from the stream of the one who draws it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.releases import CentralNoise, Forward, LocalNoise, NoiseShares, NoNoise, Release, ShuffledNoise
from sordino.parts.samplers import Cohort
from sordino.rng import Seeded

TOTAL, COHORT = torch.linspace(-1, 1, 50, dtype=torch.float64), np.arange(4)
CENTRAL, LOCAL = CentralNoise(Gaussian(2.0)), LocalNoise(Laplace(0.5))


@pytest.mark.parametrize(
    ("release", "drawers"),
    [
        (CENTRAL, ["server noise"]),
        (LOCAL, ["client noise"]),
        (NoiseShares(1.0, 3), ["client noise"]),
        (ShuffledNoise(Gaussian(1.0), 3), ["client noise"]),
        (Forward(), []),
        (NoNoise(), []),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_stream_is_opened_for_those_who_draw_and_for_no_other(release: Release, drawers: list[str]) -> None:
    asked: list[str] = []

    def coins(purpose: str) -> np.random.Generator:
        asked.append(purpose)
        return Seeded(1).at(0, purpose)

    found = release.noised(TOTAL, COHORT, coins, {})[0]
    exact = release.in_sum(TOTAL, COHORT, Seeded(1).at(0, "client noise"))
    exact = release.on_server(exact, Seeded(1).at(0, "server noise"))
    assert asked == drawers
    assert torch.equal(found, exact)
    assert torch.equal(found, TOTAL) == (not drawers)


@dataclass(frozen=True)
class _Twice(CentralNoise, kind=""):
    """Clients and the server add noise."""

    client_noise: ClassVar[bool] = True

    def on_client(self, row: Tensor, client: int, rng: np.random.Generator) -> Tensor:
        return LOCAL.on_client(row, client, rng)

    def in_sum(self, total: Tensor, cohort: Cohort, rng: np.random.Generator) -> Tensor:
        return LOCAL.in_sum(total, cohort, rng)


def test_a_release_with_two_noises_adds_both() -> None:
    found = _Twice(Gaussian(2.0)).noised(TOTAL, COHORT, lambda purpose: Seeded(1).at(0, purpose), {})[0]
    exact = CENTRAL.on_server(
        LOCAL.in_sum(TOTAL, COHORT, Seeded(1).at(0, "client noise")), Seeded(1).at(0, "server noise")
    )
    assert torch.equal(found, exact)
