"""Promise: few clients or records never get a delta by default that promises little; plan says what one means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.commands import Said, sordino
from tests.engines.test_receipts import LOCAL, config
from tests.tiny import seeded

from sordino.accounting.accountant import default_delta, few, largest_delta, meaning_of_delta
from sordino.dpsgd.settings import checked_delta
from sordino.errors import ConfigError
from sordino.ledger.policy import load as load_policy
from sordino.parts.samplers import Everyone
from sordino.recipes.record_level import budgets
from sordino.task import Task
from sordino.training import train

FILE = """
[task]
dataset = "digits"

[recipe]
name = "client_side_fed_avg"
rounds = 3
population = {count}
cohort = {count}
lr = 0.1
steps = 1
clip_norm = 1.0
mechanism = {{ kind = "gaussian", noise_multiplier = {noise_multiplier} }}
{privacy}

[federation]
silos = {silos}
inputs = [1, 8, 8]
classes = 10
"""


def written(folder: Path, count: int, privacy: str = "", noise_multiplier: float = 30.0) -> Path:
    """fed.toml with so many silos and a client-level plan."""
    silos = str([f"s{i}" for i in range(count)]).replace("'", '"')
    file = folder / "fed.toml"
    file.write_text(FILE.format(count=count, privacy=privacy, noise_multiplier=noise_multiplier, silos=silos))
    return file


def made(folder: Path, file: Path) -> Said:
    return sordino("federation", "new", folder / "made", "--from", file)


def test_every_default_is_at_most_one_in_a_thousand_and_the_limit_stays() -> None:
    for count in (2, 3, 5, 100, 533, 534, 10**5):
        assert default_delta(count) == min(count**-1.1, 1e-3) <= largest_delta(count) == count**-1.1
        assert checked_delta(None, count, allow_large=False) == default_delta(count)
        assert checked_delta(largest_delta(count), count, allow_large=False) == largest_delta(count)
        with pytest.raises(ConfigError):
            checked_delta(1.01 * largest_delta(count), count, allow_large=False)
    assert (few(533), few(534)) == (True, False)
    assert {budget.delta for budget in budgets((3, 99, 10**4), (1.0,))} == {1e-3, 10**-4.4}


@pytest.mark.parametrize("count", [3, 5])
def test_a_plan_says_what_a_delta_means_for_few_clients(count: int, tmp_path: Path) -> None:
    said = sordino("plan", written(tmp_path, count))
    assert f"note: delta 0.001 for {count} clients: with probability up to 0.001 anything about one client" in said.out
    found = sordino("plan", written(tmp_path, count, "[privacy]\ndelta = 0.16"), "--json").json
    assert found["notes"] == [meaning_of_delta(0.16, count, "client")]
    assert f"up to {0.16 * count:.2g} clients in expectation" in found["notes"][0]


def test_a_plan_for_many_clients_has_nothing_to_say_of_delta(tmp_path: Path) -> None:
    assert "notes" not in sordino("plan", written(tmp_path, 600), "--json").json


@pytest.mark.parametrize("count", [3, 5])
def test_a_new_federation_of_few_silos_asks_for_a_delta_and_writes_nothing(count: int, tmp_path: Path) -> None:
    said = made(tmp_path, written(tmp_path, count)).sentence
    assert f"found {count} clients and no delta" in said
    assert "set delta under [privacy]" in said
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("noise_multiplier", [3.0, 30.0, 3e5])
@pytest.mark.parametrize("count", [3, 5])
def test_policies_of_a_new_federation_are_read_by_whoever_serves_them(
    count: int, noise_multiplier: float, tmp_path: Path
) -> None:
    """With three silos and the delta of .30, a policy of epsilon 0.0 was written, which no silo could load."""
    file = written(tmp_path, count, "[privacy]\ndelta = 1e-3", noise_multiplier)
    assert made(tmp_path, file).code == 0
    for name in (f"s{i}" for i in range(count)):
        policy = load_policy(tmp_path / "made" / "silos" / name / "policy.toml")
        assert policy.epsilon > 0
        assert policy.delta == 1e-3


def test_policies_are_read_even_at_a_delta_that_makes_the_plan_free(tmp_path: Path) -> None:
    file = written(tmp_path, 3, "[privacy]\ndelta = 0.29")
    assert made(tmp_path, file).code == 0
    assert load_policy(tmp_path / "made" / "silos" / "s0" / "policy.toml").epsilon == 0.01


def test_a_run_of_five_clients_is_certified_at_one_in_a_thousand() -> None:

    pairs = [(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64)) for _ in range(5)]
    task = Task.of(seeded(torch.nn.Linear(2, 2)), pairs)
    plan = config(LOCAL, {"kind": "everyone", "population": 5}, rounds=1).plan
    assert isinstance(plan.clients, Everyone)
    assert train(plan, task).certificate["delta"] == 1e-3
