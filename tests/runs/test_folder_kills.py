"""A run that is killed at any step of its writing leaves no folder, or one that goes on bit for bit, charged whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.commands import contents, federation, lines
from tests.faults import How, Killed, dying

from sordino.config import Config, load_config
from sordino.runs.execution import Executed, execute
from sordino.runs.folder import RunFolder
from sordino.runs.writer import locked

SMALL = ("rounds = 4", "rounds = 3")
EVERY = 1 if os.environ.get("SORDINO_NIGHTLY") else 13  # of three ways to die at each step


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return load_config(federation(tmp_path_factory.mktemp("fed"), SMALL))


@pytest.fixture(scope="module")
def whole(config: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run that nobody killed, and how many steps it took."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    with dying() as system:
        execute(config, out)
    return out, system.done


def checked(done: Executed, whole: Path, charged_before: int) -> None:
    """The same model and history, certified, and whatever was charged is in the cost."""
    assert (done.path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert [line["loss"] for line in done.history] == [line["loss"] for line in lines(whole / "history.jsonl")]
    assert RunFolder.open(done.path).certify() == done.certificate
    counts = done.certificate["counts"]
    assert counts["rounds_charged"] == len(lines(done.path / "charges.jsonl")) >= max(3, charged_before)
    assert counts["rounds_accounted"] >= counts["rounds_charged"]
    assert not [name for name in contents(done.path) if name.endswith(".partial")]


def charges(out: Path) -> int:
    return (out / "charges.jsonl").read_bytes().count(b"\n") if out.exists() else 0


def test_a_kill_at_any_step_leaves_no_folder_or_one_that_goes_on(
    config: Config, whole: tuple[Path, int], tmp_path: Path
) -> None:
    reference, steps = whole
    assert steps > 100
    ways: list[tuple[int, How]] = [(at, how) for at in range(steps) for how in ("before", "half", "after")]
    for at, how in ways[::EVERY]:
        out = tmp_path / f"{at}-{how}"
        with pytest.raises(Killed), dying(at, how):
            execute(config, out)
        before = charges(out)
        checked(execute(config, out, resume=True), reference, before)
        assert not list(tmp_path.glob(".*.partial"))  # what was left beside it is gone too


def test_a_run_that_is_killed_again_and_again_while_it_is_mended_goes_on(
    config: Config, whole: tuple[Path, int], tmp_path: Path
) -> None:
    """Killed after 2 of 3 rounds; each later start is killed some steps further on, also in the mending itself."""
    out, before = tmp_path / "run", 0
    with pytest.raises(Killed), dying(whole[1] // 2, "half"):
        execute(config, out)
    for at in range(0, 60, 3):
        before = charges(out)
        try:
            with dying(at, "half" if at % 2 else "after"):
                execute(config, out, resume=True)
        except Killed:
            assert charges(out) >= before
    checked(execute(config, out, resume=True), whole[0], before)


def test_a_folder_that_is_being_built_is_left_alone(config: Config, tmp_path: Path) -> None:
    built, empty = tmp_path / ".a.0.partial", tmp_path / ".a.1.partial"
    (built / "checkpoint").mkdir(parents=True)
    empty.mkdir()  # a kill between two steps of another run
    with locked(built):
        execute(config, tmp_path / "a")
        assert built.is_dir()
        assert not empty.exists()
    execute(config, tmp_path / "b")
    assert built.is_dir()  # another run's
    shutil.rmtree(tmp_path / "a")
    execute(config, tmp_path / "a")
    assert not built.exists()
