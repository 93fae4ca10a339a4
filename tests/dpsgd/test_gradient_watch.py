"""A loop that clips gradients itself is told, once, that it has no effect; a loop that does not is told nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.dpsgd.loops import data, mlp, private
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

Change = Callable[[nn.Module], object]


def halved(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad * 0.5


CHANGES: dict[str, Change] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_norm_, a norm that is never reached": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    "clip_grad_norm_, one at a time": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "another tensor": halved,
}


def loop(change: Change, zero: str, epochs: int = 2, physical: int | None = None) -> nn.Module:
    model, optimizer, loader = private(
        loader=DataLoader(data(), batch_size=12, shuffle=False), epochs=epochs, max_physical_batch_size=physical
    )
    for _ in range(epochs):
        for x, y in loader:
            if zero == "before":
                optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            change(model)
            optimizer.step()
            if zero == "after":
                model.zero_grad(set_to_none=False)
    return model


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "backward() and step()" in record.getMessage()]


@pytest.mark.parametrize("zero", ["before", "after", "never"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_gradients_that_has_no_effect_is_said_once(
    name: str, zero: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed = loop(CHANGES[name], zero)
    assert len(warnings(caplog)) == 1
    assert "lower clip_norm=" in warnings(caplog)[0]
    plain = loop(lambda model: None, zero)
    for one, other in zip(changed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)  # what the warning says: no effect


@pytest.mark.parametrize("zero", ["before", "after", "never"])
@pytest.mark.parametrize("physical", [None, 5])
def test_a_loop_that_leaves_gradients_alone_is_told_nothing(
    zero: str, physical: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    loop(lambda model: [p.grad for p in model.parameters()], zero, physical=physical)
    assert warnings(caplog) == []


def test_the_zeros_that_are_watched_are_gone_after_the_step() -> None:
    model, optimizer, loader = private(mlp(), max_physical_batch_size=3)
    left = []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        optimizer.step()
        left.append({p.grad is None for p in model.parameters()})
    assert {True} in left  # a piece of a batch releases nothing
    assert {False} in left
    assert all(len(one) == 1 for one in left)
