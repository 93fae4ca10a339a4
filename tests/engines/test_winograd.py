"""Promises of the convolutions with fewer products: the convolution's own values and gradients, to rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.tiny import final, plan, seeded, task
from torch import Tensor, nn

from sordino import kernels
from sordino.engines import winograd
from sordino.engines.inprocess import InProcess
from sordino.engines.objectives import OneClient
from sordino.engines.winograd import Lift
from sordino.parts.encoding import Clip
from sordino.parts.gradients import Ball, Batch
from sordino.parts.local_solvers import LocalSgd
from sordino.rng import Seeded

pytestmark = pytest.mark.skipif(not kernels.available(), reason="numba is not installed, or the kernels are off")
CLOSE = 3e-5  # of the largest entry; the direct sum in float32 has about 3e-6


def layer(inputs: int = 32, outputs: int = 64, pad: int | tuple[int, int] = 2, **more: Any) -> nn.Conv2d:
    return seeded(nn.Conv2d(inputs, outputs, 5, padding=pad, **more))  # type: ignore[return-value]


def images(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape)


def slopes(model: nn.Conv2d, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of a weighted sum of it with respect to the input and the parameters."""
    x = x.to(model.weight.dtype).requires_grad_()
    y = model(x)
    torch.manual_seed(2)
    weights = torch.randn(y.shape)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])]


def farthest(found: list[Tensor], exact: list[Tensor]) -> float:
    assert [a.shape for a in found] == [b.shape for b in exact]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "pad"),
    [((3, 32, 16, 16), 2), ((2, 32, 14, 14), 2), ((1, 32, 9, 17), (0, 1)), ((70, 32, 8, 8), 0), ((5, 32, 11, 6), 4)],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_convolution(shape: Any, pad: Any, bias: bool, last: bool) -> None:
    plain = layer(pad=pad, bias=bias)
    fast, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    assert winograd.accelerate(fast) == 1
    x = images(*shape)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    assert farthest(slopes(fast, x), slopes(exact, x)) < CLOSE
    assert "_Convolution" in str(fast(x).grad_fn) or "Permute" in str(fast(x).grad_fn), "the plain layer ran"


def test_a_wrong_point_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sabotage: interpolation through points that are not those of the evaluation."""
    plain, x = layer(), images(2, 32, 16, 16)
    fast, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    winograd.accelerate(fast)
    a, g, b = winograd.transforms()
    wrong = a.left.clone()
    wrong[1] = wrong[1].roll(1)
    monkeypatch.setattr(winograd, "transforms", lambda: (Lift(wrong), g, b))
    assert farthest(slopes(fast, x), slopes(exact, x)) > 100 * CLOSE


def test_a_tile_is_the_definition_in_exact_arithmetic() -> None:
    a, g, b = (part.both.double() for part in winograd.transforms())
    tile, kernel = torch.randn(8, 8, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    found = a @ ((g @ kernel.flatten()) * (b @ tile.flatten()))
    exact = nn.functional.conv2d(tile[None, None], kernel[None, None]).flatten()
    assert torch.allclose(found, exact, atol=1e-5)


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    fast = layer()
    winograd.accelerate(fast)
    x = images(2, 32, 10, 10).requires_grad_(frozen != "input")
    for name, parameter in fast.named_parameters():
        parameter.requires_grad_(name != frozen)
    fast(x).square().sum().backward()
    found = {"input": x.grad, "weight": fast.weight.grad, "bias": fast.bias.grad if fast.bias is not None else None}
    assert [name for name, grad in found.items() if grad is None] == [frozen]


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(64, 64, 3),
        nn.Conv2d(8, 640, 5),
        nn.Conv2d(640, 8, 5),
        nn.Conv2d(64, 64, 5, stride=2),
        nn.Conv2d(64, 64, 5, dilation=2),
        nn.Conv2d(64, 64, 5, groups=2),
        nn.Conv2d(64, 64, 5, padding=2, padding_mode="circular"),
        nn.Conv2d(64, 64, 5, padding="same"),
        nn.Conv2d(64, 64, 5).double(),
        nn.Conv2d(64, 64, (5, 3)),
    ],
    ids=str,
)
def test_other_layers_are_left_alone(other: nn.Conv2d) -> None:
    assert winograd.accelerate(nn.Sequential(other)) == 0
    assert "forward" not in vars(other)


def test_images_smaller_than_a_tile_run_as_they_always_did() -> None:
    plain = layer(pad=0)
    fast = copy.deepcopy(plain)
    winograd.accelerate(fast)
    x = images(2, 32, 7, 20)
    assert torch.equal(fast(x), plain(x))


@pytest.mark.parametrize("compiled", [True, False])
def test_without_compiled_loops_torchs_convolution_runs(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: compiled)
    assert winograd.accelerate(nn.Conv2d(32, 32, 5)) == compiled


def net() -> nn.Module:
    wide = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    return seeded(nn.Sequential(*wide, nn.Flatten(), nn.Linear(64 * 16, 3)))


def test_a_run_with_and_without_gives_one_result_and_says_which() -> None:
    data = task(model=net(), shape=(1, 8, 8))
    same = plan(rounds=2, local=LocalSgd(lr=0.05, epochs=2, batch=2), encode=(Clip(0.5),))
    with_, without = InProcess(path="sequential"), InProcess(path="sequential", winograd=False)
    one, other = final(same, data, with_), final(same, data, without)
    assert float((one - data.layout.flatten(data.model)).norm()) > 0.05
    assert torch.allclose(one, other, atol=2e-5)
    assert not torch.equal(one, other), "the plain layers ran in both"
    headers = [engine.prepare(same, data, Seeded(0)).header for engine in (with_, without)]
    assert [header["winograd"] for header in headers] == [1, 0]


def test_per_record_gradients_do_not_mind() -> None:
    data = task(model=net(), shape=(1, 8, 8))
    fast, plain = OneClient(data), OneClient(data, winograd=False)
    start = data.layout.flatten(data.model)
    rows = torch.arange(2)
    batch = Batch(data.clients.records.x[rows][None], data.clients.records.y[rows][None])
    for ball in (Ball(0.1), Ball(0.1, norm=1)):
        sums = [each.outward(each.clipped(each.place(each.inward(start), 1), batch, ball)) for each in (fast, plain)]
        assert torch.allclose(sums[0], sums[1], atol=1e-5)
        assert float(sums[0].abs().max()) > 0
