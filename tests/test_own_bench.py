"""What `make bench` calls a regression is one, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.own import compare

HERE = Path(__file__).parents[1] / "benchmarks" / "own"


def test_only_what_got_slower_by_more_than_the_tolerance_regressed() -> None:
    stored = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert compare.regressions({"a": 1.34, "b": 1.36, "c": 0.1, "new": 9.0}, stored) == ["b"]


def test_the_table_names_the_slower_the_new_and_the_missing() -> None:
    lines = compare.table({"a": 2.0, "new": 1.0}, {"a": 1.0, "gone": 1.0}).splitlines()
    assert lines[1].split() == ["a", "2.000", "1.000", "2.00", "SLOWER"]
    assert lines[2].split() == ["new", "1.000", "none"]
    assert "gone" in lines[3]
    assert "not measured" in lines[3]


def test_workload_and_kernel_count_at_their_least() -> None:
    assert compare.least([(3.0, 0.5), (2.0, 1.0)]) == 4.0


def test_the_baseline_knows_every_workload() -> None:
    file = HERE / "baseline.json"
    if not file.exists():
        pytest.skip("benchmarks/own/baseline.json: make bench-update has not been run")
    stored: dict[str, float] = json.loads(file.read_text("utf-8"))
    source = (HERE / "work.py").read_text("utf-8")
    assert stored
    assert all(f'"{name}": ' in source for name in stored)
    assert min(stored.values()) > 0
