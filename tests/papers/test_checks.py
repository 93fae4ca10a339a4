"""Promises of `papers run --quick`, `papers check` and `--full`: what is kept is computed again and compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.commands import sordino
from tests.papers.test_tables import FAKE, small

from sordino_papers import checks, kept, page, runner, tables
from sordino_papers.cells import Cell, Table
from sordino_papers.checks import Outcome
from sordino_papers.studies import Study, gathered, instructions
from sordino_papers.verdicts import fact


def here(work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], workers: int) -> list[Any]:
    return [work(*job) for job in jobs]


def line(seed: int) -> dict[str, Any]:
    return {"x": 2, "loss": 5.0 + seed}


STUDY = Study(
    "000-line",
    "A line",
    "About.",
    lambda repeats, workers: gathered([line(seed) for seed in range(repeats)], ("x",), "loss"),
    lambda rows: [fact("it is there", "yes", True)],
    lambda rows, path: None,
    3,
    "nothing",
    lambda: line(0),
    "loss",
)
KEPT = Path(__file__).parents[2] / "benchmarks" / "papers" / "results"
LARGE = Table("000-large", "large", (Cell("000-large-one", "one", small),), full=True, hours="30 hours on a GPU")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two cells and a study, kept; everything runs in this process."""
    for module in (tables, runner, page):
        monkeypatch.setattr(module, "TABLES", (FAKE, LARGE))
        monkeypatch.setattr(module, "STUDIES", (STUDY,))
    monkeypatch.setattr(checks, "as_they_come", here)
    for cell in FAKE.cells:
        kept.keep(runner.summary(cell, [runner.one_seed(cell.id, seed) for seed in (0, 1)]), tmp_path)
    kept.keep(runner.run_study(STUDY, 3, 1), tmp_path)
    return tmp_path


def shift(folder: Path, name: str, by: float) -> None:
    """A kept value that today's code does not give."""
    path = folder / f"{name}.json"
    old = json.loads(path.read_text())
    if "rows" in old:
        old["rows"][0]["values"][0] += by
    else:
        old["values"] = [value + by for value in old["values"]]
        old["spread"] = 0.1
    path.write_text(json.dumps(old))


def test_quick_computes_one_figure_of_everything_and_keeps_nothing(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    said = sordino("papers", "run", "all", "--quick", "--results", folder)
    assert said.code == 0
    assert said.out.count(": same (") == 2  # one cell of the table, one row of the study
    assert "2 of 2 agree" in said.out
    assert "000-large" not in said.out
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_quick_ends_with_code_1_where_a_figure_differs(folder: Path) -> None:
    for cell in FAKE.cells:
        shift(folder, cell.id, 30.0)
    said = sordino("papers", "run", "all", "--quick", "--results", folder)
    assert said.code == 1
    assert "differs: 000-fake-" in said.out
    shift(folder, "000-line", 40.0)
    assert "000-line" in sordino("papers", "run", "000-line", "--quick", "--results", folder).out.splitlines()[-1]


def test_a_figure_that_fails_is_said_and_does_not_hide_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> dict[str, Any]:
        raise ValueError("no such thing")

    for module in (runner, page):
        monkeypatch.setattr(module, "STUDIES", (replace(STUDY, quick=broken),))
    said = sordino("papers", "run", "all", "--quick", "--results", folder)
    assert said.code == 1
    assert "000-line: failed (ValueError: no such thing)" in said.out
    assert "1 of 2 agree; differs: 000-line" in said.out


def test_a_table_is_stood_for_by_the_cell_it_names_or_by_the_cheapest(folder: Path) -> None:
    results = kept.stored(folder)
    results["000-fake-one"]["figures"]["seconds"] = [9.0, 9.0]
    results["000-fake-two"]["figures"]["seconds"] = [1.0, 1.0]
    assert getattr(checks.stand_in(FAKE, results), "id", "") == "000-fake-two"
    assert getattr(checks.stand_in(replace(FAKE, quick="000-fake-one"), results), "id", "") == "000-fake-one"
    assert checks.stand_in(FAKE, {}) is None


def test_what_was_never_kept_is_said_and_is_no_difference(folder: Path) -> None:
    (folder / "000-line.json").unlink()
    said = sordino("papers", "run", "all", "--quick", "--results", folder)
    assert said.code == 0
    assert "000-line: nothing kept" in said.out


@pytest.mark.parametrize(("found", "answer"), [(80.0, "same"), (80.0000004, "same"), (80.01, "differs")])
def test_the_same_seed_has_the_same_digits_on_the_same_instruction_set(found: float, answer: str) -> None:
    made = f"0.0.0+other, {instructions()}"
    assert checks.tolerance(80.0, made) == 0.0
    assert Outcome("a", 80.0, found, checks.tolerance(80.0, made)).answer == answer


@pytest.mark.parametrize(("found", "answer"), [(82.3, "ok"), (82.5, "differs"), (77.0, "differs")])
def test_a_run_of_other_instructions_may_differ_by_the_stated_rounding(found: float, answer: str) -> None:
    for made in ("0.0.0+other, SOMETHING", "0.0.0+other", ""):
        assert checks.tolerance(80.0, made) == checks.ROUNDING * 80.0
        assert Outcome("a", 80.0, found, checks.tolerance(80.0, made)).answer == answer


def test_one_digit_of_a_kept_result_that_is_wrong_is_found(folder: Path) -> None:
    """Sabotage: the last digit of one kept value, of a cell and of a study."""
    assert sordino("papers", "run", "all", "--quick", "--results", folder).code == 0
    for cell in FAKE.cells:
        shift(folder, cell.id, 1e-5)
    said = sordino("papers", "run", "000-fake", "--quick", "--results", folder)
    assert (said.code, "differs: 000-fake-" in said.out) == (1, True)
    shift(folder, "000-line", 1e-3)
    assert sordino("papers", "run", "000-line", "--quick", "--results", folder).code == 1


def test_one_digit_of_the_results_that_this_project_keeps_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of a kept closed form: Figure E.8 is the same to the digit, and not after a digit is moved."""
    monkeypatch.setattr(checks, "as_they_come", here)
    kept.keep(kept.read(KEPT / "000-figure-e8.json"), tmp_path)
    said = sordino("papers", "run", "000-figure-e8", "--quick", "--results", tmp_path)
    assert (said.code, "1 of 1 agree" in said.out) == (0, True)
    path = tmp_path / "000-figure-e8.json"
    old = json.loads(path.read_text())
    for row in old["rows"]:
        if "noise" in row:
            row["noise"] *= 1 + 1e-4
    path.write_text(json.dumps(old))
    said = sordino("papers", "run", "000-figure-e8", "--quick", "--results", tmp_path)
    assert (said.code, "differs: 000-figure-e8" in said.out) == (1, True)


def test_check_compares_to_the_digits_and_the_page_shows_it(folder: Path) -> None:
    said = sordino("papers", "check", "000-fake", "--seeds", 2, "--results", folder)
    assert said.code == 0
    assert "4 of 4 agree" in said.out
    shift(folder, "000-fake-two", 0.01)
    assert sordino("papers", "check", "000-fake-two", "--results", folder).code == 1
    rows = checks.recalled(folder)
    assert {(row["id"], row["answer"]) for row in rows if row["of"] == "seed 0"} == {
        ("000-fake-one", "same"),
        ("000-fake-two", "differs"),
    }
    pages = page.pages(kept.stored(folder), checks.recalled(folder))
    assert "3 of 4 runs" in pages["papers.md"]
    text = pages["papers/digits.md"]
    assert "| 000-fake-two, seed 0 |" in text
    assert kept.code() in text


def test_a_table_of_full_size_is_run_only_if_asked_for(folder: Path) -> None:
    for name in ("000-large", "000-large-one"):
        said = sordino("papers", "run", name, "--results", folder)
        assert "--full" in said.sentence
        assert "30 hours on a GPU" in said.sentence
    assert runner.wanted("000-large", full=True)[0][0].cells == LARGE.cells
    assert LARGE not in runner.wanted("all", full=True)[0]
    listed = sordino("papers", "list").out.splitlines()
    assert "--full" in listed[-1]
    assert "an estimate" in listed[-1]


def test_a_device_that_is_not_there_is_refused_and_a_study_has_none(folder: Path) -> None:
    assert "device" in sordino("papers", "run", "000-fake", "--device", "nowhere", "--results", folder).sentence
    assert "000-line" in sordino("papers", "run", "000-line", "--device", "meta", "--results", folder).sentence


def test_a_result_of_another_device_is_not_extended(folder: Path) -> None:
    old = kept.stored(folder)["000-fake-one"]
    assert kept.stale({**old, "device": "cuda"}, old["settings"]) == (
        "000-fake-one: the kept result was made on cuda, now cpu: run anew"
    )
    assert kept.stale(old, old["settings"]) is None
