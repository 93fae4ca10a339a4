"""Promise: `make bench-gpu` runs to its end: on the simulated device with tiny nets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "device" / "bench.py"


@pytest.mark.simulated
def test_the_benchmark_measures_or_says_why_not(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--device", "sim", "--no-tests", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found, table = json.loads((tmp_path / "bench-gpu.json").read_text("utf-8")), (tmp_path / "bench-gpu.md").read_text()
    plain, paths = [row for row in found["steps"] if row["method"] == "plain"], found["engine"]
    assert len(found["steps"]) == 3 * len(plain) == 12
    assert all(row["ms"] > 0 for row in plain)
    assert all(row["batched / sequential"] > 0 for row in paths)
    assert all("ms" in row or row["skipped"] for row in found["steps"])
    assert "Simulated device: times mean nothing" in table
