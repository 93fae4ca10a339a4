"""What one silo is charged for a run and for a job: never less than the cost of the plan says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import plan as client_plan

from sordino.accounting import accountant
from sordino.accounting.events import GaussianNoise, PoissonSampled
from sordino.ledger.budget import SiloCost
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Item, Limit
from sordino.parts.mechanisms import Gaussian
from sordino.parts.record_samplers import (
    AllRecords,
    OnePass,
    PoissonRecords,
    RecordSampler,
    ShuffledRecords,
    _public_order,
)
from sordino.parts.releases import LocalNoise
from sordino.parts.samplers import Poisson
from sordino.plan import Plan
from sordino.recipes import silo

SIZES = (60, 40, 80)
BASE: Plan = silo(sizes=SIZES, epsilons=(1.0, 2.0, 4.0), rounds=4)
POISSON = client_plan(clients=Poisson(6, 0.5), rounds=8)


def reading(reads: RecordSampler, rounds: int = 4) -> Plan:
    return replace(BASE, rounds=rounds, local=replace(BASE.local, records=reads))  # type: ignore[type-var]


@pytest.mark.parametrize(
    "reads", [AllRecords(SIZES), PoissonRecords(10.0, SIZES), OnePass(10, SIZES), ShuffledRecords(20, SIZES)]
)
@pytest.mark.parametrize("silo", [0, 1, 2])
def test_a_silo_that_is_charged_job_by_job_pays_the_bill_of_its_plan(
    tmp_path: Path, reads: RecordSampler, silo: int
) -> None:
    plan = reading(reads)
    cost, line = SiloCost(plan, silo), plan.forecast.line("cohort", silo)
    with Ledger.open(tmp_path / "l", create=True) as ledger:
        ledger.limit("own", Limit(1e4, 1e-5, "record", line.relation))
        ledger.admit("a", "own", cost.asked, whole=cost.whole, jobs=cost.jobs)
        for t in range(plan.rounds):
            ledger.charge("a", f"{t}", cost.job(t))
        accounted = accountant.epsilon(line.entries, line.relation, 1e-5).value
        assert ledger.statement("own").epsilon == pytest.approx(accounted)


@pytest.mark.parametrize("reads", [OnePass(7, SIZES), ShuffledRecords(9, SIZES)])
def test_a_block_is_what_the_sampler_draws(reads: RecordSampler) -> None:
    for step in range(5):
        for own, size in enumerate(SIZES):
            found = reads.block(step, own)
            assert found is not None
            order, start, stop = found
            drawn = reads.draw(step, own, size, np.random.default_rng(0))
            assert np.array_equal(drawn, _public_order(own, size, order)[start:stop])


def test_a_line_that_rests_on_the_servers_coins_is_charged_whole() -> None:
    """Job by job it would be amplified events for the rounds that the silo sees, which are not amplified at all."""
    cost = SiloCost(POISSON, 2, "models")
    assert (cost.whole, cost.jobs) == (True, 8)
    assert cost.asked.relation == "add_remove"
    assert cost.asked.items == (Item(PoissonSampled(0.5, GaussianNoise(1.0)), 8),)
    assert cost.job(0) == (Item(GaussianNoise(1.0)),)  # drawn again: that it was there is known


def test_charging_amplified_rounds_as_they_come_is_caught(tmp_path: Path) -> None:
    """Sabotage: a silo in 4 of 8 rounds pays 4 amplified events, half of what the models tell of it."""
    cost = SiloCost(POISSON, 0, "models")
    line = POISSON.forecast.line("models")
    with Ledger.open(tmp_path / "l", create=True) as ledger:
        ledger.limit("own", Limit(100.0, 1e-5, "client", "add_remove"))
        ledger.admit("right", "own", cost.asked, whole=True, jobs=cost.jobs)
        for t in range(4):
            ledger.charge("right", f"{t}", cost.job(t))
        right = ledger.statement("own").epsilon
        ledger.limit("wrong", Limit(100.0, 1e-5, "client", "add_remove"))
        ledger.admit("wrong", "wrong", cost.asked, whole=False)
        for t in range(4):
            ledger.charge("wrong", f"wrong {t}", (Item(line.entries[0][0]),))
        accounted = accountant.epsilon(line.entries, line.relation, 1e-5).value
        assert right == pytest.approx(accounted)
        assert ledger.statement("wrong").epsilon < 0.9 * accounted


@pytest.mark.parametrize("adversary", ["cohort", "messages"])
def test_to_one_who_sees_who_takes_part_rounds_are_charged_as_they_come(adversary: str) -> None:
    local = client_plan(clients=Poisson(6, 0.5), rounds=8, release=LocalNoise(Gaussian(3.0)))
    cost = SiloCost(local, 1, adversary)  # type: ignore[arg-type]
    assert not cost.whole
    assert cost.asked.items == (Item(GaussianNoise(3.0), 4),)
    assert cost.job(5) == (Item(GaussianNoise(3.0)),)


def test_two_one_pass_runs_of_different_batches_compose_per_record(tmp_path: Path) -> None:
    """Each reads every record at most once: two releases in all, whatever the blocks are."""
    first, second = (SiloCost(reading(OnePass(batch, SIZES)), 0) for batch in (10, 8))
    with Ledger.open(tmp_path / "l", create=True) as ledger:
        ledger.limit("own", Limit(1e4, 1e-5, "record"))
        for name, cost in (("a", first), ("b", second)):
            ledger.admit(name, "own", cost.asked, whole=False)
            for t in range(cost.plan.rounds):
                ledger.charge(name, f"{name}{t}", cost.job(t))
        events = [(cost.job(0)[0].event, 1) for cost in (first, second)]
        assert ledger.statement("own").epsilon == pytest.approx(accountant.epsilon(events, "replace_one", 1e-5).value)
