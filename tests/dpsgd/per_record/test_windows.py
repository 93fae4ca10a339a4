"""The compiled loops over images give what torch gives, refuse what torch refuses, and are left out when asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.dpsgd.per_record.oracle import assert_equal, classes, clipped_loop, middle_clip_norm, squared
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sordino import kernels
from sordino.dpsgd import Clipped, ClippedGradient, Recorder, small_convolutions
from sordino.dpsgd.convolution import _padded
from sordino.models import DpMnistCnn

pytestmark = pytest.mark.skipif(not kernels.available(), reason="numba is not installed, or the kernels are off")

BATCH = 5
CONVOLUTIONS: dict[str, Callable[[], nn.Conv2d]] = {
    "first of the tutorial": lambda: nn.Conv2d(3, 16, 8, stride=2, padding=3),
    "odd channels": lambda: nn.Conv2d(3, 19, 3),
    "oblong": lambda: nn.Conv2d(3, 33, (2, 5), stride=(3, 1), padding=(0, 2), bias=False),
    "dilated": lambda: nn.Conv2d(3, 16, 3, dilation=(1, 2), padding=1),
    "same": lambda: nn.Conv2d(3, 16, (3, 5), padding="same"),
    "circular": lambda: nn.Conv2d(3, 17, 3, padding=1, padding_mode="circular"),
    "reflected": lambda: nn.Conv2d(3, 16, 3, padding=2, padding_mode="reflect", stride=2),
}
SIDES = [(13, 13), (12, 17)]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(3)
    yield
    torch.set_num_threads(threads)


def counted(monkeypatch: Any, owner: Any, name: str) -> list[int]:
    """Grows by one with every call of owner.name."""
    calls, plain = [], getattr(owner, name)

    def counting(*args: Any) -> Any:
        calls.append(1)
        return plain(*args)

    monkeypatch.setattr(owner, name, counting)
    return calls


def off(monkeypatch: Any) -> None:
    monkeypatch.setattr("sordino.kernels.available", lambda: False)


def draw(sides: tuple[int, int], batch: int = BATCH) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, *sides), torch.linspace(-2, 2, batch)


def exact(clipped: Clipped) -> tuple[dict[str, Tensor], Tensor]:
    return {name: total.double() for name, total in clipped.total.items()}, clipped.norms


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_its_gradient_are_torchs(name: str, sides: tuple[int, int]) -> None:
    layer, x = CONVOLUTIONS[name](), draw(sides)[0].contiguous(memory_format=torch.channels_last).requires_grad_()
    padded = _padded(layer, x)
    spot = small_convolutions.window_offsets(layer, padded)
    got = small_convolutions.Convolution.apply(padded, layer.weight.detach(), layer.bias, spot)  # type: ignore[no-untyped-call]
    expected = layer(x)
    torch.testing.assert_close(got.view(BATCH, *spot.sides, -1).movedim(-1, 1), expected, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(expected)
    ours = torch.autograd.grad(got, x, slope.movedim(1, -1).reshape(got.shape))[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected, x, slope)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_clipped_as_by_a_loop_over_records(
    name: str, sides: tuple[int, int], monkeypatch: Any
) -> None:
    """Above another layer, so that all of the loops are needed."""
    calls = counted(monkeypatch, small_convolutions, "_weight_gradients")
    model, (x, y) = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh(), CONVOLUTIONS[name]()), draw(sides)
    clip_norm = middle_clip_norm(clipped_loop(model, squared, x, y, 1.0)[1])
    assert_equal(ClippedGradient(model, squared).sum(x, y, clip_norm), *clipped_loop(model, squared, x, y, clip_norm))
    assert calls


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [0, 1, 2, 7])
def test_with_and_without_the_loops_the_clipped_sum_is_the_same(batch: int, threads: int, monkeypatch: Any) -> None:
    torch.set_num_threads(threads)
    model = DpMnistCnn().build((1, 28, 28), 10)
    x, y = torch.randn(batch, 1, 28, 28), torch.arange(batch)
    fast = ClippedGradient(model, classes).sum(x, y, 0.5)
    off(monkeypatch)
    slow = ClippedGradient(model, classes).sum(x, y, 0.5)
    if batch:
        assert_equal(fast, *exact(slow))
    assert fast.total.keys() == slow.total.keys()
    assert len(fast.norms) == batch


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_record_that_is_not_finite_moves_no_other(bad: float, monkeypatch: Any) -> None:
    model = DpMnistCnn().build((1, 28, 28), 10)
    x, y = torch.randn(BATCH, 1, 28, 28), torch.arange(BATCH)
    x[2, 0, 11, 13] = bad
    fast = ClippedGradient(model, classes).sum(x, y, 0.5)
    off(monkeypatch)
    slow = ClippedGradient(model, classes).sum(x, y, 0.5)
    torch.testing.assert_close(fast.norms, slow.norms, rtol=1e-4, atol=0, equal_nan=True)
    for name, total in slow.total.items():
        torch.testing.assert_close(fast.total[name], total, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("window", "stride"), [(2, 1), (2, 2), ((3, 2), (2, 3)), (3, 1)])
def test_a_pool_and_its_gradient_are_torchs_even_where_entries_are_equal_or_not_finite(
    window: Any, stride: Any
) -> None:
    x = torch.randint(3, (BATCH, 24, 7, 9)).float()  # many equal ones
    x[0, :, 2, 3], x[1, :, 4, 4], x[2, :, 1:5, 1:5], x[3, 0] = math.nan, math.inf, -math.inf, math.nan
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    pool = nn.MaxPool2d(window, stride)
    got, expected = small_convolutions.max_pool(Any, pool, 0, x), pool(x)  # type: ignore[arg-type]
    assert type(got.grad_fn).__name__ == "MaxPoolBackward"
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    slope = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(y, x, slope)[0] for y in (got, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, dilation=2), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(1, 1)],
)
def test_any_pool_can_be_in_a_model(pool: nn.Module) -> None:
    for channels in (6, 16):
        model, (x, y) = nn.Sequential(nn.Conv2d(3, channels, 3), pool, nn.ReLU(inplace=True)), draw((12, 17))
        assert_equal(ClippedGradient(model, squared).sum(x, y, 2.0), *clipped_loop(model, squared, x, y, 2.0))


def test_a_slope_that_is_one_number_everywhere_is_read_right() -> None:
    """Of a sum, torch hands over one number that stands for all."""
    for layers in ([nn.Conv2d(16, 16, 3)], [nn.MaxPool2d(2, 1)]):
        model, (x, y) = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), *layers), draw((9, 9))
        engine = ClippedGradient(model, lambda out, target: out.sum((1, 2, 3)))
        assert_equal(engine.sum(x, y, 2.0), *clipped_loop(model, lambda out, target: out.sum((1, 2, 3)), x, y, 2.0))


def test_layers_that_write_in_place_are_recorded() -> None:
    inner = [nn.ReLU(inplace=True), nn.MaxPool2d(2, 1), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3), nn.ELU(1.0, True)]
    model, (x, y) = nn.Sequential(nn.Conv2d(3, 16, 3), *inner), draw((9, 9))
    assert_equal(ClippedGradient(model, squared).sum(x, y, 2.0), *clipped_loop(model, squared, x, y, 2.0))


def test_a_convolution_used_twice_is_added_up_before_the_norm() -> None:
    layer = nn.Conv2d(16, 16, 3, padding=1)
    model, (x, y) = nn.Sequential(nn.Conv2d(3, 16, 3), layer, nn.Tanh(), layer), draw((9, 9))
    assert_equal(ClippedGradient(model, squared).sum(x, y, 2.0), *clipped_loop(model, squared, x, y, 2.0))


def test_an_image_changed_in_place_is_an_error() -> None:
    layer, (x, y) = nn.Conv2d(16, 16, 3), (torch.randn(BATCH, 16, 9, 9), draw((1, 1))[1])
    x = x.contiguous(memory_format=torch.channels_last)
    with Recorder(layer) as recorder:
        loss = squared(layer(x), y).sum()
        x.mul_(2)
        loss.backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="in place"):
            recorder.clipped_sum(1.0)


@pytest.mark.parametrize("shape", [(BATCH, 4, 9, 9), (BATCH, 3, 2, 9), (BATCH, 3, 1, 1)])
def test_an_image_of_the_wrong_shape_is_refused_as_by_torch(shape: tuple[int, ...]) -> None:
    layer = nn.Conv2d(3, 16, (4, 5), stride=1)
    for x in (torch.randn(shape), torch.randn(shape).requires_grad_()):
        with pytest.raises(RuntimeError), Recorder(layer, channels_last=True):
            layer(x)


def test_other_types_and_orders_are_clipped_too() -> None:
    model, (x, y) = nn.Sequential(nn.Conv2d(3, 16, 3), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3)).double(), draw((12, 17))
    got = ClippedGradient(model, squared).sum(x.double(), y.double(), 0.5)
    assert_equal(got, *clipped_loop(model, squared, x.double(), y.double(), 0.5))
    with Recorder(model.float(), channels_last=False) as recorder:
        squared(model(x), y).sum().backward()  # type: ignore[no-untyped-call]
        usual = recorder.clipped_sum(0.5)
    assert_equal(usual, *clipped_loop(model, squared, x, y, 0.5))


def test_without_the_loops_nothing_of_them_runs(monkeypatch: Any) -> None:
    off(monkeypatch)
    monkeypatch.setattr(small_convolutions, "_loops", lambda: pytest.fail("a kernel was asked for"))
    model, (x, y) = nn.Sequential(nn.Conv2d(3, 16, 3), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3)), draw((12, 17))
    assert_equal(ClippedGradient(model, squared).sum(x, y, 0.5), *clipped_loop(model, squared, x, y, 0.5))


def test_too_many_gradients_to_keep_are_not_kept(monkeypatch: Any) -> None:
    model, (x, y) = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)), draw((12, 17))
    kept = exact(ClippedGradient(model, squared).sum(x, y, 0.5))
    monkeypatch.setattr(small_convolutions, "ROOM", 50)
    monkeypatch.setattr("sordino.dpsgd.pieces.ROOM", 50)
    assert_equal(ClippedGradient(model, squared).sum(x, y, 0.5), *kept)


def test_norms_of_long_gradients_have_all_their_digits() -> None:
    """A sum in float32 alone would be off by more than the slack of the clip."""
    x, slopes = (
        torch.full((1, 64, 14, 14), 0.1).contiguous(memory_format=torch.channels_last),
        torch.full((1, 144, 64), 0.3),
    )
    layer = nn.Conv2d(64, 64, 3)
    made, found = torch.empty(1, 576, 64), torch.empty(1, dtype=torch.float64)
    small_convolutions._weight_gradients(x, slopes, small_convolutions.window_offsets(layer, x), made, found)
    assert float(found) == pytest.approx(float(made.double().square().sum()), rel=1e-6)


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = small_convolutions.max_pool(Any, nn.MaxPool2d(2), 0, x)  # type: ignore[arg-type]
    slope = torch.autograd.grad(F.softplus(y).sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiate"):
        slope.sum().backward()  # type: ignore[no-untyped-call]
