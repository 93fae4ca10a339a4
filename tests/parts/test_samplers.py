"""Promises of the samplers: they draw what they cost, distinct and sorted, at a cost that ignores the population."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from sordino.accounting.events import CappedPoisson, FixedSampled, GaussianNoise, PoissonSampled
from sordino.errors import PlanError
from sordino.parts.samplers import Cohort, Everyone, FixedSize, Poisson, RoundRobin, Sampler
from sordino.rng import Seeded

SAMPLERS: tuple[Sampler, ...] = (
    Everyone(17),
    Poisson(17, 0.3),
    Poisson(17, 1.0),
    Poisson(17, 0.5, cap=4),
    FixedSize(17, 5),
    FixedSize(17, 17),
    RoundRobin(17, 5),
    RoundRobin(17, 17),
    RoundRobin(17, 5, seed=4),
    RoundRobin(5, 2, order=(4, 2, 0, 1, 3)),
)


SHUFFLED = (RoundRobin(9, 4, seed=1), RoundRobin(5, 2, order=(4, 2, 0, 1, 3)))


def draws(sampler: Sampler, count: int, seed: int = 3) -> list[Cohort]:
    return [sampler.draw(t, Seeded(seed).at(t, "cohort")) for t in range(count)]


def counts(cohorts: list[Cohort], population: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.bincount(np.concatenate(cohorts), minlength=population)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_every_cohort_is_distinct_sorted_and_within_the_population(sampler: Sampler) -> None:
    for cohort in draws(sampler, 50):
        assert cohort.dtype == np.int64
        assert np.all(np.diff(cohort) > 0)
        assert np.all((cohort >= 0) & (cohort < sampler.population))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_the_same_stream_draws_the_same_cohort(sampler: Sampler) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(draws(sampler, 5), draws(sampler, 5), strict=True))


def test_poisson_takes_each_client_at_its_rate_and_independently() -> None:
    rounds, population, rate = 4000, 50, 0.2
    cohorts = draws(Poisson(population, rate), rounds)
    each = counts(cohorts, population)
    assert stats.chisquare(each, np.full(population, each.mean())).pvalue > 1e-3
    assert stats.binomtest(int(each.sum()), rounds * population, rate).pvalue > 1e-3
    sizes = np.array([len(cohort) for cohort in cohorts])
    spread = rounds * sizes.var() / (population * rate * (1 - rate))
    assert 1e-3 < stats.chi2.cdf(spread, rounds - 1) < 1 - 1e-3  # a fixed size or a shared coin has another variance
    pairs = sum(0 in cohort and 1 in cohort for cohort in cohorts)
    assert stats.binomtest(pairs, rounds, rate**2).pvalue > 1e-3


def test_poisson_sizes_are_binomial_to_the_last_size() -> None:
    sizes = np.bincount([len(cohort) for cohort in draws(Poisson(4, 0.5), 4000)], minlength=5)
    assert stats.chisquare(sizes, 4000 * stats.binom.pmf(np.arange(5), 4, 0.5)).pvalue > 1e-3
    assert sizes[0] > 0  # the empty cohort happens and is kept


def test_a_cap_cuts_the_cohort_and_still_favours_nobody() -> None:
    cohorts = draws(Poisson(20, 0.5, cap=8), 4000)
    sizes = np.array([len(cohort) for cohort in cohorts])
    assert sizes.max() == 8
    kept = stats.binom.pmf(np.arange(8), 20, 0.5)
    wanted = 4000 * np.append(kept, 1 - kept.sum())
    assert (
        stats.chisquare(np.bincount(sizes, minlength=9)[4:], [*wanted[4:8], wanted[8]], sum_check=False).pvalue > 1e-3
    )
    each = counts(cohorts, 20)
    assert stats.chisquare(each, np.full(20, each.mean())).pvalue > 1e-3


def test_fixed_size_makes_every_subset_equally_likely() -> None:
    subsets = {pair: i for i, pair in enumerate(itertools.combinations(range(5), 2))}
    seen = np.bincount([subsets[int(c[0]), int(c[1])] for c in draws(FixedSize(5, 2), 4000)], minlength=10)
    assert stats.chisquare(seen).pvalue > 1e-3


@pytest.mark.parametrize(("population", "cohort"), [(17, 5), (12, 4), (7, 7), (10, 1), (9, 8)])
@pytest.mark.parametrize("rounds", [1, 2, 5, 13, 40])
def test_round_robin_is_fair_and_bills_each_client_its_own_rounds(population: int, cohort: int, rounds: int) -> None:
    sampler = RoundRobin(population, cohort)
    each = counts(draws(sampler, rounds), population)
    assert each.max() == sampler.max_participations(rounds)
    assert each.max() - each.min() <= 1


@pytest.mark.parametrize("sampler", [Everyone(7), RoundRobin(7, 3), RoundRobin(5, 5), RoundRobin(9, 4), *SHUFFLED])
@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_turns_of_public_cohorts_are_those_that_are_drawn(sampler: Sampler, rounds: int) -> None:
    assert sampler.participations(rounds).tolist() == counts(draws(sampler, rounds), sampler.population).tolist()
    assert sampler.participations(rounds).max() == sampler.max_participations(rounds)


@pytest.mark.parametrize("sampler", [Poisson(6, 0.3), FixedSize(10, 3)])
def test_random_cohorts_keep_within_by_the_binomial(sampler: Sampler) -> None:
    allowed = np.arange(12)
    assert sampler.participation_cdf(allowed, 9).tolist() == pytest.approx(stats.binom.cdf(allowed, 9, 0.3).tolist())
    assert sampler.participations(9).tolist() == pytest.approx([2.7] * sampler.population)
    assert (
        Poisson(6, 0.3, cap=1).participation_cdf(allowed, 9).tolist() == [1.0] * 12
    )  # a lower rate: nothing is refused by it


def test_everyone_is_everyone() -> None:
    assert np.array_equal(Everyone(5).draw(3, Seeded(0).at(3, "cohort")), np.arange(5))
    assert Everyone(5).max_participations(7) == 7


@pytest.mark.parametrize("sampler", [Poisson(30, 0.1), Poisson(30, 0.6), FixedSize(30, 3), Poisson(30, 0.6, cap=10)])
@pytest.mark.parametrize("rounds", [1, 4, 30])
def test_most_is_exceeded_less_than_once_in_a_million_and_not_for_nothing(sampler: Sampler, rounds: int) -> None:
    rate = sampler.expected / sampler.population
    most, tail = sampler.max_participations(rounds), stats.binom(rounds, rate).sf
    assert 30 * tail(most) <= 1e-6  # any client, by the union bound
    assert most == 0 or 30 * tail(most - 1) > 1e-6
    runs = [counts(draws(sampler, rounds, seed), sampler.population).max() for seed in range(20)]
    assert max(runs) <= most


def test_most_never_exceeds_the_rounds() -> None:
    assert [sampler.max_participations(9) for sampler in (Poisson(5, 1.0), FixedSize(5, 5), RoundRobin(5, 5))] == [
        9,
        9,
        9,
    ]


@pytest.mark.parametrize("sampler", [Poisson(1_000_000, 2e-4), FixedSize(1_000_000, 200), RoundRobin(1_000_000, 200)])
def test_a_cohort_of_a_million_clients_costs_little(sampler: Sampler) -> None:
    rng = Seeded(0).at(0, "cohort")
    tracemalloc.start()
    cohort = sampler.draw(0, rng)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 100 < len(cohort) < 300
    assert peak < 200_000  # bytes; a list of the population would take 8,000,000


def test_the_denominator_is_a_constant_of_the_plan() -> None:
    assert [s.expected for s in (Everyone(8), Poisson(8, 0.25), FixedSize(8, 3), RoundRobin(8, 3))] == [8, 2, 3, 3]


def test_each_sampler_wraps_the_event_it_is_proved_for() -> None:
    noise = GaussianNoise(1.0)
    assert Everyone(8).amplify(noise) == noise
    assert RoundRobin(8, 3).amplify(noise) == noise
    assert Poisson(8, 0.25).amplify(noise) == PoissonSampled(0.25, noise)
    assert Poisson(8, 0.25, cap=4).amplify(noise) == CappedPoisson(0.25, 8, 4, noise)
    assert Poisson(8, 0.25, cap=8).amplify(noise) == PoissonSampled(0.25, noise)  # a cap that never cuts
    assert FixedSize(8, 3).amplify(noise) == FixedSampled(8, 3, noise)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Everyone(0),
        lambda: Poisson(0, 0.5),
        lambda: Poisson(5, 0.0),
        lambda: Poisson(5, 1.1),
        lambda: Poisson(5, float("nan")),
        lambda: Poisson(5, 0.5, cap=0),
        lambda: FixedSize(5, 0),
        lambda: FixedSize(5, 6),
        lambda: RoundRobin(5, 0),
        lambda: RoundRobin(5, 6),
    ],
)
def test_impossible_samplers_are_refused(make: object) -> None:
    with pytest.raises(PlanError, match="sampling"):
        make()  # type: ignore[operator]


def test_a_public_order_changes_who_comes_when_and_nothing_of_the_bill() -> None:
    """The cohorts are those of the plain order under one renaming of the clients."""
    plain, other = RoundRobin(7, 3), RoundRobin(7, 3, order=(6, 3, 0, 5, 1, 4, 2))
    rng = np.random.default_rng(0)
    for t in range(12):
        wanted = sorted(other.order[c] for c in plain.draw(t, rng))  # type: ignore[index]
        assert other.draw(t, rng).tolist() == wanted
    noise = GaussianNoise(1.0)
    assert other.amplify(noise) == plain.amplify(noise) == noise
    assert [other.max_participations(r) for r in range(1, 9)] == [plain.max_participations(r) for r in range(1, 9)]


def test_a_seeded_order_is_public_and_the_coins_of_a_run_do_not_touch_it() -> None:
    one = [RoundRobin(50, 10, seed=3).draw(t, np.random.default_rng(t)).tolist() for t in range(5)]
    assert one == [RoundRobin(50, 10, seed=3).draw(t, np.random.default_rng(99)).tolist() for t in range(5)]
    assert one != [RoundRobin(50, 10, seed=4).draw(t, np.random.default_rng(t)).tolist() for t in range(5)]
    assert sorted(c for cohort in one for c in cohort) == list(range(50))


def test_the_plain_order_keeps_its_written_form() -> None:
    from sordino import codec

    assert codec.dump(RoundRobin(7, 3)) == {"kind": "roundrobin", "population": 7, "cohort": 3}
    assert codec.read(Sampler, codec.dump(SHUFFLED[0])) == SHUFFLED[0]
    assert codec.read(Sampler, codec.dump(SHUFFLED[1])) == SHUFFLED[1]


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3), (), (0, 1, 2, 3)])
def test_an_order_that_leaves_somebody_out_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="no permutation"):
        RoundRobin(3, 1, order=order)
    with pytest.raises(PlanError, match="either a seed or an order"):
        RoundRobin(3, 1, seed=1, order=(0, 1, 2))
