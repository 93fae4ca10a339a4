"""Promises of the noise: its scale is the noise multiplier, wherever it is added; two thirds of it would be noticed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from tests.tiny import clients, final, plan, rounds, task
from torch import Tensor

from sordino.accounting.bounds import Norm
from sordino.accounting.events import GaussianNoise, LaplaceNoise
from sordino.certificate.build import certificate
from sordino.certificate.facts import Facts
from sordino.engines.base import Collected
from sordino.errors import PlanError
from sordino.loop import noised_mean
from sordino.parts.encoding import Clip, LaplacianSmoothing, Noised, NoiseStd
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian, Laplace, Mechanism
from sordino.parts.releases import CentralNoise, LocalNoise, NoiseShares, Release, ShuffledNoise
from sordino.parts.samplers import Everyone, Poisson, Sampler
from sordino.rng import Mode, Seeded, streams
from sordino.task import Task

D = 20_000
LAWS: dict[type[Mechanism], Any] = {Gaussian: stats.norm, Laplace: stats.laplace}
Sample = NDArray[np.float64]


def fits(sample: Sample, law: Any, scale: float) -> bool:
    """Kolmogorov-Smirnov against law(0, scale), at a level that a right sample passes 999 times in 1000."""
    return bool(stats.kstest(sample / scale, law.cdf).pvalue > 1e-3)


def assert_scale(sample: Sample, law: Any, scale: float) -> None:
    """The sample has this scale, and the test would have noticed two thirds or three halves of it."""
    assert fits(sample, law, scale)
    assert not fits(sample * (2 / 3), law, scale)
    assert not fits(sample * (3 / 2), law, scale)


def summed(release: Release, mode: Mode = "simulation", t: int = 0, seed: int = 0) -> Sample:
    """What a run adds to the sum of four messages of zero. Four is a power of two: dividing by it loses no digit."""
    norm: Norm = 1 if isinstance(getattr(release, "mechanism", None), Laplace) else 2
    four = plan(clients=Everyone(4), release=release, encode=(Clip(1.0, norm=norm),))
    collected = Collected(torch.zeros(D, dtype=torch.float64), received=4)
    return 4.0 * noised_mean(four, collected, np.arange(4), streams(mode, seed), t, {})[0].double().numpy()


@pytest.mark.parametrize("law", [Gaussian, Laplace])
@pytest.mark.parametrize("noise_multiplier", [1e-3, 0.7, 1.0, 40.0])
def test_a_draw_has_the_scale_of_its_multiplier(law: Callable[[float], Mechanism], noise_multiplier: float) -> None:
    mechanism = law(noise_multiplier)
    sample = mechanism.sample(D, Seeded(1).at(0, "server noise"))
    assert_scale(sample, LAWS[type(mechanism)], noise_multiplier)
    assert sample.std() == pytest.approx(mechanism.std, rel=0.05)


def test_the_noise_test_tells_gaussian_from_laplace() -> None:
    sample = Laplace(1.0).sample(D, Seeded(1).at(0, "server noise"))
    assert not any(fits(sample, stats.norm, scale) for scale in (0.8, 1.0, 1.2, math.sqrt(2)))


@pytest.mark.parametrize(
    ("release", "law", "scale"),
    [
        (CentralNoise(Gaussian(0.7)), stats.norm, 0.7),
        (CentralNoise(Laplace(0.7)), stats.laplace, 0.7),
        (NoiseShares(0.7, at_least=4), stats.norm, 0.7),
        (NoiseShares(0.7, at_least=1), stats.norm, 1.4),  # four shares, each sized for one report
        (LocalNoise(Gaussian(0.7)), stats.norm, 1.4),
        (LocalNoise(Gaussian(1.0), (3.0, 4.0, 12.0, 84.0)), stats.norm, 85.0),
        (ShuffledNoise(Gaussian(0.7), at_least=4), stats.norm, 1.4),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_release_adds_noise_of_its_scale_to_the_sum(release: Release, law: Any, scale: float) -> None:
    assert_scale(summed(release), law, scale)


def test_the_sum_of_local_laplace_noise_is_the_sum_of_four_draws() -> None:
    sample = summed(LocalNoise(Laplace(0.7)))
    by_hand = np.random.default_rng(5).laplace(scale=0.7, size=(4, D)).sum(0)
    assert stats.ks_2samp(sample, by_hand).pvalue > 1e-3
    assert stats.ks_2samp(sample * (2 / 3), by_hand).pvalue < 1e-3
    assert stats.ks_2samp(sample * (3 / 2), by_hand).pvalue < 1e-3


def test_secure_noise_has_the_same_scale_and_lies_on_a_public_grid() -> None:
    sample = summed(CentralNoise(Gaussian(0.7)), mode="secure")
    assert stats.kstest(sample / 0.7, stats.norm.cdf).pvalue > 1e-9  # fresh noise every time: a rarer alarm
    assert not fits(sample * (2 / 3), stats.norm, 0.7)
    assert not fits(sample * (3 / 2), stats.norm, 0.7)
    steps = sample / 2.0**-21
    assert np.array_equal(steps, np.round(steps))


@pytest.mark.parametrize("release", [CentralNoise(Gaussian(0.7)), NoiseShares(0.7, 4), LocalNoise(Gaussian(0.7))])
def test_a_certificate_that_speaks_of_a_grid_is_right(release: Release) -> None:
    note = certificate(plan(release=release), Facts(1e-3, "secure", 2))["noise"]["note"]
    steps = summed(release, mode="secure") * 2.0**40
    assert ("grid" in note) == np.array_equal(steps, np.round(steps))


@pytest.mark.parametrize("release", [CentralNoise(Gaussian(1.0)), NoiseShares(1.0, 4), LocalNoise(Laplace(1.0))])
def test_noise_is_fresh_in_every_round_and_for_every_seed(release: Release) -> None:
    first, later, other = summed(release), summed(release, t=1), summed(release, seed=1)
    for a, b in ((first, later), (first, other), (later, other)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(D)
    assert np.array_equal(first, summed(release))


@pytest.mark.parametrize("release", [CentralNoise(Gaussian(1.0)), NoiseShares(1.0, 4), LocalNoise(Gaussian(1.0))])
def test_a_run_draws_fresh_noise_in_every_round(release: Release) -> None:
    """End to end: clients that do not move, so each round moves the model by its own noise."""
    wide = Task.of(torch.nn.Linear(D // 2, 2, bias=False), clients(shape=(D // 2,), classes=2))
    still = plan(rounds=3, local=LocalSgd(lr=0.0, epochs=1), release=release)
    path = [wide.layout.flatten(wide.model), *(done.state.memory["params"] for done in rounds(still, wide))]
    moves = np.stack([(after - before).numpy() for before, after in itertools.pairwise(path)])
    assert np.abs(np.corrcoef(moves) - np.eye(3)).max() < 5 / math.sqrt(D)


def test_noise_of_different_purposes_is_independent() -> None:
    purposes = ("client noise", "server noise", "cohort", "batches")
    draws = np.stack([Gaussian(1.0).sample(D, Seeded(0).at(0, purpose)) for purpose in purposes])
    assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < 5 / math.sqrt(D)


def test_coordinates_are_independent_of_each_other() -> None:
    sample = summed(CentralNoise(Gaussian(1.0)))
    for lag in (1, 2, 3, 4, 8, 64, D // 2):
        assert abs(np.corrcoef(sample[lag:], sample[:-lag])[0, 1]) < 5 / math.sqrt(len(sample) - lag)


@pytest.mark.parametrize("sampler", [Everyone(6), Poisson(6, 0.5)])
@pytest.mark.parametrize("clip_norm", [0.01, 5.0])
@pytest.mark.parametrize("law", [Gaussian, Laplace])
def test_the_released_model_carries_multiplier_times_radius_over_the_denominator(
    sampler: Sampler, clip_norm: float, law: Callable[[float], Mechanism]
) -> None:
    """End to end: clients that do not move, one round, so the model moves by the noise alone."""
    wide = Task.of(torch.nn.Linear(D // 2, 2, bias=False), clients(shape=(D // 2,), classes=2))
    mechanism = law(0.8)
    still = plan(
        rounds=1,
        clients=sampler,
        local=LocalSgd(lr=0.0, epochs=1),
        encode=(Clip(clip_norm, norm=mechanism.norm),),
        release=CentralNoise(mechanism),
    )
    moved = (wide.layout.flatten(wide.model) - final(still, wide)).double().numpy()
    assert_scale(moved, LAWS[type(mechanism)], 0.8 * clip_norm / sampler.expected)


def test_every_mechanism_bills_the_multiplier_it_draws_with() -> None:
    assert Gaussian(0.7).event() == GaussianNoise(0.7)
    assert Laplace(0.7).event() == LaplaceNoise(0.7)
    assert NoiseShares(0.7, at_least=9).event() == GaussianNoise(0.7)
    assert NoiseShares(1.0, at_least=4).message_event() == GaussianNoise(0.5)
    assert LocalNoise(Gaussian(1.0), (3.0, 2.0, 5.0)).event() == GaussianNoise(2.0)


@pytest.mark.parametrize(
    "release",
    [
        CentralNoise(Gaussian(0.7)),
        CentralNoise(Laplace(0.7)),
        NoiseShares(0.7, 2),
        LocalNoise(Gaussian(0.7)),
        LocalNoise(Laplace(0.7)),
        ShuffledNoise(Laplace(0.7), 2),
    ],
    ids=str,
)
def test_the_noise_std_a_release_reports_is_the_one_it_adds(release: Release) -> None:
    assert summed(release).std() == pytest.approx(release.noise_std(np.arange(4), 0), rel=0.05)


def test_postprocessing_is_told_the_noise_std_of_unequal_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[NoiseStd] = []

    def listen(_self: LaplacianSmoothing, mean: Tensor, known: Noised) -> Tensor:
        told.append(known.std)
        return mean

    monkeypatch.setattr(LaplacianSmoothing, "apply", listen)
    own = LocalNoise(Gaussian(1.0), (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    final(plan(rounds=1, release=own, encode=(Clip(10.0),), postprocess=(LaplacianSmoothing(1.0),)), task())
    assert told == [pytest.approx(10 * math.sqrt(1 + 4 + 9 + 16 + 25 + 36) / 6)]


@pytest.mark.parametrize("law", [Gaussian, Laplace])
@pytest.mark.parametrize("noise_multiplier", [0.0, -1.0, math.nan, math.inf])
def test_a_multiplier_that_is_not_positive_and_finite_is_refused(
    law: Callable[[float], Mechanism], noise_multiplier: float
) -> None:
    with pytest.raises(PlanError, match="noise multiplier"):
        law(noise_multiplier)
    with pytest.raises(PlanError, match="noise multiplier"):
        LocalNoise(law(1.0), (1.0, noise_multiplier))
