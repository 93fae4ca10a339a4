"""Promises of step sizes that change inside a round: the k-th step of the run, on every path, and no other cost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from tests.silos import SIZES as SILOS
from tests.silos import planned, silos
from tests.tiny import SIZES, clients, final, mlp, plan, rounds, seeded
from torch import Tensor, nn

from sordino.engines.inprocess import InProcess
from sordino.errors import PlanError
from sordino.parts.encoding import Clip
from sordino.parts.local_solvers import LocalSgd, Scaffold
from sordino.parts.mechanisms import Laplace
from sordino.parts.record_samplers import FixedRecords
from sordino.parts.record_solvers import NoisyLocalSgd
from sordino.parts.releases import Forward, NoNoise
from sordino.parts.schedules import (
    Decay,
    InverseTime,
    PerStep,
    Piecewise,
    Scaled,
    Schedule,
    Travelled,
    at,
    span_of_steps,
    step_values,
    travelled,
)
from sordino.plan import Plan
from sordino.recipes import client_side_fed_avg
from sordino.task import Task

STEPS, ROUNDS = 3, 2
FALLING = PerStep(InverseTime(2.0, 4.0))


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(0, 10**6))
def test_inverse_time_is_its_equation(scale: float, shift: float, k: int) -> None:
    assert InverseTime(scale, shift).at(k) == pytest.approx(scale / (shift + k))
    low, high = InverseTime(scale, shift).span(k + 1)
    assert (low, high) == (InverseTime(scale, shift).at(k), InverseTime(scale, shift).at(0))


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1.0, -1.0), (float("inf"), 1.0), (1.0, float("nan"))])
def test_a_step_that_would_divide_by_zero_is_refused(scale: float, shift: float) -> None:
    with pytest.raises(PlanError, match="schedule"):
        InverseTime(scale, shift)


@given(st.integers(0, 50), st.integers(1, 20), st.floats(0.1, 10))
def test_a_step_of_the_run_counts_all_local_steps_before_it(t: int, steps: int, factor: float) -> None:
    inner = InverseTime(2.0, 4.0)
    wanted = [factor * 2.0 / (4.0 + t * steps + j) for j in range(steps)]
    for schedule in (Scaled(PerStep(inner), factor), PerStep(Scaled(inner, factor))):
        assert step_values(schedule, t, steps) == pytest.approx(wanted)
        assert travelled(schedule, t, steps) == pytest.approx(sum(wanted))
    assert factor * Travelled(inner, steps).at(t) == pytest.approx(sum(wanted))
    assert step_values(Decay(2.0, 0.5), t, steps) == [at(Decay(2.0, 0.5), t)] * steps  # of the round, as ever
    low, high = span_of_steps(PerStep(inner), t + 1, steps)
    assert low <= min(wanted) / factor * (1 + 1e-12)
    assert high >= max(wanted) / factor * (1 - 1e-12)


def loop(model: nn.Module, data: tuple[Tensor, Tensor], lrs: list[float]) -> Tensor:
    """Full-batch steps of torch's own SGD, one for each step size: start minus end."""
    moved = copy.deepcopy(model)
    for lr in lrs:
        optimizer = torch.optim.SGD(moved.parameters(), lr=lr)
        optimizer.zero_grad()
        F.cross_entropy(moved(data[0]), data[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    flat = [torch.cat([p.detach().reshape(-1) for p in net.parameters()]) for net in (model, moved)]
    return flat[0] - flat[1]


def _curved() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)))


def _linear() -> nn.Module:
    return seeded(nn.Linear(4, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {"linear": _linear, "dense": mlp, "any": _curved}


@pytest.mark.parametrize("path", ["batched", "sequential"])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_every_path_takes_the_kth_step_of_the_run(
    name: str, path: Literal["batched", "sequential"], momentum: float
) -> None:
    """A fast path that took the round's first step size for all would be off by a third here."""
    local = LocalSgd(lr=FALLING, steps=STEPS, momentum=momentum)
    own = plan(rounds=ROUNDS, local=local, encode=(Clip(1e3),), release=NoNoise())
    task = Task.of(MODELS[name](), clients())
    found = final(own, task, InProcess(path=path))
    constant = replace(own, local=replace(local, lr=at(FALLING, 0)))
    assert not torch.allclose(found, final(constant, task, InProcess(path=path)), atol=1e-3)
    if momentum:
        assert torch.allclose(found, final(own, task, InProcess(path="sequential")), atol=1e-5)
        return
    model = copy.deepcopy(task.model)
    for t in range(ROUNDS):
        moves = [loop(model, pair, step_values(FALLING, t, STEPS)) for pair in clients() if len(pair[0])]
        mean = torch.stack(moves).sum(0) / len(SIZES)
        task.layout.load(model, task.layout.flatten(model) - mean)
    assert torch.allclose(found, task.layout.flatten(model), atol=1e-5)


@pytest.mark.parametrize("lr", [FALLING, Scaled(FALLING, 0.5)], ids=["per step", "scaled"])
def test_steps_over_epochs_are_refused_as_their_number_is_private(lr: Schedule) -> None:
    with pytest.raises(PlanError, match="depend on a client's number of records"):
        LocalSgd(lr=lr, epochs=2)


@pytest.mark.parametrize("kind", ["local", "noisy"])
def test_a_step_size_that_overflows_in_the_last_local_step_is_refused(kind: str) -> None:
    growing = PerStep(Decay(1.0, 1e3))  # 1e3^(k): float32 holds it in 12 steps, not in 20
    for count, fine in ((4, True), (10, False)):
        with nullcontext() if fine else pytest.raises(PlanError, match="float32"):
            plan(rounds=count, local=LocalSgd(lr=growing, steps=2)) if kind == "local" else _noisy(growing, count)


def _noisy(lr: Schedule | float, rounds: int = 1, steps: int = 2) -> Plan:
    records = FixedRecords(batch=2, sizes=SILOS)
    local = NoisyLocalSgd(records=records, clip_norm=1.0, noise_multiplier=1.0, lr=lr, steps=steps)
    return planned(local=local, release=Forward(), rounds=rounds)


def test_noise_in_every_local_step_is_scaled_by_the_step_of_the_run() -> None:
    """With one step a round, k is the round; a step that ends after k = 0 leaves all later steps still."""
    task = silos()
    many, one = _noisy(FALLING, rounds=3, steps=1), _noisy(FALLING.schedule, rounds=3, steps=1)
    assert torch.equal(final(many, task), final(one, task))
    start = task.layout.flatten(task.model)
    only_first = PerStep(Piecewise(0.1, 0.0, (1,)))  # 0.1 in the first step of the run, then nothing
    moved = final(_noisy(only_first, steps=4), task) - start
    assert float(moved.norm()) > 0.01
    assert torch.equal(final(_noisy(only_first, rounds=2, steps=4), task) - start, moved)  # the second round is still


def test_controls_are_divided_by_the_way_of_the_whole_round() -> None:
    lr = PerStep(InverseTime(0.4, 2.0))
    own = plan(rounds=1, local=Scaffold(lr=lr, steps=1), encode=(Clip(1e3),), release=NoNoise())
    flat = replace(own, local=Scaffold(lr=0.2, steps=1))
    task = Task.of(mlp(), clients())
    assert torch.allclose(final(own, task), final(flat, task), atol=1e-6)
    more = replace(own, local=Scaffold(lr=lr, steps=3))
    state = rounds(more, task)[-1].state
    drift = state.public_state["broadcast.control"]
    moved = task.layout.flatten(task.model) - more.server.result(state.memory)
    assert torch.allclose(drift, moved / travelled(lr, 0, 3), atol=1e-5)  # c = mean of (w_t - w) / way, from zero


@pytest.mark.parametrize("steps", [1, 4])
def test_the_bill_of_client_side_noise_is_the_same_for_any_step_and_its_clip_is_the_way(steps: int) -> None:
    known = {"rounds": 6, "population": 6, "cohort": 3, "steps": steps, "clip_norm": 0.5, "mechanism": Laplace(2.0)}
    one = client_side_fed_avg(lr=0.1, **known)  # type: ignore[arg-type]
    other = client_side_fed_avg(lr=FALLING, **known)  # type: ignore[arg-type]
    assert one.forecast == other.forecast
    for t in range(6):
        assert other.public(t).clip_norm == pytest.approx(0.5 * sum(step_values(FALLING, t, steps)))
        assert one.public(t).clip_norm == pytest.approx(0.5 * 0.1 * steps)


def test_the_clip_of_client_side_noise_takes_nothing_from_gradients_in_their_ball() -> None:
    own = client_side_fed_avg(
        rounds=2, population=6, cohort=6, lr=FALLING, steps=STEPS, clip_norm=0.05, mechanism=Laplace(2.0)
    )
    task = Task.of(mlp(), clients())
    quiet = replace(own, release=NoNoise())
    bare = replace(quiet, encode=(Clip(1e3, 1),))
    assert torch.allclose(final(quiet, task), final(bare, task), atol=1e-5)
