"""Promises of a clip norm that adapts in a loop: the bit is inside the ball, the quantile is found, the cost stays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.dpsgd.loops import QUIET, Parts, backward, batch_of, clipped_sum, data, mlp, private, train, weights
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from sordino.dpsgd.account import certify
from sordino.dpsgd.settings import NoiseState
from sordino.errors import ConfigError, EngineError, PlanError
from sordino.loop import check_needs
from sordino.parts.encoding import RAMP, Adaptive
from sordino.parts.record_samplers import PoissonRecords
from sordino.parts.samplers import Everyone
from sordino.parts.strategies import Banded
from sordino.recipes import dp_sgd, noisy_local_sgd

START = 0.5


def norms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The norms of the records' gradients, one at a time."""
    found = [
        torch.autograd.grad(F.cross_entropy(model(x[j : j + 1]), y[j : j + 1]), list(model.parameters()))
        for j in range(len(x))
    ]
    return torch.tensor([math.sqrt(sum(float(part.double().square().sum()) for part in one)) for one in found])


def message(parts: Parts) -> Tensor:
    """The sum of messages of one step before its noise."""
    seen: list[Tensor] = []
    noised = NoiseState.noised

    def look(state: NoiseState, total: Tensor, *others: Any) -> Tensor:
        seen.append(total.clone())
        return noised(state, total, *others)

    with patch.object(NoiseState, "noised", look):
        x, y = next(iter(parts[2]))
        backward(parts, x, y)
        parts[1].step()
    return seen[0]


def test_a_step_releases_the_clipped_sum_and_the_count_and_the_clip_norm_follows_the_count() -> None:
    dataset = data()
    start = 0.98 * float(norms(mlp(), *dataset.tensors).median())
    adaptive = Adaptive(start, quantile=0.3, rate=0.4, share=0.2)
    parts = private(mlp(), dataset, clip_norm=adaptive, noise_multiplier=QUIET)
    rows = batch_of(parts, 0)
    x, y = dataset.tensors[0][rows], dataset.tensors[1][rows]
    sizes, wanted = norms(mlp(), x, y), clipped_sum(mlp(), x, y, start)
    bits = ((1 - sizes / start) / RAMP).clamp(-1, 1)
    assert 0 < int((bits.abs() < 1).sum()) < len(bits)
    found = message(parts)
    flat = torch.cat([part.flatten() for part in wanted.values()]) * math.sqrt(1 - 0.2**2) / start
    torch.testing.assert_close(found[:-1], flat, rtol=0, atol=2e-4)  # the clip aims 1e-5 inside
    assert float(found[-1]) == pytest.approx(0.2 * float(bits.sum()), rel=1e-4)
    fraction = (float(bits.sum()) / 12 + 1) / 2
    assert parts[1].clip_norm == pytest.approx(start * math.exp(-0.4 * (fraction - 0.3)), rel=1e-4)
    slope = torch.cat([p.grad.flatten() for p in parts[0].parameters() if p.grad is not None])
    torch.testing.assert_close(
        slope.double() * 12, torch.cat([w.flatten() for w in wanted.values()]), rtol=0, atol=2e-4
    )


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_clip_norm_finds_its_quantile(quantile: float) -> None:
    dataset, model = data(200), mlp()
    wanted = torch.quantile(norms(model, *dataset.tensors), quantile)
    parts = private(
        model, dataset, lambda p, lr: torch.optim.SGD(p, lr=1e-9), 50, epochs=60, noise_multiplier=0.5,
        clip_norm=Adaptive(10.0, quantile=quantile, rate=0.1),
    )  # fmt: skip
    train(parts, epochs=60)
    assert parts[1].clip_norm == pytest.approx(float(wanted), rel=0.15)


def moved(share: float) -> float:
    """How far one record whose gradient is clipped moves the message."""
    x, y = torch.full((40, 4), 50.0), torch.zeros(40, dtype=torch.int64)
    model = mlp()
    model[0].weight.data.mul_(0.01)  # type: ignore[index]
    parts = private(model, TensorDataset(x, y), batch=40, clip_norm=Adaptive(0.1, share=share), noise_multiplier=QUIET)
    return float(message(parts).norm()) / 40


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_one_record_moves_gradient_and_count_together_by_at_most_one(share: float) -> None:
    assert 0.999 < moved(share) <= 1.0
    with patch.object(Adaptive, "update_norm", 1.0):  # the sabotage: a count beside a gradient of norm 1
        assert moved(share) > 1.004


def test_rounding_of_a_norm_turns_no_bit() -> None:
    """In a batch with one record more every norm is rounded otherwise: that must not move counts of all the others."""
    adaptive = Adaptive(START)
    sizes = torch.linspace(0.5 * START, 1.5 * START, 20_001, dtype=torch.float64)
    change = adaptive.bits(sizes * (1 + 1e-7), START) - adaptive.bits(sizes, START)
    assert float(change.abs().max()) <= 1.1e-7 / RAMP * 1.1
    assert float(adaptive.share * change.abs().max()) < adaptive.rounding * 1.2e-7
    hard = torch.where(sizes * (1 + 1e-7) <= START, 1.0, -1.0) - torch.where(sizes <= START, 1.0, -1.0)
    assert float(hard.abs().max()) == 2.0
    one, other = private(clip_norm=START), private(clip_norm=adaptive)
    assert other[1].margin == pytest.approx(one[1].margin * adaptive.rounding)


def test_a_record_that_is_not_finite_counts_neither_as_inside_nor_as_outside() -> None:
    found = Adaptive(START).bits(torch.tensor([0.1, math.inf, math.nan, 9.0], dtype=torch.float64), START)
    assert found.tolist() == [1.0, 0.0, 0.0, -1.0]


def test_an_adaptive_clip_costs_what_a_fixed_clip_costs_and_the_certificate_says_so(tmp_path: Path) -> None:
    fixed, adaptive = private(clip_norm=START), private(clip_norm=Adaptive(START))
    train(fixed)
    train(adaptive)
    one, other = fixed[1].certificate(), adaptive[1].certificate()
    assert (one["epsilon"], one["adversaries"][0]["events"]) == (other["epsilon"], other["adversaries"][0]["events"])
    assert "the clip norm follows a quantile" in other["clip"]["scope"]
    assert other["clip"]["clip_norm"]["kind"] == "adaptive"
    assert adaptive[1].save_certificate(tmp_path / "one.json") == certify(tmp_path / "one.json").certificate


def test_noise_is_scaled_by_the_clip_norm_of_its_step() -> None:
    """Without records' gradients, what a step releases is noise of z C_t / (sqrt(1 - share^2) batch)."""
    torch.manual_seed(0)
    wide = nn.Linear(4000, 5)
    dataset = TensorDataset(torch.zeros(60, 4000), torch.zeros(60, dtype=torch.int64))
    parts = private(wide, dataset, epochs=3, clip_norm=Adaptive(START, quantile=0.9, rate=1.0), noise_multiplier=2.0)
    scales = []
    for x, y in parts[2]:
        before = parts[1].clip_norm
        backward(parts, x, y)
        parts[1].step()
        std = 2.0 * before / (math.sqrt(1 - 0.1**2) * 12)
        assert float(wide.weight.grad.std()) == pytest.approx(std, rel=0.03)  # type: ignore[union-attr]
        scales.append(before)
    assert max(scales) > 1.5 * min(scales)


@pytest.mark.parametrize("settings", [{}, {"smoothing": 1.0}, {"max_physical_batch_size": 5}, {"epsilon": 3.0}])
def test_a_checkpoint_holds_the_clip_norm_of_the_next_step(settings: dict[str, Any]) -> None:
    own = {"clip_norm": Adaptive(START), "epochs": 2, **settings}
    whole, first, second = private(**own), private(**own), private(**own)
    train(whole, epochs=2)
    train(first)
    state = first[1].state_dict()
    assert state["sordino"]["clip_norm"] == first[1].clip_norm != START
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(state)
    assert second[1].clip_norm == first[1].clip_norm
    train(second)
    torch.testing.assert_close(weights(second[0]), weights(whole[0]), rtol=0, atol=1e-6)
    assert second[1].clip_norm == pytest.approx(whole[1].clip_norm)


def test_a_checkpoint_without_its_clip_norm_is_refused() -> None:
    from sordino.dpsgd.settings import checksum

    parts = private(clip_norm=Adaptive(START))
    train(parts)
    state = parts[1].state_dict()
    for changed in (None, 1e9, "0.5", math.nan):
        table = {name: item for name, item in state["sordino"].items() if name not in ("checksum", "clip_norm")}
        table |= {} if changed is None else {"clip_norm": changed}
        forged = {**state, "sordino": {**table, "checksum": checksum(table)}}
        with pytest.raises(ConfigError, match="clip norm"):
            private(clip_norm=Adaptive(START))[1].load_state_dict(forged)
    with pytest.raises(ConfigError, match="clip_norm"):
        private(clip_norm=START)[1].load_state_dict(state)


def test_secure_noise_reads_the_count_off_the_public_grid() -> None:
    parts = private(clip_norm=Adaptive(START), noise="secure")
    train(parts)
    assert parts[1].steps == 5
    assert parts[1].clip_norm != START


def test_what_would_not_be_charged_right_is_refused() -> None:
    with pytest.raises(ConfigError, match="remove the strategy"):
        private(clip_norm=Adaptive(START), strategy=Banded(2))
    with pytest.raises(ConfigError, match="Adaptive"):
        private(clip_norm=Adaptive(START), clip="per_layer")
    with pytest.raises(PlanError, match="an adaptive one"):
        noisy_local_sgd(
            rounds=2, clients=Everyone(1), records=PoissonRecords(8.0, (40,)), clip_norm=Adaptive(START),
            noise_multiplier=1.0, lr=0.1, steps=2,
        )  # fmt: skip


def test_no_engine_runs_an_adaptive_clip_of_records() -> None:
    from sordino.engines.inprocess import InProcess

    plan = dp_sgd(rounds=2, records=PoissonRecords(8.0, (40,)), clip_norm=Adaptive(1.0), noise_multiplier=1.0, lr=0.1)
    with pytest.raises(EngineError, match="a loop of PyTorch"):
        check_needs(plan, False, InProcess())
