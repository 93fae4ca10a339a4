"""Promise: a row of the board is what its kept result says, chosen elsewhere, certified, and shown as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.commands import sordino

import sordino as so
from sordino.data.records import Iid
from sordino.errors import ConfigError
from sordino_papers import board_choosing, board_page, board_rows
from sordino_papers.board import Problem, Row, Settings, interval, run, without_privacy

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "board"
KEPT = board_rows.results(FOLDER)
SMALL = Problem("digits", so.features.scattering(1, 9, "photos"), held=300)


# ---- kept rows -------------------------------------------------------------------------------------------------------


def test_some_rows_are_kept_and_ids_are_unique() -> None:
    assert KEPT
    assert len(board_rows.BY_ID) == len(board_rows.ROWS)
    files = {path.stem for path in (FOLDER / "results").glob("*.json")}
    assert files == set(KEPT)


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_row_follows_from_its_seeds_and_its_stand_in(name: str) -> None:
    row, found = board_rows.BY_ID[name], KEPT[name]
    middle, half = interval(found["values"])
    assert (found["mean"], found["half_width"]) == (round(middle, 3), round(half, 3))
    assert len(found["values"]) == board_rows.SEEDS
    assert found["noise"] == "secure"
    assert found["epsilon"] <= row.epsilon < 1.05 * found["epsilon"]
    assert (found["unit"], found["stand_in"]) == (row.problem.unit, row.stand_in)
    assert board_choosing.settings(row.stand_in, row.epsilon, FOLDER) == Settings(**found["settings"])


def test_no_row_is_chosen_on_its_own_data() -> None:
    for row in board_rows.ROWS:
        stand_in = board_choosing.STAND_INS[row.stand_in]
        assert stand_in.data.split("_")[0] != row.problem.data.split("_")[0], row.id
        assert stand_in.held, row.id


@pytest.mark.parametrize("name", KEPT)
def test_the_certificate_of_a_row_is_certified(name: str) -> None:
    path, found = board_rows.certificate_path(name, FOLDER), KEPT[name]
    made = sordino("certify", path, "--json").json
    assert {key: made[key] for key in ("epsilon", "delta", "unit", "relation")} == {
        key: found[key] for key in ("epsilon", "delta", "unit", "relation")
    }
    assert made["noise"]["mode"] == "secure"


@pytest.mark.parametrize("unit", ["record", "client"])
def test_a_certificate_with_another_epsilon_is_refused(unit: str, tmp_path: Path) -> None:
    name = next(name for name, found in KEPT.items() if found["unit"] == unit)
    shutil.copytree(FOLDER / "certificates" / name, tmp_path / name)
    file = tmp_path / name / "certificate.json"
    epsilon = str(KEPT[name]["epsilon"])
    file.write_text(file.read_text("utf-8").replace(f'"epsilon": {epsilon}', '"epsilon": 0.1', 1), "utf-8")
    target = file if unit == "record" else file.parent
    assert sordino("certify", target).code == 1


def test_the_page_shows_the_kept_rows() -> None:
    assert (ROOT / "docs" / "board.md").read_text("utf-8") == board_page.text(FOLDER)


def test_another_kept_figure_changes_the_page(tmp_path: Path) -> None:
    for part in ("results", "chosen.json"):
        copy = shutil.copytree if (FOLDER / part).is_dir() else shutil.copy
        copy(FOLDER / part, tmp_path / part)
    name = next(iter(KEPT))
    changed = {**KEPT[name], "mean": KEPT[name]["mean"] + 0.5}
    (tmp_path / "results" / f"{name}.json").write_text(json.dumps(changed), "utf-8")
    assert board_page.text(tmp_path) != board_page.text(FOLDER)


# ---- a row from its stand-in to its result ---------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [None, 50])
def test_a_row_is_chosen_run_kept_and_computed_again(
    clients: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(SMALL.data, SMALL.features, None if clients is None else Iid(clients))
    row = Row("digits-small", "Digits", problem, 4.0, "stand-in")
    monkeypatch.setitem(board_choosing.STAND_INS, "stand-in", Problem("digits", SMALL.features, problem.partition, 300))
    monkeypatch.setitem(board_choosing.GRIDS, "stand-in", {4.0: ((5,), (0.01, 30.0))})
    monkeypatch.setitem(board_rows.BY_ID, row.id, row)
    monkeypatch.setattr(board_rows, "ROWS", (row,))
    with pytest.raises(ConfigError, match="sordino board choose stand-in"):
        board_rows.measure(row, tmp_path)
    assert len(list(board_choosing.choose("stand-in", tmp_path))) == 2
    assert list(board_choosing.choose("stand-in", tmp_path)) == []  # nothing is tried twice
    found = board_rows.measure(row, tmp_path, seeds=2)
    assert found["settings"]["step"] == 30.0  # a step of .01 learns nothing
    assert found["epsilon"] <= 4.0
    assert found["without_privacy"] > found["mean"] > 60
    with pytest.raises(ConfigError, match="which is kept"):
        board_rows.measure(row, tmp_path)
    known, again = board_rows.check(row, tmp_path)
    assert known == again
    assert sordino("certify", board_rows.certificate_path(row.id, tmp_path)).code == 0


def test_a_stand_in_does_not_read_test_records() -> None:
    whole, held = Problem(SMALL.data, SMALL.features).dataset(), SMALL.dataset()
    assert (held.test_x == whole.x[-300:]).all()
    assert len(held.y) + 300 == len(whole.y)


def test_without_privacy_the_same_head_learns_more() -> None:
    private = run(SMALL, 0.5, Settings(5, 5.0), seed=0, noise="simulation").accuracy
    assert without_privacy(SMALL) > private


# ---- commands --------------------------------------------------------------------------------------------------------


def test_commands_list_show_and_refuse(tmp_path: Path) -> None:
    rows = sordino("board", "list", "--results", FOLDER, "--json").json["rows"]
    assert [row["id"] for row in rows if row["kept"]] == list(KEPT)
    shown = sordino("board", "show", "--results", FOLDER).out
    assert all(f"{name}: {found['mean']:.2f}" in shown for name, found in KEPT.items())
    assert "mnist-record-eps3" in sordino("board", "run", "mnist-record-eps4").sentence
    assert "fashion-scattering" in sordino("board", "choose", "nothing").sentence
    out = tmp_path / "board.md"
    assert sordino("board", "page", "--results", FOLDER, "--out", out).code == 0
    assert out.read_text("utf-8") == board_page.text(FOLDER)
    assert (tmp_path / "figures" / "board.png").is_file()
