"""The certificate is that of the steps: as planned, or more if more were taken; loading never makes it smaller."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
from typing import Any

import pytest
import torch
from dp_accounting import dp_event, pld, rdp
from tests.dpsgd.loops import data, mlp, private, train, weights

from sordino.accounting import accountant
from sordino.accounting.events import GaussianNoise, PoissonSampled
from sordino.accounting.rounding import upward
from sordino.certificate.build import line_entry
from sordino.dpsgd.settings import calibrate_noise, loop_plan
from sordino.errors import BudgetError, ConfigError, PlanError, UnreachableError
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import PoissonRecords


def accounted(rate: float, z: float, steps: int, delta: float) -> float:
    return accountant.epsilon([(PoissonSampled(rate, GaussianNoise(z)), steps)], "add_remove", delta).value


def test_epsilon_is_that_of_the_poisson_sampled_gaussian() -> None:
    parts = private(epochs=4, noise_multiplier=1.5)
    train(parts, epochs=2)
    found = parts[1].certificate()
    delta = 1e-3
    assert found["delta"] == pytest.approx(delta)
    assert found["epsilon"] == upward(accounted(0.2, 1.5, 20, delta))
    assert found["loop"]["epsilon_so_far"] == upward(accounted(0.2, 1.5, 10, delta))
    assert found["counts"] == {"rounds_planned": 20, "rounds_charged": 10, "rounds_accounted": 20}
    models, _, messages = found["adversaries"]
    assert models["events"][0]["count"] == 20
    assert messages["epsilon"] is None  # who sees the sum before its noise
    assert (found["unit"], found["relation"], found["records"]["batch"]) == ("record", "add_remove", 12.0)


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_the_target_is_met_and_hardly_undercut(epsilon: float) -> None:
    parts = private(epochs=3, epsilon=epsilon, delta=1e-3)
    train(parts, epochs=3)
    assert 0.99 * epsilon < parts[1].certificate()["epsilon"] <= epsilon


def test_smoothing_is_off_unless_asked_for() -> None:
    """At strength 1 it cost a CNN on images six points."""
    assert private()[1].account.settings.plan.postprocess == ()


def test_smoothing_pieces_and_the_optimizer_cost_nothing() -> None:
    runs = [private(smoothing=s, max_physical_batch_size=p, optimizer=o) for s, p, o in _VARIANTS]
    for run in runs:
        train(run)
    assert len({run[1].certificate()["epsilon"] for run in runs}) == 1


_VARIANTS = ((0.0, None, torch.optim.SGD), (3.0, 4, torch.optim.Adam))


def test_steps_beyond_the_plan_are_billed() -> None:
    parts = private(epochs=1, noise_multiplier=1.0)
    before = parts[1].certificate()["epsilon"]
    train(parts, epochs=2)
    found = parts[1].certificate()
    assert found["counts"]["rounds_accounted"] == 10
    assert found["epsilon"] == found["loop"]["epsilon_so_far"] > before


def test_steps_beyond_the_target_are_refused_before_they_happen() -> None:
    parts = private(epochs=1, epsilon=2.0)
    train(parts)
    with pytest.raises(BudgetError, match="exceed epsilon 2"):
        train(parts, epochs=5)
    after, found = weights(parts[0]).clone(), parts[1].certificate()
    with pytest.raises(BudgetError):
        train(parts)
    assert torch.equal(weights(parts[0]), after)
    assert found["epsilon"] <= 2.0
    assert parts[1].steps == found["counts"]["rounds_charged"] < 30


def test_a_step_is_charged_before_its_noise_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = private()
    charged: list[int] = []

    def broken(self: Gaussian, size: int, rng: object) -> object:
        charged.append(parts[1].steps)
        raise RuntimeError("no noise")

    monkeypatch.setattr(Gaussian, "sample", broken)
    before = weights(parts[0]).clone()
    with pytest.raises(RuntimeError, match="no noise"):
        train(parts)
    assert charged == [1]
    assert torch.equal(weights(parts[0]), before)
    assert all(p.grad is None for p in parts[0].parameters())


@pytest.mark.parametrize(
    ("rate", "z", "epochs"), [(256 / 60000, 1.1, 60), (256 / 60000, 1.3, 15), (512 / 50000, 1.0, 30)]
)
def test_published_settings_cost_no_more_than_the_library_itself_proves(rate: float, z: float, epochs: int) -> None:
    records, delta = PoissonRecords(round(rate * 60000), (60000,)), 1e-5
    steps = epochs * round(1 / records.rate(0))
    optimizer = torch.optim.SGD(mlp().parameters())
    bare = loop_plan(epochs=epochs, records=records, clip_norm=1.0, smoothing=1.0, optimizer=optimizer)
    ours = line_entry(calibrate_noise(bare, None, z, delta).cost().line("models"), delta)["epsilon"]
    event = dp_event.PoissonSampledDpEvent(records.rate(0), dp_event.GaussianDpEvent(z))
    tight, loose = pld.PLDAccountant(value_discretization_interval=1e-4), rdp.RdpAccountant()
    tight.compose(event, steps)
    loose.compose(event, steps)
    assert ours == pytest.approx(tight.get_epsilon(delta), rel=0.02)
    assert ours < 0.93 * loose.get_epsilon(delta)


def test_delta_is_small_unless_asked_otherwise() -> None:
    with pytest.raises(ConfigError, match=r"records\^-1\.1"):
        private(delta=0.1)
    assert private(delta=0.1, allow_large_delta=True)[1].certificate()["delta"] == 0.1
    with pytest.raises(ConfigError):
        private(delta=1.5, allow_large_delta=True)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"noise_multiplier": None}, ConfigError),
        ({"noise_multiplier": 1.0, "epsilon": 1.0}, ConfigError),
        ({"noise_multiplier": 0.0}, PlanError),
        ({"noise_multiplier": math.nan}, PlanError),
        ({"epsilon": -1.0}, UnreachableError),
        ({"clip_norm": 0.0}, ConfigError),
        ({"clip_norm": math.inf}, ConfigError),
        ({"smoothing": -1.0}, PlanError),
        ({"epochs": 0}, ConfigError),
        ({"max_physical_batch_size": 0}, ConfigError),
        ({"noise": "fast"}, ConfigError),
        ({"reduction": "none"}, ConfigError),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        private(**settings)


def saved(state: object) -> object:
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_resumed_run_is_the_run_and_continues_the_bill() -> None:
    through, first, second = (private(optimizer=torch.optim.Adam, epochs=4, epsilon=5.0) for _ in range(3))
    train(through, epochs=4)
    train(first, epochs=2)
    model, optimizer = saved(first[0].state_dict()), saved(first[1].state_dict())
    second[0].load_state_dict(model)  # type: ignore[arg-type]
    second[1].load_state_dict(optimizer)  # type: ignore[arg-type]
    train(second, epochs=2)
    assert torch.equal(weights(second[0]), weights(through[0]))
    assert second[1].certificate() == through[1].certificate()


def test_going_back_to_a_checkpoint_forgets_no_step() -> None:
    parts = private()
    train(parts)
    early = saved(parts[1].state_dict())
    train(parts, epochs=2)
    parts[1].load_state_dict(early)  # type: ignore[arg-type]
    assert parts[1].steps == 15
    train(parts)
    assert parts[1].steps == 20


def test_two_branches_that_are_joined_are_both_billed() -> None:
    trunk, left, right = private(), private(), private()
    train(trunk)
    for branch in (left, right):
        branch[1].load_state_dict(trunk[1].state_dict())
        train(branch)
    left[1].load_state_dict(right[1].state_dict())
    assert left[1].steps == 15


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "fork"])
def test_two_copies_of_one_account_are_both_billed(copied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of either copy are releases: joined, they add up."""
    account = private()[1].account
    for _ in range(3):
        account.charge()
    state = account.state()
    twin = pickle.loads(pickle.dumps(account)) if copied == "pickle" else copy.deepcopy(account)
    if copied == "fork":  # the child's memory is the parent's, name and all; its process is another
        twin.own, twin.taken = account.own, dict(account.taken)
        monkeypatch.setattr(os, "getpid", lambda: -1)
    for _ in range(2):
        twin.charge()
    monkeypatch.undo()
    for _ in range(4):
        account.charge()
    assert (twin.steps, account.steps) == (5, 7)
    account.load(twin.state())
    account.load(state)
    assert account.steps == 9


@pytest.mark.parametrize(
    "other",
    [
        {"noise_multiplier": 1.1},
        {"clip_norm": 2.0},
        {"smoothing": 1.0},
        {"epochs": 2},
        {"batch": 10},
        {"seed": 3},
        {"delta": 1e-4},
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(other: dict[str, Any]) -> None:
    state, parts = private()[1].state_dict(), private(**other)
    with pytest.raises(ConfigError, match="checkpoint with"):
        parts[1].load_state_dict(state)


def test_a_checkpoint_of_an_ordinary_optimizer_is_refused() -> None:
    state = torch.optim.SGD(mlp().parameters(), lr=0.1).state_dict()
    with pytest.raises(ConfigError, match="charged"):
        private()[1].load_state_dict(state)


def test_a_checkpoint_holds_nothing_of_an_unfinished_batch() -> None:
    model, optimizer, loader = private(max_physical_batch_size=2)
    x, y = next(iter(loader))
    torch.nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    state = optimizer.state_dict()
    assert optimizer.total.any()
    assert set(state) == {"state", "param_groups", "sordino"}
    assert set(state["sordino"]) == {"format", "run", "settings", "taken", "checksum"}
    assert not state["state"]


def test_one_who_knows_nothing_of_the_records_can_make_the_certificate_again() -> None:
    one, other = private(dataset=data(seed=1)), private(dataset=data(seed=2))
    train(one)
    train(other)
    assert one[1].certificate() == other[1].certificate()
