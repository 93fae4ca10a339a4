"""Promise: the draft of an impact assessment states what the run knows, and marks what only people know."""

from __future__ import annotations

import json
from pathlib import Path

from tests.commands import sordino
from tests.runs.test_predict import config, run

POLICY = """
dataset = "north"
epsilon = 30.0
delta = 1e-3
unit = "user"
releases = ["local_noise"]
purpose = "readmission within 30 days"
"""


def test_facts_are_stated_and_blanks_are_marked(tmp_path: Path) -> None:
    out, policy = run(tmp_path, config(tmp_path, person=2)), tmp_path / "policy.toml"
    policy.write_text(POLICY)
    done = sordino("dpia", out, "--out", tmp_path / "dpia.md", "--policy", policy, "--json")
    assert done.code == 0
    text = (tmp_path / "dpia.md").read_text()
    made = json.loads((out / "certificate.json").read_text())
    assert "`sex`, `age`" in text
    assert "user level: all rows of one user in one silo" in text
    assert "readmission within 30 days" in text
    assert "**[ to be written: retention ]**" in text
    assert "Not private to publish" in text  # simulation noise
    assert all(assumption in text for assumption in made["assumptions"])
    assert json.loads(done.out)["blanks"] == text.count("to be written") > 5


def test_without_policies_purpose_and_retention_are_blanks(tmp_path: Path) -> None:
    out = run(tmp_path, config(tmp_path))
    assert sordino("dpia", out, "--out", tmp_path / "dpia.md").code == 0
    assert "[ to be written: retention of data and of the model ]" in (tmp_path / "dpia.md").read_text()
