"""Promises of the norms a clip rests on: right to a millionth at every size and scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import noise
from torch import Tensor

from sordino.accounting.bounds import Norm
from sordino.parts.clipping import BLOCK, SLACK, row_norms

NORMS: tuple[Norm, ...] = (1, 2)
SCALES = (1e-45, 1e-42, 1e-30, 1e-23, 1e-18, 1e-13, 1e-11, 1.0, 1e13, 1e16, 1e19, 1e25, 1e37)


def exact(row: Tensor, norm: Norm) -> float:
    largest = float(row.abs().max())
    if not largest:
        return 0.0
    shares = (row.double() / largest).tolist()
    total = math.fsum(v * v for v in shares) if norm == 2 else math.fsum(abs(v) for v in shares)
    return largest * (math.sqrt(total) if norm == 2 else total)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("d", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_norms_are_right_at_every_scale_and_length(norm: Norm, scale: float, d: int) -> None:
    rows = noise(2, d) * scale
    wanted = torch.tensor([exact(row, norm) for row in rows], dtype=torch.float64)
    assert row_norms(rows, norm).dtype == torch.float64
    assert torch.allclose(row_norms(rows, norm), wanted, rtol=SLACK / 3, atol=0.0)


@pytest.mark.parametrize("norm", NORMS)
@given(
    small=st.floats(-44, 30),
    large=st.floats(-44, 38),
    place=st.integers(0, 2 * BLOCK),
    length=st.integers(1, 2 * BLOCK),
)
@settings(max_examples=100, deadline=None)
def test_one_entry_among_others_of_another_scale_is_never_lost(
    norm: Norm, small: float, large: float, place: int, length: int
) -> None:
    row = torch.full((length,), 10.0**small)
    row[place % length] = 10.0**large
    assert float(row_norms(row[None], norm)[0]) == pytest.approx(exact(row, norm), rel=SLACK / 3)


@pytest.mark.parametrize("norm", NORMS)
def test_ordinary_rows_do_not_feel_their_odd_neighbours(norm: Norm) -> None:
    rows = noise(4, 100)
    rows[1], rows[3] = 1e38, 1e-45
    assert torch.equal(row_norms(rows, norm)[[0, 2]], row_norms(rows[[0, 2]], norm))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, BLOCK + 3])
def test_a_bad_entry_anywhere_makes_the_norm_not_finite(norm: Norm, bad: float, place: int) -> None:
    rows = noise(2, BLOCK + 4)
    rows[1, place] = bad
    assert row_norms(rows, norm).isfinite().tolist() == [True, False]


@pytest.mark.parametrize("norm", NORMS)
def test_rows_of_zeros_and_rows_without_entries_have_norm_zero(norm: Norm) -> None:
    assert row_norms(torch.zeros(2, 9), norm).tolist() == [0.0, 0.0]
    assert row_norms(torch.zeros(2, 0), norm).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("norm", NORMS)
def test_half_of_a_row_that_overflows_float32_is_still_measured(norm: Norm) -> None:
    row = torch.full((1, 1000), 3e38)
    assert float(row_norms(row, norm)[0]) == pytest.approx(float(row[0, 0]) * 1000 ** (1 / norm), rel=1e-12)
