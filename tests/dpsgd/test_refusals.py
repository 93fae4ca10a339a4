"""What cannot be private is refused in a sentence, and what goes wrong half-way leaves no half step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import backward, batch_of, data, first_batch, mlp, private, train, weights
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from sordino.dpsgd import make_private
from sordino.errors import ConfigError, DataError, PlanError


def test_gradients_set_by_hand_are_overwritten_by_noised_ones() -> None:
    honest, tampered = private(), private()
    for parts in (honest, tampered):
        backward(parts, *first_batch(parts))
        if parts is tampered:
            for parameter in parts[0].parameters():
                parameter.grad = torch.full_like(parameter, 100.0)
        parts[1].step()
    assert torch.equal(weights(honest[0]), weights(tampered[0]))


def test_a_frozen_parameter_with_a_gradient_by_hand_stays() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    parts = make_private(model, optimizer, DataLoader(data(), 12), epochs=1, noise_multiplier=1.0)
    before = model[0].weight.clone()  # type: ignore[index]
    model[0].weight.grad = torch.ones_like(before)  # type: ignore[index]
    backward(parts, *first_batch(parts))
    parts[1].step()
    assert torch.equal(model[0].weight, before)  # type: ignore[index]


def test_thawing_a_parameter_needs_a_new_bill() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    parts = make_private(model, optimizer, DataLoader(data(), 12), epochs=1, noise_multiplier=1.0)
    model[0].weight.requires_grad_(True)  # type: ignore[index]
    backward(parts, *first_batch(parts))
    with pytest.raises(PlanError, match="unfrozen"):
        parts[1].step()


def test_a_parameter_frozen_later_stands_still() -> None:
    parts = private()
    parts[0][0].weight.requires_grad_(False)  # type: ignore[index]
    before = parts[0][0].weight.clone()  # type: ignore[index]
    train(parts)
    assert torch.equal(parts[0][0].weight, before)  # type: ignore[index]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_record_that_is_not_finite_counts_as_zero(bad: float) -> None:
    x, y = data().tensors
    x[3] = bad
    parts = private(dataset=TensorDataset(x, y), batch=30, epochs=2)
    train(parts, epochs=2)
    assert bool(weights(parts[0]).isfinite().all())


def test_a_batch_without_a_finite_gradient_is_a_step_of_noise_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """To stop there would tell, without noise, that such a record was drawn."""
    parts, quiet = private(), private()
    train(parts, lambda out, y: F.cross_entropy(out * math.nan, y))
    train(quiet, lambda out, y: 0 * F.cross_entropy(out, y))
    assert torch.equal(weights(parts[0]), weights(quiet[0]))
    assert parts[1].certificate() == quiet[1].certificate()
    assert parts[1].not_finite == sum(len(batch_of(parts, t)) for t in range(5))
    assert [record.message for record in caplog.records if "NaN or infinity" in record.message] == [caplog.messages[0]]


def test_a_scaler_that_leaves_steps_out_is_refused() -> None:
    parts, scaler = private(), torch.amp.GradScaler("cpu")
    x, y = first_batch(parts)
    scaler.scale(F.cross_entropy(parts[0](x), y)).backward()  # type: ignore[no-untyped-call]
    before = weights(parts[0]).clone()
    with pytest.raises(PlanError, match="GradScaler"):
        scaler.step(parts[1])
    assert torch.equal(weights(parts[0]), before)


def test_an_inner_step_that_fails_leaves_noised_gradients_alone() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("disk full")

    parts = private(optimizer=Failing, noise_multiplier=1.0)
    before = weights(parts[0]).clone()
    with pytest.raises(RuntimeError, match="disk full"):
        train(parts)
    assert torch.equal(weights(parts[0]), before)
    assert parts[1].steps == 1  # the noise was drawn: it counts
    with pytest.raises(PlanError):
        parts[1].step()


def test_a_forward_pass_that_fails_leaves_the_model_whole() -> None:
    parts = private()
    x, y = first_batch(parts)
    with pytest.raises(PlanError, match="mat1 and mat2"):
        parts[0](x[:, :2])
    assert all("forward" not in vars(module) for module in parts[0].children())
    backward(parts, x, y)
    parts[1].step()
    assert parts[1].steps == 1


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.SyncBatchNorm(8)])
def test_layers_that_mix_records_are_refused_by_name(layer: nn.Module) -> None:
    with pytest.raises(PlanError, match=r"'1'.*GroupNorm"):
        private(nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3)))


class Centred(nn.Module):
    """Mixes the records of a batch without any layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.out(x)
        return hidden - hidden.mean(0)


class Remembers(nn.Module):
    """Keeps a mean of what it saw in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        out: Tensor = self.out(x)
        return out


class Reduces(nn.Module):
    """Answers with one number for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x).mean()
        return out


@pytest.mark.parametrize(
    ("model", "match"), [(Centred, "other records"), (Remembers, "buffer 'mean'"), (Reduces, "slice per record")]
)
def test_models_that_mix_or_remember_records_are_refused(model: type[nn.Module], match: str) -> None:
    parts = private(model())
    before = weights(parts[0]).clone()
    with pytest.raises(PlanError, match=match):
        train(parts, lambda out, y: out.mean() + 0 * y.sum())
    assert torch.equal(weights(parts[0]), before)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "half": lambda out, y, reduction: 0.5 * F.cross_entropy(out, y, reduction=reduction),
    "mse": F.mse_loss,
}


@pytest.mark.parametrize("declared", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_reduced_otherwise_than_declared_is_refused(name: str, declared: Any) -> None:
    other = {"mean": "sum", "sum": "mean"}[declared]
    x, y = data().tensors
    dataset = TensorDataset(x, F.one_hot(y, 3).float()) if name == "mse" else data()
    loss = LOSSES[name]
    parts = private(dataset=dataset, reduction=declared)
    with pytest.raises(PlanError, match=rf"that is the {other} over a batch"):
        train(parts, lambda out, y: loss(out, y, reduction=other), epochs=3)
    right = private(dataset=dataset, reduction=declared)
    train(right, lambda out, y: loss(out, y, reduction=declared), epochs=3)
    assert right[1].check.found.startswith("recognised")


def test_class_weights_are_refused_unless_the_loss_comes_record_by_record() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(PlanError, match="class weights"):
        train(private(), lambda out, y: F.cross_entropy(out, y, weight=weight))
    summed = lambda out, y: F.cross_entropy(out, y, weight=weight, reduction="sum")  # noqa: E731
    with pytest.raises(PlanError, match="class weights, whose mean"):
        train(private(reduction="sum"), summed)
    parts = private(loss=lambda out, y: F.cross_entropy(out, y, reduction="none") * weight[y])
    for x, y in parts[2]:
        parts[1].loss(parts[0](x), y).backward()  # type: ignore[no-untyped-call]
        parts[1].step()
    assert parts[1].certificate()["own_code"]["grade"] == "by construction"


def test_a_loss_that_is_not_known_is_refused_unless_it_comes_record_by_record() -> None:
    with pytest.raises(PlanError, match="loss=f"):
        train(private(), lambda out, y: (out.gather(1, y[:, None])[:, 0] - 1).pow(4).mean())


def test_a_model_elsewhere_than_its_data_is_a_clear_error() -> None:
    parts = private()
    x, _ = first_batch(parts)
    with pytest.raises(DataError, match="a batch on meta and a model on cpu"):
        parts[0](x.to("meta"))
    with pytest.raises(PlanError, match="device"):
        private(mlp().to("meta"))


@pytest.mark.parametrize("label", [-100, 3])
def test_a_label_that_no_class_stands_for_is_refused_before_the_loop(label: int) -> None:
    """torch would leave -100 out of the mean without a word, and stop at 3 in the middle of a step."""
    x, y = data().tensors
    y[7] = label
    with pytest.raises(DataError, match=f"label {label} in record 7 of the data set; needed labels from 0 to 2"):
        private(dataset=TensorDataset(x, y))
    private(nn.Linear(4, 1), TensorDataset(x, y))  # a number to be met, not a class


def test_optimizers_that_cannot_be_private_are_refused() -> None:
    loader: Any = DataLoader(data(), 12)
    model, stranger = mlp(), nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError, match="another module"):
        make_private(model, torch.optim.SGD([*model.parameters(), stranger]), loader, epochs=1, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="LBFGS"):
        make_private(model, torch.optim.LBFGS(model.parameters()), loader, epochs=1, noise_multiplier=1.0)
    frozen = mlp().requires_grad_(False)
    with pytest.raises(ConfigError, match="trainable"):
        make_private(frozen, torch.optim.SGD(frozen.parameters()), loader, epochs=1, noise_multiplier=1.0)


def test_nothing_is_made_private_twice() -> None:
    model, optimizer, loader = private()
    again: dict[str, Any] = {"epochs": 1, "noise_multiplier": 1.0}
    with pytest.raises(ConfigError, match="make_private has already returned"):
        make_private(model, torch.optim.SGD(model.parameters()), DataLoader(data(), 12), **again)
    with pytest.raises(ConfigError, match="make_private has already returned"):
        make_private(mlp(), optimizer, DataLoader(data(), 12), **again)
    with pytest.raises(ConfigError, match="make_private has already returned"):
        make_private(mlp(), torch.optim.SGD(mlp().parameters()), loader, **again)
    optimizer.detach()
    with pytest.raises(ConfigError, match="make_private has already returned"):
        make_private(model, optimizer.inner, DataLoader(data(), 12), **again)
    make_private(model, torch.optim.SGD(model.parameters()), DataLoader(data(), 12), **again)
