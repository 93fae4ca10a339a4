"""Promises of Clip: every encoded message is in the unit ball, whatever the row, and decode undoes it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import noise, plan
from torch import Tensor

from sordino.accounting.bounds import Bound, Norm
from sordino.errors import PlanError
from sordino.parts.clipping import SLACK
from sordino.parts.encoding import Clip, Public
from sordino.parts.schedules import Constant, Decay, Linear, Piecewise

NORMS: tuple[Norm, ...] = (1, 2)
LARGE = 11_000_000
ODD = (0.0, 1e-45, -1e-45, 1e-40, 1e-38, 1e-23, 1e-19, 1e-12, 1.0, -1.0, 1e15, 1e19, 3e38, -3e38)
entries = st.one_of(st.sampled_from(ODD), st.floats(width=32, allow_nan=False, allow_infinity=False))
clip_norms = st.floats(-30, 30).map(lambda exponent: 10.0**exponent)


def exact(row: Tensor, norm: Norm) -> float:
    """The norm of a float32 row: every product in float64, summed without error."""
    values = row.double().tolist()
    return math.sqrt(math.fsum(v * v for v in values)) if norm == 2 else math.fsum(abs(v) for v in values)


def exact_large(row: Tensor, norm: Norm) -> float:
    """The same for millions of entries: float64, pairwise, wrong by less than 1e-12."""
    values = row.double().numpy()
    return float(np.sqrt(np.square(values).sum())) if norm == 2 else float(np.abs(values).sum())


@st.composite
def adversarial_rows(draw: st.DrawFn) -> Tensor:
    m, d = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    return torch.tensor(draw(st.lists(st.lists(entries, min_size=d, max_size=d), min_size=m, max_size=m)))


@pytest.mark.parametrize("norm", NORMS)
@given(rows=adversarial_rows(), clip_norm=clip_norms)
@settings(max_examples=300, deadline=None)
def test_every_encoded_message_is_inside_the_unit_ball(norm: Norm, rows: Tensor, clip_norm: float) -> None:
    encoded = Clip(clip_norm, norm=norm).encode(rows, Public(0, clip_norm))
    assert encoded.dtype == torch.float32
    assert bool(encoded.isfinite().all())
    assert max(exact(row, norm) for row in encoded) <= 1.0


@pytest.mark.parametrize("norm", NORMS)
@given(row=st.lists(entries, min_size=1, max_size=24), clip_norm=st.floats(-6, 6).map(lambda e: 10.0**e))
@settings(max_examples=300, deadline=None)
def test_a_clipped_message_keeps_its_direction_and_lies_on_the_sphere(
    norm: Norm, row: list[float], clip_norm: float
) -> None:
    rows = torch.tensor([row])
    size = exact(rows[0] / max(1e-45, float(rows.abs().max())), norm) * float(rows.abs().max())
    encoded = Clip(clip_norm, norm=norm).encode(rows, Public(0, clip_norm))[0]
    if size > clip_norm:
        assert exact(encoded, norm) == pytest.approx(1.0, abs=2e-5)
        assert torch.allclose(encoded.double(), rows[0].double() / size, rtol=3e-5, atol=1e-37)


def _normal() -> Tensor:
    return noise(LARGE)


def _one_spike() -> Tensor:
    """1 and eleven million entries whose squares a float32 sum forgets."""
    row = torch.full((LARGE,), 1e-4)
    row[0] = 1.0
    return row


def _spiky_blocks() -> Tensor:
    """A 1 at the head of every block of 4096, and entries whose powers are just below half its last digit."""
    row = torch.full((LARGE,), 0.9999 * 2.0**-12)
    row[::4096] = 1.0
    return row


@pytest.mark.parametrize("make", [_normal, _one_spike, _spiky_blocks])
def test_eleven_million_entries_are_inside_the_unit_ball(make: Callable[[], Tensor]) -> None:
    row = make()
    for norm in NORMS:
        encoded = Clip(0.5, norm=norm).encode(row[None], Public(0, 0.5))[0]
        assert 1 - 2 * SLACK <= exact_large(encoded, norm) <= 1.0


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("d", [1000, 300_000])
def test_long_rows_of_the_largest_numbers_are_scaled_without_losing_digits(norm: Norm, d: int) -> None:
    """The factor, 1e-42 or so, is below what float32 can hold exactly."""
    encoded = Clip(1.0, norm=norm).encode(torch.full((1, d), 3.4e38), Public(0, 1.0))[0]
    assert 1 - 2 * SLACK <= exact_large(encoded, norm) <= 1.0


def test_a_plain_float32_norm_leaves_the_ball_at_eleven_million_entries() -> None:
    row = _one_spike()
    naive = row / torch.linalg.vector_norm(row)
    assert exact_large(naive, 2) > 1 + 100 * SLACK  # the sabotage that the test above must catch


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, math.inf])
def test_a_row_that_is_not_finite_becomes_zero_and_its_neighbours_stay(
    norm: Norm, bad: float, clip_norm: float
) -> None:
    rows = torch.tensor([[0.5e-3, 0.0, 0.2e-3], [1.0, bad, 2.0], [0.1e-3, 0.1e-3, 0.0]])
    alone = Clip(clip_norm, norm=norm).encode(rows[[0, 2]], Public(0, clip_norm))
    encoded = Clip(clip_norm, norm=norm).encode(rows, Public(0, clip_norm))
    assert torch.equal(encoded[1], torch.zeros(3))
    assert torch.equal(encoded[[0, 2]], alone)


@pytest.mark.parametrize("norm", NORMS)
def test_a_zero_row_stays_zero_at_every_radius(norm: Norm) -> None:
    for clip_norm in (1e-30, 1e-5, 1.0, 1e30, math.inf):
        assert torch.equal(
            Clip(clip_norm, norm=norm).encode(torch.zeros(2, 5), Public(0, clip_norm)), torch.zeros(2, 5)
        )


@pytest.mark.parametrize("norm", NORMS)
def test_an_infinite_radius_leaves_rows_alone_and_bounds_nothing(norm: Norm) -> None:
    rows, clip = noise(3, 10) * 1e20, Clip(math.inf, norm=norm)
    assert torch.equal(clip.encode(rows, Public(0)), rows)
    assert torch.equal(clip.decode(rows[0], Public(0)), rows[0])
    assert not clip.bound(Bound("client")).finite


@pytest.mark.parametrize("norm", NORMS)
@given(exponent=st.floats(-25, 25), share=st.floats(1e-3, 1 - 2 * SLACK), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_decode_undoes_encode_inside_the_ball(norm: Norm, exponent: float, share: float, seed: int) -> None:
    clip_norm, direction = 10.0**exponent, noise(8, seed=seed).double()
    row = (direction * (share * clip_norm / exact(direction, norm))).to(torch.float32)
    clip = Clip(clip_norm, norm=norm)
    back = clip.decode(clip.encode(row[None], Public(0, clip_norm))[0], Public(0, clip_norm))
    assert torch.allclose(back, row, rtol=3e-7, atol=1e-37)


def test_the_radius_of_a_round_follows_its_schedule() -> None:
    clip, row = Clip(Decay(4.0, 0.5)), torch.tensor([[0.3, 0.4]])
    whole = plan(encode=(clip,))
    for t, clip_norm in enumerate((4.0, 2.0, 1.0)):
        public = whole.public(t)
        assert public.clip_norm == clip_norm
        assert torch.allclose(clip.encode(row, public), row / clip_norm)
        assert torch.allclose(clip.decode(row[0], public), row[0] * clip_norm)


def test_clip_is_the_step_that_makes_a_bound_finite() -> None:
    assert Clip(2.0).bound(Bound("client")) == Bound("client", norm=2, finite=True)
    assert Clip(2.0, norm=1).bound(Bound("client")) == Bound("client", norm=1, finite=True)
    assert Clip(Decay(1.0, 0.9)).bound(Bound("client")).finite


def test_clip_of_a_message_bounds_no_record() -> None:
    with pytest.raises(PlanError, match="record bound"):
        Clip(1.0).bound(Bound("record"))


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, -math.inf, math.nan])
def test_a_radius_that_is_not_positive_is_refused(clip_norm: float) -> None:
    with pytest.raises(PlanError, match="clip norm"):
        Clip(clip_norm)


@pytest.mark.parametrize(
    "clip_norm",
    [Constant(-1.0), Linear(1.0, -1.0, 2), Decay(-1.0, 0.5), Decay(1.0, 1e200), Piecewise(1.0, 0.0, (1,))],
)
def test_a_schedule_that_leaves_the_positive_numbers_is_refused_before_the_run(clip_norm: Constant) -> None:
    """A negative clip norm would turn the clip off: encode([3, 4000]) with clip norm -1 is [-3, -4000]."""
    with pytest.raises(PlanError, match="clip norm"):
        plan(rounds=3, encode=(Clip(clip_norm),))
