"""Promises of a private loop of many processes: the model and the certificate of one process, and noise added once."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dpsgd.as_rank import CASES, REFUSALS, SHARDED, Found, continued, loop
from tests.dpsgd.loops import data
from tests.pages import blocks, titled
from torch.utils.data import DataLoader

from sordino.dpsgd.loader import grade_collate
from sordino.dpsgd.processes import Ranks, call_collective
from sordino.errors import BudgetError, PlanError
from sordino.rng import Seeded

ROOT = Path(__file__).resolve().parents[2]
SIZE = 4  # ranks: batches of about 12 are cut into unequal parts, and batches of 2 leave some rank without a record


def play(folder: Path, size: int) -> Path:
    """The folder in which all ranks, real processes, left what they found."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(ROOT / "tests" / "dpsgd" / "as_rank.py"), str(folder)]
    ranks = [
        subprocess.Popen([*script, str(own), str(size)], env=environment, stderr=subprocess.PIPE, text=True)
        for own in range(size)
    ]
    try:
        errors = [one.communicate(timeout=600)[1] for one in ranks]
        assert all(one.returncode == 0 for one in ranks), "\n".join(errors)
    finally:
        for one in ranks:
            one.kill()
    return folder


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory.mktemp("ranks"), SIZE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What two ranks found of sharded models."""
    folder = play(tmp_path_factory.mktemp("pair"), 2)
    return [torch.load(folder / f"rank{own}.pt", weights_only=False) for own in range(2)]


@pytest.fixture(scope="module")
def found(played: Path) -> list[Found]:
    return [torch.load(played / f"rank{own}.pt", weights_only=False) for own in range(SIZE)]


def distance(one: Found, other: Found) -> float:
    return float((one["weights"] - other["weights"]).abs().max())


def comparable(certificate: dict[str, Any]) -> dict[str, Any]:
    """A certificate without the hash of its ledger, which names the run."""
    ledger = certificate["ledger"]
    return {**certificate, "ledger": None if ledger is None else {**ledger, "sha256": ""}}


@pytest.mark.parametrize("name", CASES)
def test_many_ranks_and_one_process_give_one_model_and_one_certificate(
    name: str, found: list[Found], tmp_path: Path
) -> None:
    alone = CASES[name](tmp_path)
    for own in (one["honest"][name] for one in found):
        assert distance(own, alone) < 1e-6
        assert torch.equal(own["weights"], found[0]["honest"][name]["weights"])
        assert comparable(own["certificate"]) == comparable(alone["certificate"])


def test_a_ledger_is_charged_once_for_all_ranks_and_refuses_all_of_them(found: list[Found], tmp_path: Path) -> None:
    alone = CASES["a ledger"](tmp_path)
    for own in (one["honest"]["a ledger"] for one in found):
        assert own["charges"] == alone["charges"]
        assert own["refused"].partition(";")[0] == alone["refused"].partition(";")[0] != ""


def test_every_rank_counts_the_records_of_all_ranks_that_are_not_finite(found: list[Found], tmp_path: Path) -> None:
    alone = CASES["records that are not finite"](tmp_path)["not_finite"]
    assert alone > SIZE
    assert [one["honest"]["records that are not finite"]["not_finite"] for one in found] == [alone] * SIZE


def test_one_process_continues_a_checkpoint_of_many(played: Path, found: list[Found]) -> None:
    assert distance(continued(played / "many0.pt"), found[0]["honest"]["a resumed loop"]) < 1e-6


def test_secure_noise_is_drawn_once_for_all_ranks(found: list[Found]) -> None:
    assert all(torch.equal(one["secure"]["weights"], found[0]["secure"]["weights"]) for one in found)
    assert found[0]["secure"]["std"] == pytest.approx(2.0, rel=0.03)


def test_noise_on_every_rank_is_noticed_by_a_comparison_and_by_its_deviation(found: list[Found]) -> None:
    assert distance(found[0]["noise on every rank"], loop()) > 1e-2
    assert found[0]["noise on every rank, secure"]["std"] == pytest.approx(2.0 * math.sqrt(SIZE), rel=0.03)


def test_a_sum_that_is_not_reduced_is_noticed_by_a_comparison(found: list[Found]) -> None:
    alone = loop(epochs=1)
    assert all(distance(one["sum not reduced"], alone) > 1e-3 for one in found)


@pytest.mark.parametrize("name", REFUSALS)
def test_ranks_that_would_not_give_one_model_are_refused_on_every_rank(name: str, found: list[Found]) -> None:
    for one in found:
        assert REFUSALS[name][1] in one["refusals"][name]
        assert "needed" in one["refusals"][name]


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_model_of_two_and_four_ranks_is_that_of_one_process(
    name: str, found: list[Found], pair: list[Found]
) -> None:
    alone = SHARDED[name]()
    for ranks in (found, pair):
        every = [one["sharded"][name] for one in ranks]
        assert all(distance(own, alone) < 1e-5 for own in every)
        assert all(comparable(own["certificate"]) == comparable(alone["certificate"]) for own in every)
        assert sum(own["held"] for own in every) == alone["held"]  # each rank has its part of the optimizer's state
        assert max(own["held"] for own in every) < 0.7 * alone["held"]


def test_secure_noise_of_a_sharded_model_is_drawn_once(found: list[Found], pair: list[Found]) -> None:
    for ranks in (found, pair):
        every = [one["sharded, secure"] for one in ranks]
        assert all(torch.equal(own["weights"], every[0]["weights"]) for own in every)
        assert every[0]["std"] == pytest.approx(2.0, rel=0.03)


def test_a_collective_returns_when_no_other_thread_holds_its_tensors() -> None:
    held: list[torch.Tensor] = []

    def collective(total: torch.Tensor, own: list[torch.Tensor]) -> None:  # as gloo: references are dropped afterwards
        held.extend((total[:1], own[0][:1]))
        threading.Timer(0.05, held.clear).start()

    call_collective(collective, torch.ones(4), [torch.ones(2)])
    assert not held


def test_the_loop_of_the_page_trains_one_model_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(titled("docs/dp-sgd.md", "train.py").text)
    commands = [command for block in blocks(ROOT / "docs" / "dp-sgd.md") for command, _ in block.commands]
    first, *words = next(command for command in commands if "train.py" in command).split()
    assert first == "torchrun"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    epsilon, steps = shown.stdout.split()
    assert 1.9 < float(epsilon) <= 2.0
    assert int(steps) == 50


def test_a_rank_that_ends_is_named_to_the_others(found: list[Found]) -> None:
    assert [("lost another rank" in one["lost"]) for one in found] == [True] * (SIZE - 1) + [False]


def test_one_record_more_moves_no_other_record_to_another_rank() -> None:
    """Ranks may hold different records in one row: then a row that changes its rank is another record."""
    rows = [1, 4, 5, 8, 9, 12]
    for rank in range(3):
        own = Ranks(rank, 3)
        with_one, without = ({row for piece in own.own_pieces(some, 2) for row in piece} for some in ([0, *rows], rows))
        assert with_one - {0} == without
        assert len(own.own_pieces(rows, 2)) == len(Ranks(0, 3).own_pieces(rows, 2))


def test_ranks_draw_other_dropout_masks() -> None:
    masks = []
    for rank in range(2):
        for streams in (Seeded(3), Seeded(3)):
            Ranks(rank, 2).seed_torch(streams, 1)
            masks.append(torch.rand(8))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_an_error_without_a_text_on_rank_0_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "gather", lambda self, found: [[""], []])  # what rank 1 receives
    with pytest.raises(BudgetError):
        Ranks(1, 2).once(lambda: None)


class Wrapping:
    """A user's collate_fn that holds one of transformers and mixes records after it."""

    def __init__(self) -> None:
        self.data_collator = type("Known", (), {"__module__": "transformers.data"})()

    def __call__(self, records: Any) -> Any:
        x = torch.stack([record[0] for record in records])
        return x - x.mean(0)


def test_a_users_collate_fn_is_not_taken_for_the_one_that_it_holds() -> None:
    loader = DataLoader(data(), batch_size=4, collate_fn=Wrapping())
    with pytest.raises(PlanError, match="Wrapping"):
        grade_collate(loader, refuse=True)
