"""Promises of the distributed engine: the result of one process, noise that is added once, the same certificate."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.commands import contents, federation, lines, sordino
from tests.engines.cases import CASES, SABOTAGE, SECURE
from tests.pages import blocks
from tests.tiny import plan, task

import sordino as so
from sordino.engines.distributed import Distributed
from sordino.engines.inprocess import InProcess
from sordino.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]
Found = dict[str, Any]


def page_command() -> str:
    """How docs/distributed.md starts two ranks on one machine."""
    commands = [command for block in blocks(ROOT / "docs" / "distributed.md") for command, _ in block.commands]
    return next(command for command in commands if "--standalone" in command and "-m sordino" in command)


def torchrun(folder: Path) -> None:
    """Two ranks, once started anew, play every case, then the page's `sordino run` of a file; nobody is left behind."""
    federation(folder)
    first, *words = page_command().replace("runs/two", "two").split()
    assert first == "torchrun"
    place = words.index("-m")
    words[place : place + 2] = [str(ROOT / "tests" / "engines" / "as_rank.py"), str(folder / "found.pt")]
    words = ["--max-restarts", "1", *words, "--json"]
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        ranks = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        assert ranks.wait(timeout=600) == 0, (folder / "err").read_text()
    finally:
        if ranks.poll() is None:
            os.killpg(ranks.pid, signal.SIGKILL)
            ranks.wait()


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the ranks left their results; made once, also where pytest itself has several workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            torchrun(folder)
            (folder / "done").touch()
    return folder


@pytest.fixture(scope="session")
def found(played: Path) -> Found:
    read: Found = torch.load(played / "found.pt", weights_only=False)
    return read


def same(one: Found, other: Found) -> bool:
    return bool(torch.allclose(one["params"], other["params"], rtol=0.0, atol=1e-5))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_and_one_process_give_one_result(name: str, found: Found) -> None:
    alone, two = CASES[name].play(CASES[name].each), found["honest"][name]
    assert float((alone["params"] - alone["start"]).norm()) > 1e-3
    assert same(alone, two)


@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_of_the_whole_cohort_and_the_whole_test_set(name: str, found: Found) -> None:
    alone, two = CASES[name].play(CASES[name].each)["figures"], found["honest"][name]["figures"]
    assert [list(line) for line in two] == [list(line) for line in alone]
    for line, wanted in zip(two, alone, strict=True):
        assert line == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", SABOTAGE)
def test_noise_added_by_every_rank_or_lost_by_one_is_noticed(name: str, found: Found) -> None:
    alone = CASES[name].play(CASES[name].each)
    assert same(alone, found["honest"][name])
    assert not same(alone, found["sabotaged"][name])


def spread(played: Found) -> float:
    """The standard deviation of the noise in the sum of four clients."""
    return float((played["params"] - played["start"]).std()) * 4


@pytest.mark.parametrize("name", SECURE)
def test_secure_noise_of_two_ranks_is_the_noise_that_was_billed(name: str, found: Found) -> None:
    assert spread(found["secure"][name]) == pytest.approx(SECURE[name][1], rel=0.1)


@pytest.mark.parametrize("name", SABOTAGE)
def test_secure_noise_that_is_not_what_was_billed_is_noticed(name: str, found: Found) -> None:
    wrong = {"central noise": math.sqrt(3), "noise of the solver's own": math.sqrt(0.5)}[name]
    assert spread(found["sabotaged, secure"][name]) == pytest.approx(SECURE[name][1] * wrong, rel=0.1)


def test_secure_runs_never_repeat(found: Found) -> None:
    case, _ = SECURE["central noise"]
    assert not same(case.play(case.each), found["secure"]["central noise"])


def test_the_header_names_engine_workers_and_path(found: Found) -> None:
    wanted = {"engine": "distributed", "workers": 2, "backend": "gloo", "path": "batched", "threads": 1}
    assert found["header"].items() >= wanted.items()


def test_the_script_of_the_page_ends_on_rank_0_with_a_certificate(found: Found) -> None:
    assert found["page"]["rounds"] == 5
    assert found["page"]["epsilon"] > 0


def test_ranks_that_do_not_hold_the_same_are_refused(found: Found) -> None:
    assert "on rank 1" in found["refusal"]
    assert "seed" in found["refusal"]


def test_the_command_under_torchrun_writes_the_folder_of_one_process(played: Path, tmp_path: Path) -> None:
    file, alone, two = played / "fed.toml", tmp_path / "alone", played / "two"
    assert sordino("run", file, "--out", alone).code == 0
    assert set(contents(alone)) == set(contents(two))
    charged = [[{**line, "before": ""} for line in lines(folder / "charges.jsonl")] for folder in (alone, two)]
    assert charged[0] == charged[1]  # but for the chain, which begins at each run's own header
    one, other = (load_file(folder / "model.safetensors") for folder in (alone, two))
    assert all(torch.allclose(one[name], other[name], rtol=0.0, atol=1e-5) for name in one)
    first, second = (json.loads((folder / "certificate.json").read_text()) for folder in (alone, two))
    own = {"model_sha256": "", "run": ""}
    assert {**first, **own} == {**second, **own}
    assert sordino("certify", two).code == 0
    assert json.loads((played / "out").read_text())["last"] == lines(two / "history.jsonl")[-1]  # rank 0 alone speaks


def test_it_offers_what_one_process_offers_but_for_clients_that_remember_and_columns() -> None:
    assert Distributed().offers == InProcess().offers - {"client_state", "preparation"}


def test_a_process_that_is_no_rank_is_refused() -> None:
    with pytest.raises(EngineError, match="torchrun"):
        so.train(plan(), task(), engine=Distributed())
