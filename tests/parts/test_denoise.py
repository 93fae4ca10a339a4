"""Promises of the denoisers: their formulas, what they are good for, a noise level that is exact, and no cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.tiny import noise, plan, task
from torch import Tensor, nn

from sordino.certificate.build import certificate
from sordino.certificate.facts import Facts
from sordino.errors import PlanError
from sordino.layout import Layout
from sordino.loop import run
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.encoding import (
    Adaptive,
    Clip,
    JamesStein,
    LaplacianSmoothing,
    Noised,
    Postprocess,
    SoftThreshold,
    WhenNoisy,
)
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.releases import CentralNoise, LocalNoise, NoiseShares, NoNoise, ShuffledNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson, RoundRobin
from sordino.parts.schedules import Decay
from sordino.parts.server_optimizers import Sgd
from sordino.parts.sparsify import PublicMask, SparsifyMean
from sordino.parts.strategies import BandedSquareRoot, Identity, Strategy, Tree
from sordino.plan import Plan
from sordino.recipes import dp_fed_ls
from sordino.rng import Seeded
from sordino.task import Task

DENOISERS: list[Postprocess] = [
    JamesStein(), JamesStein(positive=False), SoftThreshold(), SparsifyMean(0.4), LaplacianSmoothing(1.0),
]  # fmt: skip


def known(std: float, model: nn.Module | None = None) -> Noised:
    return Noised(Layout.of(model or nn.Linear(20, 5)), std, t=0)


def error(denoiser: Postprocess, signal: Tensor, std: float, draws: int = 60) -> float:
    """Mean squared error over draws of the noise."""
    model = nn.Linear(len(signal), 1, bias=False)
    found = [
        float((denoiser.apply(signal + std * noise(len(signal), seed=i), known(std, model)) - signal).square().sum())
        for i in range(draws)
    ]
    return float(np.mean(found))


class Nothing(LaplacianSmoothing):
    """The raw estimate."""


RAW = Nothing(0.0)


# ---- formulas -------------------------------------------------------------------------------------------------------


def test_james_stein_is_its_formula_tensor_by_tensor() -> None:
    at = known(0.5)
    mean = noise(at.layout.size, seed=4) * 2
    weight, bias = mean[:100].double(), mean[100:].double()
    wanted = [part * (1 - (len(part) - 2) * 0.25 / float(part @ part)) for part in (weight, bias)]
    assert torch.allclose(JamesStein(positive=False).apply(mean, at).double(), torch.cat(wanted), atol=1e-6)
    assert torch.allclose(JamesStein().apply(mean, at).double(), torch.cat(wanted), atol=1e-6)
    assert not torch.allclose(torch.cat(wanted), mean.double(), atol=1e-2)


def test_the_positive_part_is_zero_where_the_plain_factor_turns_round() -> None:
    at, weak = known(5.0), noise(105)
    plain = JamesStein(positive=False).apply(weak, at)
    assert float(plain[:100] @ weak[:100]) < 0
    assert torch.equal(JamesStein().apply(weak, at)[:100], torch.zeros(100))


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("d", [1, 2])
def test_james_stein_leaves_one_or_two_entries_alone(d: int, positive: bool) -> None:
    """d - 2 < 0 would blow a small entry up: y + nu^2 / y."""
    mean, at = torch.full((d,), 1e-3), known(1.0, nn.Linear(d, 1, bias=False))
    assert torch.equal(JamesStein(positive).apply(mean, at), mean)


def test_soft_threshold_is_its_formula_tensor_by_tensor() -> None:
    at, mean = known(0.3), noise(105, seed=5)
    found = SoftThreshold().apply(mean, at)
    for part, back in ((mean[:100], found[:100]), (mean[100:], found[100:])):
        level = 0.3 * math.sqrt(2 * math.log(len(part)))
        assert torch.allclose(back, part.sign() * (part.abs() - level).clamp(min=0), atol=1e-6)
    assert 0 < int((found == 0).sum()) < 105


def test_the_mean_keeps_its_largest_entries() -> None:
    mean = torch.tensor([3.0, -5.0, 0.5, -0.1, 4.0, 0.0, 1.0])
    assert SparsifyMean(0.4).apply(mean, known(1.0)).tolist() == [3.0, -5.0, 0.0, 0.0, 4.0, 0.0, 0.0]
    assert torch.equal(SparsifyMean(1.0).apply(mean, known(1.0)), mean)
    with pytest.raises(PlanError, match="keep"):
        SparsifyMean(0.0)


@pytest.mark.parametrize("denoiser", DENOISERS, ids=str)
def test_a_zero_mean_stays_zero_and_the_input_is_not_changed(denoiser: Postprocess) -> None:
    assert torch.equal(denoiser.apply(torch.zeros(105), known(1.0)), torch.zeros(105))
    mean = noise(105)
    denoiser.apply(mean, known(1.0))
    assert torch.equal(mean, noise(105))


@pytest.mark.parametrize("denoiser", [JamesStein(), SoftThreshold()], ids=str)
def test_without_noise_nothing_is_shrunk(denoiser: Postprocess) -> None:
    assert torch.allclose(denoiser.apply(noise(105), known(0.0)), noise(105), atol=1e-6)


# ---- what they are good for -----------------------------------------------------------------------------------------


def test_james_stein_beats_the_raw_estimate_of_a_small_signal() -> None:
    small = 0.3 * noise(200, seed=99)
    raw, plain, positive = (error(d, small, 1.0) for d in (RAW, JamesStein(positive=False), JamesStein()))
    assert positive <= plain * (1 + 1e-9)
    assert plain < 0.3 * raw
    assert raw == pytest.approx(200, rel=0.1)


# ---- the noise level is exact ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spy(Postprocess, kind="spy of a test"):
    """Keeps what it was told, and the mean."""

    seen: list[tuple[Noised, Tensor]] = field(default_factory=list)

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        self.seen.append((known, mean.clone()))
        return mean


FEW = FixedSize(6, 4)
SHUFFLED = {"clients": FEW, "release": ShuffledNoise(Gaussian(2.0), at_least=3)}
RELEASES: dict[str, dict[str, Any]] = {
    "central": {"release": CentralNoise(Gaussian(0.7)), "clients": Poisson(6, 0.4)},
    "central laplace": {"release": CentralNoise(Laplace(0.7)), "encode": (Clip(0.3, norm=1),)},
    "shares": {"release": NoiseShares(0.7, at_least=2), "clients": FEW},
    "local": {"release": LocalNoise(Gaussian(0.7)), "clients": Poisson(6, 0.6)},
    "shuffled": SHUFFLED,
    "a public mask": {"release": CentralNoise(Gaussian(0.7)), "encode": (PublicMask(0.5), Clip(0.3))},
    "an adaptive clip norm": {"release": CentralNoise(Gaussian(0.7)), "encode": (Clip(Adaptive(0.3, share=0.6)),)},
    "a falling clip norm": {"release": CentralNoise(Gaussian(0.7)), "encode": (Clip(Decay(0.3, 0.5)),)},
    "a tree's noise": {"release": CorrelatedNoise(Gaussian(0.7), Tree()), "clients": RoundRobin(6, 6)},
    "bands' noise": {"release": CorrelatedNoise(Gaussian(0.7), BandedSquareRoot(4)), "clients": RoundRobin(6, 6)},
    "two clips": {"release": CentralNoise(Gaussian(0.7)), "encode": (Clip(0.3), Clip(0.2))},
}


@pytest.mark.parametrize("name", RELEASES)
def test_the_known_deviation_is_that_of_the_noise_in_one_coordinate(name: str) -> None:
    spy = Spy()
    data = Task.of(nn.Linear(150, 100), [(torch.ones(1, 150), torch.tensor([0]))] * 6)
    settings = {"clients": Everyone(6), "encode": (Clip(0.3),), **RELEASES[name]}
    still = plan(rounds=6, local=LocalSgd(lr=0.0, steps=1), postprocess=(spy,), **settings)
    list(run(still, data, streams=Seeded(1)))
    assert len(spy.seen) == 6
    for at, mean in spy.seen:
        sent = mean[mean != 0]
        assert len(sent) == (math.ceil(0.5 * len(mean)) if name == "a public mask" else len(mean))
        told = at.each()[mean != 0]
        assert bool((told > 0).all())
        tolerance = 0.04 if "laplace" in name else 0.03
        assert float((sent / told).square().mean().sqrt()) == pytest.approx(1.0, rel=tolerance)


@pytest.mark.parametrize("strategy", [Tree(), Identity()], ids=str)
def test_a_denoiser_of_correlated_noise_leaves_the_signal_of_early_rounds(strategy: Strategy) -> None:
    """Told the deviation of late rounds in early ones too, James-Stein took the whole mean: accuracy .11 for .91."""
    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    x, y = x[order].float() / 16, y[order]
    held = list(zip(torch.split(x[:1400], 7), torch.split(y[:1400], 7), strict=True))
    blank = nn.Linear(64, 10)
    nn.init.zeros_(blank.weight)
    nn.init.zeros_(blank.bias)
    training = plan(
        rounds=20,
        clients=RoundRobin(len(held), 50),
        local=LocalSgd(lr=0.5, epochs=2),
        release=CorrelatedNoise(Gaussian(1.0), strategy),
        server=Sgd(lr=2.0),
        postprocess=(JamesStein(),),
    )
    *_, last = run(training, Task.of(blank, held, test=(x[1400:], y[1400:])), streams=Seeded(0), eval_every=20)
    assert last.metrics["accuracy"] > 0.85


def test_no_noise_is_known_to_be_none() -> None:
    spy = Spy()
    data = Task.of(nn.Linear(4, 3), [(torch.ones(1, 4), torch.tensor([0]))] * 6)
    list(run(plan(rounds=1, postprocess=(spy,), release=NoNoise()), data, streams=Seeded(1)))
    assert [at.std for at, _ in spy.seen] == [0.0]


# ---- no cost --------------------------------------------------------------------------------------------------------


def cost(planned: Plan) -> list[float | None]:
    return [line["epsilon"] for line in certificate(planned, Facts(1e-3, "simulation", 2))["adversaries"]]


def test_no_denoiser_changes_the_bill_or_the_certificates_epsilon() -> None:
    bare, sampled = plan(), plan(clients=Poisson(6, 0.5))
    assert cost(bare)[0]
    for denoiser in DENOISERS:
        assert plan(clients=Poisson(6, 0.5), postprocess=(denoiser,)).cost() == sampled.cost()
        assert cost(plan(postprocess=(denoiser,))) == cost(bare)


# ---- another order of flattening ------------------------------------------------------------------------------------


def dense_smoothing(signal: Tensor, strength: float) -> Tensor:
    d = len(signal)
    shift = torch.roll(torch.eye(d, dtype=torch.float64), 1, 0)
    matrix = torch.eye(d, dtype=torch.float64) * (1 + 2 * strength) - strength * (shift + shift.T)
    solved: Tensor = torch.linalg.solve(matrix, signal.double())
    return solved


@pytest.mark.parametrize("order", list(permutations(range(4)))[1::5])
def test_an_order_permutes_smooths_densely_and_permutes_back(order: tuple[int, ...]) -> None:
    model = nn.Conv2d(3, 4, (2, 5))
    at = known(1.0, model)
    mean = noise(at.layout.size, seed=6)
    found = LaplacianSmoothing(1.5, order).apply(mean, at)
    weight = mean[:120].view(4, 3, 2, 5)
    turned = weight.permute(order)
    smooth = dense_smoothing(turned.reshape(-1), 1.5).view(turned.shape)
    wanted = torch.empty(4, 3, 2, 5, dtype=torch.float64)
    for place in np.ndindex(4, 3, 2, 5):
        wanted[place] = smooth[tuple(place[axis] for axis in order)]
    assert torch.allclose(found[:120].double(), wanted.reshape(-1), atol=1e-5)
    assert torch.allclose(found[120:].double(), dense_smoothing(mean[120:], 1.5), atol=1e-5)  # biases as they lie
    assert not torch.allclose(found[:120], LaplacianSmoothing(1.5).apply(mean, at)[:120], atol=1e-2)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 0, 1, 2), (1, 2, 3, 4)])
def test_an_order_that_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="order"):
        LaplacianSmoothing(1.0, order)


def test_smoothing_by_the_noise_to_signal_ratio_of_the_plan_and_the_model() -> None:
    """z sqrt(d) / S of 100 clients and 105 parameters: below 18 the mean stays, above it is smoothed."""
    layout, smooth = Layout.of(nn.Linear(20, 5)), LaplacianSmoothing(1.0)
    mean = torch.linspace(-1, 1, layout.size)
    for z, smoothed in ((100.0, False), (200.0, True)):
        known = Noised(layout, z * 0.5 / 100, 0, clip_norm=0.5)
        assert known.noise_to_signal == pytest.approx(z * 105**0.5 / 100)
        found = WhenNoisy(smooth).apply(mean, known)
        assert torch.equal(found, smooth.apply(mean, known) if smoothed else mean)
    assert torch.equal(WhenNoisy(smooth).apply(mean, Noised(layout, 1e9, 0)), mean)  # nothing is known of the signal


@pytest.mark.parametrize(("noise_multiplier", "smoothed"), [(1.0, False), (60.0, True)])
def test_a_run_of_dp_fed_ls_smooths_where_the_ratio_is_large(noise_multiplier: float, smoothed: bool) -> None:
    """The tiny task has 15 parameters and six clients: the ratio is 0.65 z."""
    usual: dict[str, Any] = {"rounds": 1, "clients": Everyone(6), "lr": 0.1, "clip_norm": 0.5}
    usual["noise_multiplier"] = noise_multiplier
    plans = [dp_fed_ls(**usual), dp_fed_ls(**usual, denoiser=LaplacianSmoothing(1.0))]
    runs = [list(run(one, task()))[-1].state for one in plans]
    same = torch.equal(runs[0].memory["params"], runs[1].memory["params"])
    assert same == smoothed
