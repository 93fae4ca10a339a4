"""What holds for any model: ties, frozen parts, ragged batches, masks, refusals, and a clip that is never exceeded."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.dpsgd.per_record.oracle import assert_equal, classes, clipped_loop, middle_clip_norm, size, squared
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from sordino.dpsgd import ClippedGradient, refuse_mixing
from sordino.errors import ConfigError, DataError, PlanError
from sordino.models import DpMnistCnn

BATCH = 6


class Tied(nn.Module):
    """One matrix embeds the words and scores them; called as a layer, or used from outside."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 5)
        self.score = nn.Linear(5, 7, bias=False)
        self.score.weight = self.embed.weight
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(self.embed(x))).mean(1)
        out: Tensor = F.linear(hidden, self.embed.weight) if self.outside else self.score(hidden)
        return out


class Positions(nn.Module):
    """A table of positions has no batch axis; a token is owned by the model itself."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(BATCH, 5), nn.Linear(5, 3)
        self.token = nn.Parameter(torch.randn(1, 1, 5)) if own else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(torch.arange(x.shape[1]))
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        out: Tensor = self.out(torch.tanh(x)).sum(1)
        return out


class Branch(nn.Module):
    """Python that looks at the values: vmap cannot run it, a loop over records can. Finite records are kept apart."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if bool(x.detach().isfinite().all()) else torch.zeros_like(x)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.out(x)
        return hidden - hidden.mean(0)


def agrees(model: nn.Module, x: Tensor, y: Tensor) -> ClippedGradient:
    clip_norm = middle_clip_norm(clipped_loop(model, squared, x, y, 1.0)[1])
    engine = ClippedGradient(model, squared)
    for _ in range(2):
        assert_equal(engine.sum(x, y, clip_norm), *clipped_loop(model, squared, x, y, clip_norm))
    return engine


def dense() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rows(count: int = BATCH, width: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(count, width), torch.linspace(-1, 1, count)


@pytest.mark.parametrize("outside", [False, True])
def test_tied_parameters_are_added_before_the_norm(outside: bool) -> None:
    torch.manual_seed(0)
    assert agrees(Tied(outside), torch.randint(7, (BATCH, 4)), rows()[1]).whole is outside


def test_a_layer_used_twice_is_added_before_the_norm() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    agrees(nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer), *rows())


@pytest.mark.parametrize("own", [False, True])
def test_a_layer_without_records_runs_the_model_whole(own: bool) -> None:
    torch.manual_seed(0)
    agrees(Positions(own), torch.randn(BATCH, 4, 5), rows()[1])
    agrees(Positions(own), torch.randn(BATCH, BATCH, 5), rows()[1])  # as many positions as records


class Flattened(nn.Module):
    """Positions folded into the batch: record by record, or position by position (`time_first`)."""

    def __init__(self, time_first: bool) -> None:
        super().__init__()
        self.out, self.time_first = nn.Linear(4, 3), time_first

    def forward(self, x: Tensor) -> Tensor:
        if self.time_first:
            folded: Tensor = self.out(x.transpose(0, 1).reshape(-1, 4)).view(x.shape[1], len(x), 3)
            return folded.sum(0)
        out: Tensor = self.out(x.reshape(-1, 4)).view(len(x), -1, 3).sum(1)
        return out


@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.parametrize("length", [3, BATCH])
def test_positions_folded_into_the_batch_are_told_apart(time_first: bool, length: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, length, 4), rows()[1]
    assert agrees(Flattened(time_first), x, y).whole is time_first


def test_what_vmap_cannot_run_goes_record_by_record() -> None:
    agrees(nn.Sequential(nn.Linear(4, 4), Branch()), *rows())


def test_frozen_parameters_are_left_out_and_may_thaw() -> None:
    model, (x, y) = dense(), rows()
    engine = ClippedGradient(model, squared)
    model[0].weight.requires_grad_(False)
    got = engine.sum(x, y, 0.5)
    assert_equal(got, *clipped_loop(model, squared, x, y, 0.5))
    assert "0.weight" not in got.total
    model[0].weight.requires_grad_(True)
    assert_equal(engine.sum(x, y, 0.5), *clipped_loop(model, squared, x, y, 0.5))


def test_an_unused_parameter_has_a_zero_total() -> None:
    model, (x, y) = dense(), rows()
    model.spare = nn.Linear(2, 2)
    model.forward = lambda v: model[2](torch.tanh(model[0](v)))  # type: ignore[method-assign]
    assert not ClippedGradient(model, squared).sum(x, y, 0.5).total["spare.weight"].any()


def test_ragged_batches_add_up() -> None:
    model, (x, y) = dense(), rows()
    engine = ClippedGradient(model, squared)
    parts = [engine.sum(x[a:b], y[a:b], 0.5) for a, b in ((0, 0), (0, 1), (1, 4), (4, 6))]
    whole = engine.sum(x, y, 0.5)
    for name, total in whole.total.items():
        torch.testing.assert_close(sum(part.total[name] for part in parts), total)
    assert torch.cat([part.norms for part in parts]).tolist() == pytest.approx(whole.norms.tolist())
    assert torch.cat([part.losses for part in parts]).tolist() == pytest.approx(whole.losses.tolist())


@pytest.mark.parametrize("layer", [nn.Linear(4, 2), nn.LSTM(4, 2, batch_first=True), nn.PReLU()])
def test_an_empty_batch_gives_zeros(layer: nn.Module) -> None:
    got = ClippedGradient(layer, squared).sum(torch.zeros(0, 3, 4), torch.zeros(0), 1.0)
    assert len(got.norms) == 0
    assert all(not total.any() for total in got.total.values())


def test_double_precision_is_kept() -> None:
    model, (x, y) = dense().double(), rows()
    got = ClippedGradient(model, squared).sum(x.double(), y.double(), 0.5)
    assert all(total.dtype == torch.float64 for total in got.total.values())
    assert_equal(got, *clipped_loop(model, squared, x.double(), y.double(), 0.5))


def test_masked_records_contribute_nothing_even_if_they_are_not_finite() -> None:
    model, (x, y) = dense(), rows()
    mask = torch.tensor([True, False, True, True, False, False])
    expected = ClippedGradient(model, squared).sum(x[mask], y[mask], 0.5)
    x[1] = math.nan
    got = ClippedGradient(model, squared).sum(x, y, 0.5, mask=mask)
    for name, total in expected.total.items():
        torch.testing.assert_close(got.total[name], total)
    assert got.norms[~mask].tolist() == [0.0] * 3
    assert not ClippedGradient(model, squared).sum(x, y, 0.5, mask=mask & False).total["0.bias"].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_record_that_is_not_finite_counts_as_zero(bad: float) -> None:
    torch.manual_seed(0)
    model = DpMnistCnn().build((1, 28, 28), 10)
    x, y = torch.randn(BATCH, 1, 28, 28), torch.arange(BATCH)
    x[2] = bad
    good = [0, 1, 3, 4, 5]
    engine = ClippedGradient(model, classes)
    got, expected = engine.sum(x, y, 0.5), ClippedGradient(model, classes).sum(x[good], y[good], 0.5)
    assert not got.norms[2].isfinite()
    for name, total in expected.total.items():
        torch.testing.assert_close(got.total[name], total)


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e6, 1e12, 1e18])
@pytest.mark.parametrize("clip_norm", [1e-12, 1e-3, 1.0, 1e4])
def test_the_clipped_norm_never_exceeds_the_radius(scale: float, clip_norm: float) -> None:
    model, (x, y) = dense(), rows(8)
    engine = ClippedGradient(model, lambda out, target: squared(out, target) * scale)
    for j in range(8):
        got = engine.sum(x[j : j + 1] * 10.0 ** (j - 4), y[j : j + 1], clip_norm)
        assert size(got.total) <= clip_norm
        if got.norms[0] > clip_norm and got.norms[0].isfinite():
            assert size(got.total) >= clip_norm * (1 - 3e-5)


def test_cancelling_time_steps_cannot_hide_a_gradient() -> None:
    torch.manual_seed(0)
    layer, half = nn.Linear(60, 60), torch.randn(1, 1, 60)
    x = torch.cat([half + 1e-4 * torch.randn(1, 1, 60) for _ in range(4)], 1)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0])[None, :, None]
    engine = ClippedGradient(layer, lambda out, y: (out * sign * 1e3).flatten(1).sum(1))
    got = engine.sum(x, torch.zeros(1), 0.1)
    rough = (x * sign * 1e3).double().sum(1).square().sum() * 60
    assert float(got.norms[0]) == pytest.approx(float(rough.sqrt()), rel=1e-3)
    assert size(got.total) <= 0.1 * (1 + 1e-6)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(8), nn.BatchNorm2d(8), nn.SyncBatchNorm(8), nn.InstanceNorm2d(8, track_running_stats=True)]
)
def test_layers_that_mix_records_are_refused_by_name(layer: nn.Module) -> None:
    model = nn.Sequential()
    model.add_module("stem", nn.Sequential(nn.Conv2d(3, 8, 3), layer))
    with pytest.raises(PlanError, match=r"'stem\.1'.*GroupNorm"):
        refuse_mixing(model)
    with pytest.raises(PlanError):
        ClippedGradient(model, squared)
    refuse_mixing(nn.Sequential(nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(2, 8), nn.Dropout(0.5)))


def test_a_model_that_mixes_records_itself_is_refused() -> None:
    with pytest.raises(PlanError, match="depends on the other records"):
        ClippedGradient(Mixing(), squared).sum(*rows(), 1.0)
    with pytest.raises(PlanError, match="depends on the other records"):
        ClippedGradient(dense(), lambda out, y: squared(out - out.mean(0), y)).sum(*rows(), 1.0)


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(F.relu(self.first(x)))
        out: Tensor = self.out(hidden.view(len(x), -1))
        return out


def test_a_model_that_views_its_images_keeps_their_order() -> None:
    torch.manual_seed(0)
    model, x, y = Viewed(), torch.randn(BATCH, 3, 8, 8), rows()[1]
    agrees(model, x, y)


def test_dropout_is_the_same_in_both_passes() -> None:
    """With one output per record and all coins seen in the loss, the gradient of the last bias is the residual."""
    model, (x, y) = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.PReLU(), nn.Linear(50, 1)), rows(64)
    got = ClippedGradient(model, squared).sum(x, y, 1e9)
    again = ClippedGradient(model, squared).sum(x, y, 1e9)
    assert not torch.equal(got.losses, again.losses)
    assert len({round(float(v), 5) for v in got.losses}) > 60


def test_the_model_is_left_as_it_was() -> None:
    model, (x, y) = dense(), rows()
    before = copy.deepcopy(model.state_dict())
    ClippedGradient(model, squared).sum(x, y, 1.0)
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(parameter.grad is None and not parameter._backward_hooks for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), before)


def test_a_forward_of_the_users_own_comes_back() -> None:
    model, (x, y) = dense(), rows()
    own = model.forward = lambda v: model[2](model[0](v))  # type: ignore[method-assign]
    engine = ClippedGradient(model, squared)
    engine.restart(whole=True)
    got = engine.sum(x, y, 0.5)
    assert model.forward is own
    assert_equal(got, *clipped_loop(model, squared, x, y, 0.5))


def test_an_input_changed_in_place_is_an_error() -> None:
    model, (x, y) = dense(), rows()

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        x.mul_(2)
        return squared(outputs, targets)

    with pytest.raises(RuntimeError, match="in place"):
        ClippedGradient(model, losses, proved=True).sum(x, y, 1.0)


def test_bad_input_is_said_in_one_sentence() -> None:
    model, (x, y) = dense(), rows()
    with pytest.raises(DataError, match="one value per record"):
        ClippedGradient(model, lambda out, target: squared(out, target).mean()).sum(x, y, 1.0)
    with pytest.raises(ConfigError, match="clip_norm"):
        ClippedGradient(model, squared).sum(x, y, 0.0)
