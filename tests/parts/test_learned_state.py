"""What a step learns from a release is public in the next round, for the step on the client too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests import tiny
from tests.tiny import plan, task

import sordino as so
from sordino.engines.messages import Frame
from sordino.errors import PlanError

SEEN: list[dict[str, float]] = []


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    SEEN.clear()
    yield
    so.parts.Step.members.pop("counting in a test", None)


def counting(name: str = "size") -> Any:
    @dataclass(frozen=True)
    class Counting(so.parts.Step, kind="counting in a test"):
        """x, and the largest entry of the noised mean, remembered."""

        def encode(self, rows: Any, public: so.parts.Public, slopes: Any = None) -> Any:
            SEEN.append(dict(public.state))
            return rows

        def decode(self, mean: Any, public: so.parts.Public) -> Any:
            return mean

        def bound(self, before: so.parts.Bound) -> so.parts.Bound:
            return before

        def decoded_noise_std(self, std: Any, public: so.parts.Public) -> Any:
            return std

        def learn(self, mean: Any, public: so.parts.Public) -> dict[str, float]:
            return {name: float(mean.abs().max())} if public.t == 0 else {}

    return Counting()


def test_what_a_step_learns_reaches_the_clients_of_later_rounds() -> None:
    wanted = plan(rounds=3, encode=(so.parts.Clip(1.0), counting()))
    done = tiny.rounds(wanted, task())
    learned = float(done[0].state.public_state["size"])
    assert learned > 0
    assert [one for one in SEEN if one] == [{"size": learned}] * (len(SEEN) * 2 // 3)
    assert not any(SEEN[: len(SEEN) // 3])
    assert wanted.public(3, 5, done[-1].state.public_state).state == {"size": learned}


def test_what_a_step_learned_is_in_the_message_to_a_remote_client() -> None:
    public = so.parts.Public(3, 1.0, 5, state={"size": 0.25})
    assert Frame.of_round(public, {}, {}).public(5).state == {"size": 0.25}
    for wrong in (None, {"size": "x"}, {"size": float("nan")}, {str(i): 0.0 for i in range(99)}):
        with pytest.raises(so.errors.SordinoError, match="finite numbers, by name"):
            Frame("round", {**Frame.of_round(public, {}, {}).fields, "state": wrong}, {}).public(5)


def test_two_steps_may_not_learn_the_same_name() -> None:
    wanted = plan(encode=(counting("clip_norm"), so.parts.Clip(so.parts.Adaptive(1.0))))
    with pytest.raises(PlanError, match="'clip_norm'"):
        tiny.rounds(wanted, task())
