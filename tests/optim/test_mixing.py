"""In a private loop a model that mixes records is refused before a step, or before the certificate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.optim.loops import data, private, train, weights
from tests.per_record.mixers import HONEST, MIXERS, WIDTH, Later, Own, SlopesOnly, inputs
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from sordino.errors import PlanError
from sordino.optim.recording import Recording
from sordino.per_record.lookout import Lookout

CLIP = 1.0


def records(shape: Any, count: int = 60) -> TensorDataset:
    return TensorDataset(inputs(count, shape), torch.arange(count) % 3)


@pytest.mark.parametrize("name", MIXERS)
def test_a_model_that_mixes_records_is_refused_before_its_first_step(name: str) -> None:
    torch.manual_seed(1)
    parts = private(MIXERS[name](), batch=30)
    before = weights(parts[0]).clone()
    with pytest.raises(PlanError, match="other records"):
        train(parts)
    assert torch.equal(weights(parts[0]), before)
    assert parts[1].steps == 0


def moved(model: nn.Module) -> float:
    """How far a loud record, the first one, moves the sum that the optimizer would noise: all records in each batch."""
    x, y = inputs(41, (WIDTH,)), torch.arange(41) % 3
    x[0] *= 50
    totals = []
    for count in (40, 41):
        parts = private(model, TensorDataset(x[-count:], y[-count:]), batch=count, multiplier=1e-9, smoothing=0.0)
        before = weights(parts[0]).clone()
        train(parts)
        totals.append((before - weights(parts[0])) * count / 0.1)  # lr
        parts[1].detach()
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(before, model.parameters())
    return float((totals[1] - totals[0]).double().norm())


@pytest.mark.parametrize("name", list(MIXERS)[:4])
def test_without_the_look_one_record_would_move_a_step_beyond_the_clip(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lookout, "start", lambda *_: None)
    monkeypatch.setattr(Recording, "_look", lambda *_: None)
    torch.manual_seed(1)
    assert moved(MIXERS[name]()) > 1.05 * CLIP
    assert moved(Own()) <= CLIP * (1 + 1e-4)


def test_gradients_that_meet_under_right_values_are_run_apart() -> None:
    torch.manual_seed(1)
    assert moved(SlopesOnly()) <= CLIP * (1 + 1e-4)


def test_mixing_that_begins_later_spoils_the_certificate() -> None:
    torch.manual_seed(1)
    parts = private(Later(after=12), epochs=2)
    train(parts, epochs=2)
    for _ in range(2):
        with pytest.raises(PlanError, match="other records"):
            parts[1].certificate()
    with pytest.raises(PlanError, match="other records"):
        train(parts)


def test_mixing_that_begins_later_is_met_by_a_look_that_coins_choose() -> None:
    torch.manual_seed(1)
    parts = private(Later(after=12), epochs=200)
    with pytest.raises(PlanError, match="other records"):
        train(parts, epochs=200)
    assert 1 < parts[1].steps < 1000


def test_a_hook_that_mixes_what_the_model_gives_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_forward_hook(lambda module, args, out: out - out.detach().mean(0))
    with pytest.raises(PlanError, match="other records"):
        train(private(model))


def test_looks_change_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for look in (True, False):
        if look:
            monkeypatch.setattr(Lookout, "wants", lambda self, size, expected: size > 1)
        else:
            monkeypatch.setattr(Lookout, "wants", lambda *_: False)
            monkeypatch.setattr(Lookout, "start", lambda *_: None)
        torch.manual_seed(2)
        parts = private(HONEST["own code with dropout and noise"][0](), epochs=2)
        train(parts, epochs=2)
        results.append(weights(parts[0]))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", HONEST)
def test_honest_models_are_never_taken_for_mixing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookout, "wants", lambda self, size, expected: size > 1)
    build, shape = HONEST[name]
    torch.manual_seed(2)
    parts = private(build(), records(shape))
    train(parts)
    parts[0].eval()
    said = parts[1].certificate()["loop"]["kept_apart"]
    assert said["looks"] > 1 or said["how"].startswith("by the layers")
    assert not parts[0].training


def test_a_chain_of_layers_is_vouched_for_by_its_construction() -> None:
    parts = private(dataset=data(), epochs=2)
    train(parts, epochs=2)
    said = parts[1].certificate()["loop"]["kept_apart"]
    assert said == {"how": "by the layers, or run one by one", "looks": 1}


class Companions(nn.Module):
    """Records of several tensors, and a constant: `weigh` makes a number of them by which every record is scaled."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.out, self.weigh = nn.Linear(WIDTH, 3), weigh

    def forward(self, x: Tensor, mask: Tensor, shift: Tensor, table: Tensor) -> Tensor:
        scores: Tensor = self.out(x) * (1 + self.weigh(mask, table)) + shift
        return scores


def with_companions(weigh: Callable[[Tensor, Tensor], Tensor]) -> list[int]:
    """Four epochs over records of three tensors beside a table of 12 rows; the sizes of the batches."""
    coins = torch.Generator().manual_seed(4)
    x, mask, shift = (torch.rand(60, width, generator=coins) for width in (WIDTH, 1, 1))
    table, labels, sizes = torch.rand(12, 2, generator=coins), torch.randint(3, (60,), generator=coins), []
    model, optimizer, loader = private(Companions(weigh), TensorDataset(x, mask, shift, labels), epochs=4)
    for _ in range(4):
        for *own, y in loader:
            F.cross_entropy(model(*own, table), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            sizes.append(len(y))
    optimizer.certificate()
    return sizes


def test_records_that_meet_in_a_second_tensor_are_refused() -> None:
    """As where each is divided by the tokens of all; three tensors of the batch's length hid it."""
    with pytest.raises(PlanError, match="other records"):
        with_companions(lambda mask, table: mask.mean())


def test_a_constant_that_is_as_long_as_a_later_batch_is_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookout, "wants", lambda self, size, expected: size > 1)
    assert 12 in with_companions(lambda mask, table: table.mean())[1:]
