"""Promise: for release, the way from the sampler to the public grid tells no two clean sums apart.

Rounding to a grid is post-processing if, wherever the clean sum lies, every cell of the grid takes in the same measure
of fresh noise. So fresh noise is swept in steps far finer than a cell, through the real release, and the steps that end
in each cell are counted. Where noise was rounded to a lattice that the grid does not contain (float32, then a factor),
a cell takes in 8 or 9 points of it, by where the clean sum lies, and an attacker adds the log ratios up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.dpsgd.loops import private, train
from tests.tiny import plan
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sordino.accounting.sensitivity import Patterns
from sordino.engines.base import Collected
from sordino.engines.checks import noised_histogram
from sordino.errors import PlanError
from sordino.loop import noised_sum
from sordino.parts import record_solvers
from sordino.parts.correlated_noise import CorrelatedNoise
from sordino.parts.encoding import Clip, Public
from sordino.parts.local_solvers import NoiseStream, Work
from sordino.parts.mechanisms import Gaussian, Histogram, Laplace, Mechanism, secure_exponential
from sordino.parts.record_samplers import AllRecords
from sordino.parts.record_solvers import NoisyLocalSgd
from sordino.parts.releases import (
    CentralNoise,
    LocalNoise,
    NoiseShares,
    Release,
    ShuffledNoise,
    on_grid,
    on_grid_rows,
    own_message,
)
from sordino.parts.samplers import RoundRobin
from sordino.parts.strategies import Banded, BandedSquareRoot, BufferedToeplitz, Identity, Strategy, Tree
from sordino.plan import Plan
from sordino.rng import Secure, SecureGenerator, Seeded

SIZE, STEPS = 1 << 14, 1 << 9  # draws of one sweep; draws per 2^-20 of the noise's scale
UNEVEN = 0.02  # log of a cell's count over the median cell's: 500 draws a cell, one more or less, is .002
ROUNDS, ALLOWED = 100, Patterns(100, 20, 5)
SUMS = (0.0, 0.7390851332151607, -41.21309752)  # clean sums, the same in all coordinates


def ones() -> Any:
    return np.ones(ROUNDS)


STRATEGIES: dict[str, Strategy] = {
    "identity": Identity(),
    "banded_square_root": BandedSquareRoot(5),
    "banded": Banded(5).fitted(ALLOWED, ones),
    "banded with a drift": Banded(5, forget=0.0).fitted(ALLOWED, ones),
    "buffered_toeplitz": BufferedToeplitz(2).fitted(ALLOWED, ones),
    "tree": Tree(),
}
BY_CLIENTS: dict[str, Release] = {
    "local_noise": LocalNoise(Gaussian(1.3)),
    "local_noise, one each": LocalNoise(Gaussian(1.0), (0.7, 1.3, 2.0, 1.1, 0.9, 3.0) * 10),
    "local_noise, laplace": LocalNoise(Laplace(1.3)),
    "noise_shares": NoiseShares(1.3, 3),
    "shuffled_noise": ShuffledNoise(Gaussian(1.3), 3),
}
RELEASES: dict[str, Release] = {
    "central_noise": CentralNoise(Gaussian(1.3)),
    "central_noise, laplace": CentralNoise(Laplace(1.3)),
    **BY_CLIENTS,
    **{f"correlated_noise, {name}": CorrelatedNoise(Gaussian(1.3), one) for name, one in STRATEGIES.items()},
}


class Sweep:
    """Stands in for the samplers: the same number in all coordinates, but where `swept`: then it sweeps over cells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coins, self.swept = np.random.default_rng(5), False
        for law in (Gaussian, Laplace):
            monkeypatch.setattr(law, "sample", self.sample_by(law))

    def sample_by(self, law: type[Mechanism]) -> Callable[..., Any]:
        def sample(noise: Mechanism, size: int, rng: np.random.Generator) -> Any:
            found = np.full(size, self.coins.standard_normal())
            if self.swept:
                found = 1.1 + np.arange(size) * 2.0**-20 / STEPS
            return found * noise.noise_multiplier

        return sample


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Sweep:
    return Sweep(monkeypatch)


def unevenness(released: Tensor) -> float:
    """The largest |log(count of a cell / count of the median cell)|; the sweep begins and ends inside a cell."""
    counts = torch.from_numpy(np.unique(released.double().numpy(), return_counts=True)[1][1:-1]).double()
    assert len(counts) > 4
    assert float(counts.median()) > 100
    return float((counts / counts.median()).log().abs().max())


def planned(release: Release) -> Plan:
    """Clients in turn, so that each rests for 20 rounds and bands of 5 do not meet."""
    law = getattr(release, "mechanism", None)
    return plan(release=release, encode=(Clip(1.0, law.norm if law else 2),), clients=RoundRobin(60, 3), rounds=ROUNDS)


def released(release: Release, clean: float, t: int, sweep: Sweep) -> Tensor:
    """The noised sum of round t as it is released, after t rounds whose noise is remembered."""
    wanted, memory = planned(release), release.init(SIZE)
    collected = Collected(torch.full((SIZE,), clean, dtype=torch.float64), 3)
    for s in range(t + 1):
        sweep.swept = s == t
        found, memory = noised_sum(wanted, collected, np.arange(3), Secure(), s, memory)
    return found


# ---- every release, every strategy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0, 7, 96])
@pytest.mark.parametrize("name", RELEASES)
def test_every_cell_takes_in_the_same_noise_wherever_the_sum_lies(name: str, t: int, sweep: Sweep) -> None:
    assert max(unevenness(released(RELEASES[name], clean, t, sweep)) for clean in SUMS) < UNEVEN


@pytest.mark.parametrize("name", BY_CLIENTS)
def test_every_cell_of_a_clients_own_message_takes_in_the_same_noise(name: str, sweep: Sweep) -> None:
    for clean in (0.0, 0.7390851, -0.25):
        sweep.swept = True
        row = torch.full((SIZE,), clean)
        assert unevenness(own_message(BY_CLIENTS[name], row, 2, 0, Secure().at(0, "x", 2), secure=True)) < UNEVEN


def test_every_release_and_every_strategy_is_among_them() -> None:
    ours = {name for name, part in Release.members.items() if part.__module__.startswith("sordino.")}
    silent = {"forward", "masked_noise", "no_noise"}  # they add nothing
    loop = {"scheduled_noise"}  # of a private loop alone, whose step is tried below
    assert {release.kind for release in RELEASES.values()} == ours - silent - loop
    ours = {name for name, part in Strategy.members.items() if part.__module__.startswith("sordino.")}
    assert {strategy.kind for strategy in STRATEGIES.values()} == ours


@pytest.mark.parametrize("strategy", [None, Banded(3), Banded(3, forget=0.0), Tree()], ids=str)
def test_every_cell_of_a_private_loops_step_takes_in_the_same_noise(
    strategy: Strategy | None, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Tensor] = []

    def spied(noised: Tensor, std: float) -> Tensor:
        found.append(on_grid(noised, std))
        sweep.swept = len(found) == 4  # the last of five steps, whose bands are cut off
        return found[-1]

    monkeypatch.setattr("sordino.dpsgd.optimizer.on_grid", spied)
    rows = TensorDataset(torch.full((60, SIZE), 0.3), torch.arange(60)[:, None] / 60)
    loop = private(nn.Linear(SIZE, 1, bias=False), rows, noise="secure", strategy=strategy)
    train(loop, nn.functional.mse_loss)
    assert len(found) >= 5
    assert unevenness(found[4]) < UNEVEN


def test_every_cell_of_a_local_step_takes_in_the_same_noise(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []

    def spied(rows: Tensor, stds: Tensor) -> Tensor:
        found.append(on_grid_rows(rows, stds))
        return found[-1]

    monkeypatch.setattr(record_solvers, "on_grid_rows", spied)
    solver = NoisyLocalSgd(AllRecords((1,)), clip_norm=0.7, noise_multiplier=1.3, lr=0.1, steps=1)
    sweep.swept = True
    solver.solve(_work(solver, 0.4))
    assert unevenness(found[0][0]) < UNEVEN


def _work(solver: NoisyLocalSgd, slope: float) -> Work:
    """One silo whose clipped gradient is `slope` in every coordinate."""

    class Constant:
        def place(self, start: Tensor, clients: int) -> Tensor:
            return start.repeat(clients, 1)

        def clipped(self, w: Tensor, batch: Any, ball: Any) -> Tensor:
            return torch.full_like(w, slope)

    coins = [NoiseStream(0, Secure().at(0, "local noise", 0), solver)]
    return Work(Constant(), torch.zeros(SIZE), [None], 1, Public(t=0, size=SIZE), coins, None)  # type: ignore[arg-type,list-item]


@pytest.mark.parametrize("release", [CentralNoise(Gaussian(1.0)), LocalNoise(Gaussian(1.0))], ids=["curator", "own"])
def test_every_cell_of_a_preparation_takes_in_the_same_noise(
    release: Release, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Histogram("age", 1.0, 0.0, 1.0, 4096)
    sweep.swept = True
    found = noised_histogram(plan(release=release, prepare=(part,)), part, [(np.arange(4096) + 0.5) / 4096], Secure())
    assert unevenness(found) < UNEVEN


def test_every_cell_of_a_share_in_a_secure_sum_takes_in_the_same_noise() -> None:
    """Uniform numbers in order, as the generator's words, through the draw for release: cells by normal probability."""

    class Ordered(SecureGenerator):
        def integers(self, low: Any, *args: Any, size: Any = None, dtype: Any = np.int64, **more: Any) -> Any:
            return ((np.arange(size, dtype=np.uint64) << np.uint64(64 - 18)) + np.uint64(2**45)).astype(dtype)

    share, step, size = NoiseShares(1.3, 3).share, 2.0**-3, 1 << 18
    for clean in SUMS:
        row = np.full(size, clean)
        steps = share.sample_rounded(row, step, Ordered(np.random.PCG64(0)))
        cells, counts = np.unique(steps, return_counts=True)
        edges = stats.norm.cdf(((cells[:, None] + [-0.5, 0.5]) * step - clean) / share.std)
        assert np.abs(counts - np.diff(edges, axis=1)[:, 0] * size).max() <= 3  # evenly spaced: one at each edge


# ---- and what breaks it is noticed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["banded", "banded with a drift"])
def test_noise_that_is_cast_to_float32_and_scaled_afterwards_is_noticed(
    name: str, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sordino.parts.correlated_noise.is_secure", lambda rng: False)  # the memory stays float32
    assert max(unevenness(released(RELEASES[f"correlated_noise, {name}"], clean, 96, sweep)) for clean in SUMS) > UNEVEN


def test_noise_that_is_scaled_first_and_cast_afterwards_is_even(sweep: Sweep) -> None:
    """The grid contains that lattice: a cell takes in as many of its points wherever the sum lies."""
    noise = torch.from_numpy(1.1 + np.arange(SIZE) * 2.0**-20 / STEPS)
    for clean in SUMS[1:]:
        assert unevenness(on_grid((noise * 0.73).float().double() + clean, 1.0)) < UNEVEN
        assert unevenness(on_grid(noise.float().double() * 0.73 + clean, 1.0)) > UNEVEN


def test_noise_in_float32_never_reaches_the_grid() -> None:
    class Careless(CentralNoise, kind="careless_in_a_test"):
        def on_server(self, total: Tensor, rng: np.random.Generator) -> Tensor:
            return super().on_server(total, rng).float()

    wanted = plan(release=Careless(Gaussian(1.0)))
    collected = Collected(torch.zeros(4, dtype=torch.float64), 3)
    with pytest.raises(PlanError, match="float64 from the noise sampler to the rounding"):
        noised_sum(wanted, collected, np.arange(3), Secure(), 0, {})


# ---- the attack of old -----------------------------------------------------------------------------------------------


def at_most(x: Any) -> Any:
    """The number, in order, of the largest float32 that is at most x."""
    near = x.astype(np.float32)
    near = np.where(near > x, np.nextafter(near, np.float32(-np.inf)), near)
    bits = near.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def log_odds(seen: Any, first: Any, second: Any, scale: float, grid: float) -> float:
    """For the first of two candidate sums: log ratios of how many float32 numbers times `scale` lead to each cell."""

    def counts(clean: Any) -> Any:
        middle, half = (seen - clean) / scale, grid / 2 / scale
        return np.maximum(at_most(middle + half) - at_most(middle - half), 1)

    return float(np.sum(np.log(counts(first) / counts(second))))


def test_an_attacker_who_counts_float32_numbers_learns_nothing_from_the_last_rounds() -> None:
    """Two candidate sums 1 apart, d = 100,000, round 96 of 100: log odds of +-200 where the memory was float32."""
    size, coins = 100_000, np.random.default_rng(3)
    bands = STRATEGIES["banded"]
    assert isinstance(bands, Banded)
    release = CorrelatedNoise(Gaussian(1.0), bands)
    first = coins.standard_normal(size) * 0.003
    second = first + coins.standard_normal(size) * size**-0.5
    step = partial(noised_sum, planned(release), cohort=np.arange(1), streams=Secure())
    memory = release.init(size)
    for t in range(96):
        _, memory = step(Collected(torch.zeros(size, dtype=torch.float64), 1), t=t, memory=memory)
    scale, std = bands.scale(96), float(np.linalg.norm(bands.noise_matrix(97)[96]))
    odds = []
    for clean in (first, second):
        kept = {name: held.clone() for name, held in memory.items()}
        found, _ = step(Collected(torch.from_numpy(clean), 1), t=96, memory=kept)
        odds.append(log_odds(found.numpy(), first, second, scale, 2.0 ** (math.floor(math.log2(std)) - 20)))
    assert abs(odds[0] - odds[1]) < 150


# ---- the samplers themselves -----------------------------------------------------------------------------------------

CELL = 2.0**-20.5  # of the grid, at least, in units of Laplace's scale


class Scripted(SecureGenerator):
    """Bits of our choice: words of zeros so many times, then a one; the uniform is given."""

    def __init__(self, zeros: int, uniform: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.zeros, self.given = zeros, uniform

    def integers(self, low: Any, *args: Any, size: Any = None, dtype: Any = np.int64, **more: Any) -> Any:
        if low != 2**64:
            return np.ones(size, dtype=dtype)
        word, self.zeros = (2**self.zeros, 0) if self.zeros < 64 else (0, self.zeros - 64)
        return np.full(size, word, dtype=dtype)

    def random(self, size: Any = None, *args: Any, **more: Any) -> Any:
        return np.full(size, self.given)


def drawn(halvings: int, uniform: float) -> float:
    """The secure Laplace draw of these bits."""
    return float(Laplace(1.0).sample(1, Scripted(halvings, uniform))[0])


@pytest.mark.parametrize("halvings", [0, 1, 52, 53, 63, 64, 200])
def test_no_cell_of_the_grid_is_beyond_or_between_the_draws_of_laplace(halvings: int) -> None:
    """numpy's own ends at 53 ln 2 and leaves gaps wider than a cell from 33 ln 2 on."""
    least = 2.0**-53
    apart = 2.0**-50 * (halvings + 1)
    for uniform in (0.0, 0.25, 0.5, 0.9, 1 - 2 * least):
        assert 0 <= drawn(halvings, uniform + least) - drawn(halvings, uniform) < apart < CELL / 2**20
    assert 0 <= drawn(halvings + 1, 0.0) - drawn(halvings, 1 - least) < apart
    assert drawn(halvings, 0.0) == pytest.approx(halvings * math.log(2), rel=1e-15)


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_the_secure_draw_of_laplace_has_the_law_of_laplace(scale: float) -> None:
    sample = Laplace(scale).sample(400_000, Secure().at(0, "server noise"))
    assert stats.kstest(sample, stats.laplace(scale=scale).cdf).pvalue > 1e-9
    assert np.mean(np.abs(sample) > 6 * scale) == pytest.approx(math.exp(-6), rel=0.25)
    assert stats.kstest(secure_exponential(400_000, Secure().at(0, "x")), stats.expon.cdf).pvalue > 1e-9


def test_draws_of_a_simulation_are_those_of_numpy() -> None:
    found = Laplace(0.5).sample(5, Seeded(3).at(0, "server noise"))
    assert found.tolist() == Seeded(3).at(0, "server noise").laplace(scale=0.5, size=5).tolist()


def test_what_numpys_ziggurat_leaves_out_is_beyond_ten_deviations() -> None:
    """The tail is r + log(1 / U) / r for U of 53 bits: gaps wider than 2^-21, the finest cell, begin at 10.08."""
    r = 3.6541528853610088
    widest = 2.0**21 / r  # the j in U = j 2^-53 whose neighbour is one cell away
    begin = r + (53 * math.log(2) - math.log(widest)) / r
    assert begin == pytest.approx(10.08, abs=0.005)
    assert 2 * stats.norm.sf(begin) < 1e-23
