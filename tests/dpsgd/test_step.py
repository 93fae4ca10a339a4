"""What one step does: the clipped sum over a Poisson batch, noised, smoothed, handed to an ordinary optimizer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import QUIET, batch_of, clipped_sum, data, mlp, noised_gradient, private, train, weights
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from sordino.dpsgd import make_private
from sordino.models import DpMnistCnn

CLIP = 0.5
OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


@pytest.mark.parametrize("smoothing", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_is_the_one_written_by_hand(optimizer: Any, smoothing: float) -> None:
    dataset, twin = data(), mlp()
    parts = private(mlp(), dataset, optimizer, clip_norm=CLIP, smoothing=smoothing)
    by_hand, (x, y) = optimizer(twin.parameters(), lr=0.1), dataset.tensors
    for t in range(5):
        rows = batch_of(parts, t)
        slopes = noised_gradient(parts, t, clipped_sum(twin, x[rows], y[rows], CLIP))
        for name, parameter in twin.named_parameters():
            parameter.grad = slopes[name].float()
        by_hand.step()
    train(parts)
    assert parts[1].steps == 5
    torch.testing.assert_close(weights(parts[0]), weights(twin), rtol=0, atol=1e-4)  # the clip aims 1e-5 inside


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("physical", [1, 5, 7, 1000])
def test_pieces_give_the_step_of_the_whole_batch(physical: int, reduction: Any) -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction=reduction)

    whole, pieces = private(reduction=reduction), private(max_physical_batch_size=physical, reduction=reduction)
    train(whole, loss, epochs=2)
    train(pieces, loss, epochs=2)
    assert whole[1].steps == pieces[1].steps == 10
    torch.testing.assert_close(weights(pieces[0]), weights(whole[0]), rtol=0, atol=1e-5)


def test_a_piece_that_is_not_the_last_moves_nothing_and_writes_no_gradient() -> None:
    model, optimizer, loader = private(max_physical_batch_size=3)
    before, steps = weights(model).clone(), 0
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.steps:
            break
        steps += 1
        assert torch.equal(weights(model), before)
        assert all(p.grad is None for p in model.parameters())
    assert steps > 1
    assert not torch.equal(weights(model), before)


def test_an_empty_batch_still_makes_a_noised_step() -> None:
    model, optimizer, loader = private(DpMnistCnn().build((1, 28, 28), 3), data(40, (1, 28, 28)), batch=1)
    moved = sizes = 0
    for x, y in loader:
        before = weights(model).clone()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not len(x):
            sizes += 1
            assert x.shape == (0, 1, 28, 28)
            moved += not torch.equal(weights(model), before)
    assert optimizer.steps == 40
    assert moved == sizes > 5
    assert bool(weights(model).isfinite().all())


def test_the_noise_has_the_size_that_is_billed() -> None:
    model, optimizer, loader = private(
        nn.Linear(300, 100), data(20, (300,), 100), batch=5, noise_multiplier=2.0, smoothing=0
    )
    x, _ = next(iter(loader))
    (model(x) * 0).sum().backward()
    optimizer.step()
    noise = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]) * 5
    assert float(noise.std()) == pytest.approx(2.0, rel=0.02)
    assert float((noise / 2).pow(4).mean()) == pytest.approx(3.0, rel=0.1)


def test_a_canary_moves_the_release_by_one_clip_and_no_more() -> None:
    """Two worlds, every record in every batch, a model that stands still: each step is a release at the same point."""

    def releases(canary: float) -> Tensor:
        x = torch.zeros(8, 3)
        x[0, 0] = canary
        model = nn.Linear(3, 1, bias=False)
        parts = private(
            model, TensorDataset(x, torch.ones(8)), _still, batch=8, clip_norm=0.7, noise_multiplier=1.5, smoothing=0.0
        )
        seen = []
        for _ in range(500):
            a, b = next(iter(parts[2]))
            F.mse_loss(model(a)[:, 0], b).backward()  # type: ignore[no-untyped-call]
            parts[1].step()
            assert model.weight.grad is not None
            seen.append(float(model.weight.grad[0, 0]))
        return torch.tensor(seen)

    there, gone = releases(1e4), releases(0.0)
    separation = abs(float(there.mean() - gone.mean())) / float(gone.std())
    assert float(there.std() / gone.std()) == pytest.approx(1.0, abs=0.2)
    assert separation == pytest.approx(1 / 1.5, abs=0.2)


def _still(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def test_secure_noise_is_never_repeated_and_rounded_to_a_public_grid() -> None:
    one, other = private(noise="secure"), private(noise="secure")
    train(one)
    train(other)
    assert not torch.equal(weights(one[0]), weights(other[0]))
    assert one[1].streams.mode == "secure"


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    runs = [private(seed=seed) for seed in (1, 1, 2)]
    for run in runs:
        train(run)
    first, again, other = (weights(run[0]) for run in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_frozen_and_unheld_parameters_are_no_part_of_the_norm() -> None:
    model, dataset = mlp(), data()
    held = model[0]  # type: ignore[index]
    held.bias.requires_grad_(False)
    own = torch.optim.SGD(held.parameters(), lr=0.1)
    parts = make_private(
        model, own, DataLoader(dataset, 12), epochs=1, noise_multiplier=QUIET, smoothing=0.0, clip_norm=0.05
    )
    frozen = {name: p.clone() for name, p in model.named_parameters() if name != "0.weight"}
    rows = batch_of(parts, 0)
    wanted = clipped_sum(model, dataset.tensors[0][rows], dataset.tensors[1][rows], 0.05)
    assert set(wanted) == {"0.weight"}
    for x, y in parts[2]:
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        parts[1].step()
        break
    torch.testing.assert_close(held.weight.grad.double() * 12, wanted["0.weight"], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name != "0.weight")


def test_shared_weights_are_added_before_the_norm() -> None:
    layer = nn.Linear(4, 4)
    model, dataset = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3)), data()
    parts = private(model, dataset, noise_multiplier=QUIET, smoothing=0.0, clip_norm=CLIP)
    rows = batch_of(parts, 0)
    wanted = clipped_sum(model, dataset.tensors[0][rows], dataset.tensors[1][rows], CLIP)
    x, y = next(iter(parts[2]))
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    parts[1].step()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.double() * 12, wanted["0.weight"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    ],
)
def test_schedulers_take_the_optimizer(scheduler: Any) -> None:
    parts = private()
    plan = scheduler(parts[1])
    for x, y in parts[2]:
        parts[1].zero_grad()
        F.cross_entropy(parts[0](x), y).backward()  # type: ignore[no-untyped-call]
        parts[1].step()
        plan.step()
    assert parts[1].param_groups is parts[1].inner.param_groups
    assert parts[1].param_groups[0]["lr"] != 0.1


def test_zero_grad_may_stand_anywhere_before_the_backward_pass() -> None:
    early, late = private(), private()
    train(early)
    model, optimizer, loader = late
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            model(x)
        model(x[:1])  # looked at, with a graph that nobody uses
        optimizer.step()
    assert torch.equal(weights(model), weights(early[0]))


def test_copies_and_evaluation_of_the_model_are_ordinary() -> None:
    parts = private()
    train(parts)
    x = data().tensors[0]
    other = copy.deepcopy(parts[0])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(x).any()
    assert torch.equal(pickle.loads(pickle.dumps(parts[0]))(x), parts[0](x))
    assert parts[0](x).any()
    before = parts[0](x)
    assert torch.equal(parts[1].detach()(x), before)
    assert all("forward" not in vars(module) for module in parts[0].modules())
