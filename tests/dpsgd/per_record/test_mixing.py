"""A record more moves the clipped sum by at most the clip norm, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.dpsgd.per_record.mixers import CLASSES, HONEST, MIXERS, WIDTH, Later, Own, SlopesOnly, inputs
from tests.dpsgd.per_record.oracle import classes
from torch import Tensor, nn

from sordino.dpsgd import ClippedGradient
from sordino.dpsgd.batch_independence import IndependenceChecks
from sordino.errors import PlanError
from sordino.models import ARCHITECTURES, build_seeded

COUNT, RADIUS = 40, 1.0


def batch(count: int = COUNT, shape: Any = (WIDTH,)) -> tuple[Tensor, Tensor]:
    return inputs(count, shape), torch.arange(count) % CLASSES


def moved(engine: ClippedGradient, x: Tensor, y: Tensor) -> float:
    """How far the first record, made loud, moves the sum."""
    x = x.clone()
    x[0] *= 50
    with_it, without = (engine.sum(x[s:], y[s:], RADIUS).total for s in (0, 1))
    flat = torch.cat([(with_it[name] - without[name]).double().flatten() for name in with_it])
    return float(flat.norm())


@pytest.mark.parametrize("name", MIXERS)
def test_a_model_that_mixes_records_is_refused_at_the_first_batch(name: str) -> None:
    torch.manual_seed(1)
    with pytest.raises(PlanError, match="other records"):
        ClippedGradient(MIXERS[name](), classes, rng=np.random.default_rng(0)).sum(*batch(), RADIUS)


@pytest.mark.parametrize("name", [name for name in MIXERS if "zeros" not in name and name != "mixup"])
def test_without_the_look_one_record_would_move_the_sum_beyond_the_radius(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IndependenceChecks, "start", lambda *_: None)
    monkeypatch.setattr(IndependenceChecks, "again", lambda *_: None)
    torch.manual_seed(1)
    assert moved(ClippedGradient(MIXERS[name](), classes), *batch()) > 1.05 * RADIUS
    assert moved(ClippedGradient(Own(), classes), *batch()) <= RADIUS


def test_gradients_that_meet_under_right_values_are_run_apart() -> None:
    torch.manual_seed(1)
    engine = ClippedGradient(SlopesOnly(), classes)
    assert moved(engine, *batch()) <= RADIUS
    assert engine.whole


def test_mixing_that_begins_later_is_met_by_a_look_that_coins_choose() -> None:
    torch.manual_seed(1)
    model = Later(after=40)
    engine = ClippedGradient(model, classes, np.random.default_rng(0))
    with pytest.raises(PlanError, match="other records"):
        [engine.sum(*batch(8), RADIUS) for _ in range(2000)]
    assert Later.passes > 40


def test_a_look_that_is_asked_for_comes_at_once() -> None:
    torch.manual_seed(1)
    model = Later(after=10)
    engine = ClippedGradient(model, classes, np.random.default_rng(0))
    engine.sum(*batch(), RADIUS)
    model.after, engine.asked = 0, True
    with pytest.raises(PlanError, match="other records"):
        engine.sum(*batch(), RADIUS)


def contrastive(out: Tensor, y: Tensor) -> Tensor:
    scores = out @ out.T
    return nn.functional.cross_entropy(scores, torch.arange(len(out)), reduction="none")


def by_tokens(out: Tensor, y: Tensor) -> Tensor:
    return classes(out, y) / (y > 0).sum()


@pytest.mark.parametrize("losses", [contrastive, by_tokens], ids=lambda f: f.__name__)
def test_a_loss_that_compares_or_counts_records_is_refused(losses: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(1)
    with pytest.raises(PlanError, match="other records"):
        ClippedGradient(Own(), losses).sum(*batch(), RADIUS)


@pytest.mark.parametrize("name", HONEST)
def test_honest_models_are_never_taken_for_mixing(name: str) -> None:
    build, shape = HONEST[name]
    torch.manual_seed(2)
    engine = ClippedGradient(build(), classes, np.random.default_rng(0))
    for count in (COUNT, 5, 2, 23):
        engine.sum(*batch(count, shape), RADIUS)
        engine.asked = True
    assert engine.checks.count > 1 or engine.whole


@pytest.mark.parametrize("name", ["char_lstm", "resnet18", "dp_mnist_cnn", "small_cnn", "mlp"])
def test_the_papers_models_are_never_taken_for_mixing(name: str) -> None:
    shape: tuple[int, ...] = {"char_lstm": (20,), "resnet18": (3, 8, 8)}.get(name, (1, 28, 28))
    spec: Any = ARCHITECTURES[name](
        **{"resnet18": {"width": 8, "groups": 4}, "char_lstm": {"hidden": 32}}.get(name, {})
    )
    model = build_seeded(spec, shape, 10, 0)
    engine = ClippedGradient(model, classes, np.random.default_rng(0))
    x, y = torch.randn(12, *shape), torch.arange(12) % 10
    for _ in range(3):
        engine.sum(torch.randint(10, (12, 20)) if name == "char_lstm" else x, y, RADIUS)
        engine.asked = True
    assert engine.checks.count > 1


def test_a_look_moves_neither_parameters_nor_coins() -> None:
    torch.manual_seed(3)
    model, x, y = HONEST["own code with dropout and noise"][0](), *batch()
    before, coins = [p.clone() for p in model.parameters()], torch.get_rng_state()
    engine = ClippedGradient(model, classes, np.random.default_rng(0))
    first = engine.sum(x, y, RADIUS).losses
    torch.set_rng_state(coins)
    engine.asked = True
    assert torch.equal(engine.sum(x, y, RADIUS).losses, first)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
