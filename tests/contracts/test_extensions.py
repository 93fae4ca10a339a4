"""Promise: parts written outside, from the public names alone, run, are certified and are audited like ours.

Each has a sabotaged twin that is caught, or of which the audit says what it has not examined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import bdtrc
from tests import tiny

import sordino as so
from sordino.accounting.events import GaussianNoise, PoissonSampled
from sordino.accounting.pairs import Orders, Response

DELTA = 1e-3
FAMILIES: tuple[type[so.parts.Part], ...] = (
    so.parts.ServerOptimizer,
    so.parts.Postprocess,
    so.parts.Sampler,
    so.parts.Strategy,
    so.parts.Mechanism,
    so.parts.Step,
    so.parts.Event,
)


@pytest.fixture(autouse=True, scope="module")
def forgotten() -> Iterator[None]:
    """What is defined here is defined nowhere else."""
    yield
    for family in FAMILIES:
        for kind in [kind for kind in family.members if kind.endswith(" of a stranger")]:
            family.members.pop(kind)


def certified(plan: so.Plan, clients: int) -> dict[str, Any]:
    """The certificate of a run, which names every part that is not ours."""
    return so.train(plan, tiny.task(sizes=(3,) * clients), delta=DELTA).certificate


def audited(plan: so.Plan) -> tuple[set[str], set[str]]:
    """The questions of the audit that failed, and those that it could not examine."""
    found = so.train(plan, tiny.task(sizes=(3,) * plan.clients.population), delta=DELTA).audit("mechanism")
    said = found["not_examined"]
    questions = {one["question"] for one in found["behaviour"] if not one["passed"]}
    silent = {question for question in questions if any(one.startswith(f"{question}: ") for one in said)}
    beaten = {one["adversary"] for one in found["mechanism"] if not one["passed"]}
    return questions - silent | beaten, silent


# ---- a server optimizer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lion(so.parts.ServerOptimizer, kind="lion of a stranger"):
    """w <- w - lr sign(beta1 m + (1 - beta1) g),  m <- beta2 m + (1 - beta2) g  (Chen et al. 2023)."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    lie: bool = False

    def init(self, params: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"params": params.clone(), "momentum": torch.zeros_like(params)}

    def step(self, memory: Any, mean: torch.Tensor, t: int) -> dict[str, torch.Tensor]:
        momentum = memory["momentum"]
        way = torch.sign(self.beta1 * momentum + (1 - self.beta1) * mean)
        after = self.beta2 * momentum + (1 - self.beta2) * mean
        return {"params": memory["params"] - self.lr * way, "momentum": after[:1] if self.lie else after}


def test_a_lion_server() -> None:
    plan = tiny.plan(server=Lion())
    made = certified(plan, 6)
    assert made["epsilon"] == certified(tiny.plan(), 6)["epsilon"]  # post-processing
    assert [one["kind"] for one in made["foreign_parts"]] == ["lion of a stranger"]
    assert audited(plan) == (set(), set())
    with pytest.raises(so.errors.PartError, match="lion of a stranger"):
        certified(tiny.plan(server=Lion(lie=True)), 6)


# ---- a denoiser ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wiener(so.parts.Postprocess, kind="wiener of a stranger"):
    """mean * max(0, 1 - std^2 / mean square of each tensor): the linear filter of least mean squared error."""

    lie: bool = False
    needs_noise: ClassVar[bool] = True

    def apply(self, mean: torch.Tensor, known: so.parts.Noised) -> torch.Tensor:
        std, found = known.each(), mean.clone()
        for slot in known.layout.slots:
            part, noise = mean[slot.start : slot.stop], std[slot.start : slot.stop].square().mean()
            found[slot.start : slot.stop] = part * float((1 - noise / part.square().mean()).clamp(min=0))
        return found[:-1] if self.lie else found


def test_a_wiener_denoiser() -> None:
    plan = tiny.plan(postprocess=(Wiener(),))
    assert certified(plan, 6)["epsilon"] == certified(tiny.plan(), 6)["epsilon"]
    assert audited(plan) == (set(), set())
    layout = tiny.task().layout
    clean, noise = torch.ones(layout.size), tiny.noise(layout.size, seed=3)
    found = Wiener().apply(clean + noise, so.parts.Noised(layout, 1.0, 0))
    assert float((found - clean).norm()) < 0.8 * float(noise.norm())
    with pytest.raises(so.errors.PartError, match="wiener of a stranger"):
        certified(tiny.plan(postprocess=(Wiener(lie=True),)), 6)


# ---- a sampler -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regions(so.parts.Sampler, kind="regions of a stranger"):
    """`picked` of `regions` at random, then each of their clients with probability `rate`; only `rate` is amplified."""

    population: int
    regions: int
    picked: int
    rate: float
    states: bool = True
    lie: bool = False
    relation: ClassVar[so.parts.Relation] = "add_remove"
    amplifies: ClassVar[bool] = True

    @property
    def expected(self) -> float:
        return self.population * self.picked / self.regions * self.rate

    def draw(self, t: int, rng: np.random.Generator) -> Any:
        chosen = rng.permutation(self.regions)[: self.picked + self.lie]
        inside = np.flatnonzero(np.isin(np.arange(self.population) % self.regions, chosen))
        return inside[rng.random(len(inside)) < self.rate]

    def amplify(self, event: so.parts.Event) -> so.parts.Event:
        return PoissonSampled(self.rate, event)

    def max_participations(self, rounds: int) -> int:
        return rounds

    def law(self) -> so.parts.SamplingLaw | None:
        if not self.states:
            return None
        inside = self.population // self.regions * self.picked
        return so.parts.SamplingLaw(
            self.population,
            self.expected / self.population,
            independent=False,
            size_sf=lambda t, k: float(bdtrc(k, inside, self.rate)),
        )


def test_a_sampler_of_two_levels() -> None:
    regions = Regions(40, 4, 2, 0.5)
    plan = tiny.plan(clients=regions)
    assert certified(plan, 40)["epsilon"] <= certified(tiny.plan(clients=so.Poisson(40, 0.5)), 40)["epsilon"] * (
        1 + 1e-9
    )
    assert audited(plan) == (set(), set())
    failed, _ = audited(replace(plan, clients=replace(regions, lie=True)))
    assert "cohort: spread of sizes" in failed
    failed, silent = audited(replace(plan, clients=replace(regions, states=False)))
    assert failed == set()
    assert "cohort: sampling" in silent


# ---- a strategy of correlated noise ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Geometric(so.parts.Toeplitz, kind="geometric of a stranger"):
    """c_j = decay^j, `width` of them: every round takes back a part of the last rounds' noise."""

    decay: float
    width: int = 4
    lie: float = 1.0

    def column(self, rounds: int) -> Any:
        return self.decay ** np.arange(min(self.width, rounds))

    def step(self, fresh: Any, memory: Any) -> Any:
        noise, after = super().step(fresh, memory)
        return noise * self.lie, after


def test_a_toeplitz_strategy_of_one_method() -> None:
    release = so.parts.CorrelatedNoise(so.parts.Gaussian(2.0), Geometric(0.5))
    plan = tiny.plan(rounds=12, clients=so.RoundRobin(24, 6), release=release)
    assert plan.fitted() is plan
    (event, count), *_ = plan.cost().line("cohort").entries
    assert isinstance(event, GaussianNoise)
    column = 0.5 ** np.arange(4)
    assert event.noise_multiplier == pytest.approx(2.0 / (math.sqrt(3) * float(np.linalg.norm(column))))
    assert count == 1
    assert certified(plan, 24)["epsilon"] > 0
    assert audited(plan) == (set(), set())
    lying = replace(release, strategy=Geometric(0.5, lie=0.7))
    failed, _ = audited(replace(plan, release=lying))
    assert any(one.startswith("noise") for one in failed)


# ---- a mechanism, with its event and the rounding that it needs ------------------------------------------------------


@dataclass(frozen=True)
class Truncate(so.parts.Step, kind="truncate of a stranger"):
    """grid * trunc(x / grid), on the grid of the noise. Bound: no entry grows, so a client's bound stays."""

    grid: float

    def encode(self, rows: torch.Tensor, public: so.parts.Public, slopes: Any = None) -> torch.Tensor:
        return torch.trunc(rows / self.grid) * self.grid

    def decode(self, mean: torch.Tensor, public: so.parts.Public) -> torch.Tensor:
        return mean

    def bound(self, before: so.parts.Bound) -> so.parts.Bound:
        if before.unit == "record":
            raise so.errors.PlanError("record bound", "truncation under unit record", "client-level clipping")
        return before

    def decoded_noise_std(self, std: Any, public: so.parts.Public) -> Any:
        return std


@dataclass(frozen=True)
class PureRelease(so.parts.Event, kind="pure of a stranger"):
    """A release whose privacy loss is at most `epsilon` for a move of 1: randomised response dominates it."""

    epsilon: float

    def pairs(self, relation: so.parts.Relation, share: float = 0.0) -> tuple[Orders, ...]:
        return (Orders.symmetric(Response(self.pure(relation))),)

    def pure(self, relation: so.parts.Relation) -> float:
        return self.epsilon * (2 if relation == "replace_one" else 1)


@dataclass(frozen=True)
class OnGrid:
    """A distribution of scipy on multiples of `grid`."""

    inner: Any
    grid: float

    def cdf(self, x: Any, /) -> Any:
        return np.asarray(self.inner.cdf(x / self.grid))

    def sf(self, x: Any, /) -> Any:
        return np.asarray(self.inner.sf(x / self.grid))


@dataclass(frozen=True)
class DiscreteLaplace(so.parts.Mechanism, kind="discrete laplace of a stranger"):
    """P[k grid] ~ exp(-|k| grid / noise_multiplier) per coordinate, for ||x||_1 <= 1 on the grid."""

    noise_multiplier: float
    grid: float = 0.25
    states: bool = True
    lie: float = 1.0

    @property
    def norm(self) -> Any:
        return 1

    @property
    def std(self) -> float:
        return float(stats.dlaplace(self.grid / self.noise_multiplier).std() * self.grid)

    def event(self) -> so.parts.Event:
        return PureRelease(1.0 / self.noise_multiplier)

    def distribution(self) -> so.parts.Distribution | None:
        return OnGrid(stats.dlaplace(self.grid / self.noise_multiplier), self.grid) if self.states else None

    def sample(self, size: int, rng: np.random.Generator) -> Any:
        p = -math.expm1(-self.grid / (self.noise_multiplier * self.lie))
        return self.grid * (rng.geometric(p, size) - rng.geometric(p, size)).astype(np.float64)


def discrete(**changes: Any) -> so.Plan:
    noise = DiscreteLaplace(2.0, **changes)
    encode = (so.parts.Clip(1.0, norm=1), Truncate(noise.grid))
    return tiny.plan(rounds=5, clients=so.Poisson(40, 0.25), encode=encode, release=so.parts.CentralNoise(noise))


def test_a_discrete_laplace_mechanism_under_poisson_sampling() -> None:
    found = certified(discrete(), 40)
    assert {one["kind"] for one in found["foreign_parts"]} >= {
        "discrete laplace of a stranger",
        "truncate of a stranger",
    }
    one_round = math.log1p(0.25 * math.expm1(0.5))
    assert 0 < found["epsilon"] <= 5 * one_round + 1e-6  # amplified, and no more than pure composition
    assert audited(discrete()) == (
        set(),
        {"noise along the sum"},
    )  # no distribution of a sum over coordinates is stated
    failed, _ = audited(discrete(lie=0.8))
    assert "noise of all coordinates" in failed
    failed, silent = audited(discrete(states=False))
    assert failed == set()
    assert "noise of the sums" in silent
