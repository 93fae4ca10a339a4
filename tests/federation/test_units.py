"""Promise: systemd finds nothing wrong with the units of `sordino federation new`, used as docs/deploy.md says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.commands import sordino
from tests.pages import ROOT, blocks

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
HOME = "/srv/sordino"
EDITED = ("SERVER:PORT", "server.example:8000")  # what the page has a silo's operator write


@pytest.fixture(params=["hospitals", "50% of $HOME, or so"])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's /srv/sordino, with what the page puts there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fed.toml").write_text(next(b.text for b in blocks(ROOT / "docs/deploy.md") if b.language == "toml"))
    assert sordino("federation", "new", request.param, "--from", "fed.toml").code == 0
    shutil.copytree(tmp_path / request.param / "silos" / "va", tmp_path, dirs_exist_ok=True)
    for unit in ("superlink.service", "gate.service"):
        shutil.move(tmp_path / request.param / "server" / unit, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "sordino").symlink_to("/bin/true")
    return tmp_path


def said(home: Path, *changes: tuple[str, str]) -> str:
    """What systemd says of the four units, each with `home` for /srv/sordino."""
    units = home / "units"
    units.mkdir(exist_ok=True)
    for file in home.glob("*.service"):
        text = file.read_text()
        for found, instead in ((HOME, str(home)), EDITED, *changes):
            text = text.replace(found, instead)
        (units / file.name).write_text(text)
    words = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(units.glob("*.service")))]
    quiet = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    done = subprocess.run(words, env=quiet, capture_output=True, text=True, check=False)
    assert len(list(units.iterdir())) == 4
    return done.stdout + done.stderr + (f"exit {done.returncode}" if done.returncode else "")


def test_systemd_finds_nothing_wrong_with_the_units(home: Path) -> None:
    assert said(home) == ""


@pytest.mark.parametrize("home", ["hospitals"], indirect=True)
def test_systemd_does_find_what_is_wrong(home: Path) -> None:
    assert "Unknown key" in said(home, ("Restart=always", "Restrat=always"))
    assert "not executable" in said(home, ("superlink.sh", "superlinks.sh"))


@pytest.mark.parametrize("home", ["hospitals"], indirect=True)
def test_a_unit_may_write_where_its_process_does_and_nowhere_else(home: Path) -> None:
    for file in home.glob("*.service"):
        lines = file.read_text().splitlines()
        assert {"ProtectSystem=strict", "PrivateTmp=yes", f"ReadWritePaths={HOME}", "User=sordino"} <= set(lines)
