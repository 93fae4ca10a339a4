"""The page of federated simulation beside the peers: bars, ratios, order and clock are what they say they are."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import render_federated, schedule, stopwatch

from sordino.models import CharLstm, EmnistCnn, Logistic, SvhnCnn

HERE = Path(__file__).parents[1] / "benchmarks" / "peers"


@pytest.fixture
def results() -> dict[str, Any]:
    """What the last `make bench-peers` kept; the test is skipped, visibly, where nothing was measured yet."""
    file = HERE / "federated.json"
    if not file.exists():
        pytest.skip("benchmarks/peers/federated.json: make bench-peers has not been run")
    kept: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return kept


def test_the_page_shows_the_kept_results(results: dict[str, Any]) -> None:
    page = (HERE / "README.md").read_text("utf-8")
    assert render_federated.inserted(page, results) == page


def test_ratios_are_those_of_the_seconds(results: dict[str, Any]) -> None:
    ours = {r["workload"]: r.get("seconds") for r in results["rows"] if (r["peer"], r["method"]) == schedule.OURS}
    for row in results["rows"]:
        for key, ratio in row["ratio"].items():
            assert ratio == pytest.approx(row["seconds"][key] / ours[row["workload"]][key], abs=1e-3)


def entry(cpu: float, wall: float | None = None) -> dict[str, Any]:
    return {"seconds": {"cpu": cpu, "wall": cpu if wall is None else wall}, "versions": {"a": "1"}}


def kept(found: dict[tuple[str, str, str], dict[str, Any]], **figures: Any) -> dict[str, Any]:
    merged = {key: schedule.merged({}, value) for key, value in found.items()}
    machine = {"cpu": "a", "cores": 2, "python": "3"}
    common = {"machine": machine, "load": [0.1, 0.2], "versions": {"a": "1"}, "figures": figures}
    return {**common, "rows": schedule.rows(merged)}


@pytest.mark.parametrize(("pfl", "holds"), [(2.0, "20.00 | yes"), (1.9, "19.00 | no")])
def test_a_bar_of_a_peer_is_its_time_over_ours(pfl: float, holds: str) -> None:
    found = kept({("w1", *schedule.OURS): entry(0.1), ("w1", *schedule.PFL): entry(pfl)})
    assert f"| W1: times pfl, CPU | at least 20 | {holds} |" in render_federated.bars(found)


@pytest.mark.parametrize(("ours", "holds"), [(1.3, "1.30 | yes"), (1.31, "1.31 | no")])
def test_a_bar_of_the_bare_loop_is_our_time_over_its(ours: float, holds: str) -> None:
    found = kept({("w1", *schedule.OURS): entry(ours), ("w1", *schedule.BARE): entry(1.0)})
    assert f"| W1: over the loop by hand, CPU | at most 1.3 | {holds} |" in render_federated.bars(found)


def test_two_workers_are_judged_by_the_clock() -> None:
    found = kept({("w2x", *schedule.OURS): entry(1.0, 1.0), ("w2x", *schedule.PAIR): entry(1.1, 0.5)})
    assert "| W2: 2 workers, times 1, wall | at least 1.8 | 2.00 | yes |" in render_federated.bars(found)


def test_what_was_not_measured_holds_nothing() -> None:
    shown = render_federated.bars(kept({("w1", *schedule.OURS): entry(1.0)}, epsilon={"error": "a | b"}))
    assert "| W1: times pfl, CPU | at least 20 |  | not measured |" in shown
    assert "importing torch (a / b) | at most 1.5 |  | not measured |" in shown


def test_a_figure_of_ours_is_held_to_its_bar() -> None:
    shown = render_federated.bars(kept({}, server={"value": 0.031}, epsilon={"value": 1.2}))
    assert "server's share of a round | at most 0.03 | 0.031 | no |" in shown
    assert "at most 1.5 | 1.200 | yes |" in shown


def test_a_method_that_does_not_run_is_shown_with_its_error() -> None:
    found = kept({("w1", *schedule.OURS): entry(1.0), ("w1", *schedule.PFL): {"error": "ValueError: a | b"}})
    assert "| pfl: FedAvg | does not run: ValueError: a / b |" in render_federated.table(found)


def test_the_page_keeps_what_stands_around_the_markers() -> None:
    page = f"a\n{render_federated.BEGIN}\nbefore\n{render_federated.END}\nb"
    shown = render_federated.inserted(page, kept({}))
    assert shown.startswith("a\n")
    assert shown.endswith(f"{render_federated.END}\nb")
    assert "before" not in shown


def test_the_least_counts_and_an_error_wipes_out_nothing() -> None:
    once = schedule.merged(schedule.merged({}, entry(2.0, 3.0)), entry(2.5, 2.5))
    assert once["seconds"] == {"cpu": 2.0, "wall": 2.5}
    assert once["repeats"] == 2
    failed = schedule.merged(once, {"error": "x"})
    assert failed["seconds"] == once["seconds"]
    assert (failed["error"], failed["repeats"]) == ("x", 2)


def test_workloads_measured_anew_replace_what_was_kept_of_them_and_nothing_else() -> None:
    before = kept(
        {("w1", *schedule.OURS): entry(1.0), ("w4", *schedule.OURS): entry(2.0), ("w4", *schedule.PFL): entry(3.0)}
    )
    now = kept({("w4", *schedule.OURS): entry(5.0), ("w4", *schedule.PFL): {}})
    found = schedule.joined(before, now, ["w4"])
    assert [row["seconds"]["cpu"] for row in found["rows"]] == [1.0, 5.0, 3.0]
    assert "In a later call of their own: W4, character LSTM" in render_federated.table(found)


def test_all_repeats_of_jobs_with_a_bar_come_before_any_other() -> None:
    order = list(schedule.turns(3))
    first = [job for job in schedule.JOBS if job.barred]
    assert order[: 3 * len(first)] == first * 3, "in turn"
    assert len(order) == 3 * len(schedule.JOBS)
    assert {job.key for job in order} == {job.key for job in schedule.JOBS}


def test_every_bar_has_its_jobs() -> None:
    keys = {job.key for job in schedule.JOBS}
    for bar in render_federated.BARS:
        assert {(bar.workload, *bar.over), (bar.workload, *bar.under)} <= keys


def test_the_first_round_is_warm_up_and_blocks_are_of_equal_length() -> None:
    marks = [(10.0, 20.0), (11.0, 22.0), (13.0, 23.0), (14.0, 24.0), (17.0, 27.0), (19.0, 28.0), (21.0, 30.0)]
    assert stopwatch.least_block(marks) == {"cpu": 1.5, "wall": 1.5}
    assert stopwatch.least_block([(5.0, 5.0), (7.0, 8.0)]) == {"cpu": 2.0, "wall": 3.0}


@pytest.fixture
def federations(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("federations")


@pytest.mark.parametrize(
    ("name", "spec", "shape", "outputs"),
    [
        ("w1", Logistic(), (1, 28, 28), 10),
        ("w2", EmnistCnn(), (1, 28, 28), 62),
        ("w3", SvhnCnn(), (3, 32, 32), 10),
        ("w4", CharLstm(), (80,), 80),
    ],
)
def test_the_nets_are_the_librarys(
    federations: Any, name: str, spec: Any, shape: tuple[int, ...], outputs: int
) -> None:
    measured, ours = federations.FEDERATIONS[name].model(), spec.build(shape, outputs)
    assert [p.shape for p in measured.parameters()] == [p.shape for p in ours.parameters()]


def test_the_titles_state_the_cohorts(federations: Any) -> None:
    for name, work in federations.FEDERATIONS.items():
        cohort = getattr(work, "cohort", None)
        assert cohort is None or f"cohort {cohort}" in render_federated.TITLES[name]


def test_the_expected_work_counts_short_batches_as_steps(federations: Any) -> None:
    work = federations.FEDERATIONS["w2"]
    assert work.expected(3) == federations.Work(3 * work.cohort * 2 * 6, 3 * work.cohort * 2 * 178)
    assert federations.Grid().expected(1 / 180) == federations.Work(35 * 25, 35 * 25 * 35)
