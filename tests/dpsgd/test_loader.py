"""Batches are the Poisson batches that are accounted, whatever the data set, the collate function or the workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.dpsgd.loops import data, mlp, private, train, weights
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from sordino.errors import DataError, PlanError
from sordino.parts.record_samplers import PoissonRecords


class Pairs(Dataset[Any]):
    """Records one by one, as a data set of files gives them."""

    def __init__(self, tensors: TensorDataset) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = self.tensors[index]
        return x, int(y)


def numbered(count: int = 50) -> TensorDataset:
    return TensorDataset(torch.arange(count).float()[:, None].expand(-1, 4).clone(), torch.arange(count) % 3)


def test_every_record_comes_with_its_rate_and_independently() -> None:
    loader = private(dataset=numbered(), batch=10)[2]
    account = loader.pieces.account
    seen = np.zeros((400, 50))
    for t in range(400):
        account.taken[account.own] = t
        seen[t, next(iter(loader))[0][:, 0].long().numpy()] += 1
    assert seen.max() == 1
    assert seen.mean() == pytest.approx(0.2, abs=0.01)
    assert np.abs(seen.mean(0) - 0.2).max() < 0.08
    assert seen.sum(1).var() == pytest.approx(8.0, rel=0.3)  # 50 * 0.2 * 0.8: not a fixed size, not clumped
    assert len({tuple(row) for row in seen}) == 400


@pytest.mark.parametrize(("count", "batch", "steps"), [(60, 12, 5), (100, 33, 3), (10, 10, 1), (10, 7, 1)])
def test_an_epoch_has_one_over_the_rate_steps(count: int, batch: int, steps: int) -> None:
    parts = private(dataset=data(count), batch=batch, epochs=2)
    train(parts)
    assert len(parts[2]) == steps == parts[1].steps
    assert parts[1].account.settings.steps == 2 * steps


def test_any_data_set_and_workers_give_the_same_run() -> None:
    first = private(dataset=data())
    train(first)
    for workers in (0, 2):
        loader: Any = DataLoader(Pairs(data()), batch_size=12, num_workers=workers)
        other = private(loader=loader, max_physical_batch_size=5)
        assert other[2].num_workers == workers
        train(other)
        torch.testing.assert_close(weights(other[0]), weights(first[0]), rtol=0, atol=1e-5)


def test_a_collate_function_is_kept_and_empty_batches_have_its_shape() -> None:
    def doubled(records: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in records]) * 2, "y": torch.tensor([y for _, y in records])}

    model, optimizer, loader = private(loader=DataLoader(Pairs(data(40)), batch_size=1, collate_fn=doubled))
    sizes = set()
    for batch in loader:
        assert (batch["x"].shape[1:], batch["y"].dim(), len(batch["x"])) == (torch.Size([4]), 1, len(batch["y"]))
        sizes.add(len(batch["x"]))
        cross_entropy(model(batch["x"]), batch["y"]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert 0 in sizes


@pytest.mark.parametrize("noise", ["simulation", "secure"])
def test_whoever_leaves_the_loop_gets_the_same_batch_again(noise: Any) -> None:
    """Nobody draws until a batch pleases: a batch belongs to its step until the step is taken."""
    parts = private(noise=noise, max_physical_batch_size=5)
    looks = [next(iter(parts[2]))[0] for _ in range(4)]
    assert parts[1].steps == 0
    assert all(torch.equal(look, looks[0]) for look in looks)
    for x, y in parts[2]:
        cross_entropy(parts[0](x), y).backward()  # type: ignore[no-untyped-call]
        parts[1].step()
        if parts[1].steps == 2:
            break  # after a step: nothing is left out
    train(parts)
    assert parts[1].steps == 7


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


def samplers() -> dict[str, Any]:
    full = data()
    return {
        "iterated": DataLoader(Stream(), batch_size=4),
        "batch_sampler": DataLoader(full, batch_sampler=[[0, 1], [2, 3]]),
        "without batches": DataLoader(full, batch_size=None),
        "SubsetRandomSampler": DataLoader(full, 4, sampler=torch.utils.data.SubsetRandomSampler([1, 2])),
        "WeightedRandomSampler": DataLoader(full, 4, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 60, 60)),
        "batch_size of 61": DataLoader(full, batch_size=61),
    }


@pytest.mark.parametrize("name", samplers())
def test_a_loader_that_cannot_be_drawn_from_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=name):
        private(loader=samplers()[name])


def test_a_subset_is_a_data_set_of_its_own() -> None:
    parts = private(dataset=Subset(data(), range(24)), batch=6)
    train(parts)
    assert parts[1].account.settings.records.sizes == (24,)
    assert parts[1].account.settings.records == PoissonRecords(6.0, (24,))


def test_the_order_of_the_given_loader_does_not_matter() -> None:
    runs = [
        private(mlp(), loader=DataLoader(data(), 12, shuffle=shuffle, drop_last=shuffle)) for shuffle in (False, True)
    ]
    for run in runs:
        train(run)
    assert torch.equal(weights(runs[0][0]), weights(runs[1][0]))


def mixed_up(records: list[Any]) -> list[Tensor]:
    """Each record and the one before it, as torchvision's MixUp does it in a collate function."""
    x, y = default_collate(records)
    share = torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample()
    return [share * x + (1 - share) * x.roll(1, 0), y]


def standardised(records: list[Any]) -> list[Tensor]:
    x, y = default_collate(records)
    return [(x - x.mean(0)) / (1 + x.std(0, correction=0)), y]


def padded(records: list[Any]) -> dict[str, Tensor]:
    """To the longest of the batch, with random words masked: each record by itself."""
    longest = max(int(y) for _, y in records) + 4
    x = torch.stack([torch.nn.functional.pad(x, (0, longest - len(x))) for x, _ in records])
    return {"x": x[:, :4] * torch.bernoulli(torch.full((len(x), 4), 0.9)), "y": torch.tensor([y for _, y in records])}


@pytest.mark.parametrize("collate", [mixed_up, standardised])
def test_a_collate_function_that_mixes_records_is_refused(collate: Any) -> None:
    with pytest.raises(PlanError, match="collate_fn whose row for one record depends"):
        private(loader=DataLoader(Pairs(data()), batch_size=12, collate_fn=collate))


def test_a_collate_function_that_pads_or_masks_records_is_not() -> None:
    model, before = mlp(), torch.get_rng_state()
    private(model, loader=DataLoader(Pairs(data()), batch_size=12, collate_fn=padded))
    assert torch.equal(before, torch.get_rng_state())
