"""Promises of the record samplers: each draws what it costs, from the silo's own coins, and refuses sizes that lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting.events import FixedSampled, GaussianNoise, PoissonSampled
from sordino.errors import PlanError
from sordino.parts.record_samplers import (
    AllRecords,
    FixedRecords,
    OnePass,
    PoissonRecords,
    RecordSampler,
    RecordsInTurn,
    ShuffledRecords,
    batches,
)
from sordino.rng import Seeded

Z = GaussianNoise(1.5)


def coins(seed: int = 0) -> np.random.Generator:
    return Seeded(seed).at(0, "batches", 0)


# ---- what is drawn ---------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 60), batch=st.integers(1, 7), silo=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_one_pass_reads_no_record_twice_and_leaves_less_than_a_batch(size: int, batch: int, silo: int) -> None:
    sampler = OnePass(min(batch, size), (size,))
    rounds = sampler.max_rounds()
    assert rounds == size // sampler.batch
    drawn = np.concatenate([sampler.draw(t, silo, size, coins(t)) for t in range(rounds)])
    assert len(set(drawn.tolist())) == len(drawn) == rounds * sampler.batch
    assert set(drawn.tolist()) <= set(range(size))
    assert size - len(drawn) < sampler.batch


def test_one_pass_covers_everything_where_the_batch_divides_the_size() -> None:
    drawn = np.concatenate([OnePass(5, (30,)).draw(t, 2, 30, coins()) for t in range(6)])
    assert sorted(drawn.tolist()) == list(range(30))


def test_one_pass_reads_the_same_block_when_a_round_is_run_again_whatever_the_coins() -> None:
    sampler = OnePass(4, (20,))
    first, again = (sampler.draw(3, 1, 20, coins(seed)) for seed in (1, 2))
    assert first.tolist() == again.tolist()
    assert sampler.draw(3, 0, 20, coins()).tolist() != first.tolist()  # silos are permuted each for itself


def test_one_pass_stays_disjoint_over_the_steps_of_all_rounds() -> None:
    tables = [batches(OnePass(2, (24,)), t, 0, 24, coins(t), steps=3) for t in range(4)]
    assert sorted(np.concatenate(tables).ravel().tolist()) == list(range(24))


@pytest.mark.parametrize("batch", [1, 3, 10])
def test_a_fixed_batch_holds_so_many_distinct_records_each_as_often(batch: int) -> None:
    rng, counts = coins(), np.zeros(10)
    for _ in range(3000):
        drawn = batches(FixedRecords(batch, (10,)), 0, 0, 10, rng, 1)[0]
        assert len(set(drawn.tolist())) == batch
        counts[drawn] += 1
    assert np.all(np.abs(counts / 3000 - batch / 10) < 0.045)  # five standard deviations


def test_pairs_of_a_fixed_batch_are_as_likely_as_each_other() -> None:
    rng, together = coins(), np.zeros((6, 6))
    for _ in range(6000):
        a, b = FixedRecords(2, (6,)).draw(0, 0, 6, rng)
        together[a, b] += 1
    pairs = (together + together.T)[np.triu_indices(6, 1)] / 6000
    assert np.all(np.abs(pairs - 1 / 15) < 0.018)


def test_poisson_draws_every_record_by_its_own_coin() -> None:
    sampler, rng, table = PoissonRecords(3.0, (10, 30)), coins(), np.zeros((4000, 30))
    assert (sampler.rate(0), sampler.rate(1)) == (0.3, 0.1)
    for row in table:
        row[sampler.draw(0, 1, 30, rng)] = 1
    assert np.all(np.abs(table.mean(0) - 0.1) < 0.025)
    assert abs(float(table.sum(1).var()) - 30 * 0.1 * 0.9) < 0.4  # the size of a binomial
    assert abs(float(np.corrcoef(table[:, 0], table[:, 1])[0, 1])) < 0.08


def test_the_rate_of_poisson_is_that_of_the_declared_size_whatever_the_silo_holds() -> None:
    rng = coins()
    sizes = [len(PoissonRecords(5.0, (50,)).draw(0, 0, 100, rng)) for _ in range(2000)]
    assert abs(np.mean(sizes) - 10.0) < 0.4


def test_a_poisson_batch_that_is_empty_is_a_row_of_padding() -> None:
    table = batches(PoissonRecords(1e-9, (10,)), 0, 0, 10, coins(), 3)
    assert table.tolist() == [[-1], [-1], [-1]]


def test_all_records_are_all_of_them_in_order() -> None:
    assert AllRecords((7, 3)).draw(0, 0, 7, coins()).tolist() == list(range(7))
    assert AllRecords((7, 3)).count == 5.0


@pytest.mark.parametrize("sampler", [FixedRecords(3, (20,)), PoissonRecords(3.0, (20,))], ids=str)
def test_coins_decide_and_nothing_else_does(sampler: RecordSampler) -> None:
    drawn = {tuple(sorted(sampler.draw(4, 1, 20, coins(seed)).tolist())) for seed in range(30)}
    assert len(drawn) > 20
    assert sampler.draw(1, 0, 20, coins(3)).tolist() == sampler.draw(2, 5, 20, coins(3)).tolist()


# ---- what it is worth ------------------------------------------------------------------------------------------------


def test_each_sampler_wraps_the_event_by_the_silos_own_size() -> None:
    assert FixedRecords(3, (30, 60)).amplify(Z, 1) == FixedSampled(60, 3, Z)
    assert PoissonRecords(3.0, (30, 60)).amplify(Z, 0) == PoissonSampled(0.1, Z)
    assert FixedRecords(30, (30, 60)).amplify(Z, 0) == Z  # all of a silo's records: no coin was tossed
    assert AllRecords((30, 60)).amplify(Z, 0) == Z
    assert OnePass(3, (30, 60)).amplify(Z, 0) == Z  # a public permutation hides nothing


def test_only_poisson_speaks_of_adding_and_removing() -> None:
    samplers: list[RecordSampler] = [
        AllRecords((4,)),
        FixedRecords(2, (4,)),
        OnePass(2, (4,)),
        ShuffledRecords(2, (4,)),
        PoissonRecords(2, (4,)),
    ]
    assert [sampler.relation for sampler in samplers] == ["replace_one"] * 4 + ["add_remove"]
    assert [sampler.disjoint for sampler in samplers] == [False, False, True, True, False]


def test_a_shuffled_epoch_reads_every_record_once_and_the_next_in_another_order() -> None:
    sampler = ShuffledRecords(3, (10, 12))
    for silo, size, per_epoch in ((0, 10, 3), (1, 12, 4)):
        epochs = [
            np.concatenate([sampler.draw(e * per_epoch + k, silo, size, coins()) for k in range(per_epoch)]).tolist()
            for e in range(5)
        ]
        assert all(len(set(epoch)) == per_epoch * 3 for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 5


def test_batches_in_turn_read_a_record_once_an_epoch_and_in_the_same_place() -> None:
    sampler, steps = RecordsInTurn(3, (10,)), 20
    table = np.zeros((steps, 10), dtype=int)
    for t in range(steps):
        table[t, sampler.draw(t, 0, 10, coins())] = 1
    for record in range(10):
        rounds = np.flatnonzero(table[:, record])
        assert set(np.diff(rounds)) <= {sampler.min_separation(0)} == {3}
    for length in range(1, steps + 1):
        assert table[:length].sum(0).max() == sampler.max_participations(length, 0)
        windows = [table[t : t + length].sum(0).max() for t in range(steps - length + 1)]
        assert max(windows) <= sampler.max_repeated_reads(length, 0)


def test_a_record_is_read_as_often_as_its_sampler_says_at_most() -> None:
    """Every window of every length, counted; the sabotage is the count of one epoch too few."""
    shuffled, steps = ShuffledRecords(3, (10,)), 20
    table = np.zeros((steps, 10), dtype=int)
    for t in range(steps):
        table[t, shuffled.draw(t, 0, 10, coins())] = 1
    for length in range(1, steps + 1):
        assert table[:length].sum(0).max() <= shuffled.max_participations(length, 0) == -(-length // 3)
        windows = [table[t : t + length].sum(0).max() for t in range(steps - length + 1)]
        assert max(windows) <= shuffled.max_repeated_reads(length, 0)
    assert table[:6].sum(0).max() > shuffled.max_participations(6, 0) - 1
    assert (OnePass(2, (8,)).max_participations(4, 0), FixedRecords(2, (8,)).max_participations(4, 0)) == (1, 4)
    assert (OnePass(2, (8,)).max_repeated_reads(4, 0), FixedRecords(2, (8,)).max_repeated_reads(4, 0)) == (1, 4)


def test_one_size_stands_for_all_silos() -> None:
    assert [FixedRecords(2, (9,)).size(silo) for silo in (0, 5)] == [9, 9]
    FixedRecords(2, (9,)).check(17)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FixedRecords, OnePass, ShuffledRecords, RecordsInTurn, PoissonRecords])
@pytest.mark.parametrize(("batch", "sizes"), [(5, (9, 4, 7)), (0, (9,)), (-1, (9,)), (1, ()), (1, (3, 0))])
def test_a_batch_larger_than_a_silo_or_an_empty_silo_is_refused(kind: type, batch: int, sizes: tuple[int, ...]) -> None:
    with pytest.raises(PlanError) as refused:
        kind(batch, sizes)
    assert refused.value.rule == "records"


def test_the_silo_that_is_too_small_is_named() -> None:
    with pytest.raises(PlanError, match="a batch of 5 where the smallest silo has 4 records"):
        FixedRecords(5, (9, 4, 7))


@pytest.mark.parametrize("sampler", [AllRecords((3, 4)), FixedRecords(2, (3, 4))], ids=str)
def test_as_many_sizes_as_silos_are_needed(sampler: RecordSampler) -> None:
    sampler.check(2)
    with pytest.raises(PlanError, match="2 sizes for 3 silos"):
        sampler.check(3)


def test_a_batch_that_is_no_number_is_refused() -> None:
    with pytest.raises(PlanError):
        PoissonRecords(float("nan"), (9,))
