"""Promises of smoothing: it is the dense solve of I + strength * L, tensor by tensor, and it changes no mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.tiny import noise
from torch import Tensor, nn

from sordino.errors import PlanError
from sordino.layout import Layout
from sordino.parts.encoding import LaplacianSmoothing, Noised, smooth_cycle

LENGTHS = (1, 2, 3, 5, 64, 1000)
STRENGTHS = (1e-9, 1e-6, 1e-3, 0.1, 1.0, 3.0, 100.0, 1e4)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}


def dense(d: int, strength: float) -> Tensor:
    """I + strength * L, L the graph Laplacian of a cycle: 2 on the diagonal, -1 at both neighbours."""
    shift = np.roll(np.eye(d), 1, axis=0)
    return torch.from_numpy(np.eye(d) + strength * (2 * np.eye(d) - shift - shift.T))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("d", LENGTHS)
def test_smoothing_is_the_dense_solve(d: int, strength: float, dtype: torch.dtype) -> None:
    signal = noise(d, seed=d).to(dtype)
    wanted = torch.linalg.solve(dense(d, strength), signal.double())
    smooth = smooth_cycle(signal, strength)
    assert smooth.dtype == dtype
    assert torch.allclose(smooth.double(), wanted, rtol=0.0, atol=TOLERANCE[dtype] * float(signal.abs().max()))


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("d", LENGTHS)
def test_smoothing_keeps_the_mean_and_never_grows_the_norm(d: int, strength: float) -> None:
    signal = noise(d, seed=1).double() + 1
    smooth = smooth_cycle(signal, strength)
    assert float(smooth.mean()) == pytest.approx(float(signal.mean()), rel=1e-9)
    assert float(smooth.norm()) <= float(signal.norm()) * (1 + 1e-9)


@pytest.mark.parametrize("strength", [1e-3, 1.0, 1e4])
def test_smoothing_is_linear_and_can_be_undone(strength: float) -> None:
    a, b = noise(64, seed=2).double(), noise(64, seed=3).double()
    both = smooth_cycle(2 * a - 3 * b, strength)
    assert torch.allclose(both, 2 * smooth_cycle(a, strength) - 3 * smooth_cycle(b, strength), atol=1e-9)
    assert torch.allclose(dense(64, strength) @ smooth_cycle(a, strength), a, atol=1e-8)


def test_smoothing_leaves_its_input_as_it_was() -> None:
    signal = noise(64)
    smooth_cycle(signal, 1.0)
    assert torch.equal(signal, noise(64))


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def _noised(model: nn.Module) -> Noised:
    return Noised(Layout.of(model), std=1.0, t=0)


def test_each_tensor_is_smoothed_by_itself_and_buffers_are_left_alone() -> None:
    known = _noised(_model())
    mean = noise(known.layout.size)
    smooth = LaplacianSmoothing(2.0).apply(mean, known)
    trained = [slot for slot in known.layout.slots if slot.trainable]
    assert len(trained) == 4
    for slot in trained:
        part = slice(slot.start, slot.stop)
        assert torch.allclose(smooth[part], smooth_cycle(mean[part], 2.0))
    assert torch.equal(smooth[known.layout.trainable :], mean[known.layout.trainable :])
    assert known.layout.trainable < known.layout.size


def test_one_tensor_never_bleeds_into_the_next() -> None:
    known = _noised(_model())
    mean = torch.zeros(known.layout.size)
    first, second = known.layout.slots[:2]
    mean[first.start : first.stop] = 1.0
    smooth = LaplacianSmoothing(50.0).apply(mean, known)
    assert torch.allclose(smooth[first.start : first.stop], torch.ones(first.stop))
    assert torch.equal(smooth[second.start :], torch.zeros(known.layout.size - second.start))


def test_strength_zero_is_the_identity() -> None:
    known = _noised(_model())
    mean = noise(known.layout.size)
    assert torch.equal(LaplacianSmoothing(0.0).apply(mean, known), mean)


@pytest.mark.parametrize("strength", [-1.0, math.nan, math.inf])
def test_a_strength_that_is_not_a_finite_number_from_zero_up_is_refused(strength: float) -> None:
    with pytest.raises(PlanError, match="strength"):
        LaplacianSmoothing(strength)
