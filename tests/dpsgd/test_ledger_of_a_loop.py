"""Promise: a loop that names a ledger is admitted before its first step, and whatever it releases is in the ledger."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import Parts, private, train, weights

from sordino.dpsgd import account as accounts
from sordino.errors import BudgetError, ConfigError
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Limit
from sordino.parts.mechanisms import Gaussian
from sordino.parts.strategies import Banded

EPOCH = 5  # steps


def ledger_file(folder: Path, epsilon: float = 50.0, relation: Any = "add_remove") -> Path:
    file = folder / "ours.ledger"
    with Ledger.open(file, create=True) as ledger:
        ledger.limit("ours", Limit(epsilon, 1e-3, "record", relation))
    return file


def loop(file: Path | Ledger, **settings: Any) -> Parts:
    return private(**{"epochs": 4, "ledger": file, "named": "ours", **settings})


def steps_paid(file: Path) -> int:
    with Ledger.open(file) as ledger:
        return sum(item.count for item in ledger.statement("ours").items)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has charged is forgotten, as in a new one."""
    monkeypatch.setattr(accounts, "_CHARGED_HERE", {})


def test_a_loop_is_charged_whole_before_its_first_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ledger_file(tmp_path)
    parts = loop(file)
    assert steps_paid(file) == 0  # nothing is released by making it
    paid: list[int] = []
    sample = Gaussian.sample

    def watched(self: Gaussian, size: int, rng: Any) -> Any:
        paid.append(steps_paid(file))
        return sample(self, size, rng)

    monkeypatch.setattr(Gaussian, "sample", watched)
    train(parts)
    assert paid == [20] * EPOCH
    train(parts, epochs=3)
    assert steps_paid(file) == 20


def test_the_certificate_says_what_the_data_set_has_spent(tmp_path: Path) -> None:
    file = ledger_file(tmp_path)
    for count in (1, 2):
        with Ledger.open(file) as ledger:
            parts = loop(ledger)  # a ledger, or its file
        train(parts, epochs=4)
        made = parts[1].save_certificate(tmp_path / f"{count}.json")
        assert made["ledger"]["runs"] == count
        assert sum(one["count"] for one in made["ledger"]["events"]) == 20 * count
        assert accounts.certify(tmp_path / f"{count}.json").certificate == made
    assert made["ledger"]["epsilon"] > made["epsilon"]
    assert any("charged to the ledger" in said for said in made["assumptions"])


def test_a_loop_that_the_data_set_cannot_pay_for_is_refused_at_once(tmp_path: Path) -> None:
    cost = private(epochs=4, delta=1e-3)[1].certificate()["epsilon"]
    file = ledger_file(tmp_path, 1.2 * cost)
    train(loop(file), epochs=4)
    with pytest.raises(BudgetError, match="would have spent"):
        loop(file)
    assert steps_paid(file) == 20


def test_of_two_loops_that_were_both_considered_one_is_admitted(tmp_path: Path) -> None:
    cost = private(epochs=4, delta=1e-3)[1].certificate()["epsilon"]
    file = ledger_file(tmp_path, 1.2 * cost)
    first, second = loop(file), loop(file)
    train(first)
    before = weights(second[0]).clone()
    with pytest.raises(BudgetError, match="would have spent"):
        train(second)
    assert torch.equal(weights(second[0]), before)


def test_steps_beyond_the_plan_are_admitted_first_or_refused(tmp_path: Path) -> None:
    cost = private(epochs=4, delta=1e-3)[1].certificate()["epsilon"]
    file = ledger_file(tmp_path, 1.3 * cost)
    parts = loop(file)
    train(parts, epochs=5)
    assert steps_paid(file) == 25
    with pytest.raises(BudgetError, match="would have spent"):
        train(parts, epochs=20)
    assert parts[1].steps == steps_paid(file)
    assert parts[1].certificate()["counts"]["rounds_accounted"] == parts[1].steps


def test_a_checkpoint_that_was_rolled_back_pays_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three models of one checkpoint: the ledger has the steps of all, whatever the checkpoint says."""
    file = ledger_file(tmp_path)
    first = loop(file)
    train(first)
    early = copy.deepcopy(first[1].state_dict())
    train(first, epochs=3)
    for count in (1, 2):
        forget(monkeypatch)
        other = loop(file)
        other[1].load_state_dict(copy.deepcopy(early))
        train(other, epochs=3)
        assert steps_paid(file) == 20 + 15 * count
        assert other[1].certificate()["counts"]["rounds_accounted"] == 20 + 15 * count


def test_an_edited_count_with_a_new_checksum_pays_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sordino.dpsgd.settings import checksum

    file = ledger_file(tmp_path)
    first = loop(file)
    train(first, epochs=4)
    state = first[1].state_dict()
    state["sordino"]["taken"] = {}
    state["sordino"]["checksum"] = checksum(state["sordino"])
    forget(monkeypatch)
    second = loop(file)
    second[1].load_state_dict(state)
    assert second[1].steps == 20
    train(second, epochs=4)
    assert steps_paid(file) == second[1].steps == 40


def test_a_resume_from_the_newest_checkpoint_pays_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ledger_file(tmp_path)
    first, whole = loop(file), private(epochs=4)
    train(whole, epochs=4)
    train(first, epochs=2)
    state, model = first[1].state_dict(), first[0].state_dict()
    forget(monkeypatch)
    second = loop(file)
    second[0].load_state_dict(model)
    second[1].load_state_dict(state)
    train(second, epochs=2)
    assert steps_paid(file) == second[1].steps == 20
    assert torch.equal(weights(second[0]), weights(whole[0]))


def test_a_loop_that_began_without_its_ledger_pays_for_all_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ledger_file(tmp_path)
    first = private(epochs=4)
    train(first, epochs=4)
    state = first[1].state_dict()
    forget(monkeypatch)
    second = loop(file)
    second[1].load_state_dict(state)
    train(second, epochs=1)
    assert steps_paid(file) == second[1].steps == 25


def test_copies_pay_for_their_own_steps(tmp_path: Path) -> None:
    file = ledger_file(tmp_path)
    account = loop(file)[1].account
    for _ in range(EPOCH):
        account.charge()
    twin = copy.deepcopy(account)
    for one in (account, twin):
        for _ in range(15):
            one.charge()
    assert steps_paid(file) == 35


def test_a_copy_made_within_a_block_does_not_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.dpsgd.account.BLOCKS", 4)  # an epoch each
    file = ledger_file(tmp_path)
    account = loop(file)[1].account
    account.charge()
    twin = copy.deepcopy(account)
    for one in (account, twin):
        one.charge()
    assert steps_paid(file) == 20 + EPOCH


def test_a_kill_within_a_block_counts_the_block_as_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.dpsgd.account.BLOCKS", 4)
    file = ledger_file(tmp_path)
    first = loop(file)
    train(first)
    state = first[1].state_dict()
    first[1].account.charge()  # and the process is killed: one step of the second epoch may be out
    forget(monkeypatch)
    second = loop(file)
    second[1].load_state_dict(state)
    assert second[1].steps == 2 * EPOCH
    train(second, epochs=3)
    assert steps_paid(file) == second[1].steps == 25


def test_a_checkpoint_goes_on_paying_where_it_began(tmp_path: Path) -> None:
    file = ledger_file(tmp_path)
    shutil.copy(file, tmp_path / "old.ledger")
    first = loop(file)
    train(first)
    state = first[1].state_dict()
    with pytest.raises(ConfigError, match="no ledger"):
        private(epochs=4)[1].load_state_dict(state)
    with Ledger.open(file) as ledger:
        ledger.limit("theirs", Limit(9.0, 1e-3, "record", "add_remove"))
    with pytest.raises(ConfigError, match="theirs"):
        loop(file, named="theirs")[1].load_state_dict(state)


def test_a_ledger_that_knows_less_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    file, other = ledger_file(tmp_path), ledger_file(tmp_path / "other")
    first = loop(file)
    train(first)
    with pytest.raises(ConfigError, match="with 0 steps of a run whose checkpoint has 5"):
        loop(other)[1].load_state_dict(first[1].state_dict())


def test_correlated_noise_is_not_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ledger_file(tmp_path, relation="replace_one")
    first = loop(file, strategy=Banded(5))
    train(first)
    early = copy.deepcopy(first[1].state_dict())
    train(first)
    forget(monkeypatch)
    with pytest.raises(ConfigError, match="5 draws of correlated noise and 10 charged steps"):
        loop(file, strategy=Banded(5))[1].load_state_dict(early)
    twin = copy.deepcopy(first[1].account)
    first[1].account.charge()
    with pytest.raises(BudgetError, match="correlated noise were charged"):
        twin.charge()


@pytest.mark.parametrize(
    "wrong",
    [{"ledger": "x.ledger"}, {"named": "ours"}, {"ledger": 3, "named": "ours"}, {"ledger": "x", "named": 1}],
)
def test_half_an_account_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        private(**wrong)


def test_a_data_set_without_a_limit_is_refused(tmp_path: Path) -> None:
    file = ledger_file(tmp_path)
    with pytest.raises(ConfigError, match="a data set that has a limit"):
        loop(file, named="nobody")


@pytest.mark.parametrize("epochs", [1, 3, 7, 60, 199, 200, 201, 401, 4000])
def test_blocks_are_few_and_hold_every_planned_step_once(tmp_path: Path, epochs: int) -> None:
    """A ledger that every step wrote a line to would be read for minutes by the runs after it."""
    parts = loop(ledger_file(tmp_path, 1e4), epochs=epochs)
    paying = parts[1].account.ledger
    assert paying is not None
    blocks = {paying._block(step) for step in range(epochs * EPOCH)}
    assert len(blocks) == paying._planned_blocks <= 400
    assert sum(map(len, blocks)) == epochs * EPOCH
    beyond = {paying._block(step) for step in range(epochs * EPOCH, 2 * epochs * EPOCH)}
    assert not blocks & beyond
    assert min(block.start for block in beyond) == epochs * EPOCH
