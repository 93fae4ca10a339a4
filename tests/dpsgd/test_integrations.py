"""Private loops where people already are: torch.compile, accumulated gradients, the Trainer, accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.dpsgd.loops import backward, first_batch, private, train, weights
from torch import nn
from torch.nn import functional as F  # noqa: N812

import sordino as so
from sordino.errors import ConfigError, PlanError


@pytest.mark.parametrize("settings", [{}, {"strategy": so.parts.Banded(3)}], ids=["poisson", "correlated"])
def test_get_epsilon_is_the_epsilon_of_the_certificate(settings: dict[str, Any]) -> None:
    parts = private(**settings)
    optimizer = parts[1]
    assert optimizer.get_epsilon() == optimizer.certificate()["epsilon"]
    train(parts)
    assert optimizer.get_epsilon() == optimizer.certificate()["epsilon"]
    assert optimizer.get_epsilon(1e-6) > optimizer.get_epsilon(1e-3)
    with pytest.raises(ConfigError, match="delta"):
        optimizer.get_epsilon(1.5)


def test_get_epsilon_grows_with_steps_beyond_the_plan() -> None:
    parts = private()
    planned = parts[1].get_epsilon()
    train(parts, epochs=2)
    assert parts[1].get_epsilon() == parts[1].certificate()["epsilon"] > planned


def test_accumulated_gradients_are_refused_with_the_fix() -> None:
    parts = private()
    batches = iter(parts[2])
    backward(parts, *next(batches))
    with pytest.raises(PlanError, match=r"gradients accumulated.*max_physical_batch_size"):
        next(batches)
    assert parts[1].steps == 0
    x, y = first_batch(parts)
    backward(parts, x, y)
    backward(parts, x, y)
    with pytest.raises(PlanError, match=r"2 backward passes.*max_physical_batch_size"):
        parts[1].step()


def test_the_fix_for_accumulated_gradients_takes_the_same_steps() -> None:
    whole, pieces = private(), private(max_physical_batch_size=4)
    train(whole)
    train(pieces)
    torch.testing.assert_close(weights(whole[0]), weights(pieces[0]))
    assert whole[1].steps == pieces[1].steps


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile itself
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_compiled_after_make_private_trains_the_same(in_place: bool) -> None:
    plain, parts = private(), private()
    compiled: Any = parts[0]
    if in_place:
        compiled.compile(backend="aot_eager")
    else:
        compiled = torch.compile(compiled, backend="aot_eager")
    train(plain)
    train((compiled, *parts[1:]), torch.compile(F.cross_entropy, backend="aot_eager"))
    assert torch.equal(weights(plain[0]), weights(parts[0]))
    assert parts[1].certificate()["own_code"] == plain[1].certificate()["own_code"]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_the_fix_for_a_model_that_is_compiled_before_make_private_is_true() -> None:
    inner = nn.Sequential(nn.Linear(4, 3))
    compiled: Any = torch.compile(inner, backend="aot_eager")
    with pytest.raises(PlanError, match=r"compiled\._orig_mod"):
        private(compiled)
    parts = private(compiled._orig_mod)
    train((compiled, *parts[1:]))
    assert parts[1].steps == 5
    whole: Any = torch.compile(parts[1].detach(), backend="aot_eager")
    assert whole(torch.zeros(2, 4)).shape == (2, 3)
