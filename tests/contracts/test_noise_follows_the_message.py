"""What a denoiser is told of the noise is what there is, whatever steps the message went through."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sordino.accounting.bounds import Bound
from sordino.errors import PlanError
from sordino.loop import run
from sordino.parts.encoding import (
    Adaptive,
    Clip,
    JamesStein,
    LaplacianSmoothing,
    Noised,
    NoiseStd,
    Postprocess,
    Public,
    SoftThreshold,
    Step,
)
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian, Laplace
from sordino.parts.record_samplers import AllRecords
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd
from sordino.parts.releases import CentralNoise, Forward, LocalNoise, NoiseShares, Release, ShuffledNoise
from sordino.parts.samplers import Everyone, FixedSize, Sampler
from sordino.parts.schedules import Decay
from sordino.parts.server_optimizers import Sgd
from sordino.parts.sparsify import PublicMask, ReleasedMask, SparsifyMean, SparsifyUpdate
from sordino.plan import Plan
from sordino.rng import Seeded
from sordino.task import Task

CLIENTS, WIDTH, ROUNDS = 6, 200, 3


@dataclass(frozen=True)
class Halve(Step, kind="halve_in_a_noise_test"):
    """x / 2: a stranger's step. Bound: what was inside the unit ball stays inside."""

    def encode(self, rows: Tensor, public: Public, slopes: Tensor | None = None) -> Tensor:
        return rows / 2

    def decode(self, mean: Tensor, public: Public) -> Tensor:
        return mean * 2

    def bound(self, before: Bound) -> Bound:
        return before

    def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
        return std * 2


@dataclass(frozen=True)
class Weigh(Halve, kind="weigh_in_a_noise_test"):
    """Coordinate i is divided by 1 + i / d, so the noise differs from coordinate to coordinate."""

    def weights(self, size: int) -> Tensor:
        return 1 + torch.arange(size) / size

    def encode(self, rows: Tensor, public: Public, slopes: Tensor | None = None) -> Tensor:
        return rows / self.weights(rows.shape[-1])

    def decode(self, mean: Tensor, public: Public) -> Tensor:
        return mean * self.weights(len(mean))

    def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
        return std * self.weights(len(std) if isinstance(std, Tensor) else public.size)


@dataclass(frozen=True)
class Spy(Postprocess, kind="spy_in_a_noise_test"):
    """Keeps the mean, which is noise alone, in units of what it was told."""

    seen: list[Tensor] = field(default_factory=list)
    needs_noise: ClassVar[bool] = True

    def apply(self, mean: Tensor, known: Noised) -> Tensor:
        std = known.each()
        assert not bool(mean[std == 0].any())
        self.seen.append(mean[std > 0].double() / std[std > 0])
        return mean


def told(plan: Plan, before: tuple[Postprocess, ...] = ()) -> Tensor:
    """The noise of some rounds of still clients, in units of its declared deviation."""
    spy = Spy()
    data = [(torch.zeros(1, WIDTH), torch.tensor([0.0]))] * CLIENTS
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 1))
    task = Task.of(model, data, loss=lambda out, y: 0 * out[:, 0])
    list(run(replace(plan, postprocess=(*before, spy)), task, streams=Seeded(5)))
    assert len(spy.seen) == ROUNDS
    return torch.cat(spy.seen)


def plan(
    *encode: Step, release: Release | None = None, clients: Sampler | None = None, local: LocalSgd | None = None
) -> Plan:
    return Plan(
        rounds=ROUNDS,
        clients=clients or Everyone(CLIENTS),
        local=local or LocalSgd(lr=0.1, steps=1),
        encode=encode,
        release=release or CentralNoise(Gaussian(0.7)),
        server=Sgd(),
    )


STEPS: dict[str, Step] = {
    "mask": PublicMask(0.5),
    "released mask": PublicMask(0.6, ReleasedMask()),
    "top k": SparsifyUpdate(0.5),
    "halve": Halve(),
    "weigh": Weigh(),
}
CLIPS = {"clip": Clip(0.3), "falling": Clip(Decay(0.3, 0.5)), "adaptive": Clip(Adaptive(0.3, share=0.6))}
CHAINS = {
    f"{' '.join(names)} {clip}": (*(STEPS[name] for name in names), last)
    for clip, last in CLIPS.items()
    for names in [(), *((name,) for name in STEPS), *permutations(("mask", "top k", "halve"), 2)]
} | {"clip halve": (Clip(0.3), Halve()), "clip mask": (Clip(0.3), PublicMask(0.5)), "two clips": (Clip(0.3), Clip(0.2))}


def test_every_chain_of_steps_declares_the_noise_it_leaves() -> None:
    for name, chain in CHAINS.items():
        scale = float(told(plan(*chain)).square().mean().sqrt())
        assert scale == pytest.approx(1.0, rel=0.02), name


RELEASES: dict[str, tuple[Release, Sampler]] = {
    "laplace": (CentralNoise(Laplace(0.7)), Everyone(CLIENTS)),
    "shares": (NoiseShares(0.7, at_least=2), FixedSize(CLIENTS, 4)),
    "local": (LocalNoise(Gaussian(0.7)), FixedSize(CLIENTS, 3)),
    "local, each its own": (LocalNoise(Gaussian(0.7), (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)), FixedSize(CLIENTS, 2)),
    "shuffled": (ShuffledNoise(Gaussian(2.0), at_least=3), FixedSize(CLIENTS, 4)),
}


@pytest.mark.parametrize("name", RELEASES)
def test_every_release_declares_the_noise_of_the_cohort_that_came(name: str) -> None:
    release, clients = RELEASES[name]
    chain = (PublicMask(0.5), Clip(0.3, norm=1 if name == "laplace" else 2))
    noise = told(plan(*chain, release=release, clients=clients))
    for part in noise.view(ROUNDS, -1):  # each round by itself: cohorts differ
        assert float(part.square().mean().sqrt()) == pytest.approx(1.0, rel=0.02)


def test_a_record_level_message_is_told_in_its_own_unit() -> None:
    local = BatchGradient(AllRecords((1,)), clip_norm=0.25)
    noise = told(replace(plan(Clip(0.3)), encode=(), local=local, release=LocalNoise(Gaussian(0.5))))
    assert float(noise.square().mean().sqrt()) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("chain", [(Clip(0.3),), (PublicMask(0.5), Clip(0.3)), (Weigh(), Clip(0.3))], ids=str)
def test_smoothing_says_what_noise_it_leaves(chain: tuple[Step, ...]) -> None:
    noise = told(plan(*chain), before=(LaplacianSmoothing(2.0),))
    assert float(noise.square().mean().sqrt()) == pytest.approx(1.0, rel=0.02)


def test_the_deviation_after_smoothing_is_that_of_the_dense_matrix() -> None:
    from sordino.layout import Layout

    layout, strength = Layout.of(nn.Linear(9, 5)), 1.7
    std = torch.from_numpy(np.random.default_rng(1).random(layout.size)).float()
    found = LaplacianSmoothing(strength).decoded_noise_std(Noised(layout, std, 0))
    assert isinstance(found, Tensor)
    for slot in layout.slots:
        d, part = slot.stop - slot.start, std[slot.start : slot.stop].double()
        shift = torch.roll(torch.eye(d, dtype=torch.float64), 1, 0)
        smoothed = torch.eye(d, dtype=torch.float64) * (1 + 2 * strength) - strength * (shift + shift.T)
        inverse = torch.linalg.inv(smoothed)
        wanted = (inverse.square() @ part.square()).sqrt()
        assert torch.allclose(found[slot.start : slot.stop], wanted, rtol=1e-5)


def test_a_lie_about_the_noise_is_caught() -> None:
    """The sabotage: a step that halves and says nothing of the noise, as every step but Clip once did."""

    @dataclass(frozen=True)
    class Silent(Halve, kind="silent_in_a_noise_test"):
        def decoded_noise_std(self, std: NoiseStd, public: Public) -> NoiseStd:
            return std

    assert float(told(plan(Silent(), Clip(0.3))).square().mean().sqrt()) == pytest.approx(2.0, rel=0.02)


def test_james_stein_behind_a_mask_shrinks_as_on_the_coordinates_that_were_sent() -> None:
    """Once a mask before it was not told of: where .77 of the update was right, .03 was left."""
    from sordino.layout import Layout

    layout = Layout.of(nn.Linear(100, 40))
    public = Public(t=0, size=layout.size, mask=torch.arange(0, 4000, 4))
    sent = torch.from_numpy(np.random.default_rng(2).normal(size=1000)).float() * 2
    std = PublicMask(0.25).decoded_noise_std(1.0, public)
    found = JamesStein().apply(PublicMask(0.25).decode(sent, public), Noised(layout, std, 0))
    factor = 1 - (1000 - 2) / float(sent.square().sum())
    assert factor == pytest.approx(0.75, abs=0.05)
    assert torch.allclose(found[public.mask], sent * factor, atol=1e-5)
    blind = JamesStein().apply(PublicMask(0.25).decode(sent, public), Noised(layout, 1.0, 0))
    assert float(blind.norm()) < 0.2 * float(found.norm())  # the sabotage: one number for all


def test_who_needs_the_noise_stands_only_behind_linear_maps() -> None:
    ready = plan(Clip(0.3))
    replace(ready, postprocess=(LaplacianSmoothing(1.0), JamesStein(), LaplacianSmoothing(1.0), SparsifyMean(0.5)))
    for chain in [
        (JamesStein(), SoftThreshold()),
        (SparsifyMean(0.5), JamesStein()),
        (SoftThreshold(), LaplacianSmoothing(1.0), JamesStein()),
    ]:
        with pytest.raises(PlanError, match="the scale of the noise is unknown"):
            replace(ready, postprocess=chain)


def test_noise_that_went_through_local_steps_is_not_called_known() -> None:
    local = NoisyLocalSgd(AllRecords((1,)), clip_norm=1.0, noise_multiplier=1.0, lr=0.1, steps=2)
    with pytest.raises(PlanError, match="local steps"):
        replace(plan(Clip(0.3)), encode=(), local=local, release=Forward(), postprocess=(JamesStein(),))
