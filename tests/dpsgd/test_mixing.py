"""In a private loop a model that mixes records is refused before a step, or before the certificate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import data, private, train, weights
from tests.dpsgd.per_record.mixers import HONEST, MIXERS, WIDTH, Later, Own, SlopesOnly, inputs
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from sordino.dpsgd.batch_independence import IndependenceChecks
from sordino.dpsgd.model_graphs import ModelGraphs
from sordino.dpsgd.recording import EVIDENCE
from sordino.errors import PlanError
from sordino.graph import Traced

CLIP = 1.0


def records(shape: Any, count: int = 60) -> TensorDataset:
    return TensorDataset(inputs(count, shape), torch.arange(count) % 3)


@pytest.mark.parametrize("name", MIXERS)
def test_a_model_that_mixes_records_is_refused_before_its_first_step(name: str) -> None:
    """By what its graph does with made-up records, or because it has no graph."""
    torch.manual_seed(1)
    parts = private(MIXERS[name](), batch=30)
    before = weights(parts[0]).clone()
    with pytest.raises(PlanError, match=r"other records|no graph can be captured"):
        train(parts)
    assert torch.equal(weights(parts[0]), before)
    assert parts[1].steps == 0


def moved(model: nn.Module) -> float:
    """How far a loud record, the first one, moves the sum that the optimizer would noise: all records in each batch."""
    x, y = inputs(41, (WIDTH,)), torch.arange(41) % 3
    x[0] *= 50
    totals = []
    for count in (40, 41):
        parts = private(model, TensorDataset(x[-count:], y[-count:]), batch=count, noise_multiplier=1e-9, smoothing=0.0)
        before = weights(parts[0]).clone()
        train(parts)
        totals.append((before - weights(parts[0])) * count / 0.1)  # lr
        parts[1].detach()
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(before, model.parameters())
    return float((totals[1] - totals[0]).double().norm())


@pytest.mark.parametrize("name", list(MIXERS)[:3])
def test_even_without_the_refusal_a_mixer_moves_a_step_by_one_clip(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph is run for each record by itself: on one batch a record would move the sum by more."""
    monkeypatch.setattr(ModelGraphs, "_refuse_mixing", lambda *_: None)
    torch.manual_seed(1)
    assert moved(MIXERS[name]()) <= CLIP * (1 + 1e-4)
    monkeypatch.setattr(Traced, "grade", "by construction")
    monkeypatch.setattr("sordino.graph.capture.dependence", lambda *_: None)
    monkeypatch.setattr(ModelGraphs, "_check_slices", lambda *_: None)
    torch.manual_seed(1)
    assert moved(MIXERS[name]()) > 1.05 * CLIP  # without the proof


def test_gradients_that_meet_under_right_values_are_run_apart() -> None:
    torch.manual_seed(1)
    assert moved(SlopesOnly()) <= CLIP * (1 + 1e-4)


def test_mixing_that_would_begin_later_never_begins() -> None:
    """It counts its passes outside the module; the graph was captured before any record, and counts nothing."""
    torch.manual_seed(1)
    model = Later(after=12)
    parts = private(model, epochs=2)
    train(parts, epochs=2)
    said = parts[1].certificate()["own_code"]
    if said["grade"] == "by construction":
        x = data().tensors[0]
        parts[0].eval()
        with torch.no_grad():
            assert torch.allclose(parts[0](x)[:1], parts[0](x[:1]), atol=1e-6)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_hook_on_the_model_itself_is_refused(moment: str) -> None:
    """It runs outside the model's forward, on the records of a batch."""
    model = nn.Sequential(nn.Linear(4, 3))
    parts = None if moment == "before" else private(model)
    model.register_forward_hook(lambda module, args, out: out - out.detach().mean(0))
    with pytest.raises(PlanError, match="hooks on the model itself"):
        train(parts or private(model))


def test_a_hook_inside_the_model_is_part_of_its_graph() -> None:
    for when in ("before", "after"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        parts = None if when == "before" else private(model)
        model[0].register_forward_hook(lambda module, args, out: out - out.detach().mean(0))
        with pytest.raises(PlanError, match="other records"):
            train(parts or private(model))


def test_trusted_code_is_looked_at_and_refused_if_it_mixes() -> None:
    """Its owner vouches for it; alarms stay."""

    class Branches(Own):
        def before(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if float(x.sum()) < 1e9 else x

    with pytest.raises(PlanError, match="other records"):
        train(private(Branches(), own_code="trusted"))


class Branching(Own):
    """Has no graph, and mixes nothing."""

    def before(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) < 1e9 else -x


def test_looks_at_trusted_code_change_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for look in (True, False):
        if look:
            monkeypatch.setattr(IndependenceChecks, "due", lambda self, size, expected: size > 1)
        else:
            monkeypatch.setattr(IndependenceChecks, "due", lambda *_: False)
            monkeypatch.setattr(IndependenceChecks, "start", lambda *_: None)
        torch.manual_seed(2)
        parts = private(Branching(), epochs=2, own_code="trusted")
        train(parts, epochs=2)
        assert (parts[1].recording.trusted_forward.checks.count > 1) == look
        results.append(weights(parts[0]))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", HONEST)
def test_honest_models_are_never_taken_for_mixing(name: str) -> None:
    build, shape = HONEST[name]
    torch.manual_seed(2)
    parts = private(build(), records(shape))
    train(parts)
    parts[0].eval()
    said = parts[1].certificate()["own_code"]
    assert said["grade"] == ("per record (vmap)" if name == "random relu" else "by construction")
    assert not parts[0].training


def test_the_certificate_says_what_is_proved_of_the_code_that_ran() -> None:
    parts = private(dataset=data(), epochs=2)
    assert parts[1].certificate()["own_code"] is None  # nothing has run
    train(parts, epochs=2)
    found = parts[1].certificate()
    assert found["own_code"]["grade"] == "by construction"
    assert found["loop"]["kept_apart"] == {"how": EVIDENCE["by construction"], "looks": 0}
    trusted = private(Branching(), own_code="trusted")
    train(trusted)
    said = trusted[1].certificate()["own_code"]
    assert said["grade"] == "own code, trusted"
    assert "own forward runs on records" in said["why"]
    assert private(own_code="trusted")[1].certificate()["own_code"] is None


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
    assert "1 further inputs" in optimizer.certificate()["own_code"]["why"]
    return sizes


def test_records_that_meet_in_a_second_tensor_are_refused() -> None:
    """As where each is divided by the tokens of all; three tensors of the batch's length hid it."""
    with pytest.raises(PlanError, match="other records"):
        with_companions(lambda mask, table: mask.mean())


def test_a_constant_that_is_as_long_as_a_later_batch_is_no_record() -> None:
    assert 12 in with_companions(lambda mask, table: table.mean())[1:]
