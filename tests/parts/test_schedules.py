"""Promises of the schedules: public numbers, fixed before the run."""

from __future__ import annotations

import pytest

from sordino.errors import PlanError
from sordino.parts.schedules import Constant, Decay, Linear, Piecewise, Schedule, at


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Constant(0.3), [0.3, 0.3, 0.3, 0.3, 0.3]),
        (Decay(2.0, 0.5), [2.0, 1.0, 0.5, 0.25, 0.125]),
        (Decay(1.0, 2.0), [1.0, 2.0, 4.0, 8.0, 16.0]),
        (Linear(1.0, 0.0, 4), [1.0, 0.75, 0.5, 0.25, 0.0]),
        (Linear(1.0, 3.0, 2), [1.0, 2.0, 3.0, 3.0, 3.0]),  # stays at its end
        (Piecewise(1.0, 0.1, (1, 3)), [1.0, 0.1, 0.1, 0.01, 0.01]),
        (Piecewise(5.0, 0.1, ()), [5.0, 5.0, 5.0, 5.0, 5.0]),
    ],
    ids=str,
)
def test_a_schedule_follows_its_equation(schedule: Schedule, values: list[float]) -> None:
    assert [schedule.at(t) for t in range(5)] == pytest.approx(values)
    assert [at(schedule, t) for t in range(5)] == pytest.approx(values)


def test_a_plain_number_is_constant_and_a_float() -> None:
    assert [at(0.25, t) for t in (0, 1, 1000)] == [0.25, 0.25, 0.25]
    assert isinstance(at(1, 0), float)


@pytest.mark.parametrize("factor", [0.0, -0.5, float("nan")])
def test_a_decay_that_is_no_decay_is_refused(factor: float) -> None:
    with pytest.raises(PlanError, match="factor"):
        Decay(1.0, factor)


@pytest.mark.parametrize("rounds", [0, -3])
def test_a_line_over_no_round_is_refused(rounds: int) -> None:
    with pytest.raises(PlanError, match="linear"):
        Linear(1.0, 0.0, rounds)
