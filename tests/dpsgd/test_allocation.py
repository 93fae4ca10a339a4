"""Promise: with sampling="allocation" each record is in one secret batch of a pass, and every pass begun is paid."""

from __future__ import annotations

import copy
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.dpsgd.loops import QUIET, Parts, clipped_sum, data, mlp, private, train, weights
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from sordino.accounting import accountant
from sordino.accounting.events import Allocated, GaussianNoise
from sordino.dpsgd.account import certify
from sordino.errors import BudgetError, ConfigError, PlanError
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Limit
from sordino.parts.record_samplers import AllocatedRecords
from sordino.parts.strategies import Banded

BINS = 5  # batches of 12 of 60 records


def numbered(count: int = 60) -> TensorDataset:
    """Records whose first entry is their number."""
    records = data(count)
    records.tensors[0][:, 0] = torch.arange(count)
    return records


def allocated(**settings: Any) -> Parts:
    return private(dataset=numbered(), sampling="allocation", **settings)


def batches(parts: Parts, steps: int) -> list[list[int]]:
    """The records of each of the next steps, in loops of one epoch."""
    found = list[list[int]]()
    while len(found) < steps:
        for x, y in parts[2]:
            F.cross_entropy(parts[0](x), y).backward()  # type: ignore[no-untyped-call]
            parts[1].step()
            found.append(x[:, 0].long().tolist())
            if len(found) == steps:
                break
    return found


@pytest.mark.parametrize("noise", ["simulation", "secure"])
def test_every_record_is_in_exactly_one_batch_of_every_pass(noise: Any) -> None:
    found = batches(allocated(epochs=8, noise=noise), 8 * BINS)
    for k in range(8):
        assert sorted(chain.from_iterable(found[k * BINS : (k + 1) * BINS])) == list(range(60))
    sizes = [len(batch) for batch in found]
    assert len(set(sizes)) > 3  # binomial, not fixed


@pytest.mark.parametrize("noise", ["simulation", "secure"])
def test_passes_and_records_are_independent_and_bins_are_uniform(noise: Any) -> None:
    parts, table = allocated(epochs=100, noise=noise), np.zeros((100, 60), dtype=np.int64)
    for row, k in zip(table, range(100), strict=True):
        for t in range(BINS):
            row[parts[2].pieces.rows(k * BINS + t)] = t
    for one, other in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        counts = np.zeros((BINS, BINS))
        np.add.at(counts, (one.ravel(), other.ravel()), 1)
        assert stats.chisquare(counts.ravel()).pvalue > 1e-4


def test_a_step_is_the_clipped_sum_over_its_batch_and_divides_by_a_constant() -> None:
    parts, twin = allocated(noise_multiplier=QUIET, clip_norm=0.5), mlp()
    x, y = numbered().tensors
    rows = batches(parts, 1)[0]
    total = clipped_sum(twin, x[rows], y[rows], 0.5)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.sub_((0.1 * total[name] / 12).float())
    torch.testing.assert_close(weights(parts[0]), weights(twin), rtol=0, atol=1e-5)


def test_a_certificate_is_that_of_passes_and_certifies(tmp_path: Path) -> None:
    parts = allocated(epochs=3, noise_multiplier=1.2)
    train(parts)
    found = parts[1].certificate()
    event = Allocated(BINS, GaussianNoise(1.2))
    assert found["adversaries"][0]["events"][0]["count"] == 3
    assert found["epsilon"] >= accountant.epsilon(((event, 3),), "add_remove", found["delta"]).value
    assert found["loop"]["epsilon_so_far"] >= accountant.epsilon(((event, 1),), "add_remove", found["delta"]).value
    assert found["loop"]["epsilon_so_far"] < found["epsilon"]
    poisson = private(epochs=3, noise_multiplier=1.2)[1].certificate()
    assert found["epsilon"] < 0.95 * poisson["epsilon"]
    assert any("allocation of the present pass" in text for text in found["assumptions"])
    assert "the random draws of the batches stayed secret" in found["assumptions"]
    parts[1].save_certificate(tmp_path / "certificate.json")
    assert certify(tmp_path / "certificate.json").certificate == found


def test_one_step_of_a_pass_is_paid_as_a_whole_pass() -> None:
    parts = allocated(epochs=3)
    batches(parts, BINS + 1)
    facts = parts[1].certificate()["loop"]
    event = Allocated(BINS, GaussianNoise(1.0))
    assert facts["epsilon_so_far"] >= accountant.epsilon(((event, 2),), "add_remove", 1e-3).value


def test_users_are_allocated_with_all_records() -> None:
    ids = [row % 20 for row in range(60)]
    found = batches(private(dataset=numbered(), batch=4, sampling="allocation", users=ids, epochs=1), 5)
    assert sorted(chain.from_iterable(found)) == list(range(60))
    assert all({row % 20 for row in one}.isdisjoint({row % 20 for row in two}) for one, two in pairwise(found))


# ---- resumes, copies, ledger -----------------------------------------------------------------------------------------


def test_a_loop_that_breaks_goes_on_in_its_pass() -> None:
    parts = allocated(epochs=2)
    found = [*batches(parts, 2), *batches(parts, 3)]
    assert sorted(chain.from_iterable(found)) == list(range(60))
    assert parts[1].steps == BINS


def test_a_resume_at_the_end_of_a_pass_pays_nothing_twice() -> None:
    before, after = allocated(epochs=3), allocated(epochs=3)
    train(before)
    after[1].load_state_dict(before[1].state_dict())
    found = batches(after, BINS)
    assert sorted(chain.from_iterable(found)) == list(range(60))
    assert after[1].steps == 2 * BINS


def test_a_resume_in_the_middle_of_a_pass_begins_another_pass_and_pays_for_it() -> None:
    before, after = allocated(epochs=3), allocated(epochs=3)
    batches(before, BINS + 2)
    stored = before[1].state_dict()
    assert "key" not in str(stored["sordino"])  # the allocation is in no file
    after[1].load_state_dict(stored)
    found = batches(after, BINS)
    assert sorted(chain.from_iterable(found)) == list(range(60))
    assert after[1].steps == 3 * BINS  # one pass, one cut short, and one
    assert after[1].certificate()["counts"]["rounds_charged"] == 3 * BINS


def test_a_copy_in_the_middle_of_a_pass_has_its_own_allocation() -> None:
    parts = allocated(epochs=3)
    batches(parts, 2)
    loader = copy.deepcopy(parts[2])
    rest, own = batches(parts, 3), [loader.pieces.rows(t) for t in _next_steps(loader)]
    assert sorted(chain.from_iterable(own)) == list(range(60))  # a whole pass
    assert own[2:] != rest
    with pytest.raises(PlanError, match="in the middle of a pass"):
        loader.pieces._pass_generator(2 * BINS + 1)


def _next_steps(loader: Any) -> range:
    next(iter(loader.pieces))
    first = loader.pieces.account.steps
    return range(first, first + BINS)


def test_copies_that_both_went_on_are_not_joined() -> None:
    parts, other = allocated(epochs=9), allocated(epochs=9)
    train(parts)
    other[1].load_state_dict(parts[1].state_dict())
    batches(parts, 1)
    batches(other, 1)
    with pytest.raises(ConfigError, match="random allocation"):
        parts[1].load_state_dict(other[1].state_dict())


def test_a_ledger_is_charged_by_passes_and_again_for_one_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "ours.ledger"
    with Ledger.open(path, create=True) as ledger:
        ledger.limit("ours", Limit(50.0, 1e-3, "record", "add_remove"))
    settings: dict[str, Any] = {"epochs": 2, "ledger": path, "named": "ours"}
    before, after = allocated(**settings), allocated(**settings)
    batches(before, BINS + 2)
    planned = before[1].certificate()["ledger"]["epsilon"]
    after[1].load_state_dict(before[1].state_dict())
    batches(after, BINS)
    found = after[1].certificate()
    assert found["adversaries"][0]["events"][0]["count"] == 3
    assert found["ledger"]["epsilon"] > planned


def test_a_target_epsilon_is_met_and_the_pass_beyond_it_is_refused() -> None:
    parts = allocated(epochs=2, epsilon=2.0)
    train(parts, epochs=2)
    assert 1.98 < parts[1].certificate()["epsilon"] <= 2.0
    with pytest.raises(BudgetError, match="which allows 10 steps"):
        train(parts)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"strategy": Banded(2)}, "with a strategy"),
        ({"noise_multiplier": [2.0, 1.0], "epochs": 2}, "scheduled noise"),
        ({"batch": 40}, "two batches or more in a pass"),
        ({"sampling": "shuffled"}, "sampling = 'shuffled'"),
    ],
)
def test_what_has_no_proof_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=says):
        private(**{"sampling": "allocation", **settings})


def test_a_loader_that_keeps_its_bins_would_not_be_this_sampler() -> None:
    """The sabotage: one allocation for all passes, as a loader with a fixed order has it."""
    parts = allocated(epochs=4)
    parts[2].pieces.streams = Kept(parts[2].pieces.streams)
    found = batches(parts, 2 * BINS)
    assert found[:BINS] == found[BINS:]
    honest = batches(allocated(epochs=4), 2 * BINS)
    assert honest[:BINS] != honest[BINS:]


class Kept:
    """Streams that are always those of step 0."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.mode = inner, inner.mode

    def at(self, t: int, purpose: str, client: int = -1) -> Any:
        return self.inner.at(0, purpose, client)


def test_the_plan_is_that_of_the_record_sampler() -> None:
    assert allocated()[1].account.settings.records == AllocatedRecords(BINS, (60,))
