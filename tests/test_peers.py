"""The page of benchmarks beside the peers is made from the kept results, and the nets measured are the library's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import render, workloads

from sordino.models import CharLstm, DpMnistCnn, Logistic

HERE = Path(__file__).parents[1] / "benchmarks" / "peers"
RESULTS: dict[str, Any] = json.loads((HERE / "results.json").read_text("utf-8"))


def test_the_page_shows_the_kept_results() -> None:
    page = (HERE / "README.md").read_text("utf-8")
    assert render.inserted(page, RESULTS) == page


def test_every_workload_was_measured_beside_ours() -> None:
    rows = {(row["workload"], row["peer"]): row for row in RESULTS["rows"] if "seconds" in row}
    for name in workloads.WORKLOADS:
        assert rows[name, "sordino"]["ratio"]["loop_cpu"] == 1.0
        assert (name, "opacus") in rows
    assert set(render.TITLES) >= set(workloads.WORKLOADS)


def test_ratios_are_those_of_the_seconds() -> None:
    ours = {row["workload"]: row["seconds"] for row in RESULTS["rows"] if row["peer"] == "sordino"}
    for row in RESULTS["rows"]:
        for key, ratio in row["ratio"].items():
            assert ratio == pytest.approx(row["seconds"][key] / ours[row["workload"]][key], abs=1e-3)


def test_a_method_that_does_not_run_is_shown_with_its_error() -> None:
    broken = {"workload": "cnn", "peer": "x", "method": "y", "ratio": {}, "error": "ValueError: a | b", "rounds": 1}
    assert "does not run: ValueError: a / b" in render.table({**RESULTS, "rows": [*RESULTS["rows"], broken]})


@pytest.mark.parametrize(
    ("name", "spec", "shape", "outputs"),
    [
        ("cnn", DpMnistCnn(), (1, 28, 28), 10),
        ("logistic", Logistic(), (1, 28, 28), 10),
        ("lstm64", CharLstm(hidden=64, layers=1), (80,), 80),
        ("lstm256", CharLstm(), (80,), 80),
    ],
)
def test_the_nets_are_the_librarys(name: str, spec: Any, shape: tuple[int, ...], outputs: int) -> None:
    measured, ours = workloads.WORKLOADS[name].model(), spec.build(shape, outputs)
    assert [p.shape for p in measured.parameters()] == [p.shape for p in ours.parameters()]
