"""Promise: a tracker and a section of the report are written outside, in a file or a package, and work like ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from tests.commands import federation, sordino

from sordino import codec
from sordino.report import ReportSection, TrackerBackend

OWN = '''
import json
from sordino.report import Axis, Chart, ReportSection, Series, Table, TrackerBackend

class Lines(TrackerBackend, kind="lines"):
    """Every round as a line of JSON."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "lines.jsonl").open("w")

    def log_figures(self, round_, values):
        self.file.write(json.dumps({"round": round_, **values}) + "\\n")

    def close(self):
        self.file.close()

class Clients(ReportSection, title="Clients of each run"):
    """How many clients each run had."""

    def text(self, runs):
        return f"{len(runs)} run <here>."

    def contents(self, runs):
        rows = tuple((run["name"], str(run["participation"]["population"])) for run in runs)
        line = Series("rounds", (0.0, 1.0), (0.0, 1.0))
        chart = Chart("c", "A line", "It rises.", Axis("x"), Axis("y"), (line,))
        return Table(("run", "clients"), rows, "Clients"), chart
'''


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "my_report.py"
    file.write_text(OWN)
    yield file
    TrackerBackend.members.pop("lines", None)
    ReportSection.members.pop("Clients of each run", None)


def test_a_tracker_and_a_section_of_a_file_are_used(own: Path, tmp_path: Path) -> None:
    out = tmp_path / "a"
    said = sordino("run", federation(tmp_path), "--out", out, "--track", "lines", "--with", own)
    assert said.code == 0, said.err
    lines = [json.loads(line) for file in tmp_path.rglob("lines.jsonl") for line in file.read_text().splitlines()]
    assert any("public/accuracy" in line for line in lines)
    assert "epsilon/models" in lines[-1]
    assert sordino("report", out, "--with", own, "--out", tmp_path / "r.html").code == 0
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "Clients of each run" in text
    assert "1 run &lt;here&gt;." in text
    assert 'id="section-0-c-t"' in text


def test_a_section_that_fails_is_one_sentence(own: Path, tmp_path: Path) -> None:
    own.write_text(OWN.replace('run["participation"]["population"]', "run[0]"))
    out = tmp_path / "a"
    assert sordino("run", federation(tmp_path), "--out", out).code == 0
    found = sordino("report", out, "--with", own, "--out", tmp_path / "r.html").sentence
    assert "report section 'Clients of each run', which fails (KeyError" in found


@pytest.mark.parametrize("group", ["sordino.trackers", "sordino.report_sections"])
def test_an_installed_package_offers_them_by_entry_points(
    own: Path, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(own.parent))
    point = EntryPoint("mine", "my_report", group)
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda **asked: EntryPoints([point] if asked["group"] == group else [])
    )
    codec.load_plugins.cache_clear()
    codec.load_plugins(group)
    assert "lines" in TrackerBackend.members
    assert "Clients of each run" in ReportSection.members
    codec.load_plugins.cache_clear()
    del sys.modules["my_report"]
