"""Promise: bytes reach each silo by the node of its name, whatever dies between, and silence is no error."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sordino.errors import EngineError
from sordino.federation import flower_api as links
from sordino.federation.flower_api import FlowerTransport, flower, pack
from sordino.federation.local_federation import LocalFederation, free_port


@dataclass
class Grid:
    """A SuperLink's grid that does as a test says: `answer` makes the reply to the n-th message, or none."""

    answer: Any
    nodes: list[Any] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    def get_nodes(self) -> list[Any]:
        return self.nodes

    def push_messages(self, messages: list[Any]) -> list[str]:
        first = len(self.asked)
        self.asked += messages
        return [str(first + i) for i in range(len(messages))]

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        found = [(number, self.answer(self, int(number))) for number in numbers]
        return [reply(number, said) for number, said in found if said is not None]


def reply(number: str, said: bytes | int) -> Any:
    """Bytes, or an error of Flower's with this code."""
    made = SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=number), has_error=lambda: type(said) is int)
    if isinstance(said, bytes):
        made.content = pack(said)
    else:
        made.error = SimpleNamespace(code=said)
    return made


def node(name: str, number: int = 1, since: str = "monday") -> Any:
    return SimpleNamespace(node_id=number, name=name, public_key=b"", last_activated_at=since)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PULSE", 0.0)
    monkeypatch.setattr(links, "ONLINE_PULSE", 0.0)


pytestmark = pytest.mark.usefixtures("in_a_run")


def carried(grid: Grid, seconds: float = 600.0) -> dict[int, bytes]:
    return dict(FlowerTransport(grid, ("a", "b")).exchange({0: b"to a", 1: b"to b"}, time.time() + seconds))


def echo(grid: Grid, number: int) -> bytes:
    return b"re: " + bytes(grid.asked[number].content["sordino"]["bytes"].data)


def test_each_silo_is_asked_by_the_node_of_its_name_and_a_stranger_is_not() -> None:
    grid = Grid(echo, [node("b", 7), node("stranger", 8), node("a", 9)])
    assert carried(grid) == {0: b"re: to a", 1: b"re: to b"}
    assert [message.metadata.dst_node_id for message in grid.asked] == [9, 7]


def test_a_node_that_was_started_anew_is_asked_again_what_the_one_before_took_with_it() -> None:
    def answer(grid: Grid, number: int) -> bytes | None:
        grid.nodes[1] = node("b", 2, "tuesday")
        return echo(grid, number) if number != 1 else None

    grid = Grid(answer, [node("a", 1), node("b", 2)])
    assert carried(grid) == {0: b"re: to a", 1: b"re: to b"}
    assert [message.metadata.dst_node_id for message in grid.asked] == [1, 2, 2]


@pytest.mark.parametrize("code", [3, 4, 5, 8])
def test_what_flower_says_was_lost_is_asked_again(code: int) -> None:
    grid = Grid(lambda grid, n: code if n == 0 else echo(grid, n), [node("a"), node("b", 2)])
    assert carried(grid) == {0: b"re: to a", 1: b"re: to b"}
    assert len(grid.asked) == 3


def test_what_a_silo_refuses_is_not_asked_again() -> None:
    grid = Grid(lambda grid, n: 0 if n == 0 else echo(grid, n), [node("a"), node("b", 2)])
    assert carried(grid) == {1: b"re: to b"}
    assert len(grid.asked) == 2


def test_a_silo_that_is_not_there_is_waited_for_and_one_that_is_late_is_not_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])

    def answer(grid: Grid, number: int) -> bytes | None:
        clock[0] += 10
        return echo(grid, number) if number == 0 or clock[0] > 1200 else None

    grid = Grid(answer, [node("a"), node("b", 2)])
    assert dict(FlowerTransport(grid, ("a", "b")).exchange({0: b"to a", 1: b"to b"}, 1100.0)) == {0: b"re: to a"}
    assert all(message.metadata.ttl <= 100 for message in grid.asked)  # nor is it kept for the silo any longer


def test_two_nodes_under_one_name_are_one_sentence() -> None:
    with pytest.raises(EngineError, match="two nodes for the silo 'a'; needed one"):
        carried(Grid(echo, [node("a", 1), node("a", 2), node("b", 3)]))


def test_a_superlink_that_is_gone_is_one_sentence() -> None:
    def gone(grid: Grid, number: int) -> bytes:
        raise flower().HTTPError("connection refused")

    with pytest.raises(
        EngineError, match=r"does not answer \(connection refused\); fix: start the SuperLink, then continue"
    ):
        carried(Grid(gone, [node("a"), node("b", 2)]))


def test_to_hand_a_run_to_a_superlink_that_is_gone_is_one_sentence(federation: LocalFederation, tmp_path: Path) -> None:
    other = replace(federation, home=tmp_path, port=free_port(), running={}, log_start={}, nodes={})
    with pytest.raises(EngineError, match="Connection to the SuperLink is unavailable") as caught:
        other.submit(tmp_path / "runs" / "a")
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
