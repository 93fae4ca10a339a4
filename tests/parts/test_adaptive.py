"""Promises of the adaptive clip norm: the bit fits in the ball, the clip norm finds its quantile, the cost stays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import final, noise, plan, rounds, seeded, task
from torch import Tensor, nn

from sordino.accounting.bounds import Bound
from sordino.certificate.build import certificate
from sordino.certificate.facts import Facts
from sordino.engines.inprocess import InProcess
from sordino.errors import PlanError
from sordino.loop import run
from sordino.parts.encoding import Adaptive, Clip, Public, Step
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.mechanisms import Gaussian
from sordino.parts.releases import CentralNoise, NoiseShares, NoNoise
from sordino.parts.samplers import Everyone, FixedSize, Poisson
from sordino.parts.schedules import Constant, Linear
from sordino.parts.server_optimizers import Sgd
from sordino.parts.sparsify import PublicMask, SparsifyUpdate
from sordino.rng import Seeded
from sordino.runs.charge_log import PrefixHash
from sordino.runs.writer import STATE, Checkpoint
from sordino.task import Task

ODD = (0.0, 1e-45, 1e-38, 1e-19, 1.0, -1.0, 1e15, 3e38, math.nan, math.inf)
entries = st.one_of(st.sampled_from(ODD), st.floats(width=32))


def length(row: Tensor) -> float:
    """The norm in float64, summed without error."""
    return math.sqrt(math.fsum(value * value for value in row.double().tolist()))


@given(
    row=st.lists(entries, min_size=1, max_size=12),
    clip_norm=st.floats(-20, 20).map(lambda e: 10.0**e),
    share=st.floats(1e-3, 1 - 1e-3),
)
@settings(max_examples=200, deadline=None)
def test_a_message_with_its_bit_is_inside_the_unit_ball(row: list[float], clip_norm: float, share: float) -> None:
    (sent,) = Clip(Adaptive(1.0, share=share)).encode(torch.tensor([row]), Public(0, clip_norm))
    assert len(sent) == len(row) + 1
    assert bool(sent.isfinite().all())
    assert length(sent) <= 1.0
    assert abs(float(sent[-1])) == pytest.approx(share, rel=1e-4)


def test_the_bit_says_whether_the_update_was_inside() -> None:
    clip, public = Clip(Adaptive(1.0, share=0.2)), Public(0, 2.0)
    rows = torch.tensor([[0.0, 1.9], [0.0, 2.1], [0.0, 0.0], [1e30, 0.0], [math.nan, 0.0]])
    assert clip.encode(rows, public)[:, -1].sign().tolist() == [1, -1, 1, -1, -1]


def test_the_update_comes_back_through_decode() -> None:
    clip, public, row = Clip(Adaptive(1.0, share=0.3)), Public(0, 2.0), noise(8)
    row = row * (1.5 / row.norm())
    assert torch.allclose(clip.decode(clip.encode(row[None], public)[0], public), row, rtol=1e-5)
    double = clip.decode(clip.encode(row[None] * 4, public)[0], public)
    assert torch.allclose(double, row * (2.0 / 1.5), rtol=1e-4)  # on the sphere of this round's clip norm


@pytest.mark.parametrize(("fraction", "wanted"), [(0.0, math.exp(0.1)), (0.5, 1.0), (0.75, math.exp(-0.05))])
def test_the_radius_moves_by_the_rule_of_andrew_et_al(fraction: float, wanted: float) -> None:
    rule = Adaptive(1.0, quantile=0.5, rate=0.2, share=0.1)
    assert rule.next(torch.tensor([9.0, 0.1 * (2 * fraction - 1)]), 3.0) == pytest.approx(3.0 * wanted, rel=1e-5)


def test_noise_never_carries_the_radius_away() -> None:
    rule = Adaptive(1.0, rate=50.0)
    assert rule.next(torch.tensor([0.0, 1e30]), 1.0) == 1e-3
    assert rule.next(torch.tensor([0.0, -1e30]), 1.0) == 1e3
    assert rule.next(torch.tensor([0.0, 1e30]), 2.0) >= 1e-3


@pytest.mark.parametrize("start", [0.1, 20.0])
@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.75])
def test_the_radius_finds_the_quantile_of_update_norms(quantile: float, start: float) -> None:
    """The server stands still, so the eight clients' norms are the same in every round."""
    local, clip_norm = LocalSgd(lr=1.0, epochs=2), Adaptive(start, quantile=quantile, rate=0.5)
    norms = sorted(float(row.norm()) for row in updates(local))
    still = plan(
        rounds=50, clients=Everyone(8), local=local, encode=(Clip(clip_norm),), server=Sgd(lr=0.0),
        release=CentralNoise(Gaussian(0.002)),
    )  # fmt: skip
    tail = [float(done.state.public_state["clip_norm"]) for done in run(still, eight(), streams=Seeded(0))][-10:]
    below, step = int(8 * quantile), math.exp(0.5 / 8)  # one client more or less moves the clip norm by a step
    assert all(norms[below - 1] / step <= found <= norms[below] * step for found in tail)
    assert norms[below] * step < norms[-1]


def eight() -> Task:
    return task((3, 2, 1, 4, 2, 5, 1, 2), seeded(nn.Linear(4, 3)))


def updates(local: LocalSgd) -> Tensor:
    """What the eight clients send, before any step."""
    free, data = plan(clients=Everyone(8), local=local, encode=(), release=NoNoise()), eight()
    worker = InProcess().prepare(free, data, Seeded(0))
    return worker.solve(np.arange(8), Public(0), data.layout.flatten(data.model))


def test_the_radius_is_public_state_and_survives_a_checkpoint_bit_exact(tmp_path: Path) -> None:
    planned = plan(rounds=4, encode=(Clip(Adaptive(0.5)),), release=CentralNoise(Gaussian(0.05)))
    done = rounds(planned, task())
    clip_norms = [float(one.state.public_state["clip_norm"]) for one in done]
    assert len({0.5, *clip_norms}) == 5  # it moves
    Checkpoint(done[1].state, "", PrefixHash(), PrefixHash()).save(tmp_path)
    state = Checkpoint.of_bytes((tmp_path / STATE).read_bytes()).state
    again = list(run(planned, task(), streams=Seeded(0), state=state))
    assert [float(one.state.public_state["clip_norm"]) for one in again] == clip_norms[2:]
    assert torch.equal(again[-1].state.memory["params"], done[-1].state.memory["params"])
    assert planned.public(2, public_state=state.public_state).clip_norm == clip_norms[1]


def test_a_void_round_keeps_the_radius() -> None:
    shares = plan(rounds=3, encode=(Clip(Adaptive(0.5)),), clients=Poisson(6, 0.5), release=NoiseShares(1.0, 3))
    done = rounds(shares, task(), seed=3)
    assert {one.void for one in done} == {True, False}
    before: Any = None
    for one in done:
        if one.void:
            assert one.state.public_state.get("clip_norm") == before
        before = one.state.public_state.get("clip_norm")


@pytest.mark.parametrize("clients", [Poisson(6, 0.5), FixedSize(6, 3), Everyone(6)], ids=lambda c: c.kind)
def test_the_bit_costs_nothing_beside_a_fixed_radius_of_the_same_multiplier(clients: Any) -> None:
    fixed, adaptive = (plan(clients=clients, encode=(Clip(clip_norm),)) for clip_norm in (1.0, Adaptive(1.0)))
    assert adaptive.cost() == fixed.cost()
    assert adaptive.bound == fixed.bound == Bound("client", norm=2, finite=True)


def test_the_certificate_of_an_adaptive_radius_says_the_same_epsilon() -> None:
    facts, plans = Facts(1e-3, "simulation", 2), [plan(encode=(Clip(clip_norm),)) for clip_norm in (1.0, Adaptive(1.0))]
    costs = [[line["epsilon"] for line in certificate(p, facts)["adversaries"]] for p in plans]
    assert costs[0] == costs[1]
    assert costs[0][0] > 0


def test_diagnostics_read_the_radius_of_the_round() -> None:
    planned = plan(rounds=2, encode=(Clip(Adaptive(1e-3, quantile=0.9, rate=3.0)),), release=NoNoise())
    first, second = rounds(planned, task())
    assert second.state.public_state["clip_norm"] > first.state.public_state["clip_norm"] > 5e-3
    alphas = [6 * one.diagnostics["alpha_bar"] - 1 for one in (first, second)]  # one client has no records
    assert alphas[1] > 5 * alphas[0]


def test_an_adaptive_radius_in_the_l1_norm_is_refused() -> None:
    with pytest.raises(PlanError, match="L1"):
        Clip(Adaptive(1.0), norm=1)


@pytest.mark.parametrize(
    "numbers",
    [{"start": 0.0}, {"start": math.nan}, {"quantile": 0.0}, {"quantile": 1.0}, {"rate": 0.0}, {"share": 1.0}],
)
def test_numbers_that_would_leave_the_ball_or_stand_still_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="adaptive clip"):
        Adaptive(**{"start": 1.0, **numbers})


OUT_OF_PLACE: dict[str, tuple[Step, ...]] = {
    "a mask would drop the bit": (Clip(Adaptive(1.0)), PublicMask(0.5)),
    "a top-k could drop the bit": (Clip(Adaptive(1.0)), SparsifyUpdate(0.5)),
    "another clip would count as the update": (Clip(Adaptive(1.0)), Clip(1.0)),
    "two clip norms, one public number": (Clip(1.0), Clip(Adaptive(1.0))),
}


@pytest.mark.parametrize("why", OUT_OF_PLACE)
def test_an_adaptive_clip_that_is_not_alone_and_last_is_refused(why: str) -> None:
    with pytest.raises(PlanError, match="adaptive clip"):
        plan(encode=OUT_OF_PLACE[why])


def test_an_adaptive_radius_of_projected_updates_is_refused() -> None:
    """They are all inside the ball, so the clip norm would shrink for ever."""
    with pytest.raises(PlanError, match="adaptive clip"):
        plan(encode=(Clip(Adaptive(1.0)),), local=LocalSgd(lr=1.0, epochs=1, project=True))


def test_an_adaptive_clip_after_a_public_mask_trains() -> None:
    planned = plan(encode=(PublicMask(0.5), Clip(Adaptive(1.0))), release=NoNoise())
    start = task().layout.flatten(task().model)
    assert float((final(planned, task()) - start).norm()) > 0.01


@pytest.mark.parametrize("clip_norm", [Constant(-0.1), Linear(1.0, -1.0, 2)])
def test_a_schedule_of_a_second_clip_must_stay_positive_too(clip_norm: Any) -> None:
    """A second clip of clip norm -0.1 would multiply a message in the unit ball by -10."""
    with pytest.raises(PlanError, match="clip norm"):
        plan(rounds=3, encode=(Clip(1.0), Clip(clip_norm)))
