"""Promises of the cut: everybody once, nobody overloaded, the same on every rank; costs that follow the work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sordino.engines.distributed import equal_shares
from sordino.parts.local_solvers import LocalSgd
from sordino.parts.record_samplers import AllRecords, FixedRecords
from sordino.parts.record_solvers import BatchGradient, NoisyLocalSgd

HELD = np.asarray([0, 3, 10, 50])


def loads(seed: int, count: int) -> Any:
    """Few large clients and many small ones."""
    return np.random.default_rng(seed).pareto(1.2, count).astype(np.int64) + 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 200])
def test_every_client_is_run_by_one_rank_and_no_rank_has_a_third_more_than_it_must(ranks: int, count: int) -> None:
    work = loads(count, count)
    cut = equal_shares(work, ranks)
    assert len(cut) == ranks
    assert sorted(np.concatenate(cut)) == list(range(count))
    least = max(work.sum() / ranks, work.max(initial=0))
    assert max(work[own].sum() for own in cut) <= 4 / 3 * least + 1


def test_equal_clients_are_dealt_out_evenly() -> None:
    assert [len(own) for own in equal_shares(np.full(101, 7), 4)] == [26, 25, 25, 25]


def test_the_cut_depends_on_the_loads_alone() -> None:
    work = loads(1, 100)
    assert all(np.array_equal(a, b) for a, b in zip(equal_shares(work, 3), equal_shares(work.copy(), 3), strict=True))


@pytest.mark.parametrize(
    ("local", "read"),
    [
        (LocalSgd(lr=0.1, epochs=2, batch=5), HELD * 2),
        (LocalSgd(lr=0.1, steps=3, batch=5), np.minimum(HELD, 5) * 3),
        (LocalSgd(lr=0.1, steps=3), HELD * 3),
        (BatchGradient(FixedRecords(4, (50,)), 1.0), np.minimum(HELD, 4)),
        (BatchGradient(AllRecords((3, 10, 50)), 1.0), HELD),
        (NoisyLocalSgd(FixedRecords(4, (50,)), 1.0, 1.0, 0.1, 6), np.minimum(HELD, 4) * 6),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_client_costs_what_it_reads(local: Any, read: Any) -> None:
    assert [local.records_read(int(size)) for size in HELD] == read.tolist()
