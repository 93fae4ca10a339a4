"""The ledger: all that was ever released of a data set composes to at most its limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ledger.release import release

from sordino.accounting import accountant
from sordino.accounting.events import (
    Approximate,
    Event,
    FixedSampled,
    GaussianNoise,
    LaplaceNoise,
    PoissonSampled,
    Relation,
    Unprotected,
)
from sordino.accounting.pld import gaussian_epsilon
from sordino.errors import BudgetError, ConfigError, PlanError
from sordino.ledger import totals
from sordino.ledger.ledger import Ledger, Request
from sordino.ledger.totals import Block, Item, JobEntry, Limit, LimitEntry, RunEntry

GAUSS = GaussianNoise(4.0)
DELTA = 1e-5
ROOMY = Limit(8.0, DELTA, "record")


def mu_of(count: int, noise_multiplier: float = 4.0, movement: float = 2.0) -> float:
    return math.sqrt(count) * movement / noise_multiplier


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(tmp_path / "budget.ledger", create=True) as found:
        found.limit("heart", ROOMY)
        yield found


def asked(*items: Item, relation: Relation = "replace_one") -> Request:
    return Request("record", relation, items)


def enter(ledger: Ledger, *runs: str, relation: Relation = "replace_one") -> None:
    for run in runs:
        ledger.admit(run, "heart", asked(relation=relation), whole=False)


# ---- composition ----------------------------------------------------------------------------------------------------


def test_what_is_spent_is_the_composition_of_all_runs(ledger: Ledger) -> None:
    """Closed form: n Gaussians of two runs are one with mu sqrt(n). By maximum, or one run alone, it would be less."""
    enter(ledger, "a", "b")
    for t in range(3):
        ledger.charge("a", f"a/{t}", (Item(GAUSS),))
        ledger.charge("b", f"b/{t}", (Item(GAUSS, 2),))
    found = ledger.statement("heart")
    assert found.epsilon == pytest.approx(gaussian_epsilon(mu_of(9), DELTA))
    assert (found.runs, found.charges, found.items) == (2, 6, (Item(GAUSS, 9),))


def test_the_last_charge_that_fits_is_made_and_the_next_refused(tmp_path: Path) -> None:
    allowed = next(n for n in range(1, 100) if gaussian_epsilon(mu_of(n + 1), DELTA) > 3.0)
    with Ledger.open(tmp_path / "l", create=True) as ledger:
        ledger.limit("heart", Limit(3.0, DELTA, "record"))
        enter(ledger, "a")
        for t in range(allowed):
            ledger.charge("a", f"{t}", (Item(GAUSS),))
        before = ledger.history("heart")
        with pytest.raises(
            BudgetError, match=r"would have spent epsilon 3\..* with this charge, and its limit is 3 at delta 1e-05"
        ):
            ledger.charge("a", "one more", (Item(GAUSS),))
        assert ledger.history("heart") == before
        assert ledger.statement("heart").epsilon <= 3.0


def test_a_ledger_that_composes_by_maximum_is_caught(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: every event by itself, and the worst of them."""

    def alone(held: totals.Total) -> list[tuple[tuple[Event, int], ...]]:
        return [((event, 1),) for event, _, _ in held]

    monkeypatch.setattr(totals, "records", alone)
    with pytest.raises(AssertionError):
        test_what_is_spent_is_the_composition_of_all_runs(ledger)


def test_events_of_many_kinds_compose_as_the_accountant_composes_them(ledger: Ledger) -> None:
    kinds: list[Event] = [PoissonSampled(0.1, GaussianNoise(2.0)), GAUSS, Approximate(0.1, 1e-9), LaplaceNoise(20.0)]
    kinds[0] = FixedSampled(100, 10, GaussianNoise(4.0))
    enter(ledger, "a")
    for k, event in enumerate(kinds):
        ledger.charge("a", f"{k}", (Item(event, k + 1),))
    entries = tuple((event, k + 1) for k, event in enumerate(kinds))
    assert ledger.statement("heart").epsilon == pytest.approx(
        accountant.epsilon(entries, "replace_one", DELTA).value, 1e-3
    )


def test_nothing_spent_is_epsilon_0(ledger: Ledger) -> None:
    assert ledger.statement("heart").epsilon == 0.0


def test_a_release_without_noise_is_refused(ledger: Ledger) -> None:
    enter(ledger, "a")
    with pytest.raises(BudgetError, match="spent epsilon inf"):
        ledger.charge("a", "0", (Item(Unprotected()),))


# ---- blocks and silos -----------------------------------------------------------------------------------------------


def block(start: int, stop: int, order: str = "0/100/0") -> Block:
    return Block(order, start, stop)


def brute_force(items: tuple[Item, ...], size: int) -> float:
    """One position after the other."""
    worst = 0.0
    for i in range(size):
        counts: dict[Event, int] = {}
        for item in items:
            if item.block is None or item.block.start <= i < item.block.stop:
                counts[item.event] = counts.get(item.event, 0) + item.count
        worst = max(worst, accountant.epsilon(tuple(counts.items()), "replace_one", DELTA).value if counts else 0.0)
    return worst


def test_disjoint_blocks_cost_one_release_and_the_same_block_again_two(ledger: Ledger) -> None:
    enter(ledger, "a")
    for t in range(10):
        ledger.charge("a", f"{t}", (Item(GAUSS, block=block(10 * t, 10 * t + 10)),))
    assert ledger.statement("heart").epsilon == pytest.approx(gaussian_epsilon(mu_of(1), DELTA))
    ledger.charge("a", "0", (Item(GAUSS, block=block(0, 10)),))
    assert ledger.statement("heart").epsilon == pytest.approx(gaussian_epsilon(mu_of(2), DELTA))


def test_blocks_of_two_runs_that_overlap_compose_where_they_do(ledger: Ledger) -> None:
    """Batches of 20 and of 30 of one public order: against one position after the other."""
    loud, quiet = GaussianNoise(3.0), GaussianNoise(8.0)
    first = tuple(Item(quiet, block=block(20 * t, 20 * t + 20)) for t in range(4))
    second = tuple(Item(loud, block=block(30 * t, 30 * t + 30)) for t in (0, 2))
    enter(ledger, "a", "b")
    ledger.charge("a", "a", first)
    ledger.charge("b", "b", (*second, Item(GAUSS)))
    expected = brute_force((*first, *second, Item(GAUSS)), 100)
    assert ledger.statement("heart").epsilon == pytest.approx(expected)
    assert expected < accountant.epsilon(((loud, 2), (quiet, 4), (GAUSS, 1)), "replace_one", DELTA).value


def test_a_ledger_that_forgets_the_blocks_of_the_other_run_is_caught(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sabotage: blocks of different length are taken for blocks of different records."""
    real = totals._positions

    def own(blocks: list[tuple[Block, Event, int]]) -> list[object]:
        lengths = {one[0].stop - one[0].start for one in blocks}
        return [kind for n in lengths for kind in real([one for one in blocks if one[0].stop - one[0].start == n])]

    monkeypatch.setattr(totals, "_positions", own)
    with pytest.raises(AssertionError):
        test_blocks_of_two_runs_that_overlap_compose_where_they_do(ledger)


def test_blocks_of_different_orders_may_be_the_same_records(ledger: Ledger) -> None:
    enter(ledger, "a")
    for epoch in range(3):
        for t in range(5):
            here = block(10 * t, 10 * t + 10, f"0/100/{epoch}")
            ledger.charge("a", f"{epoch}/{t}", (Item(GAUSS, block=here),))
    assert ledger.statement("heart").epsilon == pytest.approx(gaussian_epsilon(mu_of(3), DELTA))


def test_silos_of_one_data_set_are_apart_and_the_worst_counts(ledger: Ledger) -> None:
    ledger.admit("a", "heart", asked(Item(GAUSS, 4, silo="va"), Item(GAUSS, 9, silo="basel")), whole=True)
    ledger.admit("b", "heart", asked(Item(GAUSS, 4, silo="va"), Item(GAUSS, 1)), whole=True)
    assert ledger.statement("heart").epsilon == pytest.approx(gaussian_epsilon(mu_of(10), DELTA))


# ---- relations and units --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", ["add_remove", "zero_out"])
def test_another_relation_is_priced_anew_under_the_limits_or_refused(ledger: Ledger, relation: Relation) -> None:
    """Whoever is replaced is removed and another added: the movement is 2. The other way round nothing follows."""
    enter(ledger, "a", relation=relation)
    ledger.charge("a", "0", (Item(GAUSS),))
    assert ledger.statement("heart").epsilon == pytest.approx(gaussian_epsilon(mu_of(1, movement=2.0), DELTA))
    ledger.limit("removed", Limit(8.0, DELTA, "record", relation))
    with pytest.raises(ConfigError, match="differ by replace_one, and the limit is for"):
        ledger.admit("b", "removed", asked(), whole=False)
    ledger.admit("c", "removed", asked(relation=relation), whole=False)
    ledger.charge("c", "1", (Item(GAUSS),))
    assert ledger.statement("removed").epsilon == pytest.approx(gaussian_epsilon(mu_of(1, movement=1.0), DELTA))


def test_an_event_that_states_nothing_for_the_limits_relation_is_refused(ledger: Ledger) -> None:
    event = PoissonSampled(0.1, LaplaceNoise(1.0))
    with pytest.raises(PlanError):
        accountant.bound(((event, 2),), "replace_one", DELTA)
    enter(ledger, "a", relation="add_remove")
    with pytest.raises(BudgetError):
        ledger.charge("a", "0", (Item(event),))


def test_another_unit_is_refused(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="one client is protected, and the limit is for one record"):
        ledger.admit("a", "heart", Request("client", "replace_one", ()), whole=False)


def test_unit_and_relation_stay_once_a_run_was_admitted(ledger: Ledger) -> None:
    ledger.limit("heart", Limit(2.0, 1e-6, "client", "add_remove"))
    ledger.limit("heart", ROOMY)
    enter(ledger, "a")
    with pytest.raises(ConfigError, match="one record, replace_one"):
        ledger.limit("heart", Limit(8.0, DELTA, "client"))
    ledger.limit("heart", Limit(1.0, 1e-6, "record"))
    assert ledger.statement("heart").limit == Limit(1.0, 1e-6, "record")


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_that_is_charged_whole_pays_once_however_often_it_is_admitted(ledger: Ledger) -> None:
    for _ in range(3):
        ledger.admit("a", "heart", asked(Item(GAUSS, 5)), whole=True, jobs=2)
    assert ledger.statement("heart").items == (Item(GAUSS, 5),)
    ledger.admit("a", "heart", asked(Item(GAUSS, 7)), whole=True)
    ledger.admit("a", "heart", asked(Item(GAUSS, 3)), whole=True)
    assert ledger.statement("heart").items == (Item(GAUSS, 7),)
    assert len(ledger.history("heart")) == 3


def test_jobs_of_a_whole_run_are_paid_for_once_each_and_no_more_than_it_has(ledger: Ledger) -> None:
    ledger.admit("a", "heart", asked(Item(GAUSS, 5)), whole=True, jobs=2)
    for job in ("0", "1"):
        ledger.charge("a", job, (Item(GAUSS),))
    assert ledger.statement("heart").items == (Item(GAUSS, 5),)
    ledger.charge("a", "1", (Item(GAUSS),))  # drawn again
    ledger.charge("a", "2", (Item(GAUSS),))  # one more than was charged
    assert ledger.statement("heart").items == (Item(GAUSS, 7),)


def test_a_run_that_pays_by_the_job_has_no_free_jobs(ledger: Ledger) -> None:
    ledger.admit("a", "heart", asked(Item(GAUSS, 5)), whole=False, jobs=5)
    ledger.charge("a", "0", (Item(GAUSS),))
    assert ledger.statement("heart").items == (Item(GAUSS),)


def test_a_run_that_cannot_be_paid_for_is_not_admitted(ledger: Ledger) -> None:
    for whole in (True, False):
        with pytest.raises(BudgetError):
            ledger.admit("a", "heart", asked(Item(GAUSS, 500)), whole=whole)
    assert ledger.statement("heart").runs == 0


def test_a_run_that_is_resumed_asks_for_what_it_has_not_paid_yet(tmp_path: Path) -> None:
    """Room for 10 releases: a run of 10 that has done 9 may come back; another of 2 may not."""
    with Ledger.open(tmp_path / "l", create=True) as ledger:
        ledger.limit("heart", Limit(gaussian_epsilon(mu_of(10), DELTA) + 1e-6, DELTA, "record"))
        ledger.admit("a", "heart", asked(Item(GAUSS, 10)), whole=False)
        for t in range(9):
            ledger.charge("a", f"{t}", (Item(GAUSS),))
        ledger.admit("a", "heart", asked(Item(GAUSS, 10)), whole=False)
        with pytest.raises(BudgetError):
            ledger.admit("b", "heart", asked(Item(GAUSS, 2)), whole=False)


def test_what_a_run_has_cost_after_all_is_written_down_whatever_the_limit(ledger: Ledger) -> None:
    ledger.admit("a", "heart", asked(Item(GAUSS, 2)), whole=True)
    ledger.charge_at_least("a", (Item(GAUSS, 1000),))
    ledger.charge_at_least("a", (Item(GAUSS, 3),))
    assert ledger.statement("heart").epsilon > ROOMY.epsilon
    ledger.admit("a", "heart", asked(Item(GAUSS, 3)), whole=True)  # it was charged for that
    with pytest.raises(BudgetError):
        enter(ledger, "b")
    with pytest.raises(BudgetError):
        ledger.charge("a", "0", (Item(GaussianNoise(1e6)),))


def test_a_run_stays_with_its_data_set(ledger: Ledger) -> None:
    ledger.limit("other", ROOMY)
    enter(ledger, "a")
    with pytest.raises(ConfigError, match="the data set to which this run was first charged"):
        ledger.admit("a", "other", asked(), whole=False)
    with pytest.raises(ConfigError, match="a run that was admitted"):
        ledger.charge("b", "0", (Item(GAUSS),))


def test_a_run_is_admitted_for_one_plan(ledger: Ledger) -> None:
    """Else jobs of a louder plan would be paid for by what a quieter one was charged whole."""
    ledger.admit("a", "heart", Request("record", "replace_one", (Item(GAUSS, 5),), "quiet"), whole=True, jobs=5)
    for whole in (True, False):
        with pytest.raises(ConfigError, match="plan quiet, one record, replace_one, as this run was admitted"):
            ledger.admit("a", "heart", Request("record", "replace_one", (), "loud"), whole=whole)


# ---- messages -------------------------------------------------------------------------------------------------------


def test_the_same_job_again_gets_the_same_bytes_and_costs_nothing(ledger: Ledger) -> None:
    enter(ledger, "a")
    assert ledger.replay("0") is None
    assert release(ledger, "a", "0", (Item(GAUSS),), lambda: b"first") == b"first"
    assert release(ledger, "a", "0", (Item(GAUSS),), lambda: b"second") == b"first"
    assert ledger.replay("0") == b"first"
    assert ledger.charges("a") == {"0": 1}


def test_a_job_whose_message_was_not_stored_is_charged_again(ledger: Ledger) -> None:
    enter(ledger, "a")
    ledger.charge("a", "0", (Item(GAUSS),))
    assert release(ledger, "a", "0", (Item(GAUSS),), lambda: b"second") == b"second"
    assert ledger.charges("a") == {"0": 2}
    assert ledger.statement("heart").items == (Item(GAUSS, 2),)


def test_of_two_messages_for_one_job_only_the_first_ever_leaves(ledger: Ledger) -> None:
    enter(ledger, "a")
    one, other = (ledger.charge("a", "0", (Item(GAUSS),)) for _ in range(2))
    assert ledger.store(other, b"other") == b"other"
    assert ledger.store(one, b"one") == b"other"


def test_a_message_without_a_charge_is_not_stored(ledger: Ledger, tmp_path: Path) -> None:
    enter(ledger, "a")
    receipt = ledger.charge("a", "0", (Item(GAUSS),))
    with Ledger.open(tmp_path / "fresh", create=True) as other, pytest.raises(ConfigError, match="a job that was"):
        other.store(receipt, b"x")


def test_a_job_belongs_to_one_run(ledger: Ledger) -> None:
    enter(ledger, "a", "b")
    ledger.charge("a", "0", (Item(GAUSS),))
    with pytest.raises(ConfigError, match="a job name that no other run has used"):
        ledger.charge("b", "0", (Item(GAUSS),))


# ---- what stays -----------------------------------------------------------------------------------------------------


def test_another_process_reads_what_this_one_wrote(ledger: Ledger) -> None:
    """Two hands on one file: each sees at once what the other has charged."""
    enter(ledger, "a")
    with Ledger.open(ledger.path) as other:
        for t in range(4):
            (ledger, other)[t % 2].charge("a", f"{t}", (Item(GAUSS),))
        assert other.statement("heart") == ledger.statement("heart")
        assert ledger.statement("heart").items == (Item(GAUSS, 4),)


def test_history_holds_every_line_in_its_order(ledger: Ledger) -> None:
    enter(ledger, "a")
    ledger.charge("a", "0", (Item(GAUSS, 2, block(0, 5)),))
    ledger.limit("heart", Limit(9.0, DELTA, "record"))
    ledger.limit("other", ROOMY)
    kinds = [type(line) for line in ledger.history("heart")]
    assert kinds == [LimitEntry, RunEntry, JobEntry, LimitEntry]
    assert ledger.names == ["heart", "other"]


@pytest.mark.parametrize("count", [0, -1, 2**40])
def test_a_count_that_is_none_is_refused(count: int) -> None:
    with pytest.raises(ConfigError):
        Item(GAUSS, count)


@pytest.mark.parametrize("noise_multiplier", [math.nan, 0.0, -1.0])
def test_noise_that_is_none_is_refused(ledger: Ledger, noise_multiplier: float) -> None:
    enter(ledger, "a")
    with pytest.raises(BudgetError):
        ledger.charge("a", "0", (Item(GaussianNoise(noise_multiplier)),))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.1), (math.inf, 0.1), (math.nan, 0.1), (1.0, 1.0), (1.0, -0.1)])
def test_a_limit_that_is_none_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ConfigError, match="a finite epsilon above 0"):
        Limit(epsilon, delta, "record")
