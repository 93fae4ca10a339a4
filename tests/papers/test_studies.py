"""Promises of the studies: listed, run, kept, judged and drawn; and small pieces of them against what is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.commands import sordino

from sordino_papers import kept, page, paper_001_scaling, runner, sections
from sordino_papers.panels import curves
from sordino_papers.paper_claims import CLAIMS
from sordino_papers.studies import INSTRUCTIONS, Study, gathered, instructions, picked, side_by_side, value
from sordino_papers.tables import STUDIES
from sordino_papers.verdicts import fact, verdict

KEPT = Path(__file__).parents[2] / "benchmarks" / "papers" / "results"
ROWS = [{"rule": rule, "x": x, "loss": x + shift} for rule in "ab" for x in (1.0, 2.0) for shift in (0.0, 0.5)]


def fake(rows: list[dict[str, Any]]) -> Study:
    def claims(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [fact("it falls", f"{len(found)} rows", False, 2, "nothing")]

    def draw(found: list[dict[str, Any]], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(len(found)))

    return Study("fake", "A fake", "About.", lambda repeats, workers: rows * repeats, claims, draw, 2)


def test_every_study_is_listed_with_an_id_of_its_own() -> None:
    listed = sordino("papers", "list", "--json").json["studies"]
    assert [study["id"] for study in listed] == [study.id for study in STUDIES]
    assert len({study.id for study in STUDIES}) == len(STUDIES)
    assert all(study.id in sordino("papers", "list").out for study in STUDIES)


def test_a_study_is_run_kept_judged_and_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (runner, page):
        monkeypatch.setattr(module, "STUDIES", (fake(ROWS),))
    said = sordino("papers", "run", "fake", "--results", tmp_path)
    assert "no: it falls: 16 rows" in said.out
    found = json.loads((tmp_path / "fake.json").read_text())
    assert len(found["rows"]) == 16
    assert set(found) == {"id", "title", "repeats", "rows", "seconds", "core_seconds", "code"}
    assert "claims" not in found  # they are made from the rows whenever they are shown
    page.write(kept.stored(tmp_path), tmp_path / "docs" / "papers.md")
    text = (tmp_path / "docs" / "papers" / "beyond.md").read_text()
    assert "| it falls | 16 rows | **no** | 2 |" in text
    assert "All 16 rows: [fake.csv](rows/fake.csv)." in text
    assert (tmp_path / "docs" / "papers" / "rows" / "fake.csv").read_text().startswith("rule,x,")
    assert (tmp_path / "docs" / "figures" / "fake.png").read_text() == "16"


def test_means_and_spreads_are_over_rows_that_agree() -> None:
    found = gathered(ROWS, ("rule", "x"), "loss")
    assert [row["loss"] for row in found] == [1.25, 2.25, 1.25, 2.25]
    assert found[0]["spread"] == pytest.approx(0.5 / math.sqrt(2), abs=1e-3)
    assert value(picked(found, rule="b"), "loss", x=2.0) == 2.25
    with pytest.raises(ValueError, match="unpack"):
        value(found, "loss", x=2.0)


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.id)
def test_kept_rows_are_judged_by_the_code_of_today(study: Study) -> None:
    file = KEPT / f"{study.id}.json"
    if not file.is_file():
        pytest.skip(f"{study.id} has not been run")
    found = kept.read(file)
    assert "claims" not in found
    for row in page.study_claims(study, found):
        assert set(row) == {"text", "measured", "verdict", "seeds", "chosen"}
        assert row["verdict"] in ("yes", "no", "undecided")


def test_rows_kept_without_their_seeds_decide_nothing() -> None:
    def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [verdict("a beats b", rows[0]["values"], rows[1]["values"], "nothing")]

    study = replace(fake(ROWS), claims=claims)
    (row,) = page.study_claims(study, {"rows": ROWS})
    assert row["verdict"] == "undecided"
    assert "values" in row["measured"]


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.id)
def test_every_study_that_was_run_can_be_drawn(study: Study, tmp_path: Path) -> None:
    file = KEPT / f"{study.id}.json"
    if not file.is_file():
        pytest.skip(f"{study.id} has not been run")
    study.draw(kept.read(file)["rows"], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_is_written_as_pixels_and_as_vectors_and_the_same_again(tmp_path: Path) -> None:
    rows = [{"x": 1.0, "loss": 2.0}, {"x": 2.0, "loss": 1.0}]
    for name in ("one", "two"):
        curves({"a": {"b": rows}}, "x", "loss", tmp_path / f"{name}.png", xlabel="size of the thing")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "<svg" in (tmp_path / "one.svg").read_text()


def test_a_long_study_shows_its_ends_and_leaves_its_rows_to_a_file(tmp_path: Path) -> None:
    rows = [{"round": t, "loss": 1.0 / t} for t in range(1, 100)] + [{"round": None, "loss": 0.5}]
    found = {"id": "fake", "seconds": 1.0, "rows": rows}
    text = sections.study_text(fake(rows), found)
    assert "All 100 rows: [fake.csv](rows/fake.csv)." in text
    assert text.count("\n| ") == 1 + 1  # the head, and the end
    assert "| 0.5 |" in text
    assert sections.as_csv(rows).splitlines()[:2] == ["round,loss", "1,1.0"]


@pytest.mark.skipif(not (KEPT / "003-mnist.json").is_file(), reason="results are not here")
def test_every_claim_of_a_paper_has_comparisons_that_were_made_or_is_a_headline() -> None:
    """A comparison that was renamed would leave the page without a word."""
    rows = page.judged(kept.stored(KEPT))
    empty = [one for one in CLAIMS if any(one.slices) and not one.mine(rows[one.paper]) and not one.title]
    waiting = ("5,000 silos", "the paper's protocol, 50 epochs")  # not run yet: 002-loans-5000, 004-protocol-50
    assert [one.text for one in empty if not one.slices[0].startswith(waiting)] == []


FEWER = (  # claims that compare no two methods: closed forms, and bounds that no run may exceed
    "000: Figure E.8",
    "001: at the same epsilon our noise is below the paper's formula",
    "003: T = ",
    "000 Theorem",
    "004 Theorem",
)
THREE = "003: CIFAR-10 at the paper's ratio"  # paired seeds: the longest of the studies


@pytest.mark.skipif(not (KEPT / "003-mnist.json").is_file(), reason="results are not here")
def test_every_claim_that_one_beats_another_stands_on_five_paired_seeds() -> None:
    """One run decides nothing, and a figure without seeds has no interval."""
    rows = [row for rows in page.judged(kept.stored(KEPT)).values() for row in rows]
    few = [row["text"] for row in rows if (row["seeds"] or 0) < 5 or "no interval" in row["measured"]]
    assert [text for text in few if not text.startswith((*FEWER, THREE))] == []
    assert all(row["seeds"] >= 3 for row in rows if row["text"].startswith(THREE))
    assert [start for start in FEWER if not any(text.startswith(start) for text in few)] == []


def test_a_study_with_runs_of_an_earlier_code_is_named_among_those_not_held() -> None:
    def study(*codes: str) -> dict[str, Any]:
        return {"code": "0.1+b, AVX2", "rows": [{"figures": {"code": list(codes)}}]}

    told = page._elsewhere({"new": study("0.1+b", "0.1+b"), "mixed": study("0.1+b", "0.1+a"), "old": {"code": "0.1+b"}})
    assert told.endswith(": mixed, old.")


def test_runs_are_held_to_one_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with wider vectors adds in another order, and a net's figures would be of that machine alone."""
    for name in INSTRUCTIONS:
        monkeypatch.setenv(name, "taken away below, and put back as it was")
        monkeypatch.delenv(name)
    (found,) = side_by_side(torch.backends.cpu.get_cpu_capability, [()], 1)
    assert "512" not in found
    assert found == instructions() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")


def test_the_slope_of_a_power_law_is_its_exponent() -> None:
    rows = [{"axis": "n", "size": float(n), "excess": 3.0 * n**-2} for n in (1, 2, 4)]
    assert paper_001_scaling.slope(rows, "n") == pytest.approx(-2.0)


def test_every_data_set_has_a_slope_of_its_own() -> None:
    noises = np.linspace(0.5, 1.5, paper_001_scaling.NOISES)  # their mean is 1
    values = {n: np.concatenate([3.0 * n**-2 * noises, 5.0 * n**-1 * noises]).tolist() for n in (1.0, 2.0, 4.0)}
    rows = [{"axis": "n", "size": n, "values": found} for n, found in values.items()]
    assert paper_001_scaling.slopes(rows, "n") == pytest.approx([-2.0, -1.0])


def test_one_pass_with_stages_comes_near_the_best_model() -> None:
    found = paper_001_scaling.part("epsilon", 1.0, seed=0)
    assert len(found) == paper_001_scaling.NOISES
    assert np.mean([row["excess"] for row in found]) < 0.02  # 0.1 before the first round
