"""No step is taken un-noised, ever: each way around the noise raises, and leaves the model where it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import Parts, backward, data, first_batch, private, weights
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sordino.errors import PlanError


def step_twice(parts: Parts) -> None:
    backward(parts, *first_batch(parts))
    parts[1].step()
    train_state.append(weights(parts[0]).clone())
    parts[1].step()


def step_before_any_batch(parts: Parts) -> None:
    parts[1].step()


def step_without_backward(parts: Parts) -> None:
    x, y = first_batch(parts)
    F.cross_entropy(parts[0](x), y)
    parts[1].step()


def gradients_by_hand(parts: Parts) -> None:
    first_batch(parts)
    for parameter in parts[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    parts[1].step()


def the_inner_optimizer(parts: Parts) -> None:
    backward(parts, *first_batch(parts))
    for parameter in parts[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    parts[1].inner.step()


def the_class_of_the_inner_optimizer(parts: Parts) -> None:
    for parameter in parts[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    step: Any = torch.optim.SGD.step
    step(parts[1].inner)


def another_loader(parts: Parts) -> None:
    first_batch(parts)
    backward(parts, *data().tensors)
    parts[1].step()


def data_of_its_own_beside_the_batch(parts: Parts) -> None:
    x, y = first_batch(parts)
    other = data(7)
    loss = F.cross_entropy(parts[0](x), y) + F.cross_entropy(parts[0](other.tensors[0]), other.tensors[1])
    loss.backward()  # type: ignore[no-untyped-call]
    parts[1].step()


def part_of_a_batch(parts: Parts) -> None:
    x, y = first_batch(parts)
    backward(parts, x[1:], y[1:])
    parts[1].step()


def two_backward_passes(parts: Parts) -> None:
    x, y = first_batch(parts)
    backward(parts, x, y)
    backward(parts, x, y)
    parts[1].step()


def two_losses_of_one_pass(parts: Parts) -> None:
    x, y = first_batch(parts)
    out = parts[0](x)
    F.cross_entropy(out, y).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    out.square().mean().backward()
    parts[1].step()


def a_layer_put_in_later(parts: Parts) -> None:
    parts[0].insert(1, nn.BatchNorm1d(8))  # type: ignore[operator]
    backward(parts, *first_batch(parts))
    parts[1].step()


def a_closure_without_a_backward_pass(parts: Parts) -> None:
    first_batch(parts)
    parts[1].step(lambda: 0.0)


def a_closure_with_a_second_backward_pass(parts: Parts) -> None:
    x, y = first_batch(parts)
    backward(parts, x, y)
    parts[1].step(lambda: backward(parts, x, y))


def a_penalty_on_the_weights(parts: Parts) -> None:
    x, y = first_batch(parts)
    penalty = torch.stack([p.square().sum() for p in parts[0].parameters()]).sum()
    (F.cross_entropy(parts[0](x), y) + penalty).backward()  # type: ignore[no-untyped-call]
    parts[1].step()


def a_layer_called_alone(parts: Parts) -> None:
    x, _ = first_batch(parts)
    parts[0][0](x).sum().backward()  # type: ignore[index]
    parts[1].step()


def a_new_group(parts: Parts) -> None:
    parts[1].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def a_group_behind_our_back(parts: Parts) -> None:
    parts[1].inner.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    backward(parts, *first_batch(parts))
    parts[1].step()


def a_batch_left_out(parts: Parts) -> None:
    for x, y in parts[2]:
        backward(parts, x, y)
        parts[1].zero_grad()


def a_batch_left_out_by_its_loss(parts: Parts) -> None:
    for x, y in parts[2]:
        if F.cross_entropy(parts[0](x), y).item() > 0:
            continue


def a_piece_left_out(parts: Parts) -> None:
    other = private(max_physical_batch_size=3)
    for n, (x, y) in enumerate(other[2]):
        if n:
            backward(other, x, y)
            other[1].step()


def an_empty_batch_left_out(parts: Parts) -> None:
    """The step count alone tells whether a record was ever drawn."""
    other = private(dataset=data(40), batch=1)
    for x, y in other[2]:
        if len(x) == 0:
            continue
        backward(other, x, y)
        other[1].step()


def a_batch_only_looked_at(parts: Parts) -> None:
    for _ in parts[2]:
        pass


def the_last_batch_left_out(parts: Parts) -> None:
    other = private(batch=60)  # one batch per epoch
    for _ in other[2]:
        pass


def a_batch_left_out_by_loading_a_checkpoint(parts: Parts) -> None:
    for _ in parts[2]:
        parts[1].load_state_dict(parts[1].state_dict())


def a_batch_left_out_by_a_second_loop(parts: Parts) -> None:
    for _ in zip(parts[2], parts[2], strict=False):
        pass


def a_certificate_after_leaving_at_a_batch(parts: Parts) -> None:
    for x, _ in parts[2]:
        if len(x) < 60:
            break
    parts[1].certificate()


WAYS: list[Callable[[Parts], None]] = [
    step_twice,
    step_before_any_batch,
    step_without_backward,
    gradients_by_hand,
    the_inner_optimizer,
    the_class_of_the_inner_optimizer,
    another_loader,
    data_of_its_own_beside_the_batch,
    part_of_a_batch,
    two_backward_passes,
    two_losses_of_one_pass,
    a_layer_put_in_later,
    a_closure_without_a_backward_pass,
    a_closure_with_a_second_backward_pass,
    a_penalty_on_the_weights,
    a_layer_called_alone,
    a_new_group,
    a_group_behind_our_back,
    a_batch_left_out,
    a_batch_left_out_by_its_loss,
    a_piece_left_out,
    an_empty_batch_left_out,
    a_batch_only_looked_at,
    the_last_batch_left_out,
    a_batch_left_out_by_loading_a_checkpoint,
    a_batch_left_out_by_a_second_loop,
    a_certificate_after_leaving_at_a_batch,
]
train_state: list[Tensor] = []


def held(parts: Parts) -> Tensor:
    """What the optimizer trains."""
    return torch.cat([p.detach().reshape(-1) for p in parts[1].recording.named.values()])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_no_way_around_the_noise(way: Callable[[Parts], None]) -> None:
    parts = private()
    train_state[:] = [weights(parts[0]).clone()]
    with pytest.raises(PlanError, match=r"\[loop\]"):
        way(parts)
    assert torch.equal(held(parts), train_state[-1])
    assert parts[1].steps == len(train_state) - 1
