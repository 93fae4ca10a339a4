"""Promise: a head on features costs what its certificate says, private mean and scale included, and nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sordino as so
from sordino.accounting import accountant
from sordino.accounting.events import GaussianNoise, PoissonSampled
from sordino.dpsgd.account import certify
from sordino.dpsgd.settings import checked_delta
from sordino.dpsgd.standardise import Standardise, Standardiser
from sordino.errors import BudgetError, ConfigError, DataError, PlanError
from sordino.features.heads import record_delta
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Limit
from sordino.parts.mechanisms import Moment
from sordino.rng import Seeded

COUNT, LENGTH = 400, 12


def _records(seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(COUNT) % 3
    centres = torch.eye(3, LENGTH).repeat_interleave(1, 0) * 0.8
    return centres[y] + 0.1 * torch.randn(COUNT, LENGTH, generator=rng), y


def _loop(**given: Any) -> Any:
    x, y = _records()
    model = nn.Linear(LENGTH, 3, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    usual = {"steps": 4, "epsilon": 3.0, "loss": "cross_entropy", "prepare": Standardise(15.0, 1.0, 4)}
    loader = DataLoader(TensorDataset(x, y), batch_size=100)
    return so.make_private(model, inner, loader, **{**usual, **given})


def _run(parts: Any, steps: int) -> None:
    model, optimizer, loader = parts
    for x, y in loader:
        optimizer.zero_grad()
        optimizer.loss(model(x), y).backward()
        optimizer.step()
        if optimizer.steps >= steps:
            return


# ---- the two releases ------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e30, 1e30), min_size=3, max_size=3), st.floats(1e-3, 1e3))
def test_one_record_moves_a_moment_by_at_most_one(values: list[float], clip_norm: float) -> None:
    part, others = Moment("mean", 1.0, clip_norm, 3), np.random.default_rng(0).normal(size=(5, 3))
    moved = part.message(np.vstack([others, values]), "record") - part.message(others, "record")
    assert np.linalg.norm(moved) <= 1 + 1e-12
    assert np.linalg.norm(part.message(np.array([values]), "client")) <= 1


def test_a_record_that_is_not_finite_counts_as_zero() -> None:
    part = Moment("mean", 1.0, 1.0, 2)
    rows = torch.tensor([[0.5, 0.0], [float("nan"), 0.0], [float("inf"), 1.0]], dtype=torch.float64)
    assert torch.allclose(part.clipped(rows).sum(0), torch.tensor([0.5, 0.0], dtype=torch.float64))


class _Free:
    def charge_preparation(self) -> None: ...


def test_almost_without_noise_they_are_mean_and_scale() -> None:
    x, _ = _records()
    asked = Standardise(1e-9, 10.0, 4)
    mean, inverse = Standardiser(asked.parts(LENGTH), x, _Free(), Seeded(0)).moments()
    assert torch.allclose(mean, x.double().mean(0), atol=1e-6)
    spread = (x.double() - mean).square().view(COUNT, 4, 3).mean((0, 2)).sqrt()
    assert torch.allclose(inverse, (1 / (spread * LENGTH**0.5)).repeat_interleave(3), rtol=1e-4)


def test_their_noise_is_what_is_billed() -> None:
    """Sabotage beside it: noise of half the multiplier is told apart."""
    x, z = torch.zeros(COUNT, 5000), 15.0
    found = Standardiser(Standardise(z).parts(5000), x, _Free(), Seeded(1)).moments()[0] * COUNT
    assert float(found.std()) == pytest.approx(z, rel=0.05)
    less = Standardiser(Standardise(z / 2).parts(5000), x, _Free(), Seeded(1)).moments()[0] * COUNT
    assert float(less.std()) != pytest.approx(z, rel=0.05)


def test_the_bill_has_both_releases_beside_the_steps() -> None:
    parts = _loop()
    _run(parts, 4)
    certificate = parts[1].certificate()
    line = parts[1].account.settings.plan.forecast.line("models")
    sampled, moments = line.entries
    assert isinstance(sampled[0], PoissonSampled)
    assert (sampled[1], moments) == (4, (GaussianNoise(15.0), 2))
    alone = accountant.epsilon((sampled,), line.relation, certificate["delta"]).value
    assert alone < certificate["epsilon"] <= 3.0
    assert [one["release"]["column"] for one in certificate["prepared"]] == [
        "mean of the records",
        "scale of the records",
    ]
    assert "2 of columns before the first" in certificate["statement"]["releases"]
    assert parts[1].get_epsilon() == certificate["epsilon"]


def test_a_checkpoint_has_mean_and_scale_and_nothing_is_released_again() -> None:
    parts = _loop(noise="secure")
    _run(parts, 2)
    state, moments = parts[1].state_dict(), parts[2].scaler.moments()
    again = _loop(noise="secure")
    again[1].load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(moments, again[2].scaler.moments(), strict=True))
    _run(again, 4)
    assert again[1].certificate()["epsilon"] <= 3.0
    late = _loop(noise="secure")
    _run(late, 1)
    with pytest.raises(ConfigError, match="after this loop has released its own"):
        late[1].load_state_dict(state)


def test_a_second_release_is_on_the_certificate_and_in_the_ledger(tmp_path: Path) -> None:
    """A checkpoint from before the first batch: whoever loads it after a kill releases mean and scale a second time."""
    file = tmp_path / "ledger"
    with Ledger.open(file, create=True) as ledger:
        ledger.limit("d", Limit(5.0, 1e-3, "record", "add_remove"))
    first = _loop(noise="secure", ledger=file, dataset="d")
    state = first[1].state_dict()
    _run(first, 2)
    once = first[1].certificate()
    again = _loop(noise="secure", ledger=file, dataset="d")
    again[1].load_state_dict(state)
    _run(again, 4)
    found = again[1].certificate()
    assert found["epsilon"] > once["epsilon"]
    assert {one["event"]["kind"]: one["count"] for one in found["adversaries"][0]["events"]}["gaussian"] == 4
    assert found["ledger"]["epsilon"] >= found["epsilon"]


def test_a_ledger_without_room_refuses_before_anything_is_released(tmp_path: Path) -> None:
    file = tmp_path / "ledger"
    with Ledger.open(file, create=True) as ledger:
        ledger.limit("d", Limit(1.0, 1e-3, "record", "add_remove"))
    with pytest.raises(BudgetError):
        _loop(ledger=file, dataset="d")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"prepare": Standardise(channels=5)}, "channels = 5 for records of 12 numbers"),
        ({"prepare": Standardise(norm=0.0)}, "norm = 0.0"),
        ({"prepare": "yes"}, "prepare = str"),
        ({"transform": lambda x: x}, "prepare= with transform="),
        ({"epochs": 2}, "exactly one of them"),
        ({"steps": 0}, "steps = 0"),
        ({"steps": None}, "epochs = None and steps = None"),
    ],
)
def test_a_mistake_gets_a_sentence(given: dict[str, Any], found: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=found):
        _loop(**given)


# ---- heads -----------------------------------------------------------------------------------------------------------


def test_a_head_learns_and_its_certificate_can_be_checked(tmp_path: Path) -> None:
    x, y = _records()
    head = so.features.fit_head(x, y, epsilon=3.0, steps=20, prepare=Standardise(channels=4))
    assert head.accuracy(*_records(1)) > 0.95
    assert head.linear.bias is None
    found = head.save_certificate(tmp_path / "certificate.json")
    assert 2.9 < found["epsilon"] <= 3.0
    assert (found["unit"], found["delta"], found["counts"]["rounds_charged"]) == ("record", 1e-5, 20)
    assert certify(tmp_path / "certificate.json").certificate == found


def test_a_heads_certificate_names_the_public_data_of_its_features() -> None:
    images, y = torch.rand(60, 1, 8, 8), torch.arange(60) % 2
    extractor = so.features.random_convolutions(4, 3, 2, normalise="photos")
    x = extractor(images, cache=False)
    head = so.features.fit_head(x, y, epsilon=3.0, steps=2)
    assert [one["by"] for one in head.certificate()["declared_public"]] == ["scikit-learn's two photographs"]
    sliced = so.features.fit_head(x[:50], y[:50], epsilon=3.0, steps=2, public=extractor.declared((1, 8, 8)))
    assert [one["rows"] for one in sliced.certificate()["declared_public"]] == [162]


def test_delta_is_the_literatures_while_fewer_than_one_record_is_expected_to_fail() -> None:
    assert (record_delta(100), record_delta(99_999)) == (1e-5, 1e-5)
    assert record_delta(100_000) < 1e-5
    assert checked_delta(1e-5, 60_000, allow_large=False) == 1e-5
    for delta, count in ((1.1e-5, 60_000), (1e-5, 100_000)):
        with pytest.raises(ConfigError, match="allow_large_delta"):
            checked_delta(delta, count, allow_large=False)


def test_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match=r"features \[n, d\] and labels \[n\]"):
        so.features.fit_head(torch.rand(5, 3), torch.zeros(4), epsilon=1.0)
