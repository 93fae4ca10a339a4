"""Promise: a checkpoint of a loop is believed as it was saved or refused in one sentence; no step is forgotten."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dpsgd.loops import Parts, private, train

from sordino.errors import ConfigError
from sordino.parts.strategies import Banded

State = dict[str, Any]
Where = tuple[Any, ...]


def test_a_count_set_to_zero_is_refused() -> None:
    """On 45ab98c: 20 steps + 20 steps were accounted as 20, epsilon 1.757 for 2.513."""
    first, second = private(epochs=4), private(epochs=4)
    train(first, epochs=4)
    state = first[1].state_dict()
    edits: list[Any] = [0, -20, -(10**6), {}]
    for edited in edits:
        for name in state["sordino"]["taken"]:
            kept = copy.deepcopy(state)
            kept["sordino"]["taken"] = edited if edited == {} else {**kept["sordino"]["taken"], name: edited}
            with pytest.raises(ConfigError, match="record of charged steps"):
                second[1].load_state_dict(kept)
    second[1].load_state_dict(state)
    assert second[1].steps == 20
    train(second, epochs=4)
    assert second[1].certificate()["counts"]["rounds_accounted"] == 40


@pytest.mark.parametrize("edit", ["zero", "dropped", "negative", "rolled back"])
def test_in_one_process_no_checkpoint_makes_the_bill_smaller(edit: str) -> None:
    """Also with a checksum that was computed anew: the process knows what it has charged for the run."""
    from sordino.dpsgd.settings import checksum

    first, second = private(epochs=4), private(epochs=4)
    train(first, epochs=2)
    early = copy.deepcopy(first[1].state_dict())
    train(first, epochs=2)
    state = early if edit == "rolled back" else copy.deepcopy(first[1].state_dict())
    record = state["sordino"]
    record["taken"] = {
        "zero": dict.fromkeys(record["taken"], 0),
        "negative": dict.fromkeys(record["taken"], -20),
        "dropped": {},
    }.get(edit, record["taken"])
    record["checksum"] = checksum(record)
    if edit == "negative":
        with pytest.raises(ConfigError, match="no count of steps"):
            second[1].load_state_dict(state)
        return
    second[1].load_state_dict(state)
    assert second[1].steps == 20
    train(second, epochs=4)
    assert second[1].certificate()["counts"]["rounds_accounted"] == 40


# ---- every leaf, changed in every way -------------------------------------------------------------------------------


class Stranger:
    """A type that no checkpoint holds."""


def leaves(table: Any, where: Where = ()) -> Iterator[Where]:
    """The path to every value of a record, tables and lists among them."""
    yield where
    inner = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for name, item in inner:
        yield from leaves(item, (*where, name))


WRONG: dict[str, Callable[[Any], Any]] = {
    "None": lambda _: None,
    "NaN": lambda _: math.nan,
    "infinity": lambda _: math.inf,
    "negative": lambda _: -1,
    "very negative": lambda _: -(10**6),
    "zero": lambda _: 0,
    "one more": lambda was: was + 1 if type(was) in (int, float) else 1,
    "huge": lambda _: 10**400,
    "true": lambda _: True,
    "text": lambda _: "20",
    "surrogate": lambda _: "\ud800",
    "bytes": lambda _: b"20",
    "list": lambda _: [20],
    "table": lambda _: {"kind": "none"},
    "numbered table": lambda _: {1: 2},
    "deep": lambda _: nested(2000),
    "tensor": lambda _: torch.tensor([1.0, 2.0]),
    "complex": lambda _: 1j,
    "object": lambda _: Stranger(),
}


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def mutated(state: State, where: Where, change: Callable[[Any], Any] | None) -> State:
    """The state with one value changed, or dropped."""
    if not where:
        return {} if change is None else change(state)
    kept = dict(state)
    inner: Any = kept
    for name in where[:-1]:
        inner[name] = copy.copy(inner[name])
        inner = inner[name]
    if change is None:
        del inner[where[-1]]
    else:
        inner[where[-1]] = change(inner[where[-1]])
    return kept


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, list | dict) and repr(one) == repr(other)


def value_at(state: Any, where: Where) -> Any:
    for name in where:
        state = state[name]
    return state


def with_new_checksum(state: State) -> State | None:
    """As an attacker writes it; None where no checksum can be computed."""
    from sordino.dpsgd.settings import checksum

    try:
        return {**state, "sordino": {**state["sordino"], "checksum": checksum(state["sordino"])}}
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return None


def changed(state: State) -> Iterator[State]:
    """The state with one leaf of its record changed in one way."""
    for where in [("sordino", *inner) for inner in leaves(state["sordino"])]:
        value = value_at(state, where)
        for change in [None, *WRONG.values()]:
            if change is None or not same(change(value), value):
                yield mutated(state, where, change)


def refusal(parts: Parts, state: State) -> str:
    """The one sentence by which a state is refused; empty: it was loaded."""
    try:
        parts[1].load_state_dict(state)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", [None, Banded(5)])
def test_every_changed_leaf_of_the_record_gives_one_sentence(strategy: Banded | None) -> None:
    """On 45ab98c 56 of 629 such changes raised a raw error, and counts of 0, -20 and -10**6 were loaded."""
    settings: dict[str, Any] = {} if strategy is None else {"strategy": strategy, "epochs": 2}
    first, second = private(**settings), private(**settings)
    train(first)
    said = [refusal(second, bad) for bad in changed(first[1].state_dict())]
    assert len(said) > 500
    assert all(text and "\n" not in text and len(text) < 2000 for text in said)
    assert second[1].steps == 0
    second[1].load_state_dict(first[1].state_dict())  # and the record as it was is taken


def test_changes_with_a_new_checksum_raise_one_sentence_or_lower_nothing() -> None:
    first, second = private(), private()
    train(first)
    tries = [bad for bad in map(with_new_checksum, changed(first[1].state_dict())) if bad is not None]
    assert len(tries) > 200
    for bad in tries:
        before = second[1].steps
        refusal(second, bad)
        assert second[1].steps >= before
    assert second[1].steps >= 5


@pytest.mark.parametrize("state", [None, [], "sordino", {}, {"sordino": None}, {"sordino": 3}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ConfigError, match="record of charged steps"):
        private()[1].load_state_dict(state)


@pytest.mark.parametrize("spoil", [{"param_groups": []}, {"param_groups": None}, {"state": None}, {"param_groups": 3}])
def test_a_state_that_the_inner_optimizer_does_not_take_is_one_sentence(spoil: State) -> None:
    first, second = private(), private()
    train(first)
    with pytest.raises(ConfigError, match="does not accept"):
        second[1].load_state_dict({**first[1].state_dict(), **spoil})
    assert second[1].steps == 0


OTHER_PROCESS = """
import sys, torch
from tests.dpsgd.loops import private, train
parts = private(epochs=4)
state = torch.load(sys.argv[1], weights_only=True)
parts[1].load_state_dict(state)
train(parts, epochs=2)
print(parts[1].steps, parts[1].certificate()["counts"]["rounds_accounted"])
"""


def test_another_process_goes_on_from_a_file(tmp_path: Path) -> None:
    first = private(epochs=4)
    train(first, epochs=2)
    torch.save(first[1].state_dict(), tmp_path / "state.pt")
    asked = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "state.pt")]
    found = subprocess.run(asked, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert found.stdout.split() == ["20", "20"], found.stderr
