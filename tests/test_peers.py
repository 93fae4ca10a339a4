"""The page of benchmarks beside the peers is made from the kept results, and the nets measured are the library's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import render, workloads

from sordino.models import CharLstm, DpMnistCnn, Logistic

HERE = Path(__file__).parents[1] / "benchmarks" / "peers"


@pytest.fixture
def results() -> dict[str, Any]:
    """What the last `make bench-peers` kept; the test is skipped, visibly, where nothing was measured yet."""
    file = HERE / "results.json"
    if not file.exists():
        pytest.skip("benchmarks/peers/results.json: make bench-peers has not been run")
    kept: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return kept


def test_the_page_shows_the_kept_results(results: dict[str, Any]) -> None:
    page = (HERE / "README.md").read_text("utf-8")
    assert render.inserted(page, results) == page


def test_every_workload_is_listed_and_the_one_with_bars_was_measured_beside_ours(results: dict[str, Any]) -> None:
    rows = {(row["workload"], row["method"]): row for row in results["rows"] if "seconds" in row}
    assert {row["workload"] for row in results["rows"]} == set(workloads.WORKLOADS)
    assert rows["cnn", "make_private"]["ratio"]["loop_cpu"] == 1.0
    assert ("cnn", "hooks") in rows
    assert set(render.TITLES) >= set(workloads.WORKLOADS)


def test_ratios_are_those_of_the_seconds(results: dict[str, Any]) -> None:
    ours = {row["workload"]: row.get("seconds") for row in results["rows"] if row["method"] == "make_private"}
    for row in results["rows"]:
        for key, ratio in row["ratio"].items():
            assert ratio == pytest.approx(row["seconds"][key] / ours[row["workload"]][key], abs=1e-3)


ROW: dict[str, Any] = {"workload": "cnn", "peer": "sordino", "method": "make_private", "rounds": 3, "memory": 20.0}
SECONDS = {"loop_cpu": 1e-4, "loop_wall": 1e-4, "step_cpu": 8e-5, "step_wall": 8e-5}
OURS = {**ROW, "seconds": SECONDS, "ratio": dict.fromkeys(SECONDS, 1.0)}


def shown(*rows: dict[str, Any]) -> str:
    machine = {"cpu": "a", "cores": 2, "python": "3"}
    return render.table({"machine": machine, "load": [0.1, 0.2], "versions": {"a": "1"}, "rows": [OURS, *rows]})


def test_a_method_that_does_not_run_is_shown_with_its_error() -> None:
    broken = {"workload": "cnn", "peer": "x", "method": "y", "ratio": {}, "error": "ValueError: a | b", "rounds": 1}
    assert "| x: y | does not run: ValueError: a / b |" in shown(broken)
    assert "y (then failed: ValueError: a / b) | 10,000 |" in shown({**OURS, **broken, "ratio": OURS["ratio"]})


@pytest.mark.parametrize(("ratio", "holds"), [(3.2, "yes"), (2.9, "no")])
def test_a_bar_holds_only_if_loop_and_steps_do(ratio: float, holds: str) -> None:
    hooks = {
        **OURS,
        "peer": "opacus",
        "method": "hooks",
        "ratio": {**OURS["ratio"], "loop_cpu": 4.0, "step_cpu": ratio},
    }
    assert f"(hooks) | at least 3.0 | 4.00 | {ratio:.2f} | {holds} |" in shown(hooks)


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
