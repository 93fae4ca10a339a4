"""Promises of the partitions: nobody's record is counted twice, and every asked-for client exists."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.counts import calls

from sordino.data.records import Dirichlet, Iid, Natural, Partitioner, Shards, SortedTarget, Split
from sordino.errors import DataError


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def _labels(n: int = 600, classes: int = 10) -> NDArray[np.int64]:
    return _rng(1).integers(0, classes, n)


def _classes_per_client(split: Split, y: NDArray[Any]) -> float:
    return float(np.mean([len(np.unique(y[split.of(i)])) for i in range(split.population)]))


ALL = [Iid(7), Dirichlet(7, 0.3), Dirichlet(60, 0.05, least=10), Dirichlet(50, 1e-3), Shards(7, 3), SortedTarget(7)]


@pytest.mark.parametrize("partitioner", ALL, ids=str)
def test_every_record_goes_to_exactly_one_client(partitioner: Partitioner) -> None:
    y = _labels()
    split = partitioner.split(y, None, _rng())
    assert np.array_equal(np.sort(split.index), np.arange(len(y)))
    assert np.array_equal(np.concatenate([split.of(i) for i in range(split.population)]), split.index)
    assert split.sizes.sum() == len(y)
    assert split.index.dtype == split.offsets.dtype == np.int64


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 300), data=st.data(), seed=st.integers(0, 10**6))
def test_no_size_or_seed_loses_or_doubles_a_record(n: int, data: st.DataObject, seed: int) -> None:
    clients = data.draw(st.integers(1, n))
    least = data.draw(st.integers(0, n // clients))
    alpha = data.draw(st.floats(1e-4, 1e4))
    y = _rng(seed).integers(0, 5, n)
    for partitioner in (Iid(clients), Dirichlet(clients, alpha, least), Shards(clients, 1), SortedTarget(clients)):
        split = partitioner.split(y, None, _rng(seed))
        assert split.population == clients
        assert np.array_equal(np.sort(split.index), np.arange(n))
    assert Dirichlet(clients, alpha, least).split(y, None, _rng(seed)).sizes.min() >= least


@pytest.mark.parametrize("partitioner", [*ALL, Natural(3)], ids=str)
def test_the_same_stream_gives_the_same_partition(partitioner: Partitioner) -> None:
    y, groups = _labels(), _labels(classes=20)
    one, two = (partitioner.split(y, groups, _rng(5)) for _ in range(2))
    assert np.array_equal(one.index, two.index)
    assert np.array_equal(one.offsets, two.offsets)


def test_iid_sizes_differ_by_at_most_one() -> None:
    sizes = Iid(7).split(_labels(100), None, _rng()).sizes
    assert sizes.max() - sizes.min() == 1


def test_a_million_clients_of_one_record_are_cut_without_a_loop_over_them() -> None:
    y = np.zeros(1_000_000, dtype=np.int64)
    assert calls(lambda: Iid(1_000_000).split(y, None, _rng())) < 1000
    assert (Iid(1_000_000).split(y, None, _rng()).sizes == 1).all()


def test_dirichlet_leaves_no_client_below_its_least() -> None:
    assert Dirichlet(100, 0.01, least=5).split(_labels(), None, _rng()).sizes.min() >= 5


def test_dirichlet_shares_follow_alpha() -> None:
    """The variance of a share is (1/K)(1 - 1/K)/(K alpha + 1): one class, no top-up."""
    clients, alpha, n = 10, 0.5, 20_000
    y = np.zeros(n, dtype=np.int64)
    shares = np.array([Dirichlet(clients, alpha, 0).split(y, None, _rng(s)).sizes / n for s in range(200)])
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert shares.mean() == pytest.approx(1 / clients)
    assert shares.var() == pytest.approx(expected, rel=0.1)


def test_small_alpha_means_few_classes_per_client() -> None:
    y = _labels(6000)
    few, many = (_classes_per_client(Dirichlet(20, a).split(y, None, _rng()), y) for a in (0.05, 100.0))
    assert few < 5 < 9.9 < many


def test_shards_give_few_labels_per_client() -> None:
    y = np.repeat(np.arange(10), 60)
    split = Shards(30, 2).split(y, None, _rng())
    assert max(len(np.unique(y[split.of(i)])) for i in range(30)) <= 2
    assert set(split.sizes) == {20}


def test_sorted_targets_do_not_overlap_between_silos() -> None:
    y = _rng(2).normal(size=101)
    split = SortedTarget(4).split(y, None, _rng())
    silos = [y[split.of(i)] for i in range(4)]
    assert all(low.max() <= high.min() for low, high in pairwise(silos))
    assert split.sizes.max() - split.sizes.min() <= 1


def test_natural_clients_are_the_groups() -> None:
    groups = np.array([7, 3, 7, 9, 3, 3])
    split = Natural().split(np.zeros(6, dtype=np.int64), groups, _rng())
    assert [split.of(i).tolist() for i in range(3)] == [[1, 4, 5], [0, 2], [3]]


def test_some_natural_clients_keep_all_their_records_and_no_others() -> None:
    groups = _labels(600, 40)
    split = Natural(11).split(_labels(), groups, _rng())
    assert split.population == 11
    assert len(np.unique(split.index)) == len(split.index) < 600
    for i in range(11):
        mine = groups[split.of(i)]
        assert len(np.unique(mine)) == 1
        assert len(mine) == np.count_nonzero(groups == mine[0])


@pytest.mark.parametrize(
    ("partitioner", "said"),
    [
        (Iid(601), "600 records for this partition; needed at least 601"),
        (Dirichlet(100, 1.0, least=7), "at least 700"),
        (Shards(301), "at least 602"),
        (SortedTarget(601), "at least 601"),
        (Natural(), "without groups"),
    ],
    ids=str,
)
def test_more_than_the_data_can_give_is_refused(partitioner: Partitioner, said: str) -> None:
    with pytest.raises(DataError, match=said):
        partitioner.split(_labels(), None, _rng())


def test_more_natural_clients_than_groups_are_refused() -> None:
    with pytest.raises(DataError, match="found 10 natural clients; needed clients = 11"):
        Natural(11).split(_labels(), _labels(), _rng())


def test_groups_of_another_length_are_refused() -> None:
    with pytest.raises(DataError, match="one group per record"):
        Natural().split(_labels(600), _labels(599), _rng())


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_is_no_concentration_is_refused(alpha: float) -> None:
    with pytest.raises(DataError, match="alpha"):
        Dirichlet(3, alpha)


def test_counts_below_one_are_refused() -> None:
    for build in (lambda: Iid(0), lambda: Shards(2, 0), lambda: SortedTarget(-1), lambda: Natural(0)):
        with pytest.raises(DataError, match=">= 1"):
            build()
    with pytest.raises(DataError, match="least"):
        Dirichlet(3, 1.0, least=-1)


@pytest.mark.parametrize("partitioner", [Dirichlet(3, 1.0), Shards(3)], ids=str)
def test_label_skew_of_real_targets_is_refused(partitioner: Partitioner) -> None:
    with pytest.raises(DataError, match="SortedTarget"):
        partitioner.split(np.linspace(0, 1, 50), None, _rng())


def test_a_client_outside_the_population_is_refused() -> None:
    split = Iid(3).split(_labels(), None, _rng())
    for client in (-1, 3):
        with pytest.raises(DataError, match="a number from 0 to 2"):
            split.of(client)
