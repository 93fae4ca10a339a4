"""Promises of clip="per_layer" and of clip norms by group: each group in its ball, a record in the ball of the bill."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.dpsgd.loops import QUIET, Parts, backward, batch_of, data, mlp, noised_gradient, private, train, weights
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from sordino.dpsgd import make_private
from sordino.dpsgd.account import certify
from sordino.dpsgd.settings import Settings
from sordino.errors import ConfigError, EngineError, PlanError
from sordino.ledger.ledger import Ledger
from sordino.ledger.totals import Limit
from sordino.loop import check_needs
from sordino.parts.clipping import SLACK
from sordino.parts.encoding import Clip, ClipNorms
from sordino.parts.record_samplers import PoissonRecords
from sordino.recipes import dp_sgd

C = 0.3


class Tied(nn.Module):
    """Words in and words out by one table, which two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle, self.out = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.tanh(self.middle(self.words(x)).mean(1)))
        return scores


class Attention(nn.Module):
    """A layer with parameters of its own and a layer inside it, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4), None
        self.scores = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.norm(self.attention(x, x, x, need_weights=False)[0]).mean(1))
        return scores


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))


def frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    return model


def words() -> TensorDataset:
    coins = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(9, (60, 5), generator=coins), torch.randint(9, (60,), generator=coins))


# a net, its records, and the parameters of each layer
NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], TensorDataset], list[list[str]]]] = {
    "mlp": (mlp, data, [["0.weight", "0.bias"], ["2.weight", "2.bias"]]),
    "frozen weights": (frozen, data, [["0.bias"], ["2.weight", "2.bias"]]),
    "convolution": (
        convolution,
        lambda: data(shape=(1, 6, 6)),
        [["0.weight", "0.bias"], ["1.weight", "1.bias"], ["4.weight", "4.bias"]],
    ),
    "attention": (
        Attention,
        lambda: data(shape=(5, 4)),
        [
            ["attention.in_proj_weight", "attention.in_proj_bias"],
            ["attention.out_proj.weight", "attention.out_proj.bias"],
            ["norm.weight", "norm.bias"],
            ["scores.weight", "scores.bias"],
        ],
    ),
    "a shared table": (Tied, words, [["words.weight"], ["middle.weight", "middle.bias"], ["out.bias"]]),
}


def net(name: str) -> nn.Module:
    torch.manual_seed(3)
    return NETS[name][0]()


def by_hand(model: nn.Module, x: Tensor, y: Tensor, groups: list[tuple[float, list[str]]]) -> dict[str, Tensor]:
    """sum_j of g_j, each group of parameters scaled by min(1, C_l / ||g_jl||): one record at a time, by autograd."""
    own = copy.deepcopy(model)
    named = {name: p for name, p in own.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
    for j in range(len(x)):
        found = torch.autograd.grad(F.cross_entropy(own(x[j : j + 1]), y[j : j + 1]), list(named.values()))
        slopes = {name: slope.double() for name, slope in zip(named, found, strict=True)}
        if not all(bool(slope.isfinite().all()) for slope in slopes.values()):
            continue
        for clip_norm, names in groups:
            norm = math.sqrt(sum(float(slopes[name].square().sum()) for name in names))
            for name in names:
                total[name] += slopes[name] * min(1.0, clip_norm * (1 - SLACK) / norm) if norm else 0.0
    return total


def released_sum(parts: Parts) -> dict[str, Tensor]:
    """The sum of the first step of a loop without noise, as the inner optimizer got it."""
    parts[1].margin = 0.0  # of rounding, which the sum by hand lacks
    x, y = next(iter(parts[2]))
    backward(parts, x, y)
    parts[1].step()
    count = parts[1].account.settings.records.count
    return {name: p.grad * count for name, p in parts[0].named_parameters() if p.grad is not None}


def compare(parts: Parts, dataset: TensorDataset, groups: list[tuple[float, list[str]]]) -> None:
    rows = batch_of(parts, 0)
    x, y = dataset.tensors
    wanted = by_hand(parts[0], x[rows], y[rows], groups)
    found = released_sum(parts)
    assert sorted(found) == sorted(wanted)
    for name, part in wanted.items():
        torch.testing.assert_close(found[name].double(), part, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NETS)
def test_each_layer_is_clipped_by_itself_as_autograd_does_it_record_by_record(name: str) -> None:
    dataset, layers = NETS[name][1](), NETS[name][2]
    parts = private(net(name), dataset, clip="per_layer", clip_norm=C, noise_multiplier=QUIET)
    compare(parts, dataset, [(C / math.sqrt(len(layers)), layer) for layer in layers])


@pytest.mark.parametrize(
    ("name", "clip_norm", "groups"),
    [
        ("mlp", {"0": 0.1, "2.weight": 0.2, "2.bias": 0.05}, [(0.1, 0), (0.2, ["2.weight"]), (0.05, ["2.bias"])]),
        ("mlp", {"": 0.1, "2": 0.2}, [(0.1, 0), (0.2, 1)]),
        ("attention", {"attention": 0.1, "norm": 0.2, "scores": 0.3}, [(0.1, (0, 1)), (0.2, 2), (0.3, 3)]),
        ("frozen weights", {"0": 0.02, "2": 0.2}, [(0.02, 0), (0.2, 1)]),
        ("a shared table", {"middle": 0.1, "out": 0.2}, [(0.1, 1), (0.2, (0, 2))]),  # the table by its second name
        ("a shared table", {"words": 0.1, "out": 0.2, "middle": 1.0}, [(0.1, 0), (0.2, 2), (1.0, 1)]),
    ],
)
def test_groups_that_the_user_names_are_clipped_to_their_own_norms(
    name: str, clip_norm: dict[str, float], groups: list[tuple[float, Any]]
) -> None:
    dataset, layers = NETS[name][1](), NETS[name][2]

    def parameters(which: Any) -> list[str]:
        if isinstance(which, list):
            return which
        return [one for k in (which if isinstance(which, tuple) else (which,)) for one in layers[k]]

    parts = private(net(name), dataset, clip_norm=clip_norm, noise_multiplier=QUIET)
    compare(parts, dataset, [(own, parameters(which)) for own, which in groups])
    assert parts[1].clip_norm == pytest.approx(math.hypot(*clip_norm.values()))


@pytest.mark.parametrize("settings", [{"clip": "per_layer"}, {"clip": "per_layer", "max_physical_batch_size": 5}])
def test_noise_is_scaled_by_the_root_of_the_sum_of_squares(settings: dict[str, Any]) -> None:
    """A run with noise is the run by hand: sums by layer, and noise of z C for the C of all layers together."""
    dataset, twin = data(), mlp()
    parts = private(mlp(), dataset, clip_norm=C, **settings)
    by_own, (x, y), layers = torch.optim.SGD(twin.parameters(), lr=0.1), dataset.tensors, NETS["mlp"][2]
    for t in range(5):
        rows = batch_of(parts, t)
        total = by_hand(twin, x[rows], y[rows], [(C / math.sqrt(2), layer) for layer in layers])
        for name, slope in noised_gradient(parts, t, total).items():
            twin.get_parameter(name).grad = slope.float()
        by_own.step()
    train(parts)
    torch.testing.assert_close(weights(parts[0]), weights(twin), rtol=0, atol=1e-5)


def moved(clip_norm: Any) -> float:
    """How far one record moves the message before the noise, in units of the sensitivity that is charged."""
    x, y = torch.full((40, 4), 50.0), torch.zeros(40, dtype=torch.int64)
    model = mlp()
    model[0].weight.data.mul_(0.01)  # type: ignore[index]  # tanh does not saturate
    parts = private(model, TensorDataset(x, y), batch=40, clip="per_layer", clip_norm=clip_norm, noise_multiplier=QUIET)
    total = released_sum(parts)
    assert len(batch_of(parts, 0)) == 40
    return (
        float(torch.cat([part.flatten() for part in total.values()]).norm()) / 40 / parts[1].account.settings.clip_norm
    )


def test_one_record_moves_the_message_by_what_is_charged_and_no_more() -> None:
    assert 0.999 < moved(C) <= 1.0
    assert 0.999 < moved({"0": 0.1, "2": 0.7}) <= 1.0


def test_layers_that_are_each_clipped_to_the_whole_norm_are_caught() -> None:
    """The sabotage: every layer clipped to C, which is charged as C, where the sensitivity is C sqrt(L)."""

    def whole(settings: Settings, named: Mapping[str, Any]) -> list[tuple[float, tuple[str, ...]]]:
        return [(1.0, tuple(layer)) for layer in NETS["mlp"][2]]

    with patch.object(Settings, "clip_shares", whole):
        assert moved(C) == pytest.approx(math.sqrt(2), rel=1e-3)


class Overflowing(nn.Module):
    """A net whose gradient of a huge record is infinite in the first layer, and finite in the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
        self.first.weight.data.fill_(1e-30)
        self.last.weight.data.copy_(torch.tensor([[1e4], [-1e4]]))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.first(x))
        return scores


def test_a_record_that_is_not_finite_in_one_layer_counts_as_zero_in_all() -> None:
    x, y = torch.full((40, 1), 2.0), torch.zeros(40, dtype=torch.int64)
    x[7], y[7] = 3e38, 1
    model = Overflowing()
    slopes = torch.autograd.grad(F.cross_entropy(model(x[7:8]), y[7:8]), list(model.parameters()))
    assert [bool(slope.isfinite().all()) for slope in slopes] == [False, True]
    dataset = TensorDataset(x, y)
    parts = private(model, dataset, batch=40, clip="per_layer", clip_norm=C, noise_multiplier=QUIET)
    assert 7 in batch_of(parts, 0)
    compare(parts, dataset, [(C / math.sqrt(2), ["first.weight"]), (C / math.sqrt(2), ["last.weight"])])
    assert parts[1].not_finite == 1


def test_a_clip_per_layer_costs_what_one_clip_costs_and_the_certificate_names_the_norms(tmp_path: Path) -> None:
    flat, layered = private(clip_norm=C), private(clip="per_layer", clip_norm=C)
    named = private(clip_norm={"0": 0.3, "2": 0.4})
    for parts in (flat, layered, named):
        train(parts)
    certificates = [parts[1].certificate() for parts in (flat, layered, named)]
    assert len({one["epsilon"] for one in certificates}) == 1
    assert len({one["plan_sha256"] for one in certificates}) == 3
    assert certificates[0]["clip"] == {
        "scope": "one norm over the gradient of each single record", "clip_norm": C, "norm": 2,
    }  # fmt: skip
    each = f"{C / math.sqrt(2):.6g}"
    assert (
        f"'0' {each}, '2' {each}; of all together at most 0.3, by which the noise" in certificates[1]["clip"]["scope"]
    )
    assert "'0' 0.3, '2' 0.4; of all together at most 0.5" in certificates[2]["clip"]["scope"]
    assert certificates[2]["clip"]["clip_norm"] == {
        "kind": "clip_norms", "names": ["0", "2"], "clip_norms": [0.3, 0.4],
    }  # fmt: skip
    named[1].save_certificate(tmp_path / "certificate.json")
    assert certify(tmp_path / "certificate.json").certificate == certificates[2]
    text = (tmp_path / "certificate.json").read_text()
    (tmp_path / "certificate.json").write_text(text.replace("at most 0.5", "at most 0.4"))
    with pytest.raises(Exception, match="certificate"):
        certify(tmp_path / "certificate.json")


def test_a_clip_per_layer_runs_with_secure_noise_on_a_ledger_and_from_a_checkpoint(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ours.ledger", create=True) as ledger:
        ledger.limit("ours", Limit(20.0, 0.02, "record", "add_remove"))
    settings: dict[str, Any] = {"clip": "per_layer", "clip_norm": C, "epochs": 2, "epsilon": 3.0}
    whole, first, second = (private(**settings) for _ in range(3))
    train(whole, epochs=2)
    train(first)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    train(second)
    torch.testing.assert_close(weights(second[0]), weights(whole[0]), rtol=0, atol=1e-6)
    assert second[1].get_epsilon() <= 3.0
    with pytest.raises(ConfigError, match="clip_norm"):
        private(**{**settings, "clip": "flat"})[1].load_state_dict(first[1].state_dict())
    paid = private(**settings, noise="secure", ledger=tmp_path / "ours.ledger", named="ours")
    train(paid, epochs=2)
    assert paid[1].certificate()["ledger"]["epsilon"] <= 3.0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a parameter that no group names": ({"clip_norm": {"0": 1.0}}, "parameter '2.weight', which no group"),
    "a group without parameters": ({"clip_norm": {"": 1.0, "9": 1.0}}, "'9', which has no trained parameter"),
    "a clip norm of zero": ({"clip_norm": {"0": 0.0, "2": 1.0}}, r"clip_norm\['0'\] = 0.0"),
    "a clip norm that is a text": ({"clip_norm": {"0": "1", "2": 1.0}}, r"clip_norm\['0'\] = '1'"),
    "a way to clip that is none": ({"clip": "per_tensor"}, "clip = 'per_tensor'"),
    "no clip norm at all": ({"clip": "per_layer", "clip_norm": -1.0}, "clip_norm = -1.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_clip_norms_that_bound_nothing_are_refused_in_one_sentence(name: str) -> None:
    settings, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        private(**settings)


def test_a_refused_clip_norm_leaves_the_model_as_it_was() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)  # type: ignore[index]
    with pytest.raises(ConfigError, match="'0', which has no trained parameter"):
        make_private(
            model, optimizer, DataLoader(data(), batch_size=12), epochs=1, epsilon=1.0, clip_norm={"0": 1.0, "2": 1.0}
        )
    assert all(p.requires_grad for p in model.parameters())


def test_parameters_that_the_optimizer_does_not_hold_are_in_no_layer() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)  # type: ignore[index]
    loader = DataLoader(data(), batch_size=12)
    _, private_optimizer, _ = make_private(
        model, optimizer, loader, epochs=1, epsilon=1.0, clip="per_layer", clip_norm=C
    )
    assert private_optimizer.account.settings.plan.local.clip_norms == (ClipNorms(("2",), (C,)),)


def test_no_engine_takes_a_clip_per_layer_for_one_clip() -> None:
    from sordino.engines.inprocess import InProcess

    norms = ClipNorms(("0", "2"), (0.3, 0.4))
    plan = dp_sgd(rounds=2, records=PoissonRecords(8.0, (40,)), clip_norm=norms, noise_multiplier=1.0, lr=0.1)
    with pytest.raises(EngineError, match="a loop of PyTorch"):
        check_needs(plan, False, InProcess())
    with pytest.raises(PlanError, match="per layer of a client's message"):
        Clip(norms)
