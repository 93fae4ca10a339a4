"""Promise: `so.train` pays from the ledger that it names as `sordino run` does: whole, before its first noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sordino as so
from sordino.errors import BudgetError, UserError
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Limit
from sordino.parts.mechanisms import Gaussian
from sordino.runs.folder import RunFolder

ROUNDS = 3


def plan() -> so.Plan:
    return so.recipes.dp_fed_avg(
        clients=so.Poisson(20, 0.5), rounds=ROUNDS, epochs=1, batch=4, lr=0.1, clip_norm=1.0, noise_multiplier=1.5
    )


def task(model: nn.Module | None = None) -> so.Task:
    coins = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 4, 3, generator=coins), torch.randint(2, (20, 4), generator=coins)
    torch.manual_seed(0)
    return so.Task.of(model or nn.Linear(3, 2), list(zip(x, y, strict=True)))


def ledger_file(folder: Path, epsilon: float = 50.0) -> Path:
    file = folder / "ours.ledger"
    with Ledger.open(file, create=True) as ledger:
        ledger.limit("ours", Limit(epsilon, 1e-3, "client", "add_remove"))
    return file


def rounds_paid(file: Path) -> int:
    with Ledger.open(file) as ledger:
        return sum(item.count for item in ledger.statement("ours").items)


@pytest.mark.parametrize("kept", ["in memory", "in a folder"])
def test_a_run_is_charged_whole_before_its_first_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    file, paid, sample = ledger_file(tmp_path), list[int](), Gaussian.sample

    def watched(self: Gaussian, size: int, rng: Any) -> Any:
        paid.append(rounds_paid(file))
        return sample(self, size, rng)

    monkeypatch.setattr(Gaussian, "sample", watched)
    out = None if kept == "in memory" else tmp_path / "run"
    result = so.train(plan(), task(), ledger=file, dataset="ours", out=out)
    assert paid == [ROUNDS] * ROUNDS
    assert result.certificate["ledger"]["runs"] == 1
    assert "has spent epsilon" in result.explain()


def test_training_on_is_in_the_ledger_and_refused_beyond_its_limit(tmp_path: Path) -> None:
    """On 45ab98c neither call knew of a ledger, and both certified the same epsilon."""
    cost = so.train(plan(), task(), delta=1e-3).certificate["epsilon"]
    file = ledger_file(tmp_path, 1.7 * cost)
    first = so.train(plan(), task(), ledger=file, dataset="ours", delta=1e-3)
    with Ledger.open(file) as ledger:
        second = so.train(plan(), task(first.model), ledger=ledger, dataset="ours", delta=1e-3)
    assert first.certificate["ledger"]["epsilon"] == pytest.approx(cost)
    assert second.certificate["ledger"]["epsilon"] > 1.2 * cost
    with pytest.raises(BudgetError, match="nothing was charged"):
        so.train(plan(), task(second.model), ledger=file, dataset="ours")
    assert rounds_paid(file) == 2 * ROUNDS


def test_a_run_in_memory_that_is_saved_is_the_run_that_was_charged(tmp_path: Path) -> None:
    file = ledger_file(tmp_path)
    result = so.train(plan(), task(), ledger=file, dataset="ours")
    folder = RunFolder.open(result.save(tmp_path / "saved"))
    assert folder.certify()["ledger"]["runs"] == 1
    assert rounds_paid(file) == ROUNDS


def test_a_run_that_is_continued_pays_nothing_twice(tmp_path: Path) -> None:
    file = ledger_file(tmp_path)

    def stop(line: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        so.train(plan(), task(), ledger=file, dataset="ours", out=tmp_path / "run", on_round=stop)
    so.train(plan(), task(), ledger=file, dataset="ours", out=tmp_path / "run", resume=True)
    assert rounds_paid(file) == ROUNDS


@pytest.mark.parametrize(
    "wrong", [{"ledger": "x"}, {"dataset": "ours"}, {"ledger": "x", "dataset": ""}, {"ledger": 3, "dataset": "ours"}]
)
def test_half_an_account_is_one_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="found"):
        so.train(plan(), task(), **wrong)
