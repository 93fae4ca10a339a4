"""docs/tuning.md, as a reader would follow it in an empty folder: its files are written, its commands are run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.commands import sordino

PAGE = (Path(__file__).parent.parent / "docs" / "tuning.md").read_text("utf-8")


def test_the_page_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = re.findall(r"^`(\S+\.toml)`:\n```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for name, text in files:
        Path(name).write_text(text)
    commands = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    assert (len(files), len(commands)) == (4, 11)
    for command in commands:
        words = shlex.split(command.replace("--workers 2", "--workers 1"))  # processes have a test of their own
        said = sordino(*words[1:])
        assert said.code == 0, (command, said.err)
    assert {path.name for path in Path("runs").iterdir()} == {"a", "best"}
    assert "all their events composed" in sordino("sweep", "private.toml", "--plan").out
