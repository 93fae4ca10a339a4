"""Promises of a noise multiplier that changes from step to step: each step has, and is charged, its own."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import Parts, backward, mlp, private, train, weights
from torch import nn
from torch.utils.data import TensorDataset

from sordino.accounting import accountant
from sordino.accounting.events import Event, GaussianNoise, PoissonSampled
from sordino.dpsgd.account import certify
from sordino.dpsgd.settings import LEVELS
from sordino.errors import BudgetError, ConfigError, EngineError, PlanError
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Limit
from sordino.loop import check_needs
from sordino.parts.record_samplers import OnePass, PoissonRecords
from sordino.parts.releases import CentralNoise, ScheduledNoise
from sordino.parts.samplers import Poisson
from sordino.parts.schedules import Linear
from sordino.parts.strategies import Banded
from sordino.recipes import dp_fed_avg, dp_sgd

RATE, DELTA = 12 / 60, 0.01
FALLING = [2.0, 2.0, 1.5, 1.0, 0.8]  # one epoch of five steps


def events(multipliers: list[float]) -> list[tuple[Event, int]]:
    return [(PoissonSampled(RATE, GaussianNoise(z)), multipliers.count(z)) for z in dict.fromkeys(multipliers)]


def epsilon(multipliers: list[float], delta: float = DELTA) -> float:
    return accountant.epsilon(tuple(events(multipliers)), "add_remove", delta).value


def released_stds(parts: Parts, clip_norm: float = 1.0) -> list[float]:
    """The deviation of what each step releases, in units of clip norm / batch."""
    found = []
    for x, y in parts[2]:
        backward(parts, x, y)
        parts[1].step()
        slope = torch.cat([p.grad.flatten() for p in parts[0].parameters() if p.grad is not None])
        found.append(float(slope.std()) * 12 / clip_norm)
    return found


def wide() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    return nn.Linear(4000, 5), TensorDataset(torch.zeros(60, 4000), torch.zeros(60, dtype=torch.int64))


SAME = {
    "a list by step": (FALLING, FALLING),
    "a function of the step": (lambda t: FALLING[t], FALLING),
    "a schedule": (Linear(2.0, 1.0, 5), [2.0, 1.8, 1.6, 1.4, 1.2]),
}


@pytest.mark.parametrize("noise", ["simulation", "secure"])
@pytest.mark.parametrize("name", SAME)
def test_each_step_has_the_noise_of_its_own_multiplier(name: str, noise: str) -> None:
    given, wanted = SAME[name]
    parts = private(*wide(), noise_multiplier=given, noise=noise, clip_norm=0.5)
    assert released_stds(parts, 0.5) == pytest.approx(wanted, rel=0.03)


def test_a_list_by_epoch_holds_for_all_steps_of_its_epoch() -> None:
    parts = private(*wide(), noise_multiplier=[2.0, 1.0], epochs=2)
    assert [*released_stds(parts), *released_stds(parts)] == pytest.approx([2.0] * 5 + [1.0] * 5, rel=0.03)


@pytest.mark.parametrize("name", SAME)
def test_every_step_is_charged_by_its_own_multiplier(name: str, tmp_path: Path) -> None:
    given, wanted = SAME[name]
    parts = private(noise_multiplier=given, delta=DELTA)
    train(parts)
    certificate = parts[1].certificate()
    counts = {
        one["event"]["event"]["noise_multiplier"]: one["count"] for one in certificate["adversaries"][0]["events"]
    }
    assert counts == pytest.approx({z: wanted.count(z) for z in wanted})
    assert certificate["epsilon"] == pytest.approx(epsilon(wanted), rel=1e-6)
    assert parts[1].get_epsilon() == certificate["epsilon"]
    assert certificate["trust"]["release"] == "scheduled_noise"
    assert epsilon([max(wanted)] * 5) < certificate["epsilon"] < epsilon([min(wanted)] * 5)  # neither end's bill
    parts[1].save_certificate(tmp_path / "one.json")
    assert certify(tmp_path / "one.json").certificate == certificate


def test_a_schedule_that_does_not_change_costs_what_its_number_costs() -> None:
    one, other = private(noise_multiplier=1.3), private(noise_multiplier=[1.3] * 5)
    train(one)
    train(other)
    assert one[1].certificate()["epsilon"] == other[1].certificate()["epsilon"]
    torch.testing.assert_close(weights(one[0]), weights(other[0]), rtol=0, atol=0)


@pytest.mark.parametrize("target", [0.5, 3.0])
def test_a_shape_is_scaled_to_the_target_and_not_beyond_it(target: float) -> None:
    parts = private(noise_multiplier=FALLING, epsilon=target, delta=DELTA)
    release = parts[1].account.settings.plan.release
    multipliers = [release.noise_std(torch.zeros(1).numpy(), t) for t in range(5)]
    assert [z / multipliers[-1] for z in multipliers] == pytest.approx([z / 0.8 for z in FALLING])
    assert 0.98 * target < epsilon(multipliers) <= target
    assert parts[1].get_epsilon() <= target * (1 + 1e-9)
    train(parts)
    with pytest.raises(BudgetError):
        train(parts, epochs=20)


def test_steps_after_the_plan_have_the_last_noise_and_are_charged_for_it() -> None:
    parts = private(noise_multiplier=FALLING, delta=DELTA)
    train(parts, epochs=2)
    assert parts[1].certificate()["epsilon"] == pytest.approx(epsilon([*FALLING, *[0.8] * 5]), rel=1e-6)


def test_a_smooth_schedule_runs_with_at_most_so_many_multipliers_each_as_large_as_asked() -> None:
    def falling(t: int) -> float:
        return 2.0 * 0.997**t

    parts = private(noise_multiplier=falling, epochs=40)
    release = parts[1].account.settings.plan.release
    assert isinstance(release, ScheduledNoise)
    found = [release.noise_std(torch.zeros(1).numpy(), t) for t in range(200)]
    assert len(set(found)) <= LEVELS
    assert all(
        asked * (1 - 1e-9) <= own <= 1.02 * asked for own, asked in zip(found, map(falling, range(200)), strict=True)
    )
    assert sum(count for _, count in release.events(range(200))) == 200


def test_a_resumed_run_goes_on_with_the_noise_of_its_next_step() -> None:
    settings: dict[str, Any] = {"noise_multiplier": [2.0, 1.0], "epochs": 2}
    whole, first, second = private(**settings), private(**settings), private(**settings)
    train(whole, epochs=2)
    train(first)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    train(second)
    torch.testing.assert_close(weights(second[0]), weights(whole[0]), rtol=0, atol=1e-6)
    assert second[1].certificate()["epsilon"] == whole[1].certificate()["epsilon"]
    with pytest.raises(ConfigError, match="noise_multiplier"):
        private(noise_multiplier=[2.0, 1.1], epochs=2)[1].load_state_dict(first[1].state_dict())


def test_going_back_to_an_older_checkpoint_takes_no_step_twice() -> None:
    parts = private(noise_multiplier=[0.5, 2.0, 2.0], epochs=3, delta=DELTA)
    start = copy.deepcopy(parts[1].state_dict())
    train(parts)
    parts[1].load_state_dict(start)
    assert parts[1].steps == 5
    train(parts, epochs=2)
    assert parts[1].certificate()["epsilon"] == pytest.approx(epsilon([0.5] * 5 + [2.0] * 10), rel=1e-6)


def test_two_copies_that_both_took_the_noisiest_steps_cannot_be_joined_as_later_ones() -> None:
    """Joined, ten steps would be charged as 0.5 and 2.0, where all ten had 0.5."""
    settings: dict[str, Any] = {"noise_multiplier": [0.5, 2.0], "epochs": 2}
    parts = private(**settings)
    start = copy.deepcopy(parts[1].state_dict())
    other = private(**settings)
    other[1].load_state_dict(start)
    train(parts)
    train(other)
    with pytest.raises(ConfigError, match="both of which continued"):
        parts[1].load_state_dict(other[1].state_dict())
    plain = private(noise_multiplier=1.0, epochs=2)
    copied = private(noise_multiplier=1.0, epochs=2)
    copied[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    train(plain)
    train(copied)
    plain[1].load_state_dict(copied[1].state_dict())  # the same noise in every step: their sum is charged
    assert plain[1].steps == 10


def test_a_ledger_is_charged_for_each_block_by_its_own_multipliers(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ours.ledger", create=True) as ledger:
        ledger.limit("ours", Limit(50.0, DELTA, "record", "add_remove"))
    parts = private(noise_multiplier=FALLING, delta=DELTA, ledger=tmp_path / "ours.ledger", named="ours")
    train(parts)
    planned = parts[1].certificate()
    assert planned["ledger"]["epsilon"] == pytest.approx(epsilon(FALLING), rel=1e-3)
    train(parts)
    beyond = parts[1].certificate()
    assert beyond["ledger"]["epsilon"] == pytest.approx(epsilon([*FALLING, *[0.8] * 5]), rel=1e-3)
    parts[1].save_certificate(tmp_path / "one.json")
    assert certify(tmp_path / "one.json").certificate == beyond


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another number of values": ({"noise_multiplier": [1.0] * 4}, "one number for each of 5 steps or 1 epochs"),
    "no noise in a step": ({"noise_multiplier": [1.0, 1.0, 0.0, 1.0, 1.0]}, "noise_multiplier of 0.0 in step 2"),
    "a value that is none": ({"noise_multiplier": lambda t: math.nan}, "noise_multiplier of nan in step 0"),
    "a text": ({"noise_multiplier": "small"}, "noise_multiplier = a str"),
    "correlated noise": ({"noise_multiplier": FALLING, "strategy": Banded(2)}, "remove the strategy"),
    "a number and a target": ({"noise_multiplier": 1.0, "epsilon": 1.0}, "exactly one of the two"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schedule_that_cannot_be_charged_is_refused_in_one_sentence(name: str) -> None:
    settings, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        private(mlp(), **settings)


def test_scheduled_noise_is_refused_where_a_record_is_not_in_every_round() -> None:
    from sordino.engines.inprocess import InProcess

    release = ScheduledNoise((2.0, 1.0), (3, 3))
    plan = dp_sgd(rounds=6, records=PoissonRecords(8.0, (40,)), clip_norm=1.0, release=release, lr=0.1)
    with pytest.raises(EngineError, match="a loop of PyTorch"):
        check_needs(plan, False, InProcess())
    with pytest.raises(PlanError, match="outside a loop"):
        dp_sgd(rounds=5, records=OnePass(8, (40,)), clip_norm=1.0, release=release, lr=0.1)
    with pytest.raises(PlanError, match="outside a loop"):
        dp_fed_avg(rounds=5, clients=Poisson(100, 0.1), clip_norm=1.0, release=release, lr=0.1)
    with pytest.raises(PlanError, match="without the number of a step"):
        release.on_server(torch.zeros(3), torch.zeros(1).numpy())  # type: ignore[arg-type]


@pytest.mark.parametrize("old", ["check_sampler", "check_records"])
def test_a_release_with_a_check_that_nothing_calls_is_refused(old: str) -> None:
    with pytest.raises(PlanError, match=f"{old}, which nothing calls"):
        type("Old", (CentralNoise,), {old: lambda self, other: None})
