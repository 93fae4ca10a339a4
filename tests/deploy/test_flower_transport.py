"""Promise: bytes reach each silo by the node of its name, whatever dies between, and silence is no error."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sordino.config import FederationSpec
from sordino.errors import EngineError
from sordino.federation import flower_api as links
from sordino.federation import keys
from sordino.federation.flower_api import FlowerTransport, Link, flower, pack
from sordino.federation.keys import Signer
from sordino.federation.local_federation import HERE, free_port


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
        EngineError, match=r"does not answer \(connection refused\); needed .*; fix: start the SuperLink, then continue"
    ):
        carried(Grid(gone, [node("a"), node("b", 2)]))


def test_to_start_a_run_at_a_superlink_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    certificates = keys.write_certificates(tmp_path)
    with pytest.raises(EngineError, match="does not answer") as caught:
        Link(f"{HERE}:{free_port()}", (certificates / "ca.crt").read_bytes(), b"").start_run()
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


# ---- pinned keys -----------------------------------------------------------------------------------------------------


def test_a_node_with_another_key_under_a_silos_name_is_sent_nothing() -> None:
    grid = Grid(echo, [node("a", 1), replaced(node("b", 2), b"borrowed"), replaced(node("b", 3), b"pinned")])
    transport = FlowerTransport(grid, ("a", "b"), {0: b"", 1: b"pinned"})
    assert dict(transport.exchange({0: b"to a", 1: b"to b"}, time.time() + 600)) == {0: b"re: to a", 1: b"re: to b"}
    assert [message.metadata.dst_node_id for message in grid.asked] == [1, 3]


def replaced(given: Any, key: bytes) -> Any:
    given.public_key = key
    return given


def signers(folder: Path, *names: str) -> tuple[Signer, ...]:
    """Each with its own key and the pinned keys of all."""
    for name in names:
        keys.write_node_key(folder / name)
    spec = FederationSpec(silos=names, keys={name: keys.public_text(folder / f"{name}.pub") for name in names})
    return tuple(keys.signer_of(spec, folder / name) for name in names)


@pytest.mark.parametrize("kind", ["unsigned", "by another silo", "to another request", "changed"])
def test_an_answer_that_the_pinned_key_did_not_sign_ends_the_run_in_one_sentence(kind: str, tmp_path: Path) -> None:
    a, b = signers(tmp_path, "a", "b")
    answers = {
        "unsigned": Signer().signed_answer(b"to b", b"row"),
        "by another silo": a.signed_answer(b"to b", b"row"),
        "to another request": b.signed_answer(b"to b, yesterday", b"row"),
        "changed": b.signed_answer(b"to b", b"row").replace(b"row", b"raw"),
    }

    def said(answer: bytes) -> dict[int, bytes]:
        grid = Grid(lambda grid, n: answer if n else a.signed_answer(b"to a", b"ok"), [node("a"), node("b", 2)])
        transport = FlowerTransport(grid, ("a", "b"), answer_of=a.answer_of)
        return dict(transport.exchange({0: b"to a", 1: b"to b"}, time.time() + 600))

    assert said(b.signed_answer(b"to b", b"row")) == {0: b"ok", 1: b"row"}
    with pytest.raises(EngineError, match=r"in the name of silo 'b' that is refused: .*did not sign"):
        said(answers[kind])


def test_the_log_names_the_silo_that_is_awaited_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = [1000.0], list[str]()
    monkeypatch.setattr(time, "time", lambda: clock[0])

    def answer(grid: Grid, number: int) -> bytes | None:
        clock[0] += 4
        return echo(grid, number) if number == 0 else None

    transport = FlowerTransport(Grid(answer, [node("a"), node("b", 2)]), ("a", "b", "c"), log=said.append)
    assert dict(transport.exchange({0: b"to a", 1: b"to b", 2: b"to c"}, 1100.0)) == {0: b"re: to a"}
    assert said == ["awaited since 00:16:40Z: b, c (not connected)"]
