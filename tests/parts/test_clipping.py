"""Promises of the one clip: whatever the norm, what it scales is in the ball; machine code has the same rule."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from sordino import kernels
from sordino.parts.clipping import FEW_DIGITS, SLACK, factors, pull, scaled
from sordino.parts.encoding import Clip, Public

RADII = (1e-30, 1e-5, 0.7, 1.0, 3.0, 1e5, 1e30)
NEAR = [1.0 - 2 * SLACK, 1.0 - SLACK, 1.0 - SLACK / 2, 1.0 - 2**-24, 1.0, 1.0 + 2**-24, 1.0 + SLACK, 2.0]
ODD = [0.0, 5e-324, 1e-45, 1.2e-38, 1e-30, 1e-12, 1 / 3, 1.0, 7.0, 1e15, 1e30, 3.4e38, 1e60, 1.7e308]
BAD = [math.inf, math.nan]


def table(clip_norm: float) -> list[float]:
    return [*ODD, *(share * clip_norm for share in NEAR)]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip_norm", RADII)
def test_every_norm_is_scaled_into_the_ball_in_exact_arithmetic(clip_norm: float, kind: torch.dtype) -> None:
    norms = torch.tensor(table(clip_norm), dtype=kind)
    scale = factors(norms, clip_norm)
    for norm, factor in zip(norms.tolist(), scale.float().tolist(), strict=True):  # as the product reads it
        assert factor == 0 or FEW_DIGITS * 0.99 <= factor <= 1
        if math.isfinite(norm):
            assert Fraction(norm) * Fraction(factor) <= Fraction(clip_norm)
            close = factor == pytest.approx(min(1.0, clip_norm / max(norm, 1e-320)), rel=2 * SLACK)
            assert close or clip_norm / norm < 1.01 * FEW_DIGITS


def test_without_the_slack_some_norm_leaves_the_ball() -> None:
    """The sabotage that the test above must catch: 1 / norm is rounded up as often as down."""
    norms = [1 + i / 97 for i in range(97)]
    naive = [float((1 / torch.tensor(norm, dtype=torch.float64)).float()) for norm in norms]
    assert any(Fraction(norm) * Fraction(factor) > 1 for norm, factor in zip(norms, naive, strict=True))


@pytest.mark.parametrize("unit", [False, True])
def test_what_is_masked_or_not_finite_has_no_weight(unit: bool) -> None:
    norms = torch.tensor([0.5, 2.0, 0.0, *BAD], dtype=torch.float64)
    for kind in (torch.bool, torch.float32):
        mask = torch.tensor([1, 0, 1, 1, 1]).to(kind)
        assert factors(norms, 2.0, mask, unit).tolist() == [0.5 if unit else 1.0, 0, 0.5 if unit else 1.0, 0, 0]
    assert factors(norms, math.inf).tolist() == [1, 1, 1, 0, 0]


def test_a_row_of_no_weight_is_zero_whatever_stands_in_it() -> None:
    rows = torch.tensor([[math.inf, 1.0], [math.nan, 0.0], [3e38, 1.0], [1e-36, 0.0]])
    pulled = pull(rows, torch.tensor([0.0, 0.0, 0.5, 1.0]))
    assert torch.equal(pulled, torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.5e38, 0.5], [0.0, 0.0]]))


@pytest.mark.parametrize("clip_norm", RADII)
def test_a_clients_clip_is_the_same_rule_over_the_radius(clip_norm: float) -> None:
    rows = torch.tensor(table(clip_norm), dtype=torch.float32).nan_to_num(posinf=3e38)[:, None]
    wanted = factors(rows[:, 0].double(), clip_norm) * rows[:, 0].double() / clip_norm
    encoded = Clip(clip_norm).encode(rows, Public(0, clip_norm))[:, 0].double()
    told = wanted > 0  # a client's own factor may be smaller than a record's: it is applied in float64
    assert torch.allclose(encoded[told], wanted[told], rtol=1e-6, atol=1e-37)
    assert float(encoded.max()) <= 1


def test_a_factor_beyond_float32_is_applied_in_float64() -> None:
    found = scaled(torch.tensor([[3.4e38], [1e-20]]), torch.tensor([1e-42, 1e35], dtype=torch.float64))
    assert torch.allclose(found, torch.tensor([[3.4e-4], [1e15]]), rtol=1e-6)


@pytest.mark.skipif(not kernels.AVAILABLE, reason="needs numba")
@pytest.mark.parametrize("clip_norm", RADII)
def test_machine_code_has_the_same_rule(clip_norm: float) -> None:
    from sordino_papers.grid_kernel import factor

    norms = [*table(clip_norm), *BAD]
    wanted: Tensor = factors(torch.tensor(norms, dtype=torch.float64), clip_norm).float()
    found = [float(factor(norm, clip_norm * (1 - SLACK), FEW_DIGITS)) for norm in norms]
    assert found == pytest.approx(wanted.tolist(), rel=2**-23, abs=0.0)
